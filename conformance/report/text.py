"""A suite's result as text for people."""

from __future__ import annotations

from collections import Counter

from conformance.count import Count
from conformance.run import BASELINE, CONFORMS, DEPARTS, FAILED, NOT_RUN, BackendResult, CaseResult, SuiteResult
from nvfp4ref.container import agreed, counted

_SHOWN = 5  # departing cases of a backend that are listed
_STATUS = {CONFORMS: "conforms to", DEPARTS: "DEPARTS from", FAILED: "FAILED under"}


def as_text(result: SuiteResult) -> str:
    """The report for people: a line a backend, what departs from ``te``, the first departing cases."""
    lines = [f"suite {result.suite}, nvfp4ref {result.environment.get('nvfp4ref', '?')}, {result.seconds:.0f} s", ""]
    width = max((len(one.name) for one in result.backends), default=0)
    for one in result.backends:
        lines += _backend(one, width)
    for sweep in result.sweeps:
        lines += ["", str(sweep)]
    ran = [one for one in result.backends if one.status != NOT_RUN]
    good = sum(one.status == CONFORMS for one in ran)
    others = f"{len(result.backends) - len(ran)} not run"
    lines += ["", f"{conforming(good, len(ran))}; {others}"]
    return "\n".join(lines)


def case_lines(case: CaseResult) -> list[str]:
    """What is wrong with a case, a line an output."""
    if case.error is not None:
        return [f"{case.id}: {case.error}"]
    return [f"{case.id}: {name}: {count}" for name, count in case.outputs.items() if count.different]


def why_not_run(one: BackendResult) -> str:
    """Why a backend did not run, in a sentence."""
    if one.reason is not None:
        return one.reason
    return "; ".join(refusals(one)) or "the suite has no case that it can serve"


def refusals(one: BackendResult) -> list[str]:
    """What a backend refused, a line a reason, the commonest first."""
    counts = Counter(one.refused.values())
    return [f"refused {counted(n, 'case')}: {reason}" for reason, n in counts.most_common(_SHOWN)]


def _backend(one: BackendResult, width: int) -> list[str]:
    indent = " " * (width + 2)
    if one.status == NOT_RUN:
        return [f"{one.name:<{width}}  not run: {why_not_run(one)}"]
    verdict = f"{_STATUS[one.status]} {one.preset}"
    cases, differ = counted(len(one.cases), "case"), differing(sum(one.totals().values(), Count(0, 0)))
    lines = [
        f"{one.name:<{width}}  {verdict}: {cases}, {differ}; {one.seconds:.1f} s",
        f"{indent}{one.version}",
    ]
    baseline = one.totals(baseline=True)
    if baseline:
        lines += [f"{indent}{line}" for line in _departure(one, baseline)]
    lines += [f"{indent}{line}" for line in refusals(one)]
    bad = [case for case in one.cases if case.status in (DEPARTS, FAILED)]
    lines += [f"{indent}{line}" for case in bad[:_SHOWN] for line in case_lines(case)]
    if len(bad) > _SHOWN:
        lines.append(f"{indent}… and {counted(len(bad) - _SHOWN, 'case')} more; --json has them all")
    return lines


def differing(total: Count) -> str:
    """How many items differ, in words."""
    of = counted(total.compared, "item")
    return f"{total.different:,} of {of} {agreed(total.different, 'differs', 'differ')}"


def conforming(good: int, ran: int) -> str:
    """How many backends conform, in words."""
    those = "backend that ran conforms to the preset it declares"
    return f"{good} of {ran} {agreed(ran, those, 'backends that ran conform to the preset they declare')}"


def _departure(one: BackendResult, baseline: dict[str, Count]) -> list[str]:
    parts = [f"{name} {count.different:,} of {count.compared:,}" for name, count in baseline.items() if count.different]
    if not parts:
        return [f"against {BASELINE}: no difference in these cases"]
    number = sum(any(count.different for count in case.baseline.values()) for case in one.cases)
    causes = ", ".join(f"{cause} {different:,}" for cause, different in one.causes().items())
    return [f"departs from {BASELINE} in {counted(number, 'case')}: {', '.join(parts)}", f"  by cause: {causes}"]
