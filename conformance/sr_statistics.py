"""Stochastic rounding tested where the random words are unknown: is it what it should be in distribution?

Where the words are known, compare bits instead: that finds everything.  Here nothing is known but the input and
several outputs of it, each made with its own random numbers.  The oracle gives the scaled element y that was rounded,
and so, for each element, the two codes that may come out and the probability p of the upper one by the rule.
What is left, up − p, has mean 0 and variance p(1 − p) and is independent of every other one.  Each test is a
sum whose expectation is 0 and whose variance is exactly known; p-values are corrected for their number (Holm).

It sees: zero output, a grid without 1.5, nearest-even, truncation, too few random bits, a stuck bit, a seed
used twice, words shared between elements, rows, tiles, outputs or directions.  It cannot see which word or
bits went to which element: operands in reversed order are as random as the right ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4ref import e2m1
from nvfp4ref.container import agreed, counted

Array = np.ndarray[Any, Any]
LEVEL = 0.001
LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
BINS = 16  # of the fraction, within each interval
SHARED_LIMIT = 2**20  # elements of a tensor that the search for shared words looks at
SHARED_COLUMNS = 512  # elements of a block times outputs that it looks at
_LEAST = 25.0  # variance below which a sum is not yet a normal number

#: bits of the random number that decides an element; None: as fine as the fraction itself
RESOLUTION = {"sm100": 16, "te-fallback": 8, "te-jax": None, "ideal": None}


# ---- the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One test.

    Attributes:
        name: what was tested.
        statistic: standard deviations from what is expected, as text; or the count of what must not occur.
        p_value: probability of so much or more by chance; 0 or 1 where chance has no part.
        adjusted: the same, corrected for the number of tests.
        passed: ``adjusted`` is not below the level.
        meaning: what a failure says.
    """

    name: str
    statistic: str
    p_value: float
    meaning: str
    adjusted: float = 1.0
    passed: bool = True


@dataclass(frozen=True)
class StochasticReport:
    """What the tests found.

    Attributes:
        rule: the rounding rule that was assumed.
        findings: one entry a test.
        facts: figures that are no tests, by name.
    """

    rule: str
    level: float
    findings: tuple[Finding, ...]
    facts: dict[str, float]

    @property
    def passed(self) -> bool:
        """No test failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The tests that failed, worst first."""
        return tuple(sorted((f for f in self.findings if not f.passed), key=lambda f: f.adjusted))

    def __str__(self) -> str:
        count = len(self.findings)
        verdict = "passes" if self.passed else "FAILS"
        lines = [
            f"stochastic rounding, rule {self.rule}: {verdict} "
            f"({len(self.failed)} of {count} tests failed at level {self.level:g} for all of them together)"
        ]
        lines += [f"  {name:<28} {value:.6g}" for name, value in self.facts.items()]
        for one in self.failed:
            lines.append(f"  FAILED {one.name}: {one.statistic}, p = {one.adjusted:.2g}. {one.meaning}")
        if self.facts["clipped"] > 0:
            lines.append(
                "  note: elements beyond 6 are cut to 6, because nearest rounding made their block's scale too "
                "small. That bias belongs to the scale, not to the rounding; headroom=16/17 removes it."
            )
        if self.facts["outputs"] < 2:
            lines.append("  note: one output only; a generator that repeats itself shows in two and more.")
        return "\n".join(lines)


def normal_p(z: float) -> float:
    """Two-sided p-value of a standard normal number."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square_p(x: float, degrees: int) -> float:
    """Probability of a chi-square number of at least x: the regularized upper incomplete gamma function."""
    a, x = degrees / 2, x / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * scale)
    # Lentz's evaluation of the continued fraction
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        h *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return min(1.0, scale * h)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: the chance that any of so many true hypotheses looks so bad."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


# ---- what one output of a tensor says ----------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Several outputs of one tensor in one direction, as what their rounding did.

    Attributes:
        rest: (outputs, R, K) float32, up − p; 0 where nothing is decided.
        probability: (R, K) float64, p; variance: float32, p(1 − p), 0 where nothing is decided.
        interval: (R, K), number of the interval on the grid; grid: its values.
        fraction: (R, K), place in the interval.
        negative: (R, K).
        scaled: (R, K) float32, y.
        wrong: per output, elements that left their interval.
    """

    grid: Array
    rest: Array
    probability: Array
    variance: Array
    interval: Array
    fraction: Array
    negative: Array
    scaled: Array
    wrong: list[int]


