"""quantize() and dequantize(): the rooms before this one in order, nothing else.

The work goes through slabs of rows small enough for the cache; each slab is laid out as tiles
(16, rows, blocks), see ``blocks.py``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import blocks, e2m1, e4m3, four_over_six, hadamard, layout, scaling
from .arithmetic import Arithmetic
from .arithmetic import arithmetic as named
from .arrays import as_array
from .fp32 import F32, U8, AnyArray, bfloat16, canonical_nan, require_subnormals, to_bfloat16, to_float16
from .hadamard import RHT
from .scaling import GlobalScale
from .streams import Philox
from .tensor import NVFP4Tensor, Steps, as_tensor, rows_of

SLAB = 2**17  # elements worked on at a time
XLA_TREE = 4096  # elements from which XLA's CPU backend (jaxlib 0.10.2) reduces by a tree


class Job(NamedTuple):
    """What every slab of one tensor shares."""

    tiles: AnyArray  # (16, rows, blocks) view of the input, or of its transform
    amax: F32  # 0-d or (rows, 1)
    scale: GlobalScale  # of the same shape
    block: tuple[int, int]
    arithmetic: Arithmetic
    block_nan: str  # what a block amax does with NaN
    random: AnyArray | None = None  # stochastic: (4, rows, blocks) words or (16, rows, blocks) uniforms

    def part(self, rows: slice, columns: slice) -> Job:
        amax, (encode, decode) = self.amax, self.scale
        if amax.ndim:
            amax, encode, decode = amax[rows], encode[rows], decode[rows]
        return self._replace(
            tiles=self.tiles[:, rows, columns],
            amax=amax,
            scale=GlobalScale(encode, decode),
            random=None if self.random is None else self.random[:, rows, columns],
        )


def _slabs(tiles: AnyArray) -> list[tuple[slice, slice]]:
    """Pieces of the (rows, blocks) plane of SLAB elements, of whole 16x16 tiles, long in memory order."""
    _, rows, columns = tiles.shape
    columnwise = tiles.strides[0] > tiles.strides[1]
    wide = 32 if columnwise else SLAB // 256
    tall = max(16, SLAB // (16 * min(wide, columns)) // 16 * 16)
    return [
        (slice(r, min(r + tall, rows)), slice(c, min(c + wide, columns)))
        for r in range(0, rows, tall)
        for c in range(0, columns, wide)
    ]


def quantize(
    x: Any,
    *,
    block: tuple[int, int] = (1, 16),
    axis: int = -1,
    rounding: str = "nearest-even",
    rbits: Any = None,
    rht: RHT | None = None,
    amax: ArrayLike | None = None,
    arithmetic: str | Arithmetic = "te",
    threads: int = 1,
) -> NVFP4Tensor:
    """Quantize to NVFP4, bit for bit as the named arithmetic does.

    Args:
        x: (…, K) float32, float16, bfloat16, or float64 that is exact in float32; NumPy, torch, JAX.
            Leading dimensions are flattened to rows and restored in the result.
        block: (1, 16), or (16, 16) for one scale a 16x16 tile.
        axis: −1 rowwise; 0 quantizes the transpose of a matrix (R, C), blocks along R, result shapes those
            of x transposed.
        rounding: "nearest-even", or "stochastic" by the arithmetic's rule ``stochastic``.
        rbits: the random numbers of stochastic rounding: uint32 words, one for 4 elements along the blocked
            axis of the result, (R, K/4), for axis 0 (C, R/4); float32 uniforms, one an element, for the rules
            "te-jax" and "ideal"; or a Philox, which makes the words of the kernel it names.
        rht: random Hadamard transform along the blocked axis, before amax.
        amax: the amax to use in place of max(abs(x)): any float32, zero, Inf, NaN, stale or negative;
            one value a row of the result when the arithmetic is row-scaled.
        arithmetic: a preset's name or an Arithmetic.
        threads: worker threads; the result does not depend on them.
    Returns:
        NVFP4Tensor with packed (…, K/2), scales (…, K/16) and the amax used.
    Raises:
        TypeError: dtype or argument type.  ValueError: shape, value or combination; both say what to do.
    Rules:
        AMAX-*, SCALE-*, ELEMENT-SCALE, E2M1-*, SR-*, STREAM-* of docs/spec.md.
    """
    require_subnormals()
    ar, x, block = named(arithmetic), as_array(x), blocks.as_block(block)
    _check_options(ar, block, rounding, rbits, rht, threads)
    matrix = blocks.as_matrix(x, axis, block)
    shape = x.shape if axis == -1 else matrix.shape[::-1]
    job = prepare(matrix, block, axis, rht, amax, ar)
    if rounding == "stochastic":
        job = job._replace(random=random_tiles(rbits, matrix, axis, block, rht is not None, ar))

    _, rows, columns = job.tiles.shape
    packed = np.empty((rows, columns * 8), np.uint8)
    scales = np.empty((rows, columns), np.uint8)

    def work(slab: tuple[slice, slice]) -> None:
        rows, columns = slab
        codes, scales[slab] = quantize_tiles(job.part(rows, columns))
        layout.pack_tiles(codes, ar.packing, packed[rows, columns.start * 8 : columns.stop * 8])

    slabs = _slabs(job.tiles)
    if threads == 1 or len(slabs) == 1:
        for slab in slabs:
            work(slab)
    else:
        with ThreadPoolExecutor(threads, initializer=require_subnormals) as pool:
            list(pool.map(work, slabs))
    if block == (16, 16) and ar.tile_scales == "tiled":
        scales = np.tile(scales[::16], (16, 1))

    return NVFP4Tensor(
        packed.reshape(*shape[:-1], -1),
        scales.reshape(*shape[:-1], -1),
        job.amax.reshape(-1) if job.amax.ndim else job.amax,
        (block[0], block[1]),
        ar,
        partial(_steps, matrix, block, axis, rht, amax, ar),
    )


def _steps(*prepared: Any) -> Steps:
    """Every intermediate, from the arguments of ``prepare``."""
    return steps_of(prepare(*prepared), transformed=prepared[3] is not None)


def _check_options(ar: Arithmetic, block: tuple[int, int], rounding: str, rbits: Any, rht: Any, threads: int) -> None:
    if rounding not in ("nearest-even", "stochastic"):
        raise ValueError(f"rounding is 'nearest-even' or 'stochastic'; got {rounding!r}")
    if rounding == "nearest-even" and rbits is not None:
        raise ValueError("rbits are random words for stochastic rounding; nearest-even takes none")
    if rounding == "stochastic":
        if rbits is None:
            raise ValueError("stochastic rounding needs rbits: uint32 words, one for 4 elements, or an nvfp4ref.Philox")
        if ar.four_over_six:
            raise ValueError("4over6 does not go with stochastic rounding, as in Transformer Engine")
    if rht is not None and not isinstance(rht, RHT):
        raise TypeError(f"rht is an nvfp4ref.RHT or None; got {type(rht).__name__}")
    if not isinstance(threads, (int, np.integer)) or threads < 1:
        raise ValueError(f"threads is a positive integer; got {threads!r}")
    if ar.row_scaled and (block == (16, 16) or rht is not None):
        raise ValueError("row-scaled amax goes with 1x16 blocks and no Hadamard transform, as in Transformer Engine")
    if ar.four_over_six and rht is not None:
        raise ValueError("4over6 does not go with the Hadamard transform, as in Transformer Engine")


def prepare(
    matrix: AnyArray, block: tuple[int, int], axis: int, rht: RHT | None, amax: ArrayLike | None, ar: Arithmetic
) -> Job:
    """Transform, amax and global scale of a whole tensor."""
    ar = ar.for_input(matrix.dtype.name)
    if rht is not None:
        matrix, axis = hadamard.transform(matrix, rht, axis, ar.rht_sum), -1
    tiled = blocks.tiles(matrix, axis)
    tensor_nan = "ignore" if ar.amax_nan == "ignore" else "propagate"
    block_nan = "tree" if ar.amax_nan == "xla-cpu" and matrix.size >= XLA_TREE else tensor_nan
    if amax is None:
        row_axis = {-1: 1, 0: 0}[axis] if ar.row_scaled else None
        value = blocks.tensor_amax(matrix, row_axis, tensor_nan)
    else:
        value = _given_amax(amax, tiled.shape[1], ar)
    if ar.row_scaled:
        value = value.reshape(-1, 1)
    with np.errstate(all="ignore"):
        return Job(tiled, value, scaling.global_scale(value, ar), block, ar, block_nan)


def random_tiles(
    rbits: Any, matrix: AnyArray, axis: int, block: tuple[int, int], rht: bool, ar: Arithmetic
) -> AnyArray:
    """The random numbers of a stochastic quantization as tiles (4 or 16, rows, blocks)."""
    rows, length = matrix.shape if axis == -1 else matrix.shape[::-1]
    words_a_block = e2m1.STOCHASTIC[ar.stochastic][1]
    if isinstance(rbits, Philox):
        if words_a_block != 4:
            raise ValueError(f"the rule {ar.stochastic!r} takes float32 uniforms, one an element, not Philox words")
        rbits = rbits.words(matrix.shape, axis, dtype=matrix.dtype.name, block=block, rht=rht)
    random = e2m1.checked_random(rbits, ar.stochastic, (rows, length // 4))
    return random.reshape(rows, length // 16, words_a_block).transpose(2, 0, 1)


def _given_amax(amax: ArrayLike, rows: int, ar: Arithmetic) -> F32:
    value = np.asarray(amax)
    if value.dtype.kind not in "fiu" and value.dtype != bfloat16:
        raise TypeError(f"amax is a float32 number or array; got {type(amax).__name__} of dtype {value.dtype}")
    with np.errstate(all="ignore"):
        value = value.astype(np.float32)
    wanted = (rows,) if ar.row_scaled else ()
    if value.size != (rows if ar.row_scaled else 1):
        expected = f"one value for each of the {rows} rows of the result" if ar.row_scaled else "one value"
        raise ValueError(f"amax has {expected}; got shape {value.shape}")
    return value.reshape(wanted)


def _block_amax(x: F32, job: Job) -> F32:
    """Block amax of x, or of fl(x·S) or fl(x/D) where the arithmetic scales before it looks for the maximum."""
    ar = job.arithmetic
    if ar.block_scale in scaling.PRESCALED:
        x = scaling.prescaled(x, job.scale, ar)
    elif ar.flush_subnormals:
        x = scaling.flushed(x)
    magnitude = np.abs(x) if ar.block_amax == "abs" else np.maximum(x, np.float32(0))
    a = blocks.block_amax(magnitude, job.block, job.block_nan)
    return blocks.pair_amax(a) if ar.amax_group == 32 else a


def quantize_tiles(job: Job) -> tuple[U8, U8]:
    """Codes (16, rows, blocks) and scale bytes (rows, blocks) of a job's tiles."""
    ar = job.arithmetic
    x = blocks.working_copy(job.tiles)
    with np.errstate(all="ignore"):
        a = _block_amax(x, job)
        if ar.four_over_six:
            best, _, _ = four_over_six.choose(x, a, job.amax, job.scale, job.block, ar)
            return best.codes, best.scale
        s = scaling.block_scale(a, job.scale, ar)
        byte = scaling.round_scale(s, a, job.scale, ar)
        e = scaling.encode_scale(byte, s, job.scale, ar)
        y = scaling.scale_elements(x, e, byte, job.scale, ar)
    random = None if job.random is None else np.ascontiguousarray(job.random)
    codes = e2m1.round_elements(y, ar, random)
    if ar.nan_block_codes is not None:
        _code_nan_blocks(codes, s, a, job)
    return codes, byte


