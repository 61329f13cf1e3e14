"""4over6: each block mapped to 6 or to 4, whichever has the smaller error.  Rules FOUR-OVER-SIX-*.

Both candidates are worked on at once, along a new first axis: [0] maps to 4, [1] to 6.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import Bits, u32
from nvfp4hw.jaxpath.elements import nearest
from nvfp4hw.jaxpath.scales import Factors, of_byte, widened
from nvfp4ref import e2m1, e4m3

FACTORS = bits.constant([1.5, 1.0]).reshape(2, 1, 1)
MAGNITUDES = bits.constant(e2m1.MAGNITUDES)


def choose(
    tiles: jax.Array, element: int, a: Bits, amax: Bits, f: Factors, block: tuple[int, int], ar: nv.Arithmetic
) -> tuple[jax.Array, jax.Array]:
    """(codes, scale bytes) of tiles with block amaxes a; ``f`` gives thresholds (FOUR-OVER-SIX-SELECT)."""
    scales = _scales(a, f.encode)
    codes = _codes(tiles, f.of_block(scales), element)
    if ar.four_over_six_fast_error:
        found, exact = of_byte(_products, scales, jnp.uint32(0)), _scaled(tiles, f.encode, element)
    else:
        found, exact = of_byte(_values, scales, amax, 6 * ar.e4m3_max), widened(tiles)
    difference = _differences(found, codes, exact, element)
    return _select(codes, scales, difference, element, block, ar.four_over_six)


@jax.jit
def _scales(a: Bits, encode: Bits) -> jax.Array:
    """Scale bytes of both candidates: E4(min(fl(fl(fl(a/6)·S)·1.5), 448)), and without the 1.5."""

    def scale(a: Bits, encode: Bits) -> jax.Array:
        base = bits.mul(bits.div(a, bits.constant(6.0)), encode)
        return bits.to_e4m3(bits.minimum(bits.mul(base, FACTORS), bits.constant(e4m3.MAX)))

    return bits.once(scale, a, encode)


@partial(jax.jit, static_argnames="element")
def _codes(tiles: jax.Array, limit: jax.Array, element: int) -> jax.Array:
    """Codes of both candidates."""
    both = jnp.broadcast_to(tiles, (2, *tiles.shape))
    return bits.once(lambda tiles, limit: nearest(tiles, element + 1, limit), both, limit)


def _products(d: Bits, _: Bits) -> Bits:
    """(8, …) magnitude·d, exact."""
    return bits.mul(MAGNITUDES.reshape(8, *[1] * d.ndim), d)


def _values(d: Bits, amax: Bits, maximum: int) -> Bits:
    """(8, …) fl(fl(magnitude·d·A)/M) (FOUR-OVER-SIX-ERROR)."""
    return bits.div(bits.mul(_products(d, amax), amax), bits.constant(maximum))


@partial(jax.jit, static_argnames="element")
def _scaled(tiles: jax.Array, encode: Bits, element: int) -> Bits:
    """fl(x·S) (FOUR-OVER-SIX-FAST-ERROR)."""
    return bits.mul(widened(tiles), jnp.expand_dims(encode, element) if encode.ndim else encode)


@partial(jax.jit, static_argnames="element")
def _differences(found: Bits, codes: jax.Array, exact: Bits, element: int) -> Bits:
    """fl(value − exact) of the elements of both candidates, the values (8, …) being those of their blocks."""

    def difference(found: Bits, codes: jax.Array, exact: Bits) -> Bits:
        value = [jnp.expand_dims(v, element + 1) for v in found]
        for bit in (1, 2, 4):  # by the bits of the code, without a table for each element
            value = [
                jnp.where((codes & bit) != 0, odd, even) for even, odd in zip(value[::2], value[1::2], strict=True)
            ]
        return bits.sub(value[0] ^ (codes >= 8).astype(jnp.uint32) << u32(31), exact)

    return bits.once(difference, found, codes, exact)


@partial(jax.jit, static_argnames=("element", "block", "mode"))
def _select(
    codes: jax.Array, scales: jax.Array, difference: Bits, element: int, block: tuple[int, int], mode: str
) -> tuple[jax.Array, jax.Array]:
    """Map to 4 only where its summed error is smaller."""
    errors = difference & bits.MAGNITUDE if mode == "MAE" else bits.mul(difference, difference)
    pick4 = bits.less(*_block_sums(errors, element, block))
    chosen = jnp.where(jnp.expand_dims(pick4, element), codes[0], codes[1])
    return chosen, jnp.where(pick4, scales[0], scales[1])


def _block_sums(errors: Bits, element: int, block: tuple[int, int]) -> Bits:
    """Elements 0..15 in order from +0; the 16 sums of a 16x16 tile as a tree (FOUR-OVER-SIX-SUM)."""
    in_order = jnp.moveaxis(errors, element + 1, 0)
    total, _ = lax.scan(lambda total, error: (bits.add(total, error), None), jnp.zeros_like(in_order[0]), in_order)
    if block == (1, 16):
        return total
    rows = 3 - element  # the axis of the sums that runs through the rows of the result
    tree = jnp.moveaxis(total, rows, 0)
    tree = tree.reshape(len(tree) // 16, 16, *tree.shape[1:])
    for half in (8, 4, 2, 1):
        tree = bits.add(tree[:, :half], tree[:, half : 2 * half])
    return jnp.moveaxis(jnp.repeat(tree[:, 0], 16, axis=0), 0, rows)
