"""Where the bytes lie: padding, the 128x4 swizzle by its formula, transposes, the packings."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inputs import Array, random, same_bits

import nvfp4ref as nv
from nvfp4ref import e2m1, layout

pytestmark = pytest.mark.filterwarnings("error")

SHAPES = [
    (1, 1),
    (1, 4),
    (31, 3),
    (32, 5),
    (33, 4),
    (127, 7),
    (128, 8),
    (129, 1),
    (256, 12),
    (300, 9),
    (384, 2),
    (16, 256),
]


def scales_of(rows: int, columns: int) -> Array:
    return np.random.default_rng(rows * 1000 + columns).integers(0, 256, (rows, columns), dtype=np.uint8)


def place(r: int, c: int, columns: int) -> int:
    """Flat byte of scale (r, c): the rule's formula, ``columns`` those of the compact matrix."""
    return ((r // 128 * -(-columns // 4) + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pad(shape: tuple[int, int]) -> None:
    """LAYOUT-PAD"""
    scales = scales_of(*shape)
    padded = layout.pad(scales)
    assert padded.shape == layout.padded_shape(*shape)
    assert padded.shape[0] % 128 == padded.shape[1] % 4 == 0
    assert 0 <= padded.shape[0] - shape[0] < 128 and 0 <= padded.shape[1] - shape[1] < 4
    same_bits(padded[: shape[0], : shape[1]], scales)
    assert not padded[shape[0] :].any() and not padded[:, shape[1] :].any()
    filled = layout.pad(scales, 0xAB)
    assert (filled[shape[0] :] == 0xAB).all() and (filled[:, shape[1] :] == 0xAB).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swizzle_by_the_formula(shape: tuple[int, int]) -> None:
    """LAYOUT-SWIZZLE, every byte"""
    rows, columns = shape
    scales = scales_of(*shape)
    expected = np.zeros(layout.padded_shape(*shape), np.uint8).reshape(-1)
    for r in range(rows):
        for c in range(columns):
            expected[place(r, c, columns)] = scales[r, c]
    for view in (scales, np.asfortranarray(scales), scales[::-1][::-1]):
        found = layout.swizzle(view)
        same_bits(found, expected.reshape(found.shape))
        assert found.shape == layout.padded_shape(*shape)
    for swizzled in (found, found.reshape(-1), found.reshape(-1, 32, 16)):
        same_bits(layout.unswizzle(swizzled, rows, columns), scales)


def test_scales_of_any_byte_type() -> None:
    scales = scales_of(5, 3)
    for dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        same_bits(layout.swizzle(scales.view(dtype)), layout.swizzle(scales))
        same_bits(layout.unswizzle(layout.swizzle(scales).view(dtype), 5, 3), scales)


@pytest.mark.parametrize("shape", [(2, 2), (16, 32), (48, 6), (130, 64)], ids=str)
def test_transpose_of_packed_codes(shape: tuple[int, int]) -> None:
    """LAYOUT-TRANSPOSE"""
    codes = np.random.default_rng(1).integers(0, 16, shape, dtype=np.uint8)
    transposed = layout.transpose_packed(e2m1.pack(codes))
    same_bits(e2m1.unpack(transposed), np.ascontiguousarray(codes.T))
    same_bits(layout.transpose_packed(transposed), e2m1.pack(codes))


def test_a_16x16_tensor_can_be_transposed_after_the_fact() -> None:
    """LAYOUT-TRANSPOSE, BLOCK-16X16: the columnwise output of square tiles is the transposed rowwise one."""
    x = random(48, 80)
    row, column = nv.quantize(x, block=(16, 16)), nv.quantize(x, block=(16, 16), axis=0)
    same_bits(layout.transpose_packed(row.packed), column.packed)
    same_bits(layout.transpose_tile_scales(row.scales), column.scales)
    tiles = np.arange(15, dtype=np.uint8).reshape(3, 5)
    same_bits(layout.transpose_tile_scales(np.repeat(tiles, 16, axis=0)), np.repeat(tiles.T, 16, axis=0))


@pytest.mark.parametrize("packing", ["low-nibble-first", "high-nibble-first", "split-half"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_packings(packing: str, order: tuple[int, ...]) -> None:
    """E2M1-PACK and its deviations, byte by byte, for tiles in any memory order"""
    rows, blocks = 3, 5
    codes = np.random.default_rng(2).integers(0, 16, (16, rows, blocks), dtype=np.uint8)
    view = np.ascontiguousarray(codes.transpose(order)).transpose(np.argsort(order))
    out = np.full((rows + 2, 8 * blocks + 8), 0xEE, np.uint8)
    layout.pack_tiles(view, packing, out[1:-1, 8:])
    for r in range(rows):
        for b in range(blocks):
            for j in range(8):
                low, high = {
                    "low-nibble-first": (2 * j, 2 * j + 1),
                    "high-nibble-first": (2 * j + 1, 2 * j),
                    "split-half": (j, j + 8),
                }[packing]
                assert out[1 + r, 8 + 8 * b + j] == codes[low, r, b] | codes[high, r, b] << 4
    assert (out[0] == 0xEE).all() and (out[-1] == 0xEE).all() and (out[:, :8] == 0xEE).all()
    same_bits(view, codes)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: layout.pad(np.zeros(4, np.uint8)), r"matrix of bytes \(rows, K/16\); got uint8 of shape \(4,\)"),
        (lambda: layout.swizzle(np.zeros((2, 2), np.float32)), r"matrix of bytes.*; got float32 of shape \(2, 2\)"),
        (
            lambda: layout.unswizzle(np.zeros((128, 4), np.uint8), 128, 5),
            r"128x5 blocks are 128x8 bytes; got uint8 of shape \(128, 4\)",
        ),
        (lambda: layout.unswizzle(np.zeros((128, 4), np.int16), 128, 4), r"128x4 bytes; got int16"),
        (lambda: layout.transpose_packed(np.zeros((3, 2), np.uint8)), r"even number of rows; got \(3, 4\)"),
        (lambda: layout.transpose_packed(np.zeros((2, 2, 2), np.uint8)), r"even number of rows; got \(2, 2, 4\)"),
        (lambda: layout.transpose_tile_scales(np.zeros((8, 2), np.uint8)), r"multiple of 16 rows; got \(8, 2\)"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)
