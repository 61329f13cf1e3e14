"""float32 arithmetic in integers: IEEE 754, nearest even, subnormals kept, one NaN, whatever the compiler does.

XLA flushes subnormals on a CPU, divides approximately on a GPU, merges and reorders constant factors, and its
float8 casts have changed between versions.  None of that touches integers, so a float32 here is its bit pattern
in uint32, and the functions are the operations of ``nvfp4ref.fp32`` on such patterns.
Rules FP32-RULES, NAN-CANONICAL, E4M3-RNE, INPUT-WIDEN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Bits = Any  # uint32, the patterns of float32 values: a JAX array, or a constant of NumPy's

NAN, INFINITY, FLT_MAX, ONE = (np.uint32(n) for n in (0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x3F800000))
SIGN, MAGNITUDE, FRACTION, HIDDEN = (np.uint32(n) for n in (0x80000000, 0x7FFFFFFF, 0x7FFFFF, 0x800000))


def u32(n: int) -> np.uint32:
    """An integer constant that keeps arrays uint32."""
    return np.uint32(n)


def constant(x: Any) -> Any:
    """The bits of a Python or NumPy number (exact in float32) or array, as NumPy uint32."""
    return np.asarray(x, np.float32).view(np.uint32)[()]


def of_float(x: jax.Array) -> Bits:
    """The bits of a float32, bfloat16 or float16 array, widened exactly (rule INPUT-WIDEN)."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << u32(16)
    if x.dtype == jnp.float16:
        return _of_half(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32))
    return lax.bitcast_convert_type(x, jnp.uint32)


def _of_half(half: Bits) -> Bits:
    sign, magnitude = (half & u32(0x8000)) << u32(16), half & u32(0x7FFF)
    normal = (magnitude << u32(13)) + u32(112 << 23)
    subnormal = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32) - u32(24 << 23)
    special = (magnitude << u32(13)) + u32(224 << 23)
    wide = jnp.where(magnitude >= u32(0x7C00), special, jnp.where(magnitude >= u32(0x400), normal, subnormal))
    return sign | jnp.where(magnitude == 0, u32(0), wide)


def to_float(bits: Bits, dtype: Any = jnp.float32) -> jax.Array:
    """The float32 of a pattern, or its rounding to bfloat16 or float16; a NaN becomes 0x7FFF there."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(to_bfloat16(bits).astype(jnp.uint16), jnp.bfloat16)
    if dtype == jnp.float16:
        return lax.bitcast_convert_type(to_float16(bits).astype(jnp.uint16), jnp.float16)
    return lax.bitcast_convert_type(bits, jnp.float32)


def is_nan(a: Bits) -> jax.Array:
    return (a & MAGNITUDE) > INFINITY


def is_zero(a: Bits) -> jax.Array:
    return (a & MAGNITUDE) == 0


def canonical(a: Bits) -> Bits:
    """Every NaN as 0x7FFFFFFF."""
    return jnp.where(is_nan(a), NAN, a)


def less(a: Bits, b: Bits) -> jax.Array:
    """a < b; false with NaN."""
    return ~is_nan(a) & ~is_nan(b) & (_ordered(a) < _ordered(b))


def _ordered(a: Bits) -> jax.Array:
    """Integers in the order of the floats; both zeros are 0."""
    magnitude = (a & MAGNITUDE).astype(jnp.int32)
    return jnp.where(a >= SIGN, -magnitude, magnitude)


def minimum(a: Bits, limit: np.uint32) -> Bits:
    """CUDA's fminf against a number: a NaN gives the number."""
    return jnp.where(less(a, limit), a, limit)


def once(compute: Callable[..., Any], *args: Any) -> Any:
    """compute(*args) as XLA's CPU compiler would not do it: once, and not again for every element that reads it.

    A loop that runs once, but not so that the compiler could know, is what nothing is merged across.
    """

    def loop(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        first = leaves[0].reshape(-1)[0]
        turns = 1 + (first == first.dtype.type(np.iinfo(first.dtype).max)).astype(jnp.int32)
        # inside shard_map a zero is only of the result's type when it is made of what the result is made of
        zero = sum((leaf.reshape(-1)[0].astype(jnp.int32) & 0 for leaf in leaves), start=jnp.int32(0))
        empty = jax.tree.map(lambda a: jnp.full(a.shape, zero, a.dtype), jax.eval_shape(compute, *args))
        return lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, compute(*args)), (0, empty))[1]

    return lax.platform_dependent(*args, cpu=loop, default=compute)


# -- one rounding an operation ---------------------------------------------------------------------------------


