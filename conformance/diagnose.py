"""diagnose(): which known deviations explain a dump that differs, or what its difference looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance import words
from conformance.deviations import DEVIATIONS, STAGES
from conformance.model import ARITHMETIC, as_text
from conformance.observed import Evidence
from conformance.relation import Relation, relate
from conformance.search import Differences, Findings, Solution, differences, search
from conformance.side import Side
from nvfp4ref.container import agreed
from nvfp4ref.dump import Dump

_FEW = 20
OUTPUTS = ("packed", "scales", "amax", "global_scale")


@dataclass(frozen=True)
class Deviation:
    """One deviation found in a dump.

    Attributes:
        id: of conformance.deviations.
        explains: how many differing items it accounts for, by output: "packed" (codes), "scales", and "…_t";
            "amax" and "global_scale" where they are recorded and differ.
        remaining: items that the whole explanation leaves unexplained.
        exact: whether it leaves none.
        arithmetic: the call that makes the explanation's arithmetic.
        stage: the first stage that departs.
        together: the ids that hold together with it; an explanation may take several.
        preset: the named quantizer that it is part of.
    """

    id: str
    explains: dict[str, int]
    remaining: int
    exact: bool
    arithmetic: str
    stage: str = "unknown"
    together: tuple[str, ...] = ()
    preset: str | None = None

    @property
    def what(self) -> str:
        """What the producer does, as a clause."""
        return DEVIATIONS[self.id].what

    @property
    def fix(self) -> str:
        """What to do about it."""
        return DEVIATIONS[self.id].fix

    def to_json(self) -> dict[str, Any]:
        """The object of ``nvfp4 check --json``, and beyond it what says more."""
        found: dict[str, Any] = {
            "id": self.id,
            "explains": dict(self.explains),
            "remaining": self.remaining,
            "exact": self.exact,
            "arithmetic": self.arithmetic,
            "stage": self.stage,
            "what": self.what,
            "fix": self.fix,
        }
        if self.together:
            found["together_with"] = list(self.together)
        if self.preset:
            found["preset"] = self.preset
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.explains.items() if n)
        rest = "" if self.exact else f"; {self.remaining:,} remain"
        return f"{self.id}: {self.what} ({counts or 'nothing'}{rest}). {self.fix[:1].upper()}{self.fix[1:]}."


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a dump.

    Attributes:
        deviations: every deviation of every explanation that is as good as the best.
        ambiguous: the data cannot tell several explanations apart.
        stage: the first stage that departs; None when nothing differs.
        sentences: what a person can act on.
        explanations: the ids of each explanation; those of one hold together.
        presets: named quantizers that make exactly this dump.
        relations: the shape of the difference, by direction, where no explanation is exact.
        solutions: the models behind, by direction, for suggest.py.
    """

    deviations: tuple[Deviation, ...] = ()
    ambiguous: bool = False
    stage: str | None = None
    sentences: tuple[str, ...] = ()
    explanations: tuple[tuple[str, ...], ...] = ()
    presets: tuple[str, ...] = ()
    relations: dict[str, Relation] = field(default_factory=dict)
    solutions: dict[str, tuple[Solution, ...]] = field(default_factory=dict, repr=False)


def diagnose(dump: Dump, arithmetic: str | nv.Arithmetic | None = None) -> list[Deviation]:
    """The known deviations that explain how a dump departs from an arithmetic; [] when it conforms.

    Args:
        dump: with its input x.
        arithmetic: a preset's name or an Arithmetic; default: what the dump's meta says, else "te".
    Returns:
        The deviations of the smallest explanation.  Where several explain the data equally well all are
        listed; ``diagnosis`` says which hold together.
    Raises:
        ValueError: the dump has no x, or holds a GEMM; an unknown arithmetic.
    """
    return list(diagnosis(dump, arithmetic).deviations)


