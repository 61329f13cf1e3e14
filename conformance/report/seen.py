"""What a run of the suite keeps for its page: the arrays that a backend returned are gone when the run is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.count import Count
from conformance.report.rules import Counts, add
from conformance.run import BASELINE, CONFORMS, DEPARTS, CaseResult
from nvfp4hw.backends.base import Backend, Case, Outputs

_SHOWN = 4  # cases of a backend that the page shows in full
_LARGEST = 1 << 20  # elements of such a case


@dataclass(frozen=True)
class Kept:
    """One answer of a backend that is worth showing, and the preset that it departs from."""

    backend: str
    case: Case
    found: Outputs
    preset: str


@dataclass
class Seen:
    """Looks on while a suite runs: called with every answer, it counts by rule and keeps a few that depart.

    Of each backend the smallest departing case of each family is kept: departing from the preset that it declares,
    or, where it does not, from ``te``.
    """

    counts: Counts = field(default_factory=dict)
    _kept: dict[tuple[str, str], dict[str, Kept]] = field(default_factory=dict)

    def __call__(self, backend: Backend, case: Case, found: Outputs, result: CaseResult) -> None:
        """One case that was answered, and what came of it."""
        if result.error is not None:
            return
        outputs = {name: (found[name], count) for name, count in result.outputs.items()}
        add(self.counts, backend.name, case, outputs, backend.preset)
        if result.status == DEPARTS:
            self._keep(Kept(backend.name, case, found, backend.preset))
        elif result.status == CONFORMS and any(count.different for count in result.baseline.values()):
            self._keep(Kept(backend.name, case, found, BASELINE))

    def _keep(self, one: Kept) -> None:
        case = one.case
        # a given amax is no maximum of x, which check() would call a difference of its own
        if case.kind != "quantize" or case.amax is not None or case.amax_t is not None or case.x.size > _LARGEST:
            return
        families = self._kept.setdefault((one.backend, one.preset), {})
        before = families.get(case.family)
        if before is None or case.x.size < before.case.x.size:
            families[case.family] = one

    def kept(self, backend: str, preset: str) -> list[Kept]:
        """A few answers of a backend that depart from a preset, of different families."""
        return list(self._kept.get((backend, preset), {}).values())[:_SHOWN]

    def totals(self) -> dict[str, Count]:
        """Counts by rule over all backends."""
        return {rule: sum(by.values(), Count(0, 0)) for rule, by in self.counts.items()}
