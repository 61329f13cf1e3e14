"""The suite tested by planting faults: does ``quick`` detect each, after how many cases, and what does diagnosis say.

``python -m conformance.detection`` writes docs/detection.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import nvfp4ref as nv
from conformance import plant, suggest
from conformance.deviations import DEVIATIONS, Entry, changes
from conformance.diagnose import Diagnosis, diagnosis
from conformance.model import Change, as_text
from conformance.observed import Evidence
from conformance.search import differences
from conformance.side import Side
from nvfp4hw.backends.base import Case
from nvfp4ref.dump import Dump

PATH = Path(__file__).parents[1] / "docs" / "detection.md"
Quantizer = Callable[[Case], Dump | None]


@lru_cache(maxsize=1)
def probes() -> tuple[Case, ...]:
    """The tensors on which a fault is named: every boundary in float32, then with a transform, then random words."""
    wide, narrow = suggest.probe("float32"), suggest.probe("bfloat16")
    both = [Case(f"probe.f32.{b[0]}x{b[1]}", "probe", wide, block=b, directions="both") for b in ((1, 16), (16, 16))]
    rht = Case("probe.bf16.rht", "probe", narrow, directions="both", rht_t=nv.RHT())
    square = Case("probe.f32.square", "probe", wide[:128, :128], directions="both")
    extra = [case for case in plant.quick() if case.family == "stochastic"]
    return (*both, rht, square, *extra)


def departs(dump: Dump) -> bool:
    """Whether a dump differs from what it declares."""
    sides = [suffix for suffix in ("", "_t") if getattr(dump, "packed" + suffix) is not None]
    resolved = dump.resolve_arithmetic()
    evidence = (Evidence(Side(dump, suffix, resolved)) for suffix in sides)
    return any(any(differences(one, one.base).counts.values()) for one in evidence)


@dataclass(frozen=True)
class Result:
    """What became of one planted fault.

    Attributes:
        name, form: the deviation and its form, or the mutant.
        applicable: quick cases to which it applies.
        tried: how many of those were run until one departed; None: none departs.
        case: the first that does.
        probe: the tensor on which it was named.
        said: the diagnosis there.
        named: whether an exact explanation is the fault alone (``mutant``: whether the stage is right).
    """

    name: str
    form: str
    applicable: int
    tried: int | None
    case: str
    probe: str
    said: Diagnosis | None
    named: bool


def detect(quantizer: Quantizer) -> tuple[int, int | None, Case | None, Dump | None]:
    """Applicable quick cases, how many were run until one departed, that case, and the dump."""
    applicable, tried, found, bad = 0, None, None, None
    for case in plant.quick():
        if found is not None and applicable:
            break
        dump = quantizer(case)
        if dump is None:
            continue
        applicable += 1
        if found is None and not _conforms(dump, case):
            tried, found, bad = applicable, case, dump
    return applicable, tried, found, bad


def _conforms(dump: Dump, case: Case) -> bool:
    right = plant.conforming(case)
    declared = ("arithmetic", "scale_layout", "rht_t", "rounding")
    if all(getattr(dump, name) == getattr(right, name) for name in declared):
        return plant.same(dump, right)
    return not departs(dump)


def on_probe(quantizer: Quantizer, fallback: tuple[Case, Dump]) -> tuple[str, Dump]:
    """The first probe on which a fault shows, else the quick case that detected it."""
    for case in probes():
        dump = quantizer(case)
        if dump is not None and not _conforms(dump, case):
            return case.id, dump
    return fallback[0].id, fallback[1]


def explains(said: Diagnosis, ids: set[str]) -> bool:
    """Whether one of the exact explanations consists of these ids, or of those of them that show."""
    return not said.relations and any(set(one) <= ids and one for one in said.explanations)


def of_entry(entry: Entry, change: Change) -> Result:
    """One form of a known deviation."""

    def quantizer(case: Case) -> Dump | None:
        return plant.planted_entry(entry, change, case)

    applicable, tried, case, dump = detect(quantizer)
    form = _form(entry, change)
    if case is None or dump is None:
        return Result(entry.id, form, applicable, None, "", "", None, False)
    probe, shown = on_probe(quantizer, (case, dump))
    said = diagnosis(shown)
    stale = {"global-scale.wrong-amax"} if probe.startswith("given-amax") else set()
    return Result(entry.id, form, applicable, tried, case.id, probe, said, explains(said, {entry.id} | stale))


def _form(entry: Entry, change: Change) -> str:
    if entry.against:
        return "te, declared as " + ", ".join(f"{key} {value}" for key, value in entry.against.items())
    text = as_text(change)
    return text.removeprefix('nv.arithmetic("te"').removeprefix(", ").removeprefix("); ").removesuffix(")")


def of_mutant(mutant: plant.Mutant) -> Result:
    """One fault that no list names."""
    applicable, tried, case, dump = detect(mutant.quantize)
    if case is None or dump is None:
        return Result(mutant.name, mutant.stage, applicable, None, "", "", None, False)
    probe, shown = on_probe(mutant.quantize, (case, dump))
    said = diagnosis(shown)
    return Result(mutant.name, mutant.stage, applicable, tried, case.id, probe, said, said.stage == mutant.stage)


# ---- the table ---------------------------------------------------------------------------------------------

#: Forms that change no output of a right quantizer, and why.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("block-scale.nan-kept", ""): "S is never NaN and NaN elements do not reach a, so s is never NaN",
    ("block-scale.unclamped", ""): "an infinite s saturates to 448 without the clamp too",
    ("block-scale.nan-byte", ""): "no block scale is NaN",
    ("encode-scale.unclamped", "encode_nan='propagate'"): "1/(d·(1/S)) is never NaN: d is not, and 1/S is not 0",
    ("encode-scale.nan-as-zero", ""): "no block scale is NaN",
    ("element.nan-code", "nan_block_codes=(3, 4, 12)"): "no block scale is NaN",
}
_PAIRS = 100
_NOT_HERE = "applies to no quick case: it departs from a quantizer other than te"


def why_equivalent(result: Result) -> str | None:
    """Why a fault that no case shows cannot change an output; None when it is not known to be so."""
    if not result.applicable or result.form.startswith("stochastic="):
        return _NOT_HERE
    return EQUIVALENT.get((result.name, ""), EQUIVALENT.get((result.name, result.form)))


def results() -> tuple[list[Result], list[Result]]:
    """Of every form of every known deviation, and of every mutant."""
    return [of_entry(entry, change) for entry, change in changes()], [of_mutant(one) for one in plant.MUTANTS]


def pairs(number: int = _PAIRS, seed: int = 2026) -> tuple[int, int]:
    """How many of so many random pairs of deviations, both of which show on a probe, are named."""
    random = Random(seed)
    forms = [(entry, change) for entry, change in changes() if not entry.against and "axis" not in change]
    named = done = 0
    while done < number:
        (a, first), (b, second) = random.sample(forms, 2)
        if a.id == b.id or _keys(first) & _keys(second):
            continue
        dump = _both_show(first, second, tuple(set(a.directions) & set(b.directions)))
        if dump is not None:
            done += 1
            named += explains(diagnosis(dump), {a.id, b.id})
    return named, done


def _keys(change: Change) -> set[str]:
    return {key.rpartition(".")[2] for key in change}


def _both_show(first: Change, second: Change, directions: tuple[str, ...]) -> Dump | None:
    """The dump of a quantizer with both, on the first probe where neither is hidden by the other."""
    for case in probes():
        dump = plant.planted([first, second], case, directions)
        alone = [plant.planted(one, case, directions) for one in (first, second)]
        if dump is not None and all(one is not None and not plant.same(dump, one) for one in alone):
            return dump
    return None


def page(known: list[Result], mutants: list[Result], named_pairs: tuple[int, int]) -> str:
    """The whole of docs/detection.md."""
    shown = [one for one in known if one.tried is not None]
    lines = [
        _HEAD,
        "| planted | can show | detected by `quick` | named |",
        "|---|---|---|---|",
        f"| known deviations, in {len(known)} forms | {len(shown)} | {len(shown)} "
        f"| {sum(one.named for one in shown)} |",
        f"| pairs of them, at random | {named_pairs[1]} | {named_pairs[1]} | {named_pairs[0]} |",
        f"| mutants that no list names | {len(mutants)} | {sum(one.tried is not None for one in mutants)} "
        f"| stage right: {sum(one.named for one in mutants)} |",
        "",
        "## Known deviations",
        "",
        "| deviation | form | cases | shown by | diagnosed on | diagnosis |",
        "|---|---|---|---|---|---|",
        *map(row, known),
        "",
        "## Mutants",
        "",
        "| mutant | stage | cases | shown by | diagnosed on | diagnosis |",
        "|---|---|---|---|---|---|",
        *map(row, mutants),
    ]
    return "\n".join(lines) + "\n"


_HEAD = """# The suite, tested with planted faults

