"""Dumps of live objects: what a quantizer of another package returned, as a :class:`nvfp4ref.dump.Dump`.

    dump = to_dump(torchao_tensor, x)
    nv.save_dump("w.npz", dump)

Objects are known by their attributes, so no package is imported here and other versions with the same
attributes work.  Only containers are undone: bytes, nibbles and scale layouts stay as they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from nvfp4ref import arrays, dump, e2m1, layout

__all__ = ["to_dump"]

Array = np.ndarray[Any, Any]
Fields = dict[str, Any]


def to_dump(obj: Any, x: Any = None) -> dump.Dump:
    """The dump of a live object.

    Args:
        obj: one of

            * an ``nvfp4ref.NVFP4Tensor`` or an object with its ``packed``, ``scales`` and ``amax``;
            * a Transformer Engine ``NVFP4Tensor`` (PyTorch), an ``NVFP4TensorRef`` of its Python reference,
              or a ``ScaledTensor1x`` or ``2x`` of its JAX part;
            * a torchao ``NVFP4Tensor``;
            * what ModelOpt's ``NVFP4QTensor.quantize`` returned (the tensor alone has no scales), or the
              ``weight``, ``weight_scale`` and ``weight_scale_2`` of an exported checkpoint;
            * the dictionary of a compressed-tensors compressor;
            * a JAX pair (codes, scales), one level, or triple (codes, scales, amax), global scale amax/2688.
        x: the input, any float array of (…, K); without it the dump can be read but not judged.

    Arrays that the object does not have are absent: torchao, ModelOpt and compressed-tensors keep a global
    scale and no amax.

    Raises TypeError for an object that is none of these, ValueError (DumpError) when its arrays do not fit
    together or do not fit x.
    """
    if isinstance(obj, dump.Dump):
        return obj
    for kind in _KINDS:
        if kind.matches(obj):
            fields = kind.fields(obj)
            if x is not None:
                fields["x"] = _rows(arrays.narrow(arrays.as_array(x)))
                fields.pop("x_dtype", None)
            return dump.Dump(**{name: value for name, value in fields.items() if value is not None})
    raise TypeError(
        f"cannot make a dump of {_described(obj)}; known are {'; '.join(kind.description for kind in _KINDS)}"
    )


def _described(obj: Any) -> str:
    if isinstance(obj, Mapping):
        return f"a dictionary with keys {', '.join(sorted(map(str, obj))) or '(none)'}"
    if isinstance(obj, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in obj) or 'nothing'}"
    name = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if hasattr(obj, "_quantized_data"):
        return f"{name} without its scales (give the whole tuple that quantize returned)"
    return name


# ---- arrays ------------------------------------------------------------------------------------------------


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1]) if array.ndim != 2 and array.ndim else array


def _numpy(value: Any) -> Array:
    """A torch, JAX or NumPy array as NumPy, one-byte types as their bytes."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.element_size() == 1:
            import torch

            value = value.contiguous().view(torch.uint8)
        return np.array(value.numpy())
    array = np.asarray(value)
    return array.view(np.uint8) if array.dtype.itemsize == 1 else array


def _bytes(value: Any) -> Array:
    """uint8 (R, …)."""
    return _rows(_numpy(value))


def _packed(value: Any) -> Array:
    """Two codes a byte; an array of one E2M1 code an element is packed."""
    unpacked = "float4" in str(value.dtype) and "x2" not in str(value.dtype)
    return e2m1.pack(_bytes(value) & np.uint8(15)) if unpacked else _bytes(value)


def _float32(value: Any) -> Array:
    """float32 (n,)."""
    return _numpy(value).astype(np.float32).reshape(-1)


def _dtype_name(dtype: Any) -> str | None:
    """The meta field x_dtype for a torch or NumPy dtype, None for one that no dump has."""
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float32", "float16", "bfloat16") else None


def _producer(distribution: str, value: Any) -> Fields:
    device = getattr(value, "device", None)
    found = {"name": distribution, "device": str(device() if callable(device) else device or "cpu")}
    try:
        return {**found, "version": metadata.version(distribution)}
    except metadata.PackageNotFoundError:
        return found


# ---- one function for each kind of object: its fields of the dump ------------------------------------------


def _from_own(obj: Any) -> Fields:
    """nvfp4ref's tensor, or anything with its attributes (arrays may be JAX's)."""
    return {
        "packed": _bytes(obj.packed),
        "scales": _bytes(obj.scales),
        "amax": _float32(obj.amax),
        "block": tuple(getattr(obj, "block", (1, 16))),
        "arithmetic": getattr(obj, "arithmetic", None),
        "producer": {"name": "nvfp4ref", "version": nv.__version__},
    }


