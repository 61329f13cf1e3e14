"""Tiles, amax and scales.  Rules INPUT-WIDEN, AMAX-*, SCALE-GLOBAL, SCALE-GLOBAL-GUARD, SCALE-BLOCK, SCALE-ENCODE.

Tiles lie as the input does: (rows, blocks, 16) rowwise, (blocks, 16, rows) columnwise, rows being those of the
result.  ``element`` is the axis of the 16, 2 or 1, and values of a block have the shape without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import Bits, u32
from nvfp4ref.scaling import SIXTH


class Scale(NamedTuple):
    """The two forms of the global scale, bits, () or one value a row."""

    encode: Bits
    decode: Bits


# -- tiles and amax --------------------------------------------------------------------------------------------


def tiles_of(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """(tiles of x as bit patterns, the axis of the 16 elements): uint16 for bfloat16, else uint32."""
    pattern = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else bits.of_float(x)
    if axis == 0:
        return pattern.reshape(x.shape[0] // 16, 16, x.shape[1]), 1
    return pattern.reshape(-1, x.shape[-1] // 16, 16), 2


def magnitudes(pattern: jax.Array) -> jax.Array:
    return pattern & pattern.dtype.type(np.iinfo(pattern.dtype).max // 2)


def widened(pattern: jax.Array) -> Bits:
    """float32 bits of bfloat16 patterns; float32 bits as they are."""
    return pattern.astype(jnp.uint32) << u32(16) if pattern.dtype == jnp.uint16 else pattern


@partial(jax.jit, static_argnames=("element", "block"))
def block_amax(tiles: jax.Array, element: int, block: tuple[int, int]) -> Bits:
    """Largest magnitude of each block, NaN ignored, repeated over the 16 rows of a 16x16 tile."""
    return bits.once(partial(_block_amax, element=element, block=block), tiles)


def _block_amax(tiles: jax.Array, element: int, block: tuple[int, int]) -> Bits:
    m = magnitudes(tiles)
    infinity = m.dtype.type(0x7F80) if m.dtype == jnp.uint16 else bits.INFINITY
    m = jnp.where(m > infinity, m.dtype.type(0), m)
    while m.shape[element] > 1:  # by halves: a reduction over 16 is not vectorised on a CPU
        half = m.shape[element] // 2
        m = jnp.maximum(lax.slice_in_dim(m, 0, half, axis=element), lax.slice_in_dim(m, half, 2 * half, axis=element))
    a = jnp.squeeze(m, element)
    if block == (16, 16):
        rows = 2 - element  # the axis of a that runs through the rows of the result
        groups = a.reshape(*a.shape[:rows], a.shape[rows] // 16, 16, *a.shape[rows + 1 :])
        a = jnp.repeat(groups.max(axis=rows + 1), 16, axis=rows)
    return widened(a)


def tensor_amax(a: Bits, element: int, ar: nv.Arithmetic) -> Bits:
    """The largest block amax, () or one value a row (rule AMAX-ROW)."""
    return a.max(axis=element - 1, keepdims=True) if ar.row_scaled else a.max()


# -- scales: each stage is compiled apart when it is not called under a jit of the caller's -----------------------


def scale_chain(amax: Bits, d: Bits, ar: nv.Arithmetic) -> tuple[Scale, Bits]:
    """(S and D, the encode scales of decoded block scales d): SCALE-GLOBAL, SCALE-GLOBAL-GUARD, SCALE-ENCODE.

    S = fmin(fl(M/A), FLT_MAX), 1 if A or S is 0; D = fl(1/S); e = fmin(fl(1/fl(d·D)), FLT_MAX).  Each is a number over
    the one before, times 1 or d, so that one division in a loop of three is all that has to be compiled.
    """
    shape = jnp.broadcast_shapes(amax.shape, d.shape)
    one = jnp.full(shape, bits.ONE)
    over = jnp.stack([jnp.full(shape, bits.constant(ar.element_max * ar.e4m3_max)), one, one])
    times = jnp.stack([one, one, jnp.broadcast_to(d, shape)])
    without = bits.is_zero(amax)

    def step(value: Bits, x: tuple[Bits, Bits, jax.Array]) -> tuple[Bits, Bits]:
        numerator, factor, first = x
        found = bits.minimum(bits.div(numerator, bits.mul(factor, value)), bits.FLT_MAX)
        found = jnp.where(first & (without | bits.is_zero(found)), bits.ONE, found)
        return found, found

    _, (s, decode, e) = lax.scan(step, jnp.broadcast_to(amax, shape), (over, times, np.arange(3) == 0))
    return Scale(s, decode), e


@partial(jax.jit, static_argnames="ar")
def block_scale(a: Bits, encode: Bits, ar: nv.Arithmetic) -> jax.Array:
    """E4M3 bytes of fmin(fl(a·fl(S·fl(1/6))), FLT_MAX)."""
    sixth = bits.constant(SIXTH if ar.headroom == 1 else np.float32(1) / np.float32(ar.element_max))

    def scale(a: Bits, encode: Bits) -> jax.Array:
        return bits.to_e4m3(bits.minimum(bits.mul(a, bits.mul(encode, sixth)), bits.FLT_MAX))

    return bits.once(scale, a, encode)


def encode_scale(d: Bits, decode: Bits) -> Bits:
    """e = fmin(fl(1/fl(d·D)), FLT_MAX) of decoded block scales d."""
    return bits.minimum(bits.div(bits.ONE, bits.mul(d, decode)), bits.FLT_MAX)


BYTES = np.arange(256, dtype=np.uint32)
Compute = Callable[..., jax.Array]  # of encode scales, and static arguments


class Factors(NamedTuple):
    """What a tensor's amax gives: S, and ``of_block(scale bytes)``, what was asked for of each block."""

    encode: Bits
    of_block: Callable[[jax.Array], jax.Array]


