"""The MMA word one integer at a time, the slow twin of nvfp4ref.tensorcore, and words that bite.

    python tests/slow_mma.py 1000000        a sweep of so many words through every model, about a minute

Every number is a Python integer in units of 2^-200, of which every float32 and every product is a multiple, so
that nothing is rounded but where a rule says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 200
HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # E2M1 magnitudes, in units of one half
EXPONENTS = (None, -1, 0, 0, 1, 1, 2, 2)  # floor(log2) of them
DEAD = -139
NAN, PLUS_INF, MINUS_INF = 0x7FFFFFFF, 0x7F800000, 0xFF800000
MODELS = ("blackwell", "blackwell-snapshot", "window39-k4", "window39-k16", "group64", "exact", "fp32")


# -- float32 as integers --------------------------------------------------------------------------------------


def from_bits(bits: int) -> int:
    """A finite float32."""
    field, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
    magnitude = mantissa << (UNIT - 149) if field == 0 else (mantissa | 0x800000) << (field - 1 + UNIT - 149)
    return -magnitude if bits >> 31 else magnitude


def log2(x: int) -> int:
    """floor(log2 |x|) of a non-zero number."""
    return abs(x).bit_length() - 1 - UNIT


def cut(x: int, floor: int) -> int:
    """Toward zero to a multiple of 2^floor."""
    shift = max(floor + UNIT, 0)
    magnitude = abs(x) >> shift << shift
    return -magnitude if x < 0 else magnitude


def to_bits(x: int, nearest: bool) -> int:
    """float32 bits of a number, to nearest even or toward zero; zero is +0."""
    if x == 0:
        return 0
    unit = max(log2(x) - 23, -149)  # exponent of the last place
    shift = unit + UNIT
    quotient, rest = divmod(abs(x), 1 << shift)
    if nearest and (2 * rest > 1 << shift or (2 * rest == 1 << shift and quotient & 1)):
        quotient += 1
    # quotient 2^23..2^24 has the implicit one, which adds itself to the exponent field
    bits = quotient + (unit + 149 << 23)
    return bits | (0x80000000 if x < 0 else 0)


def rounded(x: int, nearest: bool) -> int:
    return from_bits(to_bits(x, nearest))


# -- the word -------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    value: int
    exponent: int | None  # e(a) + e(b) + the scales', None for zero


class Group(NamedTuple):
    products: list[Product]
    scale_exponent: int
    scale_zero: bool

    @property
    def value(self) -> int:
        return sum(p.value for p in self.products)

    @property
    def live(self) -> bool:
        return not self.scale_zero and any(p.exponent is not None for p in self.products)


def scale(byte: int) -> tuple[int, int]:
    """(significand in eighths, exponent) of an E4M3 byte without its sign."""
    field, mantissa = byte >> 3 & 15, byte & 7
    return (mantissa, -6) if field == 0 else (mantissa + 8, field - 7)


def group(a: Sequence[int], b: Sequence[int], sa: int, sb: int) -> Group:
    (ma, ea), (mb, eb) = scale(sa), scale(sb)
    products = []
    for x, y in zip(a, b, strict=True):
        magnitude = HALVES[x & 7] * HALVES[y & 7] * ma * mb << (ea + eb - 8 + UNIT)
        e = None
        if magnitude:
            e = EXPONENTS[x & 7] + EXPONENTS[y & 7] + ea + eb  # type: ignore[operator]
        products.append(Product(-magnitude if (x ^ y) & 8 else magnitude, e))
    return Group(products, ea + eb, ma * mb == 0)


def word(a: Sequence[int], b: Sequence[int], c: int, sa: Sequence[int], sb: Sequence[int], model: str) -> int:
    """Bits of D, for codes, bits of C and scale bytes as plain integers."""
    if any(s & 0x7F == 0x7F for s in (*sa, *sb)) or (c & 0x7F800000 == 0x7F800000 and c & 0x7FFFFF):
        return NAN
    if c in (PLUS_INF, MINUS_INF):
        return c
    groups = [group(a[16 * g : 16 * g + 16], b[16 * g : 16 * g + 16], sa[g], sb[g]) for g in range(4)]
    return _MODELS[model](from_bits(c), groups)


def _align(c: int, groups: list[Group], zero_groups: bool = False) -> int:
    exponents = [g.scale_exponent for g in groups if g.live or (zero_groups and not g.scale_zero)]
    floor = max([DEAD, *exponents, *([log2(c)] if c else [])]) - 35
    return to_bits(cut(c, floor) + sum(cut(g.value, floor) for g in groups), nearest=False)


def _window39(c: int, groups: list[Group], width: int) -> int:
    products = [p.exponent for g in groups for p in g.products if p.exponent is not None]
    product = max(products, default=DEAD)
    if c and log2(c) >= product:
        floor, width = log2(c) - 35, 16
    else:
        largest = max([product, *([log2(c)] if c else [])])
        floor = max(largest - 39, max([DEAD, *(g.scale_exponent for g in groups if g.live)]) - 35)
    merged = [sum(p.value for p in g.products[i : i + width]) for g in groups for i in range(0, 16, width)]
    return to_bits(cut(c, floor) + sum(cut(m, floor) for m in merged), nearest=False)


def _group64(c: int, groups: list[Group]) -> int:
    return to_bits(c + rounded(sum(g.value for g in groups), nearest=True), nearest=False)


def _fp32(c: int, groups: list[Group]) -> int:
    for g in groups:
        for p in g.products:
            c = rounded(c + p.value, nearest=True)
    return to_bits(c, nearest=True)


_MODELS: dict[str, Any] = {
    "blackwell": _align,
    "blackwell-snapshot": lambda c, groups: _align(c, groups, zero_groups=True),
    "window39-k4": lambda c, groups: _window39(c, groups, 4),
    "window39-k16": lambda c, groups: _window39(c, groups, 16),
    "group64": _group64,
    "exact": lambda c, groups: to_bits(c + sum(g.value for g in groups), nearest=True),
    "fp32": _fp32,
}


# -- words that bite ------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """n words: uint8 (n, 64), uint8 (n, 64), float32 (n,), uint8 (n, 4), uint8 (n, 4)."""

    a: Array
    b: Array
    c: Array
    sa: Array
    sb: Array


SPECIAL_C = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF,
     PLUS_INF, MINUS_INF, 0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32,
)  # fmt: skip
EDGE_SCALES = np.array([0, 0x80, 1, 7, 8, 9, 15, 0x38, 0x70, 0x78, 0x7E, 0xFE, 0x81], np.uint8)


def raw(rng: np.random.Generator, n: int) -> Words:
    """Any bits everywhere, NaN bytes thinned out."""
    scales = rng.integers(0, 256, (2, n, 4), np.uint8)
    scales[(scales & 0x7F == 0x7F) & (rng.random((2, n, 1)) < 0.98)] = 0x7E
    c = rng.integers(0, 2**32, n, np.uint32)
    special = rng.random(n) < 0.02
    c[special] = rng.choice(SPECIAL_C, int(special.sum()))
    a, b = rng.integers(0, 16, (2, n, 64), np.uint8)
    return Words(a, b, c.view(np.float32), *scales)


def edges(rng: np.random.Generator, n: int) -> Words:
    """Few products, scales at the ends of the range, C about as far from them as the window is wide."""
    a, b = (rng.integers(0, 16, (n, 64), np.uint8) for _ in range(2))
    a[rng.random((n, 64)) < rng.choice([0.0, 0.6, 0.95], (n, 1))] &= 8
    dead = np.repeat(rng.random((n, 4)) < 0.25, 16, axis=1)
    a[dead] = 0
    at_the_ends = rng.choice(EDGE_SCALES, (2, n, 4))
    sa, sb = np.where(rng.random((2, n, 4)) < 0.6, at_the_ends, rng.integers(0, 127, (2, n, 4))).astype(np.uint8)
    c = np.ldexp(1 + rng.integers(0, 2**23, n) / 2**23, rng.integers(-60, 60, n)) * rng.choice([-1.0, 1.0], n)
    c = np.where(rng.random(n) < 0.2, np.ldexp(1.0, rng.integers(-30, 50, n)), c).astype(np.float32)
    c[rng.random(n) < 0.2] = 0
    special = rng.random(n) < 0.03
    c[special] = rng.choice(SPECIAL_C.view(np.float32), int(special.sum()))
    return Words(a, b, c, sa, sb)


def cancelling(rng: np.random.Generator, n: int) -> Words:
    """Groups that cancel to zero or nearly so: the second half of a group undoes the first, but for one element."""
    w = edges(rng, n)
    a, b = w.a.copy(), w.b.copy()
    halves_a, halves_b = a.reshape(n, 4, 2, 8), b.reshape(n, 4, 2, 8)
    halves_a[:, :, 1], halves_b[:, :, 1] = halves_a[:, :, 0], halves_b[:, :, 0] ^ 8
    spoilt = np.flatnonzero(rng.random(n) < 0.5)
    a[spoilt, rng.integers(0, 64, spoilt.size)] = rng.integers(0, 16, spoilt.size)
    return Words(a, b, w.c, w.sa, w.sb)


def close(rng: np.random.Generator, n: int) -> Words:
    """What quantized tensors look like: scales of a few binades, C a running sum of them."""
    a, b = (rng.integers(0, 16, (n, 64), np.uint8) for _ in range(2))
    sa, sb = (rng.integers(low, low + 24, (n, 4)).astype(np.uint8) for low in (90, 60))
    c = (rng.integers(-(2**24), 2**24, n) * np.exp2(rng.integers(-8, 3, n).astype(np.float64))).astype(np.float32)
    return Words(a, b, c, sa, sb)


def level(rng: np.random.Generator, n: int) -> Words:
    """One product that C undoes, or nearly, and crumbs 20 to 36 binades below: what is left tells the window's end."""
    a, b = np.zeros((n, 64), np.uint8), np.zeros((n, 64), np.uint8)
    a[:, 0], b[:, 0] = rng.integers(1, 8, (2, n), np.uint8)
    sa, sb = rng.integers(0x40, 0x7F, (2, n, 4), np.uint8)
    crumbs = rng.random((n, 48)) < 0.1
    a[:, 16:][crumbs], b[:, 16:][crumbs] = rng.integers(0, 16, (2, int(crumbs.sum())), np.uint8)
    sa[:, 1:], sb[:, 1:] = rng.choice(np.array([0, 1, 2, 8, 0x10, 0x18, 0x20], np.uint8), (2, n, 3))
    halves, eighths = np.array(HALVES), np.array([scale(byte) for byte in range(128)])
    significands = halves[a[:, 0]] * halves[b[:, 0]] * eighths[sa[:, 0], 0] * eighths[sb[:, 0], 0]
    undone = -np.ldexp(significands.astype(np.float64), eighths[sa[:, 0], 1] + eighths[sb[:, 0], 1] - 8)
    c = (undone * rng.choice([0.5, 1.0, 1.0, 1 + 2.0**-22, 2.0], n)).astype(np.float32)
    return Words(a, b, c, sa, sb)