def _from_te(obj: Any) -> Fields:
    """Transformer Engine, PyTorch; how it was quantized is said by the tensor and its quantizer."""
    quantizer = getattr(obj, "_quantizer", None)
    return {
        **_te_sides(obj, ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"), ""),
        **_te_sides(obj, ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"), "_t"),
        "x_dtype": _dtype_name(getattr(obj, "_dtype", None)),
        "block": (16, 16) if getattr(quantizer, "with_2d_quantization", False) else (1, 16),
        "rounding": "stochastic" if getattr(quantizer, "stochastic_rounding", False) else "nearest-even",
        "rht_t": _te_transform(quantizer, getattr(quantizer, "rht_matrix_random_sign_mask_t", None)),
        "scale_layout": "swizzled" if getattr(obj, "_with_gemm_swizzled_scales", False) else "compact",
        "arithmetic": _te_arithmetic("te", obj, quantizer, bool(getattr(obj, "_row_scaled_nvfp4", False))),
        "producer": _producer("transformer-engine", _first(obj._rowwise_data, obj._columnwise_data)),
    }


def _from_te_reference(obj: Any) -> Fields:
    """Transformer Engine's Python reference: compact scales of float8_e4m3fn."""
    quantizer = getattr(obj, "_quantizer", None)
    signs = None if getattr(quantizer, "with_random_sign_mask", True) else 0
    return {
        **_te_sides(obj, ("data", "scale", "global_amax_row"), ""),
        **_te_sides(obj, ("data_t", "scale_t", "global_amax_col"), "_t"),
        "x_dtype": _dtype_name(getattr(obj, "dtype", None)),
        "block": tuple(getattr(quantizer, "quant_tile_shape", (1, 16))),
        "rht_t": _te_transform(quantizer, signs),
        "arithmetic": _te_arithmetic(
            "te-reference", obj, quantizer, bool(getattr(quantizer, "row_scaled_nvfp4", False))
        ),
        "producer": _producer("transformer-engine", _first(obj.data, obj.data_t)),
    }


def _te_sides(obj: Any, names: tuple[str, str, str], suffix: str) -> Fields:
    """One direction's arrays, none when it has no data."""
    data, scales, amax = (getattr(obj, name, None) for name in names)
    if data is None:
        return {}
    found = {f"packed{suffix}": _bytes(data), f"scales{suffix}": _bytes(scales)}
    return found if amax is None else {**found, f"amax{suffix}": _float32(amax)}


def _te_transform(quantizer: Any, sign_mask: int | None) -> bool | Fields:
    """The transform of the columnwise output, the only one it is applied to."""
    if not getattr(quantizer, "with_rht", False):
        return False
    return True if sign_mask is None else {"size": 16, "sign_mask": int(sign_mask)}


def _te_arithmetic(preset: str, obj: Any, quantizer: Any, row_scaled: bool) -> Fields:
    """The preset with what the object declares: row-scaled, 4over6 with its error and E4M3 maximum."""
    fields: Fields = {"name": preset}
    if row_scaled:
        fields["row_scaled"] = True
    if getattr(obj, "_nvfp4_use_4over6", False) or getattr(obj, "nvfp4_use_4over6", False):
        fields["four_over_six"] = str(getattr(quantizer, "nvfp4_4over6_err_mode", "MAE"))
        fields["e4m3_max"] = int(_first(*(getattr(obj, f"{p}nvfp4_e4m3_max", None) for p in ("_", "")), 448))
        fields["four_over_six_fast_error"] = bool(getattr(quantizer, "nvfp4_4over6_err_use_fast_math", False))
    return fields


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _from_te_jax(obj: Any) -> Fields:
    """One direction of Transformer Engine's JAX part.

    On the CPU its pure-JAX quantizer made it (preset te-jax), elsewhere its CUDA kernels (te).
    """
    columnwise = bool(getattr(obj, "is_colwise", False))
    suffix = "_t" if columnwise else ""
    mode = getattr(obj, "scaling_mode", "")
    producer = _producer("transformer-engine", obj.data)
    on_cpu = "cpu" in producer["device"].lower()
    return {
        f"packed{suffix}": _packed(obj.data),
        f"scales{suffix}": _bytes(obj.scale_inv),
        f"amax{suffix}": None if obj.amax is None else _float32(obj.amax),
        f"rht{suffix}": bool(getattr(obj, "has_rht_applied", False)),
        "x_dtype": _dtype_name(np.dtype(obj.dq_dtype).name) if hasattr(obj, "dq_dtype") else None,
        "block": (16, 16) if "2D" in getattr(mode, "name", str(mode)) else (1, 16),
        "arithmetic": "te-jax" if on_cpu else "te",
        "producer": producer,
    }


def _from_te_jax_2x(obj: Any) -> Fields:
    return {**_from_te_jax(obj.colwise_tensor), **_from_te_jax(obj.rowwise_tensor)}


def _from_torchao(obj: Any) -> Fields:
    """torchao: scales may be swizzled, and without a per-tensor scale there is one level."""
    data, scale, whole = obj.qdata, obj.scale, obj.per_tensor_scale
    if data.stride(-2) < data.stride(-1):  # a transposed view
        data, scale = data.transpose(-2, -1), scale.transpose(-2, -1)
    if whole is not None and whole.numel() != 1:
        raise ValueError(
            f"this torchao tensor has {whole.numel()} per-tensor scales, one an expert, and a dump holds one "
            "tensor; dump the experts one by one"
        )
    swizzled = bool(getattr(obj, "is_swizzled_scales", False))
    packed, scales = _bytes(data), _bytes(scale)
    if swizzled:
        scales = scales.reshape(layout.padded_shape(packed.shape[0], packed.shape[1] // 8))
    return {
        "packed": packed,
        "scales": scales,
        **({} if whole is None else {"global_scale": _float32(whole), "global_scale_form": "decode"}),
        "x_dtype": _dtype_name(getattr(obj, "orig_dtype", None)),
        "scale_layout": "swizzled" if swizzled else "compact",
        "arithmetic": {"name": "torchao", "global_scale": "none"} if whole is None else "torchao",
        "producer": _producer("torchao", data),
    }


def _from_modelopt(obj: tuple[Any, Any, Any]) -> Fields:
    tensor, scales, whole = obj
    dtype = getattr(tensor, "metadata", {}).get("dtype")
    return {**_modelopt(tensor._quantized_data, scales, whole), "x_dtype": _dtype_name(dtype)}


def _from_modelopt_export(obj: Mapping[str, Any]) -> Fields:
    return _modelopt(obj["weight"], obj["weight_scale"], obj["weight_scale_2"])


def _modelopt(data: Any, scales: Any, whole: Any) -> Fields:
    return {
        "packed": _bytes(data),
        "scales": _bytes(scales),
        "global_scale": _float32(whole),
        "global_scale_form": "decode",
        "arithmetic": "modelopt",
        "producer": _producer("nvidia-modelopt", data),
    }


def _from_compressed_tensors(obj: Mapping[str, Any]) -> Fields:
    return {
        "packed": _bytes(obj["weight_packed"]),
        "scales": _bytes(obj["weight_scale"]),
        "global_scale": _float32(obj["weight_global_scale"]),
        "global_scale_form": "encode",
        "arithmetic": "compressed-tensors",
        "producer": _producer("compressed-tensors", obj["weight_packed"]),
    }


def _from_jax(obj: tuple[Any, ...]) -> Fields:
    codes, scales, *amax = obj
    return {
        "packed": _packed(codes),
        "scales": _bytes(scales),
        "amax": _float32(amax[0]) if amax else None,
        "arithmetic": "jax-nn" if amax else {"name": "jax-nn", "global_scale": "none"},
        "producer": _producer("jax", codes),
    }


# ---- which object is which ---------------------------------------------------------------------------------


class _Kind(NamedTuple):
    description: str
    matches: Callable[[Any], bool]
    fields: Callable[[Any], Fields]


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda obj: not isinstance(obj, (Mapping, tuple)) and all(hasattr(obj, name) for name in names)


def _has_keys(*names: str) -> Callable[[Any], bool]:
    return lambda obj: isinstance(obj, Mapping) and all(name in obj for name in names)


def _is_modelopt(obj: Any) -> bool:
    return isinstance(obj, tuple) and len(obj) == 3 and hasattr(obj[0], "_quantized_data")


def _is_jax(obj: Any) -> bool:
    """(codes, scales) or (codes, scales, amax), the codes unpacked float4_e2m1fn or packed bytes."""
    if not isinstance(obj, tuple) or len(obj) not in (2, 3):
        return False
    if not all(hasattr(item, "dtype") and hasattr(item, "shape") for item in obj):
        return False
    codes, scales = (str(item.dtype) for item in obj[:2])
    return codes in ("float4_e2m1fn", "uint8") and scales in ("float8_e4m3fn", "uint8")


_KINDS = (
    _Kind("an nvfp4ref tensor (packed, scales, amax)", _has("packed", "scales", "amax"), _from_own),
    _Kind(
        "a Transformer Engine NVFP4Tensor (_rowwise_data, _rowwise_scale_inv, …)",
        _has("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data"),
        _from_te,
    ),
    _Kind(
        "an NVFP4TensorRef of its Python reference (data, scale, data_t, …)",
        _has("data", "scale", "data_t", "scale_t", "global_amax_row"),
        _from_te_reference,
    ),
    _Kind(
        "a ScaledTensor2x of its JAX part (rowwise_tensor, colwise_tensor)",
        _has("rowwise_tensor", "colwise_tensor"),
        _from_te_jax_2x,
    ),
    _Kind("a ScaledTensor1x of it (data, scale_inv, amax)", _has("data", "scale_inv", "amax"), _from_te_jax),
    _Kind("a torchao NVFP4Tensor (qdata, scale)", _has("qdata", "scale", "per_tensor_scale"), _from_torchao),
    _Kind("the tuple (NVFP4QTensor, scales, global scale) of ModelOpt", _is_modelopt, _from_modelopt),
    _Kind(
        "a dictionary with ModelOpt's weight, weight_scale, weight_scale_2",
        _has_keys("weight", "weight_scale", "weight_scale_2"),
        _from_modelopt_export,
    ),
    _Kind(
        "a dictionary with compressed-tensors' weight_packed, weight_scale, weight_global_scale",
        _has_keys("weight_packed", "weight_scale", "weight_global_scale"),
        _from_compressed_tensors,
    ),
    _Kind("a JAX tuple (codes, scales) or (codes, scales, amax)", _is_jax, _from_jax),
)
