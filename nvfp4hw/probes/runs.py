"""Curves recorded as run lengths, and their comparison with the oracle's.

A curve maps a 32-bit point, for instance a float32 bit pattern, to a code.  A run starts wherever the code differs
from that of the point before; the program compares every point with its neighbour, so the record is the whole curve.

The oracle's curve over all 2^32 float32 is not computed point by point.  Its conversions are monotone: an E2M1 or E4M3
magnitude does not fall as |x| grows, with the random bits held fixed (rounding counts the decision points that |x| has
reached).  So over the finite numbers and Inf of one sign the curve is fixed by where each code is first reached,
which bisection finds; and all NaN of one sign have one code, for the conversions ask only whether x is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4hw.probes.base import SHOWN, Array, BadRecord, Output, ProbeError
from nvfp4ref.container import counted

ALL = 1 << 32
#: Monotone stretches of the float32 patterns, both ends included: finite and Inf, then NaN, of each sign.
POSITIVE, POSITIVE_NAN = (0x00000000, 0x7F800000), (0x7F800001, 0x7FFFFFFF)
NEGATIVE, NEGATIVE_NAN = (0x80000000, 0xFF800000), (0xFF800001, 0xFFFFFFFF)

_RUN = np.dtype([("curve", "<u4"), ("start", "<u4"), ("code", "<u4")])

#: codes of curves (n,) at points (n,)
Encode = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Runs:
    """Runs in order of curve and start, over points first … first + count − 1 of ``curves`` curves."""

    curve: Array  # uint16
    start: Array  # uint32
    code: Array  # uint16
    curves: int
    first: int = 0
    count: int = ALL

    @property
    def place(self) -> Array:
        """Curve and start in one sortable number."""
        place: Array = self.curve.astype(np.uint64) << np.uint64(32) | self.start
        return place

    def check(self) -> None:
        """BadRecord unless these are run lengths: every curve from its first point, no two runs that are one."""
        place, last = self.place, self.first + self.count - 1
        if not len(place) or (np.diff(place.astype(np.int64)) <= 0).any():
            raise BadRecord("its runs are not in order")
        begins = np.concatenate([[True], self.curve[1:] != self.curve[:-1]])
        if not np.array_equal(self.curve[begins], np.arange(self.curves)):
            raise BadRecord(f"its runs are not those of {self.curves} curves")
        if (self.start[begins] != self.first).any() or int(self.start.max()) > last:
            raise BadRecord(f"its runs do not cover points {self.first:#x} to {last:#x}")
        if ((self.code[1:] == self.code[:-1]) & ~begins[1:]).any():
            raise BadRecord("two of its neighbouring runs have one code")

    def codes_between(self, low: int, high: int) -> list[int]:
        """Every code that any curve has at points low … high, in order."""
        end = self._ends().astype(np.int64)
        start = self.start.astype(np.int64)
        touching = (start <= high) & (end > low)
        return sorted({int(code) for code in self.code[touching]})

    def _ends(self) -> Array:
        end = np.full(len(self.start), self.first + self.count, np.uint64)
        same = self.curve[1:] == self.curve[:-1]
        end[:-1][same] = self.start[1:][same]
        return end


def read_runs(output: Output, name: str) -> Runs:
    """The runs that a program wrote to a file; ProbeError when it says more than the file holds."""
    lines = [line.split() for line in output.lines.get("sweep", []) if line.split()[:1] == [name]]
    if len(lines) != 1 or len(lines[0]) != 5:
        raise ProbeError(f"the probe's output has no line about its sweep {name}")
    try:
        curves, first, count, runs = (int(word) for word in lines[0][1:])
    except ValueError:
        raise ProbeError(f"the probe's line about its sweep {name} holds no integers") from None
    found = output.array(name, _RUN)
    if runs != len(found):
        raise ProbeError(
            f"the probe found {counted(runs, 'run')} and wrote {len(found):,}: these outputs are not constant over "
            "long stretches, as the conversions of working hardware are"
        )
    return Runs(
        found["curve"].astype(np.uint16), found["start"].copy(), found["code"].astype(np.uint16), curves, first, count
    )


def write_runs(runs: Runs) -> bytes:
    """The file of a program that found these runs."""
    out = np.empty(len(runs.start), _RUN)
    out["curve"], out["start"], out["code"] = runs.curve, runs.start, runs.code
    return out.tobytes()


def stored(runs: Runs, name: str) -> dict[str, Array]:
    """The arrays of a record."""
    return {f"{name}_curve": runs.curve, f"{name}_start": runs.start, f"{name}_code": runs.code}


def restored(arrays: Mapping[str, Array], name: str, curves: int, first: int = 0, count: int = ALL) -> Runs:
    """The runs of a record's arrays, checked."""
    curve, start, code = (arrays[f"{name}_{part}"] for part in ("curve", "start", "code"))
    if not len(curve) == len(start) == len(code):
        raise BadRecord(f"its arrays {name}_curve, {name}_start and {name}_code are not of one length")
    runs = Runs(curve, start, code, curves, first, count)
    runs.check()
    return runs


