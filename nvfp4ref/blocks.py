"""From a matrix to tiles of 16 elements, and their amax.  Rules BLOCK-*, AMAX-*.

Everything behind this file works on *tiles*: an array of shape (16, rows, blocks) whose slow axis runs
through the 16 elements of a block.  One block operation is then one pass over contiguous memory, rowwise
and columnwise differ only in the view taken here, and rows are rows of the result.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from .arrays import as_array, narrow
from .fp32 import F32, AnyArray, bfloat16, canonical_nan, widen

BLOCK = 16
BLOCKS = ((1, 16), (16, 16))


def as_block(block: Any) -> tuple[int, int]:
    """``block`` as the tuple (1, 16) or (16, 16), whatever sequence it came in; ValueError otherwise."""
    try:
        shape = tuple(operator.index(n) for n in block)
    except TypeError:
        shape = ()
    for known in BLOCKS:
        if shape == known:
            return known
    raise ValueError(f"block is (1, 16) or (16, 16); got {block!r}")


def as_matrix(x: Any, axis: int, block: tuple[int, int]) -> AnyArray:
    """``x`` as a matrix (R, C) with leading dimensions flattened, checked against the block shape.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, axis or block.
    """
    x, block = as_array(x), as_block(block)
    if axis not in (-1, 0):
        raise ValueError(f"axis is -1 (rowwise) or 0 (columnwise: the transpose of a matrix); got {axis!r}")
    if x.ndim < 2:
        raise ValueError(f"expected a matrix or more dimensions; got shape {x.shape}: use x.reshape(1, -1) for one row")
    if axis == 0 and x.ndim != 2:
        raise ValueError(
            f"axis=0 quantizes the transpose of a matrix; got shape {x.shape}: reshape it to two dimensions"
        )
    if x.size == 0:
        raise ValueError(f"expected at least one element; got shape {x.shape}")
    shape = x.shape
    matrix = x.reshape(-1, shape[-1])
    for length, name, needed in (
        (matrix.shape[1], "columns", axis == -1 or block == (16, 16)),
        (matrix.shape[0], "rows", axis == 0 or block == (16, 16)),
    ):
        if needed and length % BLOCK:
            raise ValueError(
                f"shape {shape} has {length} {name}, not a multiple of 16, which {block[0]}x{block[1]} blocks "
                f"along axis {axis} need; pad with zeros to {-(-length // BLOCK) * BLOCK} {name}"
            )
    return narrow(matrix)


def tiles(matrix: AnyArray, axis: int = -1) -> AnyArray:
    """View of a matrix as (16, rows, blocks), the rows being those of the quantized result.

    axis -1: tiles[i, r, b] = matrix[r, 16b + i].  axis 0: tiles[i, c, b] = matrix[16b + i, c].
    """
    rows, columns = matrix.shape
    if axis == -1:
        return matrix.reshape(rows, columns // BLOCK, BLOCK).transpose(2, 0, 1)
    return matrix.reshape(rows // BLOCK, BLOCK, columns).transpose(1, 2, 0)


def working_copy(tiled: AnyArray) -> F32:
    """float32 copy of tiles in the memory order that makes block operations run along the cache lines.

    Rowwise the element axis is slowest; columnwise the input already runs along the rows of the result.
    """
    if tiled.strides[0] > tiled.strides[1]:
        return widen(tiled.transpose(2, 0, 1)).transpose(1, 2, 0)
    if tiled.dtype == bfloat16 and tiled.strides[0] == 2:
        return _widen_pairs(tiled)
    return widen(tiled)


def _widen_pairs(tiled: AnyArray) -> F32:
    """The same for bfloat16 that lies along memory: two neighbours are moved as one 32-bit word, half as many moves."""
    pairs = tiled.transpose(1, 2, 0).view(np.uint32).transpose(2, 0, 1)
    out = np.empty(tiled.shape, np.uint32)
    first, second = (out[0::2], out[1::2]) if sys.byteorder == "little" else (out[1::2], out[0::2])
    np.copyto(second, pairs)
    np.left_shift(second, np.uint32(16), out=first)
    second &= np.uint32(0xFFFF0000)
    return out.view(np.float32)


def untile(tiled: AnyArray) -> AnyArray:
    """(16, rows, blocks) back to (rows, 16·blocks)."""
    return tiled.transpose(1, 2, 0).reshape(tiled.shape[1], -1)


def block_amax(magnitude: F32, block: tuple[int, int], nan: str = "ignore") -> F32:
    """Largest magnitude of each block: (rows, blocks), replicated over the 16 rows of a 16x16 tile.

    NaN is ignored (rule AMAX-NAN: the kernels' max drops NaN, and starts from +0), propagated, or treated
    as the reduction "tree" does, see :func:`_tree_maximum`.
    """
    largest = _tree_maximum(magnitude) if nan == "tree" else np.maximum.reduce(magnitude, axis=0)
    if nan == "ignore" and np.isnan(largest).any():
        # not fmax, which loses what came before a signalling NaN
        largest = np.maximum.reduce(np.where(np.isnan(magnitude), np.float32(0), magnitude), axis=0)
    if block == (16, 16):
        rows, blocks = largest.shape
        tile: F32 = np.maximum.reduce(largest.reshape(rows // BLOCK, BLOCK, blocks), axis=1)
        largest = np.repeat(tile, BLOCK, axis=0)
    return largest


def pair_amax(amax: F32) -> F32:
    """Block amaxes (rows, blocks) replaced by the larger of two neighbours; an odd last block stays alone."""
    rows, blocks = amax.shape
    even = blocks - blocks % 2
    quiet = canonical_nan(amax[:, :even].copy())  # fmax keeps a signalling NaN
    pairs = np.fmax.reduce(quiet.reshape(rows, -1, 2), axis=2)
    return np.concatenate([np.repeat(pairs, 2, axis=1), amax[:, even:]], axis=1)


def _tree_maximum(magnitude: F32) -> F32:
    """Maximum over axis 0 by halves, (u > v ? u : v): a NaN in u is lost, one in v is kept; a NaN result is −Inf."""
    while len(magnitude) > 1:
        u, v = magnitude[: len(magnitude) // 2], magnitude[len(magnitude) // 2 :]
        magnitude = np.where(u > v, u, v)
    return np.where(np.isnan(magnitude[0]), np.float32(-np.inf), magnitude[0])


_INFINITY = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, bfloat16: 0x7F80}


def tensor_amax(matrix: AnyArray, axis: int | None = None, nan: str = "ignore") -> F32:
    """max(abs(x)) of a whole matrix (axis None) or along an axis, as float32, exact.  AMAX-TENSOR, AMAX-ROW.

    The magnitude of a float is ordered as the integer below its sign bit, so the maximum is taken on
    integers, in slabs that stay in the cache.
    """
    infinity = _INFINITY[matrix.dtype]
    unsigned = np.dtype(f"u{matrix.dtype.itemsize}")
    mask = unsigned.type(2 ** (8 * matrix.dtype.itemsize - 1) - 1)
    bits = matrix.view(unsigned)
    best = np.zeros({None: (), 0: matrix.shape[1], 1: matrix.shape[0]}[axis], unsigned)
    slab = max(1, 2**16 // matrix.shape[1])
    for start in range(0, matrix.shape[0], slab):
        magnitude = bits[start : start + slab] & mask
        largest = magnitude.max(axis)
        if nan == "ignore" and (largest > infinity).any():
            magnitude[magnitude > infinity] = 0
            largest = magnitude.max(axis)
        if axis == 1:
            best[start : start + slab] = largest
        else:
            best = np.maximum(best, largest)
    return canonical_nan(np.asarray(best).view(matrix.dtype).astype(np.float32))