def side(draws: Sequence[nv.NVFP4Tensor], scaled: Array, rule: str) -> Side:
    """The rounding of outputs whose scaled elements are ``scaled``, by the rule's intervals and probabilities."""
    codes_of_grid = np.array([0, 1, 2, 4, 5, 6, 7] if rule == "te-jax" else range(8), np.uint8)
    grid = np.array(e2m1.MAGNITUDES)[codes_of_grid]
    magnitude = np.minimum(np.nan_to_num(np.abs(scaled.astype(np.float64)), nan=0.0), 6.0)
    interval = np.minimum(np.searchsorted(grid, magnitude, "right") - 1, grid.size - 2)
    fraction = (magnitude - grid[interval]) / np.diff(grid)[interval]  # 1 at 6 and above
    bits = RESOLUTION[rule]
    p = fraction if bits is None else np.floor(fraction * 2**bits) / 2**bits
    low, high = codes_of_grid[interval], codes_of_grid[interval + 1]
    known = ~np.isnan(scaled)
    decided = known & (p > 0) & (p < 1)
    negative = np.signbit(scaled)
    rest = np.zeros((len(draws), *scaled.shape), np.float32)
    wrong = []
    for out, draw in zip(rest, draws, strict=True):
        codes = draw.codes.reshape(scaled.shape)
        index = codes & np.uint8(7)
        up = index == high
        stays = (up & (fraction > 0)) | ((index == low) & (fraction < 1))
        wrong.append(int(np.count_nonzero(known & ~(stays & ((index == 0) | (codes >> 3 == negative))))))
        np.subtract(up, p, out=out, where=decided, casting="unsafe")
    variance = np.where(decided, p * (1 - p), 0).astype(np.float32)
    return Side(grid, rest, p, variance, interval, fraction, negative, scaled, wrong)


def _z(total: float, variance: float) -> float | None:
    """A sum in standard deviations; None when it is of too few terms to be judged."""
    return total / math.sqrt(variance) if variance >= _LEAST else None


def _finding(name: str, z: float | None, meaning: str) -> Iterator[Finding]:
    if z is not None:
        yield Finding(name, f"{z:+.1f} standard deviations", normal_p(z), meaning)


def _summed(name: str, scores: Iterable[float | None], meaning: str) -> Iterator[Finding]:
    """Many standard scores as one chi-square."""
    known = [z for z in scores if z is not None]
    if known:
        total = sum(z * z for z in known)
        worst = max(known, key=abs)
        text = f"chi-square {total:.0f} of {len(known)} degrees, the worst {worst:+.1f} standard deviations"
        yield Finding(name, text, chi_square_p(total, len(known)), meaning)


def _product(a: Array, b: Array, va: Array, vb: Array) -> float | None:
    """Score of Σ a·b, which is 0 in the mean when a and b are independent; both (outputs, R, K)."""
    total = float(np.einsum("drk,drk->", a, b, dtype=np.float64))
    return _z(total, len(a) * float(np.vdot(va.astype(np.float64), vb)))


# ---- the tests ---------------------------------------------------------------------------------------------


def _stays_in_interval(s: Side) -> Iterator[Finding]:
    count = sum(s.wrong)
    meaning = (
        "A value goes to one of the two grid values around it, keeps its sign, stays where it is when it is one "
        "of them, and is cut to 6 beyond 6. A grid that lacks a value, a wrong scale or zeroed output do this."
    )
    yield Finding(
        "no more than one grid step", f"{counted(count, 'element')} elsewhere", 0.0 if count else 1.0, meaning
    )


def _unbiased(s: Side) -> Iterator[Finding]:
    total = s.rest.sum(axis=0, dtype=np.float64)
    outputs = len(s.rest)
    meaning = "The mean of the results is not the value: too often away from zero if positive."
    z = _z(float(total.sum()), outputs * float(s.variance.sum(dtype=np.float64)))
    yield from _finding("unbiased, all elements together", z, meaning)
    for k, (low, high) in enumerate(itertools.pairwise(s.grid.tolist())):
        for sign, negative in (("", False), ("-", True)):
            here = (s.interval == k) & (s.negative == negative)
            z = _z(float(total[here].sum()), outputs * float(s.variance[here].sum(dtype=np.float64)))
            yield from _finding(f"unbiased from {sign}{low:g} to {sign}{high:g}", z, meaning)

    cell = s.interval * BINS + np.minimum((s.fraction * BINS).astype(np.int64), BINS - 1)
    sums = np.bincount(cell.ravel(), total.ravel())
    variances = outputs * np.bincount(cell.ravel(), s.variance.ravel())
    scores = [_z(t, v) for t, v in zip(sums.tolist(), variances.tolist(), strict=True)]
    meaning = (
        "How often a value goes up does not follow its place between the neighbours. Nearest rounding, "
        "truncation and a random number of too few bits do this."
    )
    yield from _summed("probability is the fraction", scores, meaning)


