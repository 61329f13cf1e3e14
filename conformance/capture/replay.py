"""Judging a bundle without the machine that made it: every recorded byte against the oracle, every probe anew.

Nothing that the recording says about itself is believed: cases are made again and must hash to the question that
was recorded, the cases of the suite that the backend serves must all be there with their outputs, but for those that
were made after the recording, these are compared with the oracle's, and a probe's counts are counted again from its
arrays.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance import run
from conformance.capture import generations, machine, simulated
from conformance.capture.bundle import Bundle, BundleError, Record, Ref, Unit, describe, open_bundle
from conformance.capture.question import digest
from conformance.compare import NOT_JUDGED, Report, check
from conformance.count import Count
from conformance.expect import Expectation
from conformance.report import Seen
from nvfp4hw import backends
from nvfp4hw.backends.base import Case, Outputs
from nvfp4ref.container import agreed, blame, counted, foreign, shown
from nvfp4ref.dump import Dump

#: Called with a label, how many are done, and of how many (0: not known).
Progress = Callable[[str, int, int], None]

_NAMED = 12  # departing cases of a backend that are diagnosed
_PROBE = "probe"  # the family of a probe's only case
#: Backends that replay a recording of another machine: what a case has of outputs is what that one kept.
RECORDINGS = ("te-vectors",)


@dataclass(frozen=True)
class UnitResult:
    """One backend or probe judged.

    Attributes:
        unit: as recorded.
        result: the counts, in the form of a run of the suite; a probe is one with a single case.
        missing: ids of cases that it was to answer, for it was asked or serves them here, and that are not recorded.
        newer: ids of cases that it serves here, and that nobody could ask when it was recorded.
        rules: counts by rule, over the outputs that rest on it.
        named: what the differences are, in sentences.
        refused: what the package or its device refused to do, in its words, by case.
        unjudged: why records could not be judged, in sentences.
        given: output -> how many cases have it.
    """

    unit: Unit
    result: run.BackendResult
    missing: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    rules: dict[str, Count] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    unjudged: tuple[str, ...] = ()
    given: dict[str, int] = field(default_factory=dict)

    @property
    def partly_refused(self) -> bool:
        """Whether it refused, wholly or in part, more cases than it answered without a refusal."""
        return bool(self.result.cases) and len(self.refused) > sum(
            case.error is None and case.id not in self.refused for case in self.result.cases
        )

    @property
    def status(self) -> str:
        """The status of a run; "failed" too when not everything was answered, or could be judged."""
        incomplete = self.stopped or self.unjudged
        return run.FAILED if incomplete and self.result.status != run.DEPARTS else self.result.status

    @property
    def stopped(self) -> str | None:
        """Why it did not answer everything that it was asked; None when it did, or could not run at all."""
        end, info = self.unit.end, self.unit.info
        if not info and not end:
            return "the recording was stopped before it"
        if end.get("state") in ("failed", "stopped") and (self.missing or not info):
            return str(end.get("reason"))
        if not self.missing:
            return None
        return "it has not every case that it serves" if end else "the recording was stopped in it"


@dataclass(frozen=True)
class Replay:
    """A bundle judged; ``seen`` is what a page shows of it: counts by rule and unit, a few departing answers."""

    bundle: Bundle
    units: list[UnitResult]
    seconds: float
    seen: Seen = field(default_factory=Seen, repr=False)

    @property
    def exit_code(self) -> int:
        """2: something could not be judged, or nothing was compared; 1: something differs, failed or is missing."""
        if any(one.unjudged for one in self.units):
            return 2
        if any(one.status in (run.FAILED, run.DEPARTS) for one in self.units):
            return 1
        return 0 if self.compared else 2

    @property
    def compared(self) -> int:
        """Items that were held against the oracle."""
        return sum(count.compared for one in self.units for count in one.result.totals().values())

    def suite(self) -> run.SuiteResult:
        """The result as that of a run, for the reports that those have."""
        header = self.bundle.header
        environment = {**header["environment"], "nvfp4ref": nv.__version__}
        return run.SuiteResult(header["suite"], [one.result for one in self.units], [], self.seconds, environment)

    def rules(self) -> dict[str, Count]:
        """Counts by rule over all units, in the order of their first use."""
        return self.seen.totals()


def replay(path: str | os.PathLike[str], progress: Progress | None = None) -> Replay:
    """Judge a bundle, or the folder of one that is not finished.

    Raises BundleError: it cannot be read, or is not what was recorded.
    """
    start = time.monotonic()
    bundle = open_bundle(path)
    suite = _suite(bundle)
    with blame(bundle.path):
        generation = _generation(bundle, suite)
    questions, seen = _Questions(suite, machine.recorder(bundle.header), generation), Seen()
    units = []
    for unit in bundle.units:
        with blame(bundle.path), foreign(f"{unit.folder} cannot be judged"):
            judge = _backend if unit.kind == "backend" else _probe
            units.append(judge(unit, questions, seen, progress))
    return Replay(bundle, units, time.monotonic() - start, seen)


def _generation(bundle: Bundle, suite: str) -> int:
    """The generation of cases that a recording answers for: what it says, or that of the newest case that it has."""
    has = (
        _appeared(unit.name, suite, ident)
        for unit in bundle.units
        for ident in (*unit.info.get("asked", ()), *unit.records)
    )
    return max(bundle.generation, max(has, default=1))


def _appeared(backend: str, suite: str, ident: str) -> int:
    """The generation in which a case appeared, of the suite or of the backend's own."""
    return max(generations.since(scope, ident) for scope in (suite, generations.own_cases(backend, suite)))


