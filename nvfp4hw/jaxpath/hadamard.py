"""The random Hadamard transform with the tensor core's sum, in integers.  Rules RHT-MATRIX, RHT-SUM, RHT-ROUND."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import u32

SIZE = 16


def require(rht: nv.RHT, dtype: Any) -> None:
    """TypeError or ValueError unless the JAX path has this transform of this dtype."""
    if not isinstance(rht, nv.RHT):
        raise TypeError(f"rht is an nvfp4ref.RHT or None; got {type(rht).__name__}")
    if dtype != jnp.bfloat16:
        raise TypeError(
            f"the Hadamard transform reads bfloat16; got {jnp.dtype(dtype).name}: x.astype(jnp.bfloat16) first"
        )
    if (rht.size, rht.normalised, rht.round_to, rht.signs_on) != (SIZE, True, "bfloat16", "input"):
        raise ValueError(
            "the JAX path has the transform of 16 elements, normalised, rounded to bfloat16, signs on the input, as "
            f"Transformer Engine has; got {rht}: nvfp4ref.quantize has the others"
        )


@partial(jax.jit, static_argnames=("element", "sign_mask"))
def transform(tiles: jax.Array, element: int, sign_mask: int) -> jax.Array:
    """bfloat16 patterns, uint16, transformed along the axis ``element`` of 16.

    Every element is cut to 25 bits below the leading bit of the largest, the sums of 16 are exact in int32, cut to
    24 bits toward zero, and rounded to bfloat16.
    """
    x = tiles.astype(jnp.uint32)
    magnitude = x & u32(0x7FFF)
    field = jnp.maximum(magnitude >> u32(7), u32(1))
    largest = field.max(axis=element, keepdims=True)
    significand = (magnitude & u32(0x7F)) + jnp.where(magnitude < u32(0x80), u32(0), u32(0x80))
    aligned = (significand << u32(18)) >> jnp.minimum(largest - field, u32(31))
    special = largest == u32(255)  # the infinities are counted instead
    infinite = magnitude == u32(0x7F80)
    aligned = jnp.where(special, infinite.astype(jnp.uint32), aligned).astype(jnp.int32)
    negated = np.array([sign_mask >> i & 1 for i in range(SIZE)], bool).reshape(
        [-1 if d == element else 1 for d in range(3)]
    )
    total = _butterfly(jnp.where((x > u32(0x7FFF)) ^ negated, -aligned, aligned), element)

    size = jnp.abs(total).astype(jnp.uint32)
    sign = jnp.where(total < 0, u32(0x8000), u32(0))
    shift = lax.clz(size)
    exponent = largest.astype(jnp.int32) + 4 - shift.astype(jnp.int32)
    finite = sign | bits.rounded((size << shift) & u32(0xFFFFFF00), exponent, keep=8)
    nan = (magnitude > u32(0x7F80)).any(axis=element, keepdims=True)
    nan |= size != infinite.sum(axis=element, keepdims=True, dtype=jnp.uint32)  # +Inf and -Inf met
    y = jnp.where(special, jnp.where(nan, u32(0x7FFF), sign | u32(0x7F80)), jnp.where(total == 0, u32(0), finite))
    return y.astype(jnp.uint16)


def _butterfly(total: jax.Array, element: int) -> jax.Array:
    """Hadamard sums over an axis of 16, natural order, exact."""
    before, after = total.shape[:element], total.shape[element + 1 :]
    for half in (1, 2, 4, 8):
        pairs = total.reshape(*before, SIZE // (2 * half), 2, half, *after)
        low, high = (lax.index_in_dim(pairs, i, element + 1, keepdims=False) for i in (0, 1))
        total = jnp.stack([low + high, low - high], axis=element + 1).reshape(*before, SIZE, *after)
    return total
