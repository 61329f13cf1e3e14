"""Stochastic rounding: where the random numbers come from, and the rules SR-SM100, SR-FALLBACK, SR-IDEAL.

``random`` is an array throughout: the two words of a Philox key, (2,) uint32; words (rows, K/4) uint32; or uniforms
(rows, K) float32 for the rule "ideal".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits
from nvfp4hw.jaxpath.bits import Bits, u32
from nvfp4ref import e2m1
from nvfp4ref.philox import MULTIPLIERS, WEYL

ROUNDS = 10
STEP = 16  # a grid step is 2^16
Words = tuple[Bits, Bits, Bits, Bits]
SIX, TWO, FOUR = (bits.constant(x) for x in (6.0, 2.0, 4.0))
VALUES = bits.constant(e2m1.VALUES)


def of(rbits: Any, rule: str, x: jax.Array, axis: int, block: tuple[int, int], rht: bool) -> jax.Array:
    """The array that the argument rbits of ``quantize`` stands for; TypeError or ValueError for what it cannot be."""
    matrix = (x.size // x.shape[-1], x.shape[-1])
    rows, length = matrix if axis == -1 else matrix[::-1]
    uniform = rule == "ideal"
    if not uniform and isinstance(rbits, nv.Philox):
        return jnp.asarray(rbits.words(matrix, axis, dtype=jnp.dtype(x.dtype).name, block=block, rht=rht))
    if not uniform and is_key(rbits):
        return philox_key(rbits)
    found = getattr(rbits, "dtype", type(rbits).__name__)
    if found != (jnp.float32 if uniform else jnp.uint32):
        takes = (
            "float32 uniforms in [0, 1), one an element"
            if uniform
            else "a JAX key, an nvfp4ref.Philox, or uint32 words, one for 4 elements"
        )
        raise TypeError(f"rbits for the rule {rule!r} are {takes}; got {found}")
    shape = (rows, length if uniform else length // 4)
    if rbits.shape != shape:
        raise ValueError(f"rbits for the rule {rule!r} have shape {shape} here; got {rbits.shape}")
    return jnp.asarray(rbits)


def is_key(rbits: Any) -> bool:
    """Whether it is a JAX key: one of the new kind, or the two or four uint32 of the old."""
    dtype = getattr(rbits, "dtype", None)
    if dtype is None:
        return False
    old = dtype == jnp.uint32 and rbits.shape in ((2,), (4,))
    return old or bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def as_key(key: Any) -> Any:
    """A JAX key of either kind as one of the new kind."""
    if key.dtype == jnp.uint32:
        configured = str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]  # rbg or unsafe_rbg, of four words
        four = configured if configured.endswith("rbg") else "rbg"
        return jax.random.wrap_key_data(key, impl={2: "threefry2x32", 4: four}[key.shape[0]])
    return key


def both_keys(key: Any) -> tuple[Bits, Bits]:
    """The Philox keys of a tensor's rowwise and columnwise result: those of the JAX key folded with 0 and 1."""
    first, second = (philox_key(jax.random.fold_in(as_key(key), i)) for i in (0, 1))
    return first, second


def philox_key(key: Any) -> Bits:
    """The two words that a JAX key gives Philox; ValueError for several keys."""
    key = as_key(key)
    if key.ndim:
        raise ValueError(f"rbits is one JAX key; got keys of shape {key.shape}: fold or split it before the call")
    return jax.random.bits(key, (2,), jnp.uint32)


