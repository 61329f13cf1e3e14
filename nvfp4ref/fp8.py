"""FP8 E4M3 with float32 scales, for comparison: 1x128 tiles (activations, gradients) or 128x128 (weights).

The reference run of arXiv 2509.25149: online float32 scales, amax mapped to 448, nearest even.  Rule FP8-SCALE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import e4m3
from .arrays import as_array, narrow
from .fp32 import F32, FLT_MAX, U8, require_subnormals, widen

TILE = 128
TILES = ((1, TILE), (TILE, TILE))


@dataclass(frozen=True, eq=False)
class FP8Tensor:
    """codes: uint8 (R, K), E4M3; scales: float32 (R/tile rows, K/128), the decode scales."""

    codes: U8
    scales: F32
    tile: tuple[int, int]

    def dequantize(self) -> F32:
        """float32 (R, K): fl(code·scale)."""
        rows, columns = self.codes.shape
        spread = np.repeat(np.repeat(self.scales, self.tile[0], axis=0), TILE, axis=1)[:rows, :columns]
        return e4m3.VALUES[self.codes] * spread


def quantize(x: Any, *, tile: tuple[int, int] = (1, TILE)) -> FP8Tensor:
    """FP8 E4M3 of a matrix (R, K): s = fl(448/amax) (1 for amax 0), code = E4M3(fl(x·s)), decode scale fl(1/s).

    Args:
        x: float32, float16 or bfloat16; partial tiles at the edges are allowed.
        tile: (1, 128) or (128, 128).
    Raises:
        TypeError, ValueError: dtype, shape, another tile.
    """
    require_subnormals()
    matrix = narrow(as_array(x))
    if tuple(tile) not in TILES:
        raise ValueError(f"tile is (1, 128) or (128, 128); got {tile!r}")
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"FP8 needs a matrix with at least one element; got shape {matrix.shape}")
    values = widen(matrix)
    rows, columns = values.shape
    down, across = -(-rows // tile[0]), -(-columns // TILE)
    padded = np.zeros((down * tile[0], across * TILE), np.float32)
    padded[:rows, :columns] = np.where(np.isnan(values), np.float32(0), np.abs(values))
    amax = np.maximum.reduce(padded.reshape(down, tile[0], across, TILE), axis=(1, 3))
    with np.errstate(all="ignore"):
        scale: F32 = np.where(amax > 0, np.fmin(e4m3.MAX / amax, FLT_MAX), np.float32(1))
        spread = np.repeat(np.repeat(scale, tile[0], axis=0), TILE, axis=1)[:rows, :columns]
        decode: F32 = np.float32(1) / scale
        return FP8Tensor(e4m3.encode(values * spread), decode, tile)
