"""Global scale, block scale, encode scale: the arithmetic, each float32 step explicit.

Every function takes the :class:`~nvfp4ref.arithmetic.Arithmetic` and dispatches on one of its fields by
table; each table entry is the formula as the specification writes it, one NumPy float32 operation for one
rounding.  Rules SCALE-GLOBAL, SCALE-GLOBAL-GUARD, SCALE-BLOCK, SCALE-DECODE, SCALE-ENCODE, ELEMENT-SCALE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import e4m3
from .arithmetic import Arithmetic
from .fp32 import BF16_MAX, F32, FLT_MAX, SIXTH, U8, from_bfloat16, to_bfloat16

ONE = np.float32(1)


class GlobalScale(NamedTuple):
    """The two forms of a global scale, float32, 0-d or one value a row (rows, 1)."""

    encode: F32  # S
    decode: F32  # D


def _bf16(x: F32) -> F32:
    return from_bfloat16(to_bfloat16(np.asarray(x, np.float32)))


def minimum(x: F32, limit: np.float32, nan: str) -> F32:
    """min(x, limit) in float32: CUDA's fminf drops NaN, min.NaN propagates it."""
    smaller: F32 = np.fmin(x, limit) if nan == "drop" else np.minimum(x, limit)
    return smaller


def global_scale(amax: F32, ar: Arithmetic) -> GlobalScale:
    """S and D of a tensor amax (any float32: 0, Inf, NaN and negative as the guard says).

    te: S = fmin(fl(M/A), FLT_MAX), 1 if A or S is 0; D = fl(1/S).
    """
    maximum = np.float32(ar.element_max * ar.e4m3_max)
    a = np.asarray(amax, np.float32)
    if ar.global_scale == "none":
        return GlobalScale(np.ones_like(a), np.ones_like(a))
    if ar.global_scale == "reciprocal-form":
        decode = np.asarray(a / maximum)
        encode = np.asarray(ONE / decode)
    else:
        encode = np.asarray(maximum / a if ar.global_scale == "quotient" else (ONE / a) * maximum)
        encode = _guard(encode, a, ar.global_guard)
        if ar.global_type == "bfloat16":
            encode = _bf16(encode)
        decode = np.asarray(ONE / encode)
    return GlobalScale(encode, decode)


def _guard(s: F32, a: F32, guard: str) -> F32:
    """What a kernel does with the quotient of an amax of 0, Inf or NaN (rule SCALE-GLOBAL-GUARD)."""
    if guard == "te":
        s = np.fmin(s, FLT_MAX)
        return np.where((a == 0) | (s == 0), ONE, s)
    if guard == "fused-rht":
        return np.where(a > 0, np.minimum(s, FLT_MAX), ONE)
    if guard == "reference":
        s = np.minimum(s, FLT_MAX)
        return np.where(s == 0, ONE, s)
    return s


def from_recorded(scale: F32, form: str) -> GlobalScale:
    """The pair for a global scale that a producer stored: "encode" (2688/amax) or "decode" (amax/2688)."""
    scale = np.asarray(scale, np.float32)
    return GlobalScale(scale, ONE / scale) if form == "encode" else GlobalScale(ONE / scale, scale)


# fl(·) of every operation below: a and S, D are float32 and so is every intermediate; six and sixth are
# element_max and fl(1/element_max), which are 6 and 0x3E2AAAAB unless there is headroom
_BLOCK_SCALE: dict[str, Callable[[F32, GlobalScale, np.float32, np.float32], F32]] = {
    "amax-times-sixth-of-scale": lambda a, g, six, sixth: a * (g.encode * sixth),
    "divide-by-6": lambda a, g, six, sixth: (a / six) * g.encode,
    "scale-then-sixth": lambda a, g, six, sixth: g.encode * (a * sixth),
    "divide-by-product": lambda a, g, six, sixth: a / (six * g.decode),
    "divide-twice": lambda a, g, six, sixth: (a / six) / g.decode,
    "prescaled": lambda a, g, six, sixth: (a * g.encode) / six,
    "bfloat16": lambda a, g, six, sixth: _bf16(a / six) * g.encode,
}


