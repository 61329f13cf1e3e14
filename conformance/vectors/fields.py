"""Operands and results: their types, as arrays, as little-endian files, as hexadecimal text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


class Type(NamedTuple):
    """How a value is held in NumPy, and how many hexadecimal digits show it."""

    dtype: Any
    digits: int
    what: str


TYPES: dict[str, Type] = {
    "e2m1": Type(np.uint8, 1, "an E2M1 code 0..15, one a byte in files"),
    "e4m3": Type(np.uint8, 2, "an E4M3 byte"),
    "e8m0": Type(np.uint8, 2, "a UE8M0 byte"),
    "u8": Type(np.uint8, 2, "a byte"),
    "u16": Type(np.uint16, 4, "an unsigned integer"),
    "u32": Type(np.uint32, 8, "an unsigned integer"),
    "u64": Type(np.uint64, 16, "an unsigned integer"),
    "f16": Type(np.float16, 4, "the bits of an IEEE binary16 number"),
    "bf16": Type(ml_dtypes.bfloat16, 4, "the bits of a bfloat16 number"),
    "f32": Type(np.float32, 8, "the bits of an IEEE binary32 number"),
}


def type_of(array: Array) -> str:
    """The name of an array's type; bytes are "u8"."""
    names = {np.dtype(one.dtype): name for name, one in TYPES.items() if name not in ("e2m1", "e4m3", "e8m0")}
    return names[array.dtype]


@dataclass(frozen=True)
class Field:
    """One operand or result of an operation: ``count`` values of a type."""

    name: str
    type: str
    count: int = 1

    @property
    def digits(self) -> int:
        """Hexadecimal digits of the whole field."""
        return TYPES[self.type].digits * self.count

    def __str__(self) -> str:
        return f"{self.name}:{self.type}" + (f"*{self.count}" if self.count > 1 else "")

    def check(self, array: Array) -> Array:
        """The array, when it is (n,) or (n, count) of this field's dtype; ValueError otherwise."""
        shape = (len(array),) if self.count == 1 else (len(array), self.count)
        if array.shape != shape or array.dtype != TYPES[self.type].dtype:
            raise ValueError(f"{self} is {np.dtype(TYPES[self.type].dtype)} {shape}; got {array.dtype} {array.shape}")
        return array

    def texts(self, array: Array) -> list[str]:
        """Each row in hexadecimal: its values in their order, upper case, nothing between them."""
        if self.type == "e2m1":
            text = array.tobytes().translate(_DIGITS).decode("ascii")
        else:
            text = bits(array).astype(f">u{array.dtype.itemsize}").tobytes().hex().upper()
        return [text[start : start + self.digits] for start in range(0, len(text), self.digits)]

    def array(self, texts: Sequence[str]) -> Array:
        """The reverse of ``texts``.  Raises ValueError for what has other digits or another length."""
        for text in texts:
            self.check_text(text)
        digits = "".join(texts)
        dtype = np.dtype(TYPES[self.type].dtype)
        if self.type == "e2m1":
            values = np.array([int(digit, 16) for digit in digits], np.uint8)
        else:
            values = np.frombuffer(bytes.fromhex(digits), f">u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
        values = values.view(dtype)
        return values if self.count == 1 else values.reshape(-1, self.count)

    def check_text(self, text: str) -> None:
        """ValueError unless ``text`` is this field in hexadecimal."""
        if len(text) != self.digits or not _HEXADECIMAL.fullmatch(text):
            raise ValueError(f"{self} has {self.digits} hexadecimal digits; got {_shown(text)}")


_DIGITS = bytes(b"0123456789ABCDEF"[code & 15] for code in range(256))
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def fields(text: str) -> tuple[Field, ...]:
    """Fields from their short form, "x:f32*16 amax:f32"."""
    found = []
    for word in text.split():
        name, _, rest = word.partition(":")
        kind, _, count = rest.partition("*")
        found.append(Field(name, kind, int(count or 1)))
        TYPES[kind]  # noqa: B018 - a KeyError for a type that there is not
    return tuple(found)


def bits(array: Array) -> Array:
    """Floats as the unsigned integers of their bit patterns; integers as they are."""
    array = np.ascontiguousarray(array)
    return array if array.dtype.kind in "ui" else array.view(f"u{array.dtype.itemsize}")


def little_endian(array: Array) -> bytes:
    """The bytes of an array in a file: C order, little-endian."""
    return bits(array).astype(f"<u{array.dtype.itemsize}").tobytes()


def different_rows(found: Sequence[Array], expected: Sequence[Array]) -> Array:
    """Which rows of some results differ in any bit: bool (n,)."""
    unequal = np.zeros(len(expected[0]), bool)
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return np.ones(len(expected[0]), bool)
        unequal |= (bits(one) != bits(other)).reshape(len(other), -1).any(axis=1)
    return unequal
