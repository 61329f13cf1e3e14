"""E4M3 bytes against the slow twin and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, WIDENED, Array, around, bits, same_bits

from nvfp4ref import arithmetic, e4m3, scalar
from nvfp4ref.arithmetic import Arithmetic

pytestmark = pytest.mark.filterwarnings("error")

BYTES = np.arange(256, dtype=np.uint8)
NUMBERS = BYTES[BYTES & 0x7F != 0x7F]
CODES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
#: every value, every midpoint, and what lies around the end, each with its neighbours
NEAR = around(
    np.concatenate([CODES, (CODES[1:] + CODES[:-1]) / np.float32(2), [456, 463, 464, 480, 512, 2.0**-11, 2.0**-126]]), 2
)
EDGES = np.concatenate(
    [
        NEAR,
        np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F7FFFFF, 0x80000000], np.uint32).view(
            np.float32
        ),
    ]
)


def twin(x: Array, ar: Arithmetic) -> Array:
    return np.array([scalar.e4m3_encode(float(v), ar) for v in x.astype(np.float32)], np.uint8)


def test_values_are_the_formula_and_ml_dtypes() -> None:
    """E4M3-VALUES"""
    found = e4m3.decode(BYTES)
    expected = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    same_bits(found[NUMBERS], expected[NUMBERS])
    assert [int(b) for b in bits(found[[0x7F, 0xFF]])] == [0x7FFFFFFF] * 2
    assert [scalar.e4m3_decode(b) for b in NUMBERS.tolist()] == found[NUMBERS].tolist()
    assert np.isnan(scalar.e4m3_decode(0x7F)) and np.isnan(scalar.e4m3_decode(0xFF))
    assert found[0x7E] == 448 and found[0x01] == 2.0**-9 and found[0x08] == 2.0**-6 and found[0x38] == 1


def test_every_value_has_its_byte() -> None:
    """E4M3-VALUES, both signs of zero included"""
    same_bits(e4m3.encode(e4m3.decode(NUMBERS)), NUMBERS)
    for rounding in e4m3.ROUNDING:
        same_bits(e4m3.encode(e4m3.decode(NUMBERS), rounding), NUMBERS)


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("rounding", sorted(e4m3.ROUNDING))
@pytest.mark.parametrize("inputs", [BFLOAT16[::5], EDGES], ids=["bfloat16", "edges"])
def test_every_mode_against_the_slow_twin(rounding: str, overflow: str, inputs: Array) -> None:
    """E4M3-RNE, E4M3-SATURATE and the scale variations"""
    ar = arithmetic("te", scale_rounding=rounding, scale_overflow=overflow)
    same_bits(e4m3.encode(inputs, rounding, overflow=overflow), twin(inputs, ar))


@pytest.mark.parametrize("inputs", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_every_pattern_against_the_slow_twin(inputs: Array) -> None:
    """E4M3-RNE, E4M3-SATURATE, E4M3-NAN"""
    same_bits(e4m3.encode(inputs), twin(inputs, arithmetic("te")))


def test_nearest_even_against_ml_dtypes() -> None:
    """E4M3-RNE, E4M3-SATURATE: two libraries agree on all but NaN once the input is limited to 448."""
    anything = np.random.default_rng(3).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
    scaled = np.ldexp(np.random.default_rng(4).uniform(-1, 1, 2**16), np.arange(2**16) % 24 - 13).astype(np.float32)
    for x in (WIDENED, FLOAT16.astype(np.float32), EDGES, anything, scaled):
        x = x[~np.isnan(x)]
        expected = np.clip(x, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        same_bits(e4m3.encode(x), expected)


def test_nearest_even_by_hand() -> None:
    """E4M3-RNE, E4M3-SATURATE, E4M3-NAN: bit patterns of the specification"""
    cases = {
        0x00000000: 0x00, 0x80000000: 0x80, 0x3A800000: 0x00, 0x3A800001: 0x01, 0x3B400000: 0x02, 0x3B3FFFFF: 0x01,
        0x3C740000: 0x08, 0x3F880000: 0x38, 0x3F980000: 0x3A, 0x43E00000: 0x7E, 0x43E80001: 0x7E, 0x7F800000: 0x7E,
        0xFF800000: 0xFE, 0x7FC00000: 0x7F, 0xFFC00000: 0x7F, 0x00000001: 0x00, 0x80000001: 0x80,
    }  # fmt: skip
    x = np.array(list(cases), np.uint32).view(np.float32)
    assert e4m3.encode(x).tolist() == list(cases.values())


def test_overflow_to_nan_begins_above_464() -> None:
    """E4M3-SATURATE and its deviation: 464 ties to 448, the next float is NaN with its sign."""
    x = np.array([464, np.nextafter(np.float32(464), np.float32(500)), np.inf], np.float32)
    assert e4m3.encode(x, overflow="nan").tolist() == [0x7E, 0x7F, 0x7F]
    assert e4m3.encode(-x, overflow="nan").tolist() == [0xFE, 0xFF, 0xFF]
    assert e4m3.encode(np.array([np.nan], np.float32), nan_byte=0).tolist() == [0]


def test_every_shape_and_stride() -> None:
    x = np.linspace(-500, 500, 60, dtype=np.float32).reshape(3, 4, 5)
    expected = e4m3.encode(x.reshape(-1)).reshape(3, 4, 5)
    for view, wanted in (
        (np.asfortranarray(x), expected),
        (x.astype(">f4"), expected),
        (x[::-1, ::2, ::-2], expected[::-1, ::2, ::-2]),
        (x[1, 2, 3], expected[1, 2, 3]),
        (x[:0], expected[:0]),
    ):
        np.testing.assert_array_equal(e4m3.encode(view), wanted)
    assert e4m3.encode(448.0) == 0x7E and e4m3.encode([1, -2]).tolist() == [0x38, 0xC0]
    frozen = x.copy()
    frozen.flags.writeable = False
    same_bits(e4m3.encode(frozen), expected)
    same_bits(frozen, x)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: e4m3.encode(1.0, "down"), ValueError, "'down' is not one of 'nearest-even'"),
        (lambda: e4m3.encode(1.0, overflow="inf"), ValueError, "'inf' is not 'saturate' or 'nan'"),
        (lambda: e4m3.encode(np.zeros(2, np.int32)), TypeError, "expected float32.*got dtype int32"),
        (lambda: e4m3.encode(np.array([[1, 0.1]])), ValueError, r"element \[0, 1\] is .*0.1"),
        (lambda: e4m3.decode(np.zeros(2, int)), TypeError, "uint8; got dtype int64"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()  # type: ignore[operator]
    assert "\n" not in str(raised.value)
