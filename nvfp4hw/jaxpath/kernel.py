"""Quantization on NVIDIA GPUs in two passes over the input: Pallas (Triton) kernels, a tile of blocks a program.

On a GPU the float32 instructions are IEEE's, subnormals included, once they are named: ``mul.rn``, ``div.rn``,
``rcp.rn`` and ``cvt.rn.satfinite`` are written as PTX, so that no compiler replaces or merges them.  ``Ptx`` and
``Integers`` have the same operations; the second, made of ``bits``, runs the kernels anywhere in interpret mode.
The sum of the Hadamard transform is the tensor core's own.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits, elements, scales, stochastic
from nvfp4hw.jaxpath.bits import u32
from nvfp4ref.scaling import SIXTH

F32, I32 = jnp.float32, jnp.int32

# -- operations ------------------------------------------------------------------------------------------------

_GLOBAL_SCALE = """{
.reg .f32 s; .reg .pred none, zero;
div.rn.f32 s, $1, $2;
setp.eq.f32 none, $2, 0f00000000;
setp.eq.f32 zero, s, 0f00000000;
min.f32 s, s, 0f7F7FFFFF;
@none mov.f32 s, 0f3F800000;
@zero mov.f32 s, 0f3F800000;
mov.f32 $0, s;
}"""
_SCALE_BYTE = """{
.reg .f32 s; .reg .b16 h;
mul.rn.f32 s, $1, $2;
min.f32 s, s, 0f7F7FFFFF;
cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, s;
cvt.u32.u16 $0, h;
}"""
_ENCODE_SCALE = """{
.reg .f32 d; .reg .b16 h, low, high; .reg .b32 pair;
cvt.u16.u32 h, $1;
cvt.rn.f16x2.e4m3x2 pair, h;
mov.b32 {low, high}, pair;
cvt.f32.f16 d, low;
mul.rn.f32 d, d, $2;
rcp.rn.f32 d, d;
min.f32 $0, d, 0f7F7FFFFF;
}"""


def _codes(place: str, fields: tuple[str, ...] = ("", "", "", "")) -> str:
    """PTX that scales four elements, finds their indices by ``place`` and packs the codes into 16 bits."""
    lines = ["{", ".reg .f32 y, m, t, u, v; .reg .b32 i, j, k, s, all, sign, c, r;", "mov.b32 all, 0; mov.b32 sign, 0;"]
    if fields[0]:
        lines.append("prmt.b32 c, $6, $6, 0x3120; brev.b32 r, c;")
    for element in (3, 2, 1, 0):
        lines += [f"mul.rn.f32 y, ${element + 1}, $5;", "abs.f32 m, y;", place, fields[element]]
        lines += ["shl.b32 all, all, 4; add.s32 all, all, i;"]
        lines += [
            f"mov.b32 s, y; shr.u32 s, s, {28 - 4 * element}; and.b32 s, s, {8 << 4 * element}; or.b32 sign, sign, s;"
        ]
    return "\n".join([*lines, "and.b32 all, all, 0x7777; or.b32 $0, all, sign;", "}"])


# rint(2|y|), rint(|y|) + 2 and rint(|y|/2) + 4 stand in the last bits of sums; the index is the least, and 7 at most
_NEAREST = _codes("""add.rn.f32 t, m, 0f4AC00000; add.rn.f32 u, m, 0f4B400000; add.rn.f32 v, m, 0f4BC00000;
mov.b32 i, t; mov.b32 j, u; mov.b32 k, v; add.s32 j, j, 0xFF800002; add.s32 k, k, 0xFF000004;
min.s32 i, i, j; min.s32 i, i, k; min.s32 i, i, 0x4AC00007;""")
# the same cut off, in units of 2^-16 of a step; then the random bits and the carry
_STOCHASTIC = _codes(
    """add.rz.f32 t, m, 0f42800000; add.rz.f32 u, m, 0f43000000; add.rz.f32 v, m, 0f43800000;