def _suite(bundle: Bundle) -> str:
    """The suite that was recorded.  Raises BundleError: there is no such suite, or the header is not whole."""
    for name in ("suite", "date", "environment", "oracle"):
        if name not in bundle.header:
            raise BundleError(f"{bundle.path}: bundle.json has no {name}")
    suite = str(bundle.header["suite"])
    if suite not in suite_cases.SUITES:
        raise BundleError(
            f"{bundle.path}: is of the suite {shown(suite)}, which this nvfp4ref does not have: "
            f"replay it with what recorded it, {machine.recorder(bundle.header)}"
        )
    return suite


# ---- backends ----------------------------------------------------------------------------------------------


class _Questions:
    """The cases of a suite by id, and the hash of each; made once for all backends."""

    def __init__(self, suite: str, recorder: str, generation: int) -> None:
        self.suite = suite
        self.generation = generation  # of the cases, when it was recorded
        self.elsewhere = f"replay it with what recorded it, {recorder}"
        self._cases: dict[str, Case] = {}
        self._digests: dict[str, str] = {}

    def of_suite(self) -> dict[str, Case]:
        if not self._cases:
            self._cases = {case.id: case for case in suite_cases.cases(self.suite)}
        return self._cases

    def of_backend(self, name: str) -> dict[str, Case]:
        """The cases that a backend is given, its own or those of the suite."""
        try:
            backend = simulated.load_backend(name)
        except ValueError:  # of another package, which is not here
            return self.of_suite()
        own = None if isinstance(backend, backends.Unavailable) else backend.cases(self.suite)
        return self.of_suite() if own is None else {case.id: case for case in own}

    def is_newer(self, backend: str, case: Case) -> bool:
        """Whether a case, or a feature of the backend that it needs, came after the recording."""
        of_case = _appeared(backend, self.suite, case.id)
        of_features = (generations.since(generations.features(backend), need) for need in case.needs)
        return max(of_case, *of_features) > self.generation

    def digest(self, case: Case) -> str:
        """The hash of a case, made once where backends share it."""
        if self._cases.get(case.id) is not case:
            return digest(case)
        if case.id not in self._digests:
            self._digests[case.id] = digest(case)
        return self._digests[case.id]


class _Unjudged(Exception):
    """A record that says nothing that could be judged; the message is a sentence."""


