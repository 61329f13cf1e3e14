"""A call of ``linear`` held against the oracle: its operands bit for bit, its results within a derived bound::

    calls = []
    with linear.observed(calls.append):
        ...  # compile and run a training step
    jax.effects_barrier()
    print(check(calls[0]))

The bound is an interval for each output.  A product of two operands is exact in float32, so that only the additions
round: K − 1 of them, in any order and grouping, are off by at most γ·Σ|a_k·b_k|, γ = (K − 1)u/(1 − (K − 1)u) with u the
unit roundoff (the standard bound of summation).  What follows, the tensor scales and the rounding of the output, is
monotone and the same everywhere: the ends of the interval go through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw.jaxpath.linear import Array, Call
from nvfp4ref import e2m1, e4m3
from nvfp4ref.linear import quantize_operand
from nvfp4ref.philox import philox4x32
from nvfp4ref.recipe import GEMMS, Operand

BF16 = np.dtype(ml_dtypes.bfloat16)
UNIT = 2.0**-24  # of float32 additions rounded to nearest, as on a CPU
Ends = tuple[Array, Array]


def check(call: Call, unit: float | None = None) -> dict[str, int]:
    """How many codes and scale bytes of each operand differ, and how many outputs of each GEMM are out of bounds.

    Args:
        call: from ``observed``, of a ``linear`` whose tokens lie on one device.
        unit: the unit roundoff of the device's additions.  Unless given: 2^-24, and 2^-23 where JAX's default device
            is a GPU, whose tensor cores add 16 products cut off 25 bits below the largest.
    Returns:
        "fprop x", "fprop w", "fprop", "dgrad dy", … → a number; a wrong amax counts as one.  All zero: it agrees.
    """
    if unit is None:
        unit = 2 * UNIT if jax.default_backend() == "gpu" else UNIT
    tensors = {"x": call.x, "w": call.w, "dy": call.dy}
    found: dict[str, int] = {}
    for gemm in GEMMS:
        dtype = np.dtype(np.float32) if gemm == "wgrad" else BF16
        if gemm in call.operands:
            expected = []
            for q, operand in zip(call.operands[gemm], call.recipe.operands(gemm), strict=True):
                expected.append(quantize_operand(tensors[operand.tensor], operand, words(call, operand)))
                found[f"{gemm} {operand.tensor}"] = _different(q, expected[-1])
            ends = bounds(expected[0], expected[1], dtype, unit)
        else:
            low, high = accumulators(*_unquantized(call, gemm), unit)
            ends = low.astype(dtype), high.astype(dtype)
        found[gemm] = outside(call.results[gemm], ends)
    return found


def _different(found: nv.NVFP4Tensor, expected: nv.NVFP4Tensor) -> int:
    amax, expected_amax = (np.asarray(q.amax).view(np.uint32) for q in (found, expected))
    same = np.array_equal(amax, expected_amax)
    return int((found.codes != expected.codes).sum() + (found.scales != expected.scales).sum()) + (not same)


def _unquantized(call: Call, gemm: str) -> tuple[Array, Array]:
    """The operands of a backward GEMM under ``backward_override``, float64."""
    x, w = call.x, call.w
    if call.recipe.backward_override == "dequantized":
        x, w = (nv.dequantize(q, BF16) for q in call.operands["fprop"])
    x, w, dy = (t.astype(np.float64) for t in (x, w, call.dy))
    return (dy, w.T) if gemm == "dgrad" else (dy.T, x.T)


def words(call: Call, operand: Operand) -> Array | None:
    """The random words of a stochastic operand, by the oracle's Philox: the n-th block has counter (n, 0, 0, 0)."""
    if operand.rounding != "stochastic" or call.keys is None:
        return None
    rows, length = call.dy.shape if operand.axis == -1 else call.dy.shape[::-1]
    counters = np.zeros((rows * length // 16, 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    return philox4x32(counters, call.keys[0 if operand.axis == -1 else 1]).reshape(rows, length // 4)


def bounds(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, dtype: Any = np.float32, unit: float = UNIT) -> Ends:
    """The least and the largest a·bᵀ that float32 additions in any order give, of that dtype; (M, N) each."""
    scaled = _epilogue(a, b)
    with np.errstate(all="ignore"):
        low, high = (scaled(end).astype(dtype) for end in accumulators(values(a), values(b), unit))
    return low, high


def outside(found: Array, ends: Ends) -> int:
    """How many numbers are not within their ends; where both ends are infinite or NaN, so may the number be."""
    low, high = (end.astype(np.float64) for end in ends)
    y = found.astype(np.float64)
    unbounded = ~np.isfinite(low) & ~np.isfinite(high) & (low != high)  # Inf·0 among them
    return int((~((low <= y) & (y <= high) | unbounded & ~np.isfinite(y))).sum())


def accumulators(a: Array, b: Array, unit: float = UNIT) -> Ends:
    """The same of float64 matrices (M, K), (N, K) whose products float32 holds exactly: float32, no scale applied."""
    errors = (a.shape[1] - 1) * unit
    own = a.shape[1] * 2.0**-53  # of the float64 sums here
    with np.errstate(all="ignore"):
        exact = a @ b.T
        spread = (errors / (1 - errors) + own) * (np.abs(a) @ np.abs(b).T)
        low, high = ((exact + sign * spread).astype(np.float32) for sign in (-1, 1))
    return low, high


def values(q: nv.NVFP4Tensor) -> Array:
    """float64 (rows, K): codes times block scales, without the tensor's scale."""
    codes = q.codes.reshape(-1, q.shape[-1] // 16, 16)
    scales = e4m3.VALUES[q.scales.reshape(*codes.shape[:2], 1) & np.uint8(0x7F)]
    return (e2m1.VALUES[codes].astype(np.float64) * scales).reshape(len(codes), -1)


def _epilogue(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> Callable[[Array], Array]:
    """Accumulators times the tensor scales, float32 (rules GEMM-ALPHA, GEMM-EPILOGUE)."""
    one = np.float32(1)
    largest = (q.arithmetic.element_max * q.arithmetic.e4m3_max for q in (a, b))
    inverse = one / np.float32(next(largest) * next(largest))
    if a.amax.ndim or b.amax.ndim:
        rows, columns = a.amax.reshape(-1, 1), b.amax.reshape(1, -1)
        return lambda total: (total * inverse) * (rows * columns)
    return lambda total: total * ((a.amax * b.amax) * inverse)