def diagnosis(dump: Dump, arithmetic: str | nv.Arithmetic | None = None) -> Diagnosis:
    """As ``diagnose``, with the stage, the explanations, and the shape of what is not explained."""
    if isinstance(dump, dict):
        raise TypeError(f"diagnose takes one dump, and this is {len(dump)}: pass them one by one, {', '.join(dump)}")
    if dump.d is not None or dump.shape is None:
        raise ValueError("a GEMM result is no quantizer's output: diagnose its operands")
    if dump.x is None:
        raise ValueError("the dump has no input x, so there is nothing to explain its output by: save x with it")
    resolved = dump.resolve_arithmetic(arithmetic)
    sides = [Side(dump, suffix, resolved) for suffix in ("", "_t") if getattr(dump, "packed" + suffix) is not None]
    return of_sides(sides)


def of_sides(sides: Sequence[Side]) -> Diagnosis:
    """The diagnosis of one or both directions of a dump that has x."""
    found = {side.suffix: search(Evidence(side)) for side in sides}
    departing = {suffix: one for suffix, one in found.items() if one.departs}
    if not departing:
        return Diagnosis()
    chosen = _agreed(departing)
    relations = {
        suffix: _relation(one, chosen[suffix])
        for suffix, one in departing.items()
        if not chosen[suffix] or not _exact(one, chosen[suffix][0])
    }
    deviations = _merged([_deviations(one, chosen[suffix]) for suffix, one in departing.items()])
    presets = [set(one.presets) for one in departing.values()]
    common = set.intersection(*presets)
    named = tuple(name for name in nv.PRESETS if name in common)
    explanations = tuple(dict.fromkeys(one.ids for suffix in departing for one in chosen[suffix]))
    return Diagnosis(
        tuple(deviations),
        any(len({one.ids for one in chosen[suffix]}) > 1 for suffix in departing),
        _first_stage(departing, chosen, relations),
        tuple(_sentences(departing, chosen, relations, named)),
        explanations,
        named,
        relations,
        {suffix: tuple(solutions) for suffix, solutions in chosen.items()},
    )


def at_a_glance(sides: Sequence[Side]) -> Diagnosis:
    """The first stage that departs by the shape of the difference alone: no explanation is looked for."""
    evidence = {side.suffix: Evidence(side) for side in sides}
    found = {suffix: Findings(one, differences(one, one.base)) for suffix, one in evidence.items()}
    departing = {suffix: one for suffix, one in found.items() if one.departs}
    if not departing:
        return Diagnosis()
    relations = {suffix: _relation(one, []) for suffix, one in departing.items()}
    return Diagnosis(stage=_first_stage(departing, dict.fromkeys(departing, []), relations), relations=relations)


def _agreed(departing: dict[str, Findings]) -> dict[str, list[Solution]]:
    """The explanations of each direction; where some explain both, those alone: one producer made both."""
    exact = {suffix: one.solutions for suffix, one in departing.items()}
    if not all(exact.values()):  # what fits one direction by a free value is no explanation when it fails in the other
        exact = {suffix: [one for one in some if not one.general] for suffix, some in exact.items()}
    found = {suffix: exact[suffix] or ([one.partial] if one.partial else []) for suffix, one in departing.items()}
    if len(found) == 2:
        first, second = found.values()
        common = {one.ids for one in first} & {one.ids for one in second}
        if common:
            return {suffix: [one for one in some if one.ids in common] for suffix, some in found.items()}
        # one direction may show more of the same producer than the other
        subsets = {one.ids for one in first for other in second if set(one.ids) <= set(other.ids)}
        subsets |= {one.ids for one in second for other in first if set(one.ids) <= set(other.ids)}
        if subsets:
            kept = {suffix: [one for one in some if one.ids in subsets] or some for suffix, some in found.items()}
            return kept
    return found


def _exact(findings: Findings, solution: Solution) -> bool:
    return solution in findings.solutions


# ---- one direction -----------------------------------------------------------------------------------------


def _deviations(findings: Findings, solutions: list[Solution]) -> list[Deviation]:
    """The deviations of every explanation of a direction, each id once."""
    found: dict[str, Deviation] = {}
    for solution in solutions:
        for deviation in _of_solution(findings, solution):
            found.setdefault(deviation.id, deviation)
    return list(found.values())


