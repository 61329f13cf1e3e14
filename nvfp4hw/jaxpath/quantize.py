"""quantize() and dequantize() of nvfp4ref in jax.numpy, bit for bit, under jit, vmap and any XLA.

No float operation decides a bit: scales go through ``bits``, float32 in integers, and elements through thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4ref as nv
from nvfp4hw.jaxpath import bits, four_over_six, hadamard, kernel, stochastic
from nvfp4hw.jaxpath.bits import Bits
from nvfp4hw.jaxpath.elements import limits, nearest, pack
from nvfp4hw.jaxpath.scales import block_amax, block_scale, factors, of_byte, tensor_amax, tiles_of
from nvfp4hw.jaxpath.tensor import DTYPES, NVFP4Array, as_array, own_settings, supported, without_gradient
from nvfp4ref import e2m1
from nvfp4ref.blocks import as_block

CODE_VALUES = bits.constant(e2m1.VALUES)
Pair = tuple[jax.Array | None, jax.Array | None]


class How(NamedTuple):
    """What is fixed when a quantization is traced."""

    axis: int
    block: tuple[int, int]
    rht: nv.RHT | None
    ar: nv.Arithmetic
    across: tuple[str, ...] = ()

    def whole(self, amax: jax.Array) -> jax.Array:
        """The largest of the devices' float32 amaxes, taken on their bits, which no device flushes."""
        if not self.across:
            return amax
        return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), self.across), amax.dtype)


