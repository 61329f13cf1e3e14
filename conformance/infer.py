"""Free values of deviations, read out of the data: the byte of a zero block, an amax, the state of a generator.

Each function takes a sample of one direction and the model so far, and returns changes worth trying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from conformance import words
from conformance.model import Change, Model
from conformance.observed import Piece
from nvfp4ref import e2m1, e4m3

Array = np.ndarray[Any, Any]
Infer = Callable[[Piece, Model], list[Change]]

_TRIED = 24  # values of a free amax that are tried


def _most_frequent(values: Array) -> int | None:
    return int(np.bincount(values).argmax()) if values.size else None


def zero_block_value(piece: Piece, model: Model) -> list[Change]:
    """The byte that blocks of zeros have, by each of the three rules for what a zero block is."""
    found, ar = piece.given_bytes(model), model.of_bytes
    zero = {"amax": piece.block_amax(model), "block-scale": piece.block_scale(model), "byte": piece.bytes(model)}
    changes: list[Change] = []
    for rule, value in zero.items():
        byte = _most_frequent(found[value == 0])
        if byte is not None and (byte, rule) != (ar.zero_block_scale, ar.zero_block_rule):
            changes.append({"zero_block_scale": byte, "zero_block_rule": rule})
    return changes


def nan_code(piece: Piece, model: Model) -> list[Change]:
    """The code that NaN elements have."""
    nan = np.isnan(piece.scaled(model, piece.given_bytes(model)))
    code = _most_frequent(piece.found_codes(model.of_codes.packing)[nan])
    return [] if code is None else [{"nan_code": code}]


# ---- an amax -----------------------------------------------------------------------------------------------


def wrong_amax(piece: Piece, model: Model) -> list[Change]:
    """Amaxes whose global scale gives the scale bytes, and if it can be the codes, that were found."""
    if model.arithmetic.row_scaled or model.arithmetic.global_scale == "none":
        return []
    limits = _by_bytes(piece, model)
    if limits is None:
        return []
    closer = _by_codes(piece, model)
    if closer is not None:
        both = (max(limits[0], closer[0]), min(limits[1], closer[1]))
        limits = both if both[0] <= both[1] else limits
    maximum = model.arithmetic.element_max * model.arithmetic.e4m3_max
    low, high = maximum / limits[1] * (1 - 2e-7), maximum / limits[0] * (1 + 2e-7)
    if not 0 < low <= high < 3e38:
        return []
    return [{"amax": float(value)} for value in _values_between(low, high, piece.evidence.input_dtype(model))]


def _by_bytes(piece: Piece, model: Model) -> tuple[float, float] | None:
    """The interval of S from the scale bytes: nearest rounding of about a·S/6."""
    byte, a = piece.given_bytes(model).reshape(-1), piece.block_amax(model).astype(np.float64).reshape(-1)
    used = (byte <= 0x7E) & (a > 0) & np.isfinite(a)
    middle = (e4m3.VALUES[:0x7E].astype(np.float64) + e4m3.VALUES[1:0x7F]) / 2
    low, high = np.concatenate([[0.0], middle]), np.concatenate([middle, [np.inf]])
    byte, a = byte[used], a[used]
    if not byte.size:
        return None
    six = model.arithmetic.element_max
    return _intersection(low[byte] * six / a, high[byte] * six / a, 1e-6)


def _by_codes(piece: Piece, model: Model) -> tuple[float, float] | None:
    """The interval of S from the codes: nearest rounding, or either neighbour, of about |x|·S/d."""
    d = e4m3.VALUES[piece.given_bytes(model)].astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = np.abs(piece.values(model).astype(np.float64))
    index = piece.found_codes(model.of_codes.packing) & 7
    d = np.broadcast_to(d, x.shape)
    used = (x > 0) & np.isfinite(x) & (d > 0)
    if piece.evidence.side.dump.rounding == "nearest-even":
        low, high = np.array((0, *e2m1.MIDPOINTS)), np.array((*e2m1.MIDPOINTS, np.inf))
    else:
        low, high = np.array((0, *e2m1.MAGNITUDES[:-1])), np.array((*e2m1.MAGNITUDES[1:], np.inf))
    unit, index = (d[used] / x[used]), index[used]
    return _intersection(low[index] * unit, high[index] * unit, 4e-7) if index.size else None


def _intersection(low: Array, high: Array, slack: float) -> tuple[float, float] | None:
    most, least = float(low.max()) * (1 - slack), float(high.min()) * (1 + slack)
    return (most, least) if 0 < most <= least < np.inf else None


def _values_between(low: float, high: float, dtype: str) -> Array:
    """Numbers of the input's type, and float32 ones, in an interval; at most _TRIED of each, spread evenly."""
    kinds: dict[str, tuple[Any, Any]] = {
        "bfloat16": (ml_dtypes.bfloat16, np.uint16),
        "float16": (np.float16, np.uint16),
        "float32": (np.float32, np.uint32),
    }
    found = []
    for name in dict.fromkeys((dtype, "float32")):
        kind, unsigned = kinds[name]
        with np.errstate(over="ignore"):
            ends = np.array([low, high]).astype(np.float32).astype(kind).view(unsigned).astype(np.int64)
        number = min(int(ends[1] - ends[0]) + 1, 2**16)
        values = (
            np.linspace(int(ends[0]), int(ends[1]), number)
            .astype(np.int64)
            .astype(unsigned)
            .view(kind)
            .astype(np.float32)
        )
        values = values[(values >= low) & (values <= high)]
        if values.size:
            found.append(values[np.unique(np.linspace(0, values.size - 1, min(_TRIED, values.size)).astype(int))])
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.float32)


