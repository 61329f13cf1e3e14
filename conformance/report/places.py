"""Where the codes and the scale bytes of one direction of a dump differ from what is expected, and by how much.

Everything is counted, nothing sampled: a slab of rows at a time, so that a dump of any size can be looked at.
Places are those of the result: row, and column along the blocked axis; scale bytes have a row and a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from conformance.count import Array
from conformance.side import Side, slabs

ROWS, COLUMNS = 96, 160  # cells of a map at most
CLOSE = (32, 128)  # elements of a close-up
PICKED = 16  # places that a sheet keeps as examples
_SEPARATE = 8  # steps that a histogram counts one by one
_TAILS = (16, 64)  # upper ends of its further classes


@dataclass(frozen=True, eq=False)
class Grid:
    """Differences by place, the cells of a picture.

    Attributes:
        item: "codes" or "scales".
        view: "map" (the whole tensor), "close-up" (element by element), "tile" (every 16x16 tile laid on one
            another: row of the tile, lane of the block) or "atom" (every 128x4 atom of the swizzled layout, block down
            and row across).
        counts: (rows, columns) of items that differ in each cell.
        sizes: items in the cells of each row and of each column; their product is what a cell holds.
        origin: row and column of the first cell.
        cell: rows and columns, of items, that a cell covers; of a map and a close-up.
        shape: rows and columns of all items.
        found, expected: a close-up's codes, one hexadecimal digit a cell.
        steps: a close-up's distances on the E2M1 grid.
    """

    item: str
    view: str
    counts: Array
    sizes: tuple[Array, Array]
    origin: tuple[int, int]
    cell: tuple[int, int]
    shape: tuple[int, int]
    found: str = ""
    expected: str = ""
    steps: Array | None = None

    @property
    def compared(self) -> Array:
        """Items in each cell."""
        return np.multiply.outer(*self.sizes)


@dataclass(frozen=True)
class Bar:
    """One class of a histogram; ``given`` counts only codes whose block has the expected scale byte."""

    label: str
    count: int
    given: int | None = None


@dataclass(eq=False)
class Sheet:
    """The differences of one output, "codes" or "scales", of one direction.

    Attributes:
        shape: (R, K) of codes, (R, K/16) of scales.
        cell: what a cell of the map covers.
        map: (…, …) differing items of each cell; fold: the same of each place of a tile, or of an atom.
        by_row: (R,) differing items of each row.
        pairs: (expected, found) counts where they differ; given: the same where the scale byte is the expected one.
        places: up to 16 places that differ, the first five and others spread evenly.
    """

    item: str
    shape: tuple[int, int]
    cell: tuple[int, int]
    map: Array
    fold: Array
    by_row: Array
    pairs: Array
    given: Array | None = None
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def different(self) -> int:
        """How many items differ."""
        return int(self.by_row.sum())

    def grids(self) -> Iterator[Grid]:
        """The map, and all tiles or atoms laid on one another where there are several."""
        yield Grid(self.item, "map", self.map, self._per_cell(), (0, 0), self.cell, self.shape)
        rows, columns = self.fold.shape
        if self.shape[0] > rows or self.shape[1] > columns:
            down, across = _times(self.shape[0], rows), _times(self.shape[1], columns)
            if self.item == "codes":
                yield Grid(self.item, "tile", self.fold, (down, across), (0, 0), (1, 1), (rows, columns))
            else:
                yield Grid(self.item, "atom", self.fold.T, (across, down), (0, 0), (1, 1), (columns, rows))

    def _per_cell(self) -> tuple[Array, Array]:
        """Rows and columns of the cells; those at the edges may be cut."""
        pairs = zip(self.cell, self.shape, strict=True)
        heights, widths = (np.minimum(cell, extent - np.arange(0, extent, cell)) for cell, extent in pairs)
        return heights, widths

    def bars(self) -> list[Bar]:
        """The histogram of distances, found less expected: E4M3 codes of scales, steps of the E2M1 grid of codes.

        On the grid a step away from zero is positive; 0 is a change of a zero's sign only.
        """
        distance = _CODE_STEPS if self.item == "codes" else _SCALE_STEPS
        counts = _by_class(distance, self.pairs)
        given = None if self.given is None else _by_class(distance, self.given)
        return [Bar(name, n, None if given is None else given[name]) for name, n in counts.items() if n]

    def commonest(self, most: int = 6) -> list[tuple[int, int, int]]:
        """(expected, found, how often) of the commonest pairs."""
        order = np.argsort(-self.pairs, axis=None, kind="stable")[:most]
        pairs = [(int(at // self.pairs.shape[1]), int(at % self.pairs.shape[1])) for at in order]
        return [(*pair, int(self.pairs[pair])) for pair in pairs if self.pairs[pair]]


def survey(side: Side) -> dict[str, Sheet]:
    """The sheets of one direction, "codes" and "scales", those of them that can be judged and differ.

    Raises ValueError when the direction cannot be recomputed.
    """
    expected, found = side.nearest().expected.scales, side.declared_scales
    unequal = None if found is None else found != expected
    sheets: dict[str, Sheet] = {}
    if found is not None and unequal is not None and unequal.any():
        sheets["scales"] = _scales(found, expected, unequal)
    try:
        packed = side.expected.packed
    except (ValueError, TypeError):  # stochastic without its random words
        return sheets
    codes = _codes(side.found("packed"), packed, unequal)
    return {"codes": codes, **sheets} if codes.different else sheets


def close_up(side: Side, place: tuple[int, int], size: tuple[int, int] | None = None) -> Grid:
    """The codes around a place, element by element: of ``size`` rows and columns, CLOSE unless given."""
    size = size or CLOSE
    first = [_start(*args) for args in zip(place, size, side.shape, strict=True)]
    rows, columns = (slice(start, start + extent) for start, extent in zip(first, size, strict=True))
    found, expected = (unpacked(array[rows])[:, columns] for array in (side.found("packed"), side.expected.packed))
    unequal = found != expected
    steps = np.where(unequal, _CODE_STEPS[expected, found], 0)
    digits = ["".join(f"{code:X}" for code in codes.reshape(-1)) for codes in (found, expected)]
    ones = (np.ones(unequal.shape[0], int), np.ones(unequal.shape[1], int))
    at = (first[0], first[1])
    counts = unequal.astype(int)
    return Grid("codes", "close-up", counts, ones, at, (1, 1), side.shape, digits[0], digits[1], steps)


def unpacked(packed: Array) -> Array:
    """Codes (R, K) in the order of the nibbles, low first, as differences are counted."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes


