"""The fast path is the slow twin: every value of every field, every preset, and combinations by property."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import (
    AMAXES,
    Array,
    bfloat16,
    decades,
    every_class,
    random,
    same_bits,
    scale_midpoints,
    slow,
    ties,
)

import nvfp4ref as nv
from nvfp4ref.arithmetic import _CHOICES, PRESETS, Arithmetic

pytestmark = pytest.mark.filterwarnings("error")

FREE: dict[str, tuple[Any, ...]] = {
    "headroom": (16 / 17, 0.5),
    "scale_nan_byte": (0, 0xFF),
    "scale_invalid_byte": (0, 0xFF),
    "scale_floor": (0.0, 2.0**-9, 2.0**-6),
    "zero_block_scale": (0, 0x38, 0xFF),
    "nan_code": (0, 8, 15),
    "nan_code_bfloat16": (0, 9),
    "nan_block_codes": ((3, 4, 12), (0, 1, 2)),
    "reciprocal_of_zero": (1e-8, 0.0),
}
VALUES = [(name, value) for name, values in (_CHOICES | FREE).items() for value in values]
BLOCKS = ((1, 16), (16, 16))


def judge(x: Array, ar: Arithmetic, block: tuple[int, int] = (1, 16), amax: Any = None) -> None:
    q = nv.quantize(x, arithmetic=ar, block=block, amax=amax)
    codes, scales = slow(x, ar, block, amax)
    same_bits(q.scales, scales)
    same_bits(q.codes, codes)


def allowed(ar: Arithmetic, block: tuple[int, int]) -> bool:
    return not (ar.row_scaled and block == (16, 16))


def test_no_field_is_forgotten() -> None:
    assert set(_CHOICES) | set(FREE) | {"name"} == {f.name for f in fields(Arithmetic)}


SPECIALS = every_class(16, 32)
ORDINARY = decades(16, 32, low=-9, high=3)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("name", "value"), VALUES, ids=str)
def test_every_field_value(name: str, value: Any, block: tuple[int, int]) -> None:
    """Each variation alone, on the preset where it acts, over ties, mixed decades and special values"""
    ar = nv.arithmetic("te", **{name: value})
    if name == "zero_block_rule":
        ar = nv.arithmetic(ar, zero_block_scale=0x38)
    if name == "sixth_type":
        ar = nv.arithmetic(ar, block_scale="divide-by-6")
    if name == "reciprocal_of_zero":
        ar = nv.arithmetic(ar, encode_scale="reciprocal-product")
    if name == "division":
        judge(
            SPECIALS, nv.arithmetic(ar, encode_scale="divide-by-product", block_scale="predivided-times-sixth"), block
        )
    if name.startswith("four_over_six_"):
        ar = nv.arithmetic(ar, four_over_six="MSE")
    if not allowed(ar, block):
        return
    amax = np.full(16, 2.5, np.float32) if ar.row_scaled else 2.5
    judge(ORDINARY, ar, block)
    judge(SPECIALS, ar, block, amax)
    if name in ("global_type", "sixth_type", "element_via", "nan_code_bfloat16"):
        for dtype in (np.float16, bfloat16):
            with np.errstate(all="ignore"):
                judge(SPECIALS.astype(dtype), ar, block, amax)
    if block == (1, 16) and not ar.row_scaled:
        judge(-np.abs(ORDINARY[:2]), ar, block)
    if block == (1, 16) and not ar.row_scaled and not ar.four_over_six:
        judge(ties()[::9], ar, block, 2688.0)
        judge(scale_midpoints()[::13], ar, block, 2688.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_at_ties_and_scale_midpoints(name: str) -> None:
    """E2M1-RNE, E4M3-RNE, SCALE-BLOCK: each E4M3 value, each midpoint, one ulp to either side

    FAST-MATH, TE-2-14, TE-REFERENCE, PEER-TORCHAO, PEER-MODELOPT, PEER-COMPRESSED-TENSORS, PEER-JAX-NN, PEER-VLLM,
    PEER-QWIX, PEER-QWANTIZE, PEER-TE-JAX, PEER-FOUROVERSIX, PEER-TE-JAX-GPU, PEER-TORCHAO-GPU, PEER-JAX-NN-GPU: the
    presets' arithmetic, here and in the tests below.
    """
    ar = PRESETS[name]
    step = 6 if ar.four_over_six else 1
    judge(ties()[::step], ar, amax=2688.0)
    judge(scale_midpoints()[::step], ar, amax=2688.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_without_a_given_amax(name: str) -> None:
    """AMAX-TENSOR, AMAX-NAN and the presets' own rules, every dtype, both blocks"""
    ar = PRESETS[name]
    odd = every_class(16, 32, seed=9)
    odd[0, :3] = np.inf, -np.inf, np.nan
    for block in BLOCKS:
        for x in (random(16, 32), decades(16, 32, low=-140, high=-118), decades(16, 32, low=118, high=127), odd):
            judge(x, ar, block)
    with np.errstate(all="ignore"):
        for dtype in (np.float16, bfloat16):
            judge(decades(16, 32, low=-20, high=8).astype(dtype), ar)
            judge(odd.astype(dtype), ar)
    judge(np.zeros((2, 16), np.float32), ar)
    judge(-np.zeros((2, 16), np.float32), ar)


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_under_any_amax(name: str, amax: float) -> None:
    """AMAX-SUPPLIED, SCALE-GLOBAL-GUARD: zero, negative, Inf, NaN, subnormal and stale amaxes"""
    judge(SPECIALS[:3], PRESETS[name], amax=amax)
    judge(SPECIALS[:, :16], PRESETS[name], (16, 16), amax)


