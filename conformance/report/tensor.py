"""All that a page shows of one checked dump: verdict, named deviations, pictures, histograms, elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.compare import CONFORMS, Report
from conformance.count import Count
from conformance.deviations import DEVIATIONS, Entry
from conformance.report.drawing import picture
from conformance.report.examples import Example, examples
from conformance.report.places import PICKED, Bar, Grid, Sheet, close_up, survey
from conformance.side import Side
from nvfp4ref.container import agreed, counted
from nvfp4ref.dump import Dump

_LISTED = 5  # rows, tiles and lanes that are named
_EVEN = 1.5  # times the mean, below which the largest count is no place of its own


@dataclass(frozen=True)
class Picture:
    """A grid as a page shows it.

    Attributes:
        image: a PNG as a data URI, one pixel a cell.
        title, summary: what it shows, and what stands out, in words.
        width: of the picture in CSS pixels; ``columns`` and ``rows`` are its cells.
        lines: columns and rows after which a line marks a block or a tile; 0 for none.
        data: what the script needs to read out a cell.
    """

    image: str
    title: str
    summary: str
    rows: int
    columns: int
    width: int
    lines: tuple[int, int]
    strongest: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Histogram:
    """Distances of what was found from what was expected, and the commonest pairs."""

    title: str
    bars: list[Bar]
    pairs: list[tuple[str, str, int]]

    @property
    def most(self) -> int:
        """The largest count."""
        return max(bar.count for bar in self.bars)


@dataclass(frozen=True)
class Direction:
    """The rowwise or the columnwise output where it differs."""

    name: str
    pictures: list[Picture]
    histograms: list[Histogram]
    examples: list[Example]
    explanations: int = 0  # of the dump, as many as an example has causes at most
    note: str = ""


@dataclass(frozen=True)
class Named:
    """A deviation: the object of ``--json``, and its entry in the list of known ones (None for a GEMM's)."""

    found: dict[str, Any]
    entry: Entry | None


@dataclass(frozen=True)
class Tensor:
    """One checked dump.

    ``backend``, ``family`` and ``verdict`` are those of a case of the suite; ``held`` says what it is held against
    here, which may be another preset than the one that the verdict is about.
    """

    label: str
    report: Report
    facts: dict[str, str]
    deviations: list[Named]
    directions: list[Direction]
    backend: str = ""
    family: str = ""
    verdict: str = ""
    held: str = ""

    @property
    def total(self) -> Count:
        """All outputs together."""
        return sum(self.report.outputs.values(), Count(0, 0))

    @property
    def sentences(self) -> list[str]:
        """What the report says beyond its deviations and examples, which have places of their own."""
        told = [one.entry.what for one in self.deviations if one.entry is not None]
        some = [sentence for sentence in self.report.sentences if not sentence.startswith("e.g. ")]
        return [sentence for sentence in some if not any(what in sentence for what in told)]


def tensor(
    label: str,
    report: Report,
    dump: Dump | None,
    arithmetic: str | nv.Arithmetic | None = None,
    elements: int = PICKED,
) -> Tensor:
    """What there is to show.

    Args:
        label: a name for people.
        report: what ``check`` said, by the same arithmetic.
        dump: None when it could not be read.
        elements: how many to show of a direction; 0 for the verdict alone.
    """
    deviations = [Named(one.to_json(), DEVIATIONS.get(getattr(one, "id", ""))) for one in report.deviations]
    directions: list[Direction] = []
    if elements and dump is not None and report.verdict != CONFORMS and report.outputs:
        directions = _directions(dump, dump.resolve_arithmetic(arithmetic), elements)
    facts = {} if dump is None else _facts(dump)
    return Tensor(label, report, facts, deviations, directions, verdict=report.verdict, held=report.arithmetic)


def _facts(dump: Dump) -> dict[str, str]:
    """What the dump says of itself."""
    if dump.d is not None:
        facts = {"GEMM result": f"{dump.d_dtype} {_shape(dump.d.shape)}"}
    else:
        facts = {"tensor": f"{dump.x_dtype} {_shape(dump.shape or ())}"}
        facts |= {"blocks": _shape(dump.block), "rounding": dump.rounding, "scale layout": dump.scale_layout}
        transformed = [name for name, rht in (("rowwise", dump.rht), ("columnwise", dump.rht_t)) if rht is not False]
        facts |= {"Hadamard transform": " and ".join(transformed)} if transformed else {}
    producer = ", ".join(str(value) for value in dump.producer.values())
    return facts | ({"producer": producer} if producer else {})


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


# ---- a direction -------------------------------------------------------------------------------------------


def _directions(dump: Dump, arithmetic: nv.Arithmetic, elements: int) -> list[Direction]:
    from conformance.diagnose import Diagnosis, of_sides  # as compare.py: what nobody needs while everything conforms

    if dump.x is None or dump.d is not None:
        return []
    sides = [Side(dump, suffix, arithmetic) for suffix in ("", "_t") if getattr(dump, "packed" + suffix) is not None]
    sheets: dict[str, dict[str, Sheet]] = {}
    notes: dict[str, str] = {}
    for side in sides:
        try:
            sheets[side.suffix] = survey(side)
        except ValueError as reason:
            notes[side.suffix] = f"it cannot be recomputed: {reason}"
    readable = [side for side in sides if side.suffix in sheets]
    diagnosis = of_sides(readable) if readable else Diagnosis()
    found = []
    for side in sides:
        some, note = sheets.get(side.suffix, {}), notes.get(side.suffix, "")
        if side.suffix in sheets and side.declared_scales is None:
            shape = _shape(side.found("scales").shape)
            note = f"stored scales of shape {shape} are no {dump.scale_layout} layout, so none is drawn"
        if some or note:
            found.append(_direction(side, some, diagnosis, note, elements))
    return found


def _direction(side: Side, sheets: dict[str, Sheet], diagnosis: Any, note: str, elements: int) -> Direction:
    pictures = [_picture(grid, sheet) for sheet in sheets.values() for grid in _grids(side, sheet)]
    histograms = [_histogram(sheet) for sheet in sheets.values()]
    try:
        some = examples(side, sheets, diagnosis, elements) if sheets else []
    except ValueError:  # stochastic without its random words: no code can be followed
        some = []
    return Direction(side.direction, pictures, histograms, some, len(diagnosis.solutions.get(side.suffix, ())), note)


def _grids(side: Side, sheet: Sheet) -> Iterator[Grid]:
    """The map, of codes a close-up of the first differences, and tiles or atoms laid on one another.

    A map whose cells are elements is a close-up already, of everything.
    """
    map_, *folded = sheet.grids()
    if sheet.item != "codes":
        yield from (map_, *folded)
        return
    if map_.cell != (1, 1):
        yield map_
    near = close_up(side, sheet.places[0], sheet.shape if map_.cell == (1, 1) else None)
    yield near if map_.cell != (1, 1) else replace(near, view="map")
    yield from folded


# ---- pictures ----------------------------------------------------------------------------------------------


def _picture(grid: Grid, sheet: Sheet) -> Picture:
    rows, columns = grid.counts.shape
    size = max(2, min(12, 560 // columns, 480 // rows))
    share = grid.counts / grid.compared
    at = np.unravel_index(int(share.argmax()), share.shape)
    strongest = f"{grid.counts[at]:,} of {grid.compared[at]:,}"
    data: dict[str, Any] = {
        "item": grid.item,
        "view": grid.view,
        "rows": rows,
        "columns": columns,
        "origin": list(grid.origin),
        "cell": list(grid.cell),
        "shape": list(grid.shape),
    }
    if grid.found:
        data |= {"found": grid.found, "expected": grid.expected}
    else:
        data |= {"counts": _sparse(grid.counts), "sizes": [size.tolist() for size in grid.sizes]}
    return Picture(
        picture(grid),
        _title(grid),
        _summary(grid, sheet),
        rows,
        columns,
        size * columns,
        _lines(grid),
        "" if grid.steps is not None else strongest,
        data,
    )


def _sparse(counts: Any) -> list[int]:
    """Runs of zeros as negative numbers: −n is n cells without a difference."""
    found: list[int] = []
    for count in counts.reshape(-1).tolist():
        if count:
            found.append(count)
        elif found and found[-1] < 0:
            found[-1] -= 1
        else:
            found.append(-1)
    return found


def _title(grid: Grid) -> str:
    item = {"codes": "Codes", "scales": "Scale bytes"}[grid.item]
    if grid.view == "tile":
        return f"{item}, all {_shape(grid.counts.shape)} tiles laid on one another"
    if grid.view == "atom":
        atoms = _shape(grid.counts.T.shape)
        return f"{item}, all {atoms} atoms of the layout laid on one another, rows from left to right"
    if grid.view == "close-up":
        return f"{item} around the first difference, element by element"
    if grid.cell == (1, 1):
        return f"{item}, the whole tensor, {'element by element' if grid.item == 'codes' else 'block by block'}"
    unit = "elements" if grid.item == "codes" else "blocks"
    return f"{item}, the whole tensor, {_shape(grid.cell)} {unit} a cell"


def _summary(grid: Grid, sheet: Sheet) -> str:
    """What stands out, for who does not see the picture."""
    if grid.view == "close-up":
        rows, columns = grid.counts.shape
        top, left = grid.origin
        number = int(grid.counts.sum())
        codes = f"{counted(number, 'code')} {agreed(number, 'differs', 'differ')}"
        return f"{codes} in rows {top} to {top + rows - 1}, columns {left} to {left + columns - 1}"
    if grid.view in ("tile", "atom"):
        down, across = ("row of the tile", "lane") if grid.view == "tile" else ("block of the atom", "row of the atom")
        return f"by {across}: {_places(grid.counts.sum(0))}; by {down}: {_places(grid.counts.sum(1))}"
    touched = int(np.count_nonzero(sheet.by_row))
    cells = int(np.count_nonzero(grid.counts))
    return (
        f"{counted(sheet.different, 'code' if grid.item == 'codes' else 'scale byte')} "
        f"{agreed(sheet.different, 'differs', 'differ')}, in {touched:,} of {counted(len(sheet.by_row), 'row')} and "
        f"{cells:,} of {counted(grid.counts.size, 'cell')}; by row: {_places(sheet.by_row)}"
    )


def _places(counts: Any) -> str:
    """The places with most differences, where some have more than others."""
    if counts.min() and counts.max() < _EVEN * counts.mean():
        return f"everywhere, {counts.min():,} to {counts.max():,}"
    order = np.argsort(-counts, kind="stable")[:_LISTED]
    some = [f"{place} ({counts[place]:,})" for place in order if counts[place]]
    more = int(np.count_nonzero(counts)) - len(some)
    return ", ".join(some) + (f" and {more:,} more" if more else "")


def _lines(grid: Grid) -> tuple[int, int]:
    """Cells after which a line is drawn, (columns, rows): blocks and tiles where cells are elements."""
    if grid.view == "tile":
        return (4, 4)
    if grid.cell != (1, 1) or grid.view == "atom":
        return (0, 0)
    return (16, 16) if grid.item == "codes" else (4, 16)


# ---- histograms --------------------------------------------------------------------------------------------


_STEPS = {
    "codes": "Codes: steps on the E2M1 grid, + away from zero",
    "scales": "Scale bytes: steps in E4M3 codes, found − expected",
}


def _histogram(sheet: Sheet) -> Histogram:
    show = _code if sheet.item == "codes" else _byte
    pairs = [(show(expected), show(found), n) for expected, found, n in sheet.commonest()]
    return Histogram(_STEPS[sheet.item], sheet.bars(), pairs)


def _code(code: int) -> str:
    return f"0x{code:X} ({nv.e2m1.decode(np.array([code], np.uint8))[0]:g})"


def _byte(byte: int) -> str:
    return f"0x{byte:02X} ({nv.e4m3.decode(np.array([byte], np.uint8))[0]:g})"
