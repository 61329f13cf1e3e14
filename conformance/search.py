"""The search for deviations that explain one direction of a dump, byte for byte.

Scale bytes do not depend on how the codes are made, and codes are judged given the bytes that were found.  So
a change of the bytes and a change of the codes are found apart and add up; only changes that touch both, of the
global scale, the transform or the layout, are tried with each of the others.  A model is held against a few
blocks first, then against a sample, and what is left against everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from conformance.deviations import DEVIATIONS, changes, of_fields
from conformance.infer import INFER
from conformance.model import Change, Model, part
from conformance.observed import Array, Evidence, Piece, transposed_codes

_MINI = 2**12  # elements that a model is held against first
_FEW_BLOCKS = 8  # so few blocks that depart do not tell a general explanation from a particular one
_MOST = 12  # solutions of one size that are kept
_DEEPEST = 3  # ways to explain the bytes for which three steps of the codes are tried
_APPROXIMATE = "encode-scale.approximate-reciprocal"
_GAIN = 4  # a partial explanation leaves at most 1/_GAIN of what it set out with


class Step(NamedTuple):
    """One deviation with the change that it makes here."""

    id: str
    change: Change
    general: bool = False  # has a value fitted to the data, or explains whatever is within an ulp

    @property
    def part(self) -> str:
        return part(self.change)


_WRONG_AMAX = Step("global-scale.wrong-amax", {"amax": "recorded-wrong"}, general=True)


@dataclass(frozen=True)
class Solution:
    """Deviations that hold together; ``preset`` when they are those of a named quantizer."""

    steps: tuple[Step, ...]
    model: Model
    evidence: Evidence = field(repr=False)
    preset: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """In the order of the stages."""
        return tuple(step.id for step in self.steps)

    @property
    def general(self) -> bool:
        """Whether it has a value fitted to the data, or explains whatever is within an ulp."""
        return any(step.general for step in self.steps)


@dataclass
class Findings:
    """What a search found for one direction.

    Attributes:
        baseline: differences from what is declared: "amax", "global_scale", "scales", "packed".
        solutions: exact explanations of the smallest size, or [] .
        partial: the best explanation that leaves a remainder, None without one.
        presets: names of the presets that explain everything.
    """

    evidence: Evidence
    baseline: Differences
    solutions: list[Solution] = field(default_factory=list)
    partial: Solution | None = None
    presets: list[str] = field(default_factory=list)

    @property
    def departs(self) -> bool:
        """Whether anything differs."""
        return any(self.baseline.counts.values())


@dataclass(frozen=True, eq=False)
class Differences:
    """Where a model departs from what was found, over everything.

    ``bytes`` (R, K/16) bool; ``codes`` (R, K/16) the wrong codes of each block by the model's own bytes, ``given``
    those given the bytes found; ``lanes`` (16,) sums of ``given``.
    """

    counts: dict[str, int]
    bytes: Array
    codes: Array
    given: Array
    lanes: Array


def differences(evidence: Evidence, model: Model) -> Differences:
    """Every difference between a model and what was found."""
    wrong = np.zeros(evidence.plane, bool)
    codes, given = (np.zeros(evidence.plane, np.uint8) for _ in range(2))
    lanes = np.zeros(16, np.int64)
    judged = evidence.judges_codes or model.words == "nearest"
    for piece in evidence.slabs():
        expected = piece.bytes(model)
        found = piece.given_bytes(model)
        unequal = expected != found if evidence.reading(model) is not None else np.ones(expected.shape, bool)
        wrong[piece.place] = unequal
        if not judged:
            continue
        codes_found = piece.found_codes(model.of_codes.packing)
        apart = piece.codes(model, found) != codes_found
        given[piece.place] = apart.sum(0, dtype=np.uint8)
        lanes += apart.sum((1, 2))
        own = apart if not unequal.any() else piece.codes(model, expected) != codes_found
        codes[piece.place] = own.sum(0, dtype=np.uint8)
        if model.ulp == "any":
            for_block = piece.wrong_by_block(model, found, codes_found)
            codes[piece.place] = given[piece.place] = for_block
    counts = {**evidence.stored(model), "scales": int(wrong.sum()), "packed": int(codes.sum(dtype=np.int64))}
    return Differences(counts, wrong, codes, given, lanes)


def search(evidence: Evidence) -> Findings:
    """What explains one direction."""
    baseline = differences(evidence, evidence.base)
    findings = Findings(evidence, baseline)
    if findings.departs:
        _Search(findings).run()
    return findings


def hidden(evidence: Evidence) -> dict[str, bool]:
    """Deviations that apply to a direction that conforms, and whether their usual form would change no byte of it."""
    search_ = _Search(Findings(evidence, differences(evidence, evidence.base)))
    usual = {step.id: step for step in reversed(search_.steps) if not step.general}
    found = {}
    for ident in DEVIATIONS:
        if ident in usual and _concerns(ident, usual[ident].change, evidence):
            solution = search_.solution((usual[ident],))
            found[ident] = solution is not None and explains_all(solution)
    return found


def _concerns(ident: str, change: Change, evidence: Evidence) -> bool:
    """Whether a direction has what a deviation is about: random numbers, a transform, two candidates to choose from."""
    stage, base = DEVIATIONS[ident].stage, evidence.base
    if stage == "random-bits":
        return evidence.side.dump.rounding != "nearest-even"
    if "rht_sum" in change:
        return base.rht is not None
    return bool(base.arithmetic.four_over_six) or not any(key.startswith("four_over_six_") for key in change)


class _Search:
    """One search; ``findings`` is filled in."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.evidence = findings, findings.evidence
        self.base = self.evidence.base
        differs = findings.baseline.bytes | (findings.baseline.codes > 0)
        self.departing = int(np.count_nonzero(differs))
        self.sample = self.evidence.sample(differs)
        self.pieces = [self.evidence.sample(differs, _MINI), self.sample]
        if differs.size * 16 <= _MINI:
            self.pieces = [self.sample]
        self._known: dict[tuple[str, Model], bool] = {}

    def run(self) -> None:
        """Smallest explanations first; those that would fit many faults after those that fit one."""
        findings = self.findings
        particular = [step for step in self.steps if not step.general]
        general = [step for step in self.steps if step.general]
        stored = [step for step in general if step.change in ({"amax": "recorded-wrong"}, {"form": "ignored"})]
        fitted = [step for step in general if isinstance(step.change.get("amax"), float)]
        ways = (
            lambda: self._singles(particular),
            lambda: self._singles(stored),
            self._other_axis,
            lambda: self._singles(fitted),
            lambda: self._pairs(particular, particular),
            lambda: self._deep(particular) if self.departing > _FEW_BLOCKS else (),
            lambda: self._singles(general),
            lambda: self._pairs(particular, general),
            lambda: self._deep(particular) if self.departing <= _FEW_BLOCKS else (),
        )
        for way in ways:
            findings.solutions = self._verified(way())
            if findings.solutions:
                break
        if findings.solutions and findings.solutions[0].steps[0] in fitted:
            # two particular faults of the global scale may be the one that was fitted
            some = [step for step in particular if DEVIATIONS[step.id].stage == "global-scale"]
            findings.solutions = self._verified(self._pairs(some, some)) or findings.solutions
        if findings.solutions and all(_APPROXIMATE in one.ids and len(one.ids) > 1 for one in findings.solutions):
            # an ulp one way or the other stands for several faults of ties and quotients
            exact = [step for step in particular if step.id != _APPROXIMATE]
            findings.solutions += self._verified(self._deep(exact))
        self._try_presets()
        if findings.solutions and not any(one.general for one in findings.solutions):
            self._add_general(general)
        if not findings.solutions:
            findings.partial = self._partial()

    # ---- the steps to try ----------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[Step]:
        """Every change that applies here, those inferred from the data last."""
        found = [Step(entry.id, change, _general(change)) for entry, change in changes()]
        for entry in DEVIATIONS.values():
            if entry.infer:
                inferred = INFER[entry.infer](self.sample, self.base)
                found += [Step(entry.id, change, _general(change)) for change in inferred]
        return [step for step in found if self._applies(step)]

    def _applies(self, step: Step) -> bool:
        if self.evidence.side.suffix not in DEVIATIONS[step.id].directions:
            return False
        only = {"repeated": "tiled", "compact": "swizzled"}.get(step.change.get("scales", ""))
        if only is not None and self.evidence.declared_scales != only:
            return False
        return self._model((step,)) is not None

    def _model(self, steps: Iterable[Step]) -> Model | None:
        """The model with these steps; None when they do not go together."""
        model, keys = self.base, set[str]()
        for step in steps:
            names = {key.rpartition(".")[2] for key in step.change}
            try:
                changed = None if names & keys else model.changed(step.change)
            except (ValueError, TypeError):
                changed = None
            if changed is None:
                return None
            model, keys = changed, keys | names
        return model if self.evidence.applicable(model) else None

    # ---- holding a model against the pieces ----------------------------------------------------------------

    def _agrees(self, what: str, model: Model) -> bool:
        """Whether the "bytes" or the "codes" of a model are those found in the sample."""
        key = (what, _settled(what, model))
        if key not in self._known:
            self._known[key] = all(self._wrong(what, piece, model) == 0 for piece in self.pieces)
        return self._known[key]

    def _wrong(self, what: str, piece: Piece, model: Model) -> int:
        return piece.wrong_bytes(model) if what == "bytes" else piece.wrong_codes(model)

    def _explains(self, model: Model) -> bool:
        """Whether a model explains the sample, and what was recorded beside it."""
        return (
            self._agrees("bytes", model)
            and self._agrees("codes", model)
            and not any(self.evidence.stored(model).values())
        )

    def solution(self, steps: tuple[Step, ...]) -> Solution | None:
        """These steps as a solution; None when they do not explain the sample."""
        model = self._model(steps)
        return None if model is None or not self._explains(model) else Solution(_ordered(steps), model, self.evidence)

    # ---- sizes one, two and three --------------------------------------------------------------------------

    def _singles(self, steps: list[Step]) -> Iterator[Solution]:
        for step in steps:
            found = self.solution((step,))
            if found:
                yield found

    def _pairs(self, first: list[Step], second: list[Step]) -> Iterator[Solution]:
        """Pairs of one step of each list, tried only where the parts that neither touches agree already."""
        same = first is second
        pairs = combinations(first, 2) if same else ((a, b) for a in first for b in second)
        good = {what: self._agrees(what, self.base) for what in ("bytes", "codes")}
        alone: dict[tuple[str, int], bool] = {}

        def fits(what: str, step: Step) -> bool:
            """Whether a step alone makes a part agree: no other step of the other part will."""
            key = (what, id(step))
            if key not in alone:
                model = self._model((step,))
                alone[key] = model is not None and self._agrees(what, model)
            return alone[key]

        for a, b in pairs:
            parts = {a.part, b.part}
            if a.id == b.id or (parts == {"bytes"} and not good["codes"]) or (parts == {"codes"} and not good["bytes"]):
                continue
            if parts == {"bytes", "codes"}:
                s, c = (a, b) if a.part == "bytes" else (b, a)
                if not (fits("bytes", s) and fits("codes", c)):
                    continue
            if parts == {"both", "bytes"} and not fits("codes", a if a.part == "both" else b):
                continue
            if parts == {"both", "codes"} and not fits("bytes", a if a.part == "both" else b):
                continue
            found = self.solution((a, b))
            if found:
                yield found

    def _deep(self, steps: list[Step]) -> Iterator[Solution]:
        """More than two steps: at most one of both parts, the fewest of the bytes, and up to three of the codes."""
        by_part = {name: [step for step in steps if step.part == name] for name in ("both", "bytes", "codes")}
        starts = []
        for rest in ((), *((step,) for step in by_part["both"])):
            ways = self._fitting("bytes", rest, by_part["bytes"], 1 if rest else 2)
            starts += [(rest, ways)] if ways else []
        starts.sort(key=lambda start: len(start[0]) + len(start[1][0]))
        for most in (1, 2, 3):
            found = False
            for rest, bytes_ways in starts[: _DEEPEST if most == 3 else None]:
                codes = by_part["codes"] if most == 1 else self._telling(rest, by_part["codes"])
                for c in self._fitting("codes", rest, codes, most):
                    for s in bytes_ways:
                        solution = self.solution(rest + s + c) if len(rest + s + c) > 2 else None
                        if solution:
                            found = True
                            yield solution
            if found:
                return

    def _telling(self, rest: tuple[Step, ...], steps: list[Step]) -> list[Step]:
        """The steps that change a code of the few blocks."""
        piece = self.pieces[0]
        start = self._model(rest) if rest else self.base
        if start is None:
            return []
        usual = piece.codes(start, piece.given_bytes(start))
        found = []
        for step in steps:
            model = self._model((*rest, step))
            if model is not None and (
                model.of_codes.packing != start.of_codes.packing
                or not np.array_equal(piece.codes(model, piece.given_bytes(model)), usual)
            ):
                found.append(step)
        return found

    def _fitting(self, what: str, rest: tuple[Step, ...], steps: list[Step], most: int) -> list[tuple[Step, ...]]:
        """The smallest sets of steps with which a part agrees."""
        for size in range(most + 1):
            found = []
            for some in combinations(steps, size):
                if len({step.id for step in some}) < size:
                    continue
                model = self._model(rest + some) if rest or some else self.base
                if model is not None and self._agrees(what, model):
                    found.append(some)
            if found:
                return found
        return []

    def _other_axis(self) -> Iterator[Solution]:
        """The whole output read as that of the other axis, in its own shapes or in those of x."""
        side = self.evidence.side
        if side.dump.rounding != "nearest-even" or self.base.rht is not None or self.base.arithmetic.row_scaled:
            return
        rows, length = side.shape
        packed, stored = side.found("packed"), side.found("scales")
        ways: dict[str, tuple[Array, Array]] = {}
        if rows == length:
            ways["transposed"] = (packed, stored)
        if rows % 16 == 0:
            ways["in-place"] = (transposed_codes(packed), stored)
        for name, (codes, scales) in ways.items():
            other = Evidence(side, "other", codes, scales)
            step = Step("blocks.wrong-axis", {"axis": name})
            for reading in other.readings:
                model = replace(other.base, scales=reading)
                piece = other.sample(np.zeros(other.plane, bool), _MINI)
                if piece.wrong_bytes(model) or piece.wrong_codes(model) or any(other.stored(model).values()):
                    continue
                yield Solution((step,), model, other)
                break

    # ---- everything ----------------------------------------------------------------------------------------

    def _verified(self, solutions: Iterable[Solution]) -> list[Solution]:
        """Those solutions that explain everything, one for each set of ids."""
        candidates: list[Solution] = []
        seen: set[tuple[tuple[str, ...], Model]] = set()
        for solution in solutions:
            key = (tuple(sorted(solution.ids)), _equivalent(solution.model))
            if key not in seen:
                seen.add(key)
                candidates.append(solution)
        kept: dict[tuple[str, ...], Solution] = {}
        for solution in candidates:
            ids = tuple(sorted(solution.ids))
            if ids not in kept and len(kept) < _MOST and explains_all(solution):
                kept[ids] = solution
        return list(kept.values())

    def _add_general(self, general: list[Step]) -> None:
        """A general explanation too, where so little departs that it is as good as the particular ones."""
        if self.departing > _FEW_BLOCKS:
            return
        known = {one.ids for one in self.findings.solutions}
        more = self._verified(self._singles([step for step in general if step.change == {"ulp": "any"}]))
        self.findings.solutions += [one for one in more if one.ids not in known]

    # ---- presets -------------------------------------------------------------------------------------------

    def _try_presets(self) -> None:
        """Named quantizers that explain everything; the deviations of the first, where nothing smaller was found.

        Where nothing was found at all, they are tried with the recorded amax as it is too, right or wrong.
        """
        findings, declared = self.findings, self.evidence.side.arithmetic
        more: tuple[tuple[Step, ...], ...] = ((),) if findings.solutions else ((), (_WRONG_AMAX,))
        for name, preset in nv.PRESETS.items():
            if name == declared.name:
                continue
            try:
                fields = of_fields(self.base.arithmetic, _like(preset, self.base, self.evidence))
            except (ValueError, KeyError):  # it cannot be what is declared, or not by known deviations
                continue
            steps = tuple(_layout_step(Step(id, change)) for id, change in fields.items())
            found = (self._preset_solution(steps + rest) for rest in more)
            solution = next((one for one in found if one is not None and explains_all(one)), None)
            if solution is None:
                continue
            findings.presets.append(name)
            if not findings.solutions or any(one.preset for one in findings.solutions):
                small = replace(self._reduced(solution), preset=name)
                sizes = [len(one.steps) for one in findings.solutions]
                if small.ids in [one.ids for one in findings.solutions]:
                    continue
                if not sizes or len(small.steps) < min(sizes):
                    findings.solutions = [small]
                elif len(small.steps) == min(sizes):
                    findings.solutions.append(small)

    def _preset_solution(self, steps: tuple[Step, ...]) -> Solution | None:
        """As ``_solution``, for steps that may name one field twice."""
        model: Model = self.base
        for step in steps:
            model = model.changed(step.change) or model
        if not steps or not self.evidence.applicable(model) or not self._explains(model):
            return None
        return Solution(_ordered(steps), model, self.evidence)

    def _reduced(self, solution: Solution) -> Solution:
        """Without the steps that change nothing here."""
        for step in reversed(solution.steps):
            rest = tuple(one for one in solution.steps if one is not step)
            found = self._preset_solution(rest) if rest else None
            if found is not None and explains_all(found):
                solution = found
        return solution

    # ---- with a remainder ----------------------------------------------------------------------------------

    def _partial(self) -> Solution | None:
        """Steps that each remove most of what is left in the sample, one after the other."""
        steps: tuple[Step, ...] = ()
        left = self._left(self.base)
        while len(steps) < 3:
            best: tuple[int, Step] | None = None
            for step in self.steps:
                model = self._model((*steps, step))
                if model is None or step.general and step.change == {"ulp": "any"} and not steps:
                    continue
                count = self._left(model, None if best is None else best[0])
                if count is not None and step.general:
                    count += count // 8 + 1  # a value fitted to the data has to explain more
                if count is not None and (best is None or count < best[0]):
                    best = (count, step)
            if best is None or left is None or best[0] * _GAIN > left:
                break
            left, steps = best[0], (*steps, best[1])
        model = self._model(steps) if steps else None
        return None if model is None else Solution(_ordered(steps), model, self.evidence)

    def _left(self, model: Model, limit: int | None = None) -> int | None:
        """What a model leaves in the sample; None when that is more than ``limit``."""
        wrong = 16 * self.sample.wrong_bytes(model)
        wrong += sum(self.evidence.stored(model).values())
        if limit is not None and wrong > limit:
            return None
        return wrong + self.sample.wrong_codes(model)


