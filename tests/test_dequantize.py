"""Dequantization against exact rational arithmetic, over every code, byte and kind of amax."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from inputs import AMAXES, Array, bfloat16, bits, random, same_bits

import nvfp4ref as nv
from nvfp4ref import scalar
from nvfp4ref.scalar import div, mul

pytestmark = pytest.mark.filterwarnings("error")

#: every code beside every scale byte: row b has scale byte b and the codes 0..15
PACKED = np.tile(np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8), (256, 1)).astype(np.uint8)
SCALES = np.arange(256, dtype=np.uint8).reshape(256, 1)


def expected(amax: float, ar: nv.Arithmetic) -> list[list[float]]:
    """fl(code·fl(fl(d·A)·fl(1/M))) for the table above (rule DEQUANTIZE)."""
    inverse = div(1.0, scalar.fl(Fraction(ar.element_max * ar.e4m3_max)))
    factors = [mul(mul(scalar.e4m3_decode(byte), amax), inverse) for byte in range(256)]
    return [[mul(scalar.e2m1_decode(code), factor) for code in range(16)] for factor in factors]


def float32(values: Any) -> Array:
    x = np.array(values, np.float64).astype(np.float32)
    x[np.isnan(x)] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    return x


@pytest.mark.parametrize("amax", AMAXES)
def test_every_code_and_byte(amax: float) -> None:
    """DEQUANTIZE, DEQUANTIZE-NAN"""
    q = nv.NVFP4Tensor.from_arrays(PACKED, SCALES, np.float32(amax))
    wanted = expected(float(np.float32(amax)), q.arithmetic)
    same_bits(nv.dequantize(q), float32(wanted))


@pytest.mark.parametrize("amax", [0.0, math.inf, 1e-40, 7.9e-36, 3e-5, 2.7, 2688.0, 1e5, 3e38])
@pytest.mark.parametrize(
    ("dtype", "through"), [(bfloat16, scalar.bf16), (np.float16, scalar.half)], ids=["bfloat16", "float16"]
)
def test_rounding_to_sixteen_bits(dtype: Any, through: Any, amax: float) -> None:
    """DEQUANTIZE: one more rounding, NaN 0x7FFF"""
    q = nv.NVFP4Tensor.from_arrays(PACKED, SCALES, np.float32(amax))
    found = nv.dequantize(q, dtype)
    assert found.dtype == np.dtype(dtype)
    wanted = [[through(v) for v in row] for row in expected(float(np.float32(amax)), q.arithmetic)]
    nan = np.isnan(wanted)
    assert (bits(found)[nan] == 0x7FFF).all()
    same_bits(found[~nan].astype(np.float32), np.array(wanted, np.float32)[~nan])


@pytest.mark.parametrize(
    "fields", [{"e4m3_max": 256}, {"headroom": 16 / 17}, {"e4m3_max": 256, "headroom": 0.5}], ids=str
)
def test_the_maximum_is_the_arithmetic_s(fields: dict[str, Any]) -> None:
    """DEQUANTIZE: M = element_max·e4m3_max"""
    ar = nv.arithmetic("te", **fields)
    q = nv.NVFP4Tensor.from_arrays(PACKED, SCALES, np.float32(3.7), arithmetic=ar)
    same_bits(nv.dequantize(q), float32(expected(float(np.float32(3.7)), ar)))


def test_row_scaled() -> None:
    """DEQUANTIZE, ROW-SCALED: each row has its own amax, in both directions and with leading dimensions"""
    x = random(32, 48)
    ar = nv.arithmetic("te", row_scaled=True)
    for q in (
        nv.quantize(x, arithmetic=ar),
        nv.quantize(x, axis=0, arithmetic=ar),
        nv.quantize(x.reshape(2, 16, 48), arithmetic=ar),
    ):
        found = nv.dequantize(q)
        assert found.shape == q.shape
        flat = found.reshape(-1, found.shape[-1])
        packed, scales = q.packed.reshape(len(flat), -1), q.scales.reshape(len(flat), -1)
        for r in range(len(flat)):
            one = nv.NVFP4Tensor.from_arrays(packed[r : r + 1], scales[r : r + 1], q.amax[r])
            same_bits(flat[r : r + 1], nv.dequantize(one))


@pytest.mark.parametrize("packing", ["low-nibble-first", "high-nibble-first", "split-half"])
def test_the_packing_does_not_matter(packing: str) -> None:
    """E2M1-PACK: what was packed comes back"""
    x = random(16, 48)
    plain = nv.quantize(x)
    q = nv.quantize(x, arithmetic=nv.arithmetic("te", packing=packing))
    same_bits(q.codes, plain.codes)
    same_bits(nv.dequantize(q), nv.dequantize(plain))


@pytest.mark.parametrize("kw", [{}, {"axis": 0}, {"block": (16, 16)}, {"arithmetic": "four-over-six"}], ids=str)
def test_the_values_are_near_the_input(kw: dict[str, Any]) -> None:
    """DEQUANTIZE is the inverse of quantization up to half a step of the largest element's binade."""
    x = random(48, 64)
    wanted = x if kw.get("axis") != 0 else x.T
    error = np.abs(nv.dequantize(nv.quantize(x, **kw)) - wanted)
    assert error.max() < np.abs(x).max() / 5
    assert error.mean() < 0.11 * np.abs(x).mean()


def test_shape_is_that_of_the_codes_and_nothing_is_changed() -> None:
    q = nv.quantize(random(6, 32).reshape(3, 2, 32))
    before = q.packed.copy(), q.scales.copy()
    for dtype in (np.float32, np.float16, bfloat16, "float16", "bfloat16"):
        assert nv.dequantize(q, dtype).shape == (3, 2, 32)
    same_bits(q.packed, before[0])
    same_bits(q.scales, before[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((np.zeros((2, 8)),), "expected an NVFP4Tensor .*; got ndarray"),
        ((None,), "expected an NVFP4Tensor .*; got NoneType"),
        ((nv.quantize(np.ones((1, 16), np.float32)), np.int8), "float32, bfloat16 or float16; got int8"),
        ((nv.quantize(np.ones((1, 16), np.float32)), np.float64), "float32, bfloat16 or float16; got float64"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as raised:
        nv.dequantize(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", object(), np.float64, "int8"])
def test_another_dtype_is_refused_in_words(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dequantize gives"):
        nv.dequantize(nv.quantize(np.ones((16, 16), np.float32)), dtype)


@pytest.mark.parametrize("preset", [name for name, one in nv.PRESETS.items() if one.global_scale == "none"])
def test_without_a_global_scale_a_value_is_code_times_block_scale(preset: str) -> None:
    x = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    q = nv.quantize(x, arithmetic=preset)
    expected = nv.e2m1.VALUES[q.codes].reshape(16, 4, 16) * nv.e4m3.VALUES[q.scales][..., None]
    assert (nv.dequantize(q) == expected.reshape(16, 64)).all()
    assert np.abs(nv.dequantize(q) - x).max() < 0.6
