"""check_gemm(): is the result of a GEMM dump what the operands give, and if not, what else explains it?

A dump holds two quantized operands and a result: `a.*`, `b.*`, `d`, and `c`, `bias`, `alpha`, `beta` where the
call had them.  The result is held against ``nvfp4ref.matmul``; when it differs, other tensor core models, orders of
the tensor scales (alpha forms), splits of K and the unfused addition of c are tried, first on a sample of rows and
columns, then on everything.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import nvfp4ref as nv
from conformance.count import Count, bits, count_amax
from nvfp4ref.container import agreed, counted
from nvfp4ref.dump import Dump

Array = np.ndarray[Any, Any]

CONFORMS, DIFFERS, NOT_JUDGED = "conforms", "differs", "not-judged"
ALPHA_FORMS = ("pytorch", "grouped", "jax", "none")
MOST_SPLITS = 8
SAMPLE = (16, 256)  # rows and columns on which the candidates are tried first
MATTER_OF_ROUNDING = 1e-3  # relative L2 above which no order of operations is at fault
#: upper ends of the histogram's classes of distance, in units in the last place of the result
CLASSES = (0, 1, 2, 4, 16, 256)


@dataclass(frozen=True)
class Way:
    """One way to compute the result."""

    model: str = "blackwell"
    alpha_form: str = "pytorch"
    split_k: int = 1
    fused: bool = True  # alpha·accumulator + beta·c in one rounding

    def ids(self) -> tuple[str, ...]:
        """What departs from the plain way, as deviation ids."""
        plain = Way()
        return (
            *([f"gemm.model.{self.model}"] if self.model != plain.model else []),
            *([f"gemm.alpha.{self.alpha_form}"] if self.alpha_form != plain.alpha_form else []),
            *([f"gemm.split-k.{self.split_k}"] if self.split_k != plain.split_k else []),
            *(["gemm.unfused-c"] if not self.fused else []),
        )

    def __str__(self) -> str:
        order = "" if self.fused else ", c added after rounding"
        return f"model {self.model}, alpha form {self.alpha_form}, split-K {self.split_k}{order}"


@dataclass(frozen=True)
class Explanation:
    """A way that gives the found result, or more of it than the plain way."""

    way: Way
    explained: int  # differing outputs that it gives
    remaining: int  # outputs that differ from it
    compared: int  # outputs looked at: all, or the sample's when time ran out

    @property
    def exact(self) -> bool:
        return self.remaining == 0

    def to_json(self) -> dict[str, Any]:
        return {
            "id": "+".join(self.way.ids()),
            "explains": {"d": self.explained},
            "remaining": self.remaining,
            "compared": self.compared,
            "exact": self.exact,
            "model": self.way.model,
            "alpha_form": self.way.alpha_form,
            "split_k": self.way.split_k,
        }


@dataclass(frozen=True)
class GemmReport:
    """The verdict on one GEMM.

    Attributes:
        verdict: "conforms", "differs" or "not-judged".
        outputs: counts of "d"; any NaN equals any other.
        ulps: distance in units in the last place -> how many outputs that differ; "NaN or Inf" apart.
        relative_l2, median_ratio: ‖found − expected‖/‖expected‖ and the median of found/expected, over finite outputs.
        deviations: explanations, those that explain all first; several exact ones cannot be told apart.
        error: why nothing could be judged, or why the search stopped early; None otherwise.
    """

    verdict: str
    outputs: dict[str, Count] = field(default_factory=dict)
    ulps: dict[str, int] = field(default_factory=dict)
    relative_l2: float = 0.0
    median_ratio: float = 1.0
    deviations: tuple[Explanation, ...] = ()
    sentences: tuple[str, ...] = ()
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 differs, 2 not judged."""
        return {CONFORMS: 0, DIFFERS: 1, NOT_JUDGED: 2}[self.verdict]

    @property
    def ambiguous(self) -> bool:
        """Whether the data cannot tell several explanations apart."""
        return sum(one.exact for one in self.deviations) > 1

    def to_json(self) -> dict[str, Any]:
        """The object of ``nvfp4 check --json`` for a GEMM."""
        return {
            "verdict": self.verdict,
            "error": self.error,
            "outputs": {name: count.to_json() for name, count in self.outputs.items()},
            "ulps": self.ulps,
            "relative_l2": self.relative_l2,
            "deviations": [one.to_json() for one in self.deviations],
            "ambiguous": self.ambiguous,
            "stage": "gemm" if self.verdict == DIFFERS else None,
        }

    def __str__(self) -> str:
        head = {CONFORMS: "conforms to", DIFFERS: "differs from", NOT_JUDGED: "not judged against"}[self.verdict]
        lines = [f"{head} the GEMM of its operands, {Way()}"]
        lines += [f"  {name}  {count}" for name, count in self.outputs.items()]
        if self.ulps:
            lines.append("  distance in ulp: " + ", ".join(f"{name}: {n:,}" for name, n in self.ulps.items()))
        lines += [f"  {sentence}" for sentence in self.sentences]
        lines += [f"  {self.error}"] if self.error else []
        return "\n".join(lines)