class _Answers:
    """The answers of a recording, behind the protocol of a backend."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.name, self.preset = unit.name, _declared(unit)
        self.features = frozenset(unit.info.get("features", ()))

    def availability(self) -> str | None:
        return None

    def version(self) -> str:
        return str(self._unit.info.get("version", ""))

    def cases(self, suite: str) -> None:
        return None

    def quantize(self, case: Case) -> Outputs:
        outputs = self._unit.records[case.id].outputs
        expected = Expectation(case, self.preset)
        return {name: self._array(expected, name, ref) for name, ref in outputs.items()}

    def _array(self, expected: Expectation, name: str, ref: Ref) -> np.ndarray[Any, Any]:
        if ref.at is not None:
            try:
                return self._unit.array(ref)
            except BundleError as error:
                raise _Unjudged(f"{expected.case.id}: {name}: {error}") from None
        try:
            right = expected.output(name)
        except KeyError:
            raise _Unjudged(f"{expected.case.id}: the oracle has no output {shown(name)} of it") from None
        if describe(right) != ref:
            raise _Unjudged(
                f"{expected.case.id}: {name} was what the oracle of that time gives and is not what this one gives; "
                "its bytes were not kept"
            )
        return right


def _declared(unit: Unit) -> str:
    """The preset that a backend declares: a backend of this package today, for what it declared may have been wrong."""
    recorded = str(unit.info.get("preset", ""))
    return backends.load(unit.name).preset or recorded if unit.name in backends.built_in() else recorded


def _features(unit: Unit) -> frozenset[str]:
    """What a backend serves: one of this package as it is, where that hangs on no version and no device."""
    recorded = frozenset(unit.info.get("features", ()))
    if unit.name not in backends.built_in() and not simulated.is_simulated(unit.name):
        return recorded
    backend = simulated.load_backend(unit.name)
    constant = getattr(type(backend), "features", None)
    return constant if isinstance(constant, frozenset) and not isinstance(backend, backends.Unavailable) else recorded


def _unanswered(unit: Unit, known: dict[str, Case], questions: _Questions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of cases without a record: those that it was to answer, and those that are newer than the recording.

    It was to answer what it was asked, and what it serves, whatever it says it was asked.
    """
    asked = [str(ident) for ident in unit.info.get("asked", ())]
    ours = unit.name in backends.built_in() or simulated.is_simulated(unit.name)
    missing = [ident for ident in asked if ident not in unit.records]
    if not known or not (ours or any(ident in known for ident in asked)):  # cases of a package that is not here
        return tuple(missing), ()
    features, done = _features(unit), {*asked, *unit.records}
    served = [case for case in known.values() if case.needs <= features and case.id not in done]
    newer = [questions.is_newer(unit.name, case) for case in served]
    missing += [case.id for case, new in zip(served, newer, strict=True) if not new]
    return tuple(missing), tuple(case.id for case, new in zip(served, newer, strict=True) if new)


def _implied(case: Case, base: frozenset[str]) -> list[str]:
    """The outputs that a whole answer to a case has, in each direction that it asks for."""
    if case.kind != "quantize":
        return []
    suffixes = {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]
    return [name + suffix for suffix in suffixes for name in ("packed", "scales", "amax") if name in base]


def _base(unit: Unit) -> frozenset[str]:
    """The outputs of one direction that all its answers have: an amax where any of them has one."""
    if unit.name in RECORDINGS:
        return frozenset()
    gives = any(name.startswith("amax") for record in unit.records.values() for name in record.outputs)
    return frozenset(("packed", "scales", "amax") if gives else ("packed", "scales"))


def _backend(unit: Unit, questions: _Questions, seen: Seen, progress: Progress | None) -> UnitResult:
    info = unit.info
    records = unit.records
    if info and _declared(unit) not in nv.PRESETS and records:
        said = f"it declares the preset {info.get('preset')!r}, which this nvfp4ref does not have"
        return UnitResult(unit, _result(unit, []), unjudged=(said,))
    answers = _Answers(unit)
    ran = bool(records) or bool(info and info.get("reason") is None)
    known = questions.of_backend(unit.name) if ran else {}
    base = _base(unit)
    results: list[run.CaseResult] = []
    given: Counter[str] = Counter()
    refused: dict[str, str] = {}
    unjudged: list[str] = []
    for done, record in enumerate(records.values(), 1):
        if record.refused is not None:
            refused[record.id] = record.refused
        try:
            if record.refused is None or record.outputs:
                results.append(_case(answers, record, known, questions, seen, base))
                given.update(list(results[-1].outputs))
        except _Unjudged as reason:
            unjudged.append(str(reason))
        if progress is not None:
            progress(f"replaying {unit.name}", done, len(records))
    missing, newer = _unanswered(unit, known, questions)
    result = _result(unit, results)
    if refused and not results and not unjudged:
        which = agreed(len(refused), "its only case", f"all {len(refused)} cases")
        result = replace(result, reason=f"it refuses {which}: {next(iter(refused.values()))}")
    rules = _counts_of(unit, seen)
    named = _named(answers, result, known)
    return UnitResult(unit, result, missing, newer, rules, named, refused, tuple(unjudged), dict(given))