<!-- made by python -m conformance.detection: run it again when deviations, mutants or cases change -->

Each row is a quantizer that is wrong in one way, run through the `quick` suite. *Cases*: how many of the cases that
apply to it were run until one departed. It was then diagnosed on the suite's tensors of boundary cases (`probe`), or
where it does not show there on the case that detected it. *Diagnosis* lists the explanations that are exact on that
tensor, `|` between alternatives and `+` between deviations that hold together; for a mutant, which is in no list, the
stage that was told, and in parentheses what has the same effect there.

A right quantizer departs in no case and is named nothing; tests/test_plant.py holds that for every case.
"""
_MOST = 3


def row(one: Result) -> str:
    """One line of a table."""
    cells = [one.name, f"`{one.form}`" if one.name in DEVIATIONS else one.form]
    if one.tried is None:
        cells += ["—", "", "", why_equivalent(one) or "NOT DETECTED"]
    else:
        cells += [str(one.tried), one.case, one.probe, _diagnosed(one)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _diagnosed(one: Result) -> str:
    assert one.said is not None
    said = one.said
    some = [" + ".join(ids) for ids in said.explanations]
    text = " | ".join(some[:_MOST]) + (f" | … {len(some) - _MOST} more" if len(some) > _MOST else "")
    if one.name in DEVIATIONS:
        return text if one.named else f"NOT NAMED: {text or said.stage}"
    exact = "same effect: " if not said.relations else "most of it: "
    return f"{said.stage}{'' if one.named else ' (WRONG)'}{f' ({exact}{text})' if text else ''}"


if __name__ == "__main__":
    PATH.write_text(page(*results(), pairs()), encoding="utf-8")
