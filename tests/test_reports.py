"""Reports: JSON and JUnit by their schemas, the page by an HTML parser, and driven in a browser where there is one."""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import hashlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4ref as nv
from conformance import exhaustive, run
from conformance.capture import report as replay_report
from conformance.capture.replay import Replay, UnitResult
from conformance.cases import _cast, _find, _normal
from conformance.compare import NOT_JUDGED, Report, check
from conformance.count import Count
from conformance.deviations import STAGES
from conformance.diagnose import Diagnosis, of_sides
from conformance.report import (
    Checks,
    Seen,
    as_html,
    as_json,
    as_junit,
    as_text,
    drawing,
    page,
    places,
    rules,
    schema,
    write_html,
    write_text,
)
from conformance.report.examples import examples
from conformance.report.junit import checks_as_junit
from conformance.report.tensor import _direction, _sparse
from conformance.side import Side
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref.dump import Dump, from_tensor

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("jinja2")

Array = np.ndarray[Any, Any]
X = _cast(_normal(21, (48, 96)), "bf16")
X300 = _cast(300 * _normal(22, (32, 64)), "bf16")
HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b[31m\ud800]]>--><img src=x onerror=alert(2)>"


def dumped(x: Array = X, both: bool = False, **fields: Any) -> Dump:
    """The dump of a producer with that arithmetic, which does not say so."""
    arithmetic = nv.arithmetic("te", **fields)
    columnwise = nv.quantize(x, axis=0, arithmetic=arithmetic) if both else None
    return dataclasses.replace(
        from_tensor(nv.quantize(x, arithmetic=arithmetic), x, columnwise=columnwise), arithmetic=None
    )


def checked(**dumps: Dump | str) -> Checks:
    """Checked dumps by label; a text is why one could not be read."""
    found = Checks()
    for label, dump in dumps.items():
        if isinstance(dump, str):
            found.add(label, "", Report(NOT_JUDGED, error=dump))
        else:
            found.add(label, "", check(dump), dump)
    return found


def gemm() -> Dump:
    a, b = (from_tensor(nv.quantize(_normal(seed, (16, 64)))) for seed in (1, 2))
    d = nv.matmul(a.rowwise(), b.rowwise(), model="exact", alpha_form="none")
    d[3, 4] = np.nextafter(d[3, 4], np.float32(np.inf))
    return Dump(a=a, b=b, d=d)


@dataclasses.dataclass
class Fake:
    """A backend driven by the oracle under some arithmetic, which may not be the one that it declares."""

    name: str = "fake"
    preset: str = "te"
    does: str = "te"
    features: frozenset[str] = frozenset(("quantize", "bfloat16", "1x16", "row"))
    answer: Any = None

    def availability(self) -> str | None:
        return None

    def version(self) -> str:
        return "fake 1.0"

    def cases(self, suite: str) -> None:
        return None

    def quantize(self, case: Case) -> Outputs:
        if self.answer is not None:
            return dict(self.answer)
        q = nv.quantize(case.x, amax=case.amax, arithmetic=self.does)
        return {"packed": q.packed, "scales": q.scales, "amax": q.amax}


CASES = [
    Case("normal/1", "normal", X),
    Case("scaled/1", "scaled", X300, hunts="order of operations"),
    Case("nan/1", "nan", _cast(np.where(np.arange(512) == 7, np.nan, _normal(6, 512)).reshape(16, 32), "bf16")),
    Case("given/1", "given-amax", X, amax=np.float32(3)),
]


def watched(*backends: Fake, sweeps: Any = ()) -> tuple[run.SuiteResult, Seen]:
    """The result of a run of CASES, and what looked on."""
    seen = Seen()
    results = []
    for backend in backends:
        cases = [run.run_case(backend, case) for case in CASES]
        for case, result in zip(CASES, cases, strict=True):
            seen(backend, case, backend.quantize(case), result)
        results.append(run.BackendResult(backend.name, backend.preset, backend.version(), None, cases, 3, 0.5))
    return run.SuiteResult("quick", results, list(sweeps), 1.5, run.environment()), seen


@functools.cache
def hostile() -> tuple[run.SuiteResult, Seen]:
    """A run with every status, in which every text is hostile."""
    result, seen = watched(Fake("<b>old</b>", does="te-2.14"), Fake("peer", "te-reference", "te-reference"))
    bad = run.CaseResult(HOSTILE, HOSTILE, HOSTILE, {"packed": Count(4, 2, [0, 1], "0x01", "0x02")}, {})
    failed = run.CaseResult("failed", "f", HOSTILE, {}, {}, error=HOSTILE)
    good = run.CaseResult("good", "f", "h", {"packed": Count(4, 0)}, {})
    refused = run.CaseResult("refused", "r", HOSTILE, {}, {}, refused="needs sm_100: " + HOSTILE)
    result.backends.append(run.BackendResult(HOSTILE, "te", HOSTILE, None, [bad, failed, good, refused]))
    result.backends.append(run.BackendResult("refusing", "te", "", None, [refused]))
    result.backends.append(run.BackendResult("absent", "te", reason=HOSTILE))
    result.sweeps.append(exhaustive.Sweep(HOSTILE, {"+normal": Count(8, 1, [3], "0x01", "0x02")}, 1.0))
    result.sweeps.append(exhaustive.Sweep("skipped", {}, reason=HOSTILE))
    return result, seen


