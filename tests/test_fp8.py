"""FP8 with float32 scales against one float32 at a time, ml_dtypes, and the published error of normal numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inputs import Array, bfloat16, decades, every_class, random, same_bits

from nvfp4ref import e4m3, fp8, scalar

pytestmark = pytest.mark.filterwarnings("error")

TILES = ((1, 128), (128, 128))


def slow(x: Array, tile: tuple[int, int]) -> tuple[Array, Array, Array]:
    """FP8-SCALE tile by tile: codes, decode scales, decoded values."""
    rows, columns = x.shape
    down, across = -(-rows // tile[0]), -(-columns // tile[1])
    codes, decoded = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    scales = np.zeros((down, across), np.float32)
    for i, j in np.ndindex(down, across):
        place = np.s_[i * tile[0] : (i + 1) * tile[0], j * 128 : (j + 1) * 128]
        piece = x[place].astype(np.float64)
        amax = float(np.nanmax(np.abs(piece), initial=0))
        scale = scalar.fmin(scalar.div(448.0, amax), scalar.FLT_MAX) if amax > 0 else 1.0
        decode = scalar.div(1.0, scale)
        scaled = np.array([[scalar.mul(float(v), scale) for v in row] for row in piece], np.float64).astype(np.float32)
        code = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        code[np.isnan(scaled)] = 0x7F
        codes[place], scales[i, j] = code, decode
        values = code.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        decoded[place] = [[scalar.mul(float(v), decode) for v in row] for row in values]
    return codes, scales, decoded


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_definition(tile: tuple[int, int], dtype: Any) -> None:
    """FP8-SCALE, partial tiles at both edges"""
    for shape in ((3, 128), (130, 150), (1, 1), (128, 256)):
        x = decades(shape[0], 16 * (shape[1] // 16 + 1), low=-8, high=3)[:, : shape[1]].astype(dtype)
        q = fp8.quantize(x, tile=tile)
        codes, scales, decoded = slow(x, tile)
        same_bits(q.codes, codes)
        same_bits(q.scales, scales)
        same_bits(q.dequantize(), decoded)
        assert q.tile == tile


@pytest.mark.parametrize("tile", TILES)
def test_the_ends_of_float32(tile: tuple[int, int]) -> None:
    """Subnormal and huge tiles, zeros, NaN ignored in amax, Inf saturates"""
    for x in (
        decades(5, 128, low=-149, high=-125),
        decades(5, 128, low=110, high=127),
        np.zeros((2, 128), np.float32),
        -np.zeros((2, 128), np.float32),
        np.full((1, 128), 1e-45, np.float32),
    ):
        codes, scales, _ = slow(x, tile)
        q = fp8.quantize(x, tile=tile)
        same_bits(q.codes, codes)
        same_bits(q.scales, scales)
    x = every_class(4, 128)
    with np.errstate(invalid="ignore"):
        x[~np.isfinite(x)] = np.nan
    codes, scales, _ = slow(x, tile)
    same_bits(fp8.quantize(x, tile=tile).codes, codes)
    same_bits(fp8.quantize(x, tile=tile).scales, scales)


def test_amax_maps_to_448() -> None:
    x = random(256, 256)
    q = fp8.quantize(x, tile=(128, 128))
    for i, j in np.ndindex(2, 2):
        place = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        top = np.abs(x[place]).argmax()
        assert q.codes[place].ravel()[top] & 0x7F == 0x7E


@pytest.mark.parametrize(("tile", "expected"), [((1, 128), 6.61e-4), ((128, 128), 7.00e-4)])
def test_relative_error(tile: tuple[int, int], expected: float) -> None:
    """T21"""
    x = np.random.default_rng(5).standard_normal((1024, 4096)).astype(np.float32)
    error = fp8.quantize(x, tile=tile).dequantize() - x
    relative = float((error.astype(np.float64) ** 2).sum() / (x.astype(np.float64) ** 2).sum())
    assert abs(relative - expected) < 5e-6


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (random(4, 128), {"tile": (16, 16)}, ValueError, r"tile is \(1, 128\) or \(128, 128\); got \(16, 16\)"),
        (random(4, 128)[0], {}, ValueError, r"a matrix with at least one element; got shape \(128,\)"),
        (np.zeros((0, 128), np.float32), {}, ValueError, r"got shape \(0, 128\)"),
        (np.zeros((4, 128), np.int8), {}, TypeError, "expected float32"),
    ],
)
def test_errors(x: Array, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp8.quantize(x, **options)


def test_codes_are_e4m3() -> None:
    q = fp8.quantize(random(16, 128))
    same_bits(q.dequantize(), e4m3.decode(q.codes) * np.repeat(q.scales, 128, axis=1))
