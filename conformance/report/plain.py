"""A suite's result as plain values for JSON; ``conformance/schema`` says what they are."""

from __future__ import annotations

from typing import Any

from conformance.count import Count
from conformance.run import BackendResult, CaseResult, SuiteResult


def as_json(result: SuiteResult) -> dict[str, Any]:
    """The report for programs."""
    return {
        "format": "nvfp4-conformance",
        "version": 1,
        "suite": result.suite,
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 3),
        "environment": result.environment,
        "backends": [_backend(one) for one in result.backends],
        "sweeps": [sweep.to_json() for sweep in result.sweeps],
    }


def _backend(one: BackendResult) -> dict[str, Any]:
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
        "refused": one.refused,
        "cases": [_case(case) for case in one.cases],
    }


def _case(case: CaseResult) -> dict[str, Any]:
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
