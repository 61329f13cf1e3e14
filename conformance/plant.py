"""Planted faults: quantizers that are wrong in one known way, to test the suite and its diagnosis with.

``planted`` makes what a quantizer with a deviation of deviations.py gives for a case.  ``MUTANTS`` are faults that
no list names: the plain arithmetic with one step replaced.  A mutant's step is a function of the step's right
value and of everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance import cases as suite_cases
from conformance.deviations import Entry
from conformance.expect import Expectation
from conformance.layouts import LAYOUTS
from conformance.model import Change, Model
from conformance.observed import Array, Evidence, Piece
from conformance.side import Side
from nvfp4hw.backends.base import Case
from nvfp4ref import e2m1, e4m3, hadamard, layout
from nvfp4ref.dump import Dump
from nvfp4ref.fp32 import SIXTH

F = np.float32
FLT_MAX = np.finfo(F).max

# ---- cases -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def quick() -> tuple[Case, ...]:
    """The quick cases that a quantizer answers."""
    return tuple(case for case in suite_cases.cases("quick") if case.kind == "quantize")


def suffixes(case: Case) -> tuple[str, ...]:
    """Of the outputs that a case asks for."""
    return {"row": ("",), "col": ("_t",), "both": ("", "_t")}[case.directions]


_CONFORMING: dict[str, tuple[Case, Dump]] = {}


def conforming(case: Case) -> Dump:
    """The dump of a right quantizer; kept, for every fault is held against it."""
    known = _CONFORMING.get(case.id)
    if known is None or known[0] is not case:
        known = _CONFORMING[case.id] = (case, _conforming(case))
    return known[1]


def _conforming(case: Case) -> Dump:
    expected = Expectation(case, "te")
    outputs = {
        name + suffix: expected.output(name + suffix)
        for suffix in suffixes(case)
        for name in ("packed", "scales", "amax")
    }
    return _dump(case, outputs)


def _dump(case: Case, outputs: Mapping[str, Any], **fields: Any) -> Dump:
    states: dict[str, Any] = {}
    for suffix in ("", "_t"):
        state = case.data.get("rng" + suffix)
        if state is not None:
            states[("rng" if isinstance(state, nv.Philox) else "rbits") + suffix] = state
    return Dump(
        **{
            "x": case.x,
            "block": case.block,
            "rht_t": False if case.rht_t is None else case.rht_t,
            "rounding": case.rounding,
            "arithmetic": nv.arithmetic("te", **case.fields),
            **states,
            **outputs,
            **fields,
        }
    )


def _with(dump: Dump, name: str, value: Any) -> Dump:
    changes: dict[str, Any] = {name: value}
    return replace(dump, **changes)


def same(a: Dump, b: Dump) -> bool:
    """Whether two dumps have the same outputs, NaN amaxes being equal."""
    for name in ("packed", "scales", "amax", "global_scale"):
        for suffix in ("", "_t"):
            found, other = getattr(a, name + suffix), getattr(b, name + suffix)
            if (found is None) != (other is None):
                return False
            if found is not None and not (
                found.shape == other.shape and np.array_equal(found, other, equal_nan=found.dtype.kind == "f")
            ):
                return False
    return True


# ---- known deviations --------------------------------------------------------------------------------------


def against(entry: Entry, case: Case) -> Dump | None:
    """A right quantizer's dump that declares something else; None when the case cannot be declared so."""
    right = conforming(case)
    if case.fields or "rht_t" in entry.against and case.rht_t is None:
        return None
    fields = dict(entry.against)
    tiled = fields.get("arithmetic") == {"name": "te", "tile_scales": "tiled"}
    if tiled and (case.block == (1, 16) or min(case.x.shape) < 32):
        return None
    return replace(right, **fields)


def planted_entry(entry: Entry, change: Change, case: Case) -> Dump | None:
    """What a quantizer with one form of a deviation gives for a case, and None when it does not apply to it."""
    return against(entry, case) if entry.against else planted(change, case, entry.directions)


def planted(changes: Change | list[Change], case: Case, directions: tuple[str, ...] = ("", "_t")) -> Dump | None:
    """What a quantizer with these changes gives for a case; None when they do not apply to it.

    ``directions`` are those that have the changes; the others are right.
    """
    changes = [changes] if isinstance(changes, Mapping) else changes
    right = conforming(case)
    outputs: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    applied = False
    for suffix in suffixes(case):
        made = _side(right, suffix, changes, case) if suffix in directions else None
        if made is not None:
            outputs |= made[0]
            fields |= made[1]
            applied = True
    return replace(right, **outputs, **fields) if applied else None


