"""Random operands: the same bits on every platform, for PCG64's raw stream is part of NumPy's promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F = np.float32


class Random:
    """A stream of random values, made by integers and exact operations only.

    Args:
        key: non-negative integers that choose the stream.
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(list(key))

    def words64(self, n: int) -> Array:
        """uint64 (n,)."""
        found: Array = self._bits.random_raw(n)
        return found

    def words(self, n: int) -> Array:
        """uint32 (n,)."""
        return (self.words64(n) >> np.uint64(32)).astype(np.uint32)

    def bytes(self, n: int, count: int = 1) -> Array:
        """uint8 (n,), or (n, count)."""
        found = (self.words64(n * count) >> np.uint64(56)).astype(np.uint8)
        return found if count == 1 else found.reshape(n, count)

    def codes(self, n: int, count: int = 1) -> Array:
        """E2M1 codes, uint8 (n,), or (n, count)."""
        return self.bytes(n, count) >> np.uint8(4)

    def integers(self, n: int, low: int, high: int) -> Array:
        """int64 (n,) of low … high−1."""
        return low + (self.words(n) % np.uint32(high - low)).astype(np.int64)

    def choice(self, values: Array, n: int) -> Array:
        """n of the values."""
        return values[self.words(n) % np.uint32(len(values))]

    def patterns(self, n: int) -> Array:
        """float32 of any bits, NaN and Inf among them."""
        return self.words(n).view(F)

    def floats(self, n: int, low: int, high: int) -> Array:
        """float32 of either sign, biased exponents low … high, any mantissa."""
        exponent = self.integers(n, low, high + 1).astype(np.uint32)
        return ((self.words(n) & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)).view(F)

    def moderate(self, n: int) -> Array:
        """float32 of either sign from 2^-15 to 2^16."""
        return self.floats(n, 112, 142)

    def signed(self, values: Array) -> Array:
        """The values, each with a random sign."""
        sign = self.words(len(values)) & np.uint32(0x80000000)
        return (np.ascontiguousarray(values, F).view(np.uint32) | sign).view(F)

    def moved(self, values: Array) -> Array:
        """The values moved by −2 … +2 steps of float32 away from zero; zero, Inf and NaN stay."""
        at = np.ascontiguousarray(values, F).view(np.uint32)
        steps = self.integers(len(values), -2, 3)
        still = ((at & np.uint32(0x7FFFFFFF)) < 4) | ((at & np.uint32(0x7F800000)) == 0x7F800000)
        return np.where(still, at, (at.astype(np.int64) + steps).astype(np.uint32)).view(F)

    def near(self, values: Array, n: int) -> Array:
        """n of the values, of either sign, some of them a step or two beside."""
        return self.moved(self.signed(self.choice(values, n)))

    def uniforms(self, n: int) -> Array:
        """float32 multiples of 2^-24 in [0, 1)."""
        return (self.words(n) >> np.uint32(8)).astype(F) * F(2.0**-24)

    def mixed(self, n: int, *makers: Callable[[int], Array]) -> Array:
        """n values, each made by one of the makers in turn."""
        made = np.stack([maker(n) for maker in makers])
        return made[np.arange(n) % len(makers), np.arange(n)]
