"""MXFP4 against its definition, ml_dtypes, torchao, and the published error of normal numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import BFLOAT16, Array, around, bfloat16, decades, every_class, random, same_bits

from nvfp4ref import e2m1, e8m0, mxfp4

pytestmark = pytest.mark.filterwarnings("error")

RULES = ("floor", "ceil")


def plain_scale(amax: float, rule: str) -> int:
    """MXFP4-SCALE in exact rationals: floor(log2 amax) − 2, or the least e with 6·2^e >= amax; biased, limited."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    a = Fraction(amax)
    e = a.numerator.bit_length() - a.denominator.bit_length() - 2
    if rule == "floor":
        while Fraction(4) * Fraction(2) ** e > a:
            e -= 1
        while Fraction(8) * Fraction(2) ** e <= a:
            e += 1
    else:
        while Fraction(6) * Fraction(2) ** (e - 1) >= a:
            e -= 1
        while Fraction(6) * Fraction(2) ** e < a:
            e += 1
    return min(max(e + 127, 0), 254)


def plain(x: Array, rule: str) -> tuple[Array, Array]:
    """(codes, scales) of a matrix: elements by ml_dtypes from float64 quotients, which are exact."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    codes, scales = np.zeros(blocks.shape, np.uint8), np.zeros(blocks.shape[:2], np.uint8)
    for place in np.ndindex(scales.shape):
        block = blocks[place]
        amax = float(np.nan) if np.isnan(block).any() else float(np.abs(block).max())
        scales[place] = plain_scale(amax, rule)
        if scales[place] == 255:
            codes[place] = 7  # NaN by NaN
            continue
        quotient = np.clip(block / 2.0 ** (int(scales[place]) - 127), -6, 6)
        codes[place] = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), scales


@pytest.mark.parametrize("rule", RULES)
def test_scale_of_every_bfloat16(rule: str) -> None:
    """MXFP4-SCALE"""
    amax = np.abs(BFLOAT16.astype(np.float32))[: 2**15]
    expected = [plain_scale(float(a), rule) for a in amax]
    same_bits(mxfp4.block_scale(amax, rule), np.array(expected, np.uint8))


@pytest.mark.parametrize("rule", RULES)
def test_scale_around_its_steps(rule: str) -> None:
    """MXFP4-SCALE: powers of two and 1.5 times them, one and two ulps to either side"""
    steps = np.ldexp(np.float32(1), np.arange(-149, 128))
    edges = np.concatenate([steps, steps[1:] * np.float32(1.5), steps[2:-1] * np.float32(1.75)])
    amax = np.abs(around(edges))
    expected = [plain_scale(float(a), rule) for a in amax]
    same_bits(mxfp4.block_scale(amax, rule), np.array(expected, np.uint8))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_definition(rule: str, dtype: Any) -> None:
    """MXFP4-SCALE, MXFP4-ELEMENT"""
    for x in (random(9, 96), decades(20, 128, low=-20, high=10), decades(8, 64, low=-24, high=-14)):
        x = x.astype(dtype)
        q = mxfp4.quantize(x, scale=rule)
        codes, scales = plain(x, rule)
        same_bits(q.scales, scales)
        same_bits(q.codes, codes)


@pytest.mark.parametrize("rule", RULES)
def test_every_class_and_the_ends_of_float32(rule: str) -> None:
    """NaN and Inf in a block, subnormals, the largest float32, zeros of both signs"""
    with np.errstate(invalid="ignore"):
        special = every_class(40, 64).astype(np.float64).astype(np.float32)
    zeros = -np.zeros((2, 32), np.float32)
    for x in (special, decades(30, 64, low=-149, high=-120), decades(10, 64, low=115, high=127), zeros):
        q = mxfp4.quantize(x, scale=rule)
        codes, scales = plain(x, rule)
        same_bits(q.scales, scales)
        same_bits(q.codes, codes)


def test_floor_saturates_and_ceil_does_not() -> None:
    """W4: amax 3 + δ under ceil has the scale 1 and the code of 3; 7.5 under floor has the scale 1 and saturates"""
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 3.125
    q = mxfp4.quantize(x, scale="ceil")
    assert int(q.scales[0, 0]) == 127 and int(q.codes[0, 0]) == 5
    x[0, 0] = 7.5
    q = mxfp4.quantize(x, scale="floor")
    assert int(q.scales[0, 0]) == 127 and int(q.codes[0, 0]) == 7
    assert int(mxfp4.quantize(x, scale="ceil").scales[0, 0]) == 128


def test_dequantize_is_code_times_power_of_two() -> None:
    x = np.concatenate([random(6, 96), decades(30, 96, low=-140, high=120)])
    for rule in RULES:
        q = mxfp4.quantize(x, scale=rule)
        scales = q.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        expected = e2m1.decode(q.codes) * np.repeat(scales, 32, axis=1)
        same_bits(q.dequantize(), expected.astype(np.float32))
        assert q.packed.shape == (36, 48) and q.packed.dtype == np.uint8


def test_nan_blocks_decode_to_nan() -> None:
    x = random(1, 64)
    x[0, 40] = np.nan
    decoded = mxfp4.quantize(x).dequantize()
    assert np.isnan(decoded[0, 32:]).all() and np.isfinite(decoded[0, :32]).all()


@given(st.integers(0, 2**32 - 1), st.integers(-149, 120), st.sampled_from(RULES))
def test_any_block(seed: int, exponent: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.standard_normal((2, 32)), rng.integers(exponent - 6, exponent + 1, (2, 32))).astype(np.float32)
    q = mxfp4.quantize(x, scale=rule)
    codes, scales = plain(x, rule)
    same_bits(q.scales, scales)
    same_bits(q.codes, codes)


# -- stochastic ------------------------------------------------------------------------------------------------


def test_stochastic_takes_the_fraction_as_probability() -> None:
    """Up where the uniform is below the fraction: 1.25 lies half way from 1 to 1.5"""
    x = np.full((1, 32), 1.25, np.float32)
    x[0, 0] = 4
    uniforms = np.linspace(0, 1, 32, endpoint=False, dtype=np.float32)[None]
    q = mxfp4.quantize(x, uniforms=uniforms)
    assert q.codes[0, 1:].tolist() == [3 if u < 0.5 else 2 for u in uniforms[0, 1:]]


def test_slabs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, u = random(50, 96), np.random.default_rng(1).random((50, 96), np.float32)
    whole, drawn = mxfp4.quantize(x), mxfp4.quantize(x, uniforms=u)
    monkeypatch.setattr(mxfp4, "SLAB", 200)
    for found, expected in ((mxfp4.quantize(x), whole), (mxfp4.quantize(x, uniforms=u), drawn)):
        same_bits(found.packed, expected.packed)
        same_bits(found.scales, expected.scales)


# -- others' ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("ceil", "RCEIL")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchao(rule: str, mode: str, dtype: str) -> None:
    """The package's MX quantizer gives the same bytes"""
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = np.concatenate([random(64, 256), decades(64, 256, low=-20, high=20)])
    matrix = torch.from_numpy(x).to(getattr(torch, dtype))
    scaling = getattr(mx_tensor.ScaleCalculationMode, mode)
    scales, packed = mx_tensor.to_mx(matrix, torch.float4_e2m1fn_x2, 32, scaling)
    q = mxfp4.quantize(matrix, scale=rule)
    same_bits(q.scales, scales.view(torch.uint8).numpy().reshape(q.scales.shape))
    same_bits(q.packed, packed.view(torch.uint8).numpy())


