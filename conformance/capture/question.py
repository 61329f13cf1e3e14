"""What a case asks, as one hash: a record answers this question and no other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.count import bits
from nvfp4hw.backends.base import Case


def digest(case: Case) -> str:
    """SHA-256 of everything about a case that its answer depends on: bytes, shapes, dtypes and the way to quantize."""
    said = hashlib.sha256()
    for name in (
        "kind",
        "block",
        "directions",
        "rounding",
        "rht_t",
        "amax",
        "amax_t",
        "fields",
        "data",
        "arithmetic",
        "x",
    ):
        said.update(f"{name}=".encode())
        _add(said, getattr(case, name))
    return said.hexdigest()


def _add(said: Any, value: Any) -> None:
    """A value in a form that is the same on every machine."""
    if isinstance(value, np.ndarray | np.generic):
        plain = bits(value)
        said.update(f"{np.asarray(value).dtype.name}{plain.shape};".encode())
        said.update(np.asarray(plain, plain.dtype.newbyteorder("<"), order="C").tobytes())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        said.update(type(value).__name__.encode())
        _add(said, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, Mapping):
        for key in sorted(value):
            said.update(f"{key}:".encode())
            _add(said, value[key])
    elif isinstance(value, tuple | list):
        said.update(f"[{len(value)}]".encode())
        for one in value:
            _add(said, one)
    else:
        said.update(f"{value!r};".encode())