def test_the_scales_of_tiles_one_above_the_other() -> None:
    """BLOCK-16X16: a tile's byte in each of its 16 rows, or (tiled) the tiles' bytes in turn, 16 times over"""
    x = decades(64, 32, low=-4, high=4)
    repeated = nv.quantize(x, block=(16, 16))
    tiled = nv.quantize(x, block=(16, 16), arithmetic=nv.arithmetic("te", tile_scales="tiled"))
    tiles = repeated.scales[::16]
    assert len(np.unique(tiles, axis=0)) == 4
    same_bits(repeated.scales, np.repeat(tiles, 16, axis=0))
    same_bits(tiled.scales, np.concatenate([tiles] * 16))
    same_bits(tiled.packed, repeated.packed)
    for name in ("te", "te-jax"):
        judge(x, PRESETS[name], (16, 16))


def test_subnormal_blocks_are_zero_blocks_where_subnormals_are_flushed() -> None:
    """SCALE-ZERO-BLOCK, PEER-TE-JAX: the amax of flushed elements is 0"""
    x = decades(16, 32, low=-140, high=-124)
    for flush in (True, False):
        judge(x, nv.arithmetic("te", flush_subnormals=flush, zero_block_scale=0x38), amax=1e-30)


def test_a_signalling_nan_of_a_shared_amax() -> None:
    """AMAX-NAN: the number of the other block wins over any NaN"""
    for nan in (0x7FC00000, 0x7F800001, 0xFF800001):
        x = np.full((2, 32), 2.5, np.float32)
        x.view(np.uint32)[1, 25] = nan
        ar = nv.arithmetic("torchao", amax_group=32)
        judge(x, ar, amax=3.0)
        assert len(np.unique(nv.quantize(x, arithmetic=ar, amax=3.0).scales)) == 1


@pytest.mark.parametrize("name", ["te-jax", "jax-nn"])
@pytest.mark.parametrize("columns", [240, 256])
def test_nan_from_4096_elements_on(name: str, columns: int) -> None:
    """PEER-TE-JAX, PEER-JAX-NN: the reduction changes with the size"""
    x = random(16, columns)
    x.reshape(-1)[::37] = np.nan
    for block in BLOCKS:
        judge(x, PRESETS[name], block, amax=3.0)
        judge(x, PRESETS[name], block)


@pytest.mark.parametrize("name", ["te", "te-reference", "te-2.14", "four-over-six"])
def test_row_scaled(name: str) -> None:
    """ROW-SCALED, AMAX-ROW"""
    ar = nv.arithmetic(name, row_scaled=True)
    judge(every_class(7, 48, seed=3), ar)
    judge(random(15, 16), ar, amax=np.array(AMAXES, np.float32))