def split(a: Bits) -> tuple[Bits, jax.Array]:
    """(significand in [2^23, 2^24), exponent) with |a| = significand·2^(exponent − 150); zero gives anything."""
    magnitude = a & MAGNITUDE
    subnormal = magnitude < HIDDEN
    # a subnormal's fraction as a float is the number itself times 2^149
    normal = jnp.where(subnormal, lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32), magnitude)
    exponent = (normal >> u32(23)).astype(jnp.int32) - jnp.where(subnormal, 149, 0)
    return normal & FRACTION | HIDDEN, exponent


def _shifted(a: Bits, n: jax.Array) -> Bits:
    """a >> n for n of 0 and more, its last bit set where a bit was lost."""
    n = jnp.minimum(n, 31).astype(jnp.uint32)
    kept = a >> n
    return kept | ((kept << n) != a).astype(jnp.uint32)


def rounded(window: Bits, exponent: jax.Array, keep: int = 24) -> Bits:
    """Magnitude bits of window·2^(exponent − 158), window in [2^31, 2^32), rounded to ``keep`` significant bits.

    ``exponent`` is float32's biased one; below 1 the result is subnormal, above 254 Inf.  The last bit of the
    window stands for all that follows.  keep = 8 gives bfloat16 (its 16 bits).
    """
    window = _shifted(window, jnp.maximum(1 - exponent, 0))
    cut = 32 - keep
    kept = window >> u32(cut)
    kept += ((window & u32(2**cut - 1)) + (kept & u32(1))) > u32(2 ** (cut - 1))
    place = (jnp.clip(exponent, 1, 255) - 1).astype(jnp.uint32) << u32(keep - 1)
    return jnp.minimum(place + kept, u32(255 << (keep - 1)))


def product(m: Bits, n: Bits, narrow: bool = False) -> tuple[Bits, Bits]:
    """m·n of two integers in [2^23, 2^24): (window, top) with m·n = window·2^(15 + top), top 0 or 1.

    The window lies in [2^31, 2^32); its last bit stands for what was cut off.  ``narrow``: the lower 16 bits of m
    are 0, as in bfloat16.
    """
    if narrow:
        high = (m >> u32(16)) * n
        top = high >> u32(31)
        return high << (u32(1) - top), top
    m1, m0, n1, n0 = m >> u32(12), m & u32(0xFFF), n >> u32(12), n & u32(0xFFF)
    middle = m1 * n0 + m0 * n1
    low = ((middle & u32(0xF)) << u32(12)) + m0 * n0  # all but the upper 32 of 48 bits
    high = ((m1 * n1) << u32(8)) + (middle >> u32(4)) + (low >> u32(16))
    top = high >> u32(31)
    window = high << (u32(1) - top) | ((low & u32(0xFFFF)) != 0).astype(jnp.uint32)
    return window | jnp.where(top == 0, (low >> u32(15)) & u32(1), u32(0)), top


def mul(a: Bits, b: Bits) -> Bits:
    """fl(a·b)."""
    sign = (a ^ b) & SIGN
    (m, i), (n, j) = split(a), split(b)
    window, top = product(m, n)
    result = sign | rounded(window, i + j - 127 + top.astype(jnp.int32))
    infinite = ((a & MAGNITUDE) == INFINITY) | ((b & MAGNITUDE) == INFINITY)
    zero = is_zero(a) | is_zero(b)
    result = jnp.where(zero, sign, jnp.where(infinite, sign | INFINITY, result))
    return jnp.where(is_nan(a) | is_nan(b) | (infinite & zero), NAN, result)


def div(a: Bits, b: Bits) -> Bits:
    """fl(a/b).  The quotient is estimated by whatever division the device has, then set right in integers."""
    sign = (a ^ b) & SIGN
    (m, i), (n, j) = split(a), split(b)
    smaller = (m < n).astype(jnp.uint32)
    m = m << smaller
    quotient, remainder = divide(m, n)
    window = quotient << u32(6) | (remainder != 0).astype(jnp.uint32)
    result = sign | rounded(window, i - j + 127 - smaller.astype(jnp.int32))
    infinite_a, infinite_b = (a & MAGNITUDE) == INFINITY, (b & MAGNITUDE) == INFINITY
    result = jnp.where(is_zero(a) | infinite_b, sign, jnp.where(is_zero(b) | infinite_a, sign | INFINITY, result))
    invalid = (is_zero(a) & is_zero(b)) | (infinite_a & infinite_b)
    return jnp.where(is_nan(a) | is_nan(b) | invalid, NAN, result)


def divide(m: Bits, n: Bits) -> tuple[Bits, Bits]:
    """m·2^25 divided by n, integers below 2^26 and 2^25 with m/n in [1, 2): quotient in [2^25, 2^26), and remainder.

    The remainders are exact modulo 2^32, and smaller than that while the estimate is off by less than 60.
    """
    quotient, signed, divisor = estimate(m, n), n.astype(jnp.int32), n.astype(jnp.float32)
    remainder = ((m << u32(25)) - quotient * n).astype(jnp.int32)
    correction = (remainder.astype(jnp.float32) / divisor).astype(jnp.int32)
    remainder -= correction * signed
    correction += (remainder >= signed).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)
    remainder += jnp.where(remainder < 0, signed, jnp.where(remainder >= signed, -signed, 0))
    return quotient + correction.astype(jnp.uint32), remainder.astype(jnp.uint32)


