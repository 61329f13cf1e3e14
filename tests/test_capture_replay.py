"""Judging a bundle: a simulated Blackwell, right and with planted faults, and what of a recording becomes evidence."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import conformance
import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance import ledger, run
from conformance.capture import bundle as bundles
from conformance.capture import command, generations, machine, record, replay, report, witness
from conformance.capture.bundle import BundleError, Record
from conformance.capture.child import record_backend, record_probe
from conformance.capture.journal import Writer, write_json
from conformance.capture.question import digest
from conformance.capture.replay import Replay, UnitResult
from conformance.capture.rules import rules_of
from nvfp4hw import backends, probes
from nvfp4hw.backends.base import Case, Outputs, Refused

ROOT = Path(__file__).parents[1]
SPEC_RULES = set(re.findall(r"^### ([A-Z][A-Z0-9-]+)$", (ROOT / "docs" / "spec.md").read_text("utf-8"), re.MULTILINE))
NO_GPU: tuple[list[dict[str, str]], str | None] = ([], "no GPU in a test")
B200 = {"name": "NVIDIA B200", "compute_capability": "10.0", "driver": "580.95"}
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.95"}


def bundle_of(folder: Path, names: Iterable[str], kind: str = "backend", gpus: Any = None, sealed: bool = True) -> Path:
    """A bundle of units recorded in this process."""
    header = {
        "format": "nvfp4-bundle",
        "version": 1,
        "suite": "quick",
        "date": "2026-11-30",
        **machine.facts(),
        "asked": {"backends": [], "probes": [], f"{kind}s": list(names)},
        "gpus": gpus or [],
    }
    write_json(folder / "bundle.json", header)
    for name in names:
        unit = Writer(folder / f"{kind}s" / name)
        assert (record_backend(unit, name, "quick") if kind == "backend" else record_probe(unit, name)) == 0
        unit.write("end.json", {"state": "complete", "reason": None})
    target = folder.with_name(f"{folder.name}.nvfp4")
    if sealed:
        bundles.seal(folder, target)
    return target if sealed else folder


def by_name(found: Replay) -> dict[str, UnitResult]:
    return {one.unit.name: one for one in found.units}


# ---- a simulated Blackwell ---------------------------------------------------------------------------------

#: probe -> a planted fault, and a word of how it must be told
FAULTS = {
    "rn-e2m1": ("nan-zero", "value nan"),
    "rn-e4m3": ("ties-away", "expected"),
    "fp4-header": ("minus-zero", "0x80000000"),
    "rs-e2m1": ("one-threshold", "e2m1_patterns"),
    "rs-e4m3": ("one-threshold", "e4m3_patterns"),
    "rs-model": ("one-threshold", "patterns"),
    "rcp": ("two-ulp", "error in ulp 2"),
    "rht": ("24-bits", "any pattern"),
    "rht-tcgen05": ("rounded-sum", "any pattern"),
    "mma-sm120": ("exact", "vectors"),
    "mma-sm100": ("swapped-rows", "operands or scales are not where"),
}


def test_every_probe_has_a_fault_here() -> None:
    assert list(FAULTS) == probes.names()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer cases, of every family."""
    every = suite_cases.cases
    monkeypatch.setattr(suite_cases, "cases", lambda suite="quick": list(every(suite))[::5])


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    actions = parser.add_subparsers()
    command.add_capture(actions)
    command.add_replay(actions)
    return parser.parse_args(arguments)


