"""check_gemm: what conforms, what differs and by how much, and that planted faults are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inputs import Array, bfloat16, decades, random

import nvfp4ref as nv
from conformance import gemm_check
from conformance.gemm_check import CONFORMS, DIFFERS, NOT_JUDGED, GemmReport, Way, check_gemm

pytestmark = pytest.mark.filterwarnings("error")


def operands(seed: int = 0, k: int = 1024, arithmetic: Any = "te") -> tuple[nv.NVFP4Tensor, nv.NVFP4Tensor]:
    """Blocks over several binades: sums in which the order and the rounding of additions show."""
    x, w = decades(48, k, seed, low=-5, high=4), decades(80, k, seed + 1, low=-5, high=4)
    return nv.quantize(x, arithmetic=arithmetic), nv.quantize(w)


def as_dump(q: nv.NVFP4Tensor) -> nv.Dump:
    fields = {"four_over_six": q.arithmetic.four_over_six, "e4m3_max": q.arithmetic.e4m3_max}
    return nv.Dump(packed=q.packed, scales=q.scales, amax=np.atleast_1d(q.amax), arithmetic={"name": "te", **fields})


def gemm_dump(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, d: Any, **more: Any) -> nv.Dump:
    return nv.Dump(a=as_dump(a), b=as_dump(b), d=d, **more)


def exact_ids(report: GemmReport) -> list[str]:
    return ["+".join(one.way.ids()) for one in report.deviations if one.exact]


# -- what conforms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_conforms(dtype: Any) -> None:
    a, b = operands()
    report = check_gemm(gemm_dump(a, b, nv.matmul(a, b, out_dtype=dtype)))
    assert report.verdict == CONFORMS and report.exit_code == 0
    assert report.outputs["d"].compared == 48 * 80 and not report.deviations and not report.ulps
    assert str(report).startswith("conforms to the GEMM of its operands, model blackwell")
    assert "all equal" in str(report)


def test_conforms_with_everything() -> None:
    a, b = operands(arithmetic=nv.arithmetic("te", four_over_six="MAE", e4m3_max=256))
    c, bias = random(48, 80, 3).astype(bfloat16), random(1, 80, 4)[0].astype(bfloat16)
    d = nv.matmul(a, b, alpha=0.5, beta=2.0, c=c, bias=bias, out_dtype=bfloat16)
    half, two = np.array([0.5], np.float32), np.array([2], np.float32)
    assert check_gemm(gemm_dump(a, b, d, c=c, bias=bias, alpha=half, beta=two)).verdict == CONFORMS
    d = nv.matmul(a, b, beta=1.0, c=c, bias=bias, out_dtype=bfloat16)
    assert check_gemm(gemm_dump(a, b, d, c=c, bias=bias)).verdict == CONFORMS  # beta is 1 beside a c
    assert check_gemm(gemm_dump(a, b, d, c=c, bias=bias, alpha=half)).verdict == DIFFERS


def test_row_scaled_operands() -> None:
    row_scaled = nv.arithmetic("te", row_scaled=True)
    a = nv.quantize(decades(48, 256, low=-5, high=4), arithmetic=row_scaled)
    b = nv.quantize(random(80, 256, 1))
    dump = nv.Dump(a=nv.Dump(packed=a.packed, scales=a.scales, amax=a.amax), b=as_dump(b), d=nv.matmul(a, b))
    assert check_gemm(dump).verdict == CONFORMS


def test_through_a_file(tmp_path: Path) -> None:
    a, b = operands(k=128)
    nv.save_dump(tmp_path / "gemm.safetensors", gemm_dump(a, b, nv.matmul(a, b)))
    found: Any = nv.load_dump(tmp_path / "gemm.safetensors")
    assert check_gemm(found).verdict == CONFORMS


def test_any_nan_is_a_nan() -> None:
    a, b = operands(k=64)
    a.scales[3, 1] = 0x7F
    with pytest.warns(RuntimeWarning):
        d = nv.matmul(a, b)
    d[3] = np.nan
    assert check_gemm(gemm_dump(a, b, d)).verdict == CONFORMS
    d[3, 5] = 1
    report = check_gemm(gemm_dump(a, b, d))
    assert report.ulps == {"NaN or Inf": 1} and report.outputs["d"].first == [3, 5]
    assert "1 row of a has NaN scale bytes, so the outputs there must be NaN" in report.sentences


# -- what explains a difference --------------------------------------------------------------------------------


def planted(way: Way, **options: Any) -> GemmReport:
    a, b = operands(arithmetic=options.pop("arithmetic", "te"))
    d = nv.matmul(a, b, model=way.model, alpha_form=way.alpha_form, split_k=way.split_k, **options)
    return check_gemm(gemm_dump(a, b, d))


@pytest.mark.parametrize("model", ["exact", "group64", "fp32"])
def test_another_model_is_named(model: str) -> None:
    report = planted(Way(model=model))
    assert report.verdict == DIFFERS and report.exit_code == 1
    assert exact_ids(report) == [f"gemm.model.{model}"] and not report.ambiguous
    assert report.deviations[0].explained == report.outputs["d"].different
    assert f"explained by model {model}, alpha form pytorch, split-K 1: everything" in str(report)


@pytest.mark.parametrize("form", ["jax", "none"])
def test_another_alpha_form_is_named(form: str) -> None:
    assert f"gemm.alpha.{form}" in exact_ids(planted(Way(alpha_form=form)))


def test_the_grouped_kernels_448_is_named() -> None:
    report = planted(Way(alpha_form="grouped"), arithmetic=nv.arithmetic("te", four_over_six="MAE", e4m3_max=256))
    assert exact_ids(report) == ["gemm.alpha.grouped"]
    assert report.median_ratio == pytest.approx(256 / 448, rel=1e-6)


@pytest.mark.parametrize("split_k", [2, 3, 8])
def test_a_split_of_k_is_named(split_k: int) -> None:
    report = planted(Way(split_k=split_k))
    assert exact_ids(report) == [f"gemm.split-k.{split_k}"]
    assert set(report.ulps) <= {"1", "2", "3 to 4", "5 to 16", "17 to 256", "above 256"}


def test_two_departures_together() -> None:
    report = planted(Way("group64", "jax", 4))
    assert exact_ids(report) == ["gemm.model.group64+gemm.alpha.jax+gemm.split-k.4"]


def test_models_that_the_data_cannot_tell_apart_are_all_named() -> None:
    """A word that cancels but for 2·2^-20: lost by the window over groups of 4, and by a plain float32 sum"""
    words = json.loads((Path(__file__).parent.parent / "vectors" / "mma" / "open-questions.json").read_text())
    case = next(one for one in words["cases"] if one["name"] == "D1-merge-K4-vs-K16")
    a, b = (
        nv.NVFP4Tensor.from_arrays(
            np.repeat(nv.e2m1.pack(np.array([case[codes]], np.uint8)), rows, axis=0),
            np.repeat(np.array([case[scales]], np.uint8), rows, axis=0),
            np.float32(2688),
        )
        for codes, scales, rows in (("a", "sa", 16), ("b", "sb", 24))
    )
    report = check_gemm(gemm_dump(a, b, nv.matmul(a, b, model="window39-k4")))
    assert set(exact_ids(report)) == {"gemm.model.window39-k4", "gemm.model.fp32"}
    assert report.ambiguous and "the data cannot tell these apart" in report.sentences
    assert check_gemm(gemm_dump(a, b, nv.matmul(a, b, model="window39-k16"))).verdict == CONFORMS


def test_an_unfused_source_is_named() -> None:
    a, b = operands()
    c = nv.matmul(a, b) * np.float32(-0.999)
    d = nv.matmul(a, b) + c
    report = check_gemm(gemm_dump(a, b, d, c=c, beta=np.array([1], np.float32)))
    assert exact_ids(report) == ["gemm.unfused-c"]
    assert "c added after rounding: everything" in str(report)


# -- what nothing explains -------------------------------------------------------------------------------------


def test_another_layout_of_the_scales_is_no_matter_of_rounding() -> None:
    a, b = operands(k=256)
    shuffled = nv.NVFP4Tensor(a.packed, a.scales[:, ::-1].copy(), a.amax)
    report = check_gemm(gemm_dump(a, b, nv.matmul(shuffled, b)))
    assert report.verdict == DIFFERS and not report.deviations
    assert "no other model, alpha form or split of K explains it" in report.sentences
    assert "no matter of rounding: relative L2" in str(report)
    assert report.relative_l2 > 0.1


def test_a_few_spoilt_outputs() -> None:
    """Counts, the first place, and the distances; nothing explains them, and no rounding is blamed"""
    a, b = operands(k=128)
    d = nv.matmul(a, b)
    for place, steps in (((2, 7), 1), ((3, 1), 2), ((3, 2), 4), ((47, 79), 300)):
        for _ in range(steps):
            d[place] = np.nextafter(d[place], np.float32(np.inf))
    report = check_gemm(gemm_dump(a, b, d))
    assert report.outputs["d"].different == 4 and report.outputs["d"].first == [2, 7]
    assert report.ulps == {"1": 1, "2": 1, "3 to 4": 1, "above 256": 1}
    assert not report.deviations and not any("rounding" in sentence for sentence in report.sentences)
    zero = nv.quantize(np.zeros((48, 128), np.float32))
    nothing = nv.matmul(zero, b)
    nothing[0, 0] = -0.0
    assert check_gemm(gemm_dump(zero, b, nothing)).ulps == {"sign of zero": 1}


def test_part_of_it_is_explained() -> None:
    a, b = operands()
    d = nv.matmul(a, b, model="exact")
    d[0, 0] += 1
    report = check_gemm(gemm_dump(a, b, d))
    best = report.deviations[0]
    assert best.way.model == "exact" and best.remaining == 1 and not best.exact
    assert "all but 1 output" in str(report)


def test_distance_across_zero_and_in_half_precision() -> None:
    left = np.array([1e-45, 1, 1, np.inf], np.float32)
    right = np.array([-1e-45, 1, np.nextafter(np.float32(1), np.float32(2)), 1], np.float32)
    assert gemm_check._histogram(left, right) == {"1": 1, "2": 1, "NaN or Inf": 1}
    narrow = np.array([1.0, 1.0078125], bfloat16)
    assert gemm_check._histogram(narrow, narrow[::-1].copy()) == {"1": 2}


# -- time, shapes, errors --------------------------------------------------------------------------------------


def test_the_search_ends_in_time() -> None:
    a, b = operands(k=256)
    report = check_gemm(gemm_dump(a, b, nv.matmul(a, b, model="fp32")), seconds=0)
    assert report.verdict == DIFFERS and report.outputs["d"].different
    assert report.error is not None and "the search stopped after 0 s" in report.error


def test_a_sample_is_enough_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time runs out after the sample: the explanation says how many outputs it was held against"""
    a, b = operands(k=256)
    plain, calls = gemm_check._judged, []

    def judged(call: Any, way: Way, found: Array, unequal: Array) -> Any:
        calls.append(call.rows is not None)
        return plain(call, way, found, unequal)

    monkeypatch.setattr(gemm_check, "_judged", judged)
    monkeypatch.setattr(gemm_check, "SAMPLE", (8, 16))
    report = check_gemm(gemm_dump(a, b, nv.matmul(a, b, model="fp32")))
    assert exact_ids(report) == ["gemm.model.fp32"] and calls.count(False) == 1
    assert report.deviations[0].compared == 48 * 80


