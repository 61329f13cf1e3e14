"""One self-contained HTML page of a run, a replay or checked dumps.

Everything is in the file: no request is made, and the page's own policy forbids any.  What matters is there without
scripts, filters included, which are style rules; the one script reads out the pictures and counts what is shown.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import nvfp4ref as nv
from conformance import ledger, run
from conformance.compare import check
from conformance.count import Count
from conformance.exhaustive import Sweep
from conformance.report import rules
from conformance.report.checks import Checks
from conformance.report.files import write_text
from conformance.report.seen import Kept, Seen
from conformance.report.tensor import Tensor, tensor
from conformance.report.text import case_lines, conforming, differing, refusals, why_not_run
from conformance.terminal import refuse_unwritable
from nvfp4ref.container import counted

_CASES = 100  # departing cases of a backend that are listed
_ELEMENTS = 4  # of a case that is shown in full
_BAD = (run.DEPARTS, run.FAILED)
#: What no text of a page may hold: controls, and halves of characters, which UTF-8 cannot write.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VERDICTS = {  # the word of a badge, and its mark
    "conforms": ("conforms", "✓"),
    "departs": ("departs", "✗"),
    "differs": ("differs", "✗"),
    "failed": ("failed", "!"),
    "refused": ("refused", "–"),
    "in-doubt": ("in doubt", "?"),
    "not-judged": ("not judged", "?"),
    "not-run": ("not run", "–"),
    "not-tested": ("not tested", "–"),
}


@dataclass(frozen=True)
class Filter:
    """A choice of the filter bar: a row is shown when its tokens of that name include the chosen one."""

    name: str
    label: str
    options: list[tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """The cases of one family of one backend."""

    backend: str
    name: str
    verdict: str
    cases: int
    total: Count
    baseline: Count


@dataclass(frozen=True)
class CaseRow:
    """A case that departs or failed."""

    backend: str
    id: str
    family: str
    verdict: str
    lines: list[str]
    hunts: str


@dataclass(frozen=True)
class BackendRow:
    """One backend, with sentences of its own."""

    name: str
    verdict: str
    result: run.BackendResult
    total: Count
    baseline: Count
    causes: dict[str, int]
    remarks: Sequence[str] = ()
    unlisted: int = 0


@dataclass(frozen=True)
class Page:
    """What the template shows."""

    title: str
    verdict: str
    headline: str
    facts: Mapping[str, str]
    rules: list[rules.Row]
    witnesses: list[Mapping[str, Any]]
    filters: list[Filter] = field(default_factory=list)
    backends: list[BackendRow] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    cases: list[CaseRow] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    sweeps: Sequence[Sweep] = ()
    omitted: int = 0
    checks: bool = False


def as_html(
    result: run.SuiteResult | Checks,
    seen: Seen | None = None,
    *,
    title: str = "",
    facts: Mapping[str, str] | None = None,
    remarks: Mapping[str, Sequence[str]] | None = None,
    counts: rules.Counts | None = None,
    statuses: Mapping[str, str] | None = None,
    made: datetime | None = None,
) -> str:
    """The page.

    Args:
        result: of a run or a replay, or checked dumps.
        seen: what looked on during the run: counts by rule, and cases to show in full.
        title: of the page; default: what was run.
        facts: more for its head, by name: the machine and root hash of a bundle, say.
        remarks: sentences by backend.
        counts: by rule and backend, in place of those seen.
        statuses: of backends that fare otherwise than their cases do: a recording that was cut short, say.
        made: when; default now.
    Raises:
        ValueError: Jinja2 is not installed.
    """
    if isinstance(result, Checks):
        page = _of_checks(result)
    else:
        page = _of_run(result, seen or Seen(), remarks or {}, statuses or {}, counts)
    page = replace(page, title=title or page.title, facts={**page.facts, **(facts or {})})
    return _render(page, made or datetime.now(UTC))


def write_html(path: str, result: run.SuiteResult | Checks, seen: Seen | None = None, **how: Any) -> None:
    """Write the page, completely or not at all; arguments as ``as_html``.  Raises ValueError."""
    write_text(path, as_html(result, seen, **how))


def require_html(path: str) -> None:
    """Refuse before long work what could not be written after it.  Raises ValueError."""
    _jinja2()
    refuse_unwritable(path)


# ---- checked dumps -----------------------------------------------------------------------------------------


def _of_checks(checks: Checks) -> Page:
    verdicts = [report.verdict for _, _, report in checks.reports]
    each = ", ".join(f"{_VERDICTS[one][0]}: {verdicts.count(one)}" for one in dict.fromkeys(verdicts))
    worst = max(checks.reports, key=lambda one: one[2].exit_code, default=None)
    several = len(checks.tensors) != 1
    headline = each if several else _headline(checks.tensors[0])
    book = ledger.load()
    rows = rules.rows(checks.counts)
    deviations = [[one.found["id"] for one in tensor.deviations] for tensor in checks.tensors]
    return Page(
        title=counted(len(checks.tensors), "tensor") if several else checks.tensors[0].label,
        verdict="not-judged" if worst is None else worst[2].verdict,
        headline=headline or "nothing was checked",
        facts={"nvfp4ref": nv.__version__} | ({} if several else checks.tensors[0].facts),
        rules=rows,
        witnesses=book["witnesses"],
        filters=_filters(
            ("verdict", "Verdict", [*verdicts, *(row.verdict for row in rows)]),
            ("stage", "First stage", [report.stage for _, _, report in checks.reports if report.stage]),
            ("deviation", "Deviation", [ident for some in deviations for ident in some]),
        ),
        tensors=checks.tensors,
        omitted=checks.omitted,
        checks=True,
    )


def _headline(one: Tensor) -> str:
    report = one.report
    if report.verdict == "not-judged":
        return report.error or "not judged"
    said = f"{differing(one.total)} from {report.arithmetic}"
    return said + (f", first at {report.stage}" if report.stage else "")


# ---- a run -------------------------------------------------------------------------------------------------


def _of_run(
    result: run.SuiteResult,
    seen: Seen,
    remarks: Mapping[str, Sequence[str]],
    statuses: Mapping[str, str],
    counts: rules.Counts | None,
) -> Page:
    backends = [_backend(one, remarks.get(one.name, ()), statuses.get(one.name, one.status)) for one in result.backends]
    families = [family for one in result.backends for family in _families(one)]
    cases = [row for one in result.backends for row in _cases(one)]
    tensors = [shown for one in backends for shown in _shown(one, seen)]
    rows = rules.rows(seen.counts if counts is None else counts)
    verdicts = [*(one.verdict for one in backends), *(one.verdict for one in families), *(one.verdict for one in rows)]
    ran = [one for one in backends if one.verdict != "not run"]
    good = sum(one.verdict == "conforms" for one in ran)
    bad = any(one.verdict in (run.DEPARTS, run.FAILED) for one in backends) or result.exit_code
    said = conforming(good, len(ran))
    return Page(
        title=f"Suite {result.suite}",
        verdict="departs" if bad else "conforms" if ran or result.sweeps else "not run",
        headline=f"{said}, {len(backends) - len(ran)} not run",
        facts={**result.environment, "seconds": f"{result.seconds:.0f}"},
        rules=rows,
        witnesses=ledger.load()["witnesses"],
        filters=_filters(
            ("backend", "Backend", [one.name for one in backends]),
            ("family", "Family", [one.name for one in families]),
            ("verdict", "Verdict", verdicts),
        ),
        backends=backends,
        families=families,
        cases=cases,
        tensors=tensors,
        sweeps=result.sweeps,
    )


def _backend(one: run.BackendResult, remarks: Sequence[str], status: str) -> BackendRow:
    total, baseline = (sum(one.totals(baseline=which).values(), Count(0, 0)) for which in (False, True))
    unlisted = max(0, sum(case.status in _BAD for case in one.cases) - _CASES)
    return BackendRow(one.name, status, one, total, baseline, one.causes(), [*refusals(one), *remarks], unlisted)


def _families(one: run.BackendResult) -> Iterable[Family]:
    by_name: dict[str, list[run.CaseResult]] = {}
    for case in one.cases:
        by_name.setdefault(case.family, []).append(case)
    for name, cases in by_name.items():
        found = {case.status for case in cases}
        verdict = next(status for status in (run.FAILED, run.DEPARTS, run.CONFORMS, run.REFUSED) if status in found)
        total = sum((count for case in cases for count in case.outputs.values()), Count(0, 0))
        baseline = sum((count for case in cases for count in case.baseline.values()), Count(0, 0))
        yield Family(one.name, name, verdict, len(cases), total, baseline)


def _cases(one: run.BackendResult) -> list[CaseRow]:
    bad = [case for case in one.cases if case.status in _BAD][:_CASES]
    return [CaseRow(one.name, case.id, case.family, case.status, _lines(case), case.hunts) for case in bad]


def _lines(case: run.CaseResult) -> list[str]:
    return [line.removeprefix(f"{case.id}: ") for line in case_lines(case)]


def _shown(one: BackendRow, seen: Seen) -> Iterable[Tensor]:
    """Cases of a backend in full: those that depart from its preset, or else from ``te``."""
    kept = seen.kept(one.name, one.result.preset) or seen.kept(one.name, run.BASELINE)
    for case in kept:
        shown = _kept(case, run.DEPARTS if case.preset == one.result.preset else run.CONFORMS)
        if shown is not None:
            yield shown


def _kept(one: Kept, verdict: str) -> Tensor | None:
    """A kept answer checked as a dump; None when its arrays make none."""
    from conformance.capture.replay import dump_of

    try:
        dump = dump_of(one.case, one.found, one.preset)
        found = tensor(one.case.id, check(dump), dump, elements=_ELEMENTS)
    except (ValueError, TypeError):
        return None
    return replace(found, backend=one.backend, family=one.case.family, verdict=verdict, held=one.preset)


# ---- rendering ---------------------------------------------------------------------------------------------


def _filters(*some: tuple[str, str, Iterable[str]]) -> list[Filter]:
    """The choices of which there are several."""
    found = [(name, label, list(dict.fromkeys(values))) for name, label, values in some]
    return [
        Filter(name, label, [(_token(name, value, values), _VERDICTS.get(value, (value,))[0]) for value in values])
        for name, label, values in ((name, label, values) for name, label, values in found)
        if len(values) > 1
    ]


def _token(name: str, value: str, values: Sequence[str]) -> str:
    return f"{name[0]}{values.index(value)}"


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ValueError("an HTML report needs Jinja2: pip install 'nvfp4ref[report]'") from None
    return jinja2


def _render(page: Page, made: datetime) -> str:
    jinja2 = _jinja2()
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    tokens = {one.name: {text: token for token, text in one.options} for one in page.filters}
    environment.filters["words"] = lambda verdict: _VERDICTS[verdict.replace(" ", "-")]
    environment.filters["share"] = _share
    environment.filters["counted"] = counted
    environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["marked"] = _marked
    environment.filters["why_not_run"] = why_not_run
    environment.globals["tokens"] = lambda name, *values: _tokens(tokens.get(name, {}), values)
    script = _template("page.js")
    return environment.get_template("page.html.j2").render(
        page=page,
        made=made.strftime("%Y-%m-%d %H:%M UTC"),
        style=_template("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        grids=[picture.data for one in page.tensors for side in one.directions for picture in side.pictures],
    )


def _template(name: str) -> str:
    return files("conformance.report").joinpath("templates", name).read_text(encoding="utf-8")


def _clean(value: Any) -> Any:
    """Text of which nothing but characters is left; markup stays markup."""
    return type(value)(_FORBIDDEN.sub("\ufffd", value)) if isinstance(value, str) else value


def _tokens(known: Mapping[str, str], values: Iterable[str]) -> str:
    return " ".join(known[text] for value in values if (text := _VERDICTS.get(value, (value,))[0]) in known)


def _marked(text: str) -> Any:
    """Text with what is between backticks as code."""
    from markupsafe import Markup, escape

    parts = [escape(_clean(part)) for part in text.split("`")]
    return Markup("".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)))


def _share(count: Count) -> str:
    """A share in percent that is 0 or 100 only when it is."""
    if not count.compared:
        return "–"
    percent = 100 * count.different / count.compared
    if count.different and percent < 0.01:
        return "< 0.01 %"
    if count.different < count.compared and percent > 99.99:
        return "> 99.99 %"
    return f"{percent:.2f} %" if count.different and percent < 99.995 else f"{percent:.0f} %"
