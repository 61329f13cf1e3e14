"""Each stage of the scale arithmetic against the slow twin, for every choice of every field that it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from inputs import AMAXES, INF, NAN, WIDENED, Array, around, bits, same_bits

import nvfp4ref as nv
from nvfp4ref import scalar, scaling
from nvfp4ref.arithmetic import _CHOICES, Arithmetic
from nvfp4ref.fp32 import canonical_nan

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The stages run inside quantize()'s errstate."""
    with np.errstate(all="ignore"):
        yield


def single(values: Any) -> Array:
    """float32 with canonical NaNs."""
    return canonical_nan(np.array(values, np.float64).astype(np.float32))


def floats(values: Any) -> list[float]:
    return [float(v) for v in np.asarray(values, np.float32).reshape(-1)]


def variants(*names: str) -> list[dict[str, Any]]:
    """Every combination of the choices of some fields."""
    found = []
    for values in product(*(_CHOICES[name] for name in names)):
        fields = dict(zip(names, values, strict=True))
        if fields.get("global_type") != "input" and fields.get("sixth_type") != "input":
            found.append(fields)
    return found


GIVEN = np.array(AMAXES, np.float32)
TENSOR_AMAXES = np.unique(np.concatenate([GIVEN, around([6, 448, 1e-5, 1, 3.3], 1), WIDENED[::397]]))
GLOBALS = (1.0, 2688.0, 0.75, 689.23077, 1e-3, 3.4028235e38, 8.1e37, 1e-41, INF, NAN, -2.0, 0.0)
BLOCK_AMAXES = np.concatenate([GIVEN, around([6, 3, 2.5, 1.1], 2), WIDENED[::501]])


@pytest.mark.parametrize("fields", variants("global_scale", "global_guard", "global_type"), ids=str)
def test_global_scale(fields: dict[str, Any]) -> None:
    """SCALE-GLOBAL, SCALE-GLOBAL-GUARD, SCALE-DECODE, DIV-APPROXIMATE"""
    approximate = {"division": "rcp-approx"}
    for more in ({}, {"e4m3_max": 256}, {"headroom": 16 / 17}, {"flush_subnormals": True}, approximate):
        ar = nv.arithmetic("te", **fields, **more)
        amaxes = TENSOR_AMAXES if not more else TENSOR_AMAXES[::5]
        encode, decode = scaling.global_scale(amaxes, ar)
        slow = [scalar.global_scale(a, ar) for a in floats(amaxes)]
        same_bits(canonical_nan(encode.copy()), single([s for s, _ in slow]))
        same_bits(canonical_nan(decode.copy()), single([d for _, d in slow]))


def test_global_scale_by_hand() -> None:
    """SCALE-GLOBAL, SCALE-GLOBAL-GUARD: S of 2688, 1, 0, −0, Inf, a tiny amax (FLT_MAX), NaN (FLT_MAX)"""
    a = np.array([2688, 1, 0, -0.0, INF, 1e-36, NAN, -2688], np.float32)
    encode, decode = scaling.global_scale(a, nv.PRESETS["te"])
    assert [hex(b) for b in bits(encode)] == [
        "0x3f800000", "0x45280000", "0x3f800000", "0x3f800000", "0x3f800000", "0x7f7fffff", "0x7f7fffff", "0xbf800000",
    ]  # fmt: skip
    assert int(bits(decode)[1]) == 0x39C30C31 and int(bits(decode)[5]) == 0x00200000


@pytest.mark.parametrize("fields", variants("block_scale", "block_scale_max", "block_scale_nan"), ids=str)
def test_block_scale(fields: dict[str, Any]) -> None:
    """SCALE-BLOCK, DIV-APPROXIMATE"""
    for more in (
        {},
        {"headroom": 16 / 17},
        {"sixth_type": "bfloat16"},
        {"sixth_type": "float16"},
        {"flush_subnormals": True},
        {"division": "rcp-approx"},
    ):
        ar = nv.arithmetic("te", **fields, **more)
        for s in GLOBALS if not more else GLOBALS[2:9:3]:
            encode = np.float32(s)
            decode = np.float32(1) / encode
            g = scaling.GlobalScale(np.asarray(encode), np.asarray(decode))
            amaxes = BLOCK_AMAXES[:: 1 if s == 0.75 and not more else 7]
            found = scaling.block_scale(amaxes, g, ar)
            slow = [scalar.block_scale(a, float(encode), float(decode), ar) for a in floats(amaxes)]
            same_bits(canonical_nan(found), single(slow))


