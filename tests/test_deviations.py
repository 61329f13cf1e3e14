"""The table of known deviations: complete, well formed, and the page that is made of it."""

from __future__ import annotations

import dataclasses
import re

import pytest

import nvfp4ref as nv
from conformance import deviation_docs
from conformance.deviations import DEVIATIONS, STAGES, changes, of_fields
from conformance.gemm_check import ALPHA_FORMS, Way
from conformance.infer import INFER
from conformance.layouts import LAYOUTS
from conformance.model import ARITHMETIC, Model, part
from nvfp4ref import tensorcore


def _family(name: str, *members: str) -> list[str]:
    return [f"{name}.{member}" for member in members]


#: Every id that is promised to exist; more may be added, none goes.
PROMISED = (
    *_family(
        "global-scale",
        "reciprocal-form",
        "reciprocal-then-multiply",
        "bfloat16",
        "none",
        "inverted",
        "e4m3-max-256",
        "wrong-amax",
    ),
    *_family(
        "block-scale",
        "divide-by-6",
        "scale-then-sixth",
        "divide-by-product",
        "divide-twice",
        "prescaled",
        "bfloat16",
        "floor-2^-6",
        "floor-2^-9",
        "zero-block-value",
        "nan-above-240",
        "nan-on-overflow",
        "round-up",
        "truncate",
        "half-up",
        "power-of-two",
        "amax-without-abs",
    ),
    *_family(
        "encode-scale",
        "divide-by-scale",
        "reciprocal-product",
        "quotient",
        "two-multiplications",
        "bfloat16-coefficient",
        "approximate-reciprocal",
        "unrounded-block-scale",
    ),
    *_family(
        "element",
        "ties-away",
        "ties-to-zero",
        "truncate",
        "via-bfloat16",
        "via-float16",
        "negative-zero-dropped",
        "no-saturation",
        "nan-code",
    ),
    *_family("packing", "high-nibble-first", "split-half"),
    *_family("scales", "swizzled", "not-swizzled", "transposed", "tiled-not-repeated", "one-per-tile"),
    *_family("blocks", "1d-for-2d", "2d-for-1d", "size-32", "wrong-axis"),
    *_family(
        "hadamard",
        "missing",
        "no-signs",
        "signs-on-output",
        "unnormalised",
        "not-rounded-to-bfloat16",
        "on-rowwise",
        "amax-before-transform",
    ),
    *_family(
        "random",
        "byte-per-element",
        "operands-reversed",
        "no-bit-reversal",
        "grid-without-1.5",
        "not-used",
        "wrong-offset",
        "rowwise-stream-reused",
    ),
)


@pytest.mark.parametrize("ident", PROMISED)
def test_every_promised_id_is_there(ident: str) -> None:
    assert ident in DEVIATIONS


def test_entries_are_well_formed() -> None:
    for ident, entry in DEVIATIONS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*\.[a-z0-9^.-]+", ident)
        assert entry.stage in STAGES and entry.stage != "unknown"
        assert entry.changes or entry.infer
        assert entry.infer is None or entry.infer in INFER
        for text in (entry.what, entry.step, entry.seen, entry.symptom, entry.fix):
            assert text and not text.endswith(".") and "\n" not in text
        assert set(entry.directions) <= {"", "_t"}


def test_anchors_are_unique() -> None:
    assert len({entry.anchor for entry in DEVIATIONS.values()}) == len(DEVIATIONS)


def test_every_change_names_what_a_model_has() -> None:
    others = {"rht", "block", "scales", "amax", "form", "words", "ulp", "group", "axis"}
    for _, change in changes():
        for key, value in change.items():
            prefix, _, name = key.rpartition(".")
            assert name in ARITHMETIC or prefix == "rht" or key in others, key
            if key == "scales":
                assert value in LAYOUTS or value == "repeated"


def test_a_change_of_bytes_leaves_codes_alone_and_the_reverse() -> None:
    assert part({"block_scale": "divide-by-6"}) == "bytes"
    assert part({"element_rounding": "ties-away"}) == "codes"
    assert part({"global_scale": "none"}) == "both"
    assert part({"block_scale": "divide-twice", "bytes.global_scale": "reciprocal-form"}) == "bytes"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", nv.PRESETS)
def test_every_preset_is_te_with_known_deviations(name: str, dtype: str) -> None:
    te, preset = nv.PRESETS["te"].for_input(dtype), nv.PRESETS[name].for_input(dtype)
    found = of_fields(te, preset)
    fields = {key: value for change in found.values() for key, value in change.items()}
    assert nv.arithmetic(te, **fields) == nv.arithmetic(preset, **{}).__class__(**{**vars(preset), "name": "te"})


def test_presets_by_their_deviations() -> None:
    te = nv.PRESETS["te"].for_input("bfloat16")
    found = {name: set(of_fields(te, nv.PRESETS[name].for_input("bfloat16"))) for name in nv.PRESETS}
    assert found["te"] == set()
    assert found["te-2.14"] == {"block-scale.divide-by-6"}
    assert found["te-fast-math"] == {"encode-scale.bfloat16-coefficient"}
    jax = {"block-scale.nan-above-240", "scales.tiled-not-repeated", "random.grid-without-1.5"}
    assert jax <= found["te-jax"]
    assert {"global-scale.bfloat16", "block-scale.bfloat16"} <= found["compressed-tensors"]
    assert {"block-scale.floor-2^-6", "encode-scale.quotient", "block-scale.divide-twice"} <= found["torchao"]


def test_a_field_that_no_deviation_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.deviations._TABLE", ())
    with pytest.raises(KeyError, match="no deviation covers"):
        of_fields(nv.PRESETS["te"], nv.PRESETS["te-2.14"])


class TestModel:
    def test_a_change_that_changes_nothing_is_none(self) -> None:
        model = Model(nv.PRESETS["te-2.14"])
        assert model.changed({"block_scale": "divide-by-6"}) is None
        assert model.changed({"four_over_six": None, "block_scale": "divide-twice"}) is None

    def test_what_needs_a_transform_does_not_apply_without(self) -> None:
        model = Model(nv.PRESETS["te"])
        assert model.changed({"rht.sign_mask": 0}) is None
        assert model.changed({"rht": "missing"}) is None
        assert model.changed({"amax": "before-transform"}) is None
        added = model.changed({"rht": "added"})
        assert added is not None and added.rht == nv.RHT()

    def test_changes_of_one_part(self) -> None:
        model = Model(nv.PRESETS["te"]).changed({"codes.global_scale": "none"})
        assert model is not None
        assert model.of_codes.global_scale == "none" and model.of_bytes.global_scale == "quotient"


class TestPage:
    def test_it_is_current(self) -> None:
        written = deviation_docs.PATH.read_text(encoding="utf-8")
        assert written == deviation_docs.page(), "run python -m conformance.deviation_docs"

    def test_every_id_can_be_linked_to(self) -> None:
        written = deviation_docs.PATH.read_text(encoding="utf-8")
        for entry in DEVIATIONS.values():
            assert f'<a id="{entry.anchor}"></a>' in written
            assert f"(#{entry.anchor})" in written


def test_the_ways_of_a_gemm_are_documented() -> None:
    page = deviation_docs.PATH.read_text(encoding="utf-8")
    way = Way("exact", "jax", 2, fused=False)
    assert len(way.ids()) == len(dataclasses.fields(Way)) == 4
    for ident in way.ids():
        assert f'<a id="{".".join(ident.split(".")[:2])}"></a>' in page, ident
    for name in (*tensorcore.MODELS, *ALPHA_FORMS):
        assert f"`{name}`" in page.partition("# Matrix products")[2], name
