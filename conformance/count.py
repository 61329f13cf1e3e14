"""Counting differences: how many items of two arrays differ bit for bit, and where the first one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4ref.container import agreed

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Count:
    """One output held against what was expected of it.

    ``first`` is the place of the first difference in row order, [] for a scalar, None when there is none;
    ``found`` and ``expected`` are the bit patterns there, as text.
    """

    compared: int
    different: int
    first: list[int] | None = None
    found: str = ""
    expected: str = ""

    def __add__(self, other: Count) -> Count:
        """Both counts together; the first difference is that of the left one when it has any."""
        worst = self if self.different else other
        return Count(
            self.compared + other.compared,
            self.different + other.different,
            worst.first,
            worst.found,
            worst.expected,
        )

    def to_json(self) -> dict[str, Any]:
        """The object of ``nvfp4 check --json``."""
        return {"compared": self.compared, "different": self.different, "first": self.first}

    def __str__(self) -> str:
        if not self.different:
            return f"{self.compared:,} compared, all equal"
        place = f"at {self.first}: " if self.first else ""
        values = f"found {self.found}, expected {self.expected}"
        differ = agreed(self.different, "differs", "differ")
        return f"{self.different:,} of {self.compared:,} {differ}, first {place}{values}"


def bits(array: Any) -> Array:
    """A float array as the unsigned integers of its bit patterns; integers as they are."""
    array = np.asarray(array)
    if array.dtype.kind in "iub":
        return array
    return np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")


def count(found: Any, expected: Any) -> Count:
    """Bitwise comparison of two arrays; when their shapes or sizes of item differ, so do all items."""
    found, expected = bits(found), bits(expected)
    if found.shape != expected.shape or found.dtype.itemsize != expected.dtype.itemsize:
        return Count(expected.size, expected.size, [0] * expected.ndim, _described(found), _described(expected))
    unequal = found != expected
    different = int(np.count_nonzero(unequal))
    if not different:
        return Count(expected.size, 0)
    place = np.unravel_index(int(unequal.argmax()), unequal.shape) if unequal.ndim else ()
    first = [int(i) for i in place]
    return Count(expected.size, different, first, _hex(found[place]), _hex(expected[place]))


def count_codes(found: Array, expected: Array) -> Count:
    """Two packed arrays compared code by code: [row, column] counts elements, even ones in the low nibble."""
    if found.shape != expected.shape:
        whole = count(found, expected)
        return Count(2 * whole.compared, 2 * whole.different, whole.first, whole.found, whole.expected)
    unequal = found ^ expected
    low, high = unequal & np.uint8(15), unequal >> np.uint8(4)
    different = int(np.count_nonzero(low)) + int(np.count_nonzero(high))
    if not different:
        return Count(2 * expected.size, 0)
    place = np.unravel_index(int((unequal != 0).argmax()), unequal.shape)
    shift = 0 if low[place] else 4
    first = [int(i) for i in place[:-1]] + [2 * int(place[-1]) + shift // 4]
    return Count(2 * expected.size, different, first, *(_hex(a[place] >> shift & 15) for a in (found, expected)))


def count_amax(found: Array, expected: Array) -> Count:
    """As ``count`` for amaxes and global scales, but any NaN equals any other: its payload is no arithmetic.

    One value may come 0-d or as (1,).
    """
    found, expected = np.asarray(found), np.asarray(expected)
    if found.size == 1 == expected.size:
        found = found.reshape(expected.shape)
    if found.dtype == expected.dtype and found.shape == expected.shape:
        found = np.where(np.isnan(found) & np.isnan(expected), expected, found)
    return count(found, expected)


def _hex(value: Any) -> str:
    width = {1: 2, 2: 4, 4: 8, 8: 16}[np.asarray(value).dtype.itemsize]
    return f"0x{int(value):0{width}X}"


def _described(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"
