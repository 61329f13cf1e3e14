"""A judged bundle as text, JSON and JUnit XML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conformance import report as reports
from conformance import run
from conformance.capture import machine
from conformance.capture.bundle import printable
from conformance.capture.replay import Replay, UnitResult
from conformance.count import Count
from conformance.report.text import differing
from nvfp4ref.container import agreed, counted

_SHOWN = 5  # departing cases, and examples, that the text lists
_WORD = {run.CONFORMS: "conforms", run.DEPARTS: "DEPARTS", run.FAILED: "FAILED", run.NOT_RUN: "not run"}


def as_text(found: Replay) -> str:
    """The report for people: what ran and how it compared, what the differences are, what is missing and why."""
    lines = [*_head(found), *_ran(found), *_rules(found), *_not_run(found), "", _last(found)]
    return "\n".join(printable(line) for line in lines)


def _head(found: Replay) -> Iterator[str]:
    header = found.bundle.header
    yield f"{found.bundle.path}: suite {header['suite']}, recorded {header.get('date')} on {machine.described(header)}"
    same = header.get("oracle") == machine.oracle()
    here = "" if same else f"; judged by {machine.recorder({'oracle': machine.oracle()})}, another state of it"
    yield f"recorded beside {machine.recorder(header)}{here}; replayed in {found.seconds:.0f} s"
    yield f"root sha256 {found.bundle.root or '(none: this recording is not sealed)'}"


def _ran(found: Replay) -> Iterator[str]:
    for kind in ("backend", "probe"):
        some = [one for one in found.units if one.unit.kind == kind and one.status != run.NOT_RUN]
        width = max((len(one.unit.name) for one in some), default=0)
        if some:
            yield from ("", f"{kind}s")
        for one in some:
            yield from (f"  {line}" for line in _unit(one, width))


def _unit(one: UnitResult, width: int) -> Iterator[str]:
    result = one.result
    total = sum(result.totals().values(), Count(0, 0))
    said = differing(total)
    if one.unit.kind == "backend":
        said = f"{result.preset}, {counted(len(result.cases), 'case')}, {said}"
    word = _WORD[one.status] + (", partly refused" if one.partly_refused else "")
    yield f"{one.unit.name:<{width}}  {word}: {said}; {result.seconds:.1f} s"
    yield from (f"    {line}" for line in _details(one))


def _details(one: UnitResult) -> Iterator[str]:
    result = one.result
    if result.version:
        yield result.version
    recorded = one.unit.info.get("preset", result.preset)
    if one.unit.kind == "backend" and recorded != result.preset:
        yield f"it declared {recorded} when it was recorded"
    yield from _gaps(one)
    yield from _first(list(one.named))
    yield from _first([line for case in result.cases if case.status != run.CONFORMS for line in _case(case)])
    baseline = sum(result.totals(baseline=True).values(), Count(0, 0))
    if baseline.different:
        causes = ", ".join(f"{cause} {n:,}" for cause, n in result.causes().items())
        yield f"departs from {run.BASELINE} in {counted(baseline.different, 'item')}: {causes}"


def _gaps(one: UnitResult) -> Iterator[str]:
    """What of a unit is not there or could not be judged, in sentences."""
    if one.stopped:
        missing = f"; {len(one.missing)} not recorded, from {one.missing[0]} on" if one.missing else ""
        yield f"{one.stopped}{missing}"
    if one.newer:
        shown = ", ".join(one.newer[:_SHOWN]) + (" …" if len(one.newer) > _SHOWN else "")
        yield f"{_newer(len(one.newer))}: {shown}"
    yield from _first([f"not judged: {sentence}" for sentence in one.unjudged])
    for words, number in Counter(one.refused.values()).most_common(_SHOWN):
        yield f"refused, in {counted(number, 'case')}: {words}"
    if one.refused and one.given:
        of = len(one.unit.records)
        given = (f"{name} in {n} of {counted(of, 'case')}" for name, n in one.given.items())
        yield f"outputs that were given: {', '.join(given)}"


def _newer(number: int) -> str:
    what = f"{counted(number, 'case')} {agreed(number, 'is', 'are')} newer than this recording"
    return f"{what}, which is not held to {agreed(number, 'it', 'them')}"


def _first(texts: list[str]) -> Iterator[str]:
    """The first texts, and how many more there are."""
    yield from texts[:_SHOWN]
    if len(texts) > _SHOWN:
        yield f"… and {len(texts) - _SHOWN} more; --json has them all"


def _case(case: run.CaseResult) -> Iterator[str]:
    if case.error is not None:
        yield f"{case.id}: {case.error}"
    for name, count in case.outputs.items():
        if count.different:
            yield f"{case.id}: {name}: {count}"


def _rules(found: Replay) -> Iterator[str]:
    """How many rules were tested, and those that differences speak against, the most by share first."""
    rules = found.rules()
    if not rules:
        return
    bad = {rule: count for rule, count in rules.items() if count.different}
    yield ""
    yield f"rules: {len(rules)} tested, {len(rules) - len(bad)} without any difference in what rests on them"
    worst = sorted(bad, key=lambda rule: -bad[rule].different / bad[rule].compared)
    for rule in worst[:_SHOWN]:
        differ = agreed(bad[rule].different, "differs", "differ")
        yield f"  {rule}: {bad[rule].different:,} of {bad[rule].compared:,} items that rest on it {differ}"
    if len(worst) > _SHOWN:
        yield f"  … and {', '.join(worst[_SHOWN:])}"


def _not_run(found: Replay) -> Iterator[str]:
    """What did not run, those together that have one reason."""
    reasons: dict[str, list[str]] = {}
    for one in found.units:
        if one.status == run.NOT_RUN:
            reason = one.result.reason or "the suite has no case that it can serve"
            reasons.setdefault(reason, []).append(one.unit.name)
    if reasons:
        yield from ("", "not run")
        yield from (f"  {', '.join(names)}: {reason}" for reason, names in reasons.items())


def _last(found: Replay) -> str:
    counted = {status: sum(one.status == status for one in found.units) for status in _WORD}
    said = [f"{n} {status}" for status, n in counted.items()]
    rest = {
        "with cases newer than the recording": sum(bool(one.newer) for one in found.units),
        "partly refused": sum(one.partly_refused for one in found.units),
        "not judged to the end": sum(bool(one.unjudged) for one in found.units),
    }
    more = [f"{n} {words}" for words, n in rest.items() if n] + ([] if found.compared else ["nothing was compared"])
    return "; ".join([f"backends and probes: {', '.join(said)}", *more])


def as_json(found: Replay) -> dict[str, Any]:
    """The report for programs: that of a run, and what only a bundle has."""
    document = reports.as_json(found.suite())
    for one, plain in zip(found.units, document["backends"], strict=True):
        plain |= {
            "kind": one.unit.kind,
            "status": one.status,
            "stopped": one.stopped,
            "missing": list(one.missing),
            "newer": list(one.newer),
            "partly_refused": one.partly_refused,
            "unjudged": list(one.unjudged),
            "refused": one.refused,
            "named": list(one.named),
        }
    header = found.bundle.header
    return document | {
        "format": "nvfp4-replay",
        "exit_code": found.exit_code,
        "bundle": {"path": str(found.bundle.path), "root": found.bundle.root, "header": header},
        "rules": {rule: {"compared": n.compared, "different": n.different} for rule, n in found.rules().items()},
    }


def as_junit(found: Replay) -> str:
    """The report for continuous integration; a case that was asked and not answered is an error."""
    return reports.as_junit(replace(found.suite(), backends=[_with_missing(one) for one in found.units]))


def write_html(path: str, found: Replay) -> None:
    """The page.  Raises ValueError: it cannot be written, or Jinja2 is not installed."""
    header = found.bundle.header
    facts = {
        "bundle": str(found.bundle.path),
        "root sha256": found.bundle.root or "none: not sealed",
        "recorded": f"{header.get('date')} on {machine.described(header)}",
    }
    remarks = {one.unit.name: [*_gaps(one), *one.named] for one in found.units}
    statuses = {one.unit.name: one.status for one in found.units}
    title = f"Bundle {found.bundle.path.name}"
    reports.write_html(path, found.suite(), found.seen, title=title, facts=facts, remarks=remarks, statuses=statuses)


def _with_missing(one: UnitResult) -> run.BackendResult:
    """The result with what was not answered: missing and unjudged as errors, what is newer as refused, so skipped."""
    texts = {ident: str(one.stopped) for ident in one.missing}
    if one.stopped and not texts and not one.result.cases:
        texts = {one.unit.name: one.stopped}
    lost = [run.CaseResult(ident, "missing", "", {}, {}, error=text) for ident, text in texts.items()]
    lost += [run.CaseResult(ident, "newer", "", {}, {}, refused=_newer(1)) for ident in one.newer]
    lost += [run.CaseResult(text.partition(":")[0], "unjudged", "", {}, {}, error=text) for text in one.unjudged]
    return replace(one.result, reason=None, cases=[*one.result.cases, *lost]) if lost else one.result
