"""The approximate division of a GPU: its table against the recording, its range, and quotients that XLA computed.

DIV-APPROXIMATE
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inputs import INF, NAN, Array, around, bits, same_bits

from nvfp4ref import rcp, scalar
from nvfp4ref.fp32 import canonical_nan

pytestmark = pytest.mark.filterwarnings("error")
RECORDED = Path(__file__).parents[1] / "vectors" / "te-kernels-h200" / "rcp.npz"


def f32(*patterns: int) -> Array:
    return np.array(patterns, np.uint32).view(np.float32)


def test_the_table_is_the_recorded_one() -> None:
    """All 2^23 significands, and how many are off."""
    with np.load(RECORDED) as file:
        recorded = file["rcp_ulp"]
    table = rcp.corrections()
    assert table.dtype == recorded.dtype == np.int8 and np.array_equal(table, recorded)
    assert np.unique(table, return_counts=True)[1].tolist() == [374_723, 7_280_086, 733_799]
    assert table[0] == 0 and rcp.PATH.stat().st_size < 200_000


def test_it_is_read_once() -> None:
    assert rcp.corrections() is rcp.corrections()


def test_every_significand_is_at_most_one_ulp_off() -> None:
    """The reciprocal of every significand, at three exponents, moved by the table's ulp: integers throughout"""
    fraction = np.arange(2**23, dtype=np.uint32)
    with np.load(RECORDED) as file:
        expected = (np.float32(1) / (fraction | np.uint32(0x3F800000)).view(np.float32)).view(np.int32)
        expected += file["rcp_ulp"]
    for exponent in (1, 127, 252):
        y = (fraction | np.uint32(exponent << 23)).view(np.float32)
        assert np.array_equal(bits(rcp.reciprocal(y)), (expected + ((127 - exponent) << 23)).view(np.uint32))


def test_reciprocals_of_what_is_no_ordinary_number() -> None:
    y = np.array([0.0, -0.0, INF, -INF, NAN, 2.0**126, -(2.0**126), 2.0**-126], np.float32)
    found = [float(v) for v in rcp.reciprocal(y)]
    assert found[:2] == [INF, -INF] and str(found[2:4]) == "[0.0, -0.0]" and np.isnan(found[4])
    assert found[5:] == [2.0**-126, -(2.0**-126), 2.0**126]


#: dividend, divisor, the quotient that XLA computed on an H200 (jax 0.11.2), IEEE's
XLA = (
    (0xB286BDF3, 0x2A790348, 0xC78A85D6, 0xC78A85D5),
    (0xA6DAB0AE, 0x2F07CD9D, 0xB74E1FD4, 0xB74E1FD5),
    (0xC1645133, 0x3E9A48E4, 0xC23D6B80, 0xC23D6B7F),
    (0x598E1D32, 0xA5CD87B2, 0xF33102F6, 0xF33102F5),
    (0xC7663C2E, 0xC470A479, 0x4274EDAE, 0x4274EDAD),
    (0x3CE94C3A, 0x2FC0E439, 0x4C9AD021, 0x4C9AD022),
)


def test_quotients_that_xla_computed() -> None:
    a, b, quotient, ieee = (f32(*column) for column in zip(*XLA, strict=True))
    same_bits(rcp.divide(a, b), quotient)
    same_bits(a / b, ieee)
    out = np.empty_like(a)
    assert rcp.divide(a, b, out) is out
    same_bits(out, quotient)
    same_bits(
        rcp.divide(np.float32(2688), f32(0x25DF1F45, 0xC843C29A, 0x3CE94C3A)), f32(0x5EC0C163, 0xBC5BB28A, 0x47B8591E)
    )


EDGES = np.concatenate(
    [
        around([2.0**126, 2.0**-126, 2.0**-128, 1.0, 2.0**-149, 3.4028235e38, 1.3e38, 1e-40, 6, 2688], 2),
        np.array([0.0, -0.0, INF, -INF, NAN], np.float32),
    ]
)


def test_division_against_rationals() -> None:
    """Both scalings and what lies beside them, subnormal operands and quotients, zeros, Inf and NaN"""
    values = np.concatenate([EDGES, -EDGES, np.geomspace(1e-44, 3e38, 40).astype(np.float32)])
    x, y = (one.reshape(-1) for one in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        found = rcp.divide(x, y)
        slow = [scalar.div_full(float(a), float(b)) for a, b in zip(x, y, strict=True)]
        same_bits(canonical_nan(found), canonical_nan(np.array(slow, np.float64).astype(np.float32)))


def test_the_scalings_by_hand() -> None:
    """Without them 1/2^127 and 2^-149/2^-149 would be 0 and NaN; 2^-149/2^127 is 0 in any case"""
    x = np.array([1, 2.0**-149, 2.0**-149, 3], np.float32)
    y = np.array([2.0**127, 2.0**-149, 2.0**127, 2.0**-130], np.float32)
    with np.errstate(all="ignore"):
        assert rcp.divide(x, y).tolist() == [2.0**-127, 1.0, 0.0, INF]