mov.b32 i, t; mov.b32 j, u; mov.b32 k, v; add.s32 i, i, 0xBD800000; add.s32 j, j, 0xBD020000; add.s32 k, k, 0xBC840000;
min.s32 i, i, j; min.s32 i, i, k; min.s32 i, i, 0x70000;""",
    tuple(
        f"{part} add.s32 i, i, s; shr.u32 i, i, 16;"
        for part in ("and.b32 s, c, 0xFFFF;", "shr.u32 s, r, 16;", "shr.u32 s, c, 16;", "and.b32 s, r, 0xFFFF;")
    ),
)


class Ptx:
    """The operations as instructions; arrays of one shape each."""

    @staticmethod
    def _asm(code: str, kinds: str, dtype: Any, *args: jax.Array) -> jax.Array:
        from jax.experimental.pallas import triton

        shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
        (result,) = triton.elementwise_inline_asm(
            code, args=args, constraints=kinds, pack=1, result_shape_dtypes=[shape]
        )
        return result

    def divide(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._asm("div.rn.f32 $0, $1, $2;", "=f,f,f", F32, a, b)

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", F32, a, b)

    def product(self, a: jax.Array, b: np.uint32) -> tuple[jax.Array, jax.Array]:
        """(high, low) word of a·b."""
        wide = jnp.full(a.shape, b, jnp.uint32)
        return self._asm("mul.hi.u32 $0, $1, $2;", "=r,r,r", I32, a, wide).astype(jnp.uint32), a * wide

    def magnitude(self, x: jax.Array) -> jax.Array:
        return jnp.abs(x)  # the maximum drops NaN

    def global_scale(self, maximum: jax.Array, amax: jax.Array) -> jax.Array:
        """min(M/A, FLT_MAX), 1 where A or that is 0."""
        return self._asm(_GLOBAL_SCALE, "=f,f,f", F32, maximum, amax)

    def scale_byte(self, a: jax.Array, mult: jax.Array) -> jax.Array:
        """int32 E4M3 bytes of min(a·mult, FLT_MAX)."""
        return self._asm(_SCALE_BYTE, "=r,f,f", I32, a, mult)

    def encode_scale(self, byte: jax.Array, decode: jax.Array) -> jax.Array:
        """min(1/(d·D), FLT_MAX)."""
        return self._asm(_ENCODE_SCALE, "=f,r,f", F32, byte, decode)

    def codes(self, x: tuple[jax.Array, ...], e: jax.Array, words: jax.Array | None) -> jax.Array:
        """int32: the codes of four elements in 16 bits."""
        if words is None:
            return self._asm(_NEAREST, "=r,f,f,f,f,f", I32, *x, e)
        return self._asm(_STOCHASTIC, "=r,f,f,f,f,f,r", I32, *x, e, words)


class Integers:
    """The same operations on bits."""

    @staticmethod
    def _on_bits(function: Any, *args: jax.Array) -> jax.Array:
        return bits.to_float(function(*(bits.of_float(a) for a in args)))

    def divide(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._on_bits(bits.div, a, b)

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._on_bits(bits.mul, a, b)

    def product(self, a: jax.Array, b: np.uint32) -> tuple[jax.Array, jax.Array]:
        return stochastic.multiply(a, b)

    def magnitude(self, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(x), F32(0), jnp.abs(x))

    def global_scale(self, maximum: jax.Array, amax: jax.Array) -> jax.Array:
        a = bits.of_float(amax)
        s = bits.minimum(bits.div(bits.of_float(maximum), a), bits.FLT_MAX)
        return bits.to_float(jnp.where(bits.is_zero(a) | bits.is_zero(s), bits.ONE, s))

    def scale_byte(self, a: jax.Array, mult: jax.Array) -> jax.Array:
        s = bits.minimum(bits.mul(bits.of_float(a), bits.of_float(mult)), bits.FLT_MAX)
        return bits.to_e4m3(s).astype(I32)

    def encode_scale(self, byte: jax.Array, decode: jax.Array) -> jax.Array:
        return bits.to_float(scales.encode_scale(bits.of_e4m3(byte), bits.of_float(decode)))

    def codes(self, x: tuple[jax.Array, ...], e: jax.Array, words: jax.Array | None) -> jax.Array:
        y = [bits.mul(bits.of_float(each), bits.of_float(e)) for each in x]
        if words is None:
            index = [sum((a & bits.MAGNITUDE >= p).astype(I32) for p in elements.POINTS) for a in y]
        else:
            place = [stochastic.grid_position(a & bits.MAGNITUDE) for a in y]
            index = [(p + stochastic.sm100_field(words, u32(i)) >> u32(16)).astype(I32) for i, p in enumerate(place)]
        code = [
            jnp.where(bits.is_nan(a), 7, i | (a >> u32(28) & u32(8)).astype(I32)) for a, i in zip(y, index, strict=True)
        ]
        return code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12


# -- a tile ----------------------------------------------------------------------------------------------------


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x[..., 0] and x[..., 1]."""
    low, high = jnp.split(x, 2, axis=-1)
    return low.reshape(x.shape[:-1]), high.reshape(x.shape[:-1])


def _joined(low: jax.Array, high: jax.Array) -> jax.Array:
    """A new last axis of the two."""
    return jnp.concatenate([low[..., None], high[..., None]], axis=-1)


def _tensor_scale(ops: Any, amax: jax.Array, shape: tuple[int, ...], ar: nv.Arithmetic) -> tuple[jax.Array, jax.Array]:
    """(fl(S·fl(1/6)), D), each in every element of ``shape``."""
    s = ops.global_scale(jnp.full(shape, np.float32(ar.element_max * ar.e4m3_max)), jnp.full(shape, amax))
    sixth = SIXTH if ar.headroom == 1 else np.float32(1) / np.float32(ar.element_max)
    return ops.multiply(s, jnp.full(shape, sixth)), ops.divide(jnp.ones(shape, F32), s)


