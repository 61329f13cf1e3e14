"""Backend ``te-torch-kernels``: Transformer Engine's single kernels, its ``Linear`` and its GEMM, on cases of its own.

What ``te-torch`` does not reach through the quantizer alone:

* large tensors, stochastic and to nearest, built so that scales and codes lie on rounding boundaries;
* ``nvte_hadamard_transform`` of the core library (the package uses it inside; Python has no name for it);
* ``NVFP4Tensor.dequantize``, ``compute_amax``, ``swizzle_scales_for_gemm_`` and the recipe kernels for sharded
  weights (``nvfp4_2d_compute_partial_amax``, ``nvfp4_compute_per_block_scale``, ``nvfp4_fused_scale`` …);
* ``te.Linear`` under ``NVFP4BlockScaling()``, forward and backward: the operands of its three GEMMs, taken where it
  calls ``general_gemm``, and the three results;
* ``general_gemm`` of two given tensors.

The cases are the same on every machine.  Those of the stochastic rule that the device does not have are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends import _gpu, _package, te_torch
from nvfp4hw.backends.base import Case, Outputs, Refused
from nvfp4hw.backends.live_cases import kernel_cases

Array = np.ndarray[Any, Any]

_TEX = "transformer_engine_torch"
_DEQUANTIZED = {"deq_f32": "float32", "deq_bf16": "bfloat16", "deq_f16": "float16"}
_BFLOAT16 = 6  # of the core library's NVTEDType
_UNQUANTIZED = 0  # of its NVTEScalingMode
_ROWWISE_DATA = 0  # of its NVTETensorParam


class TransformerEngineKernels(te_torch.TransformerEngine):
    """One method for each kind of case."""

    name = "te-torch-kernels"
    features = frozenset(
        ("quantize", "hadamard", "dequantize", "amax", "swizzle", "recipe", "linear", "gemm")
        + ("float32", "float16", "bfloat16", "uint8", "1x16", "16x16", "row", "col", "rht", "given-amax", "stochastic")
    )
    uses = (
        "transformer_engine.pytorch:NVFP4Quantizer",
        _TEX,
        "transformer_engine.pytorch:Linear",
        "transformer_engine.pytorch.module.linear:general_gemm",
    )

    def cases(self, suite: str) -> Iterable[Case]:
        """The backend's own; every suite has all of them."""
        return kernel_cases()

    def quantize(self, case: Case) -> Outputs:
        """The outputs of one case.

        Raises Refused for what the package, or its build for this device, does not do; RuntimeError when the
        package is not available.
        """
        self._objects()
        if case.fields.get("stochastic", self.stochastic_rule) != self.stochastic_rule:
            raise Refused(f"{_gpu.said(self.capability)} rounds stochastically by the rule {self.stochastic_rule}")
        return getattr(self, f"_{case.kind}")(case)

    @property
    def _quantizer(self) -> Any:
        return self._objects()[0]

    @property
    def _tex(self) -> Any:
        return self._objects()[1]

    def _quantize(self, case: Case) -> Outputs:
        inner = te_torch.TransformerEngineTorch()
        inner.refused = self.refused
        return inner.quantize(case)

    def _hadamard(self, case: Case) -> Outputs:
        x = _gpu.to_gpu(case.x)
        out = _gpu.filled((x.shape[1], x.shape[0]), "bfloat16", te_torch.UNWRITTEN)
        library = _library()
        with self._running() as lines, _core_tensor(library, x) as source, _core_tensor(library, out) as target:
            stream = ctypes.c_void_p(_gpu.stream())
            library.nvte_hadamard_transform(source, target, 0, case.rht_t.sign_mask, stream)
        return self._written(case, {"rht_t": _gpu.to_numpy(out)}, lines)

    def _dequantize(self, case: Case) -> Outputs:
        import torch

        with self._running():
            tensor = self._given(
                case.data["packed"], case.data["scales"], case.data["amax"], case.data.get("e4m3_max", 448)
            )
            found = {name: tensor.dequantize(dtype=getattr(torch, dtype)) for name, dtype in _DEQUANTIZED.items()}
        return {name: _gpu.to_numpy(values) for name, values in found.items()}

    def _given(self, packed: Array, scales: Array, amax: Any, e4m3_max: int = 448) -> Any:
        """A rowwise tensor of the package with these codes, compact scales and amax."""
        import torch

        rows, columns = packed.shape[0], packed.shape[1] * 2
        amax = np.array(amax, np.float32)
        options: dict[str, Any] = {"row_scaled_nvfp4": True} if amax.ndim else {}
        if e4m3_max != 448:
            options |= {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": e4m3_max}
        tensor = self._quantizer(rowwise=True, columnwise=False, **options).make_empty(
            (rows, columns), dtype=torch.bfloat16, device=_gpu.DEVICE
        )
        for name, array in (("data", packed), ("scale_inv", nv.layout.pad(scales))):
            getattr(tensor, f"_rowwise_{name}").copy_(_gpu.to_gpu(array))
        tensor._amax_rowwise.copy_(_gpu.to_gpu(amax.reshape(-1)))
        return tensor

    def _amax(self, case: Case) -> Outputs:
        amax = _gpu.to_gpu(np.zeros(1, np.float32))
        with self._running():
            self._tex.compute_amax(_gpu.to_gpu(case.x), amax)
        return {"amax": _gpu.to_numpy(amax).reshape(())}

    def _swizzle(self, case: Case) -> Outputs:
        rows, columns = case.x.shape
        with self._running():
            tensor = self._given(np.zeros((rows, columns * 8), np.uint8), case.x, np.float32(1))
            self._tex.swizzle_scales_for_gemm_(tensor)
        return {
            "scales_swizzled": _package.to_bytes(tensor._rowwise_scale_inv).reshape(
                nv.layout.padded_shape(rows, columns)
            )
        }

    def _recipe(self, case: Case) -> Outputs:
        if case.x.ndim == 1:
            scales = _gpu.to_gpu(np.zeros_like(case.x))
            with self._running():
                self._tex.nvfp4_compute_global_scale(_gpu.to_gpu(case.x), scales)
            return {"global_scales": _gpu.to_numpy(scales)}
        return self._sharded_weight(case)

    def _sharded_weight(self, case: Case) -> Outputs:
        """The steps by which a distributed optimizer quantizes its range of a weight, in their order."""
        rows, columns = case.x.shape
        start, length = case.data["start"], case.data["length"]
        tiles = rows // 16, columns // 16
        padded, padded_t = nv.layout.padded_shape(rows, tiles[1]), nv.layout.padded_shape(columns, tiles[0])

        def floats(*shape: int) -> Any:
            return _gpu.filled(shape, "float32")

        def bytes_(*shape: int) -> Any:
            return _gpu.filled(shape, "uint8")

        whole = _gpu.to_gpu(case.x.reshape(-1))
        piece = whole[start : start + length].clone()
        amax = _gpu.to_gpu(np.array(case.data["amax"], np.float32).reshape(1))
        full, part, tensor_amax, copied = floats(*tiles), floats(*tiles), floats(1), floats(1)
        scale, fused, whole_scale = floats(*tiles), floats(*tiles), floats(1)
        expanded, target, transposed = bytes_(*padded), bytes_(*padded), bytes_(*padded_t)
        codes, codes_t = bytes_(rows, columns // 2), bytes_(columns, rows // 2)
        own = codes.view(-1)[start // 2 : (start + length + 1) // 2]  # a rank's bytes of the whole
        tex = self._tex
        with self._running() as lines:
            tex.nvfp4_2d_compute_partial_amax(whole, full, rows, columns, 0, 16)
            tex.nvfp4_2d_compute_partial_amax(piece, part, rows, columns, start, 16)
            tex.compute_amax(whole.view(rows, columns), tensor_amax)
            tex.nvfp4_compute_global_scale(amax, whole_scale)
            tex.nvfp4_compute_per_block_scale(full, scale, amax)
            tex.nvfp4_expand_scale_to_fp8(scale, expanded, tiles[0], tiles[1], padded[0], 16)
            tex.nvfp4_fused_scale(full, amax, fused, target, copied, tiles[0], tiles[1], padded[0], 16)
            tex.nvfp4_2d_scale_transpose(expanded, transposed, tiles[0], tiles[1])
            if not self._too_loud(case):
                tex.nvfp4_2d_partial_cast(piece, own, scale, whole_scale, rows, columns, start, 16)
                tex.nvfp4_data_transpose(codes, out=codes_t)
        outputs = {
            "block_amax": _gpu.to_numpy(full),
            "partial_block_amax": _gpu.to_numpy(part),
            "tensor_amax": _gpu.to_numpy(tensor_amax).reshape(()),
            "global_scale": _gpu.to_numpy(whole_scale),
            "per_block_scale": _gpu.to_numpy(scale),
            "fused_per_block_scale": _gpu.to_numpy(fused),
            "amax": _gpu.to_numpy(copied).reshape(()),
            "expand_scale": _package.to_bytes(expanded)[:rows, : tiles[1]].copy(),
            "fused_target_scale": _package.to_bytes(target)[:rows, : tiles[1]].copy(),
            "scale_transpose": _package.to_bytes(transposed)[:columns, : tiles[0]].copy(),
            "partial_cast": _package.to_bytes(codes).reshape(-1),
            "data_transpose": _package.to_bytes(codes_t),
        }
        if self._too_loud(case) or (lines and not outputs["partial_cast"].any()):
            said = "; ".join(lines) or "it would print a line a thread"
            self.refused[case.id] = f"partial_cast, data_transpose: no codes on {_gpu.said(self.capability)}: {said}"
            del outputs["partial_cast"], outputs["data_transpose"]
        return outputs

    def _linear(self, case: Case) -> Outputs:
        """y, dx and dw of a layer without bias, and the operands of its GEMMs as they were handed over."""
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import NVFP4BlockScaling

        w, dy = (_gpu.to_gpu(case.data[name]) for name in ("w", "dy"))
        x = _gpu.to_gpu(case.x).requires_grad_()
        rng: nv.Philox = case.data["rng"]
        with self._running(), torch.enable_grad(), _operands() as operands:
            layer = te.Linear(w.shape[1], w.shape[0], bias=False, params_dtype=w.dtype, device=_gpu.DEVICE)
            with torch.no_grad():
                layer.weight.copy_(w)
            with te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
                y = layer(x)
            te_torch.seed((rng.seed, rng.offset))
            y.backward(dy)
        outputs = {"y": _gpu.to_numpy(y), "dx": _gpu.to_numpy(x.grad), "dw": _gpu.to_numpy(layer.weight.grad)}
        shapes = {"x": case.x.shape, "w": case.data["w"].shape, "dy": case.data["dy"].shape}
        for (tensor, suffix), found in operands.items():
            for name, array in te_torch.side(found, suffix, shapes[tensor]).items():
                outputs[f"{tensor}.{name}"] = array
        return outputs

    def _gemm(self, case: Case) -> Outputs:
        """``general_gemm(b, a)`` with layout TN, which is a·bᵀ."""
        import torch

        data = case.data
        gemm = self._objects()[3]
        with self._running():
            a = self._given(data["a_packed"], data["a_scales"], data["a_amax"])
            b = self._given(data["b_packed"], data["b_scales"], data["b_amax"])
            out, *_ = gemm(b, a, out_dtype=getattr(torch, data["out_dtype"]), layout="TN")
        return {"d": _gpu.to_numpy(out)}


# ---- what the layer hands to its GEMMs ---------------------------------------------------------------------

#: layout of a call -> its operands (tensor, suffix), A before B
_LAYOUTS = {
    "TN": (("w", ""), ("x", "")),
    "NN": (("w", "_t"), ("dy", "")),
    "NT": (("x", "_t"), ("dy", "_t")),
}


class _Copied:
    """The arrays of an operand, copied while they are whole: the layer frees and reuses its tensors."""

    def __init__(self, tensor: Any, suffix: str) -> None:
        for name in te_torch._SIDES[suffix]:
            setattr(self, name, getattr(tensor, name).detach().clone())
        self._with_gemm_swizzled_scales = bool(getattr(tensor, "_with_gemm_swizzled_scales", False))


@contextmanager
def _operands() -> Iterator[dict[tuple[str, str], _Copied]]:
    """The operands of every GEMM that ``te.Linear`` calls meanwhile, by tensor and direction."""
    from transformer_engine.pytorch.module import linear

    found: dict[tuple[str, str], _Copied] = {}
    real: Callable[..., Any] = linear.general_gemm

    def recording(a: Any, b: Any, *arguments: Any, **named: Any) -> Any:
        for operand, place in zip((a, b), _LAYOUTS[named.get("layout", "TN")], strict=True):
            found[place] = _Copied(operand, place[1])
        return real(a, b, *arguments, **named)

    linear.general_gemm = recording
    try:
        yield found
    finally:
        linear.general_gemm = real


# ---- the core library's C interface ------------------------------------------------------------------------


class _Shape(ctypes.Structure):
    _fields_ = [("data", ctypes.c_size_t * 15), ("ndim", ctypes.c_size_t)]


class _BasicTensor(ctypes.Structure):
    _fields_ = [("data_ptr", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", _Shape)]


def _library() -> Any:
    """The core library, which the extension has loaded into this process."""
    from transformer_engine.common import _get_shared_object_file

    library = ctypes.CDLL(str(_get_shared_object_file("core")))
    library.nvte_create_tensor.restype = ctypes.c_void_p
    library.nvte_create_tensor.argtypes = [ctypes.c_int]
    library.nvte_destroy_tensor.argtypes = [ctypes.c_void_p]
    library.nvte_set_tensor_param_v2.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    library.nvte_hadamard_transform.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return library


@contextmanager
def _core_tensor(library: Any, tensor: Any) -> Iterator[ctypes.c_void_p]:
    """A handle of the core library for a bfloat16 matrix."""
    shape = _Shape((ctypes.c_size_t * 15)(*tensor.shape), tensor.dim())
    described = _BasicTensor(tensor.data_ptr(), _BFLOAT16, shape)
    handle = ctypes.c_void_p(library.nvte_create_tensor(_UNQUANTIZED))
    try:
        library.nvte_set_tensor_param_v2(handle, _ROWWISE_DATA, ctypes.byref(described), ctypes.sizeof(described))
        yield handle
    finally:
        library.nvte_destroy_tensor(handle)


BACKEND = TransformerEngineKernels
