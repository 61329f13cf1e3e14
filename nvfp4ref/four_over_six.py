"""4over6: each block mapped to 6 or to 4, whichever has the smaller error.  Rules FOUR-OVER-SIX-*.

Two candidates are quantized whole; the block keeps the one whose summed error is smaller, 6 on a tie or NaN.
The scale is formed by a division, (a/6)·S, unlike the plain path, and limited to 448 for either ``e4m3_max``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import e2m1, e4m3
from .arithmetic import Arithmetic
from .fp32 import F32, FLT_MAX, U8, AnyArray
from .scaling import ONE, GlobalScale, minimum, round_scale


class Candidate(NamedTuple):
    """One mapping of every block: arrays (rows, blocks), or (16, rows, blocks) for codes and scaled."""

    block_scale: F32
    scale: U8
    encode_scale: F32
    scaled: F32
    codes: U8


def candidate(x: F32, a: F32, base: F32, factor: float, g: GlobalScale, ar: Arithmetic) -> Candidate:
    """The blocks of tiles ``x`` mapped with block scale base·factor (FOUR-OVER-SIX-SCALE)."""
    s = minimum(base * np.float32(factor), e4m3.MAX, ar.block_scale_nan)
    byte = round_scale(s, a, g, ar)
    e = ONE / (e4m3.VALUES[byte] * g.decode)
    if ar.encode_max != "none":
        e = minimum(e, FLT_MAX, ar.encode_nan)
    scaled = x * e
    if ar.zero_scale_elements == "zero":
        scaled[:, byte == 0] = 0.0
    return Candidate(s, byte, e, scaled, e2m1.round_elements(scaled, ar))


def element_error(x: F32, c: Candidate, amax: F32, g: GlobalScale, ar: Arithmetic) -> F32:
    """Error of each element of a candidate, (16, rows, blocks), no fma.

    exact (FOUR-OVER-SIX-ERROR): v = fl(fl(fl(q·d)·A)/M), difference fl(v − x);
    fast (FOUR-OVER-SIX-FAST-ERROR): fl(q·d − fl(x·S)), q·d being exact in float16.
    """
    product = e2m1.rounded_values(c.codes, c.scaled, ar) * e4m3.VALUES[c.scale]
    if ar.four_over_six_fast_error:
        difference = product - x * g.encode
    else:
        difference = (product * amax) / np.float32(6 * ar.e4m3_max) - x
    return np.abs(difference) if ar.four_over_six == "MAE" else difference * difference


def block_sum(errors: F32, block: tuple[int, int]) -> F32:
    """Errors summed over each block as the kernels do (FOUR-OVER-SIX-SUM): (rows, blocks).

    Elements 0..15 in order from +0; the 16 sums of a 16x16 tile as a tree, halves onto halves.
    """
    total = np.zeros(errors.shape[1:], np.float32)
    for element in errors:
        total = total + element
    if block == (1, 16):
        return total
    rows, blocks = errors.shape[1:]
    tree = total.reshape(rows // 16, 16, blocks)
    for half in (8, 4, 2, 1):
        tree = tree[:, :half] + tree[:, half : 2 * half]
    return np.repeat(tree[:, 0], 16, axis=0)


def torch_row_sum(errors: F32, block: tuple[int, int]) -> F32:
    """The same sums in the order of torch's float32 row sum on the CPU, a tile being 16 or 256 values in a row.

    Vectors of 8 values go in turn into 4 accumulators, which are then added in order, and their 8 lanes likewise.
    """
    height = block[0]
    _, rows, blocks = errors.shape
    values = errors.reshape(2, 8, rows // height, height, blocks).transpose(3, 0, 1, 2, 4)
    vectors = values.reshape(2 * height, 8, rows // height, blocks)
    accumulators = np.zeros((4, *vectors.shape[1:]), np.float32)
    for i, vector in enumerate(vectors):
        accumulators[i % 4] += vector
    lanes = np.zeros_like(accumulators[0])
    for accumulator in accumulators:
        lanes = lanes + accumulator
    total = np.zeros(lanes.shape[1:], np.float32)
    for lane in lanes:
        total = total + lane
    return np.repeat(total, height, axis=0)


def choose(
    x: F32, a: F32, amax: F32, g: GlobalScale, block: tuple[int, int], ar: Arithmetic
) -> tuple[Candidate, F32, F32]:
    """The chosen candidate and both errors (err4, err6); 4 only where err4 < err6 (FOUR-OVER-SIX-SELECT)."""
    base = (a / np.float32(6)) * g.encode
    four, six = candidate(x, a, base, 1.5, g, ar), candidate(x, a, base, 1, g, ar)
    sum_up = block_sum if ar.four_over_six_sum == "sequential" else torch_row_sum
    err4, err6 = (sum_up(element_error(x, c, amax, g, ar), block) for c in (four, six))
    pick4 = err4 < err6
    pairs: list[tuple[AnyArray, AnyArray]] = list(zip(four, six, strict=True))
    return Candidate(*(np.where(pick4, f, s) for f, s in pairs)), err4, err6
