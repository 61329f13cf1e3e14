"""What the oracle says to a case: every output that a backend may return, computed when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case
from nvfp4ref import blocks, hadamard, linear, partial_cast
from nvfp4ref.fp32 import to_bfloat16, to_float16

Array = np.ndarray[Any, Any]

_VALUE_DTYPES: dict[str, Any] = {"deq_f32": np.float32, "deq_bf16": ml_dtypes.bfloat16, "deq_f16": np.float16}


class Expectation:
    """The oracle's outputs for one case under one arithmetic.

    Args:
        case: the question.
        arithmetic: the preset to judge by; ``case.arithmetic`` beats it, ``case.fields`` change it.
    """

    def __init__(self, case: Case, arithmetic: str | nv.Arithmetic) -> None:
        self.case = case
        self.arithmetic = nv.arithmetic(case.arithmetic or arithmetic, **case.fields)

    def output(self, name: str) -> Array:
        """The expected output of that name.  Raises KeyError when the oracle has no such output."""
        return _KINDS[self.case.kind](self, name)

    @cached_property
    def rowwise(self) -> nv.NVFP4Tensor:
        """The oracle's rowwise result."""
        return nv.quantize(self.case.x, amax=self.case.amax, **self._how("rng"))

    @cached_property
    def columnwise(self) -> nv.NVFP4Tensor:
        """The oracle's columnwise result: of the transpose, after its Hadamard transform."""
        case = self.case
        return nv.quantize(case.x, axis=0, rht=case.rht_t, amax=case.amax_t, **self._how("rng_t"))

    def _how(self, state: str) -> dict[str, Any]:
        how: dict[str, Any] = {"block": self.case.block, "arithmetic": self.arithmetic}
        if self.case.rounding == "stochastic":
            how |= {"rounding": "stochastic", "rbits": self.case.data[state]}
        return how


# ---- quantize ----------------------------------------------------------------------------------------------

_OF_TENSOR: dict[str, Callable[[nv.NVFP4Tensor], Array]] = {
    "packed": lambda q: q.packed,
    "scales": lambda q: q.scales,
    "amax": lambda q: q.amax,
    "scaled": lambda q: q.steps.scaled,
    "err46": lambda q: np.stack([q.steps.err4, q.steps.err6], axis=-1),  # type: ignore[list-item]
    "scales_swizzled": lambda q: q.swizzled_scales,
    **{name: lambda q, dtype=dtype: nv.dequantize(q, dtype) for name, dtype in _VALUE_DTYPES.items()},  # type: ignore[misc]
}


def _quantize(expected: Expectation, name: str) -> Array:
    if name in ("rbits", "rbits_t"):
        return _words(expected.case, name)
    if name == "rht_t":
        return hadamard.transform(expected.case.x, expected.case.rht_t, axis=0)
    side = expected.columnwise if name.endswith("_t") else expected.rowwise
    return _OF_TENSOR[name.removesuffix("_t")](side)


def _words(case: Case, name: str) -> Array:
    """The random words of one direction, from the generator's state."""
    axis, state = (0, "rng_t") if name.endswith("_t") else (-1, "rng")
    philox: nv.Philox = case.data[state]
    return philox.words(
        case.x.shape, axis, dtype=case.x.dtype.name, block=case.block, rht=case.rht_t is not None
    )


# ---- one step only -----------------------------------------------------------------------------------------


def _half_of_e2m1(codes: Array) -> Array:
    return nv.e2m1.decode(codes).astype(np.float16)


def _half_of_e4m3(codes: Array) -> Array:
    return to_float16(nv.e4m3.decode(codes))


def _bfloat16_of_e8m0(codes: Array) -> Array:
    return to_bfloat16(nv.e8m0.decode(codes))


#: kind of a bare conversion -> its output, and the oracle's function
_CODECS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "e2m1": ("codes", nv.e2m1.encode),
    "e2m1-pairs": ("packed", lambda x: nv.e2m1.pack(nv.e2m1.encode(x))),
    "e2m1-decode": ("values", _half_of_e2m1),
    "e4m3": ("bytes", nv.e4m3.encode),
    "e4m3-decode": ("values", _half_of_e4m3),
    "e8m0-ceil": ("bytes", lambda x: nv.e8m0.encode(x, "ceil")),
    "e8m0-floor": ("bytes", lambda x: nv.e8m0.encode(x, "floor")),
    "e8m0-decode": ("values", _bfloat16_of_e8m0),
}


def _codec(expected: Expectation, name: str) -> Array:
    output, convert = _CODECS[expected.case.kind]
    return {output: convert}[name](expected.case.x)


def _amax(expected: Expectation, name: str) -> Array:
    return {"amax": blocks.tensor_amax}[name](expected.case.x)


def _hadamard(expected: Expectation, name: str) -> Array:
    return {"rht_t": hadamard.transform}[name](expected.case.x, expected.case.rht_t, 0)


def _hadamard_sums(expected: Expectation, name: str) -> Array:
    """Raw accumulators of vectors of 16, one a row."""
    vectors = np.ascontiguousarray(expected.case.x.astype(np.float32).T)
    return {"sums": hadamard.accumulate}[name](vectors, expected.case.rht_t).T


