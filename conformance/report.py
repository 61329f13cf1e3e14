"""A suite's result as text, JSON and JUnit XML."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

from conformance.count import Count
from conformance.run import BASELINE, CONFORMS, FAILED, NOT_RUN, BackendResult, CaseResult, SuiteResult
from nvfp4ref.container import blame, foreign, replacing

_SHOWN = 5  # departing cases of a backend that the text lists

# ---- text --------------------------------------------------------------------------------------------------


def as_text(result: SuiteResult) -> str:
    """The report for people: a line a backend, what departs from ``te``, the first departing cases."""
    lines = [
        f"suite {result.suite}, nvfp4ref {result.environment.get('nvfp4ref', '?')}, {result.seconds:.0f} s",
        "",
    ]
    width = max((len(one.name) for one in result.backends), default=0)
    for one in result.backends:
        lines += _backend_lines(one, width)
    for sweep in result.sweeps:
        lines += ["", str(sweep)]
    ran = [one for one in result.backends if one.status != NOT_RUN]
    good = sum(one.status == CONFORMS for one in ran)
    others = f"{len(result.backends) - len(ran)} not run"
    lines += ["", f"{good} of {len(ran)} backends that ran conform to the preset they declare; {others}"]
    return "\n".join(lines)


def _backend_lines(one: BackendResult, width: int) -> list[str]:
    indent = " " * (width + 2)
    if one.status == NOT_RUN:
        return [f"{one.name:<{width}}  not run: {one.reason or 'the suite has no case that it can serve'}"]
    verdict = f"{_STATUS[one.status]} {one.preset}"
    lines = [
        f"{one.name:<{width}}  {verdict}: {len(one.cases)} cases, {_sum(one.totals())}; {one.seconds:.1f} s",
        f"{indent}{one.version}",
    ]
    baseline = one.totals(baseline=True)
    if baseline:
        lines += [f"{indent}{line}" for line in _departure(one, baseline)]
    bad = [case for case in one.cases if case.status != CONFORMS]
    lines += [f"{indent}{line}" for case in bad[:_SHOWN] for line in _case_lines(case)]
    if len(bad) > _SHOWN:
        lines.append(f"{indent}… and {len(bad) - _SHOWN} cases more; --json has them all")
    return lines


_STATUS = {CONFORMS: "conforms to", "departs": "DEPARTS from", FAILED: "FAILED under"}


def _sum(totals: dict[str, Count]) -> str:
    compared = sum(one.compared for one in totals.values())
    different = sum(one.different for one in totals.values())
    return f"{different:,} of {compared:,} items differ"


def _departure(one: BackendResult, baseline: dict[str, Count]) -> list[str]:
    parts = [
        f"{name} {count.different:,} of {count.compared:,}"
        for name, count in baseline.items()
        if count.different
    ]
    if not parts:
        return [f"against {BASELINE}: no difference in these cases"]
    number = sum(any(count.different for count in case.baseline.values()) for case in one.cases)
    causes = ", ".join(f"{cause} {different:,}" for cause, different in one.causes().items())
    return [f"departs from {BASELINE} in {number} cases: {', '.join(parts)}", f"  by cause: {causes}"]


def _case_lines(case: CaseResult) -> list[str]:
    if case.error is not None:
        return [f"{case.id}: {case.error}"]
    return [f"{case.id}: {name}: {count}" for name, count in case.outputs.items() if count.different]


# ---- JSON --------------------------------------------------------------------------------------------------


def as_json(result: SuiteResult) -> dict[str, Any]:
    """The report for programs."""
    return {
        "format": "nvfp4-conformance",
        "version": 1,
        "suite": result.suite,
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 3),
        "environment": result.environment,
        "backends": [_backend_json(one) for one in result.backends],
        "sweeps": [sweep.to_json() for sweep in result.sweeps],
    }


def _backend_json(one: BackendResult) -> dict[str, Any]:
    return {
        "name": one.name,
        "version": one.version,
        "preset": one.preset,
        "status": one.status,
        "reason": one.reason,
        "seconds": round(one.seconds, 3),
        "unserved": one.unserved,
        "outputs": _counts(one.totals()),
        "against_te": _counts(one.totals(baseline=True)),
        "causes": one.causes(),
        "cases": [_case_json(case) for case in one.cases],
    }


def _case_json(case: CaseResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": case.id,
        "status": case.status,
        "hunts": case.hunts,
        "outputs": _counts(case.outputs),
    }
    if case.error is not None:
        found["error"] = case.error
    departing = {name: count for name, count in case.baseline.items() if count.different}
    if departing:
        found["against_te"] = _counts(departing)
    return found


def _counts(counts: dict[str, Count]) -> dict[str, Any]:
    return {name: count.to_json() for name, count in counts.items()}


# ---- JUnit -------------------------------------------------------------------------------------------------


def as_junit(result: SuiteResult) -> str:
    """The report for continuous integration: a suite a backend, a case a case; not run is skipped."""
    root = ElementTree.Element(
        "testsuites", name=f"nvfp4 conformance {result.suite}", time=f"{result.seconds:.3f}"
    )
    for one in result.backends:
        _junit_suite(root, one)
    if result.sweeps:
        suite = _suite(root, "sweeps", len(result.sweeps), result.seconds)
        for sweep in result.sweeps:
            case = ElementTree.SubElement(
                suite, "testcase", classname="sweeps", name=_xml(sweep.name), time=f"{sweep.seconds:.3f}"
            )
            if sweep.reason is not None:
                ElementTree.SubElement(case, "skipped", message=_xml(sweep.reason))
            elif sweep.total.different:
                ElementTree.SubElement(case, "failure", message=_xml(str(sweep.total))).text = _xml(
                    str(sweep)
                )
        _tally(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, name: str, tests: int, seconds: float) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=_xml(name), tests=str(tests), time=f"{seconds:.3f}")


def _junit_suite(root: ElementTree.Element, one: BackendResult) -> None:
    suite = _suite(root, one.name, max(len(one.cases), 1), one.seconds)
    if one.status == NOT_RUN:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(one.name), name="availability")
        ElementTree.SubElement(case, "skipped", message=_xml(one.reason or "no case that it can serve"))
    for found in one.cases:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_xml(f"{one.name}.{found.family}"),
            name=_xml(found.id),
            time=f"{found.seconds:.3f}",
        )
        if found.status == FAILED:
            ElementTree.SubElement(case, "error", message=_xml(found.error or ""))
        elif found.status != CONFORMS:
            text = "\n".join([*_case_lines(found), f"hunts: {found.hunts}"])
            ElementTree.SubElement(case, "failure", message=_xml(f"departs from {one.preset}")).text = _xml(
                text
            )
    _tally(suite)


def _tally(suite: ElementTree.Element) -> None:
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))


#: What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


# ---- files -------------------------------------------------------------------------------------------------


def write_json(path: str, value: Any) -> None:
    """Write a JSON file, completely or not at all.  Raises ValueError."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all.  Raises ValueError."""
    with blame(path), foreign("cannot be written"), replacing(path) as file:
        file.write(text.encode())
