"""Running a suite: every backend on every case that it can serve, each answer held against the oracle.

A backend is judged by the preset that it declares.  One that declares another than ``te`` is held against
``te`` as well, so that the report says how far it departs.  Nothing that a backend does ends the run.
"""

from __future__ import annotations

import platform
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance import exhaustive
from conformance.count import Count, count, count_amax, count_codes
from conformance.expect import Expectation
from nvfp4hw import backends
from nvfp4hw.backends.base import Backend, Case, Outputs, Refused

BASELINE = "te"
CONFORMS, DEPARTS, FAILED, NOT_RUN, REFUSED = "conforms", "departs", "failed", "not run", "refused"

#: Called with a label, how many are done, and of how many (0: not known).
Progress = Callable[[str, int, int], None]

#: Called with every answer of a backend and what came of it: conformance.report.Seen is one.
Watch = Callable[[Backend, Case, Outputs, "CaseResult"], None]


@dataclass(frozen=True)
class CaseResult:
    """One case of one backend.

    Attributes:
        outputs: counts against the declared preset.
        baseline: counts against ``te``; empty where the preset is ``te``.
        causes: the differences from ``te`` by what causes them (see ``causes_of``).
        error: what went wrong when there was no answer to compare.
        refused: what the package or its device does not do of it, in its words; what it did do is in ``outputs``.
    """

    id: str
    family: str
    hunts: str
    outputs: dict[str, Count]
    baseline: dict[str, Count]
    causes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    refused: str | None = None

    @property
    def status(self) -> str:
        """ "conforms", "departs" (from the declared preset), "failed", or "refused" where there is no output."""
        if self.error is not None:
            return FAILED
        if self.refused is not None and not self.outputs:
            return REFUSED
        return DEPARTS if any(one.different for one in self.outputs.values()) else CONFORMS


@dataclass(frozen=True)
class BackendResult:
    """One backend: its cases, or why it did not run."""

    name: str
    preset: str
    version: str = ""
    reason: str | None = None
    cases: list[CaseResult] = field(default_factory=list)
    unserved: int = 0  # cases that need a feature it does not have
    seconds: float = 0.0

    def causes(self) -> dict[str, int]:
        """Differences from ``te`` by cause, over all cases."""
        total: Counter[str] = Counter()
        for case in self.cases:
            total.update(case.causes)
        return dict(total.most_common())

    @property
    def status(self) -> str:
        """ "not run", else the worst of its cases; one that served no case, or refused all, is not run either."""
        found = {case.status for case in self.cases}
        if self.reason is not None:
            return NOT_RUN
        return next((status for status in (FAILED, DEPARTS, CONFORMS) if status in found), NOT_RUN)

    @property
    def refused(self) -> dict[str, str]:
        """Case id -> what was refused of it, in the package's words."""
        return {case.id: case.refused for case in self.cases if case.refused is not None}

    def totals(self, baseline: bool = False) -> dict[str, Count]:
        """Counts by output over all cases, against the preset or against ``te``."""
        totals: dict[str, Count] = {}
        for case in self.cases:
            for name, one in (case.baseline if baseline else case.outputs).items():
                totals[name] = totals.get(name, Count(0, 0)) + one
        return totals