def test_block_scale_by_hand() -> None:
    """SCALE-BLOCK: any two forms differ in the last place for some amaxes."""
    g = scaling.GlobalScale(np.asarray(np.float32(689.3)), np.asarray(np.float32(1) / np.float32(689.3)))
    a = np.arange(1, 200, dtype=np.float32) / np.float32(7)
    forms = [name for name in _CHOICES["block_scale"] if name not in scaling.PRESCALED]
    assert len(forms) == 6
    found = {name: scaling.block_scale(a, g, nv.arithmetic("te", block_scale=name)) for name in forms}
    for name, other in product(found, found):
        if name != other:
            assert (found[name] != found[other]).any(), (name, other)


SCALE_VALUES = np.concatenate(
    [around([464, 448, 240, 248, 256, 2.0**-9, 2.0**-6, 2.0**-10, 0.3, 0.0], 2), WIDENED[::3]]
)
FEWER = np.concatenate([SCALE_VALUES[:100], SCALE_VALUES[100::17]])


@pytest.mark.parametrize("fields", variants("scale_rounding", "scale_overflow"), ids=str)
def test_round_scale(fields: dict[str, Any]) -> None:
    """E4M3-RNE, E4M3-SATURATE, E4M3-NAN and the scale variations"""
    rounding, overflow = fields["scale_rounding"], fields["scale_overflow"]
    one = scaling.GlobalScale(np.ones((), np.float32), np.ones((), np.float32))
    mores: list[dict[str, Any]] = [{}]
    mores += [{"scale_floor": f} for f in (0.0, 2.0**-9, 2.0**-6)] + [{"scale_nan_byte": 0, "scale_invalid_byte": 0xFF}]
    for more in mores:
        values = SCALE_VALUES if not more and (overflow == "saturate" or rounding == "nearest-even") else FEWER
        ar = nv.arithmetic("te", **fields, **more)
        a = np.ones_like(values)
        found = scaling.round_scale(values, a, one, ar)
        same_bits(found, np.array([scalar.scale_byte(v, 1.0, 1.0, ar) for v in floats(values)], np.uint8))


@pytest.mark.parametrize("rule", _CHOICES["zero_block_rule"])
@pytest.mark.parametrize("byte", [0, 0x38, 0x20, 0xFF])
def test_zero_blocks_and_invalid_scales(rule: str, byte: int) -> None:
    """SCALE-ZERO-BLOCK and its deviations; which NaN gives which byte"""
    values = (0.0, -0.0, 2.0**-64, 2.0**-63, 1e-12, 2.0, NAN, INF)
    triples = list(product(values, (0.0, 1e-30, 1.0, NAN), (1.0, NAN, INF)))
    value, a, s = (np.array(column, np.float32) for column in zip(*triples, strict=True))
    for more in (
        {},
        {"scale_floor": 2.0**-9},
        {"scale_invalid_byte": 0x7E},
        {"scale_nan_byte": 1, "scale_invalid_byte": 2},
    ):
        ar = nv.arithmetic("te", zero_block_rule=rule, zero_block_scale=byte, **more)
        found = scaling.round_scale(value, a, scaling.GlobalScale(s, np.float32(1) / s), ar)
        slow = [scalar.scale_byte(v, b, c, ar) for v, b, c in zip(floats(value), floats(a), floats(s), strict=True)]
        same_bits(found, np.array(slow, np.uint8))


@pytest.mark.parametrize("fields", variants("encode_scale", "encode_max", "encode_nan"), ids=str)
def test_encode_scale(fields: dict[str, Any]) -> None:
    """SCALE-ENCODE, FAST-MATH, DIV-APPROXIMATE: every byte under many global scales"""
    code = np.arange(256, dtype=np.uint8)
    unrounded = WIDENED[np.linspace(0, 65535, 256).astype(int)]
    for more in ({}, {"flush_subnormals": True}, {"division": "rcp-approx"}):
        ar = nv.arithmetic("te", **fields, **more)
        for s in GLOBALS if not more else GLOBALS[2::4]:
            encode = np.float32(s)
            decode = np.float32(1) / encode
            g = scaling.GlobalScale(np.asarray(encode), np.asarray(decode))
            found = scaling.encode_scale(code, unrounded, g, ar)
            slow = [
                scalar.encode_scale(c, u, float(encode), float(decode), ar)
                for c, u in zip(range(256), floats(unrounded), strict=True)
            ]
            same_bits(canonical_nan(np.array(found)), single(slow))


