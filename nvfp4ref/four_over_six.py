"""4over6: each block mapped to 6 or to 4, whichever has the smaller error.  Rules FOUR-OVER-SIX-*.

Two candidates are quantized whole; the block keeps the one whose summed error is smaller, 6 on a tie or NaN.
The scale is formed by a division, (a/6)·S, unlike the plain path, and limited to 448 for either ``e4m3_max``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import e2m1, e4m3
from .arithmetic import Arithmetic
from .fp32 import F32, FLT_MAX, U8
from .scaling import ONE, GlobalScale, minimum


class Candidate(NamedTuple):
    """One mapping of every block: arrays (rows, blocks), or (16, rows, blocks) for codes and scaled."""

    block_scale: F32
    scale: U8
    encode_scale: F32
    scaled: F32
    codes: U8


def candidate(x: F32, base: F32, factor: float, g: GlobalScale, ar: Arithmetic) -> Candidate:
    """The blocks of tiles ``x`` mapped with block scale base·factor (FOUR-OVER-SIX-SCALE)."""
    s = minimum(base * np.float32(factor), e4m3.MAX, ar.block_scale_nan)
    byte = e4m3.encode(s, nan_byte=ar.scale_nan_byte)
    e = minimum(ONE / (e4m3.VALUES[byte] * g.decode), FLT_MAX, ar.encode_nan)
    scaled = x * e
    return Candidate(s, byte, e, scaled, e2m1.round_elements(scaled, ar))


def block_error(x: F32, c: Candidate, amax: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """Error of a candidate, (rows, blocks): elements 0..15 added in order from +0, no fma.

    exact (FOUR-OVER-SIX-ERROR): v = fl(fl(fl(q·d)·A)/M), difference fl(v − x);
    fast (FOUR-OVER-SIX-FAST-ERROR): fl(q·d − fl(x·S)), q·d being exact in float16.
    """
    d = e4m3.VALUES[c.scale]
    maximum = np.float32(6 * ar.e4m3_max)
    error = np.zeros(d.shape, np.float32)
    for element, codes in zip(x, c.codes, strict=True):
        product = e2m1.VALUES[codes] * d
        if ar.four_over_six_fast_error:
            difference = product - element * g.encode
        else:
            difference = (product * amax) / maximum - element
        error = error + (np.abs(difference) if ar.four_over_six == "MAE" else difference * difference)
    return error


def tile_error(error: F32) -> F32:
    """Errors of the 16 blocks of a 16x16 tile added as a tree, halves onto halves (FOUR-OVER-SIX-SUM)."""
    rows, blocks = error.shape
    tree = error.reshape(rows // 16, 16, blocks)
    for half in (8, 4, 2, 1):
        tree = tree[:, :half] + tree[:, half : 2 * half]
    return np.repeat(tree[:, 0], 16, axis=0)


def choose(
    x: F32, a: F32, amax: F32, g: GlobalScale, block: tuple[int, int], ar: Arithmetic
) -> tuple[Candidate, F32, F32]:
    """The chosen candidate and both errors (err4, err6); 4 only where err4 < err6 (FOUR-OVER-SIX-SELECT)."""
    base = (a / np.float32(6)) * g.encode
    four, six = (candidate(x, base, factor, g, ar) for factor in (1.5, 1))
    err4, err6 = (block_error(x, c, amax, g, ar) for c in (four, six))
    if block == (16, 16):
        err4, err6 = tile_error(err4), tile_error(err6)
    pick4 = err4 < err6
    return Candidate(*(np.where(pick4, f, s) for f, s in zip(four, six, strict=True))), err4, err6
