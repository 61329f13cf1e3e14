"""The suite tested by planting faults: what is planted is what is meant, and what is detected is named."""

from __future__ import annotations

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import detection, plant
from conformance.cases import cases
from conformance.deviations import DEVIATIONS, changes
from conformance.diagnose import diagnosis
from nvfp4hw.backends.base import Case

QUICK = plant.quick()


def test_the_plain_arithmetic_is_the_oracle() -> None:
    for case in QUICK:
        if case.fields:
            continue
        outputs = {}
        for suffix in plant.suffixes(case):
            steps = plant._plain(case, suffix)
            outputs |= {"packed" + suffix: steps["packed"], "scales" + suffix: steps["stored"]}
            outputs["amax" + suffix] = np.asarray(steps["A"], np.float32).reshape(1)
        assert plant.same(plant._dump(case, outputs), plant.conforming(case)), case.id


def test_a_right_quantizer_is_named_nothing_in_any_case() -> None:
    for case in QUICK:
        found = diagnosis(plant.conforming(case))
        if case.amax is not None or case.amax_t is not None:  # an amax that is given is not max(abs(x))
            assert found.explanations in ((), (("global-scale.wrong-amax",),)), case.id
        else:
            assert not found.deviations and found.stage is None, case.id


def test_planted_fields_are_the_oracles_own() -> None:
    case = detection.probes()[0]
    for entry, change in changes():
        if all(key in vars(nv.PRESETS["te"]) for key in change) and not entry.against:
            dump = plant.planted(change, case)
            if dump is None:
                continue
            q = nv.quantize(case.x, arithmetic=nv.arithmetic("te", **change))
            assert np.array_equal(dump.packed, q.packed) and np.array_equal(dump.scales, q.scales), entry.id


@pytest.mark.parametrize("suite", ["quick"])
def test_every_fault_that_can_show_is_detected(suite: str) -> None:
    assert {case.id for case in QUICK} >= {case.id for case in cases(suite) if case.kind == "quantize"}
    for entry, change in changes():
        _, tried, _, _ = detection.detect(lambda case, e=entry, c=change: plant.planted_entry(e, c, case))
        if tried is None:
            form = detection._form(entry, change)
            blank = detection.Result(entry.id, form, len(QUICK), None, "", "", None, False)
            nowhere = detection.Result(entry.id, form, 0, None, "", "", None, False)
            assert detection.why_equivalent(blank) or detection.why_equivalent(nowhere), (entry.id, form)
    for mutant in plant.MUTANTS:
        assert detection.detect(mutant.quantize)[1] is not None, mutant.name


def test_there_are_mutants_of_every_stage() -> None:
    assert len(plant.MUTANTS) >= 20
    stages = {mutant.stage for mutant in plant.MUTANTS}
    assert stages == {
        *("amax", "global-scale", "block-scale", "encode-scale", "rounding"),
        *("packing", "layout", "transform", "random-bits"),
    }


#: Every seventh fault is planted and diagnosed again; the page has all.
SOME = [(entry.id, change) for entry, change in changes()][::7]


@pytest.mark.parametrize(("ident", "change"), SOME, ids=lambda value: str(value))
def test_the_page_is_current_for_known_deviations(ident: str, change: dict[str, object]) -> None:
    line = detection.row(detection.of_entry(DEVIATIONS[ident], change))
    assert line in detection.PATH.read_text(encoding="utf-8").splitlines(), "run python -m conformance.detection"


@pytest.mark.parametrize("mutant", plant.MUTANTS[::5], ids=lambda mutant: mutant.name)
def test_the_page_is_current_for_mutants(mutant: plant.Mutant) -> None:
    line = detection.row(detection.of_mutant(mutant))
    assert line in detection.PATH.read_text(encoding="utf-8").splitlines(), "run python -m conformance.detection"


def test_the_page_has_every_fault_and_keeps_the_promises() -> None:
    written = detection.PATH.read_text(encoding="utf-8")
    for entry, change in changes():
        assert f"| {entry.id} | `{detection._form(entry, change)}` |".replace("`|", "`|") in written, entry.id
    for mutant in plant.MUTANTS:
        assert f"| {mutant.name} | {mutant.stage} |" in written
    assert "NOT DETECTED" not in written
    rows = [line for line in written.splitlines() if line.startswith("| ") and "`quick`" not in line]
    missed = [line for line in rows if "NOT NAMED" in line]
    wrong = [line for line in rows if "(WRONG)" in line]
    assert len(missed) <= 0.05 * len(DEVIATIONS) and len(wrong) <= 0.1 * len(plant.MUTANTS)


def test_random_pairs_are_named() -> None:
    named, done = detection.pairs(number=12, seed=7)
    assert done == 12 and named >= 0.85 * done


def test_a_fault_that_needs_something_does_not_apply_without() -> None:
    plain = Case("plain", "plain", np.ones((16, 16), np.float32))
    assert plant.planted({"rht.sign_mask": 0}, plain) is None
    assert plant.planted({"words": "nearest"}, plain) is None
    assert plant.planted({"scales": "tiled"}, plain) is None
    assert plant.planted([{"scale_rounding": "up"}, {"axis": "in-place"}], plain) is None
