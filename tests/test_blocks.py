"""Tiles and their amax: the views, the maxima against the slow twin, and the shapes that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, Array, bfloat16, bits, every_class, random, same_bits

from nvfp4ref import blocks, scalar

pytestmark = pytest.mark.filterwarnings("error")

SIGNALLING = np.array([0x7F800001], np.uint32).view(np.float32)[0]


def matrices() -> list[Array]:
    x = every_class(32, 48)
    half = np.random.default_rng(1).integers(0, 2**16, (32, 48), dtype=np.uint16)
    return [
        x,
        half.view(np.float16),
        half.view(bfloat16),
        random(3, 160),
        np.zeros((1, 16), np.float32),
        -np.zeros((2, 16), np.float32),
    ]


@pytest.mark.parametrize("axis", [-1, 0])
def test_tiles_are_the_blocks(axis: int) -> None:
    """BLOCK-1X16, BLOCK-COLUMNWISE"""
    x = np.arange(48 * 32, dtype=np.float32).reshape(48, 32)
    rows = x if axis == -1 else x.T
    for view in (x, np.asfortranarray(x), x[::-1][::-1]):
        tiled = blocks.tiles(view, axis)
        assert tiled.shape == (16, rows.shape[0], rows.shape[1] // 16) and np.shares_memory(tiled, view)
        for i, r, b in ((0, 0, 0), (3, 1, 0), (15, rows.shape[0] - 1, rows.shape[1] // 16 - 1), (7, 20, 1)):
            assert tiled[i, r, b] == rows[r, 16 * b + i]
        copy = blocks.working_copy(tiled)
        same_bits(np.ascontiguousarray(copy), np.ascontiguousarray(tiled))
        assert not np.shares_memory(copy, x)
        same_bits(np.ascontiguousarray(blocks.untile(copy)), np.ascontiguousarray(rows))


@pytest.mark.parametrize("nan", ["ignore", "propagate"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_block_amax_against_the_slow_twin(block: tuple[int, int], nan: Any) -> None:
    """BLOCK-AMAX, AMAX-NAN, BLOCK-16X16"""
    x = every_class(32, 80)
    x[:16, :16] = SIGNALLING
    found = blocks.block_amax(np.abs(blocks.working_copy(blocks.tiles(x))), block, nan)
    for r in range(0, 32, block[0]):
        for b in range(5):
            tile = x[r : r + block[0], 16 * b : 16 * b + 16]
            expected = np.float32(scalar.amax(tile.reshape(-1).tolist(), nan))
            np.testing.assert_array_equal(found[r : r + block[0], b], np.repeat(expected, block[0]))


@pytest.mark.parametrize("shape", [(1, 16), (1, 48), (3, 48), (5, 16), (16, 16)])
@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF])
def test_a_nan_of_any_kind_in_any_place_is_no_maximum(shape: tuple[int, int], pattern: int) -> None:
    """AMAX-NAN: signalling NaNs too, whatever the vector width leaves over."""
    for place in range(16):
        x = random(*shape)
        bits(x).reshape(shape[0], -1, 16)[:, :, place] = pattern
        rest = np.delete(x.reshape(shape[0], -1, 16), place, axis=2)
        found = blocks.block_amax(np.abs(blocks.working_copy(blocks.tiles(x))), (1, 16))
        same_bits(found, np.abs(rest).max(axis=2))
        same_bits(blocks.tensor_amax(x), np.abs(rest).max())


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("number", range(6))
def test_tensor_amax_against_the_slow_twin(number: int, axis: int | None) -> None:
    """AMAX-TENSOR, AMAX-ROW, AMAX-NAN"""
    x = matrices()[number]
    lines = {None: [x.reshape(-1)], 0: list(x.T), 1: list(x)}[axis]
    for nan in ("ignore", "propagate"):
        expected = np.array([scalar.amax(line.astype(np.float32).tolist(), nan) for line in lines], np.float32)
        for view in (x, np.asfortranarray(x)):
            found = blocks.tensor_amax(view, axis, nan)
            assert found.dtype == np.float32 and found.shape == (() if axis is None else expected.shape)
            wanted = bits(expected)
            wanted[np.isnan(expected)] = 0x7FFFFFFF
            np.testing.assert_array_equal(bits(found).reshape(-1), wanted)


def test_tensor_amax_over_slab_boundaries() -> None:
    """AMAX-TENSOR: the largest element found wherever it lies, in tall and wide matrices"""
    for shape in ((5000, 16), (1, 70000), (3, 40000)):
        x = random(*shape, seed=3)
        for place in (0, x.size // 2, x.size - 1):
            y = x.copy()
            y.reshape(-1)[place] = -77
            assert blocks.tensor_amax(y) == 77
            assert blocks.tensor_amax(y, 1)[place // shape[1]] == 77 and (blocks.tensor_amax(y, 1) == 77).sum() == 1
            assert blocks.tensor_amax(y, 0)[place % shape[1]] == 77 and (blocks.tensor_amax(y, 0) == 77).sum() == 1


def test_every_half_is_its_own_amax() -> None:
    """AMAX-TENSOR, exact for all 65536 patterns of either 16-bit type"""
    for values in (FLOAT16, BFLOAT16):
        with np.errstate(invalid="ignore"):
            number = ~np.isnan(values)
        found = blocks.tensor_amax(values.reshape(-1, 1), 1)
        with np.errstate(invalid="ignore"):
            same_bits(found[number], np.abs(values[number].astype(np.float32)))
        assert (found[~number] == 0).all()
        propagated = blocks.tensor_amax(values.reshape(-1, 1), 1, "propagate")
        np.testing.assert_array_equal(np.isnan(propagated), ~number)
        same_bits(propagated[number], found[number])


def test_leading_dimensions_are_rows() -> None:
    """INPUT-FLATTEN"""
    x = np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32)
    same_bits(blocks.as_matrix(x, -1, (1, 16)), x.reshape(6, 32))
    same_bits(blocks.as_matrix(x.transpose(1, 0, 2), -1, (1, 16)), x.transpose(1, 0, 2).reshape(6, 32))


@pytest.mark.parametrize(
    ("shape", "axis", "block", "says"),
    [
        (
            (16, 20),
            -1,
            (1, 16),
            r"shape \(16, 20\) has 20 columns, not a multiple of 16, .*1x16 .*pad with zeros to 32 columns",
        ),
        (
            (20, 16),
            0,
            (1, 16),
            r"shape \(20, 16\) has 20 rows, .*1x16 blocks along axis 0 need; pad with zeros to 32 rows",
        ),
        ((20, 16), -1, (16, 16), r"20 rows, not a multiple of 16, which 16x16"),
        ((16, 20), 0, (16, 16), r"20 columns, not a multiple of 16, which 16x16"),
        ((2, 3, 7), -1, (1, 16), r"shape \(2, 3, 7\) has 7 columns"),
        ((2, 12, 16), -1, (16, 16), r"shape \(2, 12, 16\) has 24 rows"),
        ((16,), -1, (1, 16), r"a matrix or more dimensions; got shape \(16,\): use x.reshape\(1, -1\)"),
        ((), -1, (1, 16), r"a matrix or more dimensions; got shape \(\)"),
        ((0, 16), -1, (1, 16), r"at least one element; got shape \(0, 16\)"),
        ((16, 0), 0, (1, 16), r"at least one element; got shape \(16, 0\)"),
        ((1, 16, 16), 0, (1, 16), r"axis=0 quantizes the transpose of a matrix; got shape \(1, 16, 16\)"),
        ((16, 16), 1, (1, 16), "axis is -1 .* or 0 .*; got 1"),
        ((16, 16), None, (1, 16), "axis is -1 .* or 0 .*; got None"),
        ((16, 16), -1, (2, 16), r"block is \(1, 16\) or \(16, 16\); got \(2, 16\)"),
        ((16, 16), -1, (16, 1), r"block is \(1, 16\) or \(16, 16\); got \(16, 1\)"),
        ((16, 16), -1, 16, r"block is \(1, 16\) or \(16, 16\); got 16"),
        ((16, 16), -1, None, r"block is \(1, 16\) or \(16, 16\); got None"),
    ],
)
def test_bad_shapes_are_refused_in_one_sentence(shape: Any, axis: Any, block: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        blocks.as_matrix(np.zeros(shape, np.float32), axis, block)
    assert "\n" not in str(raised.value)


def test_rows_need_no_multiple_where_blocks_do_not_cross_them() -> None:
    assert blocks.as_matrix(np.zeros((5, 16), np.float32), -1, (1, 16)).shape == (5, 16)
    assert blocks.as_matrix(np.zeros((16, 5), np.float32), 0, (1, 16)).shape == (16, 5)