def _code_nan_blocks(codes: U8, s: F32, a: F32, job: Job) -> None:
    """The codes of blocks whose scale is NaN, by where the NaN came from."""
    assert job.arithmetic.nan_block_codes is not None
    by_tensor, by_block, invalid = job.arithmetic.nan_block_codes
    cause = np.where(np.isnan(job.amax), by_tensor, np.where(np.isnan(a), by_block, invalid))
    np.copyto(codes, cause.astype(np.uint8), where=np.isnan(s))


def steps_of(job: Job, transformed: bool) -> Steps:
    """Every intermediate of a whole tensor, in one piece."""
    ar = job.arithmetic
    x = blocks.working_copy(job.tiles)
    after_rht = blocks.untile(x).copy() if transformed else None
    err4 = err6 = None
    with np.errstate(all="ignore"):
        a = _block_amax(x, job)
        if ar.four_over_six:
            best, err4, err6 = four_over_six.choose(x, a, job.amax, job.scale, job.block, ar)
            s, e, y = best.block_scale, best.encode_scale, best.scaled
        else:
            s = scaling.block_scale(a, job.scale, ar)
            byte = scaling.round_scale(s, a, job.scale, ar)
            e = scaling.encode_scale(byte, s, job.scale, ar)
            y = scaling.scale_elements(x, e, byte, job.scale, ar)
    encode = job.scale.encode.reshape(-1) if job.scale.encode.ndim else job.scale.encode
    g, a, s, e, y = (canonical_nan(np.array(v, np.float32)) for v in (encode, a, s, e, blocks.untile(y)))
    err4, err6 = (None if v is None else canonical_nan(v) for v in (err4, err6))
    return Steps(g, a, s, e, y, err4, err6, after_rht)


