"""Global scale, block scale, encode scale: the arithmetic, each float32 step explicit.

Every function takes the :class:`~nvfp4ref.arithmetic.Arithmetic` and dispatches on one of its fields by
table; each table entry is the formula as the specification writes it, one NumPy float32 operation for one
rounding.  Rules SCALE-GLOBAL, SCALE-GLOBAL-GUARD, SCALE-BLOCK, SCALE-DECODE, SCALE-ENCODE, ELEMENT-SCALE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import e4m3, rcp
from .arithmetic import Arithmetic
from .fp32 import BF16_MAX, F32, FLT_MAX, FLT_MIN, SIXTH, U8, AnyArray, through

ONE = np.float32(1)
SMALL = np.float32(2.0**-63)  # the root of the smallest normal float32
Operand = F32 | np.float32


class GlobalScale(NamedTuple):
    """The two forms of a global scale, float32, 0-d or one value a row (rows, 1)."""

    encode: F32  # S
    decode: F32  # D


def flushed(x: Operand) -> F32:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(x) < FLT_MIN, np.copysign(np.float32(0), x), x)


class Operations(NamedTuple):
    """float32 product and quotient, one rounding each; all that the scale arithmetic consists of."""

    mul: Callable[[Operand, Operand], F32]
    div: Callable[[Operand, Operand], F32]


def _flushing(operation: Callable[..., F32]) -> Callable[[Operand, Operand], F32]:
    return lambda a, b: flushed(operation(flushed(a), flushed(b)))


_DIVIDE: dict[str, Callable[..., F32]] = {"ieee": np.divide, "rcp-approx": rcp.divide}
_OPERATIONS = {
    (division, flush): Operations(_flushing(np.multiply), _flushing(div)) if flush else Operations(np.multiply, div)
    for division, div in _DIVIDE.items()
    for flush in (False, True)
}


def operations(ar: Arithmetic) -> Operations:
    """The operations of an arithmetic: its division, and each flushing subnormals before and after where it does."""
    return _OPERATIONS[ar.division, ar.flush_subnormals]


def reciprocal(x: F32, ar: Arithmetic) -> F32:
    """fl(1/x), with the arithmetic's value for 1/0 where it guards that."""
    inverse = operations(ar).div(ONE, x)
    return inverse if ar.reciprocal_of_zero is None else np.where(x == 0, np.float32(ar.reciprocal_of_zero), inverse)


def minimum(x: F32, limit: np.float32, nan: str) -> F32:
    """min(x, limit) in float32: CUDA's fminf drops NaN, min.NaN propagates it."""
    smaller: F32 = np.fmin(x, limit) if nan == "drop" else np.minimum(x, limit)
    return smaller


def global_scale(amax: F32, ar: Arithmetic) -> GlobalScale:
    """S and D of a tensor amax (any float32: 0, Inf, NaN and negative as the guard says).

    te: S = fmin(fl(M/A), FLT_MAX), 1 if A or S is 0; D = fl(1/S).
    """
    maximum: Operand = np.float32(ar.element_max * ar.e4m3_max)
    a = np.asarray(amax, np.float32)
    if ar.global_scale == "none":
        return GlobalScale(np.ones_like(a), np.ones_like(a))
    o = operations(ar)
    if ar.global_scale in ("reciprocal-form", "product-form"):
        decode = o.div(a, maximum) if ar.global_scale == "reciprocal-form" else o.mul(a, ONE / maximum)
        return GlobalScale(np.asarray(o.div(ONE, decode)), np.asarray(decode))
    if ar.global_guard == "finite":
        a = np.maximum(a, _SMALLEST_NORMAL.get(ar.global_type, FLT_MIN))
    if ar.global_scale == "reciprocal-then-multiply":
        encode = o.mul(through(o.div(ONE, a), ar.global_type), maximum)
    else:
        encode = o.div(maximum, a)
    encode = np.asarray(_guard(through(encode, ar.global_type), a, ar.global_guard))
    decode = np.asarray(reciprocal(encode, ar))
    return GlobalScale(decode, encode) if ar.global_scale == "inverted" else GlobalScale(encode, decode)