def _side(right: Dump, suffix: str, changes: list[Change], case: Case) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The outputs of one direction, and fields of the dump, with the changes in it."""
    side = Side(right, suffix, right.resolve_arithmetic())
    evidence = Evidence(side)
    if any("axis" in change for change in changes):
        return _other_axis(side, changes[0]["axis"], case) if len(changes) == 1 else None
    model, general = evidence.base, ""
    fields: dict[str, Any] = {}
    factor = F(1)
    for change in changes:
        plain = {key: v for key, v in change.items() if key not in ("form", "ulp") and v != "recorded-wrong"}
        if change.get("amax") == "recorded-wrong":
            wrong = np.asarray(evidence.amax(model, model.arithmetic) * F(1.25))
            return _given_amax(side, wrong)
        if "form" in change:
            fields["global_scale_form"] = "encode"
            factor = F(1) if change["form"] == "exchanged" else F(0.75)
        general = change.get("ulp", general)
        if "scales" in plain:
            stores = {"repeated": "compact"}.get(plain["scales"], plain["scales"])
            if not _stores(stores, evidence, right):
                return None
        try:
            changed = model.changed(plain) if plain else model
        except (ValueError, TypeError):
            return None
        if changed is None or not evidence.applicable(replace(changed, scales=None)):
            return None
        model = changed
    if evidence.random(evidence.base) is None and case.rounding == "stochastic":
        return None
    amax = evidence.recorded_amax
    given = case.amax_t if suffix else case.amax
    if given is None and isinstance(model.amax, str):
        amax = evidence.true_amax(None if model.amax == "before-transform" else model.rht, model.of_bytes)
        right = _with(right, "amax" + suffix, amax.reshape(-1))
        evidence = Evidence(Side(right, suffix, side.arithmetic))
    packed, scales = _made(evidence, model, general)
    if model.scales:
        scales = np.ascontiguousarray(LAYOUTS[model.scales].store(scales))
    outputs: dict[str, Any] = {"packed" + suffix: packed, "scales" + suffix: scales}
    outputs["amax" + suffix] = getattr(right, "amax" + suffix)
    if fields:
        outputs["global_scale" + suffix] = np.asarray(evidence.scale(model, model.of_bytes).decode * factor).reshape(-1)
    return outputs, fields


def _stores(name: str, evidence: Evidence, right: Dump) -> bool:
    """Whether scales can be stored so at all, and differ from the declared layout."""
    rows, columns = evidence.plane
    if name in ("one-per-tile", "tiled") and (right.block == (1, 16) or rows < 32):
        return False
    if name == "one-per-32" and columns % 2:
        return False
    if name in ("swizzled", "transposed") and (columns == 1 or rows == 1):
        return False
    return name != evidence.declared_scales


def _made(evidence: Evidence, model: Model, general: str) -> tuple[Array, Array]:
    """Packed codes and scale bytes of a model."""
    piece = Piece(evidence, (slice(None), slice(None)))
    byte = piece.bytes(model)
    codes = piece.codes(model, byte)
    if general == "any":  # an approximate reciprocal: some blocks above, some below
        moved = [model.changed({"encode_ulp": ulp}) or model for ulp in (-1, 1)]
        beside = [piece.codes(one, byte) for one in moved]
        choice = np.arange(byte.size).reshape(byte.shape) * 7919 % 10
        codes = np.where(choice == 0, beside[0], np.where(choice == 1, beside[1], codes))
    rows, columns = evidence.plane
    packed = np.empty((rows, columns * 8), np.uint8)
    layout.pack_tiles(codes, model.of_codes.packing, packed)
    return packed, byte


def _given_amax(side: Side, amax: Array) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outputs made with an amax that is recorded and is not the tensor's."""
    suffix = side.suffix
    right = _with(side.dump, "amax" + suffix, amax.reshape(-1))
    evidence = Evidence(Side(right, suffix, side.arithmetic))
    packed, scales = _made(evidence, evidence.base, "")
    return {"packed" + suffix: packed, "scales" + suffix: scales, "amax" + suffix: amax.reshape(-1)}, {}


