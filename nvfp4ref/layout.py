"""Where the bytes lie: scale padding and the 128x4 swizzle, packing variants, transposes of packed codes.

Rules LAYOUT-PAD, LAYOUT-SWIZZLE, LAYOUT-TRANSPOSE.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import e2m1
from .fp32 import U8, AnyArray


def _scale_matrix(scales: ArrayLike) -> U8:
    scales = np.asarray(scales)
    if scales.dtype.itemsize != 1 or scales.ndim != 2:
        raise ValueError(f"scales are a matrix of bytes (rows, K/16); got {scales.dtype} of shape {scales.shape}")
    return scales.view(np.uint8)


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of a padded scale matrix: rows to a multiple of 128, columns to a multiple of 4."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def pad(scales: ArrayLike, fill: int = 0) -> U8:
    """Scales (rows, K/16) padded to (⌈rows/128⌉·128, ⌈K/64⌉·4) with ``fill`` (rule LAYOUT-PAD).

    Kernels leave the padding unwritten; ``nvte_swizzle_scaling_factors`` writes zeros.
    """
    scales = _scale_matrix(scales)
    out = np.full(padded_shape(*scales.shape), fill, np.uint8)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out


def swizzle(scales: ArrayLike) -> U8:
    """Scales in the 128x4 order that tensor cores read (rule LAYOUT-SWIZZLE), padded with zeros.

    Byte (r, c) goes to ((r/128·⌈K/4⌉ + c/4)·32 + r%32)·16 + (r%128)/32·4 + c%4 of the flat result,
    which is returned in the padded shape.
    """
    padded = pad(scales)
    rows, columns = padded.shape
    atoms = padded.reshape(rows // 128, 4, 32, columns // 4, 4)
    return atoms.transpose(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle(swizzled: ArrayLike, rows: int, columns: int) -> U8:
    """The compact scales (rows, columns) of a swizzled array; ValueError when the size does not fit them."""
    swizzled = np.asarray(swizzled)
    shape = padded_shape(rows, columns)
    if swizzled.dtype.itemsize != 1 or swizzled.size != shape[0] * shape[1]:
        raise ValueError(
            f"swizzled scales of {rows}x{columns} blocks are {shape[0]}x{shape[1]} bytes; "
            f"got {swizzled.dtype} of shape {swizzled.shape}"
        )
    atoms = swizzled.view(np.uint8).reshape(shape[0] // 128, shape[1] // 4, 32, 4, 4)
    return np.ascontiguousarray(atoms.transpose(0, 3, 2, 1, 4).reshape(shape)[:rows, :columns])


def transpose_packed(packed: ArrayLike) -> U8:
    """Packed codes of the transpose: (R, C/2) to (C, R/2); R even (rule LAYOUT-TRANSPOSE)."""
    codes = e2m1.unpack(packed)
    if codes.ndim != 2 or codes.shape[0] % 2:
        raise ValueError(f"packed codes to transpose are a matrix with an even number of rows; got {codes.shape}")
    return e2m1.pack(np.ascontiguousarray(codes.T))


def transpose_tile_scales(scales: ArrayLike) -> U8:
    """Scales of the transpose of a 16x16-block tensor: (R, C/16) to (C, R/16), replicated anew."""
    scales = _scale_matrix(scales)
    if scales.shape[0] % 16:
        raise ValueError(f"16x16 scales have a multiple of 16 rows; got {scales.shape}")
    return np.repeat(scales[::16].T, 16, axis=0)


def pack_tiles(codes: U8, packing: str, out: AnyArray) -> None:
    """Codes in tiles (16, rows, blocks) into packed rows ``out`` (rows, 8·blocks), by packing rule."""
    if packing == "split-half":  # byte j of a block holds elements j and j + 8
        low, high = codes[:8], codes[8:]
    else:
        low, high = codes[0::2], codes[1::2]
    if packing == "high-nibble-first":
        low, high = high, low
    both = high * np.uint8(16)  # a shift by 4; NumPy's multiplication is the vectorised one
    both |= low
    rows, blocks = codes.shape[1:]
    bytes_of_block = out.reshape(rows, blocks, 8, copy=False)
    for byte in range(8):  # NumPy's copy of the transpose is slower than eight strided ones
        bytes_of_block[..., byte] = both[byte]
