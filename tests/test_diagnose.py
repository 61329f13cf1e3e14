"""Diagnosis: known deviations named, several at once, ambiguity said, the unknown described."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import check, suggest
from conformance.diagnose import Diagnosis, diagnose, diagnosis
from conformance.suggest import suggest_input
from nvfp4hw import backends
from nvfp4hw.backends.base import Case
from nvfp4ref import layout
from nvfp4ref.dump import Dump, from_tensor

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
PROBE = suggest.probe("float32")
PROBE_BF16 = suggest.probe("bfloat16")


def normal(shape: tuple[int, int] = (128, 128), seed: int = 0, dtype: Any = BF16) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def dump_of(x: Array, fields: dict[str, Any] | None = None, columnwise: bool = True, **how: Any) -> Dump:
    """A dump that declares te, of a quantizer with some fields changed."""
    arithmetic = nv.arithmetic("te", **(fields or {}))
    row = nv.quantize(x, arithmetic=arithmetic, **how)
    column = nv.quantize(x, axis=0, arithmetic=arithmetic, **how) if columnwise else None
    return from_tensor(row, x, columnwise=column, arithmetic="te")


def ids(found: Diagnosis) -> set[tuple[str, ...]]:
    return set(found.explanations)


# ---- right dumps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("x", [PROBE, PROBE_BF16, normal(), normal((16, 16)), normal((48, 80), dtype=np.float16)])
def test_nothing_is_named_where_nothing_is_wrong(x: Array, block: tuple[int, int]) -> None:
    found = diagnosis(dump_of(x, block=block))
    assert found == Diagnosis()
    assert diagnose(dump_of(x, block=block)) == []


@pytest.mark.parametrize("name", nv.PRESETS)
def test_a_preset_held_against_itself(name: str) -> None:
    x = normal()
    assert diagnose(from_tensor(nv.quantize(x, arithmetic=name), x, arithmetic=name)) == []


def test_a_preset_held_against_te_is_called_by_its_name() -> None:
    for name in nv.PRESETS:
        q = nv.quantize(PROBE, arithmetic=name)
        found = diagnosis(from_tensor(q, PROBE, arithmetic="te"))
        assert found.stage is None or name in found.presets or found.presets == ("te-reference",), name
        assert not found.relations, name


# ---- one deviation -----------------------------------------------------------------------------------------

SINGLES: list[tuple[str, str, dict[str, Any]]] = [
    ("global-scale.reciprocal-form", "global-scale", {"global_scale": "reciprocal-form"}),
    ("global-scale.reciprocal-then-multiply", "global-scale", {"global_scale": "reciprocal-then-multiply"}),
    ("global-scale.bfloat16", "global-scale", {"global_type": "bfloat16"}),
    ("global-scale.none", "global-scale", {"global_scale": "none"}),
    ("global-scale.inverted", "global-scale", {"global_scale": "inverted"}),
    ("global-scale.e4m3-max-256", "global-scale", {"e4m3_max": 256}),
    ("block-scale.divide-by-6", "block-scale", {"block_scale": "divide-by-6"}),
    ("block-scale.scale-then-sixth", "block-scale", {"block_scale": "scale-then-sixth"}),
    ("block-scale.divide-by-product", "block-scale", {"block_scale": "divide-by-product"}),
    ("block-scale.divide-twice", "block-scale", {"block_scale": "divide-twice"}),
    ("block-scale.prescaled", "block-scale", {"block_scale": "prescaled"}),
    ("block-scale.bfloat16", "block-scale", {"block_scale": "divide-by-6", "sixth_type": "bfloat16"}),
    ("block-scale.floor-2^-6", "block-scale", {"scale_floor": 2.0**-6}),
    ("block-scale.floor-2^-9", "block-scale", {"scale_floor": 2.0**-9}),
    ("block-scale.zero-block-value", "block-scale", {"zero_block_scale": 0x38}),
    ("block-scale.zero-block-value", "block-scale", {"zero_block_scale": 0x2A}),
    ("block-scale.nan-above-240", "block-scale", {"scale_overflow": "nan-above-240"}),
    ("block-scale.round-up", "block-scale", {"scale_rounding": "up"}),
    ("block-scale.truncate", "block-scale", {"scale_rounding": "truncate"}),
    ("block-scale.half-up", "block-scale", {"scale_rounding": "half-up"}),
    ("block-scale.power-of-two", "block-scale", {"scale_rounding": "power-of-two"}),
    ("block-scale.amax-without-abs", "block-scale", {"block_amax": "signed"}),
    ("encode-scale.divide-by-scale", "encode-scale", {"encode_scale": "divide-by-product"}),
    ("encode-scale.divide-by-scale", "encode-scale", {"encode_scale": "divide-by-quotient"}),
    ("encode-scale.reciprocal-product", "encode-scale", {"encode_scale": "reciprocal-product"}),
    ("encode-scale.quotient", "encode-scale", {"encode_scale": "quotient"}),
    ("encode-scale.two-multiplications", "encode-scale", {"encode_scale": "two-multiplications"}),
    ("encode-scale.bfloat16-coefficient", "encode-scale", {"encode_scale": "bfloat16-coefficient"}),
    ("encode-scale.approximate-reciprocal", "encode-scale", {"encode_ulp": 1}),
    ("encode-scale.approximate-reciprocal", "encode-scale", {"encode_ulp": -1}),
    ("encode-scale.unrounded-block-scale", "encode-scale", {"encode_scale": "unrounded-block-scale"}),
    ("element.ties-away", "rounding", {"element_rounding": "ties-away"}),
    ("element.ties-to-zero", "rounding", {"element_rounding": "ties-to-zero"}),
    ("element.truncate", "rounding", {"element_rounding": "truncate"}),
    ("element.via-bfloat16", "rounding", {"element_via": "bfloat16"}),
    ("element.via-float16", "rounding", {"element_via": "float16"}),
    ("element.negative-zero-dropped", "rounding", {"negative_zero": "drop"}),
    ("element.negative-zero-dropped", "rounding", {"negative_zero": "drop-exact"}),
    ("element.no-saturation", "rounding", {"saturate": False}),
    ("packing.high-nibble-first", "packing", {"packing": "high-nibble-first"}),
    ("packing.split-half", "packing", {"packing": "split-half"}),
    ("blocks.size-32", "block-scale", {"amax_group": 32}),
]


@pytest.mark.parametrize(("ident", "stage", "fields"), SINGLES, ids=lambda value: str(value))
def test_one_changed_field_is_named(ident: str, stage: str, fields: dict[str, Any]) -> None:
    dump = dump_of(PROBE, fields)
    found = diagnosis(dump)
    assert (ident,) in ids(found)
    assert found.stage == stage and found.ambiguous == (len(ids(found)) > 1)
    (deviation,) = [one for one in found.deviations if one.id == ident]
    right = dump_of(PROBE)
    assert deviation.exact and deviation.remaining == 0
    for suffix in ("", "_t"):
        scales = np.count_nonzero(getattr(dump, "scales" + suffix) != getattr(right, "scales" + suffix))
        pair = (nv.e2m1.unpack(getattr(one, "packed" + suffix)) for one in (dump, right))
        codes = np.count_nonzero(np.not_equal(*pair))
        counted = (deviation.explains.get("scales" + suffix, 0), deviation.explains.get("packed" + suffix, 0))
        assert counted == (scales, codes)


@pytest.mark.parametrize("ident, fields", [("element.nan-code", {"nan_code": code}) for code in (0, 3, 8, 15)])
def test_the_code_of_nan_is_read_out_of_the_data(ident: str, fields: dict[str, Any]) -> None:
    x = normal()
    x[5, 7] = np.nan
    found = diagnosis(dump_of(x, fields))
    assert (ident,) in ids(found)
    assert f"nan_code={fields['nan_code']}" in next(one.arithmetic for one in found.deviations if one.id == ident)


def test_overflow_to_nan_shows_with_a_stale_amax() -> None:
    x = normal()
    dump = dump_of(x, {"scale_overflow": "nan"}, amax=np.float32(1))
    assert ids(diagnosis(dump)) == {("global-scale.wrong-amax", "block-scale.nan-on-overflow")}


def test_the_report_names_what_a_program_reads() -> None:
    (one,) = diagnose(dump_of(PROBE, {"element_rounding": "ties-away"}, columnwise=False))
    plain = json.loads(json.dumps(one.to_json()))
    assert {"id", "explains", "remaining", "exact", "arithmetic"} <= set(plain)
    assert plain["id"] == "element.ties-away" and plain["exact"] is True and plain["remaining"] == 0
    assert set(plain["explains"]) == {"packed", "scales"} and plain["explains"]["scales"] == 0
    assert plain["arithmetic"] == "nv.arithmetic(\"te\", element_rounding='ties-away')"
    assert "ties are rounded away from zero" in str(one)


def test_both_directions_are_reported_once() -> None:
    (one,) = diagnose(dump_of(PROBE, {"scale_rounding": "up"}))
    assert {"packed", "scales", "packed_t", "scales_t"} == set(one.explains)
    assert one.explains["scales"] and one.explains["scales_t"]


def test_a_deviation_of_one_direction_only() -> None:
    x = PROBE
    wrong = nv.quantize(x, axis=0, arithmetic=nv.arithmetic("te", block_scale="divide-by-6"))
    right = dump_of(x)
    found = diagnosis(replace(right, packed_t=wrong.packed, scales_t=wrong.scales))
    assert ("block-scale.divide-by-6",) in ids(found)
    assert set(found.deviations[0].explains) == {"packed_t", "scales_t"}


# ---- several -----------------------------------------------------------------------------------------------

PAIRS = [
    {"global_scale": "reciprocal-form", "encode_scale": "quotient"},
    {"block_scale": "divide-by-6", "element_rounding": "ties-to-zero"},
    {"scale_rounding": "up", "element_via": "bfloat16"},
    {"block_scale": "divide-twice", "scale_floor": 2.0**-6},
    {"global_scale": "none", "negative_zero": "drop-exact"},
    {"encode_scale": "quotient", "element_rounding": "ties-away"},
    {"packing": "high-nibble-first", "scale_rounding": "truncate"},
    {"e4m3_max": 256, "block_scale": "divide-by-6"},
]


@pytest.mark.parametrize("fields", PAIRS, ids=str)
def test_two_deviations_at_once(fields: dict[str, Any]) -> None:
    singles = {ident: set(change) for ident, _, change in SINGLES}
    expected = {ident for ident, _, change in SINGLES if all(fields.get(key) == value for key, value in change.items())}
    found = diagnosis(dump_of(PROBE, fields))
    assert not found.relations and found.deviations
    assert any(set(one) == expected for one in found.explanations), (found.explanations, singles)
    total: dict[str, int] = {}
    for one in (one for one in found.deviations if one.id in expected):
        for name, count in one.explains.items():
            total[name] = total.get(name, 0) + count
    dump, right = dump_of(PROBE, fields), dump_of(PROBE)
    assert total["scales"] == np.count_nonzero(dump.scales != right.scales)


def test_three_apart() -> None:
    fields = {"global_scale": "none", "scale_floor": 2.0**-9, "element_rounding": "ties-to-zero"}
    found = diagnosis(dump_of(PROBE, fields, columnwise=False))
    expected = {"global-scale.none", "block-scale.floor-2^-9", "element.ties-to-zero"}
    assert any(set(one) <= expected for one in found.explanations) and not found.relations


# ---- layout, blocks, axis ----------------------------------------------------------------------------------


def test_swizzled_scales_declared_compact() -> None:
    x = normal((128, 256))
    dump = dump_of(x, columnwise=False)
    found = diagnosis(replace(dump, scales=layout.swizzle(dump.scales)))
    assert ids(found) == {("scales.swizzled",)} and found.stage == "layout"


def test_compact_scales_declared_swizzled() -> None:
    found = diagnosis(replace(dump_of(normal((128, 256)), columnwise=False), scale_layout="swizzled"))
    assert ids(found) == {("scales.not-swizzled",)}


@pytest.mark.parametrize("reshaped", [False, True])
def test_transposed_scales(reshaped: bool) -> None:
    dump = dump_of(normal((64, 256)), columnwise=False)
    assert dump.scales is not None
    stored = np.ascontiguousarray(dump.scales.T)
    found = diagnosis(replace(dump, scales=stored.reshape(dump.scales.shape) if reshaped else stored))
    assert ids(found) == {("scales.transposed",)}


def test_tile_scales_tiled_or_stored_once() -> None:
    dump = dump_of(normal((64, 64)), columnwise=False, block=(16, 16))
    assert dump.scales is not None
    assert ids(diagnosis(replace(dump, scales=np.tile(dump.scales[::16], (16, 1))))) == {("scales.tiled-not-repeated",)}
    assert ids(diagnosis(replace(dump, scales=dump.scales[::16].copy()))) == {("scales.one-per-tile",)}


def test_tiled_scales_with_other_faults() -> None:
    q = nv.quantize(PROBE, block=(16, 16), arithmetic=nv.arithmetic("te", tile_scales="tiled", scale_rounding="up"))
    found = diagnosis(from_tensor(q, PROBE, arithmetic="te"))
    assert ids(found) == {("block-scale.round-up", "scales.tiled-not-repeated")}


def test_the_other_block_shape() -> None:
    x = normal()
    for made, declared, ident in (((16, 16), (1, 16), "blocks.2d-for-1d"), ((1, 16), (16, 16), "blocks.1d-for-2d")):
        found = diagnosis(replace(dump_of(x, block=made), block=declared))
        assert ids(found) == {(ident,)}


def test_the_other_axis() -> None:
    x = normal((64, 64))
    other = nv.quantize(x, axis=0)
    codes = nv.e2m1.pack(np.ascontiguousarray(other.codes.T))
    as_they_are = Dump(x=x, packed=other.packed, scales=other.scales, amax=other.amax)
    in_place = Dump(x=x, packed=codes, scales=np.ascontiguousarray(other.scales.T), amax=other.amax)
    beside = Dump(x=x, packed=codes, scales=other.scales, amax=other.amax)
    for dump in (as_they_are, in_place, beside):
        assert ids(diagnosis(dump)) == {("blocks.wrong-axis",)}


def test_scales_of_no_known_shape() -> None:
    found = diagnosis(replace(dump_of(normal(), columnwise=False), scales=np.zeros((5, 7), np.uint8)))
    assert found.stage == "layout" and found.relations and "no known layout" in found.sentences[0]


# ---- amax and global scale ---------------------------------------------------------------------------------


def test_a_recorded_amax_that_was_used_and_is_wrong() -> None:
    found = diagnosis(dump_of(normal(), amax=np.float32(5.5)))
    assert ids(found) == {("global-scale.wrong-amax",)} and found.stage == "amax"
    assert found.deviations[0].explains["amax"] == 1


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_an_amax_that_was_used_and_not_recorded(dtype: Any) -> None:
    x = normal(dtype=dtype)
    dump = dump_of(x, amax=np.float32(3.25))
    true = np.abs(x.astype(np.float32)).max().reshape(1)
    found = diagnosis(replace(dump, amax=true, amax_t=true))
    assert ("global-scale.wrong-amax",) in ids(found) and found.stage == "global-scale"
    fitted = re.search(r"fits an amax of ([0-9.]+)", " ".join(found.sentences))
    assert fitted and abs(float(fitted[1]) - 3.25) < (1e-6 if dtype == BF16 else 1e-3)  # in float32 several fit


def test_a_stored_global_scale_in_the_other_form() -> None:
    x = normal()
    q = nv.quantize(x)
    scale = np.asarray(q.steps.global_scale).reshape(1)
    fields = {"packed": q.packed, "scales": q.scales, "amax": q.amax}
    assert diagnose(Dump(x=x, **fields, global_scale=scale, global_scale_form="encode")) == []
    found = diagnosis(Dump(x=x, **fields, global_scale=np.float32(1) / scale, global_scale_form="encode"))
    assert ("global-scale.inverted",) in ids(found)
    found = diagnosis(Dump(x=x, **fields, global_scale=scale * np.float32(0.5), global_scale_form="encode"))
    assert ids(found) == {("global-scale.stored-otherwise",)}


def test_a_producer_without_amax_that_stores_the_decode_form() -> None:
    q = nv.quantize(PROBE, arithmetic=nv.arithmetic("te", global_scale="reciprocal-form"))
    g = (np.abs(PROBE).max() / np.float32(2688)).reshape(1)
    dump = Dump(x=PROBE, packed=q.packed, scales=q.scales, global_scale=g, global_scale_form="decode")
    assert ("global-scale.reciprocal-form",) in ids(diagnosis(dump))


# ---- transform ---------------------------------------------------------------------------------------------


def transformed(x: Array, rht: nv.RHT | None, **how: Any) -> Dump:
    """A dump that declares the usual columnwise transform."""
    return from_tensor(nv.quantize(x), x, columnwise=nv.quantize(x, axis=0, rht=rht, **how), rht_t=True)


def test_the_right_transform_is_named_nothing() -> None:
    assert diagnose(transformed(normal(), nv.RHT())) == []


@pytest.mark.parametrize(
    ("ident", "rht"),
    [
        ("hadamard.missing", None),
        ("hadamard.no-signs", nv.RHT(sign_mask=0)),
        ("hadamard.signs-on-output", nv.RHT(signs_on="output")),
        ("hadamard.unnormalised", nv.RHT(normalised=False)),
        ("hadamard.not-rounded-to-bfloat16", nv.RHT(round_to="float32")),
    ],
)
def test_a_wrong_transform(ident: str, rht: nv.RHT | None) -> None:
    found = diagnosis(transformed(normal(), rht))
    assert ids(found) == {(ident,)} and found.stage == "transform"
    assert set(found.deviations[0].explains) >= {"packed_t", "scales_t"}


def test_an_amax_of_before_the_transform() -> None:
    x = normal()
    found = diagnosis(transformed(x, nv.RHT(), amax=np.abs(x.astype(np.float32)).max()))
    assert ids(found) == {("hadamard.amax-before-transform",)}


def test_a_transform_of_the_rowwise_output() -> None:
    x = normal()
    q = nv.quantize(x, rht=nv.RHT())
    assert ids(diagnosis(from_tensor(q, x))) == {("hadamard.on-rowwise",)}


def test_a_wrong_transform_and_a_wrong_rounding() -> None:
    dump = transformed(normal(), nv.RHT(sign_mask=0), arithmetic="te")
    q = nv.quantize(normal(), axis=0, rht=nv.RHT(sign_mask=0), arithmetic=nv.arithmetic("te", element_via="bfloat16"))
    found = diagnosis(replace(dump, packed_t=q.packed, scales_t=q.scales))
    assert {"hadamard.no-signs", "element.via-bfloat16"} in [set(one) for one in found.explanations]


# ---- random bits -------------------------------------------------------------------------------------------

STATE = {"seed": 0x0123456789ABCDEF, "offset": 5000, "kernel": "tuned-1d", "both": True}


def stochastic(x: Array, rbits: Any = None, rbits_t: Any = None, **fields: Any) -> Dump:
    """A dump that declares STATE, made with other words or another rule."""
    philox = nv.Philox(**STATE)
    words = [philox.words(x.shape, axis) for axis in (-1, 0)]
    row, column = (given if given is not None else own for given, own in zip((rbits, rbits_t), words, strict=True))
    how: dict[str, Any] = {"rounding": "stochastic", "arithmetic": nv.arithmetic("te", **fields)}
    q, t = nv.quantize(x, rbits=row, **how), nv.quantize(x, axis=0, rbits=column, **how)
    return from_tensor(q, x, columnwise=t, arithmetic="te", rounding="stochastic", rng=STATE, rng_t=STATE)


def test_the_right_words_are_named_nothing() -> None:
    assert diagnose(stochastic(normal())) == []


@pytest.mark.parametrize(
    ("ident", "rule"),
    [
        ("random.byte-per-element", "te-fallback"),
        ("random.operands-reversed", "sm100-operands-reversed"),
        ("random.no-bit-reversal", "sm100-no-bit-reversal"),
        ("random.grid-without-1.5", "sm100-without-1.5"),
    ],
)
def test_another_rule_of_rounding(ident: str, rule: str) -> None:
    found = diagnosis(stochastic(normal(), stochastic=rule))
    assert ids(found) == {(ident,)} and found.stage == "random-bits"


def test_nearest_where_stochastic_is_declared() -> None:
    x = normal()
    q, t = nv.quantize(x), nv.quantize(x, axis=0)
    dump = from_tensor(q, x, columnwise=t, rounding="stochastic", rng=STATE, rng_t=STATE)
    assert ids(diagnosis(dump)) == {("random.not-used",)}
    without = replace(dump, rng=None, rng_t=None)
    assert ids(diagnosis(without)) <= {("random.not-used",)}


@pytest.mark.parametrize("offset", [5001, 4999, 5000 - 4096, 5000 + 4000, 5000 + 1024 * 300, 20000, 1250, 0])
def test_words_of_another_offset(offset: int) -> None:
    x = normal()
    other = nv.Philox(**{**STATE, "offset": offset})
    found = diagnosis(stochastic(x, other.words(x.shape, -1), other.words(x.shape, 0)))
    assert ids(found) == {("random.wrong-offset",)}
    assert any(f"offset {offset}" in sentence for sentence in found.sentences)


@pytest.mark.parametrize("change", [{"seed": 0x89ABCDEF01234567}, {"seed": 0x89ABCDEF}, {"rounds": 7}])
def test_words_of_another_seed(change: dict[str, int]) -> None:
    x = normal()
    other = nv.Philox(**{**STATE, **change})
    found = diagnosis(stochastic(x, other.words(x.shape, -1), other.words(x.shape, 0)))
    assert ids(found) == {("random.wrong-offset",)}


def test_rowwise_words_used_columnwise() -> None:
    x = normal((64, 128))
    state = {**STATE, "kernel": "vector-blockwise"}
    philox = nv.Philox(**state)
    words = philox.words(x.shape, -1)
    how: dict[str, Any] = {"rounding": "stochastic"}
    q = nv.quantize(x, rbits=words, **how)
    t = nv.quantize(x, axis=0, rbits=words.reshape(128, -1), **how)
    dump = from_tensor(q, x, columnwise=t, rounding="stochastic", rng=state, rng_t=state)
    assert ids(diagnosis(dump)) == {("random.rowwise-stream-reused",)}
    recorded = replace(dump, rng=None, rng_t=None, rbits=words, rbits_t=philox.words(x.shape, 0))
    assert ids(diagnosis(recorded)) == {("random.rowwise-stream-reused",)}


def test_uniforms_with_a_grid_without_1_5() -> None:
    x = normal()
    uniforms = np.random.default_rng(1).random(x.shape, np.float32)
    q = nv.quantize(x, rounding="stochastic", rbits=uniforms, arithmetic=nv.arithmetic("te", stochastic="te-jax"))
    dump = from_tensor(q, x, rounding="stochastic", rbits=uniforms, arithmetic=nv.arithmetic("te", stochastic="ideal"))
    assert ids(diagnosis(dump)) == {("random.grid-without-1.5",)}


# ---- ambiguity ---------------------------------------------------------------------------------------------


SQUARED = (normal() * normal()).astype(BF16)
AMBIGUOUS = [
    (normal(), "element.ties-away", {"element_rounding": "ties-away"}),
    (PROBE_BF16, "encode-scale.approximate-reciprocal", {"encode_ulp": 1}),
    (SQUARED, "block-scale.divide-by-6", {"block_scale": "divide-by-6"}),
]


@pytest.mark.parametrize(("x", "ident", "fields"), AMBIGUOUS, ids=["ties", "ulp", "order"])
def test_what_the_data_cannot_tell_apart_is_all_listed_and_an_input_separates_it(
    x: Array, ident: str, fields: dict[str, Any]
) -> None:
    dump = dump_of(x, fields, columnwise=False)
    found = diagnosis(dump)
    assert (ident,) in ids(found) and found.ambiguous
    assert len({one.id for one in found.deviations}) == len(found.deviations) > 1
    better = suggest_input(dump, found)
    assert better is not None and better.apart and better.x.dtype == x.dtype
    assert "it separates" in str(better)
    again = diagnosis(dump_of(better.x, fields, columnwise=False))
    assert (ident,) in ids(again) and not ids(found) <= ids(again)


def test_nothing_is_suggested_where_nothing_is_ambiguous() -> None:
    dump = dump_of(PROBE, {"scale_rounding": "up"}, columnwise=False)
    assert suggest_input(dump, diagnosis(dump)) is None


# ---- what no list has --------------------------------------------------------------------------------------


def test_ties_and_signs_of_zero_are_told_apart() -> None:
    x = normal()
    x[3, ::4] = -0.0
    said = " ".join(diagnosis(dump_of(x, {"negative_zero": "drop-exact"})).sentences)
    assert "zeros of the other sign" in said
    said = " ".join(diagnosis(dump_of(PROBE_BF16, {"element_rounding": "ties-away"})).sentences)
    assert "those of ties" in said


def test_a_partial_explanation_says_what_remains() -> None:
    dump = dump_of(PROBE, {"scale_rounding": "up"}, columnwise=False)
    assert dump.packed is not None
    packed = dump.packed.copy()
    packed[100:103, 5] ^= 0x11
    found = diagnosis(replace(dump, packed=packed))
    (one,) = found.deviations
    assert one.id == "block-scale.round-up" and not one.exact and one.remaining == 6
    assert any("what remains" in sentence for sentence in found.sentences)


def test_an_unknown_fault_is_described() -> None:
    dump = dump_of(normal(), columnwise=False)
    assert dump.packed is not None
    packed = dump.packed.copy()
    packed[7] = packed[7] & 0x77  # signs of one row lost
    found = diagnosis(replace(dump, packed=packed))
    assert not found.deviations and found.stage == "rounding"
    relation = found.relations[""]
    assert relation.where.startswith("row 7") and len(relation.examples) == 5
    plain = json.loads(json.dumps(relation.to_json()))
    assert plain["examples"][0]["row"] == 7 and "0x" in plain["examples"][0]["expected"]["y"]


@pytest.mark.parametrize("change", [{"x": None}, {"packed": None, "scales": None, "amax": None}])
def test_what_cannot_be_diagnosed_says_so(change: dict[str, Any]) -> None:
    dump = dump_of(normal(), columnwise=False)
    if "x" in change:
        with pytest.raises(ValueError, match="no input x"):
            diagnose(replace(dump, **change))
    with pytest.raises(TypeError, match="one dump"):
        diagnose({"a": dump})  # type: ignore[arg-type]


# ---- real quantizers, and speed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchao", "modelopt", "compressed-tensors", "jax-nn", "te-reference", "te-jax"])
@pytest.mark.parametrize("x", [PROBE, PROBE_BF16, normal()], ids=["f32", "bf16", "normal"])
def test_a_real_quantizer_is_explained_and_called_by_its_name(name: str, x: Array) -> None:
    if name not in backends.names():
        pytest.skip(f"there is no backend {name}")
    backend = backends.load(name)
    reason = backend.availability()
    if reason is not None:
        pytest.skip(reason)
    for block in ((1, 16), (16, 16)):
        case = Case("real", "real", x, block=block)
        if not case.needs <= backend.features:
            continue
        out = {key: np.asarray(value) for key, value in backend.quantize(case).items()}
        amax = out["amax"].astype(np.float32).reshape(1)
        dump = Dump(x=x, packed=out["packed"], scales=out["scales"], amax=amax, block=block)
        found = diagnosis(dump)
        assert not found.relations
        assert found.stage is None or name in found.presets
        if name == "te-jax":
            named = {ident for one in found.explanations for ident in one}
            assert "block-scale.nan-above-240" in named
            assert block == (1, 16) or "scales.tiled-not-repeated" in named


def test_a_large_dump_is_explained() -> None:
    x = np.zeros((4096, 4096), BF16)
    x[:] = np.resize(PROBE_BF16, x.shape)
    for fields in ({"block_scale": "divide-by-6"}, {"scale_rounding": "up", "element_via": "bfloat16"}):
        dump = dump_of(x, fields, columnwise=False)
        assert not diagnosis(dump).relations


@pytest.mark.parametrize(("mode", "block"), [("NVFP4_1D_SCALING", (1, 16)), ("NVFP4_2D_SCALING", (16, 16))])
def test_transformer_engines_jax_path_with_stochastic_rounding(mode: str, block: tuple[int, int]) -> None:
    from nvfp4hw.backends import te_jax

    reason = te_jax.BACKEND().availability()
    if reason is not None:
        pytest.skip(reason)
    import jax

    te, state = te_jax._quantizer_module(), np.array([[1, 2, 3, 4]], np.uint32)
    x = (normal((64, 128)).astype(np.float32) * 2.0 ** -(np.arange(64) // 16)[:, None]).astype(BF16)
    quantizer = te.NVFP4Quantizer(
        q_dtype=jax.numpy.float4_e2m1fn,
        scaling_mode=te.ScalingMode[mode],
        q_layout=te.QuantizeLayout["ROWWISE"],
        data_layout="NT",
        stochastic_rounding_rng_state=jax.numpy.asarray(state),
    )

    def run(a: Any) -> tuple[Any, Any, Any]:
        found = quantizer.quantize(a)
        return found.data, found.scale_inv, found.amax

    codes, scales, amax = (np.asarray(part) for part in jax.jit(run)(jax.numpy.asarray(x)))
    key = jax.random.wrap_key_data(jax.numpy.asarray(state[0, :2]))
    for word in state[0, 2:]:
        key = jax.random.fold_in(key, word)
    dump = Dump(
        x=x,
        packed=nv.e2m1.pack(codes.view(np.uint8)),
        scales=scales.view(np.uint8),
        amax=amax.astype(np.float32).reshape(1),
        block=block,
        rounding="stochastic",
        rbits=np.asarray(jax.random.uniform(key, (x.size,))).reshape(x.shape),
    )
    found = diagnosis(dump)
    assert not found.relations and found.presets == ("te-jax",)
    expected = {"block-scale.nan-above-240", "random.grid-without-1.5"}
    expected |= {"scales.tiled-not-repeated"} if block == (16, 16) else set()
    assert any(expected <= set(one) for one in found.explanations)


# ---- declared as something else than te --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in nv.PRESETS if name != "te"])
def test_what_te_writes_is_diagnosed_whatever_it_is_declared_as(name: str) -> None:
    """Every preset is some known deviations away from every other; none of them stops the search."""
    x = PROBE_BF16[:64]
    q = nv.quantize(x)
    found = check(nv.Dump(x=x, packed=q.packed, scales=q.scales, amax=q.amax.reshape(1), arithmetic=name))
    assert found.verdict == "conforms" or found.stage is not None


def test_one_wrong_nibble_of_a_row_scaled_tensor() -> None:
    q = nv.quantize(PROBE_BF16, arithmetic=nv.arithmetic("te", row_scaled=True))
    packed = q.packed.copy()
    packed[3, 5] ^= 1
    arithmetic = {"name": "te", "row_scaled": True}
    found = check(nv.Dump(x=PROBE_BF16, packed=packed, scales=q.scales, amax=q.amax, arithmetic=arithmetic))
    assert (found.verdict, found.outputs["packed"].different, found.deviations) == ("differs", 1, ())
