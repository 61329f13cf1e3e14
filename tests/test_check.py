"""check(): every planted fault is seen, counted and put down to its stage; what is no fault is left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import conformance
import nvfp4ref as nv
from conformance import cases, check, diff, explain
from conformance.deviations import STAGES
from nvfp4ref import hadamard
from nvfp4ref.dump import Dump, DumpError, from_tensor

Array = np.ndarray[Any, Any]
KEYS = {"verdict", "error", "outputs", "deviations", "ambiguous", "stage"}


def tensor(ident: str) -> Array:
    (found,) = cases._find([ident])
    return found.x


NORMAL = tensor("normal/s1.bf16")
SCALED = tensor("normal/s300.bf16")
TIES = tensor("e2m1-tie/amax-896.f32")
ORDERS = tensor("e4m3-tie/amax-pi.f32")
LATTICE = tensor("e2m1-tie/lattice-896.bf16")
SPARSE = tensor("zero/sparse.bf16")
NAN = tensor("special/nan-element.bf16")
TILES = tensor("tile/uneven.bf16")


def dump_of(x: Array, arithmetic: Any = "te", both: bool = True, rht_t: Any = None, **how: Any) -> Dump:
    """A dump as a producer with that arithmetic leaves it, which says nothing of its arithmetic."""
    row = nv.quantize(x, arithmetic=arithmetic, **how)
    col = nv.quantize(x, axis=0, arithmetic=arithmetic, rht=rht_t, **how) if both else None
    dump = from_tensor(row, x, columnwise=col, rht_t=rht_t is not None)
    return dataclasses.replace(dump, arithmetic=None)


def planted(x: Array, both: bool = True, **fields: Any) -> Dump:
    return dump_of(x, nv.arithmetic("te", **fields), both)


# ---- what conforms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize(
    "ident", ["normal/s1.bf16", "mixed/decades8.f32", "special/nan-inf.f32", "tile/uneven.f16"]
)
def test_the_oracles_own_output_conforms(ident: str, block: tuple[int, int]) -> None:
    report = check(dump_of(tensor(ident), block=block))
    assert report.verdict == "conforms" and report.exit_code == 0
    assert report.stage is None and report.error is None and not report.sentences
    x = tensor(ident)
    assert report.outputs["packed"].compared == report.outputs["packed_t"].compared == x.size
    assert report.outputs["scales"].compared == report.outputs["scales_t"].compared == x.size // 16
    assert "conforms to te" in str(report)


def test_a_transform_is_undone_from_the_declaration() -> None:
    assert check(dump_of(NORMAL, rht_t=nv.RHT())).verdict == "conforms"
    nosign = nv.RHT(sign_mask=0)
    dump = dataclasses.replace(dump_of(NORMAL, rht_t=nosign), rht_t={"sign_mask": 0})
    assert check(dump).verdict == "conforms"


@pytest.mark.parametrize("fields", [{"row_scaled": True}, {"four_over_six": "MSE", "e4m3_max": 256}])
def test_variants_are_judged_by_what_the_dump_declares(fields: dict[str, Any]) -> None:
    dump = from_tensor(nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", **fields)), NORMAL)
    assert check(dump).verdict == "conforms"
    if "four_over_six" in fields:
        assert check(dump, "te").verdict == "differs", "the argument beats the declaration"


def test_json_has_exactly_the_documented_keys() -> None:
    for dump in (
        dump_of(NORMAL),
        planted(NORMAL, packing="high-nibble-first"),
        dataclasses.replace(dump_of(NORMAL), x=None),
    ):
        found = check(dump).to_json()
        assert set(found) == KEYS
        assert all(set(one) == {"compared", "different", "first"} for one in found["outputs"].values())
        named = [one["id"] for one in found["deviations"]]
        assert named == (["packing.high-nibble-first"] if found["verdict"] == "differs" else [])
        assert all({"id", "explains", "remaining", "exact", "arithmetic"} <= set(one) for one in found["deviations"])
        assert found["ambiguous"] is False


# ---- one planted fault for each stage ----------------------------------------------------------------------

STAGE_OF: list[tuple[str, Array, dict[str, Any]]] = [
    ("global-scale", LATTICE, {"global_scale": "reciprocal-then-multiply"}),
    ("global-scale", NORMAL, {"global_scale": "none"}),
    ("global-scale", SCALED, {"global_type": "bfloat16"}),
    ("global-scale", NORMAL, {"e4m3_max": 256}),
    ("block-scale", ORDERS, {"block_scale": "divide-by-6"}),
    ("block-scale", ORDERS, {"block_scale": "scale-then-sixth"}),
    ("block-scale", SPARSE, {"zero_block_scale": 0x38}),
    ("block-scale", NORMAL, {"scale_rounding": "up"}),
    ("block-scale", NORMAL, {"scale_overflow": "nan-above-240"}),
    ("block-scale", NORMAL, {"block_amax": "signed"}),
    ("encode-scale", TIES, {"encode_scale": "quotient"}),
    ("encode-scale", TIES, {"encode_scale": "divide-by-quotient"}),
    ("encode-scale", NORMAL, {"encode_scale": "bfloat16-coefficient"}),
    ("rounding", TIES, {"element_rounding": "ties-away"}),
    ("rounding", NORMAL, {"element_rounding": "truncate"}),
    ("rounding", NORMAL, {"element_via": "bfloat16"}),
    ("rounding", NORMAL, {"negative_zero": "drop"}),
    ("rounding", NAN, {"nan_code": 0}),
    ("packing", NORMAL, {"packing": "high-nibble-first"}),
    ("packing", NORMAL, {"packing": "split-half"}),
]


@pytest.mark.parametrize(
    ("stage", "x", "fields"),
    STAGE_OF,
    ids=lambda value: str(value)[:40] if not isinstance(value, np.ndarray) else "",
)
def test_a_changed_field_is_put_down_to_its_stage(stage: str, x: Array, fields: dict[str, Any]) -> None:
    honest, faulty = dump_of(x), planted(x, **fields)
    report = check(faulty)
    assert (report.verdict, report.stage, report.exit_code) == ("differs", stage, 1)
    assert check(faulty, nv.arithmetic("te", **fields)).verdict == "conforms"
    for name in ("scales", "scales_t"):
        unequal = getattr(honest, name) != getattr(faulty, name)
        assert report.outputs[name].different == unequal.sum()
        first = [int(i) for i in np.argwhere(unequal)[0]] if unequal.any() else None
        assert report.outputs[name].first == first
    for name in ("packed", "packed_t"):
        unequal = nv.e2m1.unpack(getattr(honest, name)) != nv.e2m1.unpack(getattr(faulty, name))
        assert report.outputs[name].different == unequal.sum(), "codes are counted by element"
        first = [int(i) for i in np.argwhere(unequal)[0]] if unequal.any() else None
        assert report.outputs[name].first == first
    assert report.outputs["amax"].different == 0
    assert report.deviations and all(one.exact for one in report.deviations)


def test_a_stale_amax_is_its_own_output_and_hides_nothing() -> None:
    dump = dump_of(NORMAL, amax=np.float32(9))
    report = check(dump)
    assert report.stage == "amax" and report.outputs["amax"].different == 1
    assert report.outputs["scales"].different == report.outputs["packed"].different == 0
    assert "max(abs(x))" in report.sentences[0]


def test_a_wrong_row_amax_is_found_in_its_row() -> None:
    q = nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", row_scaled=True))
    amax = q.amax.copy()
    amax[7] *= 2
    report = check(dataclasses.replace(from_tensor(q, NORMAL), amax=amax))
    assert report.outputs["amax"].first == [7] and report.outputs["scales"].first is not None
    assert report.outputs["scales"].first[0] == 7


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_a_wrong_block_shape_is_block_scale(block: tuple[int, int]) -> None:
    other = (16, 16) if block == (1, 16) else (1, 16)
    report = check(dataclasses.replace(dump_of(NORMAL, block=other), block=block))
    assert report.stage == "block-scale" and f"{other[0]}x{other[1]}" in report.sentences[0]


@pytest.mark.parametrize(
    ("applied", "declared"), [(None, True), (nv.RHT(sign_mask=0), True), (nv.RHT(round_to="float32"), True)]
)
def test_a_wrong_transform_is_transform(applied: Any, declared: Any) -> None:
    dump = dataclasses.replace(dump_of(NORMAL, rht_t=applied), rht_t=declared)
    report = check(dump)
    assert report.stage == "transform" and report.outputs["packed"].different == 0


def test_a_transform_of_the_rowwise_output_is_transform() -> None:
    q = nv.quantize(NORMAL, rht=nv.RHT())
    assert check(from_tensor(q, NORMAL)).stage == "transform"


def test_an_amax_from_before_the_transform_is_amax() -> None:
    before = np.float32(abs(NORMAL.astype(np.float32)).max())
    col = nv.quantize(NORMAL, axis=0, rht=nv.RHT(), amax=before)
    report = check(from_tensor(None, NORMAL, columnwise=col, rht_t=True))
    assert report.stage == "amax" and report.outputs["packed_t"].different == 0


# ---- the shape of a difference that no single change explains ----------------------------------------------


def altered(dump: Dump, name: str, **changes: Any) -> Dump:
    """A dump with some entries of one array replaced, given as place -> value."""
    array = getattr(dump, name).copy()
    for place, value in changes["at"].items():
        array[place] = value
    return dataclasses.replace(dump, **{name: array})


def test_a_scale_that_nothing_explains_is_block_scale() -> None:
    dump = dump_of(NORMAL, both=False)
    report = check(altered(dump, "scales", at={(5, 3): dump.scales[5, 3] + 1, (9, 0): dump.scales[9, 0] - 1}))  # type: ignore[index]
    assert report.stage == "block-scale"
    assert report.outputs["scales"].different == 2 and report.outputs["scales"].first == [5, 3]
    assert "2 by one E4M3 step" in report.sentences[0]


def test_codes_that_nothing_explains_are_unknown() -> None:
    dump = dump_of(NORMAL, both=False)
    report = check(altered(dump, "packed", at={(5, 3): dump.packed[5, 3] ^ 0x77}))  # type: ignore[index]
    assert report.stage == "unknown" and report.outputs["packed"].different == 2
    assert report.outputs["packed"].first == [5, 6]


def test_a_multiplier_off_by_one_ulp_is_encode_scale() -> None:
    """A fault with no name: e one ulp too large everywhere."""
    steps = nv.quantize(TIES).steps
    e = np.nextafter(steps.encode_scale, np.finfo(np.float32).max)
    codes = nv.e2m1.encode(TIES * np.repeat(e, 16, axis=1))
    report = check(dataclasses.replace(dump_of(TIES, both=False), packed=nv.e2m1.pack(codes)))
    assert report.stage == "encode-scale" and report.outputs["scales"].different == 0


def test_a_wrong_tie_rule_for_one_value_is_rounding() -> None:
    scaled = nv.quantize(TIES).steps.scaled
    codes = nv.quantize(TIES).codes
    codes = np.where(scaled == 2.5, 5, codes).astype(np.uint8)
    report = check(dataclasses.replace(dump_of(TIES, both=False), packed=nv.e2m1.pack(codes)))
    assert report.stage == "rounding" and "all of them ties" in report.sentences[0]


def test_nibbles_swapped_under_another_fault_are_both_named() -> None:
    arithmetic = nv.arithmetic("te", packing="high-nibble-first", element_rounding="ties-away")
    report = check(dump_of(TIES, arithmetic))
    assert report.stage == "rounding"
    assert {one.id for one in report.deviations} == {"packing.high-nibble-first", "element.ties-away"}


def test_the_first_stage_is_reported_when_the_directions_depart_differently() -> None:
    dump = dump_of(NORMAL)
    packed = nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", packing="split-half")).packed
    scales = dump.scales_t.copy()  # type: ignore[union-attr]
    scales[0, 0] += 1
    report = check(dataclasses.replace(dump, packed=packed, scales_t=scales))
    assert report.stage == "block-scale" and len(report.sentences) >= 2
    assert STAGES.index("block-scale") < STAGES.index("packing")


# ---- layouts of the scales ---------------------------------------------------------------------------------

ODD = tensor("shape/144x80.bf16")


def stored(dump: Dump, scales: Array, **fields: Any) -> Dump:
    return dataclasses.replace(dump, scales=scales, **fields)


@pytest.mark.parametrize("fill", [0, 0xA5, 0xFF])
def test_padding_is_never_compared(fill: int) -> None:
    dump = dump_of(ODD, both=False)
    padded = nv.layout.pad(dump.scales, fill)  # type: ignore[arg-type]
    assert padded.shape == (256, 8)
    assert check(stored(dump, padded)).verdict == "conforms"
    swizzled = nv.layout.swizzle(padded)
    report = check(stored(dump, swizzled, scale_layout="swizzled"))
    assert report.verdict == "conforms" and report.outputs["scales"].compared == 144 * 5


def test_scales_in_another_layout_than_declared_are_layout() -> None:
    dump = dump_of(ODD, both=False)
    padded, swizzled = nv.layout.pad(dump.scales), nv.layout.swizzle(dump.scales)  # type: ignore[arg-type]
    for report in (check(stored(dump, swizzled)), check(stored(dump, padded, scale_layout="swizzled"))):
        assert report.stage == "layout" and report.outputs["packed"].different == 0
        assert 0 < report.outputs["scales"].different <= 144 * 5
        assert "where the dump declares" in report.sentences[0]


@pytest.mark.parametrize("other", ["transposed", "one a tile", "flat", "strange"])
def test_scales_of_another_shape_are_read_and_diagnosed(other: str) -> None:
    dump = dump_of(NORMAL, block=(16, 16), both=False)
    scales: Array = dump.scales  # type: ignore[assignment]
    shapes = {
        "transposed": np.ascontiguousarray(scales.T),
        "one a tile": scales[::16],
        "flat": scales.reshape(-1),
        "strange": np.zeros((3, 5), np.uint8),
    }
    report = check(stored(dump, shapes[other]))
    assert report.verdict == "differs" and report.stage == "layout"
    assert report.outputs["scales"].different == scales.size
    assert (other if other != "strange" else "no known layout") in report.sentences[0]


def test_tiled_scales_are_layout() -> None:
    dump = dump_of(TILES, nv.arithmetic("te", tile_scales="tiled"), block=(16, 16))
    report = check(dump)
    assert report.stage == "layout" and report.outputs["packed"].different == 0


def test_permuted_scales_are_layout() -> None:
    dump = dump_of(NORMAL, both=False)
    assert check(stored(dump, dump.scales[::-1].copy())).stage == "layout"  # type: ignore[index]


# ---- a recorded global scale -------------------------------------------------------------------------------


def with_global_scale(x: Array, value: Any, form: str, amax: bool = True) -> Dump:
    dump = dump_of(x, both=False)
    value = np.asarray([value], np.float32)
    return dataclasses.replace(
        dump, global_scale=value, global_scale_form=form, amax=dump.amax if amax else None
    )


@pytest.mark.parametrize("amax", [True, False])
def test_a_right_global_scale_conforms(amax: bool) -> None:
    encode = nv.quantize(NORMAL).steps.global_scale
    assert check(with_global_scale(NORMAL, encode, "encode", amax)).verdict == "conforms"
    assert check(with_global_scale(NORMAL, np.float32(1) / encode, "decode", amax)).verdict == "conforms"


def test_a_wrong_global_scale_is_global_scale_and_the_rest_is_judged_with_it() -> None:
    encode = nv.quantize(NORMAL).steps.global_scale
    wrong = np.float32(encode) * np.float32(2)
    doubled = nv.quantize(NORMAL, amax=np.float32(2688) / wrong)
    dump = dataclasses.replace(
        with_global_scale(NORMAL, wrong, "encode"), packed=doubled.packed, scales=doubled.scales
    )
    report = check(dump)
    assert report.stage == "global-scale" and report.outputs["global_scale"].different == 1
    assert report.outputs["scales"].different == report.outputs["packed"].different == 0


def test_a_producer_that_stores_the_decode_form_conforms_to_its_preset() -> None:
    for x in (NORMAL, LATTICE):
        q = nv.quantize(x, arithmetic="torchao")
        amax = np.float32(abs(x.astype(np.float32)).max())
        dump = Dump(
            x=x,
            packed=q.packed,
            scales=q.scales,
            global_scale=amax / np.float32(2688),
            global_scale_form="decode",
        )
        assert check(dump, "torchao").verdict == "conforms"


# ---- what cannot be judged ---------------------------------------------------------------------------------


def test_without_x_a_possible_dump_is_not_judged() -> None:
    report = check(dataclasses.replace(dump_of(NORMAL), x=None))
    assert report.verdict == "not-judged" and report.exit_code == 2
    assert "no input x" in (report.error or "") and report.stage is None


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_without_x_an_impossible_scale_differs(byte: int) -> None:
    dump = altered(dataclasses.replace(dump_of(NORMAL), x=None), "scales_t", at={(2, 1): byte})
    report = check(dump)
    assert (report.verdict, report.stage) == ("differs", "block-scale")
    assert report.outputs["scales_t"].first == [2, 1] and report.outputs["scales_t"].different == 1
    assert report.outputs["scales"].different == 0


def test_without_x_a_tile_whose_rows_differ_is_impossible() -> None:
    dump = dataclasses.replace(dump_of(NORMAL, block=(16, 16), both=False), x=None)
    assert check(dump).verdict == "not-judged"
    assert check(altered(dump, "scales", at={(3, 0): 0x11})).verdict == "differs"


def test_a_negative_amax_makes_negative_scales_possible() -> None:
    dump = dataclasses.replace(dump_of(NORMAL, amax=np.float32(-3)), x=None)
    assert (dump.scales >= 0x80).any()  # type: ignore[operator]
    assert check(dump).verdict == "not-judged"


def test_a_declaration_that_nobody_computes_is_not_judged() -> None:
    rows = nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", row_scaled=True))
    dump = dataclasses.replace(from_tensor(rows, NORMAL), block=(16, 16))
    report = check(dump)
    assert report.verdict == "not-judged" and "1x16 blocks" in (report.error or "")


def test_a_transform_that_the_input_cannot_take_is_not_judged() -> None:
    dump = dataclasses.replace(dump_of(tensor("normal/s1.f32")), rht_t=True)
    report = check(dump)
    assert report.verdict == "not-judged" and "bfloat16" in (report.error or "")
    assert report.outputs["packed"].different == 0, "the other direction is judged all the same"


def test_a_stochastic_dump_is_judged_but_for_its_codes() -> None:
    dump = dataclasses.replace(dump_of(NORMAL, both=False), rounding="stochastic")
    report = check(dump)
    assert report.verdict == "not-judged" and "codes" in (report.error or "")
    assert report.outputs["scales"].different == 0 and "packed" not in report.outputs
    wrong = check(altered(dump, "scales", at={(0, 0): 1}))
    assert wrong.verdict == "differs" and wrong.stage == "block-scale"


def test_a_gemm_is_judged_by_its_operands() -> None:
    a, b = (from_tensor(nv.quantize(x), x) for x in (NORMAL, NORMAL))
    result = nv.matmul(a.rowwise(), b.rowwise())
    report = check(Dump(a=a, b=b, d=result))
    assert report.verdict == "conforms" and report.outputs["d"].compared == result.size
    wrong = check(Dump(a=a, b=b, d=nv.matmul(a.rowwise(), b.rowwise(), alpha_form="none")))
    assert wrong.verdict == "differs" and wrong.stage == "unknown"
    assert [one["id"] for one in wrong.to_json()["deviations"]] == ["gemm.alpha.none"]


def test_arguments_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="presets are"):
        check(dump_of(NORMAL), "nonsense")
    with pytest.raises(TypeError, match="one by one"):
        check({"w": dump_of(NORMAL)})  # type: ignore[arg-type]
    with pytest.raises(DumpError, match="contradictory"):
        dataclasses.replace(dump_of(NORMAL), x=NORMAL[:64])


# ---- a large dump ------------------------------------------------------------------------------------------


def test_only_some_rows_are_tried_first() -> None:
    """The sample must not let a change pass that explains only the sampled rows."""
    x = cases._cast(cases._normal(7, (512, 64)), "bf16")
    dump = planted(x, both=False, negative_zero="drop")
    packed = dump.packed.copy()  # type: ignore[union-attr]
    packed[300, 5] ^= 0x70  # in no sampled group: those are spread over the first and every 64th row
    report = check(dataclasses.replace(dump, packed=packed))
    assert report.verdict == "differs" and not any("one changed step" in s for s in report.sentences)


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_shows_every_intermediate_with_its_bits() -> None:
    dump = dump_of(NORMAL)
    text = str(explain(dump, 3, 17))
    steps = nv.quantize(NORMAL).steps
    for value in (
        NORMAL[3, 17].astype(np.float32),
        steps.global_scale,
        steps.block_amax[3, 1],
        steps.scaled[3, 17],
    ):
        assert f"0x{int(np.float32(value).view(np.uint32)):08X}" in text
    assert "differs" not in text


def test_explain_marks_what_differs() -> None:
    faulty = planted(ORDERS, block_scale="divide-by-6")
    row, block = (int(i) for i in np.argwhere(faulty.scales != dump_of(ORDERS).scales)[0])
    marked = [step.name for step in explain(faulty, row, 16 * block).steps if not step.agrees]
    assert "block scale, E4M3" in marked and "amax" not in " ".join(marked)


def test_explain_columnwise_transformed_and_4over6() -> None:
    dump = dump_of(NORMAL, rht_t=nv.RHT())
    explained = explain(dump, 5, 40, columnwise=True)
    value = hadamard.transform(NORMAL, nv.RHT(), 0)[5, 40].astype(np.float32)
    assert explained.steps[0].name.startswith("x after") and str(value) in explained.steps[0].expected
    four = from_tensor(nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", four_over_six="MAE")), NORMAL)
    assert any("mapping to 4" in step.name for step in explain(four, 0, 0).steps)


def test_explain_says_when_an_element_is_a_tie() -> None:
    scaled = nv.quantize(TIES).steps.scaled
    row, column = (int(i) for i in np.argwhere(scaled == 0.75)[0])
    assert "(a tie)" in str(explain(dump_of(TIES, both=False), row, column))


@pytest.mark.parametrize(
    ("change", "place", "columnwise", "message"),
    [
        ({}, (128, 0), False, "outside the rowwise output of shape"),
        ({}, (0, -1), False, "outside"),
        ({"packed_t": None, "scales_t": None, "amax_t": None}, (0, 0), True, "no columnwise output"),
        ({"x": None}, (0, 0), False, "no input x"),
    ],
)
def test_explain_refuses_in_words(
    change: Any, place: tuple[int, int], columnwise: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        explain(dataclasses.replace(dump_of(NORMAL), **change), *place, columnwise=columnwise)


# ---- diff --------------------------------------------------------------------------------------------------


def test_equal_dumps_have_no_difference() -> None:
    found = diff(dump_of(NORMAL), dump_of(NORMAL))
    assert found.exit_code == 0 and found.stage is None and "equal" in str(found)


@pytest.mark.parametrize(
    ("stage", "x", "fields"),
    STAGE_OF[3:],
    ids=lambda value: str(value)[:40] if not isinstance(value, np.ndarray) else "",
)
def test_diff_finds_the_stage_that_separates_two_producers(
    stage: str, x: Array, fields: dict[str, Any]
) -> None:
    found = diff(dump_of(x), planted(x, **fields))
    assert found.exit_code == 1 and found.b is not None and found.b.stage == stage
    assert found.a is not None and found.a.verdict == "conforms"


def test_diff_of_two_conforming_producers_names_what_separates_them() -> None:
    fields = {"encode_scale": "bfloat16-coefficient"}
    other = from_tensor(nv.quantize(NORMAL, arithmetic=nv.arithmetic("te", **fields)), NORMAL)
    found = diff(dump_of(NORMAL, both=False), other)
    assert found.a is not None and found.b is not None and found.a.verdict == found.b.verdict == "conforms"
    assert found.stage == "encode-scale" and any("arithmetic" in note for note in found.notes)


def test_diff_without_any_input_still_counts() -> None:
    a, b = (dataclasses.replace(d, x=None) for d in (dump_of(NORMAL), planted(NORMAL, negative_zero="drop")))
    found = diff(a, b)
    assert (
        found.a is None and found.outputs["packed"].different > 0 and found.outputs["scales"].different == 0
    )


def test_diff_compares_scales_across_layouts() -> None:
    dump = dump_of(ODD, both=False)
    swizzled = stored(dump, nv.layout.swizzle(dump.scales), scale_layout="swizzled")  # type: ignore[arg-type]
    assert diff(dump, swizzled).exit_code == 0


def test_diff_refuses_other_tensors() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        diff(dump_of(NORMAL), dump_of(ODD))
    with pytest.raises(ValueError, match="inputs x differ"):
        diff(dump_of(NORMAL), dump_of(tensor("normal/s300.bf16")))
    row = dump_of(NORMAL, both=False)
    column = from_tensor(None, NORMAL, columnwise=nv.quantize(NORMAL, axis=0))
    with pytest.raises(ValueError, match="no output in common"):
        diff(row, column)


def test_the_package_offers_the_documented_names() -> None:
    assert set(conformance.__all__) >= {"check", "Report", "explain", "diff"}
    assert isinstance(ml_dtypes.bfloat16(1), ml_dtypes.bfloat16)


# ---- stochastic rounding -----------------------------------------------------------------------------------

PHILOX = nv.Philox(1234, 5, both=True)


def stochastic(x: Array = NORMAL, arithmetic: Any = "te", words: bool = True, rht_t: Any = None) -> Dump:
    """A stochastic dump of both directions, with the words or with the state that they come from."""
    how: dict[str, Any] = {"rounding": "stochastic", "rbits": PHILOX, "arithmetic": arithmetic}
    row, col = nv.quantize(x, **how), nv.quantize(x, axis=0, rht=rht_t, **how)
    given: dict[str, Any] = {"rng": PHILOX}
    if words:
        shape, dtype = x.shape, x.dtype.name
        given = {"rbits": PHILOX.words(shape, dtype=dtype)}
        given |= {"rbits_t": PHILOX.words(shape, 0, dtype=dtype, rht=rht_t is not None)}
    dump = from_tensor(row, x, columnwise=col, rounding="stochastic", rht_t=rht_t is not None, **given)
    return dataclasses.replace(dump, arithmetic=None)


@pytest.mark.parametrize("words", [True, False])
def test_a_stochastic_dump_conforms(words: bool) -> None:
    report = check(stochastic(words=words))
    assert report.verdict == "conforms" and report.outputs["packed_t"].compared == NORMAL.size
    assert check(stochastic(ODD, words=words)).verdict == "conforms"


def test_a_transformed_stochastic_dump_conforms() -> None:
    assert check(stochastic(rht_t=nv.RHT())).verdict == "conforms"


@pytest.mark.parametrize("seed", [1235])
def test_words_of_another_seed_are_random_bits(seed: int) -> None:
    dump = dataclasses.replace(stochastic(words=False), rng={"seed": seed, "offset": 5, "both": True})
    report = check(dump)
    assert report.stage == "random-bits" and report.outputs["scales"].different == 0


def test_another_rule_is_random_bits_and_named() -> None:
    report = check(stochastic(arithmetic=nv.arithmetic("te", stochastic="te-fallback")))
    assert report.stage == "random-bits" and "te-fallback" in report.sentences[0]


def test_nearest_even_where_stochastic_is_declared_is_random_bits() -> None:
    nearest = dump_of(NORMAL)
    dump = dataclasses.replace(stochastic(), packed=nearest.packed, packed_t=nearest.packed_t)
    report = check(dump)
    assert report.stage == "random-bits" and "rounded to nearest" in report.sentences[0]


def test_a_wrong_scale_under_stochastic_rounding_is_still_block_scale() -> None:
    how: dict[str, Any] = {"rounding": "stochastic", "rbits": PHILOX}
    faulty = nv.quantize(ORDERS, arithmetic=nv.arithmetic("te", block_scale="divide-by-6"), **how)
    dump = from_tensor(faulty, ORDERS, rounding="stochastic", rng=PHILOX)
    assert check(dump, "te").stage == "block-scale"


def test_explain_shows_the_random_word() -> None:
    dump = stochastic()
    word = dump.rbits[3, 17 // 4]  # type: ignore[index]
    assert f"0x{int(word):08X}" in str(explain(dump, 3, 17))


def test_scales_that_cannot_be_what_is_declared_all_differ() -> None:
    """Compact scales declared swizzled, of a shape that no swizzle has."""
    dump = dump_of(NORMAL[:32], both=False)
    report = check(stored(dump, dump.scales, scale_layout="swizzled"))  # type: ignore[arg-type]
    assert (report.verdict, report.stage) == ("differs", "layout")
    assert report.outputs["scales"].different == dump.scales.size  # type: ignore[union-attr]
    assert "swizzled" in report.outputs["scales"].found