@functools.cache
def hostile_page() -> str:
    facts, remarks = {"bundle": HOSTILE}, {"peer": [HOSTILE]}
    return as_html(*hostile(), title=HOSTILE, facts=facts, remarks=remarks, statuses={"peer": "failed"})


@functools.cache
def every_check() -> Checks:
    return checked(**dumps_of_every_kind())


# ---- JSON --------------------------------------------------------------------------------------------------


def errors(name: str, document: Any) -> list[str]:
    plain = json.loads(json.dumps(document, allow_nan=False))
    return [error.message for error in jsonschema.Draft202012Validator(schema(name)).iter_errors(plain)]


@pytest.mark.parametrize("name", ["check", "conformance", "replay"])
def test_schemas_are_schemas_with_one_meaning_for_each_name(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    for part in ("count", "counts", "case", "sweep", "environment"):
        assert schema(name)["$defs"].get(part) in (None, schema("conformance")["$defs"][part])


def test_unknown_schemas_are_refused() -> None:
    with pytest.raises(ValueError, match="check, conformance, replay"):
        schema("lint")


@functools.cache
def objects() -> dict[str, dict[str, Any]]:
    """An object of ``nvfp4 check --json`` of every kind."""
    dumps = {
        "conforms": dumped(both=True),
        "differs": dumped(both=True, element_rounding="truncate"),
        "together": dumped(global_scale="reciprocal-form", element_rounding="truncate"),
        "preset": dataclasses.replace(from_tensor(nv.quantize(X, arithmetic="te-2.14"), X), arithmetic=None),
        "no input": dataclasses.replace(dumped(), x=None),
        "unreadable layout": dataclasses.replace(dumped(), scales=np.zeros((3, 5), np.uint8)),
        "gemm": gemm(),
    }
    return {name: check(dump).to_json() for name, dump in dumps.items()}


def test_check_json_is_as_published() -> None:
    found = objects()
    for one in found.values():
        assert errors("check", one) == []
    assert errors("check", {"dumps": list(found.values())}) == []
    assert {one["verdict"] for one in found.values()} == {"conforms", "differs", "not-judged"}
    assert found["differs"]["deviations"] and found["gemm"]["deviations"]


def test_the_schema_of_check_has_the_keys_of_the_design_and_no_others() -> None:
    parts = schema("check")["$defs"]
    assert list(parts["report"]["properties"]) == ["verdict", "error", "outputs", "deviations", "ambiguous", "stage"]
    assert {"id", "explains", "remaining", "exact", "arithmetic"} <= set(parts["deviation"]["required"])
    assert parts["report"]["properties"]["stage"]["enum"] == [*STAGES, None]
    assert parts["deviation"]["properties"]["stage"]["enum"] == list(STAGES)
    assert list(parts["count"]["properties"]) == ["compared", "different", "first"]


def damaged(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The document with a key more, or a key less, in each of its objects that has keys of its own."""
    free = ("outputs", "against_te", "causes", "classes", "explains", "header", "environment", "rules", "refused")

    def walk(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict):
            if not at or at[-1] not in free:
                yield at
            for key, inner in value.items():
                yield from walk(inner, (*at, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value[:2]):
                yield from walk(inner, (*at, index))

    def changed(at: tuple[Any, ...], change: Any) -> Any:
        found = copy.deepcopy(document)
        place = found
        for key in at:
            place = place[key]
        change(place)
        return found

    optional = ("error", "against_te", "preset", "together_with")
    for at in walk(document, ()):
        yield f"{at} and more", changed(at, lambda place: place.update(more=1))
        place = document
        for key in at:
            place = place[key]
        for key in place:
            if key not in optional:
                yield f"{at} without {key}", changed(at, lambda place, key=key: place.pop(key))


def test_the_schemas_refuse_what_is_not_as_published() -> None:
    for name, document in (
        ("check", objects()["together"]),
        ("conformance", as_json(hostile()[0])),
        ("replay", replay_report.as_json(replayed())),
    ):
        assert errors(name, document) == []
        accepted = [what for what, other in damaged(document) if not errors(name, other)]
        assert not accepted, f"{name}: {accepted}"
    assert errors("check", objects()["conforms"] | {"verdict": "fine"})


def replayed() -> Replay:
    """A judged bundle: one backend that is complete, one that was cut short."""
    result, _ = hostile()
    end = {"state": "stopped", "reason": "the machine was taken away"}
    units = [
        UnitResult(SimpleNamespace(kind="backend", name=one.name, info={"preset": "te"}, end=end), one, missing)  # type: ignore[arg-type]
        for one, missing in zip(result.backends, ((), (), ("normal/9",), (), ()), strict=True)
    ]
    header = {"suite": "quick", "environment": {}, "date": "2026-11-30"}
    bundle = SimpleNamespace(header=header, path=Path("b200.nvfp4"), root=None)
    return Replay(bundle, units, 0.5)  # type: ignore[arg-type]


# ---- JUnit -------------------------------------------------------------------------------------------------


def junit_errors(text: str) -> list[str]:
    xmlschema = pytest.importorskip("xmlschema")
    judge = xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd")))
    return [error.reason for error in judge.iter_errors(xmlschema.XMLResource(io.BytesIO(text.encode())))]


def test_junit_of_a_run_is_as_viewers_expect() -> None:
    text = as_junit(hostile()[0])
    assert junit_errors(text) == []
    assert 'tests="16" failures="4" errors="1"' in text.splitlines()[1]
    assert text.count('<skipped message="refused: needs sm_100') == 2


def test_junit_of_checks_is_as_viewers_expect() -> None:
    found = checked(good=dumped(), bad=dumped(element_rounding="truncate"), lost="no such file")
    text = found.as_junit()
    assert junit_errors(text) == []
    assert 'tests="3" failures="1" errors="1"' in text.splitlines()[1]
    assert "first at rounding" in text and "element.truncate explains every byte" in text and "no such file" in text
    assert found.exit_code == 2 and Checks().exit_code == 2
    assert junit_errors(checks_as_junit([(HOSTILE, HOSTILE, Report(NOT_JUDGED, error=HOSTILE))])) == []


def test_the_junit_schema_refuses_what_viewers_would_not_read() -> None:
    text = as_junit(hostile()[0])
    for right, wrong in (
        ('time="1.500"', 'time="soon"'),
        ('tests="16"', 'tests="some"'),
        ("<properties>", "<properties/><x>"),
    ):
        assert right in text
        broken = text.replace(right, wrong, 1).replace("</properties>", "</x>", 1 if "<x>" in wrong else 0)
        assert junit_errors(broken), wrong


# ---- places ------------------------------------------------------------------------------------------------


def faulty(shape: tuple[int, int], seed: int = 0) -> tuple[Side, Array, Array]:
    """A side with planted faults of codes and scale bytes, and where they are."""
    rng = np.random.default_rng(seed)
    dump = dumped(_cast(rng.standard_normal(shape).astype(np.float32), "bf16"))
    codes, scales = rng.random(shape) < 0.02, rng.random((shape[0], shape[1] // 16)) < 0.03
    flips = np.where(codes, rng.integers(1, 16, shape), 0).astype(np.uint8)
    packed = dump.packed ^ (flips[:, 0::2] | flips[:, 1::2] << 4)
    changed = np.where(scales, dump.scales ^ rng.integers(1, 256, scales.shape).astype(np.uint8), dump.scales)
    dump = dataclasses.replace(dump, packed=packed, scales=changed.astype(np.uint8))
    return Side(dump, "", dump.resolve_arithmetic()), codes, scales


@pytest.mark.parametrize("shape", [(5, 48), (48, 96), (300, 2608), (1700, 176)])
def test_a_survey_counts_every_difference_where_it_is(shape: tuple[int, int]) -> None:
    side, codes, scales = faulty(shape)
    sheets = places.survey(side)
    assert set(sheets) == {name for name, wrong in (("codes", codes), ("scales", scales)) if wrong.any()}
    for name, wrong in (("codes", codes), ("scales", scales)):
        if name not in sheets:
            continue
        sheet = sheets[name]
        assert sheet.different == wrong.sum() == sheet.map.sum() == sheet.fold.sum() == sheet.pairs.sum()
        assert sheet.by_row.tolist() == wrong.sum(1).tolist()
        (height, width), fold = sheet.cell, sheet.fold.shape
        for row, column in np.ndindex(sheet.map.shape):
            cell = wrong[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert sheet.map[row, column] == cell.sum()
        for row, column in np.ndindex(fold):
            assert sheet.fold[row, column] == wrong[row :: fold[0], column :: fold[1]].sum()
        grids = list(sheet.grids())
        assert (grids[0].compared.sum(), grids[0].counts.shape) == (wrong.size, sheet.map.shape)
        assert all(grid.compared.sum() == wrong.size for grid in grids) and (grids[0].compared >= grids[0].counts).all()
        assert sheet.map.shape[0] <= places.ROWS and sheet.map.shape[1] <= places.COLUMNS
        assert len(sheet.places) == min(16, wrong.sum()) and all(wrong[place] for place in sheet.places)
        assert sheet.places[:5] == [tuple(place) for place in np.argwhere(wrong)[:5]]


def test_histograms_hold_every_difference_once() -> None:
    side, codes, scales = faulty((64, 128))
    sheets = places.survey(side)
    grid = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7])
    found, expected = places.unpacked(side.found("packed"))[codes], places.unpacked(side.expected.packed)[codes]
    wanted: dict[int, int] = {}
    for ours, theirs in zip(grid[expected], grid[found], strict=True):
        step = abs(theirs) if ours == 0 else (theirs - ours) * np.sign(ours)
        wanted[int(step)] = wanted.get(int(step), 0) + 1
    shown = {bar.label.replace("−", "-"): bar.count for bar in sheets["codes"].bars()}
    for label, low, high in (("-8", -8, -8), ("-1", -1, -1), ("0", 0, 0), ("+2", 2, 2), ("+9 to 16", 9, 16)):
        assert shown.get(label, 0) == sum(n for step, n in wanted.items() if low <= step <= high)
    assert sum(shown.values()) == codes.sum() and sum(bar.count for bar in sheets["scales"].bars()) == scales.sum()
    right = codes & ~np.repeat(scales, 16, axis=1)
    assert sum(bar.given or 0 for bar in sheets["codes"].bars()) == right.sum() < codes.sum()
    pairs = sheets["codes"].commonest()
    assert pairs[0][2] == max(np.bincount(expected.astype(int) * 16 + found)) and pairs == sorted(
        pairs, key=lambda p: -p[2]
    )


def test_a_step_of_the_e4m3_histogram_is_a_code_with_its_sign() -> None:
    dump = dumped()
    scales = dump.scales.copy()
    scales[0, 0], scales[1, 1], scales[2, 2] = scales[0, 0] + 1, scales[1, 1] - 3, scales[2, 2] | 0x80
    side = Side(dataclasses.replace(dump, scales=scales), "", nv.arithmetic("te"))
    bars = {bar.label: bar.count for bar in places.survey(side)["scales"].bars()}
    assert bars == {"−65 and more": 1, "−3": 1, "+1": 1}


def test_a_fault_of_a_lane_a_row_and_a_tile_show_as_such() -> None:
    dump = dumped(_cast(_normal(3, (256, 1024)), "bf16"))
    faults = np.zeros((256, 1024), bool)
    faults[:, 5::16] = faults[77] = faults[160:176, 320:336] = True
    packed = dump.packed ^ (faults[:, 0::2] * np.uint8(1) | faults[:, 1::2] * np.uint8(16))
    dump = dataclasses.replace(dump, packed=packed)
    side = Side(dump, "", nv.arithmetic("te"))
    whole, near, folded = _direction(side, places.survey(side), Diagnosis(), "", 4).pictures
    assert "by row: 77 (1,024)" in whole.summary and "by lane: 5 (16,384)" in folded.summary
    assert near.data["found"] != near.data["expected"] and near.data["origin"] == [0, 0]
    sheet = places.survey(side)["codes"]
    assert sheet.fold[:, 5].min() > 10 * np.delete(sheet.fold, 5, axis=1).max()
    share = sheet.map / next(sheet.grids()).compared
    assert share.max() == share[160 // sheet.cell[0], 320 // sheet.cell[1]]


@pytest.mark.parametrize("place", [(0, 0), (40, 100), (63, 255), (31, 130)])
def test_a_close_up_holds_its_place_and_starts_at_a_tile(place: tuple[int, int]) -> None:
    side, codes, _ = faulty((64, 256))
    near = places.close_up(side, place)
    (top, left), (rows, columns) = near.origin, near.counts.shape
    assert top % 16 == left % 16 == 0 and (rows, columns) == places.CLOSE
    assert top <= place[0] < top + rows and left <= place[1] < left + columns
    assert (near.counts == codes[top : top + rows, left : left + columns]).all()
    found = places.unpacked(side.found("packed"))[top : top + rows, left : left + columns]
    assert near.found == "".join(f"{code:X}" for code in found.reshape(-1))


def test_pictures_are_pngs_that_show_every_cell() -> None:
    images = pytest.importorskip("PIL.Image")
    side, _, _ = faulty((300, 2608))
    for sheet in places.survey(side).values():
        for grid in (*sheet.grids(), places.close_up(side, sheet.places[0])):
            data = base64.b64decode(drawing.picture(grid).removeprefix("data:image/png;base64,"))
            image = images.open(io.BytesIO(data))
            image.verify()
            opacity = np.asarray(images.open(io.BytesIO(data)).convert("RGBA"))[..., 3]
            assert opacity.shape == grid.counts.shape
            assert ((opacity > 0) == (grid.counts > 0)).all() and opacity.max() == 255 or grid.steps is not None
            order = np.argsort((grid.counts / grid.compared).reshape(-1))
            assert grid.steps is not None or (np.diff(opacity.reshape(-1)[order].astype(int)) >= 0).all()


def test_sparse_counts_come_back() -> None:
    counts = np.array([[0, 0, 5, 0], [7, 1, 0, 0]])
    assert _sparse(counts) == [-2, 5, -1, 7, 1, -2]


# ---- elements ----------------------------------------------------------------------------------------------


def elements(dump: Dump) -> Any:
    side = Side(dump, "", dump.resolve_arithmetic())
    return examples(side, places.survey(side), of_sides([side]))


def test_elements_show_every_intermediate_and_name_the_deviation() -> None:
    found = elements(dumped(element_rounding="truncate"))
    assert len(found) == 16 and all(one.causes == ("element.truncate",) for one in found)
    names = [step.name for step in found[0].steps]
    assert names[0] == "x" and "encode scale e" in names and "code, E2M1" in names and found[0].differs == "code"


def test_of_deviations_together_each_element_names_its_own() -> None:
    (case,) = _find(["e4m3-tie/amax-pi.f32"])
    dump = dumped(case.x, block_scale="divide-by-6", element_rounding="truncate")
    assert [one.id for one in check(dump).deviations] == ["block-scale.divide-by-6", "element.truncate"]
    for one in elements(dump):
        wrong = {"element.truncate"} if one.differs == "code" else {"block-scale.divide-by-6"}
        assert set(one.causes) == wrong or one.differs == "scale byte and code"
    assert {cause for one in elements(dump) for cause in one.causes} == {"block-scale.divide-by-6", "element.truncate"}


def test_what_no_deviation_gives_is_said_to_have_none() -> None:
    dump = dumped(element_rounding="truncate")
    packed = dump.packed.copy()
    packed[0, :3] ^= 0x44
    found = elements(dataclasses.replace(dump, packed=packed))
    assert found[0].unexplained and found[0].causes == () and found[-1].causes == ("element.truncate",)


def test_scale_bytes_alone_are_elements_too() -> None:
    dump = dumped()
    scales = dump.scales.copy()
    scales[3, 2] += 1
    (one,) = elements(dataclasses.replace(dump, scales=scales))
    assert one.place == (3, 32) and one.differs == "scale byte"


# ---- the page ----------------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """The document, once a parser that forgives nothing has read it."""
    html5lib = pytest.importorskip("html5lib")
    parser = html5lib.HTMLParser(html5lib.getTreeBuilder("etree"), strict=True, namespaceHTMLElements=False)
    return parser.parse(text)


def structure(text: str) -> Any:
    """The document, once everything that holds for every page has been seen to hold."""
    root = parsed(text)
    identifiers = [one.get("id") for one in root.iter() if one.get("id")]
    assert len(identifiers) == len(set(identifiers))
    for one in root.iter():
        for name in ("src", "href", "action", "srcset", "data", "poster", "background"):
            value = one.get(name, "#")
            assert value.startswith(("#", "data:image/png;base64,")), f"{name}={value}"
            assert not value.startswith("#") or len(value) == 1 or value[1:] in identifiers
        assert not [name for name in one.attrib if name.startswith("on")]
        for name in ("aria-labelledby", "for"):
            assert one.get(name) is None or one.get(name) in identifiers
    scripts = list(root.iter("script"))
    assert [one.get("type") for one in scripts] == ["application/json", None]
    policy = next(one.get("content") for one in root.iter("meta") if one.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(scripts[1].text.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert root.get("lang") == "en" and (root.findtext("head/title") or "").strip()
    assert len(list(root.iter("h1"))) == len(list(root.iter("main"))) == 1
    levels = [int(one.tag[1]) for one in root.iter() if re.fullmatch("h[1-6]", str(one.tag))]
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    labels = {one.get("for") for one in root.iter("label")}
    assert all(one.get("id") in labels for one in root.iter("select"))
    assert all((one.get("alt") or "").strip() for one in root.iter("img"))
    assert all(one.get("scope") in ("col", "row") for one in root.iter("th"))
    grids = json.loads(scripts[0].text)
    figures = [one for one in root.iter("figure")]
    assert [one.get("data-grid") for one in figures] == [str(number) for number in range(len(grids))]
    for figure, grid in zip(figures, grids, strict=True):
        cells = len(grid["found"]) if "found" in grid else sum(-n if n < 0 else 1 for n in grid["counts"])
        assert cells == grid["rows"] * grid["columns"]
        image = next(figure.iter("img"))
        assert (image.get("width"), image.get("height")) == (str(grid["columns"]), str(grid["rows"]))
    return root


def words(element: Any) -> str:
    return " ".join(" ".join(element.itertext()).split())


def dumps_of_every_kind() -> dict[str, Dump | str]:
    return {
        "conforms.npz": dumped(both=True),
        "differs.npz": dumped(both=True, element_rounding="truncate"),
        "ambiguous.npz": dumped(X300, block_scale="divide-by-6"),
        "no-input.npz": dataclasses.replace(dumped(), x=None),
        "layout.npz": dataclasses.replace(dumped(), scales=np.zeros((3, 5), np.uint8)),
        "gemm.npz": gemm(),
        "stochastic.npz": dataclasses.replace(dumped(element_rounding="truncate"), rounding="stochastic"),
        "rows.npz": from_tensor(nv.quantize(X, arithmetic=nv.arithmetic("te", row_scaled=True)), X),
        HOSTILE: "it cannot be read: " + HOSTILE,
    }


def test_a_page_of_checks_has_verdicts_deviations_places_and_evidence() -> None:
    root = structure(as_html(every_check()))
    rows = {words(row[0]): words(row) for row in root.find(".//section[@id='tensors']/div/table/tbody")}
    assert "✓ conforms" in rows["conforms.npz"] and "? not judged" in rows["no-input.npz"]
    assert "differs rounding element.truncate" in rows["differs.npz"] and "differs" in rows["gemm.npz"]
    assert any("alert(1)" in row and "not judged" in row for row in rows.values())
    articles = {words(one.find(".//h3")): words(one) for one in root.iter("article") if one.find(".//h3") is not None}
    assert "Reproduce nv.arithmetic(\"te\", element_rounding='truncate')" in articles["differs.npz"]
    assert "Where the columnwise output differs" in articles["differs.npz"] and "scale right" in articles["differs.npz"]
    assert "cannot tell the following apart" in articles["ambiguous.npz"]
    assert "no compact layout" in articles["layout.npz"] and "alpha form none" in articles["gemm.npz"]
    rules_shown = {words(row[0]): words(row) for row in root.findall(".//table[@class='rules']/tbody/tr")}
    assert "? in doubt" in rules_shown["E2M1-RNE"] and "NVIDIA" in rules_shown["E2M1-RNE"]
    assert "in doubt" not in rules_shown["RHT-MATRIX"] and "te-kernels-h200" in rules_shown["RHT-MATRIX"]


def test_a_page_of_a_run_has_backends_families_cases_and_rules_by_backend() -> None:
    root = structure(hostile_page())
    backends = [words(row) for row in root.find(".//section[@id='backends']//tbody")]
    assert "✗ departs te 4" in backends[0] and "! failed" in backends[1] and "NaN in the input" in backends[1]
    assert "refused 1 case: needs sm_100" in backends[2] and "refused" not in backends[0]
    assert "– not run refused 1 case: needs sm_100" in backends[3] and "– not run" in backends[4]
    assert "– refused" in words(root.find(".//section[@id='families']"))
    assert "refused" not in words(root.find(".//section[@id='cases']//tbody"))
    assert "order of operations" in words(root.find(".//section[@id='cases']"))
    names = [words(one) for one in root.findall(".//article//h3")]
    assert "<b>old</b>: scaled/1" in names and "peer: nan/1" in names and not any("given" in name for name in names)
    rows = {words(row[0]): words(row) for row in root.findall(".//table[@class='rules']/tbody/tr")}
    assert (
        "in doubt" in rows["SCALE-BLOCK"]
        and "<b>old</b>" in rows["SCALE-BLOCK"]
        and "✓ conforms" in rows["TE-REFERENCE"]
    )
    assert "8" in words(root.find(".//section[@id='sweeps']"))
    options = {select.get("id"): [words(option) for option in select] for select in root.iter("select")}
    assert options["filter-backend"][1:3] == ["<b>old</b>", "peer"]
    assert options["filter-family"][1:4] == ["normal", "scaled", "nan"]
    assert {"conforms", "departs", "failed", "not run"} <= set(options["filter-verdict"])


def test_rows_have_what_the_filters_ask_for() -> None:
    root = structure(hostile_page())
    tokens = {
        select.get("id", "").removeprefix("filter-"): {words(option): option.get("value") for option in select}
        for select in root.iter("select")
    }
    for row in root.find(".//section[@id='families']//tbody"):
        backend, family, verdict = (words(cell) for cell in list(row)[:3])
        assert row.get("data-backend") == tokens["backend"][backend]
        assert row.get("data-family") == tokens["family"][family]
        assert row.get("data-verdict") == tokens["verdict"][verdict[2:]]
    style = next(root.iter("style")).text
    for name, options in tokens.items():
        for token in filter(None, options.values()):
            rule = f':root:has(#filter-{name} > [value="{token}"]:checked) [data-{name}]:not([data-{name}~="{token}"])'
            assert rule in style


def test_nothing_that_a_file_says_becomes_markup() -> None:
    for text in (hostile_page(), as_html(every_check())):
        assert "<script>alert" not in text and "<img src=x" not in text and "<b>old" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert not re.search("[\x00-\x08\x1b\ud800-\udfff]", text)
        text.encode()


def test_the_page_says_when_it_was_written_and_is_otherwise_the_same() -> None:
    from datetime import UTC, datetime

    made = datetime(2026, 11, 30, 9, 5, tzinfo=UTC)
    first = as_html(every_check(), made=made)
    assert first == as_html(checked(**dumps_of_every_kind()), made=made) and "2026-11-30 09:05 UTC" in first


def test_only_so_many_tensors_are_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.report.checks._DETAILED", 2)
    bad = dumped(element_rounding="truncate")
    found = checked(a=bad, b=dumped(), c=bad, d=bad, e=bad)
    assert found.omitted == 2 and [bool(one.directions) for one in found.tensors] == [True, False, True, False, False]
    assert "Of 2 more tensors" in words(structure(as_html(found)))


def test_ten_million_elements_are_a_small_page() -> None:
    text = as_html(checked(big=large()))
    structure(text)
    assert len(text.encode()) < 200_000


@functools.cache
def large() -> Dump:
    x = np.random.default_rng(0).standard_normal((2560, 4096), np.float32).astype(ml_dtypes.bfloat16)
    return dumped(x, encode_scale="quotient")


def test_pages_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    write_html(str(path), checked(a=dumped()))
    before = path.read_bytes()
    assert before.startswith(b"<!DOCTYPE html>") and b"\r" not in before
    monkeypatch.setattr(page, "_template", lambda name: "{{ page.nothing_of_the_kind }}")
    with pytest.raises(Exception, match="nothing_of_the_kind"):
        write_html(str(path), checked(a=dumped()))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="folder"):
        page.require_html(str(tmp_path / "none" / "r.html"))


def test_without_jinja_the_page_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"pip install 'nvfp4ref\[report\]'"):
        page.require_html("r.html")
    assert errors("conformance", as_json(hostile()[0])) == [], "the other reports need no Jinja2"


def test_the_text_says_what_was_refused() -> None:
    text = as_text(hostile()[0])
    assert "not run: refused 1 case: needs sm_100" in text and "of 3 backends that ran conform" in text


def test_an_empty_page_is_a_page() -> None:
    structure(as_html(Checks()))
    root = structure(as_html(run.SuiteResult("quick", [], [], 0.0, run.environment())))
    assert "not run" in words(root.find(".//header"))


# ---- what looks on -----------------------------------------------------------------------------------------


def test_what_looks_on_counts_by_rule_and_keeps_the_smallest_of_each_family() -> None:
    result, seen = watched(Fake("old", does="te-2.14"), Fake("peer", "te-reference", "te-reference"), Fake("good"))
    packed = result.backends[0].totals()["packed"]
    assert seen.counts["E2M1-RNE"]["old"] == dataclasses.replace(
        seen.counts["E2M1-RNE"]["old"], compared=packed.compared
    )
    assert seen.counts["E2M1-RNE"]["old"].different == packed.different > 0 == seen.counts["E2M1-RNE"]["good"].different
    assert seen.counts["AMAX-SUPPLIED"]["old"].compared == 1 and "peer" not in seen.counts["E2M1-RNE"]
    kept = [(one.case.id, one.preset) for one in seen.kept("peer", "te")]
    assert kept == [("nan/1", "te")]
    assert all(one.case.amax is None for one in seen.kept("old", "te")) and not seen.kept("good", "te")
    rows = rules.rows(seen.counts)
    assert [row.verdict for row in rows] == sorted(
        (row.verdict for row in rows), key=("in doubt", "conforms", "not tested").index
    )
    assert seen.totals()["E2M1-RNE"].compared == 2 * packed.compared


@pytest.mark.parametrize(
    "answer",
    [
        {"packed": np.zeros(7), "scales": np.zeros((3, 5), np.float32), "amax": np.zeros(2, complex)},
        {"packed": [[1, 2]], "scales": "words"},
        {},
    ],
)
def test_answers_of_any_kind_are_looked_at_and_shown(answer: dict[str, Any]) -> None:
    result, seen = watched(Fake("odd", answer=answer))
    assert result.backends[0].status in (run.DEPARTS, run.FAILED)
    structure(as_html(result, seen))


# ---- in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    write_text(str(folder / "run.html"), hostile_page())
    write_html(str(folder / "checks.html"), every_check())
    write_html(str(folder / "large.html"), checked(**{"large.npz": large()}))
    return folder


def opened(browser: Any, path: Path, **how: Any) -> tuple[Any, list[str]]:
    """A page, and what its console says."""
    view = browser.new_context(viewport={"width": 1280, "height": 900}, **how).new_page()
    said: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
    view.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    view.goto(path.as_uri())
    return view, said


@pytest.mark.parametrize("name", ["run", "checks", "large"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_at_once_and_without_a_complaint(name: str, scheme: str, browser: Any, pages: Path) -> None:
    view, said = opened(browser, pages / f"{name}.html", color_scheme=scheme)
    assert said == []
    ready = view.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < ready < 2000
    ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    for width in (320, 1280):
        view.set_viewport_size({"width": width, "height": 900})
        assert view.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling of the whole page"


@pytest.mark.parametrize("scripts", [True, False])
def test_filters_work_with_and_without_scripts(scripts: bool, browser: Any, pages: Path) -> None:
    view, said = opened(browser, pages / "run.html", java_script_enabled=scripts)

    def shown(section: str) -> list[str]:
        rows = view.locator(f"#{section} tbody tr").all()
        return [row.inner_text() for row in rows if row.is_visible()]

    families, backends = shown("families"), shown("backends")
    view.select_option("#filter-backend", label="peer")
    assert len(shown("backends")) == 1 and 0 < len(shown("families")) < len(families)
    assert all(row.startswith("peer") for row in shown("families")) and not shown("cases")
    view.select_option("#filter-family", label="nan")
    assert len(shown("families")) == 1 and "nan" in shown("families")[0]
    titles = [one.inner_text() for one in view.locator("#tensors h3").all() if one.is_visible()]
    assert titles == ["peer: nan/1"]
    if scripts:
        assert view.locator("#shown").inner_text().endswith(" rows") and not view.locator(
            "#shown"
        ).inner_text().startswith("0")
    view.click("text=Show all")
    view.wait_for_function("document.querySelector('#filter-family').value === ''") if scripts else None
    assert (shown("families"), shown("backends")) == (families, backends)
    view.select_option("#filter-verdict", label="departs")
    assert all("departs" in row for row in shown("families") + shown("cases") + shown("backends"))
    assert said == []


def test_a_heat_map_is_read_out_by_pointer_and_by_keys(browser: Any, pages: Path) -> None:
    view, said = opened(browser, pages / "large.html")
    dump = large()
    wrong = places.unpacked(dump.packed) != places.unpacked(nv.quantize(dump.x).packed)
    map_, near, folded = (view.locator("figure.map").nth(number) for number in range(3))
    map_.locator(".grid").focus()
    height, width = (int(n) for n in re.findall(r"(\d+)×(\d+) elements", map_.locator("figcaption").inner_text())[0])
    counted = f"{wrong[:height, :width].sum()} of {height * width:,} codes differ"
    assert map_.locator(".readout").inner_text() == f"rows 0 to {height - 1}, columns 0 to {width - 1}: {counted}"
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        view.keyboard.press(key)
    cell = wrong[height : 2 * height, 2 * width : 3 * width].sum()
    assert map_.locator(".readout").inner_text().startswith(f"rows {height} to {2 * height - 1}, columns {2 * width}")
    assert f": {cell} of" in map_.locator(".readout").inner_text()
    view.keyboard.press("End")
    assert "columns 4,064 to 4,095" in map_.locator(".readout").inner_text()
    row, column = np.argwhere(wrong)[0]
    top, left = json.loads(view.locator("#grids").text_content())[1]["origin"]
    box = near.locator("img").bounding_box()
    near.locator("img").scroll_into_view_if_needed()
    box = near.locator("img").bounding_box()
    view.mouse.move(
        box["x"] + (column - left + 0.5) * box["width"] / 128, box["y"] + (row - top + 0.5) * box["height"] / 32
    )
    said_there = near.locator(".readout").inner_text()
    assert said_there.startswith(f"row {row}, column {column:,} (block {column // 16}, lane {column % 16}): found 0x")
    folded.locator(".grid").focus()
    assert f"row 0 of the tiles, lane 0: {wrong[::16, ::16].sum()} of" in folded.locator(".readout").inner_text()
    assert said == []


def test_without_scripts_everything_that_matters_is_there(browser: Any, pages: Path) -> None:
    view, _ = opened(browser, pages / "large.html", java_script_enabled=False)
    assert view.locator(".deviation").count() > 0 and view.locator("figure.map img").first.is_visible()
    assert "encode-scale" in view.locator(".lead").inner_text()
    summary = view.locator(".examples summary").nth(1)
    summary.click()
    assert "scaled element" in view.locator(".examples details").nth(1).inner_text()


def test_paper_shows_what_is_folded_up(browser: Any, pages: Path) -> None:
    view, _ = opened(browser, pages / "large.html")
    view.emulate_media(media="print")
    assert view.evaluate("document.querySelector('nav').getClientRects().length") == 0
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    view.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not view.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    assert view.pdf(format="A4").startswith(b"%PDF")
