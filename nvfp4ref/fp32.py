"""float32 as the kernels have it: one IEEE rounding an operation, subnormals kept, one NaN.

NumPy's float32 ``+ - * /`` are single IEEE 754 operations rounded to nearest even, which is what CUDA's
``add/sub/mul/div.rn.f32`` are; this file holds what NumPy does not say: the constants by their bits, the
NaN a GPU computes, the rounding to bfloat16 in integers, and a guard against a process that flushes
subnormals to zero.  Rules: FP32-RULES, NAN-CANONICAL.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
AnyArray = NDArray[Any]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLT_MAX = np.uint32(0x7F7FFFFF).view(np.float32)
FLT_MIN = np.uint32(0x00800000).view(np.float32)
SIXTH = np.uint32(0x3E2AAAAB).view(np.float32)  # fl(1/6)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the NaN a CUDA float32 operation returns
BF16_NAN = np.uint16(0x7FFF)
BF16_MAX = np.uint32(0x7F7F0000).view(np.float32)


def canonical_nan(x: F32) -> F32:
    """``x`` with every NaN replaced by 0x7FFFFFFF, in place (rule NAN-CANONICAL)."""
    np.copyto(x, NAN, where=np.isnan(x))
    return x


def to_bfloat16(x: F32) -> U16:
    """Bit patterns of float32 rounded to bfloat16, nearest even; NaN becomes 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), BF16_NAN, rounded.astype(np.uint16))


def to_float16(x: F32) -> U16:
    """Bit patterns of float32 rounded to float16, nearest even; NaN becomes 0x7FFF, overflow Inf."""
    bits = x.view(np.uint32)
    exponent = np.maximum(((bits >> np.uint32(23)) & np.uint32(255)).astype(np.int32) - 127, -14)
    with np.errstate(invalid="ignore"):
        # the significand in units of the last place: 1024..2048 when normal, below that when subnormal
        units = np.rint(np.ldexp(np.abs(x).astype(np.float64), 10 - exponent))
        code = np.where(np.isfinite(x), (exponent + 14) * 1024 + units, 0x7C00)
    code = np.minimum(code, 0x7C00).astype(np.uint16)
    code |= ((bits >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), code)


def from_bfloat16(bits: U16) -> F32:
    """float32 values of bfloat16 bit patterns (exact)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def through(x: F32, dtype: str | None) -> F32:
    """Values rounded to "bfloat16" or "float16" and back; "float32" and None change nothing."""
    if dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(np.asarray(x, np.float32)))
    if dtype == "float16":
        half: AnyArray = to_float16(np.asarray(x, np.float32)).view(np.float16)
        return half.astype(np.float32)
    return x


def widen(x: AnyArray) -> F32:
    """C-contiguous float32 copy of a float32, float16 or bfloat16 array (exact)."""
    out = np.empty(x.shape, np.float32)
    if x.dtype == bfloat16:
        halves = out.view(np.uint16).reshape(*out.shape, 2)
        low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
        halves[..., low] = 0
        halves[..., high] = x.view(np.uint16)
    else:
        np.copyto(out, x)
    return out


_CUT = np.uint64(2**64 - 2**29)


def cut_to_24_bits(x: F64, out: F64 | None = None) -> F64:
    """float64 cut toward zero to 24 significant bits, float32's when it is in the normal range."""
    out = np.empty_like(x) if out is None else out
    np.bitwise_and(x.view(np.uint64), _CUT, out=out.view(np.uint64))
    return out


def _exact_sum(a: AnyArray, b: AnyArray) -> tuple[F64, F64]:
    """(float64 sum, what is missing from it), exact: Knuth's TwoSum."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def add_toward_zero(a: AnyArray, b: AnyArray) -> F32:
    """a + b of float64-exact finite numbers, cut toward zero to float32 as if added exactly; zero is +0."""
    total, missing = _exact_sum(a, b)
    beyond = (missing != 0) & (np.signbit(missing) != np.signbit(total))
    total = np.where(beyond, np.nextafter(total, 0), total)
    return cut_to_24_bits(total).astype(np.float32) + np.float32(0)


def add_nearest(a: AnyArray, b: AnyArray) -> F32:
    """a + b of float64-exact finite numbers, rounded once to nearest even float32.

    The float64 sum is rounded to odd first, which keeps the second rounding from seeing a false tie.
    """
    total, missing = _exact_sum(a, b)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    toward = np.where(missing > 0, np.inf, -np.inf)
    odd = np.where((missing != 0) & even, np.nextafter(total, toward), total)
    with np.errstate(over="ignore"):
        return odd.astype(np.float32)


def reverse_halves(words: U32) -> U32:
    """Each 16-bit half of 32-bit words with its bits in reverse order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        m = np.uint32(mask)
        words = ((words >> np.uint32(shift)) & m) | ((words & m) << np.uint32(shift))
    return words


def require_subnormals() -> None:
    """Raise RuntimeError when this thread flushes subnormal float32 to zero.

    Libraries built with ``-ffast-math`` set that processor mode when they are loaded, for the whole
    thread; every answer about tiny tensors would then be wrong without a word.
    """
    tiny = np.array([0x00400000], np.uint32).view(np.float32)
    if (tiny * np.float32(1)).view(np.uint32)[0] != 0x00400000 or (tiny + tiny).view(np.uint32)[0] != 0x00800000:
        raise RuntimeError(
            "this process flushes subnormal float32 numbers to zero (a library built with -ffast-math, or "
            "torch.set_flush_denormal(True), set the processor so); the oracle cannot be exact here: "
            "call it before that library is loaded, or in a process of its own; in a callback of JAX, keep the arrays "
            "and call it afterwards"
        )
