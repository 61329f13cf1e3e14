"""Stochastic rounding against an independent statement of its rules: all float32 × all random fields.

    python -m conformance.sweep_stochastic [e2m1] [e4m3] [te-fallback]

The statement is a table of values v_0 < v_1 < … and one sentence each:

* ``e2m1``, ``e4m3`` (SR-SM100, SR-E4M3): of v_k ≤ x < v_k+1, with f the place of x in that gap, 0 ≤ f < 1,
  the result is v_k+1 exactly when floor(f·2^16) + R ≥ 2^16, R being the element's 16 random bits;
* ``te-fallback`` (SR-FALLBACK): it is v_k+1 exactly when x + b/256·(v_k+1 − v_k), rounded to float32, has
  reached v_k+1, b being the element's random byte.

2^31 magnitudes times 2^16 fields are too many to try one by one, and need not be: a result never falls when R
grows, nor when x grows.  So a rule is fixed by its thresholds, and each is tried there and one step below:

* in R, for every float32 magnitude; where no R moves x, at the smallest and the largest R;
* in x, for every R, every k, both signs and each of a word's four elements.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from conformance.count import Count, count
from conformance.exhaustive import Progress, Sweep
from nvfp4ref import arithmetic, e2m1, e4m3

Array = np.ndarray[Any, Any]
CHUNK = 1 << 23  # magnitudes in a piece of work: one exponent
CHUNKS = 256
PART = 1 << 14  # magnitudes worked on at a time: they stay in the cache
INF = 0x7F800000


class Rule(NamedTuple):
    """One conversion and its statement."""

    encode: Callable[[Array, Array], Array]  # (4, n) float32 elements, (n,) words -> (4, n) codes
    words: Callable[[Array, Array], Array]  # fields of elements 0 and 2 -> words
    fields: Callable[[Array], Array]  # words -> (4, n) fields
    size: int  # fields are 0 … size−1
    values: Array  # v_k in float64, of the non-negative codes
    slack: Array  # how far below v_k+1 a sum still rounds to it; 0 for the rules that do not round
    nan: int
    sign: int

    @property
    def last(self) -> int:
        """The code of the largest value."""
        return self.values.size - 1


# ---- the conversions under test, four elements a word ------------------------------------------------------


def _encode_e2m1(x: Array, words: Array, rule: str = "sm100") -> Array:
    n = words.size
    ar = arithmetic("te", stochastic=rule)
    tiles = x.reshape(4, 4, n // 4).transpose(1, 0, 2).reshape(16, n // 4)
    codes = e2m1.round_elements(tiles, ar, words.reshape(4, n // 4))
    by_element: Array = codes.reshape(4, 4, n // 4).transpose(1, 0, 2).reshape(4, n)
    return by_element


def _encode_fallback(x: Array, words: Array) -> Array:
    return _encode_e2m1(x, words, "te-fallback")


def _encode_e4m3(x: Array, words: Array) -> Array:
    return e4m3.encode_stochastic(np.ascontiguousarray(x.T), words).T


# ---- where a word's bits go: byte by byte, and a table of reversals ----------------------------------------

_BYTE_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint32)


def _bytes(words: Array) -> list[Array]:
    """The four bytes of each word, lowest first."""
    return [words >> np.uint32(8 * i) & np.uint32(255) for i in range(4)]


def _pair(low: Array, high: Array) -> tuple[Array, Array]:
    """16 bits from two bytes, straight and reversed."""
    return low | high << np.uint32(8), _BYTE_REVERSED[high] | _BYTE_REVERSED[low] << np.uint32(8)


def _fields_e2m1(words: Array) -> Array:
    b = _bytes(words)
    return np.stack([*_pair(b[0], b[2]), *_pair(b[1], b[3])])


def _words_e2m1(first: Array, second: Array) -> Array:
    low, high = _bytes(first), _bytes(second)
    words: Array = low[0] | high[0] << np.uint32(8) | low[1] << np.uint32(16) | high[1] << np.uint32(24)
    return words


def _fields_e4m3(words: Array) -> Array:
    b = _bytes(words)
    return np.stack([*_pair(b[0], b[1]), *_pair(b[2], b[3])])


def _words_e4m3(first: Array, second: Array) -> Array:
    words: Array = first | second << np.uint32(16)
    return words


def _fields_fallback(words: Array) -> Array:
    return np.stack(_bytes(words))


def _words_fallback(first: Array, second: Array) -> Array:
    """Elements 1 and 3 get the complements."""
    full = np.uint32(255)
    words: Array = first | (first ^ full) << np.uint32(8) | second << np.uint32(16) | (second ^ full) << np.uint32(24)
    return words


# ---- the statements ----------------------------------------------------------------------------------------


def _values(mantissas: int, bias: int, codes: int) -> Array:
    """Values of the first codes of a small float format, by its definition."""

    def value(code: int) -> float:
        exponent, mantissa = divmod(code, mantissas)
        if exponent == 0:
            return float(mantissa / mantissas * 2.0 ** (1 - bias))
        return float((1 + mantissa / mantissas) * 2.0 ** (exponent - bias))

    return np.array([value(code) for code in range(codes)])


_E2M1, _E4M3 = _values(2, 1, 8), _values(8, 7, 127)
_HALF_ULP = np.array([(v - float(np.nextafter(np.float32(v), np.float32(0)))) / 2 for v in _E2M1[1:].tolist()])

RULES = {
    "e2m1": Rule(_encode_e2m1, _words_e2m1, _fields_e2m1, 1 << 16, _E2M1, np.zeros(7), 7, 8),
    "e4m3": Rule(_encode_e4m3, _words_e4m3, _fields_e4m3, 1 << 16, _E4M3, np.zeros(126), 0x7F, 0x80),
    "te-fallback": Rule(_encode_fallback, _words_fallback, _fields_fallback, 256, _E2M1, _HALF_ULP, 7, 8),
}


def thresholds(rule: Rule, magnitude: Array) -> tuple[Array, Array]:
    """(k, t) of finite float32 magnitudes: code k where R < t, k + 1 where R ≥ t; t is 1 … size.

    v_k+1 − x ≤ R/size·gap decides, which for 16 bits is floor(f·2^16) + R ≥ 2^16, R being an integer.  All of
    it is exact in float64 but for x below 2^-50, and there what is lost is too small to reach an integer.
    """
    x = magnitude.astype(np.float64)
    k = np.searchsorted(rule.values, x, side="right") - 1
    below = np.minimum(k, rule.last - 1)
    gap = np.diff(rule.values)[below]
    t = np.ceil((rule.values[below + 1] - rule.slack[below] - x) * (rule.size / gap))
    return k, np.where(k == rule.last, rule.size, t).astype(np.int64)


def expected_codes(rule: Rule, x: Array, fields: Array) -> Array:
    """Codes of finite float32 x with these random fields, as the statement says."""
    k, t = thresholds(rule, np.abs(x))
    return (k + (fields >= t)).astype(np.uint8) | np.signbit(x).astype(np.uint8) * np.uint8(rule.sign)


# ---- thresholds in R, for every float32 --------------------------------------------------------------------


def pattern_sweep(
    name: str, chunks: Sequence[int] = range(CHUNKS), progress: Progress | None = None, processes: int = 2
) -> Count:
    """Every float32 magnitude just below its threshold in R and at it.

    Args:
        name: a key of RULES.
        chunks: exponents of the magnitudes, 0 … 255.
    """
    tasks = [(name, chunk) for chunk in chunks]
    total = Count(0, 0)
    for done, found in enumerate(_mapped(_piece, tasks, processes), 1):
        total += found
        if progress is not None:
            progress(f"{name}, thresholds in R", done, len(tasks))
    return total


def _mapped(work: Callable[[Any], Count], tasks: Sequence[Any], processes: int) -> Iterator[Count]:
    if processes == 1:
        yield from map(work, tasks)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(work, tasks)


def _piece(task: tuple[str, int]) -> Count:
    name, chunk = task
    total = Count(0, 0)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, PART):
        patterns = np.arange(start, start + PART, dtype=np.int64).astype(np.uint32)
        total += (_finite if start < INF else _not_finite)(RULES[name], patterns)
    return total


def _held(rule: Rule, x: Array, words: Array, expected: Array) -> Count:
    """Codes of elements (4, n) against expected ones; the first difference: element, float32 bits, word."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        one = count(rule.encode(x, words), expected)
    if one.first is None:
        return one
    element, at = one.first
    place = [element, int(x.view(np.uint32)[element, at]), int(words[at])]
    return Count(one.compared, one.different, place, one.found, one.expected)


