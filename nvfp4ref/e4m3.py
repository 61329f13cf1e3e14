"""E4M3 block-scale codes.  Rules E4M3-VALUES, E4M3-RNE, E4M3-SATURATE, E4M3-NAN.

A byte is sign, 4 exponent bits (bias 7) and 3 mantissa bits; 0x7F and 0xFF are NaN, there is no Inf, the
largest value is 448 (0x7E) and the smallest 2^-9 (0x01).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from .arrays import as_float32
from .fp32 import F32, NAN, U8, U32, AnyArray, reverse_halves

MAX = np.float32(448)
NAN_BYTE = 0x7F


def _value(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == NAN_BYTE:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 0x80 else magnitude


VALUES: F32 = np.array([_value(byte) for byte in range(256)], np.float32)
VALUES[[0x7F, 0xFF]] = NAN


UNIT = np.uint32(1 << 20)  # one code step: the 20 float32 fraction bits that E4M3 does not keep
_MIN_NORMAL = np.float32(2.0**-6)

#: what is added to a magnitude in units of 2^-20 of a code step before its fraction is cut off
ROUNDING: dict[str, Callable[[AnyArray], AnyArray | np.uint32]] = {
    "nearest-even": lambda u: np.uint32(0x7FFFF) + (u >> np.uint32(20) & np.uint32(1)),
    "half-up": lambda u: np.uint32(0x80000),
    "up": lambda u: np.uint32(0xFFFFF),
    "truncate": lambda u: np.uint32(0),
}


def code_units(magnitude: F32) -> U32:
    """Finite non-negative float32 in units of 2^-20 of an E4M3 code step, cut off, with a sticky last bit.

    From 2^-6 up these are the float32 bits with their exponent rebased to E4M3's bias of 7; below, a step is
    2^-9 and the count is x·2^29.
    """
    fixed = np.minimum(magnitude, _MIN_NORMAL) * np.float32(2.0**29)
    units = fixed.astype(np.uint32)
    units |= units != fixed
    return np.where(magnitude >= _MIN_NORMAL, magnitude.view(np.uint32) - np.uint32(120 << 23), units)


def encode_magnitude(magnitude: F32, rounding: str = "nearest-even") -> U32:
    """E4M3 codes of finite non-negative float32, not yet limited to 0x7E (464 and more give 0x7F up)."""
    units = code_units(magnitude)
    code: U32 = (units + ROUNDING[rounding](units)) >> np.uint32(20)
    return code


def encode_stochastic(x: ArrayLike, rbits: ArrayLike) -> U8:
    """E4M3 bytes of ``cvt.rs.satfinite.e4m3x4.f32``: 16 random bits an element (rule SR-E4M3).

    Args:
        x: (n, 4) float32; rbits: (n,) uint32.  The low half of a word serves elements 0 and 1, the high
            half 2 and 3; the second element of each pair sees its 16 bits reversed.
    Returns:
        uint8 (n, 4); above 448 and Inf saturate, NaN gives 0x7F.
    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    values, words = as_float32(x), np.asarray(rbits)
    if values.ndim != 2 or values.shape[1] != 4:
        raise ValueError(f"x has four elements a row, shape (n, 4); got {values.shape}")
    if words.dtype != np.uint32 or words.shape != (len(values),):
        raise TypeError(f"rbits are uint32, one word a row, shape ({len(values)},); got {words.dtype} {words.shape}")
    mirrored = reverse_halves(words)
    low, high = np.uint32(0xFFFF), np.uint32(16)
    fields = np.stack([words & low, mirrored & low, words >> high, mirrored >> high], axis=-1)
    magnitude = np.abs(values)
    magnitude = np.where(magnitude < 512, magnitude, np.float32(512))
    code = np.minimum(((code_units(magnitude) >> np.uint32(4)) + fields) >> np.uint32(16), np.uint32(0x7E))
    byte: U8 = code.astype(np.uint8) | np.signbit(values).view(np.uint8) * np.uint8(0x80)
    byte[np.isnan(values)] = NAN_BYTE
    return byte


def encode(x: ArrayLike, rounding: str = "nearest-even", *, overflow: str = "saturate", nan_byte: int = NAN_BYTE) -> U8:
    """E4M3 bytes of float32 values, as ``cvt.rn.satfinite.e4m3x2.f32`` gives them.

    Nearest, ties to the even code, subnormals used; above 448 and Inf saturate to 0x7E with the sign;
    NaN gives 0x7F, whatever its sign.

    Args:
        x: float32 array of any shape (other dtypes must be exactly representable in float32).
        rounding: "nearest-even" or one of the deviations "up", "truncate", "half-up".
        overflow: "saturate"; "nan": what rounds above 448 becomes ``nan_byte`` with its sign.
    Returns:
        uint8 array of x's shape.
    Raises:
        TypeError: x is not floating point.  ValueError: a float64 is not a float32 value, unknown option.
    """
    if rounding not in ROUNDING:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(map(repr, ROUNDING))}")
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow {overflow!r} is not 'saturate' or 'nan'")
    values = as_float32(x)
    code = np.asarray(_table(rounding, overflow)[round_to_odd(values)])
    if nan_byte != NAN_BYTE:
        code[np.isnan(values)] = nan_byte
    return code


def round_to_odd(x: F32) -> U32:
    """float32 cut off to the bits of bfloat16, the last bit set where anything was lost.

    E4M3 values and the midpoints between them have at most 5 significant bits, so a number and its
    round-to-odd, with 8, round alike in every mode.
    """
    bits = x.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd |= (bits & np.uint32(0xFFFF)) != 0
    return odd


@functools.cache
def _table(rounding: str, overflow: str) -> U8:
    """E4M3 bytes of all 65536 bfloat16 numbers."""
    values = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    magnitude = np.abs(values)
    magnitude = np.where(magnitude < 512, magnitude, np.float32(512))  # beyond every code, and so is NaN for now
    wide = encode_magnitude(magnitude, rounding)
    code = np.where(wide > 0x7E, np.uint32(0x7E if overflow == "saturate" else NAN_BYTE), wide).astype(np.uint8)
    code |= np.signbit(values).view(np.uint8) * np.uint8(0x80)
    code[np.isnan(values)] = NAN_BYTE
    return code


def decode(code: ArrayLike) -> F32:
    """float32 values of E4M3 bytes (0x7F and 0xFF give NaN); TypeError unless uint8."""
    code = np.asarray(code)
    if code.dtype != np.uint8:
        raise TypeError(f"E4M3 bytes are uint8; got dtype {code.dtype}")
    values: F32 = VALUES[code]
    return values