def test_not_judged() -> None:
    a, b = operands(k=48)
    report = check_gemm(gemm_dump(a, b, np.zeros((48, 80), np.float32)))
    assert report.verdict == NOT_JUDGED and report.exit_code == 2
    assert report.error is not None and "K is a multiple of 32 in an FP4 GEMM" in report.error
    assert "not judged against" in str(report)
    a, b = operands(k=64)
    nameless = nv.Dump(packed=a.packed, scales=a.scales)
    report = check_gemm(nv.Dump(a=nameless, b=as_dump(b), d=np.zeros((48, 80), np.float32)))
    assert report.verdict == NOT_JUDGED and "amax" in str(report.error)


def test_errors() -> None:
    a, b = operands(k=64)
    with pytest.raises(TypeError, match="one dump with the operands a and b and the result d"):
        check_gemm(as_dump(a))
    with pytest.raises(ValueError, match="unknown"):
        check_gemm(gemm_dump(a, b, nv.matmul(a, b)), "nonsense")


def test_json() -> None:
    report = planted(Way(model="exact"))
    found = json.loads(json.dumps(report.to_json()))
    assert set(found) == {"verdict", "error", "outputs", "ulps", "relative_l2", "deviations", "ambiguous", "stage"}
    assert found["stage"] == "gemm" and found["outputs"]["d"]["compared"] == 48 * 80
    one = found["deviations"][0]
    assert one["id"] == "gemm.model.exact" and one["exact"] is True and one["model"] == "exact"
    assert one["explains"] == {"d": found["outputs"]["d"]["different"]} and one["remaining"] == 0
    good = planted(Way()).to_json()
    assert good["stage"] is None and good["deviations"] == []