def _positions(s: Side) -> Iterator[Finding]:
    total = s.rest.sum(axis=0, dtype=np.float64).reshape(-1, 16)
    variance = len(s.rest) * s.variance.reshape(-1, 16).sum(axis=0, dtype=np.float64)
    by_block = total.sum(axis=0)
    meaning = "One element of four is biased: a bit of its random number is stuck, or comes from elsewhere."
    for e in range(4):
        z = _z(float(by_block[e::4].sum()), float(variance[e::4].sum()))
        yield from _finding(f"unbiased, element {e} of a word", z, meaning)
    scores = [_z(t, v) for t, v in zip(by_block.tolist(), variance.tolist(), strict=True)]
    yield from _summed("unbiased, each element of a block", scores, meaning)


def _within_words_and_blocks(s: Side) -> Iterator[Finding]:
    rest = s.rest.reshape(len(s.rest), -1, 16)
    columns = rest.reshape(-1, 16)
    gram = columns.T.astype(np.float64) @ columns
    v = s.variance.reshape(-1, 16).astype(np.float64)
    variance = len(s.rest) * (v.T @ v)
    meaning = "Elements of one word round alike: they see the same random bits."
    for i, j in itertools.combinations(range(4), 2):
        total = sum(gram[g + i, g + j] for g in range(0, 16, 4))
        of = sum(variance[g + i, g + j] for g in range(0, 16, 4))
        yield from _finding(f"independent, elements {i} and {j} of a word", _z(total, of), meaning)
    pairs = list(itertools.combinations(range(16), 2))
    scores = [_z(float(gram[pair]), float(variance[pair])) for pair in pairs]
    yield from _summed("independent, all pairs of a block", scores, "Elements of one block round alike.")


def _neighbours(s: Side) -> Iterator[Finding]:
    _, rows, columns = s.rest.shape
    meaning = "Elements so far apart round alike: the words repeat."
    for lag in LAGS:
        if lag < rows:
            a, b = s.rest[:, lag:], s.rest[:, :-lag]
            z = _product(a, b, s.variance[lag:], s.variance[:-lag])
            yield from _finding(f"independent, {lag} rows apart", z, meaning)
        if lag >= 16 and lag < columns:
            a, b = s.rest[..., lag:], s.rest[..., :-lag]
            z = _product(a, b, s.variance[:, lag:], s.variance[:, :-lag])
            yield from _finding(f"independent, {lag} columns apart", z, meaning)


def _between_outputs(s: Side) -> Iterator[Finding]:
    outputs = len(s.rest)
    if outputs < 2:
        return
    squares = float(np.square(s.variance, dtype=np.float64).sum())
    following = float(np.einsum("drk,drk->", s.rest[1:], s.rest[:-1], dtype=np.float64))
    meaning = "One output repeats the decisions of another: the same seed and offset were used twice."
    yield from _finding("independent, successive outputs", _z(following, (outputs - 1) * squares), meaning)
    total = np.square(s.rest.sum(axis=0, dtype=np.float64)).sum()
    own = np.square(s.rest, dtype=np.float64).sum()
    pairs = outputs * (outputs - 1) / 2
    meaning = "The mean of several outputs is not as much better as it should be: outputs are not independent."
    z = _z(float(total - own) / 2, pairs * squares)
    yield from _finding("variance of the mean of all outputs", z, meaning)


def _squared_error(s: Side) -> tuple[float, float, float]:
    """Squared error of the elements that are decided, what it should be, and that sum's variance, in y's units."""
    gap = np.diff(s.grid)[s.interval]
    f, p = s.fraction, s.probability
    decided = s.variance > 0
    # up has the error (1 − f)·gap and down f·gap: the square is its mean plus (up − p)·(1 − 2f)·gap²
    mean = np.where(decided, (p * (1 - f) ** 2 + (1 - p) * f**2) * gap**2, 0).sum() * len(s.rest)
    slope = np.where(decided, (1 - 2 * f) * gap**2, 0)
    surplus = float((s.rest.sum(axis=0, dtype=np.float64) * slope).sum())
    variance = float((s.variance * slope**2).sum()) * len(s.rest)
    return float(mean) + surplus, float(mean), variance


def _variance(s: Side) -> Iterator[Finding]:
    found, expected, variance = _squared_error(s)
    meaning = f"The squared error is {found / expected if expected else math.nan:.4f} of what the rule gives."
    yield from _finding("squared error", _z(found - expected, variance), meaning)