def _dequantize(expected: Expectation, name: str) -> Array:
    data = expected.case.data
    q = nv.NVFP4Tensor.from_arrays(
        data["packed"], data["scales"], data["amax"], arithmetic=expected.arithmetic
    )
    return nv.dequantize(q, _VALUE_DTYPES[name])


def _swizzle(expected: Expectation, name: str) -> Array:
    return {"scales_swizzled": nv.layout.swizzle}[name](expected.case.x)


class _Recipe:
    """The partial-cast helpers of Transformer Engine's distributed optimizer, each output a method."""

    def __init__(self, x: Array, data: Mapping[str, Any]) -> None:
        self.x, self.data = x, data

    @property
    def _piece(self) -> Array:
        start = self.data["start"]
        return self.x.reshape(-1)[start : start + self.data["length"]]

    def block_amax(self) -> Array:
        return partial_cast.tile_amax(self.x.reshape(-1), self.x.shape)

    def partial_block_amax(self) -> Array:
        return partial_cast.tile_amax(self._piece, self.x.shape, self.data["start"])

    def tensor_amax(self) -> Array:
        return blocks.tensor_amax(self.x)

    def amax(self) -> Array:
        return np.asarray(self.data["amax"])

    def global_scale(self) -> Array:
        return partial_cast.global_scale(self.data["amax"]).reshape(1)

    def global_scales(self) -> Array:
        return partial_cast.global_scale(self.x)

    def per_block_scale(self) -> Array:
        amax = self.data["block_amax"] if "block_amax" in self.data else self.block_amax()
        return partial_cast.block_scale(amax, self.data["amax"])

    fused_per_block_scale = per_block_scale

    def scale_bytes(self) -> Array:
        return nv.e4m3.encode(self.per_block_scale())

    def expand_scale(self) -> Array:
        rows, columns = self.x.shape
        return partial_cast.expand_scale(self.per_block_scale(), rows)[:rows, : columns // 16]

    fused_target_scale = expand_scale

    def _codes(self) -> Array:
        scale, whole = self.per_block_scale(), self.global_scale().reshape(())
        return partial_cast.partial_cast(self._piece, scale, whole, self.x.shape, self.data["start"])

    def partial_cast(self) -> Array:
        return self._codes().reshape(-1)

    def data_transpose(self) -> Array:
        return nv.layout.transpose_packed(self._codes())

    def scale_transpose(self) -> Array:
        return nv.layout.transpose_tile_scales(self.expand_scale())

    def alpha_amax2(self) -> Array:
        return partial_cast.alpha(self.data["amax"], self.data["amax"]).reshape(1)


def _recipe(expected: Expectation, name: str) -> Array:
    recipe = _Recipe(expected.case.x, expected.case.data)
    if name.startswith("_") or not hasattr(recipe, name):
        raise KeyError(name)
    output: Array = getattr(recipe, name)()
    return output


# ---- a layer and a product ---------------------------------------------------------------------------------

#: operand of a layer's GEMMs -> the GEMM that reads it, and which of its two operands it is
_OPERANDS = {
    "x": ("fprop", 0),
    "w": ("fprop", 1),
    "dy": ("dgrad", 0),
    "w_t": ("dgrad", 1),
    "dy_t": ("wgrad", 0),
    "x_t": ("wgrad", 1),
}


def _linear(expected: Expectation, name: str) -> Array:
    """y, dx and dw of a layer without bias under the training recipe, or "x.packed", "dy.scales_t" … of an operand."""
    case = expected.case
    tensors = {"x": case.x, "w": case.data["w"], "dy": case.data["dy"]}
    recipe, rng = nv.recipe.recipe("te", arithmetic=expected.arithmetic), case.data["rng"]
    tensor, _, output = name.partition(".")
    if output:
        suffix = "_t" if output.endswith("_t") else ""
        gemm, place = _OPERANDS[tensor + suffix]
        operand = recipe.operands(gemm)[place]
        return _OF_TENSOR[output.removesuffix("_t")](linear.quantize_operand(tensors[tensor], operand, rng))
    products: dict[str, Callable[[], Array]] = {
        "y": lambda: linear.fprop(case.x, tensors["w"], recipe),
        "dx": lambda: linear.dgrad(tensors["dy"], tensors["w"], recipe, rng=rng),
        "dw": lambda: linear.wgrad(tensors["dy"], case.x, recipe, rng=rng, out_dtype=ml_dtypes.bfloat16),
    }
    return products[name]()


def _gemm(expected: Expectation, name: str) -> Array:
    """d of two given tensors, a·bᵀ."""
    data = expected.case.data
    a, b = (
        nv.NVFP4Tensor.from_arrays(data[f"{one}_packed"], data[f"{one}_scales"], data[f"{one}_amax"]) for one in "ab"
    )
    dtype: Any = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[data["out_dtype"]]
    return {"d": lambda: nv.matmul(a, b, out_dtype=dtype, alpha_form=data["alpha_form"])}[name]()


_KINDS: dict[str, Callable[[Expectation, str], Array]] = {
    "quantize": _quantize,
    **dict.fromkeys(_CODECS, _codec),
    "amax": _amax,
    "hadamard": _hadamard,
    "hadamard-sums": _hadamard_sums,
    "dequantize": _dequantize,
    "swizzle": _swizzle,
    "recipe": _recipe,
    "linear": _linear,
    "gemm": _gemm,
}