@own_settings
def quantize(
    x: Any,
    *,
    block: tuple[int, int] = (1, 16),
    axis: int = -1,
    rounding: str = "nearest-even",
    rbits: Any = None,
    rht: nv.RHT | None = None,
    amax: Any = None,
    arithmetic: str | nv.Arithmetic = "te",
    threads: int = 1,
    across: Sequence[str] = (),
) -> NVFP4Array:
    """Quantize to NVFP4, bit for bit as ``nvfp4ref.quantize`` does.

    Args:
        x: (…, K) float32, bfloat16 or float16, a JAX array or what ``nvfp4ref.quantize`` takes; leading dimensions are
            flattened to rows and restored.
        block: (1, 16), or (16, 16) for one scale a tile.
        axis: −1 rowwise; 0 quantizes the transpose of a matrix.
        rounding: "nearest-even" or "stochastic".
        rbits: for stochastic rounding: uint32 words (rows, K/4) of the result; a JAX key, whose words are those of
            ``stochastic.words``; an nvfp4ref.Philox; for the rule "ideal" float32 uniforms (rows, K).
        rht: the random Hadamard transform along the blocked axis, before amax; bfloat16 input, 16 elements.
        amax: float32, used in place of max(abs(x)); one a row of the result when the arithmetic is row-scaled.
        arithmetic: a preset's name or an Arithmetic whose fields this path has (see ``tensor.supported``).
        threads: of the oracle; here XLA has its own, and it changes nothing.
        across: inside shard_map, the mesh axes over whose devices the tensor is split: amax is the whole tensor's.
    Returns:
        NVFP4Array of JAX arrays.
    Raises:
        TypeError, ValueError: while tracing, as nvfp4ref does, with what was given and what to do.
    """
    x, how = _checked(x, block, axis, rounding, rbits, rht, arithmetic, across)
    if amax is not None and across:
        raise ValueError("amax is given, or taken across the devices of a mesh; not both")
    random = None if rbits is None else stochastic.of(rbits, how.ar.stochastic, x, axis, how.block, rht is not None)
    given = None if amax is None else _given_amax(amax, x.size // x.shape[axis], how.ar)
    if kernel.fits(x, how, random):
        return _on_either(x, random, given, how)
    return _on_xla(x, random, given, how=how)


@own_settings
def quantize_both(
    x: Any,
    *,
    block: tuple[int, int] = (1, 16),
    rounding: str = "nearest-even",
    rbits: Any = None,
    rht: nv.RHT | None = None,
    arithmetic: str | nv.Arithmetic = "te",
    across: Sequence[str] = (),
) -> tuple[NVFP4Array, ...]:
    """A matrix rowwise and, transformed where ``rht`` is given, columnwise: ``quantize`` with axis −1 and 0 in one.

    Args:
        rbits: a pair, for the two results; or one JAX key, which they share folded with 0 and 1.
        The others are those of ``quantize``; the transform is applied to the columnwise result only.
    """
    one_key = stochastic.is_key(rbits)
    pair = (rbits, rbits) if rbits is None or one_key else rbits
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(
            "rbits of quantize_both are a JAX key, or a pair: those of the rowwise and the columnwise result"
        )
    x, row = _checked(x, block, -1, rounding, pair[0], None, arithmetic, across)
    _, column = _checked(x, block, 0, rounding, pair[1], rht, arithmetic, across)
    randoms: Any = (None, None)
    if one_key and row.ar.stochastic != "ideal":
        randoms = stochastic.both_keys(rbits)
    elif rbits is not None:
        randoms = tuple(
            stochastic.of(r, how.ar.stochastic, x, how.axis, how.block, how.rht is not None)
            for r, how in zip(pair, (row, column), strict=True)
        )
    if kernel.fits(x, column, randoms[1]):
        return _both_on_either(x, randoms, row, column)
    return _both_on_xla(x, randoms, row=row, column=column)


def _checked(
    x: Any,
    block: Any,
    axis: int,
    rounding: str,
    rbits: Any,
    rht: nv.RHT | None,
    arithmetic: str | nv.Arithmetic,
    across: Sequence[str],
) -> tuple[jax.Array, How]:
    """x as a JAX array, and how it is quantized; TypeError or ValueError for what does not go together."""
    ar, block = supported(arithmetic), as_block(block)
    x = without_gradient(as_array(x, axis, block), "quantize")
    if rounding not in ("nearest-even", "stochastic"):
        raise ValueError(f"rounding is 'nearest-even' or 'stochastic'; got {rounding!r}")
    if rounding == "nearest-even" and rbits is not None:
        raise ValueError("rbits are random numbers for stochastic rounding; nearest-even takes none")
    if rounding == "stochastic" and rbits is None:
        raise ValueError(
            "stochastic rounding needs rbits: a JAX key, uint32 words, one for 4 elements, or an nvfp4ref.Philox"
        )
    if rounding == "stochastic" and ar.four_over_six:
        raise ValueError("4over6 does not go with stochastic rounding, as in Transformer Engine")
    if ar.row_scaled and (block == (16, 16) or rht is not None):
        raise ValueError("row-scaled amax goes with 1x16 blocks and no Hadamard transform, as in Transformer Engine")
    if rht is not None:
        if ar.four_over_six:
            raise ValueError("4over6 does not go with the Hadamard transform, as in Transformer Engine")
        hadamard.require(rht, x.dtype)
    if ar.row_scaled and across:
        raise ValueError("row-scaled amaxes are not taken across devices: give them as amax")
    return x, How(axis, block, rht, ar, (across,) if isinstance(across, str) else tuple(across))


def _given_amax(amax: Any, rows: int, ar: nv.Arithmetic) -> jax.Array:
    """float32 amax, () or one a row."""
    value = amax if isinstance(amax, jax.Array) else np.asarray(amax)
    if value.dtype.kind not in "fiu" and value.dtype != jnp.bfloat16:
        raise TypeError(f"amax is a float32 number or array; got {type(amax).__name__} of dtype {value.dtype}")
    if isinstance(value, np.ndarray) or value.dtype.kind in "iu":
        with np.errstate(all="ignore"):
            value = jnp.asarray(value.astype(np.float32))
    elif value.dtype == jnp.float64:
        raise TypeError("amax is float32; got a JAX array of float64: round it yourself first")
    value = without_gradient(value, "quantize")
    if value.size != (rows if ar.row_scaled else 1):
        expected = "one value (one a row needs row_scaled=True)"
        if ar.row_scaled:
            expected = f"one value for each of the {rows} rows of the result"
        raise ValueError(f"amax has {expected}; got shape {value.shape}")
    return bits.to_float(bits.of_float(value)).reshape((rows,) if ar.row_scaled else ())


def _on_xla(x: jax.Array, random: jax.Array | None, given: jax.Array | None, *, how: How) -> NVFP4Array:
    return _several_on_xla(x, (random,), given, hows=(how,))[0]


def _several_on_xla(
    x: jax.Array, randoms: tuple[jax.Array | None, ...], given: jax.Array | None, *, hows: tuple[How, ...]
) -> tuple[NVFP4Array, ...]:
    """Results of one tensor that share arithmetic and rounding: what depends on amax alone is compiled once for all."""
    ar, parts = hows[0].ar, []
    for how in hows:
        tiles, element = tiles_of(x, how.axis)
        if how.rht is not None:
            tiles = hadamard.transform(tiles, element, how.rht.sign_mask)
        a = block_amax(tiles, element, how.block)
        if given is None:
            amax = how.whole(tensor_amax(a, element, ar))
        else:
            amax = bits.of_float(given)
            amax = jnp.expand_dims(amax, element - 1) if ar.row_scaled else amax
        parts.append((tiles, element, a, amax))
    amaxes = [part[3] for part in parts]
    if randoms[0] is None:
        each = factors(amaxes, limits, (parts[0][0].dtype,), ar)
    else:
        each = factors(amaxes, stochastic.factor, (), ar)
    found = []
    for part, random, how, f in zip(parts, randoms, hows, each, strict=True):
        tiles, element, a, amax = part
        if ar.four_over_six:
            codes, scales = four_over_six.choose(tiles, element, a, amax, f, how.block, ar)
        else:
            scales = block_scale(a, f.encode, ar)
            if random is None:
                codes = nearest(tiles, element, f.of_block(scales))
            else:
                codes = stochastic.codes(tiles, f.of_block(scales), random, element, ar)
        packed = pack(codes, element)
        if how.axis == 0:
            packed, scales = packed.transpose(2, 0, 1), scales.T
        found.append(_array(packed, scales, bits.to_float(amax.reshape(-1) if ar.row_scaled else amax), x, how))
    return tuple(found)


def _on_gpu(x: jax.Array, random: jax.Array | None, given: jax.Array | None, *, how: How) -> NVFP4Array:
    matrix = x.reshape(-1, x.shape[-1])
    if how.rht is not None:
        matrix, _, found = kernel.transform(matrix if how.axis == 0 else matrix.T, how.rht.sign_mask)
    else:
        matrix = matrix.T if how.axis == 0 else matrix
        found = kernel.amax(matrix)
    amax = how.whole(found) if given is None else given
    return _array(*kernel.rows(matrix, amax, random, how.block, how.ar), amax, x, how)


@partial(jax.jit, static_argnames="how")
def _on_either(x: jax.Array, random: jax.Array | None, given: jax.Array | None, how: How) -> NVFP4Array:
    """By the platform that it is compiled for."""
    return lax.platform_dependent(x, random, given, cuda=partial(_on_gpu, how=how), default=partial(_on_xla, how=how))


def _both_on_xla(x: jax.Array, randoms: Pair, *, row: How, column: How) -> tuple[NVFP4Array, ...]:
    return _several_on_xla(x, randoms, None, hows=(row, column))


def _both_on_gpu(x: jax.Array, randoms: Pair, *, row: How, column: How) -> tuple[NVFP4Array, ...]:
    if column.rht is not None:
        turned, amax, amax_t = kernel.transform(x, column.rht.sign_mask)
    else:
        turned, amax = x.T, kernel.amax(x)
        amax_t = amax
    amax, amax_t = row.whole(amax), column.whole(amax_t)
    packed, packed_t = (
        kernel.rows(matrix, a, random, row.block, row.ar)
        for matrix, a, random in ((x, amax, randoms[0]), (turned, amax_t, randoms[1]))
    )
    return _array(*packed, amax, x, row), _array(*packed_t, amax_t, x, column)


@partial(jax.jit, static_argnames=("row", "column"))
def _both_on_either(x: jax.Array, randoms: Pair, row: How, column: How) -> tuple[NVFP4Array, ...]:
    on_gpu, on_xla = (partial(run, row=row, column=column) for run in (_both_on_gpu, _both_on_xla))
    return lax.platform_dependent(x, randoms, cuda=on_gpu, default=on_xla)


def _array(packed: jax.Array, scales: jax.Array, amax: jax.Array, x: jax.Array, how: How) -> NVFP4Array:
    leading = x.shape[:-1] if how.axis == -1 else x.shape[1:]
    return NVFP4Array(packed.reshape(*leading, -1), scales.reshape(*leading, -1), amax, how.block, how.ar)


@own_settings
def dequantize(q: NVFP4Array, dtype: Any = jnp.float32) -> jax.Array:
    """The values of a quantized array, in the kernels' operation order (rule DEQUANTIZE): (…, K) of ``dtype``.

    fl(code · fl(fl(d·A)·fl(1/M))), rounded to float32, bfloat16 or float16; TypeError for another dtype.
    """
    if not isinstance(q, NVFP4Array):
        raise TypeError(f"dequantize takes an NVFP4Array, from jaxpath.quantize; got {type(q).__name__}")
    dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise TypeError(f"dequantize gives float32, bfloat16 or float16; got {dtype}")
    scales = q.scales.reshape(-1, q.scales.shape[-1])
    amax = bits.of_float(without_gradient(q.amax, "dequantize"))
    factor = of_byte(_factor, scales, amax.reshape(-1, 1) if amax.ndim else amax, q.arithmetic)
    return _values(q.codes.reshape(*factor.shape, 16), factor, dtype).reshape(q.shape)


@own_settings
def fake_quantize(x: Any, *, axis: int = -1, **how: Any) -> jax.Array:
    """The values of x after quantization, of its shape and dtype; the gradient passes straight through.

    Args:
        x, axis, how: as for ``quantize``, without ``rht``, which only a matmul undoes.
    """
    if how.get("rht") is not None:
        raise ValueError("fake_quantize has no rht: the values would be those of the transform, which a matmul undoes")
    x = as_array(x, axis, as_block(how.get("block", (1, 16))))
    values = dequantize(quantize(lax.stop_gradient(x), axis=axis, **how), x.dtype)
    return _straight_through(x, values.T if axis == 0 else values)


@jax.custom_jvp
def _straight_through(x: jax.Array, values: jax.Array) -> jax.Array:
    return values


@_straight_through.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


def _factor(d: Bits, amax: Bits, ar: nv.Arithmetic) -> Bits:
    return bits.mul(bits.mul(d, amax), bits.constant(np.float32(1) / np.float32(ar.element_max * ar.e4m3_max)))


@partial(jax.jit, static_argnames="dtype")
def _values(codes: jax.Array, factor: Bits, dtype: Any) -> jax.Array:
    return bits.to_float(bits.mul(jnp.asarray(CODE_VALUES)[codes], factor[..., None]), dtype)