# ---- the oracle's runs -------------------------------------------------------------------------------------


def float_runs(encode: Encode, curves: int, last: int, sign: int, *, first: int = 0, count: int = ALL) -> Runs:
    """The runs of ``curves`` monotone conversions over float32 patterns (see the top of this module).

    Args:
        last: the largest magnitude code; sign: the sign bit of a code.
    """
    curve, start, code = [], [], []

    def add(where: Array, point: Array, value: Array) -> None:
        curve.append(where)
        start.append(point)
        code.append(value)

    every = np.arange(curves)
    for low, high in (POSITIVE, NEGATIVE):
        reached = _first_reached(encode, curves, last, sign, low, high)  # (curves, last)
        at = np.concatenate([np.full((curves, 1), low), reached], axis=1).astype(np.int64)
        codes = np.arange(last + 1) | (sign if low else 0)
        # a code that is never reached starts beyond the end; one that is stepped over starts where the next one does
        keep = (at <= high) & np.concatenate([at[:, :-1] < at[:, 1:], np.ones((curves, 1), bool)], axis=1)
        where = np.broadcast_to(every[:, None], at.shape)
        add(where[keep], at[keep], np.broadcast_to(codes, at.shape)[keep])
    for low, high in (POSITIVE_NAN, NEGATIVE_NAN):
        codes, others = (encode(every, np.full(curves, point, np.uint32)) for point in (low, high))
        if not np.array_equal(codes, others):
            raise AssertionError("the oracle gives NaN of one sign more than one code")
        add(every, np.full(curves, low), codes)
    return joined(np.concatenate(curve), np.concatenate(start), np.concatenate(code), curves, first, count)


def _first_reached(encode: Encode, curves: int, last: int, sign: int, low: int, high: int) -> Array:
    """The smallest pattern of low … high whose magnitude code is at least 1 … last; high + 1 when there is none."""
    shape = (curves, last)
    where = np.broadcast_to(np.arange(curves)[:, None], shape).reshape(-1)
    wanted = np.broadcast_to(np.arange(1, last + 1), shape).reshape(-1)
    below = np.full(where.size, low, np.int64)
    beyond = np.full(where.size, high + 1, np.int64)
    while (below < beyond).any():
        middle = (below + beyond) // 2
        codes = encode(where, np.minimum(middle, high).astype(np.uint32)).astype(np.int64) & ~sign
        up = (codes >= wanted) | (middle > high)
        beyond = np.where(up, middle, beyond)
        below = np.where(up, below, middle + 1)
    return below.reshape(shape)


def joined(curve: Array, start: Array, code: Array, curves: int, first: int = 0, count: int = ALL) -> Runs:
    """Run lengths in order from stretches in any order, cut to points first … first + count − 1."""
    start = start.astype(np.int64)
    order = np.lexsort((start, curve))
    curve, start, code = curve[order], start[order], code[order]
    ends = np.full(len(start), ALL, np.int64)
    same = curve[1:] == curve[:-1]
    ends[:-1][same] = start[1:][same]
    inside = (ends > first) & (start < first + count)
    curve, start, code = curve[inside], np.maximum(start[inside], first), code[inside]
    fresh = np.ones(len(start), bool)
    fresh[1:] = (curve[1:] != curve[:-1]) | (code[1:] != code[:-1])
    parts = (curve[fresh].astype(np.uint16), start[fresh].astype(np.uint32), code[fresh].astype(np.uint16))
    return Runs(*parts, curves, first, count)


def dense_runs(codes: Array) -> Runs:
    """The runs of codes (curves, points)."""
    curves, points = codes.shape
    fresh = np.ones(codes.shape, bool)
    fresh[:, 1:] = codes[:, 1:] != codes[:, :-1]
    curve, start = np.nonzero(fresh)
    parts = (curve.astype(np.uint16), start.astype(np.uint32), codes[fresh].astype(np.uint16))
    return Runs(*parts, curves, 0, points)


# ---- comparison --------------------------------------------------------------------------------------------


def compare(
    found: Runs, expected: Runs, describe: Callable[[int, int], dict[str, Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """How many points differ, and the first stretches that do.

    Args:
        describe: what a counterexample says of (curve, point).
    """
    places = np.sort(np.concatenate([found.place, expected.place]), kind="stable")
    places = places[np.concatenate([[True], places[1:] != places[:-1]])]
    mine, theirs = (runs.code[np.searchsorted(runs.place, places, side="right") - 1] for runs in (found, expected))
    differ = np.flatnonzero(mine != theirs)
    if not differ.size:
        return 0, []
    curve, point = places >> np.uint64(32), (places & np.uint64(0xFFFFFFFF)).astype(np.int64)
    end = np.full(len(places), found.first + found.count, np.int64)
    same = curve[1:] == curve[:-1]
    end[:-1][same] = point[1:][same]
    first = [
        {
            **describe(int(curve[i]), int(point[i])),
            "found": hex(int(mine[i])),
            "expected": hex(int(theirs[i])),
            "points": int(end[i] - point[i]),
        }
        for i in differ[:SHOWN]
    ]
    return int((end - point)[differ].sum()), first