def _of_solution(findings: Findings, solution: Solution) -> list[Deviation]:
    """The deviations of one explanation, each with what it adds to those before it."""
    exact, suffix = _exact(findings, solution), findings.evidence.side.suffix
    counts = [findings.baseline.counts, *_cumulative(findings, solution, exact)]
    remaining = sum(counts[-1].values())
    text = _text(findings, solution)
    deviations = []
    for step, before, after in zip(solution.steps, counts[:-1], counts[1:], strict=True):
        explains = {name + suffix: max(0, before.get(name, 0) - after.get(name, 0)) for name in OUTPUTS[:2]}
        for name in OUTPUTS[2:]:
            if before.get(name, 0) > after.get(name, 0):
                explains[name + suffix] = before[name] - after.get(name, 0)
        others = tuple(one for one in solution.ids if one != step.id)
        stage = _stage_of(step.id, findings.baseline)
        deviations.append(Deviation(step.id, explains, remaining, exact, text, stage, others, solution.preset))
    return deviations


def _cumulative(findings: Findings, solution: Solution, exact: bool) -> list[dict[str, int]]:
    """Differences left after the first step, the first two, … of an explanation."""
    left: list[dict[str, int]] = []
    base = findings.evidence.base
    nothing = dict.fromkeys(findings.baseline.counts, 0)
    previous = findings.baseline.counts
    for number in range(1, len(solution.steps) + 1):
        last = number == len(solution.steps)
        if last and exact:
            counts = nothing
        else:
            model = base
            for step in solution.steps[:number]:
                model = model.changed(step.change) or model
            ready = model != base and findings.evidence.applicable(model)
            counts = differences(findings.evidence, model).counts if ready else previous
            counts = {name: min(n, counts.get(name, 0)) for name, n in previous.items()}
        left.append(counts)
        previous = counts
    return left


def _text(findings: Findings, solution: Solution) -> str:
    """The call that makes the explanation's arithmetic."""
    name = findings.evidence.side.arithmetic.name
    if solution.preset:
        return f'nv.arithmetic("{solution.preset}")'
    merged: dict[str, Any] = dict(findings.evidence.side.arithmetic.fields())
    merged = {key: value for key, value in merged.items() if key in ARITHMETIC}
    for step in solution.steps:
        merged |= step.change
    return as_text(merged, name if name in nv.PRESETS else "te")


def _stage_of(ident: str, baseline: Differences) -> str:
    """The stage of a deviation; of a wrong amax that was recorded, the amax itself."""
    if ident in ("global-scale.wrong-amax", "hadamard.amax-before-transform") and baseline.counts.get("amax"):
        return "amax"
    return DEVIATIONS[ident].stage


def _relation(findings: Findings, solutions: list[Solution]) -> Relation:
    """The shape of what the partial explanation leaves, or of everything without one."""
    evidence = findings.evidence
    if not solutions:
        return relate(evidence, evidence.base, findings.baseline)
    model = solutions[0].model
    return relate(evidence, model, differences(evidence, model))


# ---- both --------------------------------------------------------------------------------------------------


def _merged(sides: list[list[Deviation]]) -> list[Deviation]:
    """Deviations of both directions: one that both have once, with the counts of both."""
    found: dict[str, Deviation] = {}
    for deviation in (one for side in sides for one in side):
        other = found.get(deviation.id)
        if other is None:
            found[deviation.id] = deviation
            continue
        found[deviation.id] = Deviation(
            deviation.id,
            {**other.explains, **deviation.explains},
            other.remaining + deviation.remaining,
            other.exact and deviation.exact,
            other.arithmetic if other.exact or not deviation.exact else deviation.arithmetic,
            min(other.stage, deviation.stage, key=STAGES.index),
            tuple(dict.fromkeys((*other.together, *deviation.together))),
            other.preset or deviation.preset,
        )
    return list(found.values())