# ---- the state of a generator ------------------------------------------------------------------------------


def other_state(piece: Piece, model: Model) -> list[Change]:
    """States near the declared one whose words give the codes found in a few blocks."""
    side, state = piece.evidence.side, words.declared(piece.evidence.side)
    if state is None or piece.evidence.across == "other" or piece.evidence.random(model) is None:
        return []
    if e2m1.STOCHASTIC[model.of_codes.stochastic][1] != 4:
        return []
    few = _Few(piece, model)
    changes: list[Change] = []
    for fields in words.nearby(side):
        try:
            calls = words.Blocks(side, replace(state, **fields), few.rows, few.columns)
        except ValueError:
            continue
        if few.agree(calls.words(np.array([calls.state.offset], np.uint64)))[0]:
            changes.append({"words": words.of_state(fields)})
    try:
        calls = words.Blocks(side, state, few.rows, few.columns)
    except ValueError:
        return changes
    offsets = words.offsets(side)
    good = offsets[few.agree(calls.words(offsets))]
    return changes + [{"words": words.of_state({"offset": int(offset)})} for offset in good[:3]]


class _Few:
    """A few blocks whose codes depend on their words."""

    def __init__(self, piece: Piece, model: Model, number: int = 6) -> None:
        byte = piece.given_bytes(model)
        self.arithmetic = model.of_codes
        scaled = piece.scaled(model, byte)
        found = piece.found_codes(model.of_codes.packing)
        inside = ((np.abs(scaled) < 6) & (np.abs(scaled) > 0)).sum(0)  # the more of them, the more a block says
        flat = np.argsort(-inside, axis=None, kind="stable")[:number]
        at = np.unravel_index(flat, inside.shape)
        self.scaled, self.found = scaled[:, at[0], at[1]], found[:, at[0], at[1]]
        r, c = (np.broadcast_to(part, inside.shape) for part in piece.indices)
        self.rows, self.columns = r[at], c[at]

    def agree(self, random: Array) -> Array:
        """Which of the words (n, blocks, 4) give the codes found: bool (n,)."""
        number = len(random)
        tiles = np.ascontiguousarray(np.broadcast_to(self.scaled[:, None, :], (16, number, self.scaled.shape[1])))
        codes = e2m1.round_elements(tiles, self.arithmetic, np.ascontiguousarray(random.transpose(2, 0, 1)))
        agree: Array = (codes == self.found[:, None, :]).all((0, 2))
        return agree


INFER: dict[str, Infer] = {
    "zero_block_value": zero_block_value,
    "nan_code": nan_code,
    "wrong_amax": wrong_amax,
    "other_state": other_state,
}