def check_gemm(dump: Dump, arithmetic: str | nv.Arithmetic | None = None, *, seconds: float = 60.0) -> GemmReport:
    """Recompute a GEMM dump's result from its operands and compare every output.

    Args:
        dump: with `a`, `b` and `d`.
        arithmetic: how the operands decode (e4m3_max, packing); default: what their own meta says.
        seconds: when to stop looking for an explanation; the comparison itself is always made.
    Returns:
        GemmReport; not judged when the operands cannot be multiplied, the reason in ``error``.
    Raises:
        TypeError: not a dump of a GEMM.  ValueError: an unknown arithmetic.
    """
    if not isinstance(dump, Dump) or dump.a is None or dump.b is None or dump.d is None:
        raise TypeError("check_gemm takes one dump with the operands a and b and the result d")
    if arithmetic is not None:
        nv.arithmetic(arithmetic)
    try:
        call = _Call(dump.a.rowwise(arithmetic), dump.b.rowwise(arithmetic), dump)
        expected = call.result(Way())
    except ValueError as reason:
        return GemmReport(NOT_JUDGED, error=f"the GEMM cannot be computed again: {reason}")
    found = dump.d
    count = count_amax(found, expected)
    if not count.different:
        return GemmReport(CONFORMS, {"d": count})
    l2, ratio = _size(found, expected)
    deviations, stopped = _search(call, found, _unequal(found, expected), seconds)
    sentences = _sentences(call, deviations, l2, ratio)
    return GemmReport(DIFFERS, {"d": count}, _histogram(found, expected), l2, ratio, deviations, sentences, stopped)


