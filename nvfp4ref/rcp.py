"""Approximate division of NVIDIA GPUs, exact: ``rcp.approx.ftz.f32`` by its table, and ``div.full.f32`` made of it.

The reciprocal of a significand m in [1, 2) is up to one ulp beside fl(1/m), for 13 % of the 2^23 of them; the table
says which, and on which side.  It was read from an NVIDIA H200 (sm_90); other generations may have another.  XLA
divides so on GPUs, and CUDA does with ``-prec-div=false``.  Rule DIV-APPROXIMATE.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .fp32 import F32, FLT_MIN

PATH = Path(__file__).with_name("rcp_sm90.npz")
_ONE = np.uint32(0x3F800000)
_FRACTION = np.uint32(0x7FFFFF)
_LARGE = np.float32(2.0**126)  # beyond, a reciprocal would be subnormal, which the hardware flushes


@cache
def corrections() -> NDArray[np.int8]:
    """(2^23,) int8: by how many ulps the GPU's reciprocal of 1.fraction lies above fl(1/1.fraction); read once."""
    with np.load(PATH) as file:
        table: NDArray[np.int8] = file["ulp"]
    return table


def reciprocal(y: F32) -> F32:
    """rcp.approx.ftz.f32 of float32 up to 2^126 in magnitude that are not subnormal, Inf or NaN; 1/±0 is ±Inf."""
    bits = y.view(np.uint32)
    fraction = bits & _FRACTION
    significand = (fraction | _ONE).view(np.float32)
    inverse = (np.float32(1) / significand).view(np.int32) + corrections()[fraction]
    exponent = (bits & ~_FRACTION & np.uint32(0x7FFFFFFF)).view(np.int32)
    scaled = (inverse + (_ONE.view(np.int32) - exponent)).view(np.float32)
    special = np.where(y == 0, np.float32(np.inf), np.where(np.isinf(y), np.float32(0), np.float32(np.nan)))
    return np.copysign(np.where((y != 0) & np.isfinite(y), scaled, special), y)


def divide(x: ArrayLike, y: ArrayLike, out: F32 | None = None) -> F32:
    """div.full.f32: fl(x·r(y)) with r the approximate reciprocal, of float32 arrays that broadcast.

    Both operands are multiplied by 2^24 first where y is subnormal, and by 1/4 where |y| is above 2^126.
    """
    dividend, divisor = np.asarray(x, np.float32), np.asarray(y, np.float32)
    magnitude = np.abs(divisor)
    factor = np.where(magnitude < FLT_MIN, np.float32(2.0**24), np.where(magnitude > _LARGE, 0.25, 1))
    factor = factor.astype(np.float32)
    if np.any(factor != 1):
        dividend, divisor = dividend * factor, divisor * factor
    return np.multiply(dividend, reciprocal(np.asarray(divisor)), out=out)
