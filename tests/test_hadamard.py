"""The random Hadamard transform against exact rational arithmetic and the definition of its matrix."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import Array, bfloat16, bits, random, same_bits

import nvfp4ref as nv
from nvfp4ref import hadamard, scalar
from nvfp4ref.fp32 import BF16_MAX, from_bfloat16, to_bfloat16

pytestmark = pytest.mark.filterwarnings("error")

TE = nv.RHT()
#: bfloat16(1/sqrt(n)) by its bits
ENTRY = {2: 0x3F35, 4: 0x3F00, 8: 0x3EB5, 16: 0x3E80, 32: 0x3E35, 64: 0x3E00, 128: 0x3DB5, 256: 0x3D80}
SIZES = sorted(ENTRY)
SIXTEEN: Any = "16"
NOT_AN_RHT: Any = "te"


def exact(vector: Array, rht: nv.RHT, j: int) -> float:
    """Accumulator j of one finite vector: 16 products a step, the sum carried on, all in rationals."""
    matrix = rht.matrix()
    total = Fraction(0)
    for k in range(0, rht.size, 16):
        products = [
            Fraction(float(x)) * Fraction(float(m))
            for x, m in zip(vector[k : k + 16], matrix[k : k + 16, j], strict=True)
        ]
        total = scalar.tensor_core_sum([*products, total])
    return math.inf * (1 if total > 0 else -1) if abs(total) >= 2**128 else float(total)


def vectors(count: int, size: int = 16, seed: int = 0, spread: int = 40, center: int = 0) -> Array:
    """bfloat16 vectors whose elements lie ``spread`` powers of two apart, so that the truncation shows."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = np.ldexp(
            rng.standard_normal((count, size)), rng.integers(center - spread, center + spread + 1, (count, size))
        )
        x = x.astype(np.float32).astype(bfloat16)
    x[rng.random(x.shape) < 0.05] = 0
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("signs_on", ["input", "output"])
def test_matrix(size: int, normalised: bool, signs_on: str) -> None:
    """RHT-MATRIX: s_i·(−1)^popcount(i & j)/sqrt(n); with the fault s_j"""
    mask = int(np.random.default_rng(size).integers(0, 2 ** min(size, 62)))
    rht = nv.RHT(size=size, sign_mask=mask, normalised=normalised, signs_on=signs_on)
    entry = float(from_bfloat16(np.array([ENTRY[size]], np.uint16))[0]) if normalised else 1.0
    assert rht.entry == entry
    expected = np.empty((size, size), np.float32)
    for i in range(size):
        for j in range(size):
            sign = mask >> (i if signs_on == "input" else j) & 1
            expected[i, j] = entry * (-1) ** (bin(i & j).count("1") + sign)
    same_bits(rht.matrix(), expected)


def test_defaults_are_transformer_engine_s() -> None:
    """RHT-MATRIX"""
    assert (TE.size, TE.sign_mask, TE.normalised, TE.round_to) == (16, 0xD7E8, True, "bfloat16")
    signs = np.sign(TE.matrix()[:, 0]).astype(int).tolist()
    assert signs == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


@pytest.mark.parametrize("center", [0, -120, 96])
@pytest.mark.parametrize("spread", [0, 3, 12, 30])
def test_sixteen_against_the_slow_twin(spread: int, center: int) -> None:
    """RHT-SUM, RHT-ROUND: wide and narrow, tiny and huge"""
    x = vectors(24, spread=spread, center=center, seed=spread)
    finite = np.isfinite(x.astype(np.float32)).all(axis=1)
    x = x[finite]
    assert len(x) > 4
    for mask in (0xD7E8, 0, 0xFFFF, 0x0001):
        slow = [scalar.hadamard_16([float(v) for v in row], mask) for row in x[:8]]
        found = hadamard.transform(x[:8], nv.RHT(sign_mask=mask))
        same_bits(found, np.array(slow, np.float32).astype(bfloat16))
    raw = hadamard.transform(x, nv.RHT(round_to="float32"))
    expected = [[exact(row, TE, j) for j in range(16)] for row in x]
    same_bits(raw, np.array(expected, np.float64).astype(np.float32))
    same_bits(hadamard.transform(x, TE), from_bits(to_bfloat16(raw)))


def from_bits(b: Array) -> Array:
    return b.view(bfloat16)


