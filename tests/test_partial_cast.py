"""The kernels for sharded weights: piece by piece against the whole, and step by step against the slow twin."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from inputs import AMAXES, Array, bfloat16, decades, every_class, random, same_bits

import nvfp4ref as nv
from nvfp4ref import e2m1, partial_cast, scalar
from nvfp4ref.fp32 import canonical_nan

pytestmark = pytest.mark.filterwarnings("error")

TE = nv.PRESETS["te"]
SHAPE = (48, 80)
#: (start, length) of flat ranges: whole, aligned, unaligned, a single element, odd places, over tile borders
RANGES = [(0, 3840), (0, 1280), (17, 1000), (1279, 2), (3839, 1), (641, 16), (80 * 16 - 5, 90), (1, 3838)]


def single(values: Any) -> Array:
    return canonical_nan(np.array(values, np.float64).astype(np.float32))


@pytest.mark.parametrize("start,length", RANGES)
def test_tile_amax(start: int, length: int) -> None:
    """PARTIAL-CAST-SCALE, PARTIAL-CAST-OFFSET: 0 where the range has no element, NaN ignored"""
    for x in (random(*SHAPE), every_class(*SHAPE)):
        piece = x.reshape(-1)[start : start + length]
        expected = [[0.0] * 5 for _ in range(3)]
        for i, v in enumerate(piece, start):
            r, c = i // 80 // 16, i % 80 // 16
            expected[r][c] = scalar.amax([expected[r][c], float(v)], "ignore")
        same_bits(partial_cast.tile_amax(piece, SHAPE, start), single(expected))


def test_tile_amax_of_ragged_matrices_and_every_dtype() -> None:
    x = random(20, 36)
    found = partial_cast.tile_amax(x, (20, 36))
    assert found.shape == (2, 3) and found[1, 2] == np.abs(x[16:, 32:]).max()
    for dtype in (bfloat16, np.float64, ">f4"):
        same_bits(partial_cast.tile_amax(x.astype(dtype), (20, 36)), found)
    half = x.astype(np.float16)
    same_bits(partial_cast.tile_amax(half, (20, 36)), partial_cast.tile_amax(half.astype(np.float32), (20, 36)))


@pytest.mark.parametrize("amax", [*AMAXES, 1e-39, 1.1754942e-38, 5e-36])
def test_scales_of_any_amax(amax: float) -> None:
    """RECIPE-GLOBAL-SCALE, RECIPE-BLOCK-SCALE"""
    a = float(np.float32(amax))
    s = scalar.fmin(scalar.div(2688.0, max(a, 2.0**-126)), scalar.FLT_MAX) if a > 0 else 1.0
    same_bits(partial_cast.global_scale(np.float32(amax)), single(s))
    tiles = np.array([[0, 1e-30, 3], [np.inf, 3.3e38, 1e-45]], np.float32)
    sixth = scalar.fl(Fraction(1, 6))
    expected = [[scalar.fmin(scalar.mul(float(t), scalar.mul(s, sixth)), scalar.FLT_MAX) for t in row] for row in tiles]
    same_bits(partial_cast.block_scale(tiles, np.float32(amax)), single(expected))


def test_global_scale_of_several() -> None:
    amaxes = np.array([1, 2688, 0], np.float32)
    assert partial_cast.global_scale(amaxes).tolist() == [2688, 1, 1]


@pytest.mark.parametrize("rows", [1, 16, 17, 48, 130])
def test_expand_scale(rows: int) -> None:
    """RECIPE-BLOCK-SCALE, LAYOUT-PAD: a tile's byte in each of its rows, zeros beyond"""
    scale = np.abs(random(-(-rows // 16), 5)) * np.float32(100)
    found = partial_cast.expand_scale(scale, rows)
    assert found.shape == nv.layout.padded_shape(rows, 5)
    for r in range(found.shape[0]):
        row = nv.e4m3.encode(scale[r // 16]).tolist() if r < rows else [0] * 5
        assert found[r].tolist() == row + [0] * 3


@pytest.mark.parametrize("x", [random(*SHAPE), decades(*SHAPE)], ids=["normal", "decades"])
def test_the_whole_is_the_16x16_quantization(x: Array) -> None:
    """RECIPE-GLOBAL-SCALE, RECIPE-BLOCK-SCALE, PARTIAL-CAST-SCALE, BLOCK-16X16"""
    q = nv.quantize(x, block=(16, 16))
    scale = partial_cast.block_scale(partial_cast.tile_amax(x, SHAPE), q.amax)
    same_bits(partial_cast.expand_scale(scale, 48)[:48, :5], q.scales)
    same_bits(partial_cast.partial_cast(x, scale, partial_cast.global_scale(q.amax), SHAPE), q.packed)


@pytest.mark.parametrize("start,length", RANGES)
def test_a_range_writes_its_own_nibbles_only(start: int, length: int) -> None:
    """PARTIAL-CAST-OFFSET, E2M1-PACK"""
    x = random(*SHAPE)
    q = nv.quantize(x, block=(16, 16))
    scale, s = partial_cast.block_scale(partial_cast.tile_amax(x, SHAPE), q.amax), partial_cast.global_scale(q.amax)
    before = np.random.default_rng(0).integers(0, 256, (48, 40), dtype=np.uint8)
    kept = before.copy()
    piece = x.reshape(-1)[start : start + length]
    for out in (None, before):
        found = partial_cast.partial_cast(piece, scale, s, SHAPE, start, out)
        expected = e2m1.unpack(np.zeros((48, 40), np.uint8) if out is None else kept).reshape(-1)
        expected[start : start + length] = q.codes.reshape(-1)[start : start + length]
        same_bits(e2m1.unpack(found).reshape(-1), expected)


def test_pieces_make_the_whole() -> None:
    """PARTIAL-CAST-SCALE, PARTIAL-CAST-OFFSET: three ranks"""
    x = every_class(*SHAPE)
    x[np.isinf(x)] = 1
    flat, cuts = x.reshape(-1), [0, 1001, 2500, 3840]
    ranges = list(zip(cuts[:-1], cuts[1:], strict=True))
    tiles = np.maximum.reduce([partial_cast.tile_amax(flat[a:b], SHAPE, a) for a, b in ranges])
    same_bits(tiles, partial_cast.tile_amax(x, SHAPE))
    scale, s = partial_cast.block_scale(tiles, np.float32(3)), partial_cast.global_scale(np.float32(3))
    out = None
    for a, b in ranges:
        out = partial_cast.partial_cast(flat[a:b], scale, s, SHAPE, a, out)
    same_bits(out, partial_cast.partial_cast(x, scale, s, SHAPE))


@pytest.mark.parametrize("s", [1.0, 1344.5, 0.0, -2.0, 1e-38, 3e38, np.inf, np.nan])
def test_codes_by_the_slow_twin(s: float) -> None:
    """PARTIAL-CAST-SCALE: e = fmin(d > 0 ? fl(1/fl(d·fl(1/S))) : FLT_MAX, FLT_MAX), S = 1 where S <= 0"""
    x = every_class(16, 96)
    scale = np.array([[0, 1e-4, 224, 1e9, -3, np.nan]], np.float32)
    s32 = float(np.float32(s))
    decode = scalar.div(1.0, s32 if s32 > 0 else 1.0)
    expected = []
    for row in x:
        for c, v in enumerate(row):
            d = scalar.e4m3_decode(scalar.e4m3_encode(float(scale[0, c // 16]), TE))
            e = scalar.fmin(scalar.div(1.0, scalar.mul(d, decode)) if d > 0 else scalar.FLT_MAX, scalar.FLT_MAX)
            expected.append(scalar.e2m1_encode(scalar.mul(float(v), e), TE))
    found = partial_cast.partial_cast(x, scale, np.float32(s), (16, 96))
    same_bits(e2m1.unpack(found), np.array(expected, np.uint8).reshape(16, 96))


@pytest.mark.parametrize("a", AMAXES)
def test_alpha(a: float) -> None:
    """RECIPE-ALPHA"""
    for b in (2.5, *AMAXES[::4]):
        for alpha, tops in ((1.0, (448, 448)), (0.3, (256, 448)), (-2.0, (256, 256))):
            a32, b32, alpha32 = (float(np.float32(v)) for v in (a, b, alpha))
            factor = scalar.div(1.0, scalar.fl(Fraction(36 * tops[0] * tops[1])))
            expected = scalar.mul(scalar.mul(scalar.mul(alpha32, a32), b32), factor)
            same_bits(partial_cast.alpha(np.float32(a), np.float32(b), alpha, e4m3_max=tops), single(expected))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: partial_cast.tile_amax(random(1, 16), (4, 4), 1),
            ValueError,
            r"elements 1..17 do not lie in a matrix of shape \(4, 4\)",
        ),
        (lambda: partial_cast.tile_amax(random(1, 16), (4, 4), -1), ValueError, r"elements -1..15 do not lie"),
        (lambda: partial_cast.tile_amax(np.zeros(16, int), (4, 4)), TypeError, "got dtype int64"),
        (
            lambda: partial_cast.partial_cast(random(1, 16), np.ones((1, 1), np.float32), 1.0, (2, 15)),
            ValueError,
            r"\(2, 15\)",
        ),
        (
            lambda: partial_cast.partial_cast(random(1, 16), np.ones((2, 2), np.float32), 1.0, (1, 16)),
            ValueError,
            r"\(1, 1\).*\(2, 2\)",
        ),
        (
            lambda: partial_cast.partial_cast(
                random(1, 16), np.ones((1, 1), np.float32), 1.0, (1, 16), 0, np.zeros((2, 8), np.uint8)
            ),
            ValueError,
            r"\(1, 8\).*\(2, 8\)",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)