# -- combinations by property ---------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn, exponent: int) -> Array:
    """16 elements of about 2^exponent: normal, ties, nearly constant, zeros, any bits; specials sprinkled in."""
    kind = draw(st.sampled_from(["normal", "decades", "ties", "near", "zeros", "bits"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "bits":
        x = rng.integers(0, 2**32, 16, dtype=np.uint32).view(np.float32).copy()
    elif kind == "zeros":
        x = rng.choice(np.array([0.0, -0.0], np.float32), 16)
    else:
        y: Array = rng.standard_normal(16)
        if kind == "ties":
            y = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, -6], 16) * rng.integers(8, 16)
        elif kind == "near":
            y = 1 + rng.integers(-3, 4, 16) * 2.0**-23
        elif kind == "decades":
            y = np.ldexp(y, rng.integers(-8, 1, 16))
        with np.errstate(over="ignore"):
            x = np.ldexp(y, exponent).astype(np.float32)
        if draw(st.booleans()):
            x = x.astype(bfloat16).astype(np.float32)
    for place in draw(st.lists(st.integers(0, 15), max_size=1)):
        x[place] = draw(st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 3.4028235e38, 1e-45]))
    return x


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Array:
    """A matrix whose blocks lie a few binades below a common exponent, so that their scales are no zeros."""
    exponent = draw(st.one_of(st.integers(-6, 6), st.integers(-149, 120)))
    found = [[draw(blocks(exponent - draw(st.integers(0, 12)))) for _ in range(columns // 16)] for _ in range(rows)]
    return np.concatenate([np.concatenate(row)[None] for row in found])


@st.composite
def amaxes(draw: st.DrawFn, x: Array) -> Any:
    """None, a stale multiple of the true one, or any float32."""
    kind = draw(st.sampled_from(["none", "none", "stale", "stale", "any"]))
    if kind == "any":
        return draw(st.one_of(st.sampled_from(AMAXES), st.floats(width=32)))
    finite = np.abs(x[np.isfinite(x)]).max(initial=0)
    with np.errstate(over="ignore"):
        return (
            None if kind == "none" else np.float32(finite * np.float32(draw(st.sampled_from([0.3, 0.99, 1, 1.7, 90]))))
        )


STORED = ("row_scaled", "stochastic", "packing", "tile_scales")  # not in what is compared here


@st.composite
def arithmetics(draw: st.DrawFn) -> Arithmetic:
    """Any preset with some fields replaced by any of their values, 4over6 among them every other time."""
    names = sorted(set(_CHOICES | FREE) - set(STORED))
    changed = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))
    if draw(st.booleans()):
        changed.append("four_over_six")
    changes = {name: draw(st.sampled_from((_CHOICES | FREE)[name])) for name in changed}
    return nv.arithmetic(draw(st.sampled_from(sorted(PRESETS))), **changes)


@given(st.data(), arithmetics(), st.integers(1, 3))
@settings(max_examples=500)
def test_any_arithmetic_on_any_rows(data: st.DataObject, ar: Arithmetic, rows: int) -> None:
    x = data.draw(matrices(rows, 32))
    judge(x, ar, amax=data.draw(amaxes(x)))


@given(st.data(), arithmetics())
@settings(max_examples=60)
def test_any_arithmetic_on_any_tile(data: st.DataObject, ar: Arithmetic) -> None:
    x = data.draw(matrices(16, 16))
    judge(x, ar, (16, 16), data.draw(amaxes(x)))


@given(st.data(), st.integers(1, 5))
@settings(max_examples=60)
def test_any_rows_with_their_own_amax(data: st.DataObject, rows: int) -> None:
    """ROW-SCALED"""
    ar = nv.arithmetic("te", row_scaled=True)
    x = data.draw(matrices(rows, 32))
    judge(x, ar)
    judge(x, ar, amax=np.array(data.draw(st.lists(st.floats(width=32), min_size=rows, max_size=rows)), np.float32))


@given(st.data(), st.sampled_from(["float16", "bfloat16"]), st.sampled_from(sorted(PRESETS)))
@settings(max_examples=100)
def test_any_preset_on_sixteen_bits(data: st.DataObject, dtype: str, name: str) -> None:
    """INPUT-WIDEN"""
    x = data.draw(matrices(2, 32))
    with np.errstate(all="ignore"):
        judge(x.astype(bfloat16 if dtype == "bfloat16" else np.float16), PRESETS[name])