def block_scale(a: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """The block scale before its E4M3 rounding, (rows, blocks) float32 (rule SCALE-BLOCK)."""
    six = np.float32(ar.element_max)
    sixth = SIXTH if ar.headroom == 1 else ONE / six
    s = _BLOCK_SCALE[ar.block_scale](a, g, six, sixth)
    limit = {"float32-max": FLT_MAX, "e4m3-max": e4m3.MAX, "none": None}[ar.block_scale_max]
    return s if limit is None else minimum(s, limit, ar.block_scale_nan)


def round_scale(s: F32, a: F32, ar: Arithmetic) -> U8:
    """E4M3 bytes of block scales (rules E4M3-RNE, E4M3-SATURATE and their deviations)."""
    if ar.scale_floor:
        s = np.maximum(s, np.float32(ar.scale_floor))
    if ar.scale_rounding == "power-of-two":
        s = _next_power_of_two(s)
    overflow = "saturate" if ar.scale_overflow == "nan-above-240" else ar.scale_overflow
    rounding = "nearest-even" if ar.scale_rounding == "power-of-two" else ar.scale_rounding
    code = e4m3.encode(s, rounding, overflow=overflow, nan_byte=ar.scale_nan_byte)
    if ar.scale_overflow == "nan-above-240":
        # the byte read as a 4-exponent-bit IEEE number, which has no top binade and here no subnormals
        magnitude = code & np.uint8(0x7F)
        code = np.where(magnitude >= 0x78, np.uint8(ar.scale_nan_byte), np.where(magnitude < 8, np.uint8(0), code))
    if ar.zero_block_scale is not None:
        code = np.where(a == 0, np.uint8(ar.zero_block_scale), code)
    return code


def _next_power_of_two(s: F32) -> F32:
    """2^ceil(log2(s)) for positive finite s; the rest as it is."""
    fraction, exponent = np.frexp(s)
    rounded = np.ldexp(ONE, exponent - (fraction == 0.5))
    return np.where(np.isfinite(s) & (s > 0), rounded, s).astype(np.float32)


_MULTIPLIER: dict[str, Callable[[F32, GlobalScale], F32]] = {
    "reciprocal-of-product": lambda d, g: ONE / (d * g.decode),
    "quotient": lambda d, g: g.encode / d,
    "reciprocal-product": lambda d, g: g.encode * (ONE / d),
    "two-multiplications": lambda d, g: ONE / d,
    "bfloat16-coefficient": lambda d, g: g.encode / d,
    "unrounded-block-scale": lambda d, g: ONE / (d * g.decode),
    "divide-by-product": lambda d, g: d * g.decode,  # a divisor
    "divide-by-quotient": lambda d, g: d / g.encode,  # a divisor
}
DIVISORS = ("divide-by-product", "divide-by-quotient")


def encode_scale(code: U8, s: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """What each element of a block is multiplied by, or divided by for the two divisor forms.

    te (rule SCALE-ENCODE): e = fmin(fl(1/fl(d·D)), FLT_MAX); d = 0 gives FLT_MAX.
    """
    d = s if ar.encode_scale == "unrounded-block-scale" else e4m3.VALUES[code]
    e = _MULTIPLIER[ar.encode_scale](d, g)
    if ar.encode_scale in DIVISORS or ar.encode_max == "none":
        return e
    if ar.encode_scale == "bfloat16-coefficient":
        return _bf16(minimum(e, BF16_MAX, ar.encode_nan))
    return minimum(e, FLT_MAX, ar.encode_nan)


def scale_elements(x: F32, e: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """Scaled elements y of tiles (16, rows, blocks), in place (rule ELEMENT-SCALE): y = fl(x·e)."""
    if ar.encode_scale in DIVISORS:
        return np.divide(x, e, out=x)
    if ar.encode_scale == "two-multiplications":
        np.multiply(x, g.encode, out=x)
    if ar.encode_scale != "bfloat16-coefficient":
        return np.multiply(x, e, out=x)
    # fma(x, e, +0) rounds once, as the product does, but an exactly zero product becomes +0
    zero = (x == 0) | (e == 0)
    np.multiply(x, e, out=x)
    x[zero & (x == 0)] = 0.0
    return x
