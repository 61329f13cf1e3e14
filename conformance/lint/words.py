"""A block as one number: the eight packed bytes of its 16 codes are a uint64, and most questions are bit operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvfp4ref import e2m1

Array = np.ndarray[Any, Any]

_ONES = np.uint64(0x1111_1111_1111_1111)
_MAGNITUDES = np.uint64(0x7777_7777_7777_7777)

#: sum of (2·value)² of the four codes in a uint16
_ENERGY = (
    (4 * np.square(e2m1.VALUES[np.arange(1 << 16)[:, None] >> np.array([0, 4, 8, 12]) & 15])).sum(-1).astype(np.uint16)
)
with np.errstate(divide="ignore"):
    _ENERGY_LOG = np.log2(np.arange(16 * 144 + 1, dtype=np.float32)) / 2
_ENERGY_LOG[0] = np.nan


class Blocks:
    """Questions to the blocks of packed rows (R, 8·C), each an array of bool (R, C).

    zero: every code is ±0.  six: some code is ±6.  four: some code is ±4 or ±6.
    saturated: every code is ±6 or ±0.
    """

    def __init__(self, packed: Array) -> None:
        words = packed.view("<u8")
        magnitudes = words & _MAGNITUDES
        twice, thrice = magnitudes >> np.uint64(1), magnitudes >> np.uint64(2)
        sixes = magnitudes & twice & thrice & _ONES
        fours = twice & thrice & _ONES
        self.zero = magnitudes == 0
        self.six = sixes != 0
        self.four = fours != 0
        # every code that is not ±6 is ±0: no other magnitude has a bit set
        self.saturated = magnitudes == sixes * np.uint64(7)
        self._packed = packed

    def log_energy(self, rows: int) -> Array:
        """log2 of the root mean square of the codes, but for a constant, of the first rows; NaN where all are 0."""
        four = _ENERGY[self._packed[:rows].view("<u2")]
        energy: Array = _ENERGY_LOG[four[:, ::4] + four[:, 1::4] + four[:, 2::4] + four[:, 3::4]]
        return energy