# ---- gathering ---------------------------------------------------------------------------------------------


def _codes(found: Array, expected: Array, wrong_scales: Array | None) -> Sheet:
    rows, columns = found.shape[0], 2 * found.shape[1]
    sheet = _empty("codes", (rows, columns), 16, (16, 16), (16, 16))
    sheet.given = np.zeros((16, 16), np.int64)
    packed = found != expected
    wanted = _spread(sum(int(np.count_nonzero(unpacked(found[s] ^ expected[s]))) for s in slabs(rows, columns // 16)))
    passed = 0
    for slab in slabs(rows, columns // 16):
        if not packed[slab].any():
            continue
        ours, theirs = unpacked(expected[slab]), unpacked(found[slab])
        unequal = ours != theirs
        _add(sheet, slab.start, unequal)
        r, c = np.nonzero(unequal)
        pair = ours[r, c].astype(np.intp) * 16 + theirs[r, c]
        sheet.pairs += np.bincount(pair, minlength=256).reshape(16, 16)
        if wrong_scales is not None:
            pair = pair[~wrong_scales[slab][r, c // 16]]
            sheet.given += np.bincount(pair, minlength=256).reshape(16, 16)
        here = wanted[(wanted >= passed) & (wanted < passed + r.size)] - passed
        sheet.places += [(slab.start + int(r[i]), int(c[i])) for i in here]
        passed += r.size
    if wrong_scales is None:
        sheet.given = None
    return sheet


def _scales(found: Array, expected: Array, unequal: Array) -> Sheet:
    sheet = _empty("scales", (found.shape[0], found.shape[1]), 4, (128, 4), (256, 256))
    _add(sheet, 0, unequal)
    r, c = np.nonzero(unequal)
    pair = expected[r, c].astype(np.intp) * 256 + found[r, c]
    sheet.pairs += np.bincount(pair, minlength=65536).reshape(256, 256)
    sheet.places += [(int(r[i]), int(c[i])) for i in _spread(r.size)]
    return sheet


def _empty(item: str, shape: tuple[int, int], unit: int, fold: tuple[int, int], pairs: tuple[int, int]) -> Sheet:
    cell = (_cell(shape[0], ROWS, 16), _cell(shape[1], COLUMNS, unit))
    cells = tuple(-(-extent // size) for extent, size in zip(shape, cell, strict=True))
    folded = (min(fold[0], shape[0]), min(fold[1], shape[1]))
    by_place, by_fold, by_row, by_pair = (np.zeros(size, np.int64) for size in (cells, folded, shape[0], pairs))
    return Sheet(item, shape, cell, by_place, by_fold, by_row, by_pair)


def _cell(extent: int, most: int, unit: int) -> int:
    """Items that a cell is high or wide: one where that fits, else whole units."""
    return 1 if extent <= most else unit * -(-extent // (unit * most))


def _add(sheet: Sheet, start: int, unequal: Array) -> None:
    """Count a slab of rows from ``start`` on."""
    rows = np.arange(start, start + len(unequal))
    height, width = sheet.cell
    across = np.add.reduceat(unequal, np.arange(0, sheet.shape[1], width), axis=1, dtype=np.int64)
    np.add.at(sheet.map, rows // height, across)
    sheet.by_row[rows] += unequal.sum(1)
    period = sheet.fold.shape[1]
    whole = sheet.shape[1] // period * period
    lanes = unequal[:, :whole].reshape(len(unequal), -1, period).sum(1)
    lanes[:, : sheet.shape[1] - whole] += unequal[:, whole:]
    np.add.at(sheet.fold, rows % sheet.fold.shape[0], lanes)


def _spread(total: int) -> Array:
    """Which differences are examples: the first five, and others spread evenly."""
    if total <= PICKED:
        return np.arange(total)
    return np.concatenate([np.arange(5), 5 + np.arange(PICKED - 5) * (total - 5) // (PICKED - 5)])


def _start(place: int, size: int, extent: int) -> int:
    """First row or column of a close-up, of a tile: that of the place, with one before it where there is room."""
    before = 16 if size > 32 else 0
    return max(0, min(place // 16 * 16 - before, -(-(extent - size) // 16) * 16))


def _times(extent: int, period: int) -> Array:
    """How often each place of a period occurs in an extent."""
    return extent // period + (np.arange(period) < extent % period)


# ---- distances ---------------------------------------------------------------------------------------------


def _code_steps() -> Array:
    """[expected, found] -> distance on the grid −6 … 6, away from zero positive; both zeros are one place."""
    code = np.arange(16)
    place = np.where(code & 8, -(code & 7), code & 7)
    expected, found = np.meshgrid(place, place, indexing="ij")
    return np.where(expected == 0, np.abs(found), (found - expected) * np.sign(expected))


def _scale_steps() -> Array:
    """[expected, found] -> distance in the order of the E4M3 codes, negative ones below zero."""
    byte = np.arange(256)
    place = np.where(byte & 0x80, -(byte & 0x7F), byte)
    return place[None, :] - place[:, None]


_CODE_STEPS, _SCALE_STEPS = _code_steps(), _scale_steps()


def _by_class(distance: Array, pairs: Array) -> dict[str, int]:
    """Counts of pairs by class of distance, from the most negative to the most positive."""
    found, edges = {}, (*range(1, _SEPARATE + 1), *_TAILS, 10**6)
    classes = [(low + 1, high) for low, high in zip((0, *edges[:-1]), edges, strict=True)]
    for low, high in reversed(classes):
        found[_label("−", low, high)] = int(pairs[(-distance >= low) & (-distance <= high)].sum())
    found["0"] = int(pairs[distance == 0].sum())
    for low, high in classes:
        found[_label("+", low, high)] = int(pairs[(distance >= low) & (distance <= high)].sum())
    return found


def _label(sign: str, low: int, high: int) -> str:
    if low == high:
        return f"{sign}{low}"
    return f"{sign}{low} and more" if high > _TAILS[-1] else f"{sign}{low} to {high}"
