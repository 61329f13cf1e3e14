"""The counts of one matrix, the order of its scales that they speak for, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.checkpoint import Quantized
from conformance.lint.matrix import Array, Matrix
from conformance.lint.measure import Measured, Reading, shares_of_sixes
from conformance.lint.producers import ZERO_BLOCK, ZERO_TENSOR

SURE = 8.0  # standard deviations between what chance gives and what is taken as seen
NORMAL = slice(0x09, 0x7F)  # scale bytes that no floor has been put under: their blocks hold a ±6


@dataclass(frozen=True)
class Facts:
    """One matrix with what was counted, and the order of the scales that its bytes speak for."""

    matrix: Matrix
    measured: Measured
    order: str | None
    seen: bool  # whether the bytes tell the order, or it is only declared

    @property
    def tensor(self) -> Quantized:
        """The tensor that the matrix is of."""
        return self.matrix.quantized

    @property
    def reading(self) -> Reading:
        """The counts under that order; empty ones without scales."""
        return self.measured.readings[self.order] if self.order else Reading()

    @property
    def scale_counts(self) -> Array:
        """How often each scale byte occurs."""
        return self.reading.bytes

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.matrix.rows * self.matrix.columns

    @property
    def all_zero(self) -> bool:
        """Whether every code is ±0, or all are the code that a NaN scale leaves."""
        counts = self.measured.codes
        zero = int(counts[0] + counts[8]) == int(counts.sum())
        return zero or (self.measured.uniform in ZERO_TENSOR and self._scales_are_nan)

    @property
    def _scales_are_nan(self) -> bool:
        counts = self.scale_counts
        return 0 < counts.sum() == counts[0x7F] + counts[0xFF]

    @property
    def top(self) -> int:
        """The largest scale byte that is a positive number; 0 without."""
        there = np.flatnonzero(self.scale_counts[1:0x7F])
        return int(there[-1]) + 1 if len(there) else 0

    @property
    def repeated(self) -> bool:
        """Whether the rows of scales repeat as 16x16 tiles have it."""
        return self.matrix.rows % 16 == 0 and self.order is not None and self.reading.not_repeated == 0

    @property
    def tiled(self) -> bool:
        """Whether the scales of tiles were laid out as a period of rows, where each is to be repeated 16 times."""
        rows, reading = self.matrix.rows, self.reading
        wrong = reading.not_repeated > 0 and reading.not_tiled == 0 and reading.changes > 0
        return self.order is not None and rows % 16 == 0 and rows >= 32 and wrong

    @property
    def shift(self) -> int | None:
        """How many bytes on the blocks begin, where they clearly begin elsewhere; None where they do not."""
        without = [1 - share for share in shares_of_sixes(self.matrix)]
        best = int(np.argmin(without))
        clear = self.blocks >= 256 and without[best] < min(0.02, without[0] / 5)
        return best if best and clear else None

    @property
    def from_mxfp4(self) -> bool:
        """Whether the scales are those of MXFP4: powers of two, one for 32 elements."""
        return self.order is not None and self.reading.not_paired == 0 and self.powers_of_two

    @property
    def paired(self) -> bool:
        """Whether every two neighbouring blocks have one scale, and it is not for want of others."""
        columns, counts = self.matrix.columns, self.scale_counts
        if columns % 2 or self.order is None or self.blocks < 64 or np.count_nonzero(counts) < 3:
            return False
        # two pairs with one scale are rare, unless scales hardly change along a row
        changes = 2 * self.reading.across_pairs > self.matrix.rows * (columns // 2 - 1) > 0
        return changes and self.reading.not_paired == 0

    @property
    def powers_of_two(self) -> bool:
        """Whether all of several different normal scales are powers of two, or the 448 that a larger one becomes."""
        counts = self.scale_counts[8:0x7F]
        many = int(counts.sum()) >= 64 and np.count_nonzero(counts) >= 3
        return bool(many and counts.sum() == counts[::8].sum() + counts[-1])


# ---- the order of the scales -----------------------------------------------------------------------------------


def choose_order(matrix: Matrix, measured: Measured) -> tuple[str | None, bool]:
    """The order that the bytes speak for, and whether they do; the declared one when they are silent."""
    orders = list(measured.readings)
    if not orders:
        return None, False
    declared = next((order for order in matrix.orders if is_declared(order, matrix.quantized)), matrix.orders[0])
    if measured.rejected:
        return max(orders, key=lambda order: abs(measured.readings[order].certainty)), True
    votes = {order: _votes(measured, order, declared) for order in orders if order != declared}
    best = max(votes, key=lambda order: votes[order], default=declared)
    if votes.get(best, 0) > 0:
        return best, True
    return declared, bool(votes) and all(vote < 0 for vote in votes.values())


def is_declared(order: str, tensor: Quantized) -> bool:
    """Whether a tensor's family stores its scales in that order."""
    if tensor.layout == "padded":
        return order in ("compact", "padded")
    return order == tensor.layout


def _votes(measured: Measured, order: str, declared: str) -> int:
    """How many kinds of evidence speak for an order against the declared one, less those that speak against it."""
    one, other = measured.readings[order], measured.readings[declared]
    return (
        _by_correlation(one, other)
        + _one_is_empty(int(other.short[NORMAL].sum()), int(one.short[NORMAL].sum()))
        + _one_is_empty(other.unsaturated, one.unsaturated)
        + _by_tiles(one, other)
        + int(measured.padding.get(order, False))
        - int(measured.padding.get(declared, False))
    )


def _by_correlation(one: Reading, other: Reading) -> int:
    a, b = abs(one.certainty), abs(other.certainty)
    if a - b > SURE and a > 3 * b:
        return 1
    return -1 if b - a > SURE and b > 3 * a else 0


def _one_is_empty(against: int, for_it: int) -> int:
    """1 when only one count is 0: contradictions that an order has and the other has not."""
    if against >= 3 and for_it == 0:
        return 1
    return -1 if for_it >= 3 and against == 0 else 0


def _by_tiles(one: Reading, other: Reading) -> int:
    tiles = [reading.not_repeated == 0 and reading.changes > 0 and reading.tiles.any() for reading in (one, other)]
    return int(tiles[0]) - int(tiles[1])


# ---- what tells producers apart -------------------------------------------------------------------------------


def fingerprint(all_facts: list[Facts]) -> dict[str, Any]:
    """The bytes by which producers differ, of a tensor's matrices together."""
    counts = sum((facts.scale_counts for facts in all_facts), np.zeros(256, np.int64))
    zeros = sum((facts.reading.zero for facts in all_facts), np.zeros(256, np.int64))
    positive = np.flatnonzero(counts[1:0x7F]) + 1
    uniform = {facts.measured.uniform for facts in all_facts}
    return {
        "smallest_scale": _hex(positive[0]) if len(positive) else None,
        "largest_scale": _hex(positive[-1]) if len(positive) else None,
        "zero_block_scales": [_hex(byte) for byte in np.flatnonzero(zeros) if byte in ZERO_BLOCK],
        "all_codes": _hex(uniform.pop()) if len(uniform) == 1 and None not in uniform else None,
        "negative_zero": any(facts.measured.codes[8] for facts in all_facts),
        "block": "16x16" if all(facts.repeated for facts in all_facts) else "1x16",
    }


def _hex(byte: Any) -> str:
    return f"0x{int(byte):02X}"