_SMALLEST_NORMAL = {"float16": np.float32(2.0**-14)}


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
    if guard == "finite":
        return np.where(np.isfinite(s), s, ONE)
    if guard == "zero-amax":
        return np.where(a == 0, ONE, s)
    return s


def from_recorded(scale: F32, form: str) -> GlobalScale:
    """The pair for a global scale that a producer stored: "encode" (2688/amax) or "decode" (amax/2688)."""
    scale = np.asarray(scale, np.float32)
    return GlobalScale(scale, ONE / scale) if form == "encode" else GlobalScale(ONE / scale, scale)


# a, S and D are float32 and so is every intermediate; six and sixth are element_max and
# fl(1/element_max), which are 6 and 0x3E2AAAAB unless there is headroom
_BLOCK_SCALE: dict[str, Callable[[Operations, F32, GlobalScale, F32, F32, str], F32]] = {
    "amax-times-sixth-of-scale": lambda o, a, g, six, sixth, t: o.mul(a, o.mul(g.encode, sixth)),
    "divide-by-6": lambda o, a, g, six, sixth, t: o.mul(through(o.div(a, six), t), g.encode),
    "scale-then-sixth": lambda o, a, g, six, sixth, t: o.mul(g.encode, o.mul(a, sixth)),
    "divide-by-product": lambda o, a, g, six, sixth, t: o.div(a, o.mul(six, g.decode)),
    "divide-twice": lambda o, a, g, six, sixth, t: o.div(o.div(a, six), g.decode),
    "sixth-then-divide": lambda o, a, g, six, sixth, t: o.div(o.mul(a, sixth), g.decode),
    "prescaled": lambda o, a, g, six, sixth, t: o.div(a, six),
    "prescaled-times-sixth": lambda o, a, g, six, sixth, t: o.mul(a, sixth),
    "predivided-times-sixth": lambda o, a, g, six, sixth, t: o.mul(a, sixth),
}
PRESCALED = ("prescaled", "prescaled-times-sixth", "predivided-times-sixth")


