"""E2M1 element codes: values, rounding, packing.  Rules E2M1-VALUES, E2M1-RNE, E2M1-NAN, E2M1-ZERO, E2M1-PACK.

A code is sign (bit 3) and magnitude index (bits 2..0).  A rounding rule is seven decision points: the
magnitude index is the number of points that the magnitude has reached.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arithmetic import Arithmetic
from .arrays import as_float32
from .fp32 import F32, U8, through

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES: F32 = np.array(MAGNITUDES + tuple(-m for m in MAGNITUDES), np.float32)  # code 8 is -0.0
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _points(thresholds: tuple[float, ...], inclusive: tuple[bool, ...]) -> tuple[np.float32, ...]:
    """Decision points as the smallest float32 that reaches the next code."""
    up = np.float32(np.inf)
    return tuple(
        np.float32(t) if reached else np.nextafter(np.float32(t), up)
        for t, reached in zip(thresholds, inclusive, strict=True)
    )


#: rounding rule -> seven smallest magnitudes that get index 1..7
ROUNDING = {
    # a tie goes to the even index: up from 1, 3, 5, down from 0, 2, 4, 6
    "nearest-even": _points(MIDPOINTS, (False, True, False, True, False, True, False)),
    "ties-away": _points(MIDPOINTS, (True,) * 7),
    "ties-to-zero": _points(MIDPOINTS, (False,) * 7),
    "truncate": _points(MAGNITUDES[1:], (True,) * 7),
}
NAN_CODE = 7  # cvt.rn.satfinite: NaN becomes +6


def encode_magnitude(magnitude: F32, rounding: str = "nearest-even") -> U8:
    """Magnitude index 0..7 of non-negative float32; above 6 saturates; NaN gives 0 (the caller decides)."""
    points = ROUNDING[rounding]
    index = np.greater_equal(magnitude, points[0]).view(np.uint8)
    reached = np.empty_like(index, np.bool_)
    for point in points[1:]:
        np.greater_equal(magnitude, point, out=reached)
        np.add(index, reached.view(np.uint8), out=index)
    return index


def encode(x: ArrayLike, rounding: str = "nearest-even", *, nan_code: int = NAN_CODE) -> U8:
    """E2M1 codes 0..15 of float32 values, as ``cvt.rn.satfinite.e2m1x2.f32`` gives them.

    Nearest, ties to the even code; |x| > 6 and Inf saturate to 6 with their sign; a negative that rounds
    to zero and -0 give 8; NaN gives ``nan_code`` (7, whatever its sign).

    Args:
        x: float32 array of any shape (other dtypes must be exactly representable in float32).
        rounding: "nearest-even" or one of the deviations "ties-away", "ties-to-zero", "truncate".
    Returns:
        uint8 array of x's shape.
    Raises:
        TypeError: x is not floating point.  ValueError: a float64 is not a float32 value, unknown rounding.
    """
    if rounding not in ROUNDING:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(map(repr, ROUNDING))}")
    values = as_float32(x)
    index = encode_magnitude(np.abs(values), rounding)
    index |= np.signbit(values).view(np.uint8) * np.uint8(8)
    index[np.isnan(values)] = nan_code
    return index


def round_elements(y: F32, ar: Arithmetic) -> U8:
    """E2M1 codes of scaled elements by the arithmetic's element fields (rules E2M1-*)."""
    y = through(y, ar.element_via)
    magnitude = np.abs(y)
    index = encode_magnitude(magnitude, ar.element_rounding)
    negative = np.signbit(y)
    if ar.negative_zero == "drop":
        negative &= index != 0
    elif ar.negative_zero == "drop-exact":
        negative &= magnitude != 0
    codes = index
    codes |= negative.view(np.uint8) * np.uint8(8)
    if not ar.saturate:
        codes[magnitude > 7] = 8
    nan = np.isnan(magnitude)
    if nan.any():
        codes[nan] = ar.nan_code
    return codes


def decode(codes: ArrayLike) -> F32:
    """float32 values of E2M1 codes 0..15; ValueError for other codes."""
    codes = np.asarray(codes)
    if codes.dtype.kind not in "ui":
        raise TypeError(f"E2M1 codes are integers 0..15; got dtype {codes.dtype}")
    if codes.size and (codes.min() < 0 or codes.max() > 15):
        raise ValueError(f"E2M1 codes are 0..15; got {codes.min()}..{codes.max()}")
    return VALUES[codes]


def pack(codes: ArrayLike) -> U8:
    """Two codes a byte along the last axis: element 2i in the low nibble, 2i+1 in the high one (E2M1-PACK)."""
    codes = np.asarray(codes)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even number of codes in the last axis; got shape {codes.shape}")
    if codes.dtype != np.uint8:
        raise TypeError(f"codes to pack are uint8 0..15; got dtype {codes.dtype}")
    if codes.size and codes.max() > 15:
        raise ValueError(f"E2M1 codes are 0..15; got {codes.max()}")
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed: ArrayLike) -> U8:
    """The codes of packed bytes: the inverse of :func:`pack`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed codes are uint8; got dtype {packed.dtype}")
    if packed.ndim == 0:
        raise ValueError("packed codes have at least one axis; got a scalar")
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes
