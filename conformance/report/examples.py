"""Elements that differ, each with every intermediate and with the named deviation that gives what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from conformance.diagnose import Diagnosis
from conformance.explain import Explainer, Step
from conformance.model import Model
from conformance.observed import Evidence, Piece
from conformance.report.places import PICKED, Sheet
from conformance.search import Solution
from conformance.side import Side


@dataclass(frozen=True)
class Example:
    """One element of the result.

    Attributes:
        place: row and column.
        differs: "code", "scale byte" or both, as a clause.
        steps: every intermediate, expected beside found.
        causes: of each explanation of the dump, the deviations that give what was found here.
        unexplained: whether no explanation gives it.
    """

    place: tuple[int, int]
    differs: str
    steps: tuple[Step, ...]
    causes: tuple[str, ...] = ()
    unexplained: bool = False


def examples(side: Side, sheets: dict[str, Sheet], diagnosis: Diagnosis, most: int = PICKED) -> list[Example]:
    """A few elements of a direction that differ: codes first, then blocks whose scale byte alone does."""
    places = list(sheets["codes"].places) if "codes" in sheets else []
    blocks = {(row, column // 16) for row, column in places}
    scales = sheets["scales"].places if "scales" in sheets else []
    some = [(row, 16 * block) for row, block in scales if (row, block) not in blocks]
    kept = places[: most - min(len(some), most // 4)]
    attribution = Attribution(side, diagnosis.solutions.get(side.suffix, ()))
    return [_example(side, place, attribution) for place in (kept + some)[:most]]


def _example(side: Side, place: tuple[int, int], attribution: Attribution) -> Example:
    steps = Explainer(side, *place).explanation().steps
    wrong = [step.name.split(",")[0] for step in steps if not step.agrees and step.name.endswith(("E4M3", "E2M1"))]
    named = {"block scale": "scale byte"}
    causes = attribution.causes(place)
    differs = " and ".join(named.get(name, name) for name in wrong) or "bytes elsewhere"
    return Example(place, differs, steps, tuple(filter(None, causes)), bool(causes) and not any(causes))


@dataclass(frozen=True)
class Attribution:
    """Which deviations of which explanation give what was found at a place."""

    side: Side
    solutions: Sequence[Solution]

    @cached_property
    def _evidence(self) -> Evidence:
        return Evidence(self.side)

    def causes(self, place: tuple[int, int]) -> list[str]:
        """One text for each explanation: its deviation's id, several with "with"; "" where it does not give it."""
        return [self._cause(solution, place) for solution in self.solutions]

    def _cause(self, solution: Solution, place: tuple[int, int]) -> str:
        together = " with ".join(solution.ids)
        packed = (solution.model.of_codes.packing, self._evidence.base.of_codes.packing)
        if solution.evidence.across != "declared" or solution.model.scales is not None or packed[0] != packed[1]:
            return together  # the place is that of another element, by this explanation
        model = self._evidence.base
        for step in solution.steps:
            model = model.changed(step.change) or model
            if self._evidence.applicable(model) and self._gives(model, place):
                return step.id if model is not solution.model and len(solution.steps) > 1 else together
        return ""

    def _gives(self, model: Model, place: tuple[int, int]) -> bool:
        """Whether a model gives the byte and the code found at a place."""
        row, column, lane = place[0], place[1] // 16, place[1] % 16
        rows, columns = self._evidence.plane
        height = 16 if rows % 16 == 0 else 1
        width = max(2, (model.rht.size if model.rht else 16) // 16)
        top, left = row // height * height, column // width * width
        piece = Piece(self._evidence, (slice(top, top + height), slice(left, min(left + width, columns))))
        at = (row - top, column - left)
        given, found = piece.given_bytes(model), piece.found_codes(model.of_codes.packing)
        if piece.bytes(model)[at] != given[at]:
            return False
        if model.ulp == "any":
            return not piece.wrong_by_block(model, given, found)[at]
        with np.errstate(all="ignore"):
            return bool(piece.codes(model, given)[(lane, *at)] == found[(lane, *at)])