def prescaled(x: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """What the PRESCALED forms take the block amax of: fl(x·S), or fl(x/D)."""
    o = operations(ar)
    return o.div(x, g.decode) if ar.block_scale == "predivided-times-sixth" else o.mul(x, g.encode)


def block_scale(a: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """The block scale before its E4M3 rounding, (rows, blocks) float32 (rule SCALE-BLOCK).

    ``a`` is the block amax; for the PRESCALED forms that of ``prescaled``.
    """
    six = np.asarray(ar.element_max, np.float32)
    sixth = np.asarray(SIXTH if ar.headroom == 1 else ONE / six)
    s = _BLOCK_SCALE[ar.block_scale](operations(ar), a, g, six, sixth, ar.sixth_type)
    limit = {"float32-max": FLT_MAX, "e4m3-max": e4m3.MAX, "none": None}[ar.block_scale_max]
    return s if limit is None else minimum(s, limit, ar.block_scale_nan)


def round_scale(s: F32, a: F32, g: GlobalScale, ar: Arithmetic) -> U8:
    """E4M3 bytes of block scales (rules E4M3-RNE, E4M3-SATURATE and their deviations)."""
    unrounded = s
    if ar.scale_floor is not None:
        s = np.where(s <= np.float32(ar.scale_floor), np.float32(ar.scale_floor), s)
    if ar.scale_rounding == "power-of-two":
        s = _next_power_of_two(s)
    overflow = "saturate" if ar.scale_overflow == "nan-above-240" else ar.scale_overflow
    rounding = "nearest-even" if ar.scale_rounding == "power-of-two" else ar.scale_rounding
    code = e4m3.encode(s, rounding, overflow=overflow, nan_byte=ar.scale_nan_byte)
    if ar.scale_overflow == "nan-above-240":
        # the byte read as a 4-exponent-bit IEEE number, which has no top binade and here no subnormals
        magnitude = code & np.uint8(0x7F)
        code = np.where(magnitude >= 0x78, np.uint8(ar.scale_nan_byte), np.where(magnitude < 8, np.uint8(0), code))
    if ar.scale_invalid_byte != ar.scale_nan_byte:
        invalid = np.isnan(s) & ~np.isnan(a) & ~np.isnan(g.encode)
        code = np.where(invalid, np.uint8(ar.scale_invalid_byte), code)
    if ar.zero_block_scale is not None:
        zero = _ZERO_BLOCK[ar.zero_block_rule](a, unrounded, code)
        code = np.where(zero, np.uint8(ar.zero_block_scale), code)
    return code


_ZERO_BLOCK: dict[str, Callable[[F32, F32, U8], AnyArray]] = {
    "amax": lambda a, s, byte: a == 0,
    "block-scale": lambda a, s, byte: s == 0,
    "small-block-scale": lambda a, s, byte: s < SMALL,
    "byte": lambda a, s, byte: byte == 0,
}


def _next_power_of_two(s: F32) -> F32:
    """2^ceil(log2(s)) for positive finite s; the rest as it is."""
    fraction, exponent = np.frexp(s)
    rounded = np.ldexp(ONE, exponent - (fraction == 0.5))
    return np.where(np.isfinite(s) & (s > 0), rounded, s).astype(np.float32)


_MULTIPLIER: dict[str, Callable[[Arithmetic, F32, GlobalScale], F32]] = {
    "reciprocal-of-product": lambda ar, d, g: reciprocal(operations(ar).mul(d, g.decode), ar),
    "quotient": lambda ar, d, g: operations(ar).div(g.encode, d),
    "reciprocal-product": lambda ar, d, g: operations(ar).mul(g.encode, reciprocal(d, ar)),
    "two-multiplications": lambda ar, d, g: reciprocal(d, ar),
    "bfloat16-coefficient": lambda ar, d, g: operations(ar).div(g.encode, d),
    "unrounded-block-scale": lambda ar, d, g: reciprocal(operations(ar).mul(d, g.decode), ar),
    "divide-by-product": lambda ar, d, g: operations(ar).mul(d, g.decode),  # a divisor
    "divide-by-quotient": lambda ar, d, g: operations(ar).div(d, g.encode),  # a divisor
}
DIVISORS = ("divide-by-product", "divide-by-quotient")


_BYTES = np.arange(256, dtype=np.uint8)


def encode_scale(code: U8, s: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """What each element of a block is multiplied by, or divided by for the two divisor forms.

    te (rule SCALE-ENCODE): e = fmin(fl(1/fl(d·D)), FLT_MAX); d = 0 gives FLT_MAX.
    """
    if code.size > 1024 and g.encode.ndim == 0 and ar.encode_scale != "unrounded-block-scale":
        return encode_scale(_BYTES, s, g, ar)[code]  # one value a byte
    d = s if ar.encode_scale == "unrounded-block-scale" else e4m3.VALUES[code]
    e = _MULTIPLIER[ar.encode_scale](ar, d, g)
    if ar.encode_nan == "as-zero":
        e = np.where(np.isnan(e), np.float32(0 if ar.encode_scale in DIVISORS else np.inf), e)
    if ar.encode_ulp:
        e = np.nextafter(e, np.copysign(np.float32(np.inf), e) if ar.encode_ulp > 0 else np.float32(0))
    if ar.encode_scale in DIVISORS or ar.encode_max == "none":
        return e
    if ar.encode_scale == "bfloat16-coefficient":
        return through(minimum(e, BF16_MAX, ar.encode_nan), "bfloat16")
    return minimum(e, FLT_MAX, ar.encode_nan)


def scale_elements(x: F32, e: F32, code: U8, g: GlobalScale, ar: Arithmetic) -> F32:
    """Scaled elements y of tiles (16, rows, blocks), in place (rule ELEMENT-SCALE): y = fl(x·e)."""
    if ar.flush_subnormals:
        x[...] = flushed(x)
    if ar.encode_scale == "two-multiplications":
        np.multiply(x, g.encode, out=x)
        if ar.flush_subnormals:
            x[...] = flushed(x)
    zero = (x == 0) | (e == 0) if ar.encode_scale == "bfloat16-coefficient" else None
    (_DIVIDE[ar.division] if ar.encode_scale in DIVISORS else np.multiply)(x, e, out=x)
    if zero is not None:
        x[zero & (x == 0)] = 0.0  # fma(x, e, +0) rounds once too, but makes an exactly zero product +0
    if ar.flush_subnormals:
        x[...] = flushed(x)
    if ar.zero_scale_elements == "zero":
        x[:, code == 0] = 0.0
    return x