@dataclass(frozen=True)
class SuiteResult:
    """A whole run."""

    suite: str
    backends: list[BackendResult]
    sweeps: list[exhaustive.Sweep] = field(default_factory=list)
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every backend that ran conforms to its preset and no sweep found a difference, else 1."""
        bad = any(one.status in (FAILED, DEPARTS) for one in self.backends)
        return int(bad or any(sweep.total.different for sweep in self.sweeps))


def run(
    suite: str = "quick",
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> SuiteResult:
    """Run a suite.

    Args:
        suite: "quick", "full" or "exhaustive".
        names: backends by name; default all.  Sweeps belong to no backend and run only without ``names``.
        progress: called as the work goes on.
        watch: called with every answer.
    Raises:
        ValueError: an unknown suite or backend.
    """
    start = time.monotonic()
    if suite not in suite_cases.SUITES:
        raise ValueError(f"suite is one of {', '.join(suite_cases.SUITES)}; got {suite!r}")
    chosen = [backends.load(name) for name in (backends.names() if names is None else dict.fromkeys(names))]
    cases = list(suite_cases.cases(suite))
    results = [run_backend(backend, suite, cases, progress, watch) for backend in chosen]
    sweeps = list(exhaustive.sweeps(progress)) if suite == "exhaustive" and names is None else []
    return SuiteResult(suite, results, sweeps, time.monotonic() - start, environment())


def environment() -> dict[str, str]:
    """What the run depended on."""
    return {
        "nvfp4ref": nv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def run_backend(
    backend: Backend,
    suite: str,
    cases: Iterable[Case],
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> BackendResult:
    """One backend on its own cases, or on those of the suite that it can serve."""
    start = time.monotonic()
    try:
        reason = backend.availability()
        version = "" if reason is not None else backend.version()
        own = None if reason is not None else backend.cases(suite)
        listed = list(cases if own is None else own)
    except Exception as error:  # noqa: BLE001 - another package's failure is a result, not the end of the run
        reason, version, listed = f"it cannot be asked: {said(error)}", "", []
    if reason is not None:
        return BackendResult(backend.name, backend.preset, reason=reason)
    served = [case for case in listed if case.needs <= backend.features]
    results = []
    for done, case in enumerate(served, 1):
        results.append(run_case(backend, case, watch))
        if progress is not None:
            progress(backend.name, done, len(served))
    seconds = time.monotonic() - start
    return BackendResult(
        backend.name, backend.preset, version, None, results, len(listed) - len(served), seconds
    )


def run_case(backend: Backend, case: Case, watch: Watch | None = None) -> CaseResult:
    """One case: ask, and compare every output with the declared preset and with ``te``."""
    start = time.monotonic()
    outputs: dict[str, Count] = {}
    baseline: dict[str, Count] = {}
    causes: dict[str, int] = {}
    found: Outputs = {}
    error = refused = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = backend.quantize(case)
        outputs = compare(case, found, backend.preset)
        if backend.preset != BASELINE and case.arithmetic is None:
            baseline = compare(case, found, BASELINE)
            causes = causes_of(case, found, baseline)
        refused = getattr(backend, "refused", {}).get(case.id)
    except Refused as reason:
        refused = str(reason)
    except Exception as reason:  # noqa: BLE001 - as above
        error = said(reason)
    seconds = time.monotonic() - start
    result = CaseResult(case.id, case.family, case.hunts, outputs, baseline, causes, seconds, error, refused)
    if watch is not None:
        watch(backend, case, found, result)
    return result


def compare(case: Case, found: Outputs, preset: str) -> dict[str, Count]:
    """Counts of a backend's outputs against the oracle under a preset.

    Raises ValueError when there is no output, or one that the oracle does not know.
    """
    if not found:
        raise ValueError("the backend returned no output")
    expected = Expectation(case, preset)
    counts: dict[str, Count] = {}
    for name, array in found.items():
        try:
            wanted = expected.output(name)
        except KeyError:
            raise ValueError(
                f"the backend returned an output {name!r} that a case of kind {case.kind!r} has not"
            ) from None
        how = {"packed": count_codes, "amax": count_amax}.get(name.removesuffix("_t"), count)
        counts[name] = how(np.asarray(array), wanted)
    return counts


def causes_of(case: Case, found: Outputs, baseline: dict[str, Count]) -> dict[str, int]:
    """Differences from ``te`` by cause: signs of zero, NaN or an amax of 0 in what was given, or neither."""
    total = sum(one.different for one in baseline.values())
    if not total:
        return {}
    expected = Expectation(case, BASELINE)
    signs = 0
    for name in {"packed", "packed_t"} & set(found):
        ours, theirs = nv.e2m1.unpack(expected.output(name)), nv.e2m1.unpack(np.asarray(found[name]))
        if ours.shape == theirs.shape:
            signs += int(np.count_nonzero((ours ^ theirs == 8) & (ours & 7 == 0)))
    given = [np.asarray(amax) for amax in (case.amax, case.amax_t) if amax is not None]
    if any(np.isnan(array.astype(np.float32)).any() for array in (case.x, *given)):
        rest = "NaN in the input"
    else:
        rest = "an amax of 0 given" if any((amax == 0).any() for amax in given) else "arithmetic"
    return {cause: n for cause, n in (("sign of zero", signs), (rest, total - signs)) if n}


def said(error: Exception) -> str:
    """An exception in one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})" if place else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}{where}" if message else f"{type(error).__name__}{where}"


def describe() -> list[dict[str, Any]]:
    """Every backend in plain values: name, preset, features, and the reason and version."""
    found = []
    for name in backends.names():
        backend = backends.load(name)
        reason, version = None, ""
        try:
            reason = backend.availability()
            version = backend.version() if reason is None else ""
        except Exception as error:  # noqa: BLE001 - as above
            reason = f"it cannot be asked: {said(error)}"
        found.append(
            {
                "name": name,
                "available": reason is None,
                "reason": reason,
                "version": version,
                "preset": backend.preset,
                "features": sorted(backend.features),
            }
        )
    return found