def _packed(ops: Any, x: jax.Array, e: jax.Array, words: jax.Array | None) -> jax.Array:
    """uint8 (blocks, K/2) packed codes of float32 (blocks, K) under encode scales (blocks,), words (blocks, K/4)."""
    blocks, length = x.shape
    even, odd = _halves(x.reshape(blocks, length // 4, 2, 2))
    (x0, x2), (x1, x3) = _halves(even), _halves(odd)
    codes = ops.codes((x0, x1, x2, x3), jnp.broadcast_to(e[:, None], x0.shape), words)
    return _joined(codes & 0xFF, codes >> 8).reshape(blocks, length // 2).astype(jnp.uint8)


def _rows_kernel(ops: Any, ar: nv.Arithmetic, across: int, *refs: Any) -> None:
    """A tile (rows, blocks, 16) of the input, with 16 rows tiles of 16x16; ``across`` blocks make a row of the result.

    References: amax; for stochastic rounding a Philox key, or a tile (rows, blocks, 4) of words; the tile; results.
    """
    amax_ref, *random_ref, x_ref, packed_ref, scales_ref = refs
    rows, count, _ = x_ref.shape
    # half a block is what one thread loads at once
    halves = [x_ref[:, :, half : half + 8].reshape(rows * count, 8).astype(F32) for half in (0, 8)]
    a = jnp.maximum(jnp.max(jnp.maximum(*map(ops.magnitude, halves)), axis=1), F32(0))  # 0: a block of NaN
    if rows == 16:
        a = jnp.broadcast_to(jnp.max(a.reshape(rows, count), axis=0)[None], (rows, count)).reshape(-1)
    mult, decode = _tensor_scale(ops, amax_ref[0], a.shape, ar)
    byte = ops.scale_byte(a, mult)
    e = ops.encode_scale(byte, decode)
    words: list[Any] = [None, None]
    if random_ref and random_ref[0].ndim == 3:
        words = [random_ref[0][:, :, half : half + 2].reshape(rows * count, 2) for half in (0, 2)]
    elif random_ref:
        row = lax.broadcasted_iota(jnp.uint32, (rows, count), 0) + pl.program_id(0).astype(jnp.uint32) * u32(rows)
        column = lax.broadcasted_iota(jnp.uint32, (rows, count), 1) + pl.program_id(1).astype(jnp.uint32) * u32(count)
        w = stochastic.philox((row * u32(across) + column).reshape(-1), random_ref[0], ops.product)
        words = [_joined(w[0], w[1]), _joined(w[2], w[3])]
    first, second = (_packed(ops, x, e, w) for x, w in zip(halves, words, strict=True))
    packed_ref[...] = _joined(first, second).transpose(0, 2, 1).reshape(rows, count, 8)
    scales_ref[...] = byte.astype(jnp.uint8).reshape(rows, count)


def _transform_kernel(
    ops: Any, x_ref: Any, hadamard_ref: Any, y_ref: Any, plain_ref: Any, transformed_ref: Any
) -> None:
    """A tile (16·blocks, columns) transposed and transformed, and the largest magnitudes of both."""
    rows, columns = x_ref.shape
    x = x_ref[...]
    vectors = x.T.reshape(columns * rows // 16, 16)
    y = jnp.dot(vectors, hadamard_ref[...], preferred_element_type=F32).astype(jnp.bfloat16)
    y_ref[...] = y.reshape(columns, rows)
    plain_ref[0] = jnp.max(ops.magnitude(x.astype(F32)).reshape(-1))
    transformed_ref[0] = jnp.max(ops.magnitude(y.astype(F32)).reshape(-1))


# -- whole tensors ---------------------------------------------------------------------------------------------


def _power_of_two(n: int, limit: int) -> int:
    """The largest power of two that divides n, at most ``limit``."""
    return math.gcd(n, limit)


def _blocks(height: int, length: int, tall: int) -> tuple[tuple[int, int], int]:
    """How the blocks of a result lie for ``rows``, and how many stand side by side in a tile of ``tall`` rows."""
    across = length // 16
    shape = (height, across) if tall == 16 else (1, height * across)  # blocks of 1x16 know no rows
    return shape, _power_of_two(shape[1], 512 // tall)


def _shaped(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the mesh axes of a shard_map as x does."""
    return jax.eval_shape(lambda x: x, x).update(shape=shape, dtype=dtype, sharding=None)


def _call(kernel: Any, interpret: bool, warps: int, **specs: Any) -> Any:
    if interpret:
        return pl.pallas_call(kernel, interpret=True, **specs)
    from jax.experimental.pallas import triton

    return pl.pallas_call(kernel, compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1), **specs)


def rows(
    x: jax.Array,
    amax: jax.Array,
    random: jax.Array | None,
    block: tuple[int, int],
    ar: nv.Arithmetic,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(packed, scales) of a matrix x, rowwise, under a float32 amax; ``random``: a Philox key, words, or None."""
    (height, length), tall = x.shape, block[0]
    shape, count = _blocks(height, length, tall)
    inputs, specs = [amax.reshape(1)], [pl.BlockSpec((1,), lambda i, j: (0,))]
    if random is not None and random.ndim == 1:
        inputs, specs = [*inputs, random], [*specs, pl.BlockSpec((2,), lambda i, j: (0,))]
    elif random is not None:
        inputs.append(random.reshape(*shape, 4))
        specs.append(pl.BlockSpec((tall, count, 4), lambda i, j: (i, j, 0)))
    packed, scales_ = _call(
        partial(_rows_kernel, Integers() if interpret else Ptx(), ar, shape[1]),
        interpret,
        max(1, min(4, tall * count // 64)),
        grid=(shape[0] // tall, shape[1] // count),
        in_specs=[*specs, pl.BlockSpec((tall, count, 16), lambda i, j: (i, j, 0))],
        out_specs=[
            pl.BlockSpec((tall, count, 8), lambda i, j: (i, j, 0)),
            pl.BlockSpec((tall, count), lambda i, j: (i, j)),
        ],
        out_shape=[_shaped(x, (*shape, 8), jnp.uint8), _shaped(x, shape, jnp.uint8)],
    )(*inputs, x.reshape(*shape, 16))
    return packed.reshape(height, -1), scales_.reshape(height, -1)


def amax(x: jax.Array) -> jax.Array:
    """max(abs(x)), float32, NaN ignored: of the magnitudes as integers, which XLA reduces at the memory's speed."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32 if x.dtype == F32 else jnp.uint16)
    magnitude = pattern & pattern.dtype.type(np.iinfo(pattern.dtype).max // 2)
    infinity = lax.bitcast_convert_type(jnp.asarray(jnp.inf, x.dtype), pattern.dtype)
    largest = jnp.max(jnp.where(magnitude > infinity, pattern.dtype.type(0), magnitude))
    return lax.bitcast_convert_type(largest, x.dtype).astype(F32)


def transform(x: jax.Array, sign_mask: int, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the transpose of bfloat16 x, transformed; max(abs(x)); the transform's), NaN ignored."""
    height, width = x.shape
    tall, wide = 16 * _power_of_two(height // 16, 4), _power_of_two(width, 128)
    grid = (height // tall, width // wide)
    number = pl.BlockSpec((1,), lambda i, j: (i * grid[1] + j,))
    y, plain, transformed = _call(
        partial(_transform_kernel, Integers() if interpret else Ptx()),
        interpret,
        4,
        grid=grid,
        in_specs=[pl.BlockSpec((tall, wide), lambda i, j: (i, j)), pl.BlockSpec((16, 16), lambda i, j: (0, 0))],
        out_specs=[pl.BlockSpec((wide, tall), lambda i, j: (j, i)), number, number],
        out_shape=[
            _shaped(x, (width, height), jnp.bfloat16),
            *[_shaped(x, (grid[0] * grid[1],), F32)] * 2,
        ],
    )(x, jnp.asarray(nv.RHT(sign_mask=sign_mask).matrix(), jnp.bfloat16))
    return y, jnp.max(plain), jnp.max(transformed)


@functools.cache
def _device() -> bool:
    """Whether this JAX lowers Triton kernels with PTX, and the GPUs have compute capability 9.0 or more."""
    try:
        from jax.experimental.pallas import triton  # deprecated, and so it may go

        there = hasattr(triton, "elementwise_inline_asm") and hasattr(triton, "CompilerParams")
        return there and all(float(gpu.compute_capability) >= 9 for gpu in jax.local_devices(backend="cuda"))
    except (ImportError, RuntimeError, AttributeError, ValueError):
        return False


def fits(x: jax.Array, how: Any, random: jax.Array | None) -> bool:
    """Whether the kernels serve this call, should it run on a GPU; otherwise XLA compiles the integers."""
    if not _device() or how.ar.row_scaled or how.ar.four_over_six:
        return False
    if random is not None and how.ar.stochastic != "sm100":
        return False
    length, tall = x.shape[how.axis], how.block[0]
    height = x.size // length
    if tall * _blocks(height, length, tall)[1] < 16:
        return False  # an odd number of blocks would be as many programs, and Triton fails on some of a single block
    # tensor core tiles
    return how.rht is None or _power_of_two(length // 16, 4) * _power_of_two(height, 128) >= 64
