"""How one direction of a dump may have been made, as data, and what it would then hold.

A :class:`Model` is an ``Arithmetic`` and the choices around it: block shape, transform, layout, random words.
A *change* is a mapping from names of such choices to values; ``deviations.py`` lists changes by id.  Keys:

    <field of Arithmetic>    for scales and codes          bytes.<field>, codes.<field>    for one of them only
    rht                      "missing", "added"            rht.<field of RHT>              of the declared transform
    block                    "other"                       scales                          a layout of layouts.py
    amax                     "before-transform", a number  form                            "exchanged": the stored S
    words                    see words.py                  ulp                             "any": e, or 1 ulp beside it
    group                    "strided": which 16 elements share a block amax

Data flows as in nvfp4ref: tiles, amax, scale bytes, codes.  Codes are judged given the bytes that were *found*,
so that a fault of the scales does not hide one of the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import nvfp4ref as nv

ARITHMETIC = frozenset(f.name for f in fields(nv.Arithmetic)) - {"name"}

#: Fields of Arithmetic that the scale bytes do not depend on, and those that codes given the bytes do not.
CODES_ONLY = frozenset(
    ("encode_scale", "encode_max", "encode_nan", "encode_ulp", "zero_scale_elements", "element_rounding")
    + ("element_via", "saturate", "negative_zero", "nan_code", "nan_code_bfloat16", "nan_block_codes")
    + ("packing", "stochastic")
)
BYTES_ONLY = frozenset(
    ("block_amax", "amax_group", "block_scale", "sixth_type", "block_scale_max", "block_scale_nan")
    + ("scale_rounding", "scale_overflow", "scale_nan_byte", "scale_invalid_byte", "scale_floor")
    + ("zero_block_scale", "zero_block_rule", "four_over_six", "four_over_six_fast_error", "four_over_six_sum")
)

Change = Mapping[str, Any]


def part(change: Change) -> str:
    """What a change touches: "bytes", "codes" (given the bytes), or "both"."""
    parts = {_part(key) for key in change}
    return parts.pop() if len(parts) == 1 else "both"


def _part(key: str) -> str:
    if key.startswith("codes.") or key in CODES_ONLY or key in ("words", "ulp"):
        return "codes"
    if key.startswith("bytes.") or key in BYTES_ONLY or key in ("group",):
        return "bytes"
    return "both"


@dataclass(frozen=True)
class Model:
    """One direction of a quantizer; see the module for the fields."""

    arithmetic: nv.Arithmetic
    block: tuple[int, int] = (1, 16)
    rht: nv.RHT | None = None
    declared_rht: nv.RHT | None = None  # of this direction, or of the other one where this has none
    bytes_fields: tuple[tuple[str, Any], ...] = ()
    codes_fields: tuple[tuple[str, Any], ...] = ()
    scales: str | None = None  # None: as declared
    amax: Any = "recorded"
    form: str = "declared"
    words: Any = "declared"
    ulp: str = "one"
    group: str = "contiguous"

    @property
    def of_bytes(self) -> nv.Arithmetic:
        """The arithmetic of the scale bytes."""
        return replace(self.arithmetic, **dict(self.bytes_fields)) if self.bytes_fields else self.arithmetic

    @property
    def of_codes(self) -> nv.Arithmetic:
        """The arithmetic of the codes."""
        return replace(self.arithmetic, **dict(self.codes_fields)) if self.codes_fields else self.arithmetic

    def changed(self, change: Change) -> Model | None:
        """This model with a change; None when it has it already, or when the change does not apply to it."""
        model = self
        for number, (key, value) in enumerate(change.items()):
            found = _changed(model, key, value)
            if found is None or number == 0 and found == model:  # the first key is what the change is about
                return None
            model = found
        return model


def _changed(model: Model, key: str, value: Any) -> Model | None:
    prefix, _, name = key.rpartition(".")
    if prefix in ("bytes", "codes"):
        if prefix == "bytes":
            return replace(model, bytes_fields=(*model.bytes_fields, (name, value)))
        return replace(model, codes_fields=(*model.codes_fields, (name, value)))
    if prefix == "rht":
        return None if model.rht is None else replace(model, rht=replace(model.rht, **{name: value}))
    if key in ARITHMETIC:
        return replace(model, arithmetic=replace(model.arithmetic, **{key: value}))
    if key == "rht":
        if (model.rht is None) == (value == "missing"):
            return None
        return replace(model, rht=None if value == "missing" else model.declared_rht or nv.RHT())
    if key == "amax" and value == "before-transform" and model.rht is None:
        return None
    if key == "scales" and value == "repeated":
        value = "compact"
    if key == "axis":  # another reading of the whole output: see search.py
        return None
    if key == "block":
        if value == f"{model.block[0]}x{model.block[1]}":
            return None
        return replace(model, block=(16, 16) if model.block == (1, 16) else (1, 16))
    return replace(model, **{key: value})


def as_text(change: Change, base: str = "te") -> str:
    """A change as a call that a person can run, with what no field of Arithmetic says after it."""
    fields = {key: value for key, value in change.items() if key in ARITHMETIC}
    others = {key: value for key, value in change.items() if key not in ARITHMETIC}
    arguments = "".join(f", {key}={value!r}" for key, value in fields.items())
    text = f'nv.arithmetic("{base}"{arguments})'
    return text + "".join(f"; {key}: {_said(value)}" for key, value in others.items())


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