# ---- words shared by unknown places ------------------------------------------------------------------------


def _columns(s: Side, outputs: slice, rows: slice, width: int) -> tuple[Array, Array] | None:
    """(places, width·outputs) of up − p, and the variances (places, width); None when it is too little to judge."""
    rest, variance = s.rest[outputs, rows], s.variance[rows]
    most = max(1, SHARED_LIMIT // variance.shape[1])
    rest, variance = rest[: SHARED_COLUMNS // width, :most], variance[:most]
    if len(rest) * width < 32 or variance.size < 4096:
        return None
    places = rest.reshape(len(rest), -1, width).transpose(1, 0, 2).reshape(variance.size // width, -1)
    return np.ascontiguousarray(places), variance.reshape(-1, width)


def shared_score(a: tuple[Array, Array] | None, b: tuple[Array, Array] | None) -> float | None:
    """Score of the hypothesis that no place of ``a`` has the random numbers of any place of ``b``.

    For each pair (k, l) of elements of a place, over outputs too, the sum over places of the product of what k
    and l did is 0 but for chance.  When b's places are a's in any order, b's chance is a's: the sums correlate.
    """
    if a is None or b is None:
        return None
    outputs = min(a[0].shape[1], b[0].shape[1])
    sums, variances = [], []
    for rest, variance in (a, b):
        columns = rest[:, :outputs]
        sums.append((columns.T @ columns).astype(np.float64))
        v = variance.astype(np.float64)
        repeats = outputs // variance.shape[1]
        variances.append(np.tile(v.T @ v, (repeats, repeats)))
    upper = np.triu_indices(outputs, 1)
    return _z(float((sums[0] * sums[1])[upper].sum()), float((variances[0] * variances[1])[upper].sum()))


_SHARED = "Random words come back at other places"


def _shared_within(s: Side) -> Iterator[Finding]:
    outputs, rows, _ = s.rest.shape
    half = rows // 2
    for width, what in ((16, "blocks"), (4, "words")):
        z = shared_score(
            _columns(s, slice(None), slice(half), width), _columns(s, slice(None), slice(half, None), width)
        )
        yield from _finding(f"no {what} shared by upper and lower half", z, f"{_SHARED} of the tensor.")
        first = _columns(s, slice(0, outputs // 2 * 2, 2), slice(None), width)
        second = _columns(s, slice(1, None, 2), slice(None), width)
        z = shared_score(first, second) if outputs > 1 else None
        yield from _finding(f"no {what} shared by even and odd outputs", z, f"{_SHARED} of another output.")


def _swapped(columns: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
    """Places of 16 with their halves exchanged: half the lanes of a warp start with the second one."""
    if columns is None:
        return None
    rest, variance = columns
    turned = np.roll(rest.reshape(len(rest), -1, 16), 8, axis=-1).reshape(rest.shape)
    return turned, np.roll(variance, 8, axis=-1)


def _between_directions(row: Side, column: Side) -> Iterator[Finding]:
    outputs = min(len(row.rest), len(column.rest))
    a, b = row.rest[:outputs], column.rest[:outputs]
    meaning = "The columnwise output was rounded with random numbers of the rowwise one."
    z = _product(a, b.transpose(0, 2, 1), row.variance, column.variance.T)
    yield from _finding("independent, the two directions at the same element", z, meaning)
    rows, columns = (min(n, m) for n, m in zip(a.shape[1:], b.shape[1:], strict=True))
    corner = np.s_[:, :rows, :columns]
    z = _product(a[corner], b[corner], row.variance[corner[1:]], column.variance[corner[1:]])
    yield from _finding("independent, the two directions at the same place", z, meaning)
    whole = slice(outputs), slice(None)
    for width, what in ((16, "blocks"), (4, "words")):
        one, two = _columns(row, *whole, width), _columns(column, *whole, width)
        yield from _finding(f"no {what} shared by the two directions", shared_score(one, two), meaning)
        if width == 16:
            z = shared_score(one, _swapped(two))
            yield from _finding("no blocks, halves exchanged, shared by the two directions", z, meaning)


# ---- the whole ---------------------------------------------------------------------------------------------


def test_stochastic(
    draws: Sequence[nv.NVFP4Tensor] | nv.NVFP4Tensor,
    x: Any,
    *,
    transposed: Sequence[nv.NVFP4Tensor] | nv.NVFP4Tensor = (),
    rht: nv.RHT | None = None,
    arithmetic: str | nv.Arithmetic = "te",
    level: float = LEVEL,
) -> StochasticReport:
    """Test outputs of a stochastic quantizer whose random words are unknown.

    Args:
        draws: rowwise outputs of the same x, each made with the next state of the generator; from
            ``nvfp4ref.NVFP4Tensor.from_arrays`` or ``load_dump(path).rowwise()``.  Eight outputs of a million
            elements show all faults named above; one shows those within an output.
        x: the input.
        transposed: columnwise outputs of the same calls, in the same order; rht: the transform before them.
        arithmetic: how scales are formed; its field ``stochastic`` names the rule: "sm100" by default,
            "te-fallback", "te-jax", or "ideal" for a quantizer that promises the exact fraction.
        level: chance that a right quantizer fails any test.
    Returns:
        StochasticReport; ``passed``, ``failed`` and the text of ``print(report)`` say what was found.
    Raises:
        ValueError: no output, outputs whose scales or amax differ from each other or from the arithmetic's:
            ``nvfp4 check`` finds out why; rounding can be judged when scales are right.
        TypeError: an output that is no NVFP4Tensor.
    """
    ar = nv.arithmetic(arithmetic)
    sides = {}
    for axis, given in ((-1, draws), (0, transposed)):
        tensors = [given] if isinstance(given, nv.NVFP4Tensor) else list(given)
        if tensors:
            scaled = _scaled(tensors, x, axis, rht if axis == 0 else None, ar)
            sides[axis] = side(tensors, scaled, ar.stochastic)
    if not sides:
        raise ValueError("there is no output to test: draws and transposed are empty")
    findings: list[Finding] = []
    for axis, s in sides.items():
        found = itertools.chain(*(test(s) for test in _TESTS))
        prefix = "columnwise: " if axis == 0 else ""
        findings += [replace(one, name=prefix + one.name) for one in found]
    if len(sides) == 2:
        findings += _between_directions(sides[-1], sides[0])
    adjusted = holm([one.p_value for one in findings])
    judged = tuple(replace(one, adjusted=p, passed=p >= level) for one, p in zip(findings, adjusted, strict=True))
    return StochasticReport(ar.stochastic, level, judged, _facts(sides, draws, x))


test_stochastic.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for one of its own

_TESTS = (
    _stays_in_interval,
    _unbiased,
    _variance,
    _positions,
    _within_words_and_blocks,
    _neighbours,
    _between_outputs,
    _shared_within,
)


def _scaled(tensors: list[nv.NVFP4Tensor], x: Any, axis: int, rht: nv.RHT | None, ar: nv.Arithmetic) -> Array:
    """The scaled elements of outputs whose scales all are the arithmetic's."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, nv.NVFP4Tensor):
            raise TypeError(f"outputs are NVFP4Tensor (NVFP4Tensor.from_arrays); got {type(tensor).__name__}")
        same = np.array_equal(tensor.scales, first.scales) and np.array_equal(tensor.amax, first.amax)
        if not same:
            raise ValueError(
                f"output {number} has other scales or another amax than output 0: they are not of one input"
            )
    expected = nv.quantize(x, axis=axis, block=first.block, amax=first.amax, rht=rht, arithmetic=ar)
    if expected.scales.shape != first.scales.shape:
        raise ValueError(
            f"the output has scales of shape {first.scales.shape}, x gives {expected.scales.shape} along axis {axis}"
        )
    different = int(np.count_nonzero(expected.scales != first.scales))
    if different:
        raise ValueError(
            f"{different} of {expected.scales.size} block scales {agreed(different, 'is not that', 'are not those')} "
            f"of arithmetic {ar.name!r}: nvfp4 check says why; rounding is judged where scales are right"
        )
    scaled: Array = expected.steps.scaled
    return scaled


def _facts(sides: dict[int, Side], draws: Any, x: Any) -> dict[str, float]:
    """Figures for the reader; of the rowwise outputs when there are any."""
    axis = max(sides, key=lambda axis: axis == -1)
    s = sides[axis]
    found, expected, _ = _squared_error(s)
    facts = {
        "outputs": float(len(s.rest)),
        "elements": float(s.variance.size),
        "decided by chance": float(np.count_nonzero(s.variance) / s.variance.size),
        "clipped": float(np.count_nonzero(np.abs(s.scaled) > 6) / s.variance.size),
        "squared error, of the rule's": found / expected if expected else 1.0,
    }
    if axis == -1:
        first = draws if isinstance(draws, nv.NVFP4Tensor) else draws[0]
        value = nv.dequantize(first).astype(np.float64).ravel()
        given = np.asarray(x).astype(np.float64).ravel()
        energy = float(given @ given)
        facts["gain of the first output"] = float(value @ given) / energy if energy else 1.0
    return facts
