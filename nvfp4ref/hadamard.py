"""The random Hadamard transform with the tensor core's own summation.

Rules RHT-MATRIX, RHT-SUM, RHT-ROUND, RHT-SPECIAL, RHT-AMAX.

y_j = sum_i x_i·s_i·(−1)^popcount(i & j)/sqrt(n) over n consecutive elements of the blocked axis.  The sum is
not an IEEE sum: 16 exact products are aligned to the largest exponent, each is truncated to 25 fractional
bits, they are added exactly, and the total is truncated to float32.  Every step here is exact integer
arithmetic (in float64 or int64 containers) until those two truncations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import blocks
from .fp32 import F32, NAN, AnyArray, bfloat16, canonical_nan, from_bfloat16, to_bfloat16, widen

TE_SIGN_MASK = 0xD7E8
STEP = 16  # products that one bfloat16 tensor-core step adds
FRACTION_BITS = 25  # kept below the largest product's leading bit


@dataclass(frozen=True)
class RHT:
    """A transform of ``size`` elements; the defaults are Transformer Engine's.

    Args:
        size: 2, 4, … 256, a power of two; vectors of that many elements along the blocked axis.
        sign_mask: bit i set means that element i is negated before the Hadamard matrix.
        normalised: entries ±1/sqrt(size) (rounded to bfloat16 where that is irrational), else ±1.
        round_to: "bfloat16", or "float32" to keep the accumulator.
        signs_on: "input", diag(s)·H; "output" is the fault H·diag(s).
    Raises:
        ValueError: a size, mask or type that is none of these.
    """

    size: int = 16
    sign_mask: int = TE_SIGN_MASK
    normalised: bool = True
    round_to: str = "bfloat16"
    signs_on: str = "input"

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"RHT size is a power of two from 2 to 256; got {self.size!r}")
        if not isinstance(self.sign_mask, int):
            raise ValueError(f"sign_mask is an integer of {self.size} bits; got {self.sign_mask!r}")
        if not 0 <= self.sign_mask < 2**self.size:
            raise ValueError(f"sign_mask has {self.size} bits; got {self.sign_mask:#x}: pass one that fits the size")
        if self.signs_on not in ("input", "output"):
            raise ValueError(f"signs_on is 'input' or 'output'; got {self.signs_on!r}")
        if self.round_to not in ("bfloat16", "float32"):
            raise ValueError(f"round_to is 'bfloat16' or 'float32'; got {self.round_to!r}")

    @property
    def entry(self) -> float:
        """Magnitude of the matrix entries, a bfloat16 value."""
        if not self.normalised:
            return 1.0
        return float(from_bfloat16(to_bfloat16(np.array([self.size**-0.5], np.float32)))[0])

    def matrix(self) -> F32:
        """diag(s)·H·entry (or the fault H·diag(s)), (size, size) float32: vectors multiply it from the left."""
        index = np.arange(self.size)
        parity = np.bitwise_count(index[:, None] & index[None, :]) & 1
        signs = np.array([-1.0 if self.sign_mask >> i & 1 else 1.0 for i in range(self.size)])
        signs = signs[:, None] if self.signs_on == "input" else signs[None, :]
        matrix: F32 = (signs * (1.0 - 2.0 * parity) * self.entry).astype(np.float32)
        return matrix


def truncate_to_float32(x: AnyArray) -> F32:
    """float64 toward zero to float32; past FLT_MAX to Inf; NaN to 0x7FFFFFFF."""
    bits = np.ascontiguousarray(x, np.float64).view(np.uint64) & np.uint64(~((1 << 29) - 1) & (2**64 - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        single = bits.view(np.float64).astype(np.float32)
    single[np.isnan(x)] = NAN
    return single


def tensor_core_step(products: AnyArray, c: AnyArray | None = None) -> F32:
    """Sum of up to 16 float64-exact products along axis 0 and an accumulator, as one bfloat16 MMA step.

    products: (k, …) float64; c: (…) float32 or None for zero.  Returns (…) float32.
    """
    addends = products if c is None else np.concatenate([products, np.asarray(c, np.float64)[None]])
    with np.errstate(invalid="ignore"):
        largest = np.abs(addends).max(axis=0)
        finite = np.isfinite(largest)
        exponent = np.frexp(np.where(finite, largest, 0))[1] - 1
        aligned = np.trunc(np.ldexp(np.where(np.isfinite(addends), addends, 0), FRACTION_BITS - exponent))
        total = np.ldexp(aligned.sum(axis=0), exponent - FRACTION_BITS)  # |sum| < 2^31: exact
        total = np.where(finite, total, addends.sum(axis=0))  # only Inf and NaN take this branch
    return truncate_to_float32(total)


def accumulate(vectors: F32, rht: RHT) -> F32:
    """The raw float32 accumulators of ``vectors @ rht.matrix()`` along axis 0: (size, …) to (size, …).

    Sizes above 16 go through the tensor core in steps of 16, in ascending order (RHT-SUM).
    """
    if rht.size == STEP and rht.normalised:
        return _accumulate_16(vectors, rht)
    matrix = rht.matrix().astype(np.float64)
    wide = vectors.astype(np.float64)
    out = np.empty(vectors.shape, np.float32)
    for j in range(rht.size):
        column = matrix[:, j].reshape(-1, *[1] * (wide.ndim - 1))
        total = None
        for k in range(0, rht.size, STEP):
            total = tensor_core_step(wide[k : k + STEP] * column[k : k + STEP], total)
        out[j] = total
    return out


def _accumulate_16(vectors: F32, rht: RHT) -> F32:
    """One step: all products of a vector have its elements' exponents, so truncate the elements once and
    add them by the butterfly in exact int32."""
    magnitude = np.abs(vectors).max(axis=0)
    special = ~np.isfinite(magnitude)
    exponent = np.frexp(np.where(special, np.float32(0), magnitude))[1] - 1
    with np.errstate(invalid="ignore"):
        aligned = np.trunc(np.ldexp(vectors.astype(np.float64), FRACTION_BITS - exponent))
        total = np.where(special, 0, aligned).astype(np.int32)
    negated = [i for i in range(STEP) if rht.sign_mask >> i & 1]
    if rht.signs_on == "input":
        total[negated] *= -1
    for half in (1, 2, 4, 8):
        pairs = total.reshape(STEP // (2 * half), 2, half, *total.shape[1:])
        low, high = pairs[:, 0].copy(), pairs[:, 1]
        np.add(low, high, out=pairs[:, 0])
        np.subtract(low, high, out=pairs[:, 1])
    if rht.signs_on == "output":
        total[negated] *= -1
    out = truncate_to_float32(np.ldexp(total.astype(np.float64), exponent - (FRACTION_BITS + 2)))
    if special.any():
        products = vectors[:, special].astype(np.float64)[:, None] * rht.matrix().astype(np.float64)[:, :, None]
        out[:, special] = tensor_core_step(products)
    return out


def _four_lanes(vectors: F32, rht: RHT) -> F32:
    """``vectors @ rht.matrix()`` as Transformer Engine's reference has it on a CPU: float32, four running sums.

    lane i adds products i, 4+i, 8+i, …; then ((lane 0 + lane 1) + lane 2) + lane 3.
    """
    matrix = rht.matrix()
    out = np.empty_like(vectors)
    for j in range(rht.size):
        products = vectors * matrix[:, j].reshape(-1, *[1] * (vectors.ndim - 1))
        lanes = products[: min(4, rht.size)]
        for k in range(4, rht.size, 4):
            lanes = lanes + products[k : k + 4]
        total = lanes[0]
        for lane in lanes[1:]:
            total = total + lane
        out[j] = total
    return canonical_nan(out)


def transform(matrix: AnyArray, rht: RHT, axis: int = -1, summation: str = "tensor-core") -> AnyArray:
    """RHT along the blocked axis of a matrix (R, C): (R, C) for axis −1, (C, R), the transpose, for axis 0.

    Returns bfloat16 (rule RHT-ROUND), or float32 with ``round_to="float32"``.
    Raises ValueError when the axis is no multiple of the size, or float32/float16 input is not bfloat16 exact
    (the tensor core reads bfloat16; Transformer Engine refuses other input).
    """
    length = matrix.shape[axis]
    if length % rht.size:
        raise ValueError(
            f"an RHT of size {rht.size} needs a multiple of {rht.size} along the blocked axis; got {length}"
        )
    if matrix.dtype != bfloat16:
        _require_bfloat16_values(matrix)
    add = {"tensor-core": accumulate, "float32-four-lanes": _four_lanes}[summation]
    rows = matrix if axis == -1 else matrix.T
    count, length = rows.shape
    out = np.empty((count, length), np.uint16 if rht.round_to == "bfloat16" else np.float32)
    slab = max(1, 2**18 // length)
    for start in range(0, count, slab):
        part = rows[start : start + slab]
        vectors = widen(part.reshape(len(part), length // rht.size, rht.size).transpose(2, 0, 1))
        with np.errstate(all="ignore"):
            y = blocks.untile(add(vectors, rht))
        out[start : start + slab] = to_bfloat16(y) if rht.round_to == "bfloat16" else y
    return out.view(bfloat16) if rht.round_to == "bfloat16" else out


def _require_bfloat16_values(matrix: AnyArray) -> None:
    values = widen(matrix)
    if ((values.view(np.uint32) & np.uint32(0xFFFF)) != 0).any():
        raise ValueError(
            f"the Hadamard transform reads bfloat16; this {matrix.dtype} input holds values that bfloat16 cannot: "
            "round it first (x.astype(ml_dtypes.bfloat16))"
        )