def _other_axis(side: Side, how: str, case: Case) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The output of the other axis, as it is (of a square tensor) or put into the places of x."""
    rows, length = side.shape
    if case.rounding != "nearest-even" or side.rht is not None or side.arithmetic.row_scaled or rows % 16:
        return None
    if how == "transposed" and rows != length:
        return None
    amax = side.amax
    q = nv.quantize(case.x, axis=-1 if side.suffix else 0, block=case.block, amax=amax, arithmetic=side.arithmetic)
    packed, scales = q.packed, q.scales
    if how == "in-place":
        packed = e2m1.pack(np.ascontiguousarray(e2m1.unpack(packed).T))
        scales = np.ascontiguousarray(scales.T)
    return {"packed" + side.suffix: packed, "scales" + side.suffix: scales}, {}


# ---- the plain arithmetic, step by step --------------------------------------------------------------------

Steps = dict[str, Any]
Step = Callable[[Any, Steps], Any]


def _plain(case: Case, suffix: str, step: str = "", change: Step | None = None) -> Steps:
    """Every step of one direction in order; the one named is passed through ``change``."""
    known: Steps = {"case": case, "suffix": suffix}

    def put(name: str, value: Any) -> Any:
        known[name] = change(value, known) if name == step and change else value
        return known[name]

    with np.errstate(all="ignore"):
        x = case.x.T if suffix else case.x
        if suffix and case.rht_t is not None:
            x = hadamard.transform(case.x, case.rht_t, 0)
        x = put("x", np.ascontiguousarray(x).astype(F))
        finite = np.where(np.isnan(x), F(0), x)
        given = case.amax_t if suffix else case.amax
        amax = put("A", np.abs(finite).max() if given is None else F(given))
        scale = np.fmin(F(2688) / amax, FLT_MAX)
        scale = put("S", F(1) if amax == 0 or scale == 0 else scale)
        a = np.abs(finite).reshape(len(x), -1, 16).max(2)
        if case.block == (16, 16):
            a = np.repeat(a.reshape(len(x) // 16, 16, -1).max(1), 16, axis=0)
        a = put("a", a)
        s = put("s", np.fmin(a * (scale * put("sixth", SIXTH)), FLT_MAX))
        byte = put("byte", e4m3.encode(s))
        inverse = put("D", F(1) / scale)
        e = put("e", np.fmin(F(1) / (e4m3.VALUES[byte] * inverse), FLT_MAX))
        y = put("y", x * np.repeat(e, 16, axis=1))
        if case.rounding == "stochastic":
            words = case.data["rng" + suffix].words(
                case.x.shape, 0 if suffix else -1, block=case.block, dtype=case.x.dtype.name
            )
            words = put("words", words)
            codes = nv.e2m1.encode_stochastic(y.reshape(-1, 4), words.reshape(-1)).reshape(y.shape)
        else:
            codes = nv.e2m1.encode(y)
        codes = put("codes", codes)
        put("packed", nv.e2m1.pack(codes))
        put("stored", byte)
    return known


@dataclass(frozen=True)
class Mutant:
    """A fault that no list names.

    Attributes:
        name: what is wrong, short.
        stage: where (conformance.deviations.STAGES).
        step: the step of ``_plain`` that is changed.
        change: (its right value, the steps before it) → what the mutant has.
        needs: what a case must be for the mutant to differ from a right quantizer.
    """

    name: str
    stage: str
    step: str
    change: Step
    needs: Callable[[Case], bool] = lambda case: True

    def quantize(self, case: Case) -> Dump | None:
        """The mutant's dump of a case; None where the case asks for something it has not."""
        if case.fields or not self.needs(case):
            return None
        outputs: dict[str, Any] = {}
        for suffix in suffixes(case):
            steps = _plain(case, suffix, self.step, self.change)
            outputs |= {
                "packed" + suffix: steps["packed"],
                "scales" + suffix: steps["stored"],
                "amax" + suffix: np.asarray(steps["A"], F).reshape(1),
            }
        return _dump(case, outputs)


def _last(right: Any, wrong: Any, axis: int = 1) -> Array:
    """Wrong in the last entry of an axis only."""
    out = np.array(right)
    index = (slice(None), slice(-1, None)) if axis == 1 else (slice(-1, None),)
    out[index] = np.asarray(wrong)[index]
    return out