def dequantize(q: NVFP4Tensor, dtype: DTypeLike = np.float32) -> AnyArray:
    """The values of a quantized tensor, in the kernels' operation order (rule DEQUANTIZE).

    value = fl(code · fl(fl(d·A)·fl(1/M))), or code · d where there is no global scale, then rounded to ``dtype``; a
    NaN is 0x7FFFFFFF (bfloat16 and float16: 0x7FFF).  A columnwise tensor gives the transpose; a Hadamard transform
    is not undone.

    Args:
        q: NVFP4Tensor with codes (…, K).
        dtype: float32, bfloat16 or float16.
    Returns:
        array (…, K) of ``dtype``.
    Raises:
        TypeError: q is no NVFP4Tensor, or another dtype.
    """
    require_subnormals()
    q = as_tensor(q)
    try:
        wanted: np.dtype[Any] | None = np.dtype(dtype)
    except TypeError:  # torch.bfloat16, say
        wanted = None
    if wanted not in (np.float32, np.float16, bfloat16):
        raise TypeError(f"dequantize gives float32, bfloat16 or float16; got {wanted or repr(dtype)}")
    ar = q.arithmetic
    inverse = np.float32(1) / np.float32(ar.element_max * ar.e4m3_max)
    codes, scales = rows_of(q.codes), rows_of(q.scales)
    amax = q.amax.reshape(-1, 1) if q.amax.ndim else q.amax
    out = np.empty(codes.shape, np.float32)
    with np.errstate(all="ignore"):
        block_scales = e4m3.VALUES[scales]
        factor = block_scales if ar.global_scale == "none" else (block_scales * amax) * inverse
        np.multiply(
            e2m1.VALUES[codes].reshape(*factor.shape, 16), factor[..., None], out=out.reshape(*factor.shape, 16)
        )
    canonical_nan(out)
    if wanted == bfloat16:
        return np.reshape(to_bfloat16(out).view(bfloat16), q.shape)
    if wanted == np.float16:
        return np.reshape(to_float16(out).view(np.float16), q.shape)
    return np.reshape(out, q.shape)
