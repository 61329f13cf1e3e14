"""E2M1 codes against the slow twin, ml_dtypes and the table of values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT16, WIDENED, Array, around, bits, same_bits

from nvfp4ref import arithmetic, e2m1, scalar
from nvfp4ref.arithmetic import Arithmetic

pytestmark = pytest.mark.filterwarnings("error")

VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
THRESHOLDS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 2.0**-149, 2.0**-126)
NEAR = around(THRESHOLDS, 3)
EDGES = np.concatenate(
    [
        NEAR,
        np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 0x00000000, 0x80000000], np.uint32).view(np.float32),
    ]
)


def twin(x: Array, ar: Arithmetic) -> Array:
    return np.array([scalar.e2m1_encode(float(v), ar) for v in x.astype(np.float32)], np.uint8)


def test_values_are_the_table() -> None:
    """E2M1-VALUES"""
    same_bits(e2m1.decode(np.arange(16)), np.array(VALUES, np.float32))
    assert [scalar.e2m1_decode(c) for c in range(16)] == list(VALUES)
    as_ml_dtypes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    same_bits(e2m1.decode(np.arange(16)), as_ml_dtypes)


def test_every_value_has_its_code() -> None:
    """E2M1-VALUES, E2M1-ZERO"""
    same_bits(e2m1.encode(np.array(VALUES, np.float32)), np.arange(16, dtype=np.uint8))


@pytest.mark.parametrize("rounding", sorted(e2m1.ROUNDING))
@pytest.mark.parametrize("inputs", [BFLOAT16, FLOAT16, EDGES], ids=["bfloat16", "float16", "edges"])
def test_every_pattern_against_the_slow_twin(rounding: str, inputs: Array) -> None:
    """E2M1-RNE, E2M1-SATURATE, E2M1-NAN, E2M1-ZERO"""
    same_bits(e2m1.encode(inputs, rounding), twin(inputs, arithmetic("te", element_rounding=rounding)))


@pytest.mark.parametrize("inputs", [WIDENED, FLOAT16, EDGES], ids=["bfloat16", "float16", "edges"])
def test_nearest_even_against_ml_dtypes(inputs: Array) -> None:
    """E2M1-RNE, E2M1-SATURATE: two libraries agree on all but NaN."""
    number = ~np.isnan(inputs)
    expected = inputs[number].astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    same_bits(e2m1.encode(inputs)[number], expected)


def test_nearest_even_by_hand() -> None:
    """E2M1-RNE: a tie goes to the even code; one ulp decides."""
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for index, (midpoint, even) in enumerate(ties.items()):
        below, at, above = np.nextafter(np.float32(midpoint), np.array([0, midpoint, 9], np.float32))
        assert e2m1.encode(np.array([below, at, above])).tolist() == [index, even, index + 1]
        assert e2m1.encode(-np.array([below, at, above])).tolist() == [index + 8, even + 8, index + 9]


def test_nan_and_its_code() -> None:
    """E2M1-NAN: 7 whatever the sign."""
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert e2m1.encode(nans).tolist() == [7] * 4
    assert e2m1.encode(nans, nan_code=0).tolist() == [0] * 4
    half_nans = bits(FLOAT16)[np.isnan(FLOAT16)].view(np.float16)
    assert (e2m1.encode(half_nans) == 7).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"negative_zero": "keep"},
        {"negative_zero": "drop"},
        {"negative_zero": "drop-exact"},
        {"saturate": False},
        {"nan_code": 0},
        {"nan_code": 15, "saturate": False, "negative_zero": "drop"},
        {"element_via": "bfloat16"},
        {"element_via": "float16"},
        {"element_via": "bfloat16", "negative_zero": "drop-exact", "element_rounding": "truncate"},
        {"element_via": "float16", "negative_zero": "drop-exact", "element_rounding": "ties-away", "saturate": False},
    ],
    ids=str,
)
def test_element_fields_against_the_slow_twin(fields: dict[str, object]) -> None:
    """E2M1-ZERO, E2M1-NAN and the element variations, over all bfloat16, all float16 and what rounds twice."""
    ar = arithmetic("te", **fields)
    thresholds = np.array(THRESHOLDS[:13], np.float32)
    factors = np.array([1 + s * 2.0**-k for k in (8, 9, 11, 12) for s in (1, -1)], np.float32)
    twice = around(thresholds[:, None] * factors, 3)
    step = 16 if "element_via" in fields else 1  # the 16-bit numbers themselves do not round twice
    for x in (WIDENED[::step], FLOAT16[::step].astype(np.float32), EDGES, twice):
        same_bits(e2m1.round_elements(x.copy(), ar), twin(x, ar))


def test_round_elements_leaves_its_input_alone() -> None:
    for via in (None, "bfloat16", "float16"):
        x = EDGES.copy()
        e2m1.round_elements(x, arithmetic("te", element_via=via))
        same_bits(x, EDGES)


def test_every_shape_and_stride() -> None:
    x = np.linspace(-7, 7, 60, dtype=np.float32).reshape(3, 4, 5)
    expected = e2m1.encode(x.reshape(-1)).reshape(3, 4, 5)
    for view, wanted in (
        (x, expected),
        (np.asfortranarray(x), expected),
        (x.astype(">f4"), expected),
        (x[::-1, ::2, ::-2], expected[::-1, ::2, ::-2]),
        (x[1, 2, 3], expected[1, 2, 3]),
        (x[:0], expected[:0]),
        (np.broadcast_to(x[:1], (3, 4, 5)), np.broadcast_to(expected[:1], (3, 4, 5))),
    ):
        np.testing.assert_array_equal(e2m1.encode(view), wanted)
    assert e2m1.encode(2.75) == 5 and e2m1.encode([1, -6]).tolist() == [2, 15]
    read_only = x.copy()
    read_only.flags.writeable = False
    same_bits(e2m1.encode(read_only), expected)
    same_bits(read_only, x)


def test_pack_puts_the_even_element_low() -> None:
    """E2M1-PACK"""
    assert e2m1.pack(np.array([1, 2, 0xF, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert e2m1.unpack(np.array([0x21, 0x0F], np.uint8)).tolist() == [1, 2, 15, 0]


def test_pack_and_unpack_every_byte() -> None:
    """E2M1-PACK, over all 256 bytes and shapes"""
    every = np.arange(256, dtype=np.uint8)
    same_bits(e2m1.pack(e2m1.unpack(every)), every)
    codes = e2m1.unpack(every)
    assert codes.tolist() == [n for b in range(256) for n in (b & 15, b >> 4)]
    for shape in ((2, 128), (4, 2, 32), (256, 1)):
        assert e2m1.unpack(every.reshape(shape)).shape == (*shape[:-1], 2 * shape[-1])
        same_bits(e2m1.pack(codes.reshape(*shape[:-1], -1)), every.reshape(shape))
    same_bits(e2m1.pack(np.asfortranarray(codes.reshape(8, 64))), every.reshape(8, 32))
    assert e2m1.pack(np.zeros((3, 0), np.uint8)).shape == (3, 0) and e2m1.unpack(np.zeros((3, 0), np.uint8)).shape == (
        3,
        0,
    )


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: e2m1.encode(np.zeros(2, int), "up"), ValueError, "'up' is not one of 'nearest-even'"),
        (lambda: e2m1.encode(np.zeros(2, np.int32)), TypeError, "expected float32.*got dtype int32"),
        (lambda: e2m1.encode(np.zeros(2, complex)), TypeError, "expected float32.*got dtype complex128"),
        (lambda: e2m1.encode("abc"), TypeError, "expected float32"),
        (lambda: e2m1.encode(np.array([0.1])), ValueError, r"exact in float32, but element \[0\] is .*0.1"),
        (lambda: e2m1.decode(np.array([1.0])), TypeError, "integers 0..15; got dtype float64"),
        (lambda: e2m1.decode(np.array([16])), ValueError, "0..15; got 16..16"),
        (lambda: e2m1.decode(np.array([3, -1])), ValueError, "0..15; got -1..3"),
        (lambda: e2m1.pack(np.zeros(3, np.uint8)), ValueError, r"even number.*got shape \(3,\)"),
        (lambda: e2m1.pack(np.uint8(3)), ValueError, r"even number.*got shape \(\)"),
        (lambda: e2m1.pack(np.zeros(2, np.int64)), TypeError, "uint8 0..15; got dtype int64"),
        (lambda: e2m1.pack(np.array([1, 16], np.uint8)), ValueError, "0..15; got 16"),
        (lambda: e2m1.unpack(np.zeros(2, np.int8)), TypeError, "uint8; got dtype int8"),
        (lambda: e2m1.unpack(np.uint8(3)), ValueError, "at least one axis"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()  # type: ignore[operator]
    assert "\n" not in str(raised.value)


def test_dtypes_mean_the_same() -> None:
    """INPUT-WIDEN: a 16-bit input is its float32 value."""
    same_bits(e2m1.encode(BFLOAT16), e2m1.encode(WIDENED))
    same_bits(e2m1.encode(FLOAT16), e2m1.encode(FLOAT16.astype(np.float32)))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = WIDENED.astype(np.float64)
    same_bits(e2m1.encode(wide), e2m1.encode(WIDENED))
