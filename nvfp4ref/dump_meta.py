"""The fields of a dump's meta: what each may be, as a table of parsers.

A parser takes the field's name and a value, from JSON or from a caller, and returns the value to keep.  All
raise DumpError that says what was given and what was expected.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .arithmetic import PRESETS, Arithmetic
from .container import DumpError, foreign, shown

FORMAT = {"format": "nvfp4-dump", "version": 1}  # the two fields that must be there
FLOATS = ("float32", "float16", "bfloat16")
TENSORS = "tensors"  # in a file of several tensors: the meta of each by name

Parser = Callable[[str, Any], Any]
Test = Callable[[Any], bool]


def parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN or Infinity, no key twice."""
    with foreign(f"{what} is not valid JSON"):
        value = json.loads(
            text if isinstance(text, str) else text.decode(),
            parse_constant=_no_constant,
            object_pairs_hook=_no_twins,
        )
    if not isinstance(value, dict):
        raise DumpError(f"{what} is JSON {json.dumps(value)[:40]}, expected an object {{…}}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands there twice")
        found[key] = value
    return found


def json_object(name: str, value: Any) -> dict[str, Any]:
    """An object that can be written as JSON."""
    if not isinstance(value, Mapping):
        raise DumpError(f"{name} is {shown(value)}, expected an object")
    with foreign(f"{name} cannot be written as JSON"):
        json.dumps(dict(value), allow_nan=False)
    return dict(value)


def extra_meta(value: Any) -> dict[str, Any]:
    """The fields of meta that are none of the known ones."""
    found = json_object("extra_meta", value)
    known = (*FORMAT, *META, TENSORS)
    for key in found:
        if key in known:
            raise DumpError(f"{shown(key)} is no extra key of meta; it is a field of its own")
        refuse_slip(key, known)
    return found


def refuse_slip(name: str, known: Iterable[str]) -> None:
    """Raises DumpError when an unknown name can only be a slip for a known one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    if near:
        raise DumpError(f"unknown key {shown(name)}; did you mean {near[0]!r}?")


def one_of(*choices: Any) -> Parser:
    """A parser for one of these values, of the same type (True is not 1)."""

    def parse(name: str, value: Any) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        expected = " or ".join(repr(choice) for choice in choices if choice)
        raise DumpError(f"{name} is {'missing' if value is None else shown(value)}, expected {expected}")

    return parse


def _block(name: str, value: Any) -> tuple[int, int]:
    match value:
        case [1 | 16 as rows, 16] if type(rows) is int:
            return (rows, 16)
    raise DumpError(f"{name} is {shown(value)}, expected [1, 16] or [16, 16]")


def _is_int(bits: int) -> Test:
    return lambda value: type(value) is int and 0 <= value < 1 << bits


def _is(kind: type) -> Test:
    return lambda value: isinstance(value, kind)


_RHT = {"size": _is_int(16), "sign_mask": _is_int(256), "normalised": _is(bool), "round_to": _is(str)}
_RNG = {
    "seed": _is_int(64),
    "offset": _is_int(64),
    "kernel": _is(str),
    "both": _is(bool),
    "rounds": _is_int(16),
}


def _record(name: str, value: Any, fields: Mapping[str, Test]) -> dict[str, Any]:
    """An object of no other fields than these: an unknown one would change the arithmetic unheard.

    An object with attributes of these names (an RHT, a Philox) will do as well.
    """
    if not isinstance(value, Mapping):
        value = {key: getattr(value, key) for key in fields if hasattr(value, key)} or value
    if not isinstance(value, Mapping) or not set(value) <= set(fields):
        raise DumpError(f"{name} is {shown(value)}, expected an object of the fields {', '.join(fields)}")
    for key, entry in value.items():
        if not fields[key](entry):
            raise DumpError(f"{name} has a {key} of the wrong type or range: {shown(entry)}")
    return dict(value)


def _rht(name: str, value: Any) -> bool | dict[str, Any]:
    return value if isinstance(value, bool) else _record(name, value, _RHT)


def _rng(name: str, value: Any) -> dict[str, Any] | None:
    rng = None if value is None else _record(name, value, _RNG)
    if rng is not None and "seed" not in rng:
        raise DumpError(f"{name} has no seed: {shown(value)}")
    return rng


def _arithmetic(name: str, value: Any) -> str | dict[str, Any] | None:
    """A preset's name, an object of a name and fields, or an Arithmetic, which becomes one of the two."""
    if isinstance(value, Arithmetic):
        base, changes = value.name if value.name in PRESETS else "te", value.fields()
        changes.pop("name", None)
        value = {"name": base, **changes} if changes else base
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return json_object(name, value)
    raise DumpError(f"{name} is {shown(value)}, expected a preset's name or {{'name': preset, field: value, …}}")


META: dict[str, Parser] = {
    "x_dtype": one_of(*FLOATS, ""),
    "d_dtype": one_of(*FLOATS, ""),
    "block": _block,
    "rounding": one_of("nearest-even", "stochastic"),
    "rht": _rht,
    "rht_t": _rht,
    "scale_layout": one_of("compact", "swizzled"),
    "global_scale_form": one_of("encode", "decode", None),
    "arithmetic": _arithmetic,
    "rng": _rng,
    "rng_t": _rng,
    "producer": json_object,
}