def test_a_right_blackwell_conforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands themselves, each backend and probe in its process."""
    path, files = str(tmp_path / "b"), {name: str(tmp_path / f"r.{name}") for name in ("json", "junit")}
    chosen = ["--backend", "simulated", "--probe", "simulated.rn-e2m1", "--probe", "simulated.rcp"]
    options = options_of("capture", "-o", path, *chosen, "--json", files["json"], "--junit", files["junit"])
    assert options.run(options) == 0
    said = capsys.readouterr().out
    assert "3 conforms, 0 departs, 0 failed, 0 not run" in said and "root sha256" in said
    root = re.findall("root sha256 ([0-9a-f]{64})", said)
    assert len(root) == 2 and root[0] == root[1]
    options = options_of("replay", path)
    assert options.run(options) == 0 and root[0] in capsys.readouterr().out
    document = json.loads(Path(files["json"]).read_text(encoding="utf-8"))
    assert document["exit_code"] == 0 and document["rules"]["E2M1-NAN"]["compared"] > 2**32
    assert {one["kind"] for one in document["backends"]} == {"backend", "probe"}
    assert ElementTree.parse(files["junit"]).getroot().findall(".//failure") == []


def test_what_is_asked_is_everything_or_what_is_named() -> None:
    def asked(*arguments: str) -> tuple[list[str], list[str]]:
        return command._asked(options_of("capture", "-o", "b", *arguments))

    here = [name for name in backends.names() if name != "te-vectors"]  # a recording of another machine
    assert asked() == (here, probes.names())
    assert asked("--no-probes") == (here, [])
    assert asked("--backend", "te-vectors") == (["te-vectors"], [])
    assert asked("--backend", "torchao", "--backend", "torchao") == (["torchao"], [])
    assert asked("--probe", "rcp") == ([], ["rcp"])
    assert asked("--simulate") == (["simulated"], [f"simulated.{name}" for name in probes.names()])
    for arguments in (["--backend", "nobody"], ["--probe", "nobody"], ["--backend", "simulated.nobody"]):
        with pytest.raises(ValueError, match="nobody"):
            asked(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "b", "--probe", "rcp", "--no-probes"], "contradict each other"),
        (["-o", "nowhere/b"], "nowhere/b: cannot be written"),
        (["-o", ""], "-o is empty"),
        (["-o", "b", "--html", "nowhere/r"], "nowhere/r: cannot be written"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = options_of("capture", *arguments)
    with pytest.raises(ValueError, match=says):
        options.run(options)
    assert list(tmp_path.iterdir()) == []


def test_every_fault_of_a_device_is_caught_and_told(tmp_path: Path) -> None:
    names = {f"simulated.{name}.{fault}": says for name, (fault, says) in FAULTS.items()}
    found = replay.replay(bundle_of(tmp_path / "b", names, "probe"))
    assert found.exit_code == 1
    for name, one in by_name(found).items():
        assert one.status == run.DEPARTS and names[name] in " ".join(one.named), name
        assert all(count.different for count in one.rules.values()) and set(one.rules) <= SPEC_RULES
    assert "DEPARTS" in report.as_text(found)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("crash", "stopped by SIGSEGV"),
        ("garbage", "no readable file"),
        ("silent", "verdict"),
        ("short-file", "bytes"),
        ("error", "status 3: cannot run: the sweep"),
    ],
)
def test_a_probe_that_comes_to_no_result_fails(tmp_path: Path, fault: str, says: str) -> None:
    found = replay.replay(bundle_of(tmp_path / "b", [f"simulated.rn-e4m3.{fault}"], "probe"))
    (one,) = found.units
    assert found.exit_code == 1 and one.status == run.FAILED and says in str(one.result.cases[0].error)


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: NO_GPU)
    record.capture(tmp_path / "b", record.Asked("quick", [], ["simulated.rn-e4m3.hang"]), 4, None, lambda said: None)
    (one,) = replay.replay(tmp_path / "b").units
    assert one.status == run.FAILED and "no answer within 4 s" in str(one.result.cases[0].error)


def test_a_program_that_lies_is_found_out(tmp_path: Path) -> None:
    (one,) = replay.replay(bundle_of(tmp_path / "b", ["simulated.rn-e4m3.lie"], "probe")).units
    assert one.status == run.DEPARTS and one.named


@pytest.mark.parametrize(
    "ident",
    ["block-scale.divide-by-6", "encode-scale.quotient", "element.negative-zero-dropped", "packing.high-nibble-first"],
)
def test_a_planted_deviation_is_named(tmp_path: Path, few: None, ident: str) -> None:
    found = replay.replay(bundle_of(tmp_path / "b", [f"simulated.{ident}"]))
    (one,) = found.units
    assert found.exit_code == 1 and one.status == run.DEPARTS
    assert any(sentence.startswith(ident) for sentence in one.named), one.named
    assert ident in report.as_text(found)


def test_a_simulation_that_there_is_not_is_refused() -> None:
    from conformance.capture import simulated

    with pytest.raises(ValueError, match="no deviation 'nothing'"):
        simulated.load_backend("simulated.nothing")
    with pytest.raises(ValueError, match="there is no probe 'rn-e9'"):
        simulated.load_probe("simulated.rn-e9")
    with pytest.raises(ValueError, match="is not one of"):
        simulated.load_probe("simulated.rn-e2m1.nothing")


# ---- what was taken out of a recording ---------------------------------------------------------------------


def taken(path: Path, change: Any, **info: Any) -> Replay:
    """The only backend's records changed by a function of their list, all hashes made right, and judged."""
    folder = path.with_name("taken")
    bundles.unpack(bundles.open_bundle(path), folder)
    (lines,) = folder.glob("*/*/records.jsonl")
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    lines.write_text("".join(json.dumps(one) + "\n" for one in change(records)), encoding="utf-8")
    with_info(folder, lines.parent.name, **info)
    bundles.seal(folder, path.with_name("taken.nvfp4"))
    found = replay.replay(path.with_name("taken.nvfp4"))
    bundles.remove(folder)
    return found


