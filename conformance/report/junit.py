"""Reports as JUnit XML, the form that continuous integration shows: a suite a backend or file, a test a case or tensor.

Elements and attributes are those that the usual viewers share; ``tests/junit.xsd`` writes them down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from conformance import compare
from conformance.count import Count
from conformance.exhaustive import Sweep
from conformance.report.text import case_lines, why_not_run
from conformance.run import CONFORMS, FAILED, NOT_RUN, REFUSED, BackendResult, CaseResult, SuiteResult
from nvfp4ref.container import counted

#: What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class _Test:
    """One test; ``outcome`` is "passed" or the name of the element that says why not, with message, type and text."""

    classname: str
    name: str
    seconds: float = 0.0
    outcome: str = "passed"
    message: str = ""
    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class _Suite:
    name: str
    seconds: float
    tests: list[_Test]
    properties: Mapping[str, str] = field(default_factory=dict)


def as_junit(result: SuiteResult) -> str:
    """The report of a run: a suite a backend, a test a case; what was not run is skipped."""
    suites = [_of_backend(one, result.environment) for one in result.backends]
    if result.sweeps:
        suites.append(_Suite("sweeps", sum(one.seconds for one in result.sweeps), list(map(_of_sweep, result.sweeps))))
    return _document(f"nvfp4 conformance {result.suite}", result.seconds, suites)


def checks_as_junit(reports: Iterable[tuple[str, str, compare.Report]]) -> str:
    """The report of ``nvfp4 check``: a suite a file, a test a tensor; what could not be judged is an error.

    Args:
        reports: (file, name of the tensor in it or "", verdict), in order.
    """
    files: dict[str, list[_Test]] = {}
    for path, name, report in reports:
        files.setdefault(path, []).append(_of_report(path, name, report))
    return _document("nvfp4 check", 0.0, [_Suite(path, 0.0, tests) for path, tests in files.items()])


# ---- tests -------------------------------------------------------------------------------------------------


def _of_backend(one: BackendResult, environment: Mapping[str, str]) -> _Suite:
    properties = {"preset": one.preset, "version": one.version, **environment}
    if one.status == NOT_RUN and not one.cases:
        why = _Test(one.name, "availability", 0.0, "skipped", why_not_run(one))
        return _Suite(one.name, one.seconds, [why], properties)
    return _Suite(one.name, one.seconds, [_of_case(one, case) for case in one.cases], properties)


def _of_case(one: BackendResult, case: CaseResult) -> _Test:
    classname = f"{one.name}.{case.family}"
    if case.status == CONFORMS:
        return _Test(classname, case.id, case.seconds)
    if case.status == REFUSED:
        return _Test(classname, case.id, case.seconds, "skipped", f"refused: {case.refused}")
    if case.status == FAILED:
        return _Test(classname, case.id, case.seconds, "error", case.error or "", "failed", case.error or "")
    text = "\n".join([*case_lines(case), f"hunts: {case.hunts}"])
    return _Test(classname, case.id, case.seconds, "failure", f"departs from {one.preset}", "departs", text)


def _of_sweep(sweep: Sweep) -> _Test:
    if sweep.reason is not None:
        return _Test("sweeps", sweep.name, sweep.seconds, "skipped", sweep.reason)
    if sweep.total.different:
        return _Test("sweeps", sweep.name, sweep.seconds, "failure", str(sweep.total), "departs", str(sweep))
    return _Test("sweeps", sweep.name, sweep.seconds)


def _of_report(path: str, name: str, report: compare.Report) -> _Test:
    name = name or path
    if report.verdict == compare.CONFORMS:
        return _Test(path, name)
    if report.verdict == compare.NOT_JUDGED:
        return _Test(path, name, 0.0, "error", report.error or "", report.verdict, str(report))
    total = sum(report.outputs.values(), Count(0, 0))
    items = f"{total.different:,} of {counted(total.compared, 'item')}"
    message = f"differs from {report.arithmetic}, first at {report.stage}: {items}"
    return _Test(path, name, 0.0, "failure", message, report.verdict, str(report))


# ---- XML ---------------------------------------------------------------------------------------------------


def _document(name: str, seconds: float, suites: list[_Suite]) -> str:
    root = ElementTree.Element("testsuites", name=_xml(name), time=f"{seconds:.3f}")
    _tally(root, [test for suite in suites for test in suite.tests], skipped=False)
    for suite in suites:
        root.append(_suite(suite))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(suite: _Suite) -> ElementTree.Element:
    element = ElementTree.Element("testsuite", name=_xml(suite.name), time=f"{suite.seconds:.3f}")
    _tally(element, suite.tests)
    if suite.properties:
        properties = ElementTree.SubElement(element, "properties")
        for name, value in suite.properties.items():
            ElementTree.SubElement(properties, "property", name=_xml(name), value=_xml(value))
    element.extend(_elements(suite.tests))
    return element


def _elements(tests: Iterable[_Test]) -> Iterator[ElementTree.Element]:
    for test in tests:
        name, classname = _xml(test.name), _xml(test.classname)
        element = ElementTree.Element("testcase", classname=classname, name=name, time=f"{test.seconds:.3f}")
        if test.outcome != "passed":
            why = ElementTree.SubElement(element, test.outcome, message=_xml(test.message))
            if test.kind:
                why.set("type", test.kind)
                why.text = _xml(test.text)
        yield element


def _tally(element: ElementTree.Element, tests: list[_Test], skipped: bool = True) -> None:
    """Counts of tests and outcomes; the root has no attribute for what was skipped."""
    element.set("tests", str(len(tests)))
    for attribute, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        if attribute != "skipped" or skipped:
            element.set(attribute, str(sum(test.outcome == outcome for test in tests)))


def _xml(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