# -- error of random numbers -----------------------------------------------------------------------------------


def normal(kind: str) -> Array:
    rng = np.random.default_rng(3)
    x = rng.laplace(size=(1024, 4096)) if kind == "laplace" else rng.standard_normal((1024, 4096))
    return (np.maximum(x, 0) ** 2 if kind == "squared-relu" else x).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        ("normal", "floor", 13.22e-3),
        ("normal", "ceil", 13.32e-3),
        ("laplace", "floor", 16.06e-3),
        ("laplace", "ceil", 17.46e-3),
        ("squared-relu", "ceil", 16.3e-3),
    ],
)
def test_relative_error(kind: str, rule: str, expected: float) -> None:
    """T16"""
    x = normal(kind)
    error = mxfp4.quantize(x, scale=rule).dequantize() - x
    relative = float((error.astype(np.float64) ** 2).sum() / (x.astype(np.float64) ** 2).sum())
    assert abs(relative - expected) < 7e-5


def test_relative_error_of_stochastic_rounding() -> None:
    """T16: ceil with stochastic rounding"""
    x = normal("normal")
    uniforms = np.random.default_rng(4).random(x.shape, np.float32)
    error = mxfp4.quantize(x, scale="ceil", uniforms=uniforms).dequantize() - x
    relative = float((error.astype(np.float64) ** 2).sum() / (x.astype(np.float64) ** 2).sum())
    assert abs(relative - 27.1e-3) < 1e-4


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (random(4, 48), {}, ValueError, r"a multiple of 32 columns; got shape \(4, 48\)"),
        (random(4, 32)[0], {}, ValueError, r"a matrix with a multiple of 32 columns; got shape \(32,\)"),
        (np.zeros((0, 32), np.float32), {}, ValueError, "MXFP4 needs a matrix"),
        (random(4, 32), {"scale": "even"}, ValueError, "scale is 'floor' or 'ceil'; got 'even'"),
        (np.zeros((4, 32), np.int32), {}, TypeError, "expected float32"),
        (random(4, 32), {"uniforms": np.zeros((4, 8), np.float32)}, ValueError, r"have shape \(4, 32\)"),
        (random(4, 32), {"uniforms": np.ones((4, 32), np.float32)}, ValueError, r"lie in \[0, 1\)"),
        (random(4, 32), {"uniforms": np.zeros((4, 32))}, TypeError, "are float32 uniforms"),
    ],
)
def test_errors(x: Array, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mxfp4.quantize(x, **options)


def test_the_scale_table_is_ml_dtypes() -> None:
    codes = np.arange(255, dtype=np.uint8)
    same_bits(e8m0.decode(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