def explains_all(solution: Solution) -> bool:
    """Whether a solution explains every byte and code, and what was recorded beside them."""
    model, evidence = solution.model, solution.evidence
    if any(evidence.stored(model).values()):
        return False
    return not any(piece.wrong_bytes(model) or piece.wrong_codes(model) for piece in evidence.slabs())


def _general(change: Change) -> bool:
    return change in ({"ulp": "any"}, {"form": "ignored"}) or "amax" in change and change["amax"] != "before-transform"


def _ordered(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    order = list(DEVIATIONS)
    return tuple(sorted(steps, key=lambda step: order.index(step.id)))


def _settled(what: str, model: Model) -> Model:
    """A model without what its bytes, or its codes, do not depend on: the key under which a result is kept."""
    if what == "codes":
        return model
    return replace(model, codes_fields=(), words="declared", ulp="one")


def _equivalent(model: Model) -> Model:
    return replace(model, arithmetic=replace(model.arithmetic, name="te"))


def _like(preset: nv.Arithmetic, base: Model, evidence: Evidence) -> nv.Arithmetic:
    """A preset as it would make this dump: for this input, with what the dump declares kept."""
    kept: dict[str, Any] = {"row_scaled": base.arithmetic.row_scaled, "rht_sum": base.arithmetic.rht_sum}
    if evidence.base.block == (1, 16):
        kept["tile_scales"] = base.arithmetic.tile_scales
    if evidence.side.dump.rounding == "nearest-even" or evidence.declared_words is None:
        kept["stochastic"] = base.arithmetic.stochastic
    else:
        kept["stochastic"] = base.arithmetic.stochastic if preset.stochastic == "sm100" else preset.stochastic
    return replace(preset.for_input(evidence.dtype), **kept)


def _layout_step(step: Step) -> Step:
    """The layout of tile scales is a reading of what is stored, not arithmetic."""
    if "tile_scales" not in step.change:
        return step
    return Step(step.id, {"scales": "tiled" if step.change["tile_scales"] == "tiled" else "compact"})