def factors(amaxes: list[Bits], compute: Compute, static: tuple[Hashable, ...], ar: nv.Arithmetic) -> list[Factors]:
    """Factors of several tensors, of_block giving compute(e, *static): by tables of the 256 bytes, made together.

    Row-scaled tensors have no tables: every row has its own D.
    """
    if ar.row_scaled:
        scales = [_row_scales(amax, ar) for amax in amaxes]
        return [Factors(s.encode, partial(_of_row_scaled, compute, static, decode=s.decode)) for s in scales]
    encode, table = _tables(compute, static, jnp.stack(amaxes), ar)
    return [Factors(encode[i], partial(_of_byte, table[..., i, :])) for i in range(len(amaxes))]


@partial(jax.jit, static_argnums=(0, 1, 3))
def _tables(compute: Compute, static: tuple[Hashable, ...], amaxes: Bits, ar: nv.Arithmetic) -> tuple[Bits, jax.Array]:
    def made(amaxes: Bits) -> tuple[Bits, jax.Array]:
        scale, e = scale_chain(amaxes[:, None], bits.of_e4m3(BYTES), ar)
        return scale.encode[:, 0], compute(e, *static)

    return bits.once(made, amaxes)


@partial(jax.jit, static_argnames="ar")
def _row_scales(amax: Bits, ar: nv.Arithmetic) -> Scale:
    return scale_chain(amax, bits.ONE, ar)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _of_row_scaled(compute: Compute, static: tuple[Hashable, ...], scales: jax.Array, decode: Bits) -> jax.Array:
    e = bits.once(lambda scales, decode: encode_scale(bits.of_e4m3(scales), decode), scales, decode)
    return bits.once(lambda e: compute(e, *static), e)


@jax.jit
def _of_byte(table: jax.Array, scales: jax.Array) -> jax.Array:
    return table[..., scales]


def of_byte(compute: Callable[..., jax.Array], scales: jax.Array, tensor: Bits, *static: Hashable) -> jax.Array:
    """compute(d, tensor, *static) of each block, d its decoded scale and ``tensor`` a value of the tensor's: by a table
    of the 256 bytes, unless every row has a value of its own."""
    if tensor.ndim:
        return _of_block(compute, static, scales, tensor)
    return _of_byte(_table(compute, static, tensor), scales)


@partial(jax.jit, static_argnums=(0, 1))
def _of_block(compute: Compute, static: tuple[Hashable, ...], scales: jax.Array, tensor: Bits) -> jax.Array:
    return bits.once(lambda scales, tensor: compute(bits.of_e4m3(scales), tensor, *static), scales, tensor)


@partial(jax.jit, static_argnums=(0, 1))
def _table(compute: Compute, static: tuple[Hashable, ...], tensor: Bits) -> jax.Array:
    return bits.once(lambda tensor: compute(bits.of_e4m3(BYTES), tensor, *static), tensor)