# ---- the call -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """Operands, source and bias of a GEMM, whole or cut to some rows and columns."""

    a: nv.NVFP4Tensor
    b: nv.NVFP4Tensor
    dump: Dump
    rows: Array | None = None
    columns: Array | None = None

    @property
    def alpha(self) -> float:
        return 1.0 if self.dump.alpha is None else float(self.dump.alpha[0])

    @property
    def beta(self) -> float:
        """1 when there is a c and nothing else is said."""
        if self.dump.beta is not None:
            return float(self.dump.beta[0])
        return 0.0 if self.dump.c is None else 1.0

    @property
    def words(self) -> int:
        return -(-self.a.shape[-1] // 64)

    def cut(self, rows: Array, columns: Array) -> _Call:
        return replace(self, a=_some_rows(self.a, rows), b=_some_rows(self.b, columns), rows=rows, columns=columns)

    def result(self, way: Way) -> Array:
        c, bias = self.dump.c, self.dump.bias
        if self.rows is not None and self.columns is not None:
            c = None if c is None else c[np.ix_(self.rows, self.columns)]
            bias = None if bias is None else bias[self.columns]
        dtype = self.dump.d.dtype  # type: ignore[union-attr]
        options: dict[str, Any] = {"model": way.model, "alpha_form": way.alpha_form, "split_k": way.split_k}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN scales: the outputs tell
            if way.fused:
                options |= {"beta": self.beta, "c": c, "bias": bias, "out_dtype": dtype}
                return nv.matmul(self.a, self.b, alpha=self.alpha, **options)
            out = nv.matmul(self.a, self.b, alpha=self.alpha, **options)
            out = out + np.float32(self.beta) * np.asarray(c, np.float32)
            out = out if bias is None else out + np.asarray(bias, np.float32)
            return out.astype(dtype)


def _some_rows(q: nv.NVFP4Tensor, rows: Array) -> nv.NVFP4Tensor:
    amax = q.amax[rows] if q.amax.ndim else q.amax
    return nv.NVFP4Tensor(q.packed[rows], q.scales[rows], amax, (1, 16), q.arithmetic)


# ---- how it differs ---------------------------------------------------------------------------------------------


def _unequal(found: Array, expected: Array) -> Array:
    nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    unequal: Array = (bits(found) != bits(expected)) & ~nan
    return unequal


def _ordered(array: Array) -> Array:
    """Floats as integers in the same order, neighbours one apart, both zeros 0."""
    pattern = bits(array).astype(np.int64)
    magnitude = pattern & ((1 << (8 * array.itemsize - 1)) - 1)
    return np.where(pattern != magnitude, -magnitude, magnitude)


def _histogram(found: Array, expected: Array) -> dict[str, int]:
    unequal = _unequal(found, expected)
    left, right = found[unequal], expected[unequal]
    finite = np.isfinite(left.astype(np.float32)) & np.isfinite(right.astype(np.float32))
    distance = np.abs(_ordered(left[finite]) - _ordered(right[finite]))
    histogram, below = {}, -1
    for top in CLASSES:
        name = "sign of zero" if top == 0 else str(top) if top == below + 1 else f"{below + 1} to {top}"
        histogram[name] = int(((distance > below) & (distance <= top)).sum())
        below = top
    histogram[f"above {below}"] = int((distance > below).sum())
    histogram["NaN or Inf"] = int((~finite).sum())
    return {name: n for name, n in histogram.items() if n}


def _size(found: Array, expected: Array) -> tuple[float, float]:
    """(relative L2 of the difference, median of found/expected) over outputs that are finite in both."""
    x, y = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    norm = float(np.linalg.norm(y))
    ratio = float(np.median(x[y != 0] / y[y != 0])) if (y != 0).any() else 1.0
    difference = float(np.linalg.norm(x - y))
    return (difference / norm if norm else float(difference != 0)), ratio


# ---- what explains it -------------------------------------------------------------------------------------------


def _ways(words: int, with_c: bool) -> Iterator[Way]:
    """Every way but the plain one: what departs in one respect before what departs in several, cheap models first."""
    models = ("blackwell", "exact", "group64", "blackwell-snapshot", "window39-k16", "window39-k4", "fp32")
    every = [
        Way(model, form, split, fused)
        for fused in ((True, False) if with_c else (True,))
        for split in range(1, min(MOST_SPLITS, words) + 1)
        for model in models
        for form in ALPHA_FORMS
    ]
    yield from sorted(every[1:], key=lambda way: len(way.ids()))


def _search(call: _Call, found: Array, unequal: Array, seconds: float) -> tuple[tuple[Explanation, ...], str | None]:
    """Explanations, and why the search stopped early if it did."""
    start = time.monotonic()

    def late() -> bool:
        return time.monotonic() - start > seconds

    rows, columns = (_sample(unequal.sum(axis=1 - axis), SAMPLE[axis]) for axis in (0, 1))
    small, place = call.cut(rows, columns), np.ix_(rows, columns)
    tried: list[Explanation] = []
    candidates: list[Explanation] = []
    for way in _ways(call.words, call.beta != 0):
        if late() or (candidates and len(way.ids()) > len(candidates[0].way.ids())):
            break
        tried.append(_judged(small, way, found[place], unequal[place]))
        if tried[-1].exact and tried[-1].explained:
            candidates.append(tried[-1])
    stopped = f"the search stopped after {seconds:g} s, {counted(len(tried), 'candidate')} tried" if late() else None
    if not candidates:
        best = max(tried, key=lambda one: one.explained - one.remaining, default=None)
        candidates = [best] if best is not None and best.explained > best.remaining else []
    confirmed = [one if late() else _judged(call, one.way, found, unequal) for one in candidates]
    confirmed = [one for one in confirmed if one.explained > 0 and one.remaining < int(unequal.sum())]
    return tuple(sorted(confirmed, key=lambda one: one.remaining)), stopped


def _sample(counts: Array, most: int) -> Array:
    """Up to ``most`` indices, in order: those with most differences, and some without any."""
    order = np.argsort(-counts, kind="stable")
    chosen = np.concatenate([order[: most - most // 4], order[::-1][: most // 4]])
    return np.unique(chosen)


def _judged(call: _Call, way: Way, found: Array, unequal: Array) -> Explanation:
    still = _unequal(found, call.result(way))
    return Explanation(way, int((unequal & ~still).sum()), int(still.sum()), int(still.size))


def _sentences(call: _Call, deviations: tuple[Explanation, ...], l2: float, ratio: float) -> tuple[str, ...]:
    said = []
    for name, q in (("a", call.a), ("b", call.b)):
        nan = int(((q.scales & 0x7F) == 0x7F).any(axis=-1).sum())
        if nan:
            rows = f"{counted(nan, 'row')} of {name} {agreed(nan, 'has', 'have')}"
            said.append(f"{rows} NaN scale bytes, so the outputs there must be NaN")
    for one in deviations:
        whole = "" if one.compared == call.a.shape[0] * call.b.shape[0] else f" of the {one.compared:,} looked at"
        rest = "everything" if one.exact else f"all but {counted(one.remaining, 'output')}"
        said.append(f"explained by {one.way}: {rest}{whole}")
    if sum(one.exact for one in deviations) > 1:
        said.append("the data cannot tell these apart")
    if not deviations:
        said.append("no other model, alpha form or split of K explains it")
        if l2 > MATTER_OF_ROUNDING:
            said.append(
                f"it is no matter of rounding: relative L2 {l2:.3g}, median of found/expected {ratio:.6g}; look at the "
                "layout of the scales, the operands' amaxes and which operand is transposed"
            )
    return tuple(said)
