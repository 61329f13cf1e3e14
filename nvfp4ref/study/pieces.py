"""Measuring a matrix in any formats, piece by piece: first :func:`survey`, then :func:`measure_part`.

:func:`measure` does both for an array in memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import as_array
from ..fp32 import F32, F64, AnyArray
from . import statistics
from .formats import Format, Quantized, several
from .statistics import LINES, Facts, Shape, Sums, View

PIECE = 1 << 17  # elements worked on at a time; what they need stays in the cache
PART = 1 << 22  # elements that one task reads and measures
GRID = 128  # pieces begin at multiples of this, so that no block and no transform of any format is cut
WIDE = 256  # and, along rows, at multiples of this, for the transform of 256
DRAWN = (16, 1024)  # the largest sample of which many stochastic draws are made

Read = Callable[[slice, slice], AnyArray]


@dataclass(frozen=True)
class Tensor:
    """What every part of one tensor's measurement shares.

    name decides the random words of stochastic formats, with ``seed``.
    """

    name: str
    shape: tuple[int, int]
    formats: tuple[Format, ...]
    seed: int = 0

    @property
    def _piece(self) -> tuple[int, int]:
        """Rows and columns of a piece."""
        across = min(self.shape[1], max(WIDE, PIECE // min(GRID, self.shape[0]) // WIDE * WIDE))
        return max(GRID, PIECE // across // GRID * GRID), across

    def parts(self, elements: int = PART) -> Iterator[tuple[slice, slice]]:
        """(rows, columns) that are measured together, of about that many elements; whole pieces, and whole rows
        where these are not too long."""
        (height, width), (down, across) = self.shape, self._piece
        columns = width if down * width <= elements else max(1, elements // down // across) * across
        rows = max(1, elements // columns // down) * down
        for r in range(0, height, rows):
            for c in range(0, width, columns):
                yield slice(r, min(r + rows, height)), slice(c, min(c + columns, width))

    def pieces(self, rows: slice, columns: slice) -> Iterator[tuple[slice, slice]]:
        """Pieces of a part, along the rows of memory."""
        down, across = self._piece
        for r in range(rows.start, rows.stop, down):
            for c in range(columns.start, columns.stop, across):
                yield slice(r, min(r + down, rows.stop)), slice(c, min(c + across, columns.stop))


def filled(part: AnyArray, tile: tuple[int, int]) -> AnyArray:
    """A piece as a format reads it, with zeros added up to whole tiles of that format and of no other."""
    missing = [(0, -length % whole) for length, whole in zip(part.shape, tile, strict=True)]
    return np.pad(part, missing) if any(more for _, more in missing) else part


def added(tensor: Tensor, one: Format) -> int:
    """Zeros that fill each row's last block (each channel's when columnwise) and that no figure counts."""
    length = tensor.shape[0 if one.columnwise else 1]
    return -length % one.tile[1] - -length % (one.rht or 1)


# -- first pass ------------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """Facts of a tensor, or of a part of it, and the amaxes its formats need, by ``statistics.amax_key``."""

    facts: Facts = field(default_factory=Facts)
    amax: dict[str, F32] = field(default_factory=dict)

    def add(self, other: Survey, tensor: Tensor, rows: slice, columns: slice) -> None:
        """Take in a part."""
        self.facts.add(other.facts)
        for key, value in other.amax.items():
            if key.startswith("all"):
                self.amax[key] = np.maximum(self.amax.get(key, np.float32(0)), value)  # NaN stays
                continue
            there, length = (rows, tensor.shape[0]) if " rows " in key else (columns, tensor.shape[1])
            whole = self.amax.setdefault(key, np.zeros(length, np.float32))
            whole[there] = np.maximum(whole[there], value)

    def of(self, one: Format, rows: slice, columns: slice, padded: int) -> F32:
        """The amax that a format uses in a piece, for ``padded`` rows when it has one a row."""
        key = statistics.amax_key(one)
        if key is None:
            return np.zeros((), np.float32)
        value = np.asarray(self.amax[key])
        if key.startswith("all"):
            return value
        value = value[rows if " rows " in key else columns]
        return np.pad(value, (0, padded - len(value)))


def survey(tensor: Tensor, read: Read, rows: slice, columns: slice) -> Survey:
    """First pass over a part of a tensor; ``read(rows, columns)`` gives its elements."""
    data, found = read(rows, columns), Survey()
    for r, c in tensor.pieces(rows, columns):
        part = data[r.start - rows.start : r.stop - rows.start, c.start - columns.start : c.stop - columns.start]
        one = Survey(Facts.of(part))
        for key, format_ in {statistics.amax_key(f): f for f in tensor.formats}.items():
            if key is not None:
                lines = part.shape[1 if format_.columnwise else 0]
                tile = format_.tile[::-1] if format_.columnwise else format_.tile
                amax = statistics.amax_of(format_, filled(part, tile))
                one.amax[key] = amax[:lines] if amax.ndim else amax
        found.add(one, tensor, r, c)
    found.amax = {k: v[rows if " rows " in k else columns] if v.ndim else v for k, v in found.amax.items()}
    return found


# -- second pass -----------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    """Sums of squares of rows and of channels, float64; None of more than LINES of them."""

    rows: F64 | None
    channels: F64 | None

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> Lines:
        """Zeros for a tensor of that shape."""
        return cls(*(np.zeros(n) if n <= LINES else None for n in shape))

    def add(self, rows: F64 | None, channels: F64 | None, r: slice, c: slice) -> None:
        """Take in a piece."""
        if self.rows is not None and rows is not None:
            self.rows[r] += rows
        if self.channels is not None and channels is not None:
            self.channels[c] += channels

    def part(self, r: slice, c: slice) -> Lines:
        """Those of some rows and columns."""
        return Lines(None if self.rows is None else self.rows[r], None if self.channels is None else self.channels[c])


@dataclass
class Measured:
    """Second pass: the tensor's shape, and of each format, by name, its Sums and its Lines of Σe².

    squares: of each format, by name, Lines of Σx² over the elements that its errors are of.  plain: those of x.
    """

    shape: Shape = field(default_factory=Shape)
    sums: dict[str, Sums] = field(default_factory=dict)
    errors: dict[str, Lines] = field(default_factory=dict)
    squares: dict[str, Lines] = field(default_factory=dict)
    plain: Lines = field(default_factory=lambda: Lines(None, None))

    @classmethod
    def empty(cls, tensor: Tensor) -> Measured:
        """Zeros."""
        return cls(
            sums={one.name: Sums() for one in tensor.formats},
            errors={one.name: Lines.empty(tensor.shape) for one in tensor.formats},
            squares={one.name: Lines.empty(tensor.shape) for one in tensor.formats},
            plain=Lines.empty(tensor.shape),
        )

    def add(self, other: Measured, r: slice, c: slice) -> None:
        """Take in a part."""
        self.shape.add(other.shape)
        self.plain.add(other.plain.rows, other.plain.channels, r, c)
        for name, sums in other.sums.items():
            self.sums[name].add(sums)
        for mine, theirs in ((self.errors, other.errors), (self.squares, other.squares)):
            for name, lines in theirs.items():
                mine[name].add(lines.rows, lines.channels, r, c)


def reading(one: Format) -> str:
    """What a format reads of a tensor; formats that read the same share it."""
    if not one.rht:
        return "columnwise" if one.columnwise else "plain"
    return f"{'columnwise ' if one.columnwise else ''}rht{one.rht}"


def measure_part(
    tensor: Tensor,
    found: Survey,
    read: Read,
    rows: slice,
    columns: slice,
    blocks: dict[str, F32] | None = None,
) -> Measured:
    """Second pass over a part of a tensor.

    blocks: arrays by format's name to put Σe²/Σx² of every block in, those of the transpose when columnwise.
    """
    data, total = read(rows, columns), Measured.empty(tensor)
    for r, c in tensor.pieces(rows, columns):
        part = data[r.start - rows.start : r.stop - rows.start, c.start - columns.start : c.stop - columns.start]
        _Piece(tensor, found, total, part, r, c, blocks).measure()
    return Measured(
        total.shape,
        total.sums,
        {name: lines.part(rows, columns) for name, lines in total.errors.items()},
        {name: lines.part(rows, columns) for name, lines in total.squares.items()},
        total.plain.part(rows, columns),
    )


class _Piece:
    """One piece going through every format."""

    def __init__(
        self,
        tensor: Tensor,
        found: Survey,
        total: Measured,
        part: AnyArray,
        rows: slice,
        columns: slice,
        blocks: dict[str, F32] | None = None,
    ) -> None:
        self.tensor, self.found, self.total, self.part, self.blocks = tensor, found, total, part, blocks
        self.rows, self.columns = rows, columns
        self.views: dict[tuple[str, tuple[int, ...]], View] = {}
        across = -(-tensor.shape[1] // GRID)
        self.number = rows.start // GRID * across + columns.start // GRID

    def measure(self) -> None:
        """Add everything to the total."""
        with np.errstate(all="ignore"):  # NaN and Inf are counted, not warned of
            plain = self._view(None)
            self._lines(self.total.plain, plain.rows_x2, plain.channels_x2, False)
            inside = plain.unit[: plain.real[0], : plain.real[1]]
            self.total.shape.count(np.ascontiguousarray(inside / plain.rms), plain.real[1])
            for one in self.tensor.formats:
                self._format(one)

    def _view(self, one: Format | None) -> View:
        """What a format reads, None for the plain tensor; made once for all formats that read the same."""
        part = self.part
        if one is not None:
            part = filled(np.ascontiguousarray(part.T) if one.columnwise else part, one.tile)
        key = "plain" if one is None else reading(one), part.shape
        if key not in self.views:
            height, width = self.part.shape[::-1] if one is not None and one.columnwise else self.part.shape
            if one is not None and one.rht:
                part = one.transformed(part)
                width += -width % one.rht  # the transform spreads over what was added to fill its last vector
            self.views[key] = View.of(part, (height, width), self.found.facts)
        return self.views[key]

    def _lines(self, lines: Lines, rows: F64, channels: F64, columnwise: bool) -> None:
        if columnwise:
            rows, channels = channels, rows
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        lines.add(rows[:height], channels[:width], self.rows, self.columns)

    def _format(self, one: Format) -> None:
        view = self._view(one)
        amax = self.found.of(one, self.rows, self.columns, view.raw.shape[0])
        q = one.apply(view.raw, amax, self._random(one, view.raw.shape))
        sums, error, square = statistics.sums_of(one, view, q)
        sums.padded = added(self.tensor, one) if self.number == 0 else 0
        if not (one.stochastic or one.rht or one.columnwise or one.row_scaled) and one.has_e2m1:
            self._transposed(one, sums, q, view, amax)
        if one.stochastic and self.number == 0:
            self._draws(one, sums, view, amax)
        if self.blocks is not None:
            self._keep_blocks(one, view, q)
        self.total.sums[one.name].add(sums)
        self._lines(self.total.errors[one.name], *error, one.columnwise)
        self._lines(self.total.squares[one.name], *square, one.columnwise)

    def _random(self, one: Format, shape: tuple[int, int], draw: int = 0) -> Any:
        """Random numbers that depend on the seed, the tensor's name, the place in it and the draw, on nothing else."""
        if not one.stochastic:
            return None
        seed = (self.tensor.seed ^ zlib.crc32(self.tensor.name.encode("utf-8", "backslashreplace")) << 32) & (2**64 - 1)
        return one.random(shape, seed, 16 * (self.number * 2 * max(statistics.DRAWS) + draw) % 2**64)

    def _transposed(self, one: Format, sums: Sums, q: Quantized, view: View, amax: F32) -> None:
        """The same elements quantized along the other axis, where whole blocks lie along it."""
        height, width = one.tile
        rows = view.real[0] // math.lcm(width, height) * math.lcm(width, height)
        columns = view.x.shape[1] // height * height
        if rows == 0:
            return
        turned = one.apply(np.ascontiguousarray(view.raw[:rows, :columns].T), amax).y.T
        y, other, x = (v[:rows, : view.real[1]] for v in (q.y, turned, view.x))
        there = np.isfinite(y) & np.isfinite(other)
        gap, x = np.where(there, y - other, np.float32(0)), np.where(there, x, np.float32(0))
        sums.transposed = int(np.count_nonzero(there))
        sums.transposed_n = int(np.count_nonzero(gap))
        sums.transposed_e2 = statistics._dot(gap, gap)
        sums.transposed_x2 = statistics._dot(x, x)

    def _keep_blocks(self, one: Format, view: View, q: Quantized) -> None:
        assert self.blocks is not None
        ratio = statistics.block_ratios(*statistics.squared(view, q.y), one.block)
        whole = self.blocks[one.name]
        corner = (self.columns.start, self.rows.start) if one.columnwise else (self.rows.start, self.columns.start)
        top, left = corner[0] // one.block[0], corner[1] // one.block[1]
        there = whole[top : top + ratio.shape[0], left : left + ratio.shape[1]]
        there[...] = ratio[: there.shape[0], : there.shape[1]]

    def _draws(self, one: Format, sums: Sums, view: View, amax: F32) -> None:
        """Many draws of a sample: the tensor's first rows and columns."""
        height = max(one.tile[0], DRAWN[0] // one.tile[0] * one.tile[0])
        width = max(one.tile[1], DRAWN[1] // one.tile[1] * one.tile[1])
        raw, x = np.ascontiguousarray(view.raw[:height, :width]), view.x[:height, :width]
        if one.row_scaled:
            amax = amax[: len(raw)]
        count = max(statistics.DRAWS)
        draws = (one.apply(raw, amax, self._random(one, raw.shape, 1 + k)).y for k in range(count))
        bad = None if view.bad is None else view.bad[:height, :width]
        statistics.count_draws(sums, x, draws, bad)


# -- an array in memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The error of one format on one array.

    Attributes:
        figures: every figure by name (docs/studies/README.md).
        rows, channels: float64 (R,), (K,), Σe²/Σx² of each; NaN where x is zero.
        blocks: float32 (R/height, K/width), the same of each block.
        sums: the counts and histograms; shape: of the array itself.
    """

    format: Format
    figures: dict[str, float]
    rows: F64
    channels: F64
    blocks: F32
    sums: Sums
    shape: Shape

    def __getattr__(self, name: str) -> float:
        if name in self.__dict__.get("figures", {}):
            return self.figures[name]
        raise AttributeError(f"no figure {name!r}; there are {', '.join(self.__dict__.get('figures', {}))}")


def measure(
    x: Any, formats: str | Format | Iterable[str | Format] = "nvfp4", *, name: str = "x", seed: int = 0
) -> dict[str, Measurement]:
    """The error of formats on an array.

    Args:
        x: (…, K) float32, float16, bfloat16, or float64, which is rounded to float32; NumPy, torch, JAX.
            Leading dimensions are rows.  Columns that do not fill a block are filled with zeros, not counted.
        formats: names or Formats, see ``formats.named``.
        name, seed: decide the random words of stochastic formats.
    Returns:
        {format's name: Measurement}.
    Raises:
        ValueError: an empty array, fewer than two dimensions, an unknown format.  TypeError: dtype.
    """
    matrix = as_array(x)
    if matrix.ndim < 2 or matrix.size == 0:
        raise ValueError(f"expected a matrix with elements; got shape {matrix.shape}: use x.reshape(1, -1) for one row")
    matrix = np.ascontiguousarray(matrix.reshape(-1, matrix.shape[-1]))
    if matrix.dtype == np.float64:
        matrix = matrix.astype(np.float32)
    chosen = several([formats] if isinstance(formats, (str, Format)) else formats)
    rows, columns = (slice(0, n) for n in matrix.shape)
    tensor = Tensor(name, (matrix.shape[0], matrix.shape[1]), chosen, seed)
    found = survey(tensor, lambda r, c: matrix[r, c], rows, columns)
    blocks = {one.name: np.full(_block_shape(tensor.shape, one), np.nan, np.float32) for one in chosen}
    done = measure_part(tensor, found, lambda r, c: matrix[r, c], rows, columns, blocks)
    return {one.name: _measurement(found, done, one, blocks[one.name]) for one in chosen}


def _block_shape(shape: tuple[int, int], one: Format) -> tuple[int, int]:
    rows, columns = shape[::-1] if one.columnwise else shape
    return -(-rows // one.block[0]), -(-columns // one.block[1])


def _measurement(found: Survey, done: Measured, one: Format, blocks: F32) -> Measurement:
    nothing = [np.full(0, np.nan)] * 2
    error, square = (
        (lines.rows, lines.channels) if lines.rows is not None and lines.channels is not None else nothing
        for lines in (done.errors[one.name], done.squares[one.name])
    )
    with np.errstate(all="ignore"):
        rows, channels = (e / x for e, x in zip(error, square, strict=True))
    return Measurement(one, record(found, done, one), rows, channels, blocks, done.sums[one.name], done.shape)


def record(found: Survey, done: Measured, one: Format) -> dict[str, float]:
    """Every figure of a format on a tensor by name."""
    errors, squares, plain = done.errors[one.name], done.squares[one.name], done.plain
    return {
        **statistics.figures(one, done.sums[one.name]),
        **statistics.line_figures(errors.rows, squares.rows, "row"),
        **statistics.line_figures(errors.channels, squares.channels, "channel"),
        **statistics.tensor_figures(found.facts, done.shape, plain.channels),
    }