KINDS = (raw, edges, cancelling, close, level)


def twin(words: Words, model: str) -> Array:
    """Bits of D of every word."""
    a, b, c, sa, sb = (array.tolist() for array in words._replace(c=words.c.view(np.uint32)))
    return np.array([word(*one, model) for one in zip(a, b, c, sa, sb, strict=True)], np.uint32)


def compared(seed: int, n: int) -> Iterator[tuple[str, str, int, int]]:
    """(kind, model, words, words that differ): half of the words of each kind take the other half's results as C."""
    from nvfp4ref import tensorcore

    rng = np.random.default_rng(seed)
    for kind in KINDS:
        first, second = kind(rng, n // 2), kind(rng, n // 2)
        for model in MODELS:
            found = tensorcore.mma_words(*first, model=model)
            chained = second._replace(c=found)
            last = tensorcore.mma_words(*chained, model=model)
            different = int((found.view(np.uint32) != twin(first, model)).sum())
            different += int((last.view(np.uint32) != twin(chained, model)).sum())
            yield kind.__name__, model, 2 * (n // 2), different


def main(total: int) -> int:
    """Sweep at least ``total`` words; 1 when one differs."""
    size, done, wrong = 2000, 0, 0
    rounds = -(-total // (size * len(KINDS) * len(MODELS)))
    for seed in range(rounds):
        for kind, model, words, different in compared(seed, size):
            done, wrong = done + words, wrong + different
            if different:
                print(f"seed {seed}, {kind}, {model}: {different} of {words} words differ")
    print(f"{done:,} words, {wrong:,} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
