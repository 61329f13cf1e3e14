"""The suite itself, held to backends that behave, depart, crash, lie and are not there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import nvfp4ref as nv
from conformance import cases, exhaustive, report, run
from conformance.count import Count, count, count_amax, count_codes
from conformance.expect import Expectation
from nvfp4hw import backends
from nvfp4hw.backends.base import Backend, Case, Outputs

Array = np.ndarray[Any, Any]
EVERYTHING = frozenset(
    (
        "quantize",
        "float32",
        "float16",
        "bfloat16",
        "uint8",
        "1x16",
        "16x16",
        "row",
        "col",
        "rht",
        "given-amax",
    )
    + ("row_scaled", "four_over_six", "four_over_six_fast_error", "e4m3_max", "e2m1", "e4m3")
)
PLAIN = frozenset(("quantize", "float32", "bfloat16", "1x16", "row"))


@dataclass
class Fake:
    """A backend driven by the oracle under some arithmetic, which may not be the one it declares."""

    name: str = "fake"
    preset: str = "te"
    features: frozenset[str] = PLAIN
    does: str = "te"
    reason: str | None = None
    own: list[Case] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def availability(self) -> str | None:
        return self.reason

    def version(self) -> str:
        return "fake 1.0"

    def cases(self, suite: str) -> Iterable[Case] | None:
        return self.own

    def quantize(self, case: Case) -> Outputs:
        if case.kind != "quantize":
            return {{"e2m1": "codes", "e4m3": "bytes"}[case.kind]: getattr(nv, case.kind).encode(case.x)}
        arithmetic = nv.arithmetic(self.does, **{**case.fields, **self.fields})
        out: Outputs = {}
        if case.directions != "col":
            q = nv.quantize(case.x, block=case.block, amax=case.amax, arithmetic=arithmetic)
            out |= {"packed": q.packed, "scales": q.scales, "amax": q.amax}
        if case.directions != "row":
            how: dict[str, Any] = {"rht": case.rht_t, "amax": case.amax_t, "arithmetic": arithmetic}
            q = nv.quantize(case.x, axis=0, block=case.block, **how)
            out |= {"packed_t": q.packed, "scales_t": q.scales, "amax_t": q.amax}
        return out


class Crashing(Fake):
    def quantize(self, case: Case) -> Outputs:
        raise RuntimeError("device lost\nand more")


class Shapeless(Fake):
    def quantize(self, case: Case) -> Outputs:
        return {
            **super().quantize(case),
            "packed": np.zeros((3, 5), np.uint8),
            "scales": np.zeros(7, np.float32),
        }


class Silent(Fake):
    def quantize(self, case: Case) -> Outputs:
        return {}


class Inventive(Fake):
    def quantize(self, case: Case) -> Outputs:
        return {"vibes": np.zeros(3)}


class Absent(Fake):
    def availability(self) -> str | None:
        raise ImportError("libfake.so.3: cannot open shared object file")


def ran(backend: Backend, suite: str = "quick") -> run.BackendResult:
    return run.run_backend(backend, suite, list(cases.cases(suite)))


def whole(*results: run.BackendResult, sweeps: Any = ()) -> run.SuiteResult:
    return run.SuiteResult("quick", list(results), list(sweeps), 1.5, run.environment())


# ---- verdicts ----------------------------------------------------------------------------------------------


def test_the_oracle_conforms_to_itself_on_everything() -> None:
    result = ran(Fake(features=EVERYTHING), "full")
    assert result.status == run.CONFORMS and len(result.cases) > 1500
    assert sum(one.compared for one in result.totals().values()) > 25_000_000
    assert not any(one.different for one in result.totals().values())
    assert whole(result).exit_code == 0


def test_cases_are_given_by_features() -> None:
    result = ran(Fake())
    assert {case.family for case in result.cases} >= {"normal", "e2m1-tie", "zero"}
    assert result.unserved == len(list(cases.cases("quick"))) - len(result.cases) > 0


def test_a_departing_backend_departs_with_counts() -> None:
    result = ran(Fake(does="te-2.14"))
    assert result.status == run.DEPARTS and whole(result).exit_code == 1
    assert result.totals()["scales"].different > 100
    worst = next(case for case in result.cases if case.outputs["scales"].different)
    assert worst.outputs["scales"].first is not None
    text = report.as_text(whole(result))
    assert "DEPARTS from te" in text and worst.id in text and "--json has them all" in text


def test_a_backend_that_declares_its_arithmetic_conforms_and_is_counted_against_te() -> None:
    result = ran(Fake(preset="torchao", does="torchao"))
    assert result.status == run.CONFORMS and whole(result).exit_code == 0
    assert result.totals(baseline=True)["packed"].different > 0
    text = report.as_text(whole(result))
    assert "conforms to torchao" in text and "departs from te in" in text and "by cause" in text


def test_causes_separate_signs_of_zero() -> None:
    (signs,) = cases._find(["zero/sparse.bf16"])
    case = Case("c", "f", signs.x)
    result = run.run_case(Fake(preset="te-reference", does="te-reference"), case)
    assert (
        set(result.causes) == {"sign of zero"}
        and result.causes["sign of zero"] == result.baseline["packed"].different
    )


def test_a_recording_of_another_path_is_not_counted_against_te() -> None:
    case = Case("c", "f", cases._cast(cases._normal(1, (16, 16)), "bf16"), arithmetic="te-fast-math")
    result = run.run_case(Fake(preset="torchao", does="te-fast-math"), case)
    assert result.status == run.CONFORMS and result.baseline == {}


def test_a_crash_is_a_failed_case_and_not_the_end() -> None:
    result = ran(Crashing())
    assert result.status == run.FAILED and whole(result).exit_code == 1
    assert all(case.status == run.FAILED for case in result.cases)
    assert (result.cases[0].error or "").startswith(
        "RuntimeError: device lost and more (test_conformance.py:"
    )


@pytest.mark.parametrize(("kind", "said"), [(Silent, "no output"), (Inventive, "'vibes'")])
def test_answers_that_are_none_fail(kind: type[Fake], said: str) -> None:
    result = ran(kind())
    assert result.status == run.FAILED and said in (result.cases[0].error or "")


def test_wrong_shapes_differ_whole() -> None:
    result = ran(Shapeless())
    assert result.status == run.DEPARTS
    first = result.cases[0].outputs
    assert first["packed"].different == first["packed"].compared > 0
    assert "shape (3, 5)" in first["packed"].found and "(7,)" in first["scales"].found


def test_what_is_not_available_is_not_run_and_never_passed() -> None:
    result = ran(Fake(reason="torchao is not installed: pip install torchao"))
    assert result.status == run.NOT_RUN and result.cases == []
    text = report.as_text(whole(result))
    assert "not run: torchao is not installed: pip install torchao" in text and "0 of 0 backends" in text
    assert whole(result).exit_code == 0


def test_a_backend_that_cannot_even_be_asked_is_not_run() -> None:
    result = ran(Absent())
    assert result.status == run.NOT_RUN and "ImportError: libfake.so.3" in (result.reason or "")


def test_a_backend_that_serves_no_case_is_not_run() -> None:
    result = ran(Fake(features=frozenset({"quantize", "float8"})))
    assert result.status == run.NOT_RUN and "no case" in report.as_text(whole(result))


def test_a_backend_with_cases_of_its_own_is_given_those() -> None:
    own = [Case("mine/1", "mine", np.ones((16, 16), np.float32), hunts="nothing")]
    assert [case.id for case in ran(Fake(own=own)).cases] == ["mine/1"]


def test_what_a_backend_prints_as_warnings_stays_inside(recwarn: pytest.WarningsRecorder) -> None:
    class Noisy(Fake):
        def quantize(self, case: Case) -> Outputs:
            np.float32(1) / np.float32(0)
            return super().quantize(case)

    assert ran(Noisy()).status == run.CONFORMS and len(recwarn) == 0


# ---- the registry ------------------------------------------------------------------------------------------


def third_party(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = {name: EntryPoint(name, value, backends.ENTRY_POINT_GROUP) for name, value in values.items()}
    monkeypatch.setattr(backends, "_third_party", lambda: points)


def test_built_in_backends_come_first_and_load() -> None:
    assert backends.names()[:3] == ["te-vectors", "cuda-header", "te-reference"]
    for name in backends.names():
        backend = backends.load(name)
        assert backend.name == name and isinstance(backend, Backend)
        assert backend.preset in nv.PRESETS


def test_third_parties_add_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    third_party(monkeypatch, zeta=f"{__name__}:Fake", ours=f"{__name__}:READY")
    assert backends.names()[-2:] == ["ours", "zeta"]
    assert backends.load("ours") is READY


READY = Fake(name="ours")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:B", "No module named 'no_such_module'"),
        ("json:dumps", "no Backend"),
        (f"{__name__}:NotThere", "cannot be imported"),
    ],
)
def test_one_that_does_not_import_is_not_run(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    third_party(monkeypatch, broken=value)
    backend = backends.load("broken")
    assert (
        said in (backend.availability() or "")
        and backend.version() == ""
        and list(backend.cases("quick") or ()) == []
    )
    with pytest.raises(RuntimeError, match="not available"):
        backend.quantize(Case("c", "f", np.ones((16, 16), np.float32)))
    result = run.run("quick", ["broken"])
    assert result.backends[0].status == run.NOT_RUN and result.exit_code == 0
    described = {one["name"]: one for one in run.describe()}
    assert said in described["broken"]["reason"] and not described["broken"]["available"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no backend 'nobody'"):
        backends.load("nobody")
    with pytest.raises(ValueError, match="quick, full, exhaustive"):
        run.run("thorough")


def test_a_name_given_twice_runs_once() -> None:
    result = run.run("quick", ["te-vectors", "te-vectors"])
    assert [one.name for one in result.backends] == ["te-vectors"]


# ---- reports -----------------------------------------------------------------------------------------------

NASTY = "\x00\x1b[31m<&>\"' \ud800 \ufffe 🙂 ]]>"


def nasty() -> run.SuiteResult:
    """A result with every status, and text that XML cannot hold."""
    case = run.CaseResult(NASTY, "fam\x07ily", NASTY, {"packed": Count(4, 2, [0, 1], "0x01", "0x02")}, {})
    failed = run.CaseResult("failed", "f", "h", {}, {}, error=NASTY)
    good = run.CaseResult("good", "f", "h", {"packed": Count(4, 0)}, {})
    return whole(
        run.BackendResult(NASTY, "te", NASTY, None, [case, failed, good]),
        run.BackendResult("absent", "te", reason=NASTY),
        sweeps=[
            exhaustive.Sweep(NASTY, {"+normal": Count(8, 1, [3], "0x01", "0x02")}, 1.0),
            exhaustive.Sweep("skipped", {}, reason=NASTY),
        ],
    )


def test_junit_is_valid_xml_whatever_the_text_is() -> None:
    root = ElementTree.fromstring(report.as_junit(nasty()).encode())
    suites = root.findall("testsuite")
    assert [suite.get("failures") for suite in suites] == ["1", "0", "1"]
    assert [suite.get("errors") for suite in suites] == ["1", "0", "0"]
    assert [suite.get("skipped") for suite in suites] == ["0", "1", "1"]
    assert [suite.get("tests") for suite in suites] == ["3", "1", "2"]
    assert suites[0].find("testcase/failure") is not None and "🙂" in (suites[0].get("name") or "")


def test_json_goes_round_and_names_every_case() -> None:
    found = json.loads(json.dumps(report.as_json(nasty())))
    assert found["exit_code"] == 1 and found["format"] == "nvfp4-conformance"
    assert [one["status"] for one in found["backends"]] == ["failed", "not run"]
    assert [one["status"] for one in found["backends"][0]["cases"]] == ["departs", "failed", "conforms"]
    assert found["sweeps"][0]["classes"]["+normal"] == {"compared": 8, "different": 1, "first": [3]}


def test_a_sweep_that_differs_fails_the_run() -> None:
    good = exhaustive.Sweep("s", {"+normal": Count(8, 0)})
    bad = exhaustive.Sweep("s", {"+normal": Count(8, 1, [0])})
    assert whole(sweeps=[good]).exit_code == 0 and whole(sweeps=[bad]).exit_code == 1


def test_files_are_written_whole_or_not_at_all(tmp_path: Any) -> None:
    path = tmp_path / "r.json"
    report.write_json(str(path), {"a": 1})
    with pytest.raises(ValueError):
        report.write_json(str(path), {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(ValueError, match="directory"):
        report.write_text(str(tmp_path), "x")


# ---- counting ----------------------------------------------------------------------------------------------


def test_count_is_bitwise() -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    assert count(zeros, zeros[::-1]).different == 2
    nan = np.array([0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert count(nan, nan[::-1]).different == 2 and count_amax(nan, nan[::-1]).different == 0
    assert count_amax(nan, zeros).different == 2
    assert count(np.float32(1), np.float32(2)).first == []
    assert count(np.zeros(3), np.zeros(4)).different == 4
    assert count(np.zeros(3, np.float32), np.zeros(3)).different == 3


def test_counts_of_codes_are_by_element() -> None:
    rng = random.Random(1)
    expected = np.zeros((7, 9), np.uint8)
    for _ in range(50):
        found = expected.copy()
        places = {(rng.randrange(7), rng.randrange(18)) for _ in range(rng.randrange(1, 9))}
        for row, column in places:
            found[row, column // 2] ^= 5 << 4 * (column % 2)
        one = count_codes(found, expected)
        assert (one.compared, one.different, one.first) == (126, len(places), list(min(places)))
    assert count_codes(np.zeros((2, 2), np.uint8), expected).different == 126


def test_counts_add_up() -> None:
    total = Count(4, 0) + Count(4, 2, [1], "0x01", "0x02") + Count(4, 1, [0], "0x03", "0x04")
    assert (total.compared, total.different, total.first, total.found) == (12, 3, [1], "0x01")
    assert str(Count(4, 0)) == "4 compared, all equal"
    assert str(total) == "3 of 12 differ, first at [1]: found 0x01, expected 0x02"


def test_an_output_that_the_oracle_has_not_is_a_key_error() -> None:
    for kind in ("quantize", "e2m1", "amax", "recipe", "swizzle"):
        with pytest.raises(KeyError):
            Expectation(Case("c", "f", np.ones((16, 16), np.float32), kind=kind), "te").output("vibes")


# ---- sweeps ------------------------------------------------------------------------------------------------


def header_or_skip() -> None:
    reason = backends.load("cuda-header").availability()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("codec", exhaustive.CODECS)
def test_the_codec_sweep_counts_every_class(codec: str) -> None:
    header_or_skip()
    pieces = [0, 127, 255, 256, 383, 511]
    seen = []
    sweep = exhaustive.codec_sweep(codec, lambda *progress: seen.append(progress), chunks=pieces, processes=1)
    assert sweep.total.compared == len(pieces) << 23 and sweep.total.different == 0
    half = (1 << 23) - 1
    for sign in "+-":
        counts = {name[1:]: one.compared for name, one in sweep.classes.items() if name.startswith(sign)}
        assert counts == {"zero": 1, "subnormal": half, "normal": 1 << 23, "inf": 1, "nan": half}
    assert seen[-1] == (codec, 6, 6) and "all equal" in str(sweep)


def test_the_codec_sweep_covers_all_of_float32() -> None:
    assert exhaustive._CHUNKS * exhaustive._CHUNK == 1 << 32
    assert len(cases.E2M1_MIDPOINTS) == 7 and len(cases.E4M3_MIDPOINTS) == 126


def test_the_codec_sweep_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    header_or_skip()
    encode = nv.e2m1.encode
    monkeypatch.setattr(
        nv.e2m1, "encode", lambda x: np.where(x == np.float32(1.25), 3, encode(x)).astype(np.uint8)
    )
    sweep = exhaustive.codec_sweep("e2m1", chunks=[127], processes=1)
    assert sweep.total.different == 1 and sweep.classes["ties"].different == 1
    assert sweep.classes["+normal"].first == [0x3FA00000]


def test_the_codec_sweep_needs_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "_header_missing", lambda: "no compiler")
    sweep = exhaustive.codec_sweep("e2m1")
    assert sweep.reason == "no compiler" and "not run" in str(sweep) and whole(sweeps=[sweep]).exit_code == 0


def test_the_block_sweep_holds_fast_against_slow() -> None:
    sweep = exhaustive.block_sweep((2688.0, 2.0**-119, 0.0), step=499, processes=1)
    assert sweep.total.different == 0 and sweep.total.compared > 5_000_000
    assert len(sweep.classes) == 6


def test_the_block_sweep_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = exhaustive.scalar.encode_scale
    monkeypatch.setattr(
        exhaustive.scalar,
        "encode_scale",
        lambda *a: float(np.nextafter(np.float32(encode(*a)), np.float32(0))),
    )
    sweep = exhaustive.block_sweep((896.0,), step=997, processes=1)
    assert sweep.classes["amax 896 codes"].different > 0 and sweep.classes["amax 896 scales"].different == 0


def test_the_blocks_of_an_amax_hold_every_element_not_above_it() -> None:
    for a in (0, 1, 7, 0x3F80, 0x3F81):
        found = exhaustive._blocks_of(a)
        assert (found[:, 0] == a).all()
        assert set(found[:, 1:].ravel()) == {p | sign for p in range(a + 1) for sign in (0, 0x8000)}


def test_sweeps_run_in_processes() -> None:
    header_or_skip()
    sweep = exhaustive.codec_sweep("e4m3", chunks=[127, 128, 383], processes=2)
    assert sweep.total.compared == 3 << 23 and sweep.total.different == 0