def _counts_of(unit: Unit, seen: Seen) -> dict[str, Count]:
    return {rule: by_unit[unit.name] for rule, by_unit in seen.counts.items() if unit.name in by_unit}


def _result(unit: Unit, results: list[run.CaseResult]) -> run.BackendResult:
    info = unit.info
    reason = info.get("reason") or (None if results or info.get("asked") else unit.end.get("reason"))
    seconds = sum(case.seconds for case in results)
    return run.BackendResult(
        unit.name,
        _declared(unit),
        str(info.get("version", "")),
        None if reason is None or results else str(reason),
        results,
        int(info.get("unserved", 0)),
        seconds,
    )


def _case(
    answers: _Answers,
    record: Record,
    known: dict[str, Case],
    questions: _Questions,
    seen: Seen,
    base: frozenset[str],
) -> run.CaseResult:
    """One record judged."""
    case = known.get(record.id)
    if case is None:
        raise _Unjudged(f"{record.id}: there is no such case here: {questions.elsewhere}")
    if record.question != questions.digest(case):
        raise _Unjudged(f"{record.id}: asks something else here, the suite has changed: {questions.elsewhere}")
    if record.error is not None:
        return run.CaseResult(case.id, case.family, case.hunts, {}, {}, {}, record.seconds, record.error)
    found = answers.quantize(case)
    try:
        outputs = run.compare(case, found, answers.preset)
    except ValueError as error:  # an output that such a case does not have
        return run.CaseResult(case.id, case.family, case.hunts, {}, {}, {}, record.seconds, str(error))
    baseline: dict[str, Count] = {}
    causes: dict[str, int] = {}
    if answers.preset != run.BASELINE and case.arithmetic is None:
        baseline = run.compare(case, found, run.BASELINE)
        causes = run.causes_of(case, found, baseline)
    absent = [] if record.refused is not None else [name for name in _implied(case, base) if name not in found]
    lacks = f"it has no {', '.join(absent)}, and no refusal says why" if absent else None
    result = run.CaseResult(case.id, case.family, case.hunts, outputs, baseline, causes, record.seconds, lacks)
    seen(answers, case, found, result)
    return result


# ---- what the differences are ------------------------------------------------------------------------------


def _named(answers: _Answers, result: run.BackendResult, known: dict[str, Case]) -> tuple[str, ...]:
    """What a few departing cases, small ones of different families, have in common: the deviations that explain all.

    Where no deviation does, what each of them looks like.
    """
    departing = [known[one.id] for one in result.cases if one.status == run.DEPARTS]
    # a given amax is no maximum, which check() would call a difference of its own
    plain = [case for case in departing if case.kind == "quantize" and case.amax is None and case.amax_t is None]
    families: dict[str, list[Case]] = {}
    for case in sorted(plain, key=lambda case: case.x.size):
        families.setdefault(case.family, []).append(case)
    chosen = [case for row in zip_longest(*families.values()) for case in row if case is not None][:_NAMED]
    common: dict[str, Any] | None = None
    reports: dict[str, Report] = {}
    for case in chosen:
        found = _checked(case, answers)
        reports[case.id] = found
        if found.verdict == NOT_JUDGED:
            continue
        exact = {one.id: one for one in found.deviations if one.exact}
        common = exact if common is None else {ident: one for ident, one in exact.items() if ident in common}
        if not common:  # nothing explains all of them, and further ones will not change that
            break
    if common:
        explained = [ident for ident, report in reports.items() if report.verdict != NOT_JUDGED]
        shown_ids = ", ".join(explained[:3]) + (" …" if len(explained) > 3 else "")
        which = f"the {counted(len(explained), 'departing case')} looked at ({shown_ids})"
        return tuple(f"{one.id} explains {which}: {one.what}; {one.fix}" for one in common.values())
    return tuple(f"{ident}: {text}" for ident, report in reports.items() for text in _shape(report))