def test_wrong_answers_that_are_taken_out_are_missed(tmp_path: Path, few: None) -> None:
    path = bundle_of(tmp_path / "b", ["simulated.block-scale.divide-by-6"])
    wrong = {
        case.id: [name for name, count in case.outputs.items() if count.different]
        for case in replay.replay(path).units[0].result.cases
        if case.status == run.DEPARTS
    }
    assert wrong

    def without(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for one in records if one["id"] not in wrong]

    kept = [ident for ident in bundles.open_bundle(path).units[0].info["asked"] if ident not in wrong]
    found = taken(path, without, asked=kept)
    (one,) = found.units
    assert found.exit_code == 1 and one.status == run.FAILED and set(one.missing) == set(wrong)
    assert "it has not every case that it serves" in report.as_text(found)
    assert taken(path, lambda records: [], asked=[]).exit_code == 1
    # a narrower backend than the one of this name serves what that one serves
    features = ["quantize", "float32", "1x16", "row"]
    assert set(taken(path, without, asked=kept, features=features).units[0].missing) == set(wrong)

    def bare(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for one in records:
            for name in wrong.get(one["id"], ()):
                del one["outputs"][name]
        return records

    found = taken(path, bare)
    assert found.exit_code == 1 and found.units[0].status == run.FAILED
    errors = {case.id: str(case.error) for case in found.units[0].result.cases if case.error}
    assert set(errors) == set(wrong) and all("no refusal says why" in said for said in errors.values())

    def amax_alone(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for one in records:
            if any(name.startswith("amax") for name in one["outputs"]):
                one["outputs"] = {name: ref for name, ref in one["outputs"].items() if name.startswith("amax")}
        return records

    assert taken(path, amax_alone).exit_code == 1


# ---- cases that came later -----------------------------------------------------------------------------------


def test_the_cases_are_those_of_the_latest_generation() -> None:
    """And each generation is the present one without what is newer; else append one to generations.py."""
    names = generations.present()
    for number, one in enumerate(generations.GENERATIONS, 1):
        found = generations.hashes_of(number, names)
        assert found == dict(one.hashes), f"generation {number}: python -m conformance.capture.generations"


def later(monkeypatch: pytest.MonkeyPatch, **new: tuple[str, ...]) -> None:
    """A second generation of cases, in which these are new, by scope."""
    first = generations.GENERATIONS[0]
    monkeypatch.setattr(generations, "GENERATIONS", (first, generations.Generation({}, new)))


def test_a_generation_is_known_by_what_it_did_not_have_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"quick": ["a/1", "b/1"], "full": ["a/1", "a/2", "b/1"]}
    was = {"quick": generations.hashed(["b/1"]), "full": generations.hashed(["b/1"])}
    new = generations.Generation(generations.hashes_of(1, names), {"quick": ("a/*",), "full": ("a/*",)})
    monkeypatch.setattr(generations, "GENERATIONS", (generations.Generation(was), new))
    assert [generations.since("quick", name) for name in names["quick"]] == [2, 1]
    assert generations.hashes_of(1, names) == was
    assert generations.hashes_of(2, names) == {scope: generations.hashed(some) for scope, some in names.items()}


def without(family: str) -> Any:
    """A change of a recording's records: those of a family of cases are gone."""
    return lambda records: [one for one in records if not one["id"].startswith(family)]


def asked_but(path: Path, family: str) -> list[str]:
    return [ident for ident in bundles.open_bundle(path).units[0].info["asked"] if not ident.startswith(family)]


def test_a_case_newer_than_the_recording_is_no_fault_of_it(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(tmp_path / "b", ["simulated"])
    asked = asked_but(path, "e2m1-tie/")
    assert taken(path, without("e2m1-tie/"), asked=asked).exit_code == 1  # as long as they are of its generation
    later(monkeypatch, quick=("e2m1-tie/*",))
    found = taken(path, without("e2m1-tie/"), asked=asked)
    (one,), said = found.units, report.as_text(found)
    n = len(one.newer)
    assert found.exit_code == 0 and one.status == run.CONFORMS and one.missing == () and n > 1
    assert all(ident.startswith("e2m1-tie/") for ident in one.newer)
    assert f"{n} cases are newer than this recording, which is not held to them: {one.newer[0]}" in said
    document = report.as_json(found)
    assert document["backends"][0]["newer"] == list(one.newer) and document["backends"][0]["missing"] == []
    skipped = ElementTree.fromstring(report.as_junit(found)).findall(".//skipped")
    assert len(skipped) == n and "newer than this recording" in str(skipped[0].get("message"))
    # what it was asked must be there, and so must what there was at its time
    assert set(taken(path, without("e2m1-tie/")).units[0].missing) == set(one.newer)
    asked = [ident for ident in asked if not ident.startswith("zero/")]
    (one,) = taken(path, lambda records: without("zero/")(without("e2m1-tie/")(records)), asked=asked).units
    assert one.missing and all(ident.startswith("zero/") for ident in one.missing)
    assert len(one.newer) == n and one.status == run.FAILED


def test_a_recording_with_one_new_case_is_held_to_all_of_them(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever generation it claims: of wrong answers to new cases none can be left out alone."""
    path = bundle_of(tmp_path / "b", ["simulated"])
    later(monkeypatch, quick=("e2m1-tie/*",))
    ties = [case.id for case in suite_cases.cases("quick") if case.id.startswith("e2m1-tie/")]
    (one,) = taken(path, without(ties[0]), asked=[ident for ident in asked_but(path, ties[0])]).units
    assert ties[0] in one.missing and one.newer == () and one.status == run.FAILED


def test_a_feature_newer_than_the_recording_brings_no_missing_case(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(tmp_path / "b", ["small"])
    x = np.ones((16, 16), np.float32).astype(np.float16)
    more = [*small.cases("quick"), Case("small/2", "small", x, hunts="h")]
    monkeypatch.setattr(small, "cases", lambda suite: more, raising=False)
    monkeypatch.setattr(Small, "features", Small.features | {"float16"})
    assert replay.replay(path).units[0].missing == ("small/2",)
    later(monkeypatch, **{generations.features("small"): ("float16",)})
    (one,) = replay.replay(path).units
    assert one.missing == () and one.newer == ("small/2",) and one.status == run.CONFORMS
    assert "1 case is newer than this recording, which is not held to it: small/2" in report.as_text(
        replay.replay(path)
    )


def test_a_capture_says_of_which_generation_its_cases_are(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, **{generations.own_cases("small", "quick"): ("small/1",)})
    monkeypatch.setattr(machine, "gpus", lambda: NO_GPU)
    record.capture(tmp_path / "b", record.Asked("quick", [], []), 60, None, lambda said: None)
    header = bundles.open_bundle(tmp_path / "b").header
    assert header["version"] == 2 and header["generation"] == 2 == generations.latest()
    path = bundle_of(tmp_path / "c", ["small"])  # of version 1, and so of the first generation
    assert bundles.open_bundle(path).generation == 1
    (one,) = taken(path, without("small/1"), asked=["small/0"]).units
    assert one.newer == ("small/1",) and one.missing == ()


def test_refusals_are_counted_and_more_of_them_than_answers_are_said(tmp_path: Path, few: None) -> None:
    path = bundle_of(tmp_path / "b", ["simulated"])

    def refused(share: int, outputs: tuple[str, ...] = ()) -> Any:
        def change(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for one in records[: len(records) * share // 4]:
                one["outputs"] = {name: ref for name, ref in one["outputs"].items() if name in outputs}
                one["refused"] = "it does not do that"
            return records

        return change

    some = taken(path, refused(1))
    assert some.exit_code == 0 and not some.units[0].partly_refused and "partly refused" not in report.as_text(some)
    most = taken(path, refused(3, ("amax",)))
    said, (one,) = report.as_text(most), most.units
    assert most.exit_code == 0 and one.partly_refused and report.as_json(most)["backends"][0]["partly_refused"] is True
    assert "conforms, partly refused: te" in said and said.endswith("0 not run; 1 partly refused")
    n = len(one.unit.records)
    assert f"refused, in {n * 3 // 4} cases: it does not do that" in said
    assert f"packed in {one.given['packed']} of {n} cases" in said and 0 < one.given["packed"] <= n - n * 3 // 4
    every = taken(path, refused(4))
    assert every.exit_code == 2 and "nothing was compared" in report.as_text(every)


def test_a_bundle_of_nothing_is_not_judged(tmp_path: Path) -> None:
    found = replay.replay(bundle_of(tmp_path / "b", []))
    assert found.units == [] and found.exit_code == 2 and report.as_text(found).endswith("; nothing was compared")


def test_a_damaged_output_costs_its_case_alone(tmp_path: Path, few: None) -> None:
    folder = bundle_of(tmp_path / "b", ["simulated"], sealed=False)
    place = folder / "backends" / "simulated"
    first = next(one for one in Writer(place).recorded.values() if "scales" in one.outputs)
    data = bytearray((place / "arrays.bin").read_bytes())
    data[int(first.outputs["scales"].at or 0)] ^= 1
    (place / "arrays.bin").write_bytes(data)
    found = replay.replay(folder)
    (one,) = found.units
    assert found.exit_code == 2 and len(one.unjudged) == 1 and len(one.result.cases) == len(one.unit.records) - 1
    assert f"{first.id}: scales: " in one.unjudged[0] and "not those that were recorded" in one.unjudged[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"features": 5}, "unit.json gives features as 5; expected a list of texts"),
        ({"asked": None}, "unit.json gives asked as None; expected a list of texts"),
        ({"asked": "abc"}, "unit.json gives asked as 'abc'; expected a list of texts"),
        ({"unserved": "many"}, "unit.json gives unserved as 'many'; expected a number of cases"),
        ({"preset": 3}, "unit.json gives preset as 3; expected a text"),
        ({"version": "\ud800"}, "unit.json: holds a number that is none, or half a character"),
    ],
)
def test_what_a_unit_says_must_make_sense(tmp_path: Path, small: Small, changes: dict[str, Any], says: str) -> None:
    folder = with_info(bundle_of(tmp_path / "b", ["small"], sealed=False), "small", **changes)
    with pytest.raises(BundleError) as caught:
        replay.replay(folder)
    assert says in str(caught.value) and str(caught.value).startswith(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"suite": "nope"}, "is of the suite 'nope', which this nvfp4ref does not have"),
        ({"suite": None}, "bundle.json gives suite as None; expected a text"),
        ({"gpus": 5}, "bundle.json gives gpus as 5; expected a list of devices"),
        ({"gpus": [{"name": "B200"}]}, "bundle.json gives a device as {'name': 'B200'}"),
        ({"oracle": "1"}, "bundle.json gives oracle as '1'; expected an object"),
        ({"environment": {"python": 3}}, "bundle.json gives environment as {'python': 3}; expected texts"),
        ({"generation": "new"}, "bundle.json gives generation as 'new'; expected the number of a generation"),
        ({"version": 2}, "bundle.json gives generation as None; expected 1 or more"),
        ({"asked": {"backends": 5}}, "bundle.json does not say what was asked: it gives {'backends': 5}"),
    ],
)
def test_what_a_header_says_must_make_sense(tmp_path: Path, small: Small, changes: dict[str, Any], says: str) -> None:
    folder = bundle_of(tmp_path / "b", ["small"], sealed=False)
    header = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    write_json(folder / "bundle.json", {**header, **changes})
    with pytest.raises(BundleError) as caught:
        replay.replay(folder)
    assert says in str(caught.value) and str(caught.value).startswith(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seconds": float("nan")}, "holds a number that is none"),
        ({"seconds": -5}, "the record 'small/0' gives seconds as -5"),
        ({"seconds": "long"}, "the record 'small/0' gives seconds as 'long'; expected a number"),
        ({"id": ["a"]}, "gives id as ['a']; expected a text"),
        ({"error": 5}, "gives error as 5; expected a text"),
        ({"outputs": []}, "gives outputs as []; expected an object"),
        ({"facts": 3}, "gives facts as 3; expected an object"),
    ],
)
def test_what_a_record_says_must_make_sense(tmp_path: Path, small: Small, changes: dict[str, Any], says: str) -> None:
    path = bundle_of(tmp_path / "b", ["small"])
    with pytest.raises(BundleError) as caught:
        replay.replay(edited(path, **changes))
    assert says in str(caught.value) and "records.jsonl" in str(caught.value)


def test_what_a_recording_says_reaches_no_terminal_as_it_stands(tmp_path: Path, small: Small) -> None:
    found = replay.replay(edited(bundle_of(tmp_path / "b", ["small"]), error="\x1b]0;pwn\x07\x1b[31m evil"))
    said = report.as_text(found)
    assert "\x1b" not in said and "\\x1b]0;pwn\\x07\\x1b[31m evil" in said and found.exit_code == 1


# ---- what a recording says of itself is not believed -------------------------------------------------------


class Small:
    """Two small cases, the second refused by its package."""

    name = "small"
    preset = "te"
    device = "cuda"
    features = frozenset(("quantize", "float32", "1x16", "row"))

    def availability(self) -> str | None:
        return None

    def version(self) -> str:
        return "small 1"

    def cases(self, suite: str) -> Iterable[Case]:
        x = np.arange(256, dtype=np.float32).reshape(16, 16)
        return [Case("small/0", "small", x, hunts="h"), Case("small/1", "small", -x, hunts="h")]

    def quantize(self, case: Case) -> Outputs:
        if case.id == "small/1":
            raise Refused("needs sm_100")
        q = nv.quantize(case.x)
        return {"packed": q.packed, "scales": q.scales, "amax": q.amax}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """A backend of this project that is on the GPU."""
    one = Small()
    load = backends.load
    monkeypatch.setattr(backends, "load", lambda name: one if name == "small" else load(name))
    monkeypatch.setattr(backends, "_BUILT_IN", {**backends._BUILT_IN, "small": "x"})
    return one


def edited(path: Path, **changes: Any) -> Path:
    """The bundle with its first record changed, and every hash of members made right."""
    folder = path.with_name("edited")
    bundles.unpack(bundles.open_bundle(path), folder)
    (lines,) = folder.glob("*/*/records.jsonl")
    first, *rest = lines.read_text(encoding="utf-8").splitlines()
    lines.write_text("\n".join([json.dumps({**json.loads(first), **changes}), *rest]) + "\n", encoding="utf-8")
    bundles.seal(folder, path.with_name("edited.nvfp4"))
    return path.with_name("edited.nvfp4")


def test_refused_is_neither_failed_nor_passed(tmp_path: Path, small: Small) -> None:
    found = replay.replay(bundle_of(tmp_path / "b", ["small"]))
    (one,) = found.units
    assert found.exit_code == 0 and one.status == run.CONFORMS and one.refused == {"small/1": "needs sm_100"}
    assert [case.id for case in one.result.cases] == ["small/0"] and one.missing == ()
    assert "refused, in 1 case: needs sm_100" in report.as_text(found)


def test_one_that_refuses_everything_is_not_run(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small.cases("quick")
    monkeypatch.setattr(small, "cases", lambda suite: [whole[1]], raising=False)  # type: ignore[index]
    (one,) = replay.replay(bundle_of(tmp_path / "b", ["small"])).units
    assert one.status == run.NOT_RUN and "refuses its only case: needs sm_100" in str(one.result.reason)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"question": "0" * 64}, "asks something else here"), ({"id": "small/7"}, "no such case here")],
)
def test_another_question_is_not_judged(tmp_path: Path, small: Small, changes: dict[str, Any], says: str) -> None:
    found = replay.replay(edited(bundle_of(tmp_path / "b", ["small"]), **changes))
    (one,) = found.units
    assert found.exit_code == 2 and len(one.unjudged) == 1 and says in one.unjudged[0]
    assert says in report.as_text(found)
    assert says in " ".join(
        str(error.get("message")) for error in ElementTree.fromstring(report.as_junit(found)).iter("error")
    )


def test_a_hash_in_place_of_bytes_must_be_the_oracle_s(tmp_path: Path, small: Small) -> None:
    path = bundle_of(tmp_path / "b", ["small"])
    (unit,) = bundles.open_bundle(path).units
    outputs = {name: ref.to_json() for name, ref in unit.records["small/0"].outputs.items()}
    without = {name: {key: value for key, value in ref.items() if key != "at"} for name, ref in outputs.items()}
    assert replay.replay(edited(path, outputs=without)).exit_code == 0
    without["scales"]["sha256"] = "0" * 64
    found = replay.replay(edited(path, outputs=without))
    assert found.exit_code == 2 and "scales was what the oracle of that time gives" in found.units[0].unjudged[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("compared", 5), ("different", 5), ("different", False), ("status", "fail")),
        *(("first", [{"x": 1}]), ("device", "NVIDIA B200")),
    ],
)
def test_a_probe_s_claims_are_counted_again(tmp_path: Path, name: str, value: Any) -> None:
    path = bundle_of(tmp_path / "b", ["simulated.rcp"], "probe")
    (unit,) = bundles.open_bundle(path).units
    facts = {**unit.records["simulated.rcp"].facts, name: value}
    (one,) = replay.replay(edited(path, facts=facts)).units
    assert one.status == run.DEPARTS and f"its record says {name} {value}" in " ".join(one.named)


def test_a_probe_s_rules_and_device_are_its_own(tmp_path: Path) -> None:
    """Even where the record's seal was made right again."""
    path = bundle_of(tmp_path / "b", ["simulated.rcp"], "probe")
    (unit,) = bundles.open_bundle(path).units
    record = unit.records["simulated.rcp"]
    arrays = {name: unit.array(ref) for name, ref in record.outputs.items()}
    for changes, says in (
        ({"rules": ["MMA-GROUP"]}, "the record's rules"),
        ({"device": "NVIDIA B200"}, "its target"),
    ):
        held = {**record.facts["record"], **changes}
        held["seal"] = probes.seal(held, arrays)
        (one,) = replay.replay(edited(path, facts={**record.facts, "record": held})).units
        assert one.status == run.DEPARTS and says in " ".join(one.named)
    found = replay.replay(edited(path, facts={**record.facts, "record": "ab"}))
    assert found.exit_code == 2 and "its record is 'ab'" in found.units[0].unjudged[0]


def test_a_simulated_probe_under_the_name_of_a_real_one_departs(tmp_path: Path) -> None:
    folder = bundle_of(tmp_path / "b", ["simulated.rcp"], "probe", gpus=[B200], sealed=False)
    (folder / "probes" / "simulated.rcp").rename(folder / "probes" / "rcp")
    for name in ("unit.json", "records.jsonl"):
        path = folder / "probes" / "rcp" / name
        path.write_text(path.read_text(encoding="utf-8").replace("simulated.rcp", "rcp"), encoding="utf-8")
    header = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    write_json(folder / "bundle.json", {**header, "asked": {"backends": [], "probes": ["rcp"]}})
    (one,) = replay.replay(folder).units
    assert one.status == run.DEPARTS and "its name is that of a probe of hardware" in " ".join(one.named)


def test_a_changed_byte_of_a_probe_is_found(tmp_path: Path) -> None:
    folder = bundle_of(tmp_path / "b", ["simulated.rn-e2m1"], "probe", sealed=False)
    unit = Writer(folder / "probes" / "simulated.rn-e2m1")
    before = unit.recorded["simulated.rn-e2m1"]
    source = bundles.open_bundle(folder).units[0]
    arrays = {name: source.array(ref).copy() for name, ref in before.outputs.items()}
    arrays["runs_code"][3] ^= 1
    for name in ("records.jsonl", "arrays.bin"):
        (unit.folder / name).unlink()
    unit.add(Record(before.id, "", 0.0, {}, None, None, before.facts), arrays)
    (one,) = replay.replay(folder).units
    assert one.status == run.DEPARTS and "its record says status pass, and its arrays say fail" in one.named


def with_info(folder: Path, name: str, **changes: Any) -> Path:
    """The recording with what a backend says of itself changed."""
    path = folder / "backends" / name / "unit.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})
    return folder


def test_a_backend_of_this_project_is_judged_by_the_preset_of_today(tmp_path: Path, small: Small) -> None:
    folder = with_info(bundle_of(tmp_path / "b", ["small"], sealed=False), "small", preset="modelopt")
    found = replay.replay(folder)
    assert found.exit_code == 0 and found.units[0].result.preset == "te"
    assert "it declared modelopt when it was recorded" in report.as_text(found)


def test_a_preset_of_the_future_is_not_judged(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a backend of another package: one of this project is judged by the preset of today."""
    folder = with_info(bundle_of(tmp_path / "b", ["small"], sealed=False), "small", preset="te-9")
    monkeypatch.setattr(backends, "_BUILT_IN", {name: m for name, m in backends._BUILT_IN.items() if name != "small"})
    found = replay.replay(folder)
    assert found.exit_code == 2 and "preset 'te-9', which this nvfp4ref does not have" in found.units[0].unjudged[0]


def test_questions_of_a_bundle_can_be_asked_again_anywhere() -> None:
    """Backends of this project give the same cases whether or not their package is there."""
    for name in backends.names():
        own = backends.load(name).cases("quick")
        if own is not None:
            assert all(len(digest(case)) == 64 for case, _ in zip(own, range(3), strict=False)), name


# ---- rules -------------------------------------------------------------------------------------------------


def test_outputs_rest_on_rules_that_there_are() -> None:
    """The recordings of Transformer Engine's kernels exercise most of the specification."""
    backend = backends.load("te-vectors")
    found: set[str] = set()
    for case in backend.cases("quick") or ():
        for name, array in backend.quantize(case).items():
            found.update(rules_of(case, name, np.asarray(array), backend.preset))
    assert found <= SPEC_RULES and len(found) > 45
    assert {"SR-FALLBACK", "PHILOX-COUNTER", "RHT-SUM", "ROW-SCALED", "AMAX-NAN", "FOUR-OVER-SIX-SELECT"} <= found
    assert not found & {"SR-SM100", "FUSED-RHT-GLOBAL", "PEER-TORCHAO"}


def test_a_peer_is_a_witness_of_its_own_section_only() -> None:
    case = Case("c", "f", np.ones((16, 16), np.float32))
    packed = np.zeros((16, 8), np.uint8)
    assert rules_of(case, "packed", packed, "torchao") == ("PEER-TORCHAO",)
    assert all(set(rules_of(case, "packed", packed, preset)) <= SPEC_RULES for preset in nv.PRESETS)
    assert "E2M1-RNE" in rules_of(case, "packed", packed, "te") and "E2M1-RNE" not in rules_of(
        case, "scales", packed, "te"
    )


# ---- evidence ----------------------------------------------------------------------------------------------


def entries(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    return witness.witnesses(replay.replay(path), path.name)


@pytest.mark.parametrize(
    ("gpus", "kind"),
    [
        ([B200, B200], "Blackwell run recorded by this suite"),
        ([H200], "another implementation run"),
        ([H200, B200], "another implementation run"),  # which of them it ran on is not known
        ([], "another implementation run"),
    ],
)
def test_the_device_decides_the_kind(tmp_path: Path, small: Small, gpus: list[dict[str, str]], kind: str) -> None:
    (one,), _ = entries(bundle_of(tmp_path / "b", ["small"], gpus=gpus))
    assert one["kind"] == kind and kind in ledger.load()["kinds"] and one["different"] == 0
    assert one["inputs"]["E2M1-RNE"] == 256 and set(one["inputs"]) == set(one["rules"]) <= SPEC_RULES
    assert (
        one["compared"] == "273 items in 1 case"
        and one["bundle"]["file"] == "b.nvfp4"
        and len(one["bundle"]["root"]) == 64
    )


def test_a_backend_on_the_cpu_of_a_blackwell_machine_is_no_blackwell_run(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "device", "cpu", raising=False)
    (one,), _ = entries(bundle_of(tmp_path / "b", ["small"], gpus=[B200]))
    assert one["kind"] == "another implementation run" and "CPU" in one["device"]


def test_a_simulated_device_is_never_evidence(tmp_path: Path, few: None) -> None:
    path = bundle_of(tmp_path / "b", ["simulated"], gpus=[B200])
    none, said = entries(path)
    assert none == [] and said == ["simulated: no evidence: it is simulated"]
    with pytest.raises(BundleError, match="nothing in it is evidence: simulated: no evidence: it is simulated"):
        witness.update(replay.replay(path))
    # nor when its record denies it
    folder = tmp_path / "denied"
    bundles.unpack(bundles.open_bundle(path), folder)
    unit = folder / "backends" / "simulated" / "unit.json"
    write_json(unit, {**json.loads(unit.read_text(encoding="utf-8")), "simulated": False})
    bundles.seal(folder, tmp_path / "denied.nvfp4")
    assert entries(tmp_path / "denied.nvfp4")[0] == []


def test_another_package_s_backend_is_never_evidence(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(tmp_path / "b", ["small"], gpus=[B200])
    monkeypatch.setattr(backends, "_BUILT_IN", {name: m for name, m in backends._BUILT_IN.items() if name != "small"})
    assert entries(path) == ([], ["small: no evidence: it is of another package"])


def test_what_is_not_sealed_is_no_evidence(tmp_path: Path, small: Small) -> None:
    with pytest.raises(BundleError, match="is not sealed"):
        entries(bundle_of(tmp_path / "b", ["small"], sealed=False))


def test_a_recording_of_a_recording_is_no_evidence(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert witness.RECORDINGS == ("te-vectors",)
    monkeypatch.setattr(witness, "RECORDINGS", ("small",))
    none, said = entries(bundle_of(tmp_path / "b", ["small"], gpus=[B200]))
    assert none == [] and "recording replayed" in said[0]


def test_an_incomplete_recording_claims_what_it_has(tmp_path: Path, small: Small) -> None:
    folder = bundle_of(tmp_path / "b", ["small"], gpus=[B200], sealed=False)
    lines = folder / "backends" / "small" / "records.jsonl"
    lines.write_bytes(lines.read_bytes().splitlines(keepends=True)[0])
    bundles.seal(folder, tmp_path / "c.nvfp4")
    (one,), _ = entries(tmp_path / "c.nvfp4")
    assert one["compared"].endswith("; 1 case was not recorded")


def test_updating_writes_ledger_page_and_bundle(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle_of(tmp_path / "b200", ["small"], gpus=[B200])
    with pytest.raises(BundleError, match="run this in a clone"):
        monkeypatch.setattr(conformance, "__file__", str(tmp_path / "installed" / "conformance" / "__init__.py"))
        witness.update(replay.replay(path))
    clone = tmp_path / "clone"
    (clone / "conformance" / "evidence").mkdir(parents=True)
    (clone / "docs").mkdir()
    (clone / "docs" / "evidence.md").touch()
    monkeypatch.setattr(conformance, "__file__", str(clone / "conformance" / "__init__.py"))
    written: dict[str, Any] = {}
    load = ledger.load
    monkeypatch.setattr(ledger, "load", lambda: written or load())
    witness.update(replay.replay(path))
    written = json.loads((clone / "conformance" / "evidence" / "ledger.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in ledger.of_blackwell(written)] == ["b200: small"]
    assert (clone / "conformance" / "evidence" / "bundles" / "b200.nvfp4").read_bytes() == path.read_bytes()
    page = (clone / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert page == ledger.render(written) and "Blackwell runs: NVIDIA B200, driver 580.95." in page
    witness.update(replay.replay(path))  # again: the same witness, not a second one
    assert len(
        json.loads((clone / "conformance" / "evidence" / "ledger.json").read_text(encoding="utf-8"))["witnesses"]
    ) == len(written["witnesses"])


def test_an_open_question_is_answered_by_its_probe() -> None:
    book = ledger.load()
    one = {"rules": ["E2M1-NAN"], "question": "q", "probe": "all inputs", "probes": ["rn-e2m1"]}
    base = {
        "kind": book["kinds"][-1],
        "what": "w",
        "device": "d",
        "date": "2026-12-01",
        "compared": "c",
        "rules": ["E2M1-NAN"],
    }
    found = {"name": "b200: rn-e2m1", "different": 0, "inputs": {"E2M1-NAN": 8589934592}, **base}
    for different, says in ((None, "| open |"), (0, "as the rule says: b200: rn-e2m1"), (7, "differs: b200: rn-e2m1")):
        some = [] if different is None else [{**found, "different": different}]
        page = ledger.render({**book, "witnesses": [*book["witnesses"], *some], "open": [one]})
        assert says in page
        assert ("Nothing here was run on a Blackwell GPU" in page) == (different is None)
        assert ("**differs in b200: rn-e2m1**" in page) == (different == 7)
        (row,) = [line for line in page.splitlines() if line.startswith("| [E2M1-NAN]")]
        assert ("8,589,934,592" in row) == (different is not None)


def test_the_ledger_s_file_is_written_as_it_stands() -> None:
    path = ROOT / "conformance" / "evidence" / "ledger.json"
    assert ledger.as_json(ledger.load()) == path.read_text(encoding="utf-8")


# ---- the bundles of this repository ------------------------------------------------------------------------

BUNDLES = sorted((ROOT / "conformance" / "evidence" / "bundles").glob("*.nvfp4"))


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_every_bundle_replays_and_is_what_the_ledger_says(path: Path) -> None:
    found = replay.replay(path)
    assert not [sentence for one in found.units for sentence in one.unjudged]
    assert found.seconds < 120 and path.stat().st_size <= bundles.LARGEST
    derived, _ = witness.witnesses(found, path.name)
    assert derived == [one for one in ledger.load()["witnesses"] if one.get("bundle", {}).get("file") == path.name]


def test_every_bundle_of_the_ledger_is_there() -> None:
    named = {one["bundle"]["file"] for one in ledger.load()["witnesses"] if "bundle" in one}
    assert named == {path.name for path in BUNDLES}
