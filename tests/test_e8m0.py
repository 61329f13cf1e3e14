"""UE8M0 bytes against exact powers of two, ml_dtypes, and a plain definition over every 16-bit pattern."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, Array, around, bits, same_bits

from nvfp4ref import e8m0

pytestmark = pytest.mark.filterwarnings("error")

BYTES = np.arange(256, dtype=np.uint8)
EDGES = np.concatenate(
    [
        around(np.ldexp(np.float32(1), np.arange(-149, 128)), 1),
        around(np.ldexp(np.float32(1.5), np.arange(-148, 128)), 1),
        np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 0x00000000, 0x80000000, 0x7F7FFFFF], np.uint32).view(
            np.float32
        ),
    ]
)


def plain(x: float, rounding: str, overflow: str) -> int:
    """The definition: the power of two at or below (above) |x|, from 2^-127; subnormals are 0 when rounding down."""
    if math.isnan(x):
        return 0xFF
    top = 0xFE if overflow == "saturate" else 0xFF
    if math.isinf(x):
        return top
    magnitude = abs(x)
    if magnitude <= 2.0**-127 or (rounding == "floor" and magnitude < 2.0**-126):
        return 0
    fraction, exponent = math.frexp(magnitude)
    power = exponent - 1 + (rounding == "ceil" and fraction != 0.5)
    return top if power > 127 else power + 127


def test_values_are_powers_of_two() -> None:
    """E8M0-VALUES, E8M0-NAN"""
    found = e8m0.decode(BYTES)
    assert found[:255].tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert int(bits(found)[255]) == 0x7FFFFFFF
    same_bits(found[:255], BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:255])


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_every_value_has_its_byte(rounding: str) -> None:
    """E8M0-ENCODE, E8M0-NAN"""
    same_bits(e8m0.encode(e8m0.decode(BYTES), rounding), BYTES)
    same_bits(e8m0.encode(-e8m0.decode(BYTES), rounding), BYTES)


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("inputs", [BFLOAT16, FLOAT16, EDGES], ids=["bfloat16", "float16", "edges"])
def test_every_pattern_against_the_definition(rounding: str, overflow: str, inputs: Array) -> None:
    """E8M0-ENCODE, E8M0-NAN"""
    expected = np.array([plain(float(v), rounding, overflow) for v in inputs.astype(np.float32)], np.uint8)
    same_bits(e8m0.encode(inputs, rounding, overflow=overflow), expected)


def test_shapes() -> None:
    x = np.array([[1, 3], [0.75, -8]], np.float32)
    assert e8m0.encode(x.T).tolist() == [[127, 126], [128, 130]]
    assert e8m0.encode(x[0, 1], "ceil") == 129 and e8m0.encode(x[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: e8m0.encode(1.0, "nearest"), ValueError, "'nearest' is not 'floor' or 'ceil'"),
        (lambda: e8m0.encode(1.0, overflow="inf"), ValueError, "'inf' is not 'saturate' or 'nan'"),
        (lambda: e8m0.encode(np.zeros(2, bool)), TypeError, "expected float32.*got dtype bool"),
        (lambda: e8m0.decode(np.zeros(2, np.int8)), TypeError, "uint8; got dtype int8"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()  # type: ignore[operator]
    assert "\n" not in str(raised.value)