def _finite(rule: Rule, patterns: Array) -> Count:
    magnitude = patterns.view(np.float32)
    k, t = thresholds(rule, magnitude[[0, -1]])
    if t[1] == rule.size and k[0] == k[1]:  # t does not rise with x: no R moves any of them
        # four to a word, whose bits are all 0 and then all 1
        x = np.tile(magnitude.reshape(4, -1), 2)
        words = np.repeat(np.array([0, 0xFFFFFFFF], np.uint32), PART // 4)
        return _held(rule, x, words, np.full(x.shape, k[0], np.uint8))
    k, t = thresholds(rule, magnitude)
    # element 0 below the threshold, element 2 at it; 1 and 3 are negative and have the fields that are left
    words = rule.words((t - 1).astype(np.uint32), np.minimum(t, rule.size - 1).astype(np.uint32))
    expected = (k + (rule.fields(words) >= t)).astype(np.uint8)
    expected[1::2] |= np.uint8(rule.sign)
    return _held(rule, np.stack([magnitude, -magnitude, magnitude, -magnitude]), words, expected)


def _not_finite(rule: Rule, patterns: Array) -> Count:
    """Inf saturates with its sign, every NaN has one code, whatever the random bits."""
    bits = np.stack([patterns, patterns | np.uint32(1 << 31)] * 2)
    saturated = rule.last | (bits >> np.uint32(31)) * np.uint32(rule.sign)
    expected = np.where(bits << np.uint32(1) == np.uint32(2 * INF), saturated, np.uint32(rule.nan))
    words = patterns * np.uint32(0x9E3779B9)
    return _held(rule, bits.view(np.float32), words, expected.astype(np.uint8))


# ---- thresholds in x, for every R --------------------------------------------------------------------------


def field_sweep(name: str, fields: Sequence[int] | None = None) -> Count:
    """For each R, k, element and sign, the smallest float32 that goes to k + 1 and the float32 before it.

    Args:
        name: a key of RULES.
        fields: the R to try; default all.
    """
    rule = RULES[name]
    total = Count(0, 0)
    for words in _words_with(rule, np.arange(rule.size) if fields is None else np.array(fields)):
        r = rule.fields(words)
        for low, high, slack in zip(rule.values, rule.values[1:], rule.slack, strict=False):
            exact = high - slack - (high - low) * (r / rule.size)
            at = exact.astype(np.float32)
            at = np.where(at < exact, np.nextafter(at, np.float32(np.inf)), at)
            for x in (at, np.nextafter(at, np.float32(0))):
                for signed in (x, -x):
                    total += _held(rule, signed, words, expected_codes(rule, signed, r))
    return total


def _words_with(rule: Rule, fields: Array) -> Iterator[Array]:
    """Words in which each field comes to elements 0 and 2, and its reverse or complement to 1 and 3."""
    mine = fields.astype(np.uint32)
    yield rule.words(mine, mine[::-1])


# ---- the command -------------------------------------------------------------------------------------------


def sweep(name: str, progress: Progress | None = None, processes: int = 2) -> Sweep:
    """Both sweeps of one rule."""
    start = time.monotonic()
    classes = {
        "thresholds in R": pattern_sweep(name, progress=progress, processes=processes),
        "thresholds in x": field_sweep(name),
    }
    title = f"all float32 and all random fields to {name}, nvfp4ref against the table of values"
    return Sweep(title, classes, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every rule asked for holds, 1 when one does not."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.sweep_stochastic",
        description="Hold stochastic rounding to an independent statement of its rules, exhaustively.",
    )
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"{', '.join(RULES)}; default all of them")
    parser.add_argument("--processes", type=int, default=2, help="worker processes; default 2")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.rules if name not in RULES]
    if unknown:
        parser.error(f"unknown rule {unknown[0]!r}; the rules are {', '.join(RULES)}")
    failed = False
    for name in options.rules or RULES:
        found = sweep(name, _show if sys.stderr.isatty() else None, options.processes)
        print(found, flush=True)
        failed |= found.total.different > 0
    return 1 if failed else 0


def _show(label: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{label}: {done}/{total}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