def _up(value: Any) -> Any:
    return np.nextafter(value, F(np.inf))


def _rolled(value: Array, shift: int, axis: int) -> Array:
    return np.roll(value, shift, axis)


def _lane(codes: Array, lane: int, wrong: Array) -> Array:
    out = codes.copy()
    out[:, lane::16] = wrong[:, lane::16]
    return out


def _swapped(codes: Array, first: int, second: int) -> Array:
    out = codes.copy()
    out[:, first::16], out[:, second::16] = codes[:, second::16], codes[:, first::16]
    return out


def _half_tile(a: Array, known: Steps) -> Array:
    x = known["x"]
    tiles = np.abs(np.where(np.isnan(x), 0, x)).reshape(len(x) // 16, 16, -1, 16)
    return np.repeat(tiles[:, :8].max((1, 3)), 16, axis=0)


def _shifted_blocks(a: Array, known: Steps) -> Array:
    x = np.abs(np.where(np.isnan(known["x"]), 0, known["x"]))
    return np.roll(x, -1, axis=1).reshape(len(x), -1, 16).max(2)


def _without_last_lane(a: Array, known: Steps) -> Array:
    x = np.abs(np.where(np.isnan(known["x"]), 0, known["x"]))
    return x.reshape(len(x), -1, 16)[:, :, :15].max(2)


def _threshold(codes: Array, known: Steps) -> Array:
    y = np.abs(known["y"])
    return np.where((y > 2.4) & (y <= 2.5), codes + 1, codes).astype(np.uint8)


def _transformed(case: Case, **fields: Any) -> Array:
    return np.asarray(hadamard.transform(case.x, replace(case.rht_t, **fields), 0)).astype(F)


def _negated_output(x: Array, known: Steps) -> Array:
    out = x.copy()
    out[:, 3::16] *= F(-1)
    return out


def _one_dimensional(case: Case) -> bool:
    return case.block == (1, 16)


def _nearest(case: Case) -> bool:
    return case.rounding == "nearest-even"


def _random(case: Case) -> bool:
    return case.rounding == "stochastic"


def _rht(case: Case) -> bool:
    return case.rht_t is not None and case.directions == "col"


def _free_amax(case: Case) -> bool:
    return case.amax is None and case.amax_t is None


MUTANTS: tuple[Mutant, ...] = (
    # amax
    Mutant(
        "tensor amax misses the last row",
        "amax",
        "A",
        lambda v, k: np.nanmax(np.abs(k["x"][:-1]), initial=0).astype(F),
        _free_amax,
    ),
    Mutant(
        "tensor amax misses the last 16 columns",
        "amax",
        "A",
        lambda v, k: np.nanmax(np.abs(k["x"][:, :-16]), initial=0).astype(F),
        _free_amax,
    ),
    Mutant("tensor amax rounded to bfloat16", "amax", "A", lambda v, k: F(ml_dtypes.bfloat16(v)), _free_amax),
    # global scale
    Mutant("2680 for 2688", "global-scale", "S", lambda v, k: np.fmin(F(2680) / k["A"], FLT_MAX) if k["A"] else v),
    Mutant("global scale one ulp up", "global-scale", "S", lambda v, k: np.fmin(_up(v), FLT_MAX)),
    Mutant("global scale one ulp down", "global-scale", "S", lambda v, k: np.nextafter(v, F(0))),
    # block scale
    Mutant("1/6 cut off, not rounded", "block-scale", "sixth", lambda v, k: np.nextafter(v, F(0))),
    Mutant("block scale one ulp up", "block-scale", "s", lambda v, k: _up(v)),
    Mutant("block amax misses the last element", "block-scale", "a", _without_last_lane, _one_dimensional),
    Mutant("blocks start one element late", "block-scale", "a", _shifted_blocks, _one_dimensional),
    Mutant("tile amax of the first 8 rows", "block-scale", "a", _half_tile, lambda case: case.block == (16, 16)),
    Mutant("block amax of the previous block", "block-scale", "a", lambda v, k: _rolled(v, 1, 1)),
    Mutant("block amax of the row before", "block-scale", "a", lambda v, k: _rolled(v, 1, 0)),
    Mutant(
        "last block of a row cut off",
        "block-scale",
        "byte",
        lambda v, k: _last(v, e4m3.encode(k["s"], "truncate")),
    ),
    Mutant("subnormal scales flushed to 0", "block-scale", "byte", lambda v, k: np.where(v < 8, 0, v).astype(np.uint8)),
    Mutant("block scale limited to 240", "block-scale", "s", lambda v, k: np.fmin(v, F(240))),
    Mutant(
        "only odd rows round the scale up",
        "block-scale",
        "byte",
        lambda v, k: np.where(np.arange(len(v))[:, None] % 2, e4m3.encode(k["s"], "up"), v),
    ),
    # encode scale
    Mutant("1/S one ulp down", "encode-scale", "D", lambda v, k: np.nextafter(v, F(0))),
    Mutant("encode scale of the previous block", "encode-scale", "e", lambda v, k: _rolled(v, 1, 1)),
    Mutant("encode scale two ulp up", "encode-scale", "e", lambda v, k: np.fmin(_up(_up(v)), FLT_MAX)),
    Mutant(
        "bfloat16 encode scale in the last block",
        "encode-scale",
        "e",
        lambda v, k: _last(v, v.astype(ml_dtypes.bfloat16).astype(F)),
    ),
    Mutant(
        "encode scale one ulp up in odd rows",
        "encode-scale",
        "e",
        lambda v, k: np.where(np.arange(len(v))[:, None] % 2, np.fmin(_up(v), FLT_MAX), v),
    ),
    # rounding
    Mutant(
        "element 5 of a block through bfloat16",
        "rounding",
        "y",
        lambda v, k: _lane(v, 5, v.astype(ml_dtypes.bfloat16).astype(F)),
        _nearest,
    ),
    Mutant(
        "ties of negative elements away from zero",
        "rounding",
        "codes",
        lambda v, k: np.where(k["y"] < 0, e2m1.encode(k["y"], "ties-away"), v),
        _nearest,
    ),
    Mutant("2.4 for the midpoint 2.5", "rounding", "codes", _threshold, _nearest),
    Mutant(
        "largest magnitude 4",
        "rounding",
        "codes",
        lambda v, k: np.where(v & 7 == 7, v - 1, v).astype(np.uint8),
    ),
    Mutant("sign of element 0 lost", "rounding", "codes", lambda v, k: _lane(v, 0, v & np.uint8(7))),
    Mutant(
        "last row cut off",
        "rounding",
        "codes",
        lambda v, k: _last(v, e2m1.encode(k["y"], "truncate"), axis=0),
        _nearest,
    ),
    # packing
    Mutant("elements 6 and 7 exchanged", "packing", "codes", lambda v, k: _swapped(v, 6, 7)),
    Mutant(
        "elements of a block in reverse",
        "packing",
        "codes",
        lambda v, k: v.reshape(len(v), -1, 16)[..., ::-1].reshape(v.shape),
    ),
    # layout
    Mutant(
        "stored scales one column on",
        "layout",
        "stored",
        lambda v, k: _rolled(v, 1, 1),
        lambda case: case.x.shape[-1] > 16,
    ),
    Mutant("stored scales one row on", "layout", "stored", lambda v, k: _rolled(v, 1, 0), _one_dimensional),
    Mutant(
        "stored scales in the order of another swizzle",
        "layout",
        "stored",
        lambda v, k: v.reshape(len(v) // 4, 4, -1).transpose(1, 0, 2).reshape(v.shape),
        lambda case: _one_dimensional(case) and all(n % 16 == 0 for n in case.x.shape),
    ),
    # transform
    Mutant("one bit of the sign mask", "transform", "x", lambda v, k: _transformed(k["case"], sign_mask=0xD7E9), _rht),
    Mutant("output 3 of the transform negated", "transform", "x", _negated_output, _rht),
    Mutant(
        "transform of 8 elements", "transform", "x", lambda v, k: _transformed(k["case"], size=8, sign_mask=0xE8), _rht
    ),
    # random bits
    Mutant("words of the next block", "random-bits", "words", lambda v, k: _rolled(v, 4, 1), _random),
    Mutant("bytes of each word reversed", "random-bits", "words", lambda v, k: v.byteswap(), _random),
    Mutant("lowest random bit stuck at 1", "random-bits", "words", lambda v, k: v | np.uint32(0x80000001), _random),
)