@given(
    st.lists(st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=16, max_size=16),
    st.integers(0, 0xFFFF),
)
def test_sixteen_of_any_bits(patterns: list[int], mask: int) -> None:
    """RHT-SUM, RHT-ROUND over arbitrary finite bfloat16"""
    x = np.array([patterns], np.uint16).view(bfloat16)
    slow = scalar.hadamard_16([float(v) for v in x[0]], mask)
    same_bits(hadamard.transform(x, nv.RHT(sign_mask=mask)), np.array([slow], np.float32).astype(bfloat16))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_against_rationals(size: int, normalised: bool) -> None:
    """RHT-SUM: sizes above 16 in steps of 16, ascending; below, one short step"""
    x = vectors(2, size, seed=size, spread=14)
    rht = nv.RHT(size=size, sign_mask=0xB5 % 2**size, normalised=normalised, round_to="float32")
    columns = range(size) if size <= 32 else (0, 1, size // 2, size - 1)
    found = hadamard.transform(x, rht)
    for row, y in zip(x, found, strict=True):
        for j in columns:
            same_bits(y[j], np.float32(exact(row, rht, j)))


@pytest.mark.parametrize("signs_on", ["input", "output"])
def test_the_two_ways_to_add_sixteen_agree(signs_on: str) -> None:
    """RHT-SUM: the butterfly on integers and the plain step, on all kinds of vectors"""
    rht = nv.RHT(signs_on=signs_on)
    rng = np.random.default_rng(8)
    every = rng.integers(0, 2**16, (500, 16), dtype=np.uint16)
    every[rng.random(500) < 0.6] &= np.uint16(0xBFFF)  # mostly finite
    x = from_bfloat16(np.concatenate([every, bits(vectors(500))])).T.copy()
    with np.errstate(all="ignore"):
        fast = hadamard.accumulate(x, rht)
        products = x.astype(np.float64)[:, None] * rht.matrix().astype(np.float64)[:, :, None]
        same_bits(fast, hadamard.tensor_core_step(products))


def test_special_values() -> None:
    """RHT-SPECIAL: NaN and opposite infinities give 0x7FFF, infinities of one sign themselves, overflow Inf"""
    x = np.zeros((6, 16), np.float32)
    x[0, 3] = np.nan
    x[1, 2] = np.inf
    x[2, 0], x[2, 1] = np.inf, np.inf
    x[3, 5], x[3, 6] = -np.inf, np.nan
    x[4] = BF16_MAX
    x[5] = -0.0
    y = hadamard.transform(x.astype(bfloat16), nv.RHT(sign_mask=0)).astype(np.float32)
    same_bits(
        bits(hadamard.transform(x.astype(bfloat16), nv.RHT(sign_mask=0)))[[0, 3]], np.full((2, 16), 0x7FFF, np.uint16)
    )
    same_bits(y[1], np.array([np.inf if not bin(2 & j).count("1") % 2 else -np.inf for j in range(16)], np.float32))
    assert (np.isnan(y[2]) == [bool(j & 1) for j in range(16)]).all() and (y[2, ::2] == np.inf).all()
    assert y[4, 0] == np.inf and (y[4, 1:] == 0).all()
    same_bits(y[5], np.zeros(16, np.float32))


def test_truncation_to_float32() -> None:
    """RHT-SUM: toward zero, never to Inf below 2^128; NaN is 0x7FFFFFFF"""
    up = 1 + 2.0**-23
    x = np.array(
        [
            1 + 2.0**-24,
            -(1 + 2.0**-24),
            up,
            up + 2.0**-24 + 2.0**-40,
            2.0**128 * (1 - 2.0**-40),
            2.0**128,
            np.inf,
            -0.0,
            np.nan,
        ]
    )
    found = hadamard.truncate_to_float32(x)
    expected = np.array([1, -1, up, up, np.finfo(np.float32).max, np.inf, np.inf, -0.0, 0], np.float32)
    expected[-1] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
    same_bits(found, expected)


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (33, 32), (20000, 32), (3, 2**18 + 16)], ids=str)
def test_rows_do_not_depend_on_their_neighbours(shape: tuple[int, int]) -> None:
    """RHT-SUM over slab boundaries"""
    x = random(*shape, seed=2).astype(bfloat16)
    found = hadamard.transform(x, TE)
    assert found.shape == shape and found.dtype == bfloat16
    for r in {0, shape[0] // 2, shape[0] - 1}:
        for c in {0, shape[1] // 32 * 16, shape[1] - 16}:
            same_bits(found[r, c : c + 16], hadamard.transform(x[r : r + 1, c : c + 16], TE)[0])


@pytest.mark.parametrize("summation", ["tensor-core", "float32-four-lanes"])
@pytest.mark.parametrize("round_to", ["bfloat16", "float32"])
def test_columns_are_rows_of_the_transpose(round_to: str, summation: str) -> None:
    """RHT-MATRIX, BLOCK-COLUMNWISE, for any memory layout"""
    x = vectors(64, 48, spread=8)
    rht = nv.RHT(round_to=round_to)
    expected = hadamard.transform(np.ascontiguousarray(x.T), rht, -1, summation)
    assert expected.dtype == (bfloat16 if round_to == "bfloat16" else np.float32)
    for view in (x, np.asfortranarray(x), x[::-1][::-1], x.astype(np.float32)):
        same_bits(hadamard.transform(view, rht, 0, summation), expected)


def test_four_lanes_against_the_slow_twin() -> None:
    """TE-REFERENCE: float32 on a CPU, ((lane 0 + lane 1) + lane 2) + lane 3"""
    x = np.concatenate([vectors(6, spread=s, center=c, seed=s) for s in (1, 10, 30) for c in (0, -126)])
    x = np.concatenate(
        [x, np.array([[np.inf] * 16, [np.nan] + [1] * 15, [np.inf, -np.inf] + [0] * 14], np.float32).astype(bfloat16)]
    )
    matrix = TE.matrix()
    for row, y in zip(x, hadamard.transform(x, nv.RHT(round_to="float32"), -1, "float32-four-lanes"), strict=True):
        for j in range(16):
            lanes = [scalar.mul(float(row[k]), float(matrix[k, j])) for k in range(4)]
            for k in range(4, 16):
                lanes[k % 4] = scalar.add(lanes[k % 4], scalar.mul(float(row[k]), float(matrix[k, j])))
            total = scalar.add(scalar.add(scalar.add(lanes[0], lanes[1]), lanes[2]), lanes[3])
            wanted = 0x7FFFFFFF if math.isnan(total) else int(bits(np.float32(total)))
            assert int(bits(y[j])) == wanted


@pytest.mark.parametrize("preset", ["te", "te-fused-rht", "te-reference"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_quantize_is_transform_then_quantize(axis: int, preset: str) -> None:
    """RHT-AMAX: amax is that of the transformed values; the steps show them"""
    x = vectors(64, 48, spread=3)
    y = hadamard.transform(x, TE, axis, nv.PRESETS[preset].rht_sum)
    for amax in (None, 2.0):
        with_rht = nv.quantize(x, axis=axis, rht=TE, arithmetic=preset, amax=amax)
        plain = nv.quantize(y, arithmetic=preset, amax=amax)
        for name in ("packed", "scales", "amax"):
            same_bits(getattr(with_rht, name), getattr(plain, name))
        steps, expected = with_rht.steps, plain.steps
        same_bits(steps.transformed, y.astype(np.float32))
        assert expected.transformed is None
        for name in ("global_scale", "block_amax", "block_scale", "encode_scale", "scaled"):
            same_bits(getattr(steps, name), getattr(expected, name))
    same_bits(nv.quantize(x[:, :16], rht=TE).steps.transformed, hadamard.transform(x[:, :16], TE).astype(np.float32))


def test_input_that_bfloat16_holds_may_come_in_any_dtype() -> None:
    x = vectors(16, 32, spread=2)
    expected = nv.quantize(x, rht=TE)
    for dtype in (np.float32, np.float64):
        same_bits(nv.quantize(x.astype(dtype), rht=TE).packed, expected.packed)
    half = np.ldexp(np.random.default_rng(1).integers(-128, 128, (16, 32)), -4).astype(np.float16)
    same_bits(nv.quantize(half, rht=TE).packed, nv.quantize(half.astype(bfloat16), rht=TE).packed)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nv.RHT(size=12), ValueError, "power of two from 2 to 256; got 12"),
        (lambda: nv.RHT(size=512), ValueError, "power of two from 2 to 256; got 512"),
        (lambda: nv.RHT(size=SIXTEEN), ValueError, "power of two from 2 to 256; got '16'"),
        (lambda: nv.RHT(sign_mask=-1), ValueError, "sign_mask has 16 bits; got -0x1"),
        (lambda: nv.RHT(sign_mask=NOT_AN_RHT), ValueError, "sign_mask is an integer of 16 bits; got 'te'"),
        (lambda: nv.RHT(size=4), ValueError, "sign_mask has 4 bits; got 0xd7e8: pass one that fits"),
        (lambda: nv.RHT(signs_on="both"), ValueError, "signs_on is 'input' or 'output'; got 'both'"),
        (lambda: nv.RHT(round_to="float16"), ValueError, "'bfloat16' or 'float32'; got 'float16'"),
        (
            lambda: nv.quantize(random(4, 48).astype(bfloat16), rht=nv.RHT(size=32)),
            ValueError,
            "size 32 needs a multiple of 32 .*got 48",
        ),
        (
            lambda: nv.quantize(np.full((1, 16), 0.1, np.float32), rht=TE),
            ValueError,
            "reads bfloat16; this float32 input",
        ),
        (
            lambda: nv.quantize(np.full((1, 16), 0.1, np.float16), rht=TE),
            ValueError,
            "reads bfloat16; this float16 input",
        ),
        (lambda: nv.quantize(random(1, 16), rht=NOT_AN_RHT), TypeError, "rht is an nvfp4ref.RHT or None; got str"),
        (lambda: nv.quantize(random(1, 16), rht=TE, arithmetic="four-over-six"), ValueError, "4over6 does not go with"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)
