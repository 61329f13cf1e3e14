"""Nearest-even elements without a multiplication, and packing.  Rules ELEMENT-SCALE, E2M1-*.

The encode scale of a tensor is a function of the block's scale byte, so for each of the 256 bytes seven magnitudes are
computed, the least that reach the next code; the code of an element is the number of them that it reaches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import Bits, u32
from nvfp4hw.jaxpath.scales import magnitudes
from nvfp4ref import e2m1

POINTS = bits.constant(np.array(e2m1.ROUNDING["nearest-even"]))  # least magnitudes of the codes 1..7


def thresholds(e: Bits) -> Bits:
    """For encode scales (…), (8, …): the seven least magnitudes m with fl(m·|e|) at a decision point, and the least
    whose code has no sign.

    fl(m·|e|) reaches a point where the exact product reaches the middle between it and the float below, a tie going
    to the even one of the two: an integer division.
    """
    n, exponent = bits.split(e)
    n = n << u32(1)
    point = POINTS.reshape(7, *[1] * e.ndim)
    middle = (point & bits.FRACTION | bits.HIDDEN) * u32(2) - u32(1)
    smaller = (middle < n).astype(jnp.uint32)
    quotient, remainder = bits.divide(middle << smaller, n)
    exponent = 127 + (point >> u32(23)).astype(np.int32) - exponent - smaller.astype(jnp.int32)
    shift = jnp.clip(3 - exponent, 2, 31).astype(jnp.uint32)
    least = quotient >> shift
    beyond = ((least << shift) != quotient) | (remainder != 0) | ((point & u32(1)) != 0)
    least += beyond.astype(jnp.uint32) + (jnp.clip(exponent - 1, 0, 254).astype(jnp.uint32) << u32(23))
    infinite = (e & bits.MAGNITUDE) == bits.INFINITY  # only a negative amax leads here, and only to blocks of zeros
    least = jnp.where(infinite, u32(0), jnp.minimum(least, bits.INFINITY))
    return jnp.concatenate([least, jnp.where(infinite, u32(0), bits.INFINITY + u32(1))[None]])


def limits(e: Bits, dtype: Any) -> jax.Array:
    """The thresholds of encode scales as patterns of that width, (8, …)."""
    limit = thresholds(e)
    return ((limit + u32(0xFFFF)) >> u32(16)).astype(jnp.uint16) if dtype == jnp.uint16 else limit


@jax.jit
def encode(y: Bits) -> jax.Array:
    """uint8 E2M1 codes of float32 bits (rules E2M1-RNE, E2M1-SATURATE, E2M1-NAN)."""
    magnitude = y & bits.MAGNITUDE
    index = sum(((magnitude >= point).astype(jnp.uint32) for point in POINTS), start=u32(0))
    return jnp.where(bits.is_nan(y), u32(7), index | (y >> u32(28) & u32(8))).astype(jnp.uint8)


@partial(jax.jit, static_argnames="element")
def nearest(tiles: jax.Array, element: int, limit: jax.Array) -> jax.Array:
    """uint8 E2M1 codes of tiles by their blocks' thresholds."""
    m = magnitudes(tiles)
    limit = jnp.expand_dims(limit, element + 1)
    code = (m >= limit[0]).astype(m.dtype)
    for k in range(1, 7):
        code += (m >= limit[k]).astype(m.dtype)
    negative = (tiles > m) & (m < limit[7])
    return (code | negative.astype(m.dtype) << m.dtype.type(3)).astype(jnp.uint8)


@partial(jax.jit, static_argnames="element")
def pack(codes: jax.Array, element: int) -> jax.Array:
    """Codes of tiles to bytes, 8 in place of 16, the even element in the low nibble (rule E2M1-PACK)."""
    if element == 1:  # apart from the transpose that follows
        return bits.once(lambda codes: codes[:, 0::2] | codes[:, 1::2] << np.uint8(4), codes)
    # one 16-bit word for two codes: strided access is slow on a CPU
    pairs = lax.bitcast_convert_type(lax.optimization_barrier(codes).reshape(*codes.shape[:2], 8, 2), jnp.uint16)
    return (pairs | pairs >> np.uint16(4)).astype(jnp.uint8)