def estimate(m: Bits, n: Bits) -> Bits:
    """m·2^25/n by the device's own division, whose last bits may be anything."""
    return (m.astype(jnp.float32) / n.astype(jnp.float32) * jnp.float32(2**25)).astype(jnp.uint32)


def add(a: Bits, b: Bits) -> Bits:
    """fl(a + b)."""
    swap = (b & MAGNITUDE) > (a & MAGNITUDE)
    large, small = jnp.where(swap, b, a), jnp.where(swap, a, b)
    (m, i), (n, j) = split(large), split(small)
    n = jnp.where(is_zero(small), u32(0), _shifted(n << u32(7), i - j))
    total = jnp.where(((large ^ small) & SIGN) == 0, (m << u32(7)) + n, (m << u32(7)) - n)
    shift = lax.clz(total)
    result = (large & SIGN) | rounded(total << shift, i + 1 - shift.astype(jnp.int32))
    result = jnp.where(total == 0, u32(0), result)
    result = jnp.where(is_zero(small), large, result)
    result = jnp.where(is_zero(large), large & small, result)
    opposite = (((large ^ small) & SIGN) != 0) & ((small & MAGNITUDE) == INFINITY)
    result = jnp.where((large & MAGNITUDE) == INFINITY, large, result)
    return jnp.where(is_nan(a) | is_nan(b) | opposite, NAN, result)


def sub(a: Bits, b: Bits) -> Bits:
    """fl(a − b)."""
    return add(a, jnp.where(is_nan(b), b, b ^ SIGN))


# -- narrower formats ------------------------------------------------------------------------------------------


def to_bfloat16(a: Bits) -> Bits:
    """The 16 bits of a rounded to bfloat16, in uint32."""
    up = (a + (u32(0x7FFF) + ((a >> u32(16)) & u32(1)))) >> u32(16)
    return jnp.where(is_nan(a), u32(0x7FFF), up)


def to_float16(a: Bits) -> Bits:
    """The 16 bits of a rounded to float16, in uint32."""
    magnitude = a & MAGNITUDE
    fraction = (magnitude & FRACTION) | HIDDEN
    field = (magnitude >> u32(23)).astype(jnp.int32)
    # float16's last bit has the weight of float32's 13th from 2^-14 up, and 2^-24 below
    n = jnp.clip(126 - field, 13, 26).astype(jnp.uint32)
    kept = fraction >> n
    lost = fraction - (kept << n)
    half = u32(1) << (n - u32(1))
    kept += (lost + (kept & u32(1))) > half
    place = jnp.clip(field - 113, 0, 64).astype(jnp.uint32) << u32(10)
    code = jnp.minimum(place + kept, u32(0x7C00))
    return jnp.where(is_nan(a), u32(0x7FFF), code | ((a >> u32(16)) & u32(0x8000)))


def to_e4m3(a: Bits) -> jax.Array:
    """uint8 E4M3 codes: nearest even, saturating at 448, NaN 0x7F (rules E4M3-RNE, E4M3-SATURATE, E4M3-NAN)."""
    magnitude = a & MAGNITUDE
    normal = magnitude - u32(120 << 23)
    normal = (normal + (u32(0x7FFFF) + ((normal >> u32(20)) & u32(1)))) >> u32(20)
    # below 2^-6 a code is a multiple of 2^-9
    n = jnp.clip(141 - (magnitude >> u32(23)).astype(jnp.int32), 1, 26).astype(jnp.uint32)
    fraction = (magnitude & FRACTION) | HIDDEN
    subnormal = fraction >> n
    subnormal += ((fraction - (subnormal << n)) + (subnormal & u32(1))) > (u32(1) << (n - u32(1)))
    code = jnp.where(magnitude >= u32(121 << 23), jnp.minimum(normal, u32(0x7E)), subnormal)
    return jnp.where(is_nan(a), u32(0x7F), code | ((a >> u32(24)) & u32(0x80))).astype(jnp.uint8)


def of_e4m3(code: Any) -> Bits:
    """The values of E4M3 codes in any integer type (rule E4M3-VALUES)."""
    code = code.astype(jnp.uint32)
    magnitude = code & u32(0x7F)
    subnormal = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32) - u32(9 << 23)
    value = jnp.where(magnitude < u32(8), subnormal, (magnitude << u32(20)) + u32(120 << 23))
    value = jnp.where(magnitude == 0, u32(0), value) | (code & u32(0x80)) << u32(24)
    return jnp.where(magnitude == u32(0x7F), NAN, value)
