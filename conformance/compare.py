"""check(): is this dump what the arithmetic says, and if not, where does it depart?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from conformance.count import Array, Count, count, count_amax, count_codes
from conformance.gemm_check import GemmReport, check_gemm
from conformance.side import Side
from nvfp4ref.dump import Dump

CONFORMS, DIFFERS, NOT_JUDGED = "conforms", "differs", "not-judged"


@dataclass(frozen=True)
class Report:
    """The verdict on one dump.

    Attributes:
        verdict: "conforms", "differs" or "not-judged".
        outputs: counts by output: "packed" (by code), "scales", "amax", "global_scale", and "…_t" columnwise.
        stage: the first stage that departs (conformance.deviations.STAGES), None when none does.
        sentences: what a person can act on, one for each direction that departs.
        error: why nothing, or not all, could be judged; None otherwise.
        arithmetic: the name of the arithmetic that it was held against.
        deviations: named deviations that explain the differences.
        ambiguous: whether the data cannot tell several of them apart.
    """

    verdict: str
    outputs: dict[str, Count] = field(default_factory=dict)
    stage: str | None = None
    sentences: tuple[str, ...] = ()
    error: str | None = None
    arithmetic: str = "te"
    deviations: tuple[Any, ...] = ()
    ambiguous: bool = False

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 differs, 2 not judged."""
        return {CONFORMS: 0, DIFFERS: 1, NOT_JUDGED: 2}[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The object of ``nvfp4 check --json``: these keys, whatever the verdict."""
        return {
            "verdict": self.verdict,
            "error": self.error,
            "outputs": {name: count.to_json() for name, count in self.outputs.items()},
            "deviations": [deviation.to_json() for deviation in self.deviations],
            "ambiguous": self.ambiguous,
            "stage": self.stage,
        }

    def __str__(self) -> str:
        verdict = {CONFORMS: "conforms to", DIFFERS: "differs from", NOT_JUDGED: "not judged against"}
        stage = f", first at {self.stage}" if self.stage else ""
        lines = [f"{verdict[self.verdict]} {self.arithmetic}{stage}"]
        width = max(map(len, self.outputs), default=0)
        lines += [f"  {name:<{width}}  {count}" for name, count in self.outputs.items()]
        lines += [f"  {sentence}" for sentence in self.sentences]
        lines += [f"  {self.error}"] if self.error else []
        return "\n".join(lines)


def check(dump: Dump, arithmetic: str | nv.Arithmetic | None = None, *, diagnose: bool = True) -> Report:
    """Recompute a dump from its input and compare every output.

    The recorded amax is compared with max(abs(x)) as an output of its own; scales and codes are then judged
    with the recorded amax or global scale.  Padding of the scales is never compared.

    Args:
        dump: from nvfp4ref.load_dump, or built in memory.
        arithmetic: a preset's name or an Arithmetic; default: what the dump's meta says, else "te".
        diagnose: whether to look for the known deviations that explain a difference, which takes seconds; without
            them the report has the counts and the first stage by the shape of the difference.
    Raises:
        ValueError: an unknown arithmetic.
    """
    if isinstance(dump, dict):
        raise TypeError(f"check takes one dump, and this is {len(dump)}: pass them one by one, {', '.join(dump)}")
    resolved = dump.resolve_arithmetic(arithmetic)
    if dump.d is not None:
        return _of_gemm(check_gemm(dump, arithmetic), resolved)
    present = [suffix for suffix in ("", "_t") if getattr(dump, "packed" + suffix) is not None]
    sides = [Side(dump, suffix, resolved) for suffix in present]
    if dump.x is None:
        return _without_input(sides, resolved)
    judged = [_judge(side) for side in sides]
    report = _combined(judged, resolved)
    computed = [side for side, one in zip(sides, judged, strict=True) if one.outputs]
    return _named(report, computed, diagnose) if computed and report.verdict != CONFORMS else report


def _named(report: Report, sides: list[Side], diagnose: bool) -> Report:
    """A report with the first stage that departs and the known deviations that explain it."""
    from conformance.diagnose import at_a_glance, of_sides  # what nobody needs while everything conforms

    found = of_sides(sides) if diagnose else at_a_glance(sides)
    if found.stage is None:
        return _misshapen(report, sides)
    return replace(
        report,
        verdict=DIFFERS,
        deviations=found.deviations,
        ambiguous=found.ambiguous,
        stage=found.stage,
        sentences=found.sentences,
    )


def _misshapen(report: Report, sides: list[Side]) -> Report:
    """A report whose only difference is the shape of the stored scales: diagnosis reads them all the same."""
    said = [
        f"every byte is right, but scales{side.suffix} have shape {side.found('scales').shape} where the dump declares "
        f"{side.dump.scale_layout} ones: store (R, K/16), here {(side.shape[0], side.shape[1] // 16)}, not flat"
        for side in sides
        if side.declared_scales is None
    ]
    return replace(report, stage="layout", sentences=tuple(said)) if said else report


def _of_gemm(found: GemmReport, arithmetic: nv.Arithmetic) -> Report:
    """The verdict on a GEMM's result as a report; what explains it are models, alpha forms and splits of K."""
    distances = ", ".join(f"{distance} ulp: {n:,}" for distance, n in found.ulps.items())
    sentences = (*([f"distances {distances}"] if distances else []), *found.sentences)
    first = "unknown" if found.verdict == DIFFERS else None
    return Report(
        found.verdict,
        found.outputs,
        first,
        sentences,
        found.error,
        arithmetic.name,
        found.deviations,
        found.ambiguous,
    )


# ---- with the input ----------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """One direction judged: counts by full output name, and what could not be judged."""

    outputs: dict[str, Count]
    error: str | None = None


def _judge(side: Side) -> _Judged:
    nearest = side.nearest()
    try:
        nearest.expected  # noqa: B018 - the declaration may not go together, or not with this input
    except ValueError as reason:
        return _Judged({}, f"the {side.direction} output cannot be recomputed: {reason}")
    counts = {**_amaxes(side), "scales": _scales(nearest)}
    error = None
    try:
        counts["packed"] = count_codes(side.found("packed"), side.expected.packed)
    except (ValueError, TypeError) as reason:  # no random words, say, or of another kind: scales do not need them
        error = f"codes of the {side.direction} output were not judged: {reason}"
    return _Judged({name + side.suffix: one for name, one in counts.items()}, error)


def _amaxes(side: Side) -> dict[str, Count]:
    found = {name: side.found(name) for name in ("amax", "global_scale")}
    counts: dict[str, Count] = {}
    if found["amax"] is not None:
        counts["amax"] = count_amax(found["amax"], side.true_amax)
    if found["global_scale"] is not None:
        counts["global_scale"] = count_amax(found["global_scale"], side.expected_global_scale)
    return counts


def _scales(side: Side) -> Count:
    declared, expected = side.declared_scales, side.expected.scales
    if declared is None:  # not readable as declared: then nothing agrees
        stored = side.found("scales")
        what = f"shape {stored.shape}, no {side.dump.scale_layout} layout"
        return Count(expected.size, expected.size, [0, 0], what, f"{side.dump.scale_layout} ones of {expected.shape}")
    return count(declared, expected)


def _combined(judged: list[_Judged], arithmetic: nv.Arithmetic) -> Report:
    outputs = {name: count for one in judged for name, count in one.outputs.items()}
    errors = [one.error for one in judged if one.error is not None]
    differs = any(count.different for count in outputs.values())
    verdict = DIFFERS if differs else NOT_JUDGED if errors else CONFORMS
    return Report(verdict, outputs, "unknown" if differs else None, (), "; ".join(errors) or None, arithmetic.name)


# ---- without it --------------------------------------------------------------------------------------------


def _without_input(sides: list[Side], arithmetic: nv.Arithmetic) -> Report:
    """Only what no input could give is judged: then the dump differs whatever x was."""
    outputs: dict[str, Count] = {}
    sentences: list[str] = []
    for side in sides:
        scales = side.declared_scales
        if scales is not None:
            impossible, sentence = _impossible(side, scales)
            one = count(impossible, np.zeros_like(impossible))
            found = f"0x{scales[tuple(one.first)]:02X}" if one.first else ""
            outputs["scales" + side.suffix] = replace(one, found=found, expected="a byte that an input gives")
            sentences += [sentence] if impossible.any() else []
    error = "the dump has no input x, so codes and scales cannot be recomputed: save x with it"
    if sentences:
        return Report(DIFFERS, outputs, "block-scale", tuple(sentences), error, arithmetic.name)
    checked = sum(count.compared for count in outputs.values())
    error = f"{error}; none of {checked:,} scale bytes is impossible"
    return Report(NOT_JUDGED, error=error, arithmetic=arithmetic.name)


def _impossible(side: Side, scales: Array) -> tuple[Array, str]:
    """Scale bytes that no input gives: negative, NaN where NaN is dropped, unlike in the rows of a tile."""
    amax = side.found("amax")
    wrong = np.zeros(scales.shape, bool)
    said = []
    if amax is None or not np.signbit(amax).any():
        wrong |= scales >= 0x80
        said.append("negative")
    if side.arithmetic.block_scale_nan == "drop" and side.arithmetic.scale_overflow == "saturate":
        wrong |= (scales & 0x7F) == 0x7F
        said.append("NaN")
    if side.dump.block == (16, 16) and side.arithmetic.tile_scales == "repeated":
        wrong |= scales != np.repeat(scales[::16], 16, axis=0)
        said.append("not repeated over the 16 rows of a tile")
    return wrong, f"some block scales{side.suffix} are {' or '.join(said)}, which no input gives"