def words(key: Any, shape: tuple[int, int]) -> Bits:
    """The words of a JAX key for a result (rows, K): uint32 (rows, K/4).

    The n-th block has the four words of Philox4x32-10 with counter (n, 0, 0, 0) and key jax.random.bits(key, (2,)).
    """
    rows, length = shape
    return _tiles(philox_key(key), (rows, length // 16, 16), 2).reshape(rows, length // 4)


def _tiles(random: jax.Array, shape: tuple[int, ...], element: int) -> jax.Array:
    """The random numbers of tiles of that shape, with 4 words or 16 uniforms in place of the 16 elements."""
    rows, blocks = (shape[0], shape[1]) if element == 2 else (shape[2], shape[0])
    if random.ndim == 2:
        lying = random.reshape(rows, blocks, -1)
        return lying if element == 2 else lying.transpose(1, 2, 0)
    plane = (rows, blocks) if element == 2 else (blocks, rows)
    row, block = (lax.broadcasted_iota(jnp.uint32, plane, d) for d in (2 - element, element - 1))
    zero = row & (random[0] & u32(0))  # varies over the axes of a shard_map as the key does
    # a loop: ten rounds in a row take longer to compile than all the rest
    state, _ = lax.scan(
        lambda state, number: (philox_round(state, random + number * np.array(WEYL, np.uint32)), None),
        (row * u32(blocks) + block + zero, zero, zero, zero),
        np.arange(ROUNDS, dtype=np.uint32),
        unroll=2,
    )
    return jnp.stack(state, axis=element)


def multiply(a: Bits, b: np.uint32) -> tuple[Bits, Bits]:
    """(high, low) word of a·b."""
    a1, a0, b1, b0 = a >> u32(16), a & u32(0xFFFF), b >> u32(16), b & u32(0xFFFF)
    middle = a1 * b0 + ((a0 * b0) >> u32(16))
    other = a0 * b1 + (middle & u32(0xFFFF))
    return a1 * b1 + (middle >> u32(16)) + (other >> u32(16)), a * b


def philox(n: Bits, key: Any, product: Any = multiply) -> Words:
    """Philox4x32-10 of the counters (n, 0, 0, 0) (rule PHILOX-ROUNDS)."""
    zero = jnp.zeros_like(n)
    state = (n, zero, zero, zero)
    for number in range(ROUNDS):
        moved = [key[i] + u32(number * WEYL[i] % 2**32) for i in (0, 1)]
        state = philox_round(state, moved, product)
    return state


def philox_round(state: Words, key: Any, product: Any = multiply) -> Words:
    """One round."""
    x, y, z, w = state
    (high0, low0), (high1, low1) = (product(a, u32(int(m))) for a, m in zip((x, z), MULTIPLIERS, strict=True))
    return high1 ^ y ^ key[0], low1, high0 ^ w ^ key[1], low0


# -- rounding --------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("element", "ar"))
def codes(pattern: jax.Array, e: Bits, random: jax.Array, element: int, ar: nv.Arithmetic) -> jax.Array:
    """uint8 codes of tiles times their blocks' encode scales (``factor``), by the arithmetic's rule."""
    narrow = pattern.dtype == jnp.uint16
    x = pattern.astype(jnp.uint32) << u32(16) if narrow else pattern
    magnitude, e = x & bits.MAGNITUDE, jnp.expand_dims(e, element + 1)
    index = RULES[ar.stochastic](magnitude, e, _tiles(random, x.shape, element), element, narrow)
    e = e[0]
    # x·Inf is NaN: the block is all zeros then
    nan = (magnitude > bits.INFINITY) | ((e & bits.MAGNITUDE) == bits.INFINITY)
    return jnp.where(nan, u32(7), index | (x >> u32(28) & u32(8))).astype(jnp.uint8)


def _of_elements(word: Bits, element: int) -> tuple[Bits, Bits]:
    """For each of the 16 elements its word and its number there, 0 to 3."""
    word = jnp.repeat(word, 4, axis=element)
    return word, lax.broadcasted_iota(jnp.uint32, word.shape, element) & u32(3)


def grid_position(magnitude: Bits) -> Bits:
    """Place on the code grid in units of 2^-16 of a step, cut off; 6 and above, Inf and NaN: 7·2^16."""
    m = jnp.minimum(magnitude, SIX)
    shift = jnp.clip(133 - (m >> u32(23)).astype(jnp.int32), 0, 31).astype(jnp.uint32)
    return _on_grid((m & bits.FRACTION | bits.HIDDEN) >> shift)


def _on_grid(t: Bits) -> Bits:
    """The same from |y|·2^17, at most 6·2^17."""
    return jnp.minimum(t, jnp.minimum((t >> u32(1)) + u32(2 << STEP), (t >> u32(2)) + u32(4 << STEP)))


def factor(e: Bits) -> Bits:
    """(3, …): encode scales, their significands and their exponents."""
    significand, exponent = bits.split(e)
    return jnp.stack([e, significand, exponent.astype(jnp.uint32)])


def product_position(magnitude: Bits, e: Bits, narrow: bool) -> Bits:
    """grid_position(fl(magnitude·e)), the product rounded to 24 bits but never made a float."""
    (m, i), n, j = bits.split(magnitude), e[1], e[2].astype(jnp.int32)
    window, top = bits.product(m, n, narrow)
    kept = window >> u32(8)
    kept += ((window & u32(0xFF)) + (kept & u32(1))) > u32(0x80)
    exponent = i + j - 127 + top.astype(jnp.int32)  # of kept·2^-23, biased
    t = kept >> jnp.clip(133 - exponent, 0, 31).astype(jnp.uint32)
    t = jnp.where(exponent > 129, u32(6 << 17), jnp.minimum(t, u32(6 << 17)))
    return _on_grid(jnp.where(magnitude == 0, u32(0), t))


def sm100_field(word: Bits, i: Any) -> Bits:
    """The 16 random bits of element i, 0 to 3, of a word: bytes 0 and 2 or 1 and 3, reversed for odd i (SR-SM100)."""
    pair = word >> ((i >> u32(1)) << u32(3))
    field = pair & u32(0xFF) | pair >> u32(8) & u32(0xFF00)
    mirrored = field
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        mirrored = (mirrored >> u32(shift) & u32(mask)) | (mirrored & u32(mask)) << u32(shift)
    return jnp.where((i & u32(1)) == 0, field, mirrored)


def _sm100(magnitude: Bits, e: Bits, word: Bits, element: int, narrow: bool) -> Bits:
    """16 random bits added to the discarded fraction; away from zero on a carry."""
    return (product_position(magnitude, e, narrow) + sm100_field(*_of_elements(word, element))) >> u32(STEP)


def _fallback(magnitude: Bits, e: Bits, word: Bits, element: int, narrow: bool) -> Bits:
    """t = fl(|y| + byte/256·step(|y|)), cut to the grid; element i takes byte i."""
    y = bits.mul(magnitude, e[0]) & bits.MAGNITUDE
    word, i = _of_elements(word, element)
    byte = word >> (i << u32(3)) & u32(0xFF)
    double = (y >= TWO).astype(jnp.uint32) + (y >= FOUR).astype(jnp.uint32)  # the step is 2^(double − 1)
    jitter = lax.bitcast_convert_type(byte.astype(jnp.float32), jnp.uint32) + ((double - u32(9)) << u32(23))
    return grid_position(bits.add(y, jnp.where(byte == 0, u32(0), jitter))) >> u32(STEP)


def _ideal(magnitude: Bits, e: Bits, uniform: jax.Array, element: int, narrow: bool) -> Bits:
    """Up where uniform·step < |y| − the code below; both sides are exact."""
    y = bits.mul(magnitude, e[0]) & bits.MAGNITUDE
    below = grid_position(y) >> u32(STEP)
    low, high = (jnp.asarray(VALUES)[code] for code in (below, jnp.minimum(below + u32(1), u32(7))))
    up = bits.less(bits.mul(bits.of_float(uniform), bits.sub(high, low)), bits.sub(y, low))
    return below + (up & (below < u32(7))).astype(jnp.uint32)


RULES: dict[str, Callable[[Bits, Bits, jax.Array, int, bool], Bits]] = {
    "sm100": _sm100,
    "te-fallback": _fallback,
    "ideal": _ideal,
}