def _checked(case: Case, answers: _Answers) -> Report:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(dump_of(case, answers.quantize(case), answers.preset))
    except ValueError as error:
        return Report(NOT_JUDGED, error=f"it cannot be diagnosed: {error}")


def _shape(report: Report) -> Iterator[str]:
    if report.error is not None:
        yield report.error
    elif report.sentences:
        yield f"first at {report.stage}: {report.sentences[0]}"


def dump_of(case: Case, outputs: Outputs, preset: str) -> Dump:
    """The dump of an answer.  Raises ValueError when its arrays are not those of a quantized tensor."""
    given: dict[str, Any] = {name: outputs[name] for name in _DUMPED if name in outputs}
    given["arithmetic"] = nv.arithmetic(case.arithmetic or preset, **case.fields)
    for suffix in ("", "_t"):
        state = case.data.get("rng" + suffix)
        if state is not None:
            given[("rng" if isinstance(state, nv.Philox) else "rbits") + suffix] = state
    return Dump(
        x=case.x,
        block=case.block,
        rht_t=False if case.rht_t is None else case.rht_t,
        rounding=case.rounding,
        **given,
    )


_DUMPED = [name + suffix for suffix in ("", "_t") for name in ("packed", "scales", "amax")]


# ---- probes ------------------------------------------------------------------------------------------------


def _probe(unit: Unit, questions: _Questions, seen: Seen, progress: Progress | None) -> UnitResult:
    """A probe's record, counted again from its arrays."""
    what, rules = str(unit.info.get("what", "")), [str(rule) for rule in unit.info.get("rules", ())]
    missing = tuple(str(ident) for ident in unit.info.get("asked", ()) if ident not in unit.records)
    cases: list[run.CaseResult] = []
    named: tuple[str, ...] = ()
    unjudged: list[str] = []
    for record in unit.records.values():
        if progress is not None:
            progress(f"replaying {unit.name}", 0, 0)
        if record.error is not None:
            cases.append(run.CaseResult(record.id, _PROBE, what, {}, {}, {}, record.seconds, record.error))
            continue
        try:
            count, named = _verified(unit, record, questions)
        except _Unjudged as reason:
            unjudged.append(str(reason))
            continue
        cases.append(run.CaseResult(record.id, _PROBE, what, {"items": count}, {}, {}, record.seconds))
        for rule in rules:
            seen.counts.setdefault(rule, {})[unit.name] = count
    rests = _counts_of(unit, seen)
    return UnitResult(unit, _result(unit, cases), missing, rules=rests, named=named, unjudged=tuple(unjudged))


def _verified(unit: Unit, record: Record, questions: _Questions) -> tuple[Count, tuple[str, ...]]:
    """The count of a probe, made again here, and in sentences its counterexamples and what its record says wrongly."""
    try:
        probe = simulated.load_probe(unit.name)
    except ValueError as error:
        raise _Unjudged(f"{unit.name}: {error}: {questions.elsewhere}") from None
    held = record.facts.get("record")
    if not isinstance(held, dict):
        raise _Unjudged(f"{unit.name}: its record is {shown(held)}; expected the facts that a probe writes down")
    try:
        again = probe.verify(held, {name: unit.array(ref) for name, ref in record.outputs.items()})
    except BundleError as error:
        raise _Unjudged(f"{unit.name}: {error}") from None
    said = [" ".join(f"{key} {value}" for key, value in one.items()) for one in again.first]
    claims = {
        "status": again.status,
        "compared": again.compared,
        "different": again.different,
        "first": again.first,
        "device": again.device,
        "rules": list(probe.rules),
    }
    for name, found in claims.items():
        claimed = unit.info.get(name) if name == "rules" else record.facts.get(name)
        if json.dumps(claimed) != json.dumps(found):  # 1 is neither 1.0 nor true
            said.append(f"its record says {name} {claimed}, and its arrays say {found}")
    if again.device.startswith("simulated") and not simulated.is_simulated(unit.name):
        said.append(f"its device is {shown(again.device)}, and its name is that of a probe of hardware")
    wrong = max(int(again.different), int(again.status != "pass" or bool(said)))
    return Count(max(int(again.compared), wrong), wrong), tuple(said)
