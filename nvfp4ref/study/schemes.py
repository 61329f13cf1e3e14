"""Quantizers of papers, written from their equations with this package's codecs, to reproduce their tables.

They are not formats of a study: most exist on paper only.  Each returns the decoded values, float32, of x's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import e2m1, e4m3
from ..arithmetic import PRESETS
from ..fp32 import F32, F64, U32, AnyArray

HEADROOM = 16 / 17  # the most by which rounding to nearest E4M3 can lower a normal scale
REACH = 6 * HEADROOM / 0.93  # where MS-EDEN maps the block amax: the least error on normal numbers
_SIX = np.float32(6)


def words(seed: int, count: int) -> U32:
    """uint32 random words."""
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint64).astype(np.uint32)


def _amax(blocks: F32) -> F32:
    amax: F32 = np.abs(blocks).max(axis=1, keepdims=True)
    return amax


def _nearest_e4m3(x: AnyArray) -> F32:
    return e4m3.VALUES[e4m3.encode(np.asarray(x, np.float32))]


def _nearest_e2m1(x: F32) -> F32:
    return e2m1.VALUES[e2m1.encode(x)]


# -- stochastic rounding with 4over6 ---------------------------------------------------------------------------------


def _stochastic_candidate(blocks: F32, top: int, rbits: U32) -> tuple[F32, F32]:
    """(values, squared errors (n, 1)) of blocks (n, 16) with the amax mapped to top·16/17; 256 for 448."""
    amax = _amax(blocks)
    decode = amax.max() / np.float32(6 * HEADROOM * 256)
    scale = _nearest_e4m3(amax / (decode * np.float32(top * HEADROOM))) * decode
    tiles, of_tiles = np.ascontiguousarray((blocks / scale).T), np.ascontiguousarray(rbits.reshape(-1, 4).T)
    value: F32 = e2m1.VALUES[e2m1.round_elements(tiles, PRESETS["te"], of_tiles).T] * scale
    return value, np.square(value - blocks).sum(axis=1, keepdims=True)


def stochastic_four_over_six(x: F32, words_four: U32, words_six: U32) -> F32:
    """Quartet II's SR with 4over6: of two stochastic candidates the one that happens to be closer, 4 on a tie.

    words: uint32, one for four elements; the same array for both is one coin for both candidates.
    """
    blocks = x.reshape(-1, 16)
    four, error4 = _stochastic_candidate(blocks, 4, words_four)
    six, error6 = _stochastic_candidate(blocks, 6, words_six)
    return np.where(error4 <= error6, four, six).reshape(x.shape)


# -- MS-EDEN ---------------------------------------------------------------------------------------------------------


def hadamard(size: int) -> F32:
    """Sylvester's matrix, orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(size), np.float32)


def ms_eden(x: F32, seed: int, *, reach: float = REACH, group: int = 16) -> F32:
    """Quartet II's MS-EDEN (algorithm 1): nearest elements, and block scales that are stochastic for their sake.

    Random Hadamard transform in chunks of 128; nearest quantization that maps the amax to ``reach``, so that large
    elements clip; then each block scale times ⟨x, x⟩/⟨x, x̂⟩ of its ``group`` elements, which undoes the shrinking,
    is rounded to E4M3 stochastically, so that the block is right in the mean.
    """
    rng = np.random.default_rng(seed)
    signs = np.where(rng.random(128) < 0.5, np.float32(-1), np.float32(1))
    turn = signs[:, None] * hadamard(128)
    y = (x.reshape(-1, 128) @ turn).reshape(-1, 16)
    amax = _amax(y)
    decode = amax.max() / np.float32(reach * 256)
    scale = _nearest_e4m3(amax / (decode * np.float32(reach)))
    elements = _nearest_e2m1(y / (scale * decode))
    nearest = elements * (scale * decode)
    sums = (np.square(y).reshape(-1, group).sum(axis=1), (y * nearest).reshape(-1, group).sum(axis=1))
    correction = (sums[0] / sums[1]).repeat(group // 16)[:, None]
    corrected = (correction * scale).astype(np.float32).reshape(-1, 4)
    scale = e4m3.VALUES[e4m3.encode_stochastic(corrected, words(seed + 1, len(corrected)))].reshape(-1, 1)
    return np.reshape((elements * (scale * decode)).reshape(-1, 128) @ turn.T, x.shape)


# -- other grids and scales ------------------------------------------------------------------------------------------


def ue5m3(x: AnyArray) -> F32:
    """Nearest unsigned number of five exponent bits (bias 15) and three of mantissa, subnormals used."""
    value = np.asarray(x, np.float64)
    exponent = np.maximum(np.frexp(value)[1] - 1, -14)
    step = np.ldexp(1.0, exponent - 3)
    return np.asarray(np.rint(value / step) * step, np.float32)


SCALES: dict[str, Callable[[AnyArray], F32]] = {
    "e4m3": _nearest_e4m3,
    "ue5m3": ue5m3,
    "exact": lambda x: np.asarray(x, np.float32),
}


def blocks_of(x: F32, size: int, scale: str = "e4m3", *, tensor_scale: bool = False) -> F32:
    """E2M1 in blocks of ``size`` with nearest scales amax/6 of one kind of SCALES.

    tensor_scale: the scales are those over amax/2688 of the tensor, as NVFP4 has it; else there is one level.
    """
    blocks = x.reshape(-1, size)
    amax = _amax(blocks)
    unit = amax.max() / np.float32(2688) if tensor_scale else np.float32(1)
    step = SCALES[scale](amax / _SIX / unit) * unit
    with np.errstate(all="ignore"):
        y = np.where(step > 0, blocks / step, np.float32(0))
    return np.reshape(_nearest_e2m1(y) * step, x.shape)


def int4(x: F32) -> F32:
    """NVINT4: −7 … 7 in blocks of 16, E4M3 scales amax/7 over a tensor scale."""
    blocks = x.reshape(-1, 16)
    amax = _amax(blocks)
    unit = amax.max() / np.float32(7 * 448)
    step = _nearest_e4m3(amax / np.float32(7) / unit) * unit
    return np.asarray(np.clip(np.rint(blocks / step), -7, 7) * step, np.float32).reshape(x.shape)


def mxfp4_overflow_aware(x: F32) -> F32:
    """MXFP4 as qwix scales it: the least power of two under which the amax is at most 7, which rounds to 6."""
    blocks = x.reshape(-1, 32)
    step = np.exp2(np.ceil(np.log2(_amax(blocks).astype(np.float64) / 7))).astype(np.float32)
    return np.reshape(_nearest_e2m1(blocks / step) * step, x.shape)


def lloyd_max(levels: int) -> tuple[F64, float]:
    """The scalar quantizer of least squared error on N(0, 1) with that many levels: (levels, error power).

    Lloyd's iteration to a fixed point: thresholds half way between levels, levels at the mean of their interval.
    """

    def density(t: float) -> float:
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi) if math.isfinite(t) else 0.0

    def below(t: float) -> float:
        return math.erfc(-t / math.sqrt(2)) / 2

    point = np.linspace(-2.5, 2.5, levels)
    while True:
        edges = [-math.inf, *((point[1:] + point[:-1]) / 2).tolist(), math.inf]
        mass = np.array([below(b) - below(a) for a, b in zip(edges[:-1], edges[1:], strict=True)])
        mean = np.array([density(a) - density(b) for a, b in zip(edges[:-1], edges[1:], strict=True)]) / mass
        done = np.abs(mean - point).max() < 1e-14
        point = mean
        if done:
            return point, float(1 - (mass * point * point).sum())
