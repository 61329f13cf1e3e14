"""One pass over a matrix's bytes: what can be counted without its input.

Codes and scales are read slab by slab, so that memory does not grow with the tensor.  Where the stored shape
leaves the order of the scales open, every order is measured; :mod:`.facts` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from conformance.lint.matrix import Array, Matrix
from conformance.lint.words import Blocks
from nvfp4ref import e2m1, e4m3, layout

_SAMPLE = 1 << 16  # blocks that are enough to see whether scales belong to their blocks
_CLEAR = 80.0  # standard deviations of a relation that no sample makes by chance
_PAIRS = 1 << 19  # elements from which neighbours are correlated


def _log2_scales() -> Array:
    with np.errstate(all="ignore"):
        logs = np.log2(e4m3.VALUES)
    logs[~np.isfinite(logs)] = np.nan
    return logs


_SCALE_LOG = _log2_scales()  # NaN where a byte is zero, negative or NaN


@dataclass
class Reading:
    """What the blocks say when the scales are read in one order.

    By scale byte:
        bytes: blocks.  zero: those whose codes are all ±0.  short: those without ±6 that are not all ±0.
        low: of these, those without ±4 as well.
        tiles, tiles_zero, tiles_short, tiles_low: the same of 16x16 tiles, counted while the rows are repeated.
    unsaturated: blocks of scale 0 with codes other than ±0 and ±6.
    not_repeated: rows that are not the first of their 16.  not_tiled: rows that are not row r mod (R/16).
    changes: rows that are not the one above.
    not_paired: blocks whose scale is not their neighbour's, in pairs.  across_pairs: the same from pair to pair.
    sums: n, Σ dL², Σ dE², Σ dL·dE of the first blocks, for the correlation.
    """

    bytes: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    zero: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    short: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    low: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    tiles_short: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    tiles_low: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    tiles_zero: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    tiles: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    unsaturated: int = 0
    not_repeated: int = 0
    not_tiled: int = 0
    not_paired: int = 0
    across_pairs: int = 0
    changes: int = 0
    sums: Array = field(default_factory=lambda: np.zeros(4))

    @property
    def correlation(self) -> float:
        """Of log scale with log code energy, of neighbouring blocks' differences; 0 where nothing varies.

        A block's scale is its largest element, so a large scale means codes that are small beside it: in weights
        this is clearly negative where scales belong to their blocks, and near 0 where they do not.
        """
        _, scale, energy, both = self.sums
        return float(both / np.sqrt(scale * energy)) if scale > 0 and energy > 0 else 0.0

    @property
    def certainty(self) -> float:
        """How many standard deviations of chance the correlation is away from 0."""
        return self.correlation * float(np.sqrt(self.sums[0]))


@dataclass
class Neighbours:
    """Mean squared difference of neighbouring elements, by column of blocks.

    within: the two elements of one byte.  low_first: those of two bytes that are neighbours when the even
    element is in the low nibble.  high_first: the same for the high nibble.
    """

    within: Array
    low_first: Array
    high_first: Array


@dataclass
class Measured:
    """Counts of one matrix.

    codes: counts of the 16 codes.  uniform: the byte that all packed bytes are.
    readings: what each order of the scales says; rejected: orders that the first blocks ruled out.
    padding: whether the padding is constant, by order.
    """

    readings: dict[str, Reading]
    padding: dict[str, bool]
    rejected: set[str] = field(default_factory=set)
    codes: Array = field(default_factory=lambda: np.zeros(16, np.int64))
    uniform: int | None = None
    neighbours: Neighbours | None = None


# ---- the pass --------------------------------------------------------------------------------------------------


def measure(matrix: Matrix, advance: Callable[[int], None] = lambda done: None) -> Measured:
    """Read a matrix once, slab by slab; ``advance`` is told the bytes of each."""
    found = Measured(
        {order: Reading() for order in matrix.orders},
        {order: _padding_is_constant(matrix, order) for order in matrix.orders},
    )
    first = {order: _first_tile_rows(matrix, order) for order in matrix.orders}
    above: dict[str, Array] = {}
    pairs = np.zeros(1 << 16, np.int64)  # counts of two neighbouring bytes as one uint16
    for start, stop in matrix.slabs():
        packed = matrix.packed(start, stop)
        if start == 0:
            found.neighbours = _neighbours(packed)
        pairs += np.bincount(packed.view("<u2").reshape(-1), minlength=1 << 16)
        blocks = Blocks(packed)
        for order, reading in found.readings.items():
            scales = matrix.scales(order, start, stop)
            _read(reading, blocks, scales, start, first[order], above.get(order))
            above[order] = scales[-1:]
        _reject(found)
        advance(packed.size + packed.size // 8)
    counts = pairs.reshape(256, 256).sum(0) + pairs.reshape(256, 256).sum(1)  # of single bytes
    found.codes += counts.reshape(16, 16).sum(0) + counts.reshape(16, 16).sum(1)
    used = np.flatnonzero(counts)
    found.uniform = int(used[0]) if len(used) == 1 else None
    return found


def _reject(found: Measured) -> None:
    """Drop orders that show nothing where another shows a clear relation: they are as good as random."""
    certainty = {order: abs(reading.certainty) for order, reading in found.readings.items()}
    if any(reading.sums[0] < _SAMPLE for reading in found.readings.values()):
        return
    for order, value in certainty.items():
        if 8 * value < max(certainty.values()) > _CLEAR:
            found.rejected.add(order)
            del found.readings[order]


def shares_of_sixes(matrix: Matrix) -> list[float]:
    """Share of blocks with a ±6 in the first rows, when the packed bytes are read from byte 0, 1, … 7 on."""
    flat = matrix.packed(0, next(matrix.slabs())[1]).reshape(-1)
    shifted = (flat[start : len(flat) - 8 + start].reshape(-1, 8) for start in range(8))
    return [float(np.mean(Blocks(np.ascontiguousarray(one)).six)) if one.size else 0.0 for one in shifted]


def _read(
    reading: Reading, blocks: Blocks, scales: Array, start: int, first: Array | None, above: Array | None
) -> None:
    """Add one slab to a reading."""
    reading.bytes += np.bincount(scales.reshape(-1), minlength=256)
    short = ~(blocks.six | blocks.zero)
    reading.zero += _by_byte(scales, blocks.zero)
    reading.short += _by_byte(scales, short)
    reading.low += _by_byte(scales, short & ~blocks.four)
    nothing = (scales & 0x7F) == 0
    reading.unsaturated += int(np.count_nonzero(nothing & ~blocks.saturated))
    if scales.shape[1] % 2 == 0:
        reading.not_paired += int(np.count_nonzero(scales[:, ::2] != scales[:, 1::2]))
        reading.across_pairs += int(np.count_nonzero(scales[:, 1:-1:2] != scales[:, 2::2]))
    _repeats(reading, blocks, scales, start, first, above)
    missing = _SAMPLE - int(reading.sums[0])
    if missing > 0:
        rows = -(-missing // scales.shape[1]) + 1
        _correlate(reading, blocks.log_energy(rows), _SCALE_LOG[scales[:rows]])


def _by_byte(scales: Array, where: Array) -> Array:
    return np.bincount(scales[where], minlength=256) if where.any() else np.zeros(256, np.int64)


def _repeats(
    reading: Reading, blocks: Blocks, scales: Array, start: int, first: Array | None, above: Array | None
) -> None:
    """Whether rows of scales repeat, as 16x16 tiles have it, and then what the tiles hold."""
    padded = scales if above is None else np.concatenate([above, scales])
    reading.changes += int(np.count_nonzero((padded[1:] != padded[:-1]).any(-1)))
    if first is None:
        return
    period = len(first)
    expected = first[np.arange(start, start + len(scales)) % period]
    reading.not_tiled += int(np.count_nonzero((scales != expected).any(-1)))
    tiles = scales.reshape(-1, 16, scales.shape[1])
    reading.not_repeated += int(np.count_nonzero((tiles != tiles[:, :1]).any(-1)))
    if reading.not_repeated == 0:
        six, four, something = (one.reshape(tiles.shape).any(1) for one in (blocks.six, blocks.four, ~blocks.zero))
        byte = tiles[:, 0]
        reading.tiles += np.bincount(byte.reshape(-1), minlength=256)
        reading.tiles_zero += _by_byte(byte, ~something)
        reading.tiles_short += _by_byte(byte, something & ~six)
        reading.tiles_low += _by_byte(byte, something & ~four)


def _correlate(reading: Reading, energy: Array, scale: Array) -> None:
    """Sums for the correlation of the two logarithms, over neighbours in a row (in a column if C is 1)."""
    axis = 1 if scale.shape[1] > 1 else 0
    a, b = (np.diff(values, axis=axis).reshape(-1) for values in (scale, energy))
    known = np.isfinite(a + b)
    a, b = a[known], b[known]
    reading.sums += (len(a), *(float(np.dot(u, v)) for u, v in ((a, a), (b, b), (a, b))))


def _first_tile_rows(matrix: Matrix, order: str) -> Array | None:
    """The first R/16 rows of scales: what every row repeats when tiles were repeated the wrong way."""
    count = matrix.rows // 16
    if matrix.rows % 16 or not count:
        return None
    return matrix.scales(order, 0, count)


def _padding_is_constant(matrix: Matrix, order: str) -> bool:
    """Whether everything outside (R, C) of padded scales is one byte, in the first and the last 128 rows."""
    padded = layout.padded_shape(matrix.rows, matrix.columns)
    if order not in ("padded", "swizzled") or padded == (matrix.rows, matrix.columns):
        return False
    seen: set[int] = set()
    for start in {0, padded[0] - 128}:
        raw = matrix.scale_bytes(start * padded[1], (start + 128) * padded[1])
        rows = layout.unswizzle(raw, 128, padded[1]) if order == "swizzled" else raw.reshape(128, padded[1])
        inside = max(0, min(128, matrix.rows - start))
        seen |= {*np.unique(rows[inside:]).tolist(), *np.unique(rows[:inside, matrix.columns :]).tolist()}
    return len(seen) <= 1


def _neighbours(packed: Array) -> Neighbours | None:
    """Differences of neighbouring elements in the first rows, where the tensor is wide enough to tell."""
    rows = max(1, _PAIRS // (2 * packed.shape[1]))
    codes = packed[:rows]
    if codes.shape[1] < 64:
        return None
    blocks = codes.reshape(len(codes), -1, 8)
    low, high = e2m1.VALUES[blocks & 15], e2m1.VALUES[blocks >> 4]
    pairs = ((low, high), (high[..., :-1], low[..., 1:]), (low[..., :-1], high[..., 1:]))
    return Neighbours(*(np.square(a - b).mean(-1, dtype=np.float64).mean(0) for a, b in pairs))