def _first_stage(
    departing: dict[str, Findings], chosen: dict[str, list[Solution]], relations: dict[str, Relation]
) -> str:
    """The first stage that departs in any direction, by the best explanation, else by the shape.

    A shape that hardly anything has taken says little beside that of the other direction.
    """
    stages = []
    sizes = {suffix: sum(departing[suffix].baseline.counts.values()) for suffix in relations}
    for suffix, findings in departing.items():
        if chosen[suffix]:
            stages += [_stage_of(ident, findings.baseline) for ident in chosen[suffix][0].ids]
        if suffix in relations and sizes[suffix] * _FEW > max(sizes.values()):
            stages.append(relations[suffix].stage)
    return min(stages, key=STAGES.index)


def _sentences(
    departing: dict[str, Findings],
    chosen: dict[str, list[Solution]],
    relations: dict[str, Relation],
    presets: tuple[str, ...],
) -> list[str]:
    said = []
    for suffix, findings in departing.items():
        said += _of_direction(findings, chosen[suffix], relations.get(suffix))
    if presets:
        said.append(f"it is what the preset {' or '.join(presets)} gives, byte for byte")
    return list(dict.fromkeys(said))


def _of_direction(findings: Findings, solutions: list[Solution], relation: Relation | None) -> list[str]:
    side = findings.evidence.side
    said = []
    for number, solution in enumerate(solutions):
        exact = _exact(findings, solution)
        start = ("so does, on this data, " if number else "") + " with ".join(solution.ids)
        what = "; ".join(f"{DEVIATIONS[ident].what}: {DEVIATIONS[ident].fix}" for ident in solution.ids)
        verdict = "explains every byte" if exact else "explains most of it"
        values = [_value(step.change, side) for step in solution.steps]
        detail = f" ({', '.join(filter(None, values))})" if any(values) else ""
        said.append(f"{start}: {what}{detail}" if number else f"{start} {verdict}: {what}{detail}")
    if solutions and relation is None:
        said += _kinds(findings)
    if relation is not None:
        said.append(f"{'what remains' if solutions else 'no known deviation fits'}: {relation.sentence}")
        said.append(f"{side.direction}, where: {relation.where}")
        said += [f"e.g. {example}" for example in relation.examples]
    return said


def _value(change: Any, side: Side) -> str:
    """The fields that are changed and a value that was read out of the data, in words."""
    if isinstance(change.get("amax"), float):
        return f"it fits an amax of {np.float32(change['amax'])!s}, or a constant in place of 2688 that has this effect"
    if isinstance(change.get("words"), tuple):
        return _words(change["words"], side)
    said = [f"{key} is {value!r}" for key, value in change.items() if key in ARITHMETIC]
    return ", ".join(said)


def _words(specification: tuple[Any, ...], side: Side) -> str:
    """Which words they are."""
    kind, *rest = specification
    if kind == "rowwise":
        return {
            "flat": "the rowwise words in their order",
            "alone": "the first calls of each thread",
            "map": "the rowwise map over the transpose",
            "tile": "the rowwise words, each tile's transposed",
        }[rest[0]]
    if kind == "advanced":
        state = words.declared(side)
        rest = ["offset", (state.offset if state else 0) + rest[0]]
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return "the words are those of " + ", ".join(f"{name} {value}" for name, value in pairs)


def _kinds(findings: Findings) -> list[str]:
    """Whether the codes that differ are signs of zero or ties only."""
    evidence, baseline = findings.evidence, findings.baseline
    if baseline.counts.get("scales") or not baseline.counts.get("packed"):
        return []
    relation = relate(evidence, evidence.base, baseline)
    total = sum(relation.code_steps.values())
    if relation.signs_of_zero == total:
        return ["all codes that differ are zeros of the other sign: the decoded values are equal"]
    if relation.ties == total:
        return ["all codes that differ are those of ties"]
    if relation.signs_of_zero:
        differ = agreed(relation.signs_of_zero, "differs", "differ")
        return [f"{relation.signs_of_zero:,} of {total:,} codes looked at {differ} in the sign of zero only"]
    return []
