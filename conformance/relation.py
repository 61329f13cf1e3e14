"""What a difference looks like where no known deviation explains it: the stage, the numbers, the places.

The stage follows from what still agrees: scale bytes by themselves, codes given the scale bytes found, the order
of either.  The places are told from everything, the numbers from a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.model import Model
from conformance.observed import Array, Evidence, Piece
from conformance.search import Differences
from nvfp4ref import e2m1, e4m3
from nvfp4ref.container import agreed, counted

_EXAMPLES = 5
_MIDPOINTS = np.array(e2m1.MIDPOINTS, np.float32)


@dataclass(frozen=True)
class Example:
    """One element that differs, with every intermediate: name -> expected, and found where it was recorded."""

    place: tuple[int, int]
    expected: dict[str, str]
    found: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"row": self.place[0], "column": self.place[1], "expected": self.expected, "found": self.found}

    def __str__(self) -> str:
        found = ", ".join(f"{name} {value}" for name, value in self.found.items())
        expected = ", ".join(f"{name} {value}" for name, value in self.expected.items())
        return f"[{self.place[0]}, {self.place[1]}]: {expected}; found {found}"


@dataclass(frozen=True)
class Relation:
    """The shape of a difference.

    Attributes:
        stage: the first stage that can have made it.
        sentence: that, and what to look at.
        where: which elements, in words.
        scale_steps: distance in E4M3 codes, found less expected -> how many scale bytes (of the sample).
        code_steps: distance on the E2M1 grid, away from zero positive -> how many codes, given the bytes found.
        signs_of_zero, ties: codes that differ in the sign of a zero only; those whose scaled element is a tie.
        ratio: median of found over expected decoded block scale, where bytes differ.
        examples: up to five elements.
    """

    stage: str
    sentence: str
    where: str
    scale_steps: dict[int, int] = field(default_factory=dict)
    code_steps: dict[int, int] = field(default_factory=dict)
    signs_of_zero: int = 0
    ties: int = 0
    ratio: float | None = None
    examples: tuple[Example, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "where": self.where,
            "scale_steps": {str(k): v for k, v in self.scale_steps.items()},
            "code_steps": {str(k): v for k, v in self.code_steps.items()},
            "signs_of_zero": self.signs_of_zero,
            "ties": self.ties,
            "ratio": self.ratio,
            "examples": [example.to_json() for example in self.examples],
        }


def relate(evidence: Evidence, model: Model, apart: Differences) -> Relation:
    """The relation of what was found to what a model gives; ``apart`` are its differences."""
    piece = evidence.sample(apart.bytes | (apart.given > 0))
    sample = _Sample(piece, model)
    stage, sentence = _stage(evidence, apart, sample)
    return Relation(
        stage,
        sentence,
        where(apart),
        sample.scale_steps,
        sample.code_steps,
        sample.signs_of_zero,
        sample.ties,
        sample.ratio,
        tuple(_examples(evidence, model, apart)),
    )


class _Sample:
    """Numbers of a piece: what was found against what a model gives."""

    def __init__(self, piece: Piece, model: Model) -> None:
        self.found_bytes = piece.given_bytes(model)
        self.bytes = piece.bytes(model)
        self.found = piece.found_codes(model.of_codes.packing)
        self.codes = piece.codes(model, self.found_bytes)
        self.own_codes = piece.codes(model, self.bytes)
        self.scaled = np.abs(piece.scaled(model, self.found_bytes))
        self.wrong = self.found != self.codes
        self.wrong_bytes = self.found_bytes != self.bytes

    @property
    def scale_steps(self) -> dict[int, int]:
        wrong = self.wrong_bytes
        return _histogram(self.found_bytes[wrong].astype(int) - self.bytes[wrong])

    @property
    def distance(self) -> Array:
        """On the grid, positive away from zero; a changed sign counts across zero."""
        found, expected = _position(self.found[self.wrong]), _position(self.codes[self.wrong])
        toward = np.where(expected == 0, 1, np.sign(expected))
        return np.where(expected == 0, np.abs(found), (found - expected) * toward)

    @property
    def code_steps(self) -> dict[int, int]:
        return _histogram(self.distance)

    @property
    def signs_of_zero(self) -> int:
        found, expected = self.found[self.wrong], self.codes[self.wrong]
        return int(np.count_nonzero(((found | expected) & 7) == 0))

    @property
    def ties(self) -> int:
        return int(np.count_nonzero(np.isin(self.scaled[self.wrong], _MIDPOINTS)))

    @property
    def near_ties(self) -> int:
        y = self.scaled[self.wrong][:, None]
        return int(np.count_nonzero((np.abs(y - _MIDPOINTS) <= _MIDPOINTS * np.float32(2.0**-7)).any(1)))

    @property
    def ratio(self) -> float | None:
        wrong = self.wrong_bytes
        with np.errstate(all="ignore"):
            ratio = e4m3.VALUES[self.found_bytes[wrong]] / e4m3.VALUES[self.bytes[wrong]]
        ratio = ratio[np.isfinite(ratio)]
        return float(np.median(ratio)) if ratio.size else None

    @property
    def permuted(self) -> bool:
        """Whether most wrong blocks hold the expected codes in another order."""
        blocks = self.wrong.any(0)
        same = (np.sort(self.found[:, blocks], axis=0) == np.sort(self.codes[:, blocks], axis=0)).all(0)
        return blocks.any() and bool(same.mean() > 0.5)

    @property
    def reordered(self) -> bool:
        """Whether the wrong bytes are mostly the expected ones of other places."""
        wrong = self.wrong_bytes
        found, expected = (np.bincount(one[wrong], minlength=256) for one in (self.found_bytes, self.bytes))
        return bool(wrong.sum() > 8 and np.minimum(found, expected).sum() > 0.7 * wrong.sum())

    @property
    def other_scale(self) -> bool:
        """Whether the codes of nearly every wrong block are those of its elements times one other number."""
        blocks = self.wrong.any(0)
        index, y = self.found[:, blocks] & 7, self.scaled[:, blocks].astype(np.float64)
        low, high = np.array((0, *e2m1.MIDPOINTS)), np.array((*e2m1.MIDPOINTS, np.inf))
        with np.errstate(all="ignore"):
            least, most = low[index] / y, high[index] / y
        used = (y > 0) & np.isfinite(y)
        least, most = np.where(used, least, 0).max(0), np.where(used, most, np.inf).min(0)
        fits = (least <= most * (1 + 1e-6)) & (((self.found ^ self.codes)[:, blocks] & 8) == 0).all(0)
        return bool(fits.mean() > 0.9)

    def thresholds(self, everywhere: bool) -> bool:
        """Whether the codes found follow from the scaled elements by other midpoints, for each sign its own."""
        blocks = slice(None) if everywhere else self.wrong.any(0)
        y, found = self.scaled[:, blocks], self.found[:, blocks]
        for sign in (0, 8):
            some = (found & 8) == sign
            magnitude, index = y[some], found[some] & 7
            for code in range(7):
                below, above = magnitude[index <= code], magnitude[index > code]
                if below.size and above.size and below.max() >= above.min():
                    return False
        return True

    @property
    def lifted(self) -> bool:
        """Whether the codes found are those of the bytes expected: the bytes alone were changed."""
        blocks = self.wrong_bytes
        return blocks.any() and bool((self.found[:, blocks] == self.own_codes[:, blocks]).mean() > 0.98)


def _stage(evidence: Evidence, apart: Differences, sample: _Sample) -> tuple[str, str]:
    side = evidence.side
    scales, given = int(apart.bytes.sum()), int(apart.given.sum(dtype=np.int64))
    transformed = evidence.base.rht is not None and sample.wrong.mean() > 0.2
    if apart.counts.get("amax") and not transformed:
        return "amax", f"the recorded amax{side.suffix} is not max(abs(x)): check what it was reduced over, and when"
    if apart.counts.get("global_scale"):
        return "global-scale", f"the recorded global_scale{side.suffix} does not follow from the amax"
    if evidence.reading(evidence.base) is None:
        shape = side.found("scales").shape
        return "layout", f"scales{side.suffix} of shape {shape} are no known layout of {evidence.plane} blocks"
    if scales:
        return _stage_of_scales(evidence, sample, scales, given)
    return _stage_of_codes(evidence, apart, sample, given)


def _stage_of_scales(evidence: Evidence, sample: _Sample, scales: int, given: int) -> tuple[str, str]:
    suffix = evidence.side.suffix
    total = evidence.plane[0] * evidence.plane[1]
    steps = np.array(list(sample.scale_steps))
    share = sample.wrong.mean()
    if given * 50 < scales:
        by_one = sample.scale_steps.get(1, 0) + sample.scale_steps.get(-1, 0)
        what = "each by one step" if by_one == sum(sample.scale_steps.values()) else f"by {_range(steps)} steps"
        return "block-scale", (
            f"{scales:,} of {total:,} block scales{suffix} {agreed(scales, 'differs', 'differ')}, {what}, "
            "and the codes fit the bytes found: check the operations of the block scale, its rounding, "
            "and which elements form a block"
        )
    if sample.lifted:
        places = counted(scales, "place")
        agree = f"the codes fit the block scales{suffix} that were expected, and others are stored in {places}"
        if sample.reordered:
            return "layout", f"{agree}, where the same bytes stand in another order: check how they are laid out"
        one = sample.scale_steps.get(1, 0) + sample.scale_steps.get(-1, 0)
        return "block-scale", f"{agree}, {one:,} by one E4M3 step: check what wrote those bytes"
    if evidence.base.rht is not None and share > 0.02:
        return "transform", f"neither scales{suffix} nor codes{suffix} fit the declared transform: check its matrix"
    if scales == total and share < 0.2:
        return "global-scale", f"all block scales{suffix} differ by a factor of about {sample.ratio:.6g}: check S"
    if _far(sample) > 0.2:
        return "block-scale", (
            f"block scales{suffix} and codes{suffix} differ throughout: check which elements form a block, "
            "and whether x is what was quantized"
        )
    if sample.code_steps and max(map(abs, sample.code_steps)) == 1 and share < 0.05:
        return "global-scale", f"block scales{suffix} and codes{suffix} depart beside midpoints: check S and 1/S"
    return "block-scale", f"block scales{suffix} and codes{suffix} differ: check the block amax and the scale"


def _stage_of_codes(evidence: Evidence, apart: Differences, sample: _Sample, given: int) -> tuple[str, str]:
    suffix, wrong = evidence.side.suffix, int(sample.wrong.sum())
    agree = f"all scales{suffix} agree and {counted(given, 'code')} {agreed(given, 'does', 'do')} not"
    lanes = np.flatnonzero(apart.lanes)
    ties = ", all of them ties" if sample.ties == wrong else ""
    if sample.signs_of_zero == wrong:
        return "rounding", f"{agree}, in the sign of zero only: check how −0 and negatives that round to 0 are coded"
    if evidence.side.dump.rounding != "nearest-even" and _far(sample) < 0.1:
        return "random-bits", f"{agree}, by one step: check which random word feeds which element"
    if _signs_only(sample):
        if evidence.base.rht is not None:
            return "transform", f"{agree}, in their sign: check the signs of the transform"
        return "rounding", f"{agree}, in their sign: check the sign bit"
    if lanes.size <= 4 and given >= 3 and _far(sample) < 0.1:
        return "rounding", f"{agree}{ties}, in elements {_listed(lanes)} of a block: check how those are rounded"
    if _far(sample) > 0.05:
        if given <= 4:
            return "unknown", f"{agree}, by several steps: a few bytes were changed after they were made"
        if sample.permuted:
            return "packing", f"{agree}; blocks hold the expected codes in another order: check the packing"
        if sample.other_scale:
            return "encode-scale", f"{agree}, as if the encode scale of those blocks were another: check its operations"
        if evidence.base.rht is not None and sample.wrong.mean() > 0.3:
            return "transform", f"{agree}, many by several steps: check the transform"
        return "packing", f"{agree}, many by several steps: check which elements were packed where"
    if sample.thresholds(everywhere=True):
        return "rounding", f"{agree}{ties}, by one step, as if the midpoints were others: check the element's rounding"
    near = sample.near_ties == wrong
    if sample.thresholds(everywhere=False) and not near:
        return "rounding", f"{agree}, by one step, in some blocks as if the midpoints were others: check the rounding"
    return "encode-scale", (
        f"{agree}, by one step{' beside midpoints' if near else ''}: the scaled element is off by a little, so check "
        "how the encode scale is formed and applied"
    )


def _far(sample: _Sample) -> float:
    """Share of the wrong codes that are more than one step away."""
    distance = np.abs(sample.distance)
    return float((distance > 1).mean()) if distance.size else 0.0


def _signs_only(sample: _Sample) -> bool:
    return bool(((sample.found ^ sample.codes)[sample.wrong] == 8).all())


def _position(codes: Array) -> Array:
    """Place of each code on the grid −6 … 6; both zeros are 0."""
    index = (codes & 7).astype(np.int8)
    return np.where(codes & 8, -index, index)


def _histogram(values: Array) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return {int(value): int(count) for value, count in zip(found, counts, strict=True)}


def _range(values: Array) -> str:
    return f"{values.min():+d} to {values.max():+d}" if values.size else "0"


# ---- places ------------------------------------------------------------------------------------------------


def where(apart: Differences) -> str:
    """Which elements differ, in words."""
    blocks = apart.bytes | (apart.given > 0)
    rows, columns = np.flatnonzero(blocks.any(1)), np.flatnonzero(blocks.any(0))
    height, width = blocks.shape
    if not rows.size:
        return "none"
    said = []
    lanes = np.flatnonzero(apart.lanes)
    if not apart.bytes.any() and 0 < lanes.size < 16 and apart.lanes.sum() >= 8:
        said.append(f"elements {_listed(lanes)} of each block")
    if rows.size == 1 and height > 1:
        said.append(f"row {rows[0]}")
    elif height > 16 and rows[-1] // 16 == rows[0] // 16:
        said.append(f"rows {rows[0]}..{rows[-1]}{', one tile' if columns.size == 1 else ''}")
    elif rows.size < height and _stride(rows):
        said.append(f"every {_stride(rows)}th row from {rows[0]}")
    if columns.size == 1 and width > 1:
        place = {0: "the first", width - 1: "the last"}.get(int(columns[0]), f"number {columns[0]}")
        said.append(f"{place} block of each row" if rows.size > 1 else f"block {columns[0]}")
    elif columns.size < width and _stride(columns):
        said.append(f"every {_stride(columns)}th block from {columns[0]}")
    return "; ".join(said) or ("all blocks" if blocks.all() else f"{int(blocks.sum()):,} of {blocks.size:,} blocks")


def _stride(places: Array) -> int | None:
    steps = np.unique(np.diff(places))
    return int(steps[0]) if len(places) > 2 and steps.size == 1 and steps[0] > 1 else None


def _listed(items: Array) -> str:
    return ", ".join(map(str, items))


# ---- examples ----------------------------------------------------------------------------------------------


def _examples(evidence: Evidence, model: Model, apart: Differences) -> list[Example]:
    """The first elements that differ: of codes given the bytes found, else of scale bytes."""
    wrong = apart.given > 0 if apart.given.any() else apart.bytes
    at = np.flatnonzero(wrong)[:: max(1, int(wrong.sum()) // _EXAMPLES)][:_EXAMPLES]
    found = []
    for row, column in zip(*np.unravel_index(at, wrong.shape), strict=True):
        found.append(_example(evidence, model, int(row), int(column)))
    return found


def _example(evidence: Evidence, model: Model, row: int, column: int) -> Example:
    """The first wrong element of a block, from a piece that holds its tile and its neighbours."""
    rows, columns = evidence.plane
    top = row // 16 * 16 if rows % 16 == 0 else row
    width = max(2, (model.rht.size if model.rht else 16) // 16)
    left = column // width * width
    piece = Piece(evidence, (slice(top, top + (16 if rows % 16 == 0 else 1)), slice(left, min(left + width, columns))))
    place = (row - top, column - left)
    ours, theirs = piece.bytes(model), piece.given_bytes(model)
    found, codes = piece.found_codes(model.of_codes.packing), piece.codes(model, theirs)
    lane = int((found != codes)[(slice(None), *place)].argmax())
    scale = piece.scale(model, model.of_bytes)
    s = np.broadcast_to(scale.encode, ours.shape)[place]
    at = (lane, *place)
    expected = {
        "x": _number(piece.values(model)[at]),
        "S": _number(s),
        "a": _number(piece.block_amax(model)[place]),
        "block scale": _number(piece.block_scale(model)[place]),
        "byte": f"0x{ours[place]:02X}",
        "e": _number(piece.encode_scale(model, theirs)[place]),
        "y": _number(piece.scaled(model, theirs)[at]),
        "code": f"0x{codes[at]:X}",
    }
    return Example((row, 16 * column + lane), expected, {"byte": f"0x{theirs[place]:02X}", "code": f"0x{found[at]:X}"})


def _number(value: Any) -> str:
    value = np.float32(value)
    return f"{value!s} (0x{int(value.view(np.uint32)):08X})"
