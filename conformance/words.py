"""Random words other than the declared ones: of another offset, seed, kernel, or of the rowwise output.

A specification of words is a tuple that a model can hold: ("state", field, value, …) for the declared state with
fields of nvfp4ref.Philox replaced, ("advanced", calls) for its offset moved on, ("rowwise", how) for words of the
rowwise output used columnwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.side import Side
from nvfp4ref import philox as generator
from nvfp4ref import streams

Array = np.ndarray[Any, Any]

CALLS = 2**12  # offsets searched on either side of the declared one
STEPS = 2**10  # multiples of 1024 searched on either side


def declared(side: Side) -> nv.Philox | None:
    """The generator's state that a dump declares for one direction."""
    state = side.found("rng") or side.dump.rng
    return None if state is None else nv.Philox(**{"offset": 0, **state})


def _how(side: Side) -> dict[str, Any]:
    return {"dtype": side.x.dtype.name, "block": side.dump.block, "rht": side.dump.rht_t is not False}


def other(side: Side, specification: tuple[Any, ...]) -> Array | None:
    """The words of a specification, (R, K/4); None when this dump has no such words."""
    kind, *rest = specification
    state = declared(side)
    try:
        if kind == "state":
            assert state is not None
            fields = dict(zip(rest[::2], rest[1::2], strict=True))
            return replace(state, **fields).words(side.x.shape, 0 if side.suffix else -1, **_how(side))
        if kind == "advanced":
            assert state is not None
            return other(side, ("state", "offset", (state.offset + rest[0]) % 2**64))
        return _rowwise(side, rest[0], state)
    except (ValueError, AssertionError):
        return None


def _rowwise(side: Side, how: str, state: nv.Philox | None) -> Array | None:
    """Words of the rowwise output for the columnwise one, (C, R/4)."""
    rows, columns = side.shape
    if not side.suffix:
        return None
    if how == "map":  # the rowwise map, walked over the transpose
        return None if state is None else state.words(side.shape, -1, **(_how(side) | {"rht": False}))
    if how == "alone":  # the columnwise map of a launch that makes nothing else: its first calls are the rowwise ones
        return None if state is None else replace(state, both=False).words(side.x.shape, 0, **_how(side))
    words: Array | None = side.dump.rbits
    if words is None:
        words = None if state is None else state.words(side.x.shape, -1, **_how(side))
    if words is None:
        return None
    if how == "flat":  # the same stream of words in the columnwise output's shape
        return words.reshape(rows, -1)
    blocks = words.reshape(columns // 16, 16, rows // 16, -1) if columns % 16 == 0 and rows % 16 == 0 else None
    if blocks is None:
        return None
    # how == "tile": the word of row r of a 16x16 tile serves column r of it
    return blocks.transpose(2, 1, 0, 3).reshape(rows, -1)


def of_state(fields: dict[str, Any]) -> tuple[Any, ...]:
    """The specification of the declared state with fields replaced."""
    return ("state", *(item for pair in fields.items() for item in pair))


# ---- the search for a state --------------------------------------------------------------------------------


def nearby(side: Side) -> Iterator[dict[str, Any]]:
    """Fields that make a state a slip away from the declared one, offsets apart (see ``offsets``)."""
    state = declared(side)
    if state is None:
        return
    seed, offset = state.seed, state.offset
    swapped = (seed >> 32) | (seed & 0xFFFFFFFF) << 32
    fields: list[dict[str, Any]] = [
        {"seed": swapped},
        {"seed": seed & 0xFFFFFFFF},
        {"seed": seed ^ 1},
        {"seed": (seed + 1) % 2**64},
        {"seed": offset, "offset": seed},
        {"offset": (offset >> 32) | (offset & 0xFFFFFFFF) << 32},
        {"offset": 4 * offset % 2**64},
        {"offset": offset // 4},
        {"offset": 0},
        {"both": not state.both},
        *({"rounds": rounds} for rounds in (3, 5, 6, 7, 8, 9) if rounds != state.rounds),
        *({"kernel": name} for name in streams.NAMES if name != state.kernel),
    ]
    for change in fields:
        if replace(state, **change) != state:
            yield change


def offsets(side: Side) -> Array:
    """Offsets to try, the nearest first: up to CALLS away, and multiples of 1024 further."""
    state = declared(side)
    if state is None:
        return np.zeros(0, np.uint64)
    deltas = np.concatenate([np.arange(1, CALLS + 1), np.arange(5, STEPS + 1) * 1024])
    both = np.stack([deltas, -deltas], 1).reshape(-1)
    return np.array(state.offset, np.uint64) + both.astype(np.uint64)


class Blocks:
    """The Philox calls that serve a few blocks of one direction, for any offset."""

    def __init__(self, side: Side, state: nv.Philox, rows: Array, columns: Array) -> None:
        """``rows`` and ``columns`` index the result's plane of blocks.  Raises ValueError as Philox.words does."""
        shape, axis, how = side.x.shape, 0 if side.suffix else -1, _how(side)
        both = state.both
        name = state.kernel
        if name == "auto":
            name = streams.dispatch(shape, axis, both=both, **how)
        if name == "unfused-rht":  # the transform is written out, and then quantized rowwise
            shape, axis, both = (shape[1], shape[0]), -1, False
            name = streams.dispatch(shape, axis, dtype=how["dtype"], block=how["block"])
        kernel = streams.KERNELS[name]
        rule = kernel.row if axis == -1 else kernel.column
        if rule is None or shape[0] % kernel.multiples[0] or shape[1] % kernel.multiples[1]:
            raise ValueError(f"the kernel {name!r} makes no such output")
        r, c = (rows, columns * 16) if axis == -1 else (columns * 16, rows)
        place = streams.Place(r.astype(np.uint64), c.astype(np.uint64), shape, both)
        found = rule(place)
        self.sequence, self.call, swapped = (np.broadcast_to(part, rows.shape) for part in found)
        self.swapped = swapped != 0
        self.state = state

    def words(self, offsets: Array) -> Array:
        """uint32 (offsets, blocks, 4) in the order of the elements."""
        seed, rounds = self.state.seed, self.state.rounds
        low = self.call + offsets[:, None]  # past 2^64 it carries into the sequence, as in Philox.words
        sequence = self.sequence + (low < offsets[:, None])
        out = generator.calls(seed, 0, sequence.astype(np.uint64), low, rounds)
        out[:, self.swapped] = out[:, self.swapped][..., [2, 3, 0, 1]]
        return out
