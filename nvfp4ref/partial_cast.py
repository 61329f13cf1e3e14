"""The step-by-step kernels for sharded weights: 16x16 scales and codes of a piece of a matrix.

A distributed optimizer owns a range of the flattened weight.  Transformer Engine forms the tile amax of
the range, reduces it over the ranks, makes one float32 block scale a tile, and casts the range with it.
Rules RECIPE-GLOBAL-SCALE, RECIPE-BLOCK-SCALE, RECIPE-ALPHA, PARTIAL-CAST-SCALE, PARTIAL-CAST-OFFSET.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import e2m1, e4m3, layout
from .arrays import as_array, narrow
from .fp32 import F32, FLT_MAX, FLT_MIN, SIXTH, U8, AnyArray, canonical_nan, widen

ONE = np.float32(1)
TILE = 16


def _range(x: AnyArray, start: int, shape: tuple[int, int]) -> tuple[F32, AnyArray, AnyArray]:
    """The float32 values of a flat range, and each element's row and column in the whole matrix."""
    values = widen(narrow(as_array(x)).reshape(-1))
    if start < 0 or start + values.size > shape[0] * shape[1]:
        raise ValueError(f"elements {start}..{start + values.size} do not lie in a matrix of shape {shape}")
    position = np.arange(start, start + values.size)
    return values, position // shape[1], position % shape[1]


def tile_amax(x: AnyArray, shape: tuple[int, int], start: int = 0) -> F32:
    """max(abs(x)) of each 16x16 tile over the flat range that starts at ``start``; NaN ignored.

    Args:
        x: the range, any float dtype; shape: of the whole matrix.
    Returns:
        float32 (⌈R/16⌉, ⌈C/16⌉); 0 where the range has no element.
    """
    values, row, column = _range(x, start, shape)
    amax = np.zeros((-(-shape[0] // TILE), -(-shape[1] // TILE)), np.float32)
    np.maximum.at(amax, (row // TILE, column // TILE), np.where(np.isnan(values), np.float32(0), np.abs(values)))
    return amax


def global_scale(amax: ArrayLike) -> F32:
    """S of the recipe kernels: fmin(fl(2688/max(A, FLT_MIN)), FLT_MAX) for A > 0, else 1; A = Inf gives 0."""
    a = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        return np.where(a > 0, np.fmin(np.float32(2688) / np.fmax(a, FLT_MIN), FLT_MAX), ONE)


def block_scale(tile_amax: F32, amax: ArrayLike) -> F32:
    """float32 block scales before E4M3: fmin(fl(a·fl(S·fl(1/6))), FLT_MAX)."""
    with np.errstate(all="ignore"):
        return np.fmin(tile_amax * (global_scale(amax) * SIXTH), FLT_MAX)


def expand_scale(scale: F32, rows: int) -> U8:
    """E4M3 bytes of tile scales (⌈R/16⌉, C/16), one row for each of the matrix's rows, padded with zeros."""
    return layout.pad(np.repeat(e4m3.encode(scale), TILE, axis=0)[:rows])


def partial_cast(
    x: AnyArray, scale: F32, global_scale: ArrayLike, shape: tuple[int, int], start: int = 0, out: U8 | None = None
) -> U8:
    """Packed codes (R, C/2) with the range's nibbles written; the other nibbles of ``out`` are kept.

    e = fmin(d > 0 ? fl(1/fl(d·fl(1/S))) : FLT_MAX, FLT_MAX), S = 1 where S <= 0, d the block scale.

    Args:
        scale: float32 block scales (⌈R/16⌉, ⌈C/16⌉); global_scale: S.
        out: packed codes to write into, zeros when None.
    """
    values, row, column = _range(x, start, shape)
    tiles, scale = (-(-shape[0] // TILE), -(-shape[1] // TILE)), np.asarray(scale)
    if shape[1] % 2 or scale.shape != tiles:
        raise ValueError(
            f"shape {shape} needs an even number of columns and scales of shape {tiles}; got {scale.shape}"
        )
    packed = shape[0], shape[1] // 2
    if out is not None and out.shape != packed:
        raise ValueError(f"codes of shape {shape} are packed in shape {packed}; got out of shape {out.shape}")
    s = np.asarray(global_scale, np.float32)
    d = e4m3.VALUES[e4m3.encode(scale)]
    with np.errstate(all="ignore"):
        decode = ONE / np.where(s > 0, s, ONE)
        e = np.fmin(np.where(d > 0, ONE / (d * decode), FLT_MAX), FLT_MAX)
        y = values * e[row // TILE, column // TILE]
    codes = e2m1.unpack(np.zeros(packed, np.uint8) if out is None else out)
    codes[row, column] = e2m1.encode(y)
    return e2m1.pack(codes)


def alpha(
    amax_a: ArrayLike, amax_b: ArrayLike, alpha_in: float = 1.0, *, e4m3_max: tuple[int, int] = (448, 448)
) -> F32:
    """GEMM alpha: fl(fl(fl(alpha_in·A_a)·A_b)·fl(1/(36·maxA·maxB))) (rule RECIPE-ALPHA)."""
    factor = ONE / np.float32(36 * e4m3_max[0] * e4m3_max[1])
    with np.errstate(all="ignore"):
        product = (np.float32(alpha_in) * np.asarray(amax_a, np.float32)) * np.asarray(amax_b, np.float32)
        return canonical_nan(np.array(product * factor))