@pytest.mark.parametrize("form", _CHOICES["encode_scale"])
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("division", _CHOICES["division"])
def test_scale_elements(form: str, flush: bool, division: str) -> None:
    """ELEMENT-SCALE, FAST-MATH, DIV-APPROXIMATE"""
    ar = nv.arithmetic("te", encode_scale=form, flush_subnormals=flush, division=division)
    x = np.concatenate([GIVEN, -GIVEN, around([1, 3.3, 1e-38], 2), WIDENED[::1009]])
    for s, e in (
        (1.0, 0.3),
        (2.5, 3.4028235e38),
        (1e-3, 1e-39),
        (1.0, 0.0),
        (INF, 2.0),
        (NAN, 1.5),
        (7.7e5, -INF),
        (0.3, NAN),
    ):
        if flush and e == 1e-39:
            continue  # the stages before have flushed it
        g = scaling.GlobalScale(np.asarray(np.float32(s)), np.asarray(np.float32(1) / np.float32(s)))
        found = scaling.scale_elements(x.copy(), np.float32(e) * np.ones_like(x), np.ones(x.shape, np.uint8), g, ar)
        e32, s32 = float(np.float32(e)), float(np.float32(s))
        same_bits(canonical_nan(found), single([scalar.scale_element(v, e32, s32, ar) for v in floats(x)]))


def test_the_product_form_by_hand() -> None:
    """PEER-TORCHAO-GPU, PEER-JAX-NN-GPU: D = fl(A·fl(1/2688)) lies an ulp above fl(A/2688) for 33 and 35"""
    amaxes = np.array([2688, 33, 35, 0], np.float32)
    found = {
        form: scaling.global_scale(amaxes, nv.arithmetic("te", global_scale=form))
        for form in ("product-form", "reciprocal-form")
    }
    assert bits(found["product-form"].decode).tolist() == [0x3F800000, 0x3C492493, 0x3C555556, 0]
    assert bits(found["reciprocal-form"].decode).tolist() == [0x3F800000, 0x3C492492, 0x3C555555, 0]
    same_bits(found["product-form"].encode, np.float32(1) / found["product-form"].decode)


def test_te_by_hand() -> None:
    """SCALE-GLOBAL, SCALE-BLOCK, SCALE-DECODE, SCALE-ENCODE, ELEMENT-SCALE with bit patterns, one block"""
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 16)
    steps = nv.quantize(x, amax=2.0).steps
    assert int(bits(steps.global_scale)) == 0x44A80000  # 2688/2 = 1344
    assert bits(steps.block_amax).tolist() == [[0x3F800000]]
    assert bits(steps.block_scale).tolist() == [[0x43600000]]  # 1·fl(1344·fl(1/6)) = 224
    assert nv.quantize(x, amax=2.0).scales.tolist() == [[0x76]]  # 224
    assert bits(steps.encode_scale).tolist() == [[0x40C00000]]  # fl(1/fl(224·fl(1/1344))) = 6
    assert nv.quantize(x, amax=2.0).codes.tolist() == [[15, 15, 14, 14, 13, 12, 10, 9, 1, 2, 4, 5, 6, 6, 7, 7]]


@pytest.mark.parametrize("form", ["encode", "decode"])
def test_a_recorded_global_scale(form: str) -> None:
    """SCALE-DECODE: the other form is one float32 division"""
    stored = np.array([3.0, 0.1, 1e-40, INF, 0.0], np.float32)
    g = scaling.from_recorded(stored, form)
    other = single([scalar.div(1.0, v) for v in floats(stored)])
    same_bits(g.encode, stored if form == "encode" else other)
    same_bits(g.decode, other if form == "encode" else stored)


def test_minimum_drops_or_keeps_nan() -> None:
    """E4M3-NAN, SCALE-ENCODE: CUDA's fminf and min.NaN"""
    x = np.array([NAN, 1, 9], np.float32)
    assert scaling.minimum(x, np.float32(5), "drop").tolist() == [5, 1, 5]
    kept = scaling.minimum(x, np.float32(5), "propagate")
    assert math.isnan(kept[0]) and kept[1:].tolist() == [1, 5]


def test_arithmetic_that_depends_on_the_input_s_type() -> None:
    ar = Arithmetic(global_type="input", sixth_type="input", element_via="input", nan_code_bfloat16=9)
    for dtype in ("float32", "float16", "bfloat16"):
        settled = ar.for_input(dtype)
        assert (settled.global_type, settled.sixth_type) == (dtype, dtype)
        assert settled.element_via == (None if dtype == "float32" else dtype)
        assert settled.nan_code == (9 if dtype == "bfloat16" else 7) and settled.nan_code_bfloat16 is None
    assert Arithmetic().for_input("float16") == Arithmetic()
