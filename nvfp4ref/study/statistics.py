"""What is counted of a tensor and of each format's error on it, and the figures that come of the counts.

A tensor is worked on in pieces.  Everything here adds up over pieces (a few values take the larger), so that a
tensor of any size needs the memory of one piece: :class:`Facts` first (amax, rms), then :class:`Shape` of the
tensor itself and :class:`Sums` of each format.  Definitions of every figure: docs/studies/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from .. import e4m3
from ..blocks import tensor_amax
from ..fp32 import F32, F64, AnyArray, widen
from .formats import Format, Quantized

OUTLIER = 6.0  # times the rms of the tensor
OUTLIER_CHANNEL = 3.0  # times the median rms of the channels
HADAMARD = (4, 16, 128)
DRAWS = (1, 4, 16, 64)  # of stochastic rounding, over which a mean is taken
LINES = 1 << 20  # rows, or channels, up to which each has its own sum

# Bins of magnitudes: four to the octave (at 1, 1.25, 1.5 and 1.75 times powers of two), which are the exponent
# and the first two bits of the significand of a float32.  Bin 0 also has zero, the last also what is above.
OCTAVES = (-28, 12)
BINS = 4 * (OCTAVES[1] - OCTAVES[0])
_FIRST = (127 + OCTAVES[0]) << 2
CREST = 48  # bins of the crest of blocks of 16, from 1 to 4
# Bins of signed figures: from −1 to 1 in steps of 0.02, and one beyond each end.
SIGNED = 102


def magnitude_edges() -> F64:
    """The BINS + 1 edges of the bins of magnitudes."""
    k = np.arange(BINS + 1)
    return np.ldexp(1 + (k % 4) / 4, OCTAVES[0] + k // 4)


def crest_edges() -> F64:
    """The edges of the bins of the crest."""
    return np.linspace(1, 4, CREST + 1)


def signed_edges() -> F64:
    """The edges of the bins from −1 to 1; those beyond have one edge."""
    return np.linspace(-1, 1, SIGNED - 1)


def magnitude_bins(v: AnyArray) -> AnyArray:
    """Bin of each magnitude (float32, not negative)."""
    bins: AnyArray = np.clip((v.view(np.uint32) >> np.uint32(21)).astype(np.int64) - _FIRST, 0, BINS - 1)
    return bins


def _signed_bins(v: F32) -> AnyArray:
    bins: AnyArray = np.clip(np.floor(v * np.float32(50)), -51, 50).astype(np.int64) + 51
    return bins


def _count(bins: AnyArray, length: int, weights: AnyArray | None = None) -> AnyArray:
    return np.bincount(bins.reshape(-1), None if weights is None else weights.reshape(-1), length)


def _dot(a: AnyArray, b: AnyArray) -> float:
    return float(np.einsum("ij,ij->", a, b, dtype=np.float64))


def by_row(a: AnyArray, b: AnyArray) -> F64:
    """Sums of a·b over each row, float64."""
    sums: F64 = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    return sums


def by_channel(a: AnyArray, b: AnyArray) -> F64:
    """Sums of a·b over each column, float64."""
    sums: F64 = np.einsum("ij,ij->j", a, b, dtype=np.float64)
    return sums


class Additive:
    """A dataclass whose fields add up; those in ``MAXIMA`` take the larger, those in ``MINIMA`` the smaller."""

    MAXIMA: tuple[str, ...] = ()
    MINIMA: tuple[str, ...] = ()

    def add(self, other: Self) -> None:
        """Take in what was counted elsewhere."""
        for one in fields(self):  # type: ignore[arg-type]
            a, b = getattr(self, one.name), getattr(other, one.name)
            join = max if one.name in self.MAXIMA else min if one.name in self.MINIMA else None
            setattr(self, one.name, a + b if join is None else join(a, b))

    def to_json(self) -> dict[str, Any]:
        """Plain values; arrays without the zeros at their ends, as [length, first, values]."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """The inverse.  Raises KeyError, TypeError or ValueError for anything else."""
        made = cls()
        for one in fields(cls):  # type: ignore[arg-type]
            setattr(made, one.name, _read(found[one.name], getattr(made, one.name)))
        return made


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return None if math.isnan(value) else value if math.isfinite(value) else str(value)
    there = np.flatnonzero(value)
    first, last = (int(there[0]), int(there[-1]) + 1) if len(there) else (0, 0)
    values = value[first:last].tolist()
    return [len(value), first, values if np.isfinite(value).all() else [_plain(v) for v in values]]


def _read(value: Any, empty: Any) -> Any:
    """The inverse of ``_plain``, for a value of that kind and length.  Raises TypeError, ValueError."""
    if isinstance(empty, np.ndarray):
        length, first, values = value
        if length != len(empty) or not 0 <= first <= first + len(values) <= length:
            raise ValueError(f"expected {len(empty)} counts, got {length} from {first}")
        array = np.zeros_like(empty)
        array[first : first + len(values)] = [_read(v, empty.dtype.type(0).item()) for v in values]
        return array
    number = math.nan if value is None else float(value)
    return int(number) if isinstance(empty, int) else number


def _zeros(length: int, dtype: Any = np.int64) -> Any:
    return field(default_factory=lambda: np.zeros(length, dtype))


# -- first pass: what quantizing a piece must know of the whole ------------------------------------------------------


@dataclass
class Facts(Additive):
    """Of a whole tensor: counts, sums over finite elements, and every amax that a format asks for.

    amax: ``amax_key(format)`` → float32 0-d, or one a row (a channel when columnwise) of the tensor.
    """

    MAXIMA = ("largest",)
    MINIMA = ("least",)

    n: int = 0  # finite elements
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    sum: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    least: float = math.inf  # smallest magnitude that is not zero

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements."""
        return math.sqrt(self.square / self.n) if self.n else 0.0

    @property
    def unit(self) -> np.float32:
        """The power of two that brings the amax to 1 … 2 (as near as float32 has it): a product with it is exact."""
        return np.float32(2.0 ** -min(max(math.frexp(self.largest)[1] - 1, -126), 127))

    @classmethod
    def of(cls, x: AnyArray) -> Facts:
        """Of one piece (R, K) as stored."""
        values = widen(x)
        finite = np.isfinite(values)
        nan = int(np.count_nonzero(np.isnan(values)))
        if not finite.all():
            values = np.where(finite, values, np.float32(0))
        bad = values.size - int(np.count_nonzero(finite))
        magnitude = np.abs(values)
        zeros = values.size - int(np.count_nonzero(magnitude)) - bad
        positive = magnitude if zeros + bad == 0 else np.where(magnitude > 0, magnitude, np.float32(np.inf))
        return cls(
            n=values.size - bad,
            nan=nan,
            inf=bad - nan,
            zeros=zeros,
            sum=float(values.sum(dtype=np.float64)),
            square=_dot(values, values),
            largest=float(magnitude.max()),
            least=float(positive.min()),
        )


def amax_key(one: Format) -> str | None:
    """Which amax a format needs: formats with one key share it; None when blocks stand alone."""
    if one.family != "nvfp4":
        return None
    way = "columns" if one.columnwise and (one.rht or one.row_scaled) else "rows"
    per = "each" if one.row_scaled else "all"
    return f"{per} {way} rht{one.rht} {'nan' if one.amax_nan else ''}"


def amax_of(one: Format, x: AnyArray) -> F32:
    """The amax of a piece for a format: 0-d, or one a row of what the format reads."""
    x = one.transformed(np.ascontiguousarray(x.T) if one.columnwise else x)
    return tensor_amax(x, 1 if one.row_scaled else None, "propagate" if one.amax_nan else "ignore")


# -- second pass: the tensor itself ----------------------------------------------------------------------------------


@dataclass
class Moments(Additive):
    """Of elements divided by the tensor's rms; ``crest``: blocks of 16 by amax/rms, 1 to 4 in steps of 1/16."""

    n: int = 0
    first: float = 0.0
    second: float = 0.0
    third: float = 0.0
    fourth: float = 0.0
    crest: AnyArray = _zeros(CREST)

    def count(self, x: F32) -> None:
        """x (R, K) float32, K a multiple of 16 (the crest is left out where it is not)."""
        square = x * x
        self.n += x.size
        self.first += float(x.sum(dtype=np.float64))
        self.second += float(square.sum(dtype=np.float64))
        self.third += _dot(square, x)
        self.fourth += _dot(square, square)
        if x.shape[1] % 16 == 0:
            blocks = square.reshape(x.shape[0], -1, 16)
            mean = blocks.mean(axis=2)
            crest = np.sqrt(blocks.max(axis=2)[mean > 0] / mean[mean > 0])
            self.crest += _count(np.clip(((crest - 1) * 16).astype(np.int64), 0, CREST - 1), CREST)

    @property
    def kurtosis(self) -> float:
        """Fourth central moment over the squared variance: 3 for normal numbers."""
        if not self.n:
            return math.nan
        mean, m2, m3, m4 = (v / self.n for v in (self.first, self.second, self.third, self.fourth))
        variance = m2 - mean**2
        central = m4 - 4 * mean * m3 + 6 * mean**2 * m2 - 3 * mean**4
        return central / variance**2 if variance > 0 else math.nan


@dataclass
class Shape:
    """How the elements of a tensor are distributed; ``moments[d]`` after a Hadamard transform of size d."""

    moments: dict[int, Moments] = field(default_factory=lambda: {d: Moments() for d in (1, *HADAMARD)})
    outliers: int = 0
    largest_range: float = 0.0  # of a block of 16, log2(amax / least magnitude that is not zero)
    ranges: AnyArray = _zeros(64)  # blocks of 16 by that, in steps of half an octave

    def count(self, x: F32, valid: int) -> None:
        """x (R, K) float32 over the tensor's rms, of which the first ``valid`` columns are real, finite."""
        real = x[:, :valid]
        self.outliers += int(np.count_nonzero(np.abs(real) > OUTLIER))
        self.moments[1].count(real)
        self._ranges(real[:, : valid // 16 * 16])
        whole = valid // max(HADAMARD) * max(HADAMARD)
        rotated = real[:, :whole] if whole else real[:, : valid // 16 * 16]
        for size, turned in _hadamard(rotated):
            self.moments[size].count(turned)

    def _ranges(self, x: F32) -> None:
        if x.size == 0:
            return
        magnitude = np.abs(x).reshape(x.shape[0], -1, 16)
        largest = magnitude.max(axis=2)
        least = np.where(magnitude > 0, magnitude, np.float32(np.inf)).min(axis=2)[largest > 0]
        octaves = np.log2(largest[largest > 0]) - np.log2(least)
        if octaves.size:
            self.largest_range = max(self.largest_range, float(octaves.max()))
            self.ranges += _count(np.minimum((2 * octaves).astype(np.int64), 63), 64)

    def add(self, other: Shape) -> None:
        """Take in another piece."""
        for size, moments in self.moments.items():
            moments.add(other.moments[size])
        self.outliers += other.outliers
        self.largest_range = max(self.largest_range, other.largest_range)
        self.ranges += other.ranges

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "moments": {str(size): one.to_json() for size, one in self.moments.items()},
            "outliers": self.outliers,
            "largest_range": _plain(self.largest_range),
            "ranges": _plain(self.ranges),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Shape:
        """The inverse."""
        made = cls()
        made.moments = {size: Moments.from_json(found["moments"][str(size)]) for size in made.moments}
        made.outliers, made.largest_range = _read(found["outliers"], 0), _read(found["largest_range"], 0.0)
        made.ranges = _read(found["ranges"], made.ranges)
        return made


_SIGNS = np.array([-1.0 if 0xD7E8 >> i & 1 else 1.0 for i in range(16)], np.float32)


def _hadamard(x: F32) -> Iterator[tuple[int, F32]]:
    """(size, x transformed) in float32 for each size of HADAMARD that divides K, with Transformer Engine's signs.

    One butterfly: the transforms of 4 and 16 are passed on the way to that of 128.
    """
    rows, columns = x.shape
    if columns % 16 or columns == 0:
        return
    y = (x.reshape(-1, 16) * _SIGNS).reshape(rows, columns)
    size = 1
    while size < max(HADAMARD) and columns % (2 * size) == 0:
        pairs = y.reshape(-1, 2, size)
        low, high = pairs[:, 0], pairs[:, 1]
        y = np.stack([low + high, low - high], axis=1).reshape(rows, columns)
        size *= 2
        if size in HADAMARD:
            yield size, y * np.float32(size**-0.5)


# -- second pass: the error of a format ------------------------------------------------------------------------------


@dataclass
class Sums(Additive):
    """Of one format on one tensor.  e = y − x, over elements where both are finite; ``lost`` counts the others.

    Histograms: ``signed`` e/rms and ``relative`` e/x in the bins of signed figures; ``log_error`` |e|/rms and
    ``log_relative`` |e/x| in bins of magnitudes; ``mag_*`` by |x|/rms; ``blocks`` blocks by Σe²/Σx².
    """

    MAXIMA = ("max_error", "max_scale", "max_magnitude")

    n: int = 0
    lost: int = 0
    padded: int = 0  # columns added to fill the last block
    sum_e: float = 0.0
    e2: float = 0.0
    x2: float = 0.0
    y2: float = 0.0
    xy: float = 0.0
    abs_x: float = 0.0
    abs_y: float = 0.0
    max_error: float = 0.0
    max_magnitude: float = 0.0
    te_e2: float = 0.0  # Σe² with y rounded to the type of x, as Transformer Engine's mse has it
    nonzero: int = 0  # elements of x that are not zero
    underflow: int = 0  # of these, those whose code is zero
    underflow_e2: float = 0.0
    clipped: int = 0
    clipped_e2: float = 0.0
    exact_e2: float = 0.0  # Σe² with block scales not rounded
    scale_e2: float = 0.0  # Σx²·(rounded/unrounded scale − 1)²
    codes: AnyArray = _zeros(256)
    code_e2: AnyArray = _zeros(8, np.float64)  # Σe² by magnitude index
    scales: AnyArray = _zeros(256)
    max_scale: float = 0.0
    signed: AnyArray = _zeros(SIGNED)
    relative: AnyArray = _zeros(SIGNED)
    log_error: AnyArray = _zeros(BINS)
    log_relative: AnyArray = _zeros(BINS)
    mag_n: AnyArray = _zeros(BINS)
    mag_e2: AnyArray = _zeros(BINS, np.float64)
    mag_x2: AnyArray = _zeros(BINS, np.float64)
    blocks: AnyArray = _zeros(BINS)
    transposed: int = 0  # elements that were quantized along the other axis too
    transposed_n: int = 0  # of these, those that differ
    transposed_e2: float = 0.0  # Σ(y along rows − y along columns)²
    transposed_x2: float = 0.0
    draws: AnyArray = _zeros(len(DRAWS), np.float64)  # Σ(mean of B draws − x)² of a sample, B of DRAWS
    draws_variance: float = 0.0  # of the mean of the most draws, summed
    draws_x2: float = 0.0


@dataclass
class View:
    """A piece as some formats read it, and what they share: rows, channels and bins of x.

    x: float32 (R, K), zero where padded or not finite.  real: (rows, columns) that are not padding.  unit: x over the
    power of two near the tensor's amax, so that squares in float32 neither overflow nor vanish, whatever the tensor's
    magnitude; by: what x was multiplied by for that.  rms: of the tensor, in the same unit.
    """

    x: F32
    raw: AnyArray
    bad: AnyArray | None
    real: tuple[int, int]
    unit: F32
    by: np.float32
    rms: np.float32
    rows_x2: F64
    channels_x2: F64
    bins: AnyArray
    nonzero: AnyArray

    @classmethod
    def of(cls, raw: AnyArray, real: tuple[int, int], facts: Facts) -> View:
        """A piece (R, K) as the quantizer reads it, padded with zeros beyond ``real``; facts of the whole tensor."""
        x = widen(raw)
        bad = ~np.isfinite(x)
        if bad.any():
            x = np.where(bad, np.float32(0), x)
        by = facts.unit
        unit = x * by
        rms = np.float32(facts.rms * float(by)) if facts.rms > 0 else np.float32(1)
        magnitude = np.abs(unit[: real[0], : real[1]])
        return cls(
            x,
            raw,
            bad if bad.any() else None,
            real,
            unit,
            by,
            rms,
            by_row(x, x)[: real[0]],
            by_channel(x, x)[: real[1]],
            magnitude_bins(magnitude / rms),
            magnitude > 0,
        )


def sums_of(one: Format, view: View, q: Quantized) -> tuple[Sums, tuple[F64, F64], tuple[F64, F64]]:
    """Everything of one format on one piece: Sums, and Σe² and Σx² of its rows and channels."""
    x, y = view.x, q.y
    bad = _not_finite(view, y)
    shared = bad is view.bad  # no element is lost that others keep
    if bad is not None:
        x, y = np.where(bad, np.float32(0), x), np.where(bad, np.float32(0), y)
    found = Sums(lost=0 if bad is None else int(np.count_nonzero(bad[: view.real[0], : view.real[1]])))
    e = y - x
    unit, unit_x = e * view.by, x * view.by
    unit_e2, unit_x2 = unit * unit, unit_x * unit_x
    found.blocks += _block_errors(one, unit_e2, unit_x2, view.real)
    _count_scales(found, one, q, x, view.real)
    part = np.s_[: view.real[0], : view.real[1]]
    full = view.real == x.shape
    if not full:
        x, y, e, unit, unit_e2, unit_x2 = (v[part] for v in (x, y, e, unit, unit_e2, unit_x2))
        bad = None if bad is None else bad[part]
    _count_sums(found, x, y, e, view)
    _count_split(found, one, q, part, x, unit_e2, view, bad)
    _count_histograms(found, x, e, unit, unit_e2, unit_x2, view, bad)
    for name in _IN_UNITS:
        setattr(found, name, getattr(found, name) / float(view.by) ** 2)
    square = (view.rows_x2, view.channels_x2) if shared else (by_row(x, x), by_channel(x, x))
    return found, (by_row(e, e), by_channel(e, e)), square


_IN_UNITS = ("code_e2", "underflow_e2", "clipped_e2", "mag_e2", "mag_x2")  # squares that float32 would not hold


def squared(view: View, y: F32) -> tuple[F32, F32]:
    """e² and x² in the view's unit, zero where x or y is not finite."""
    x, bad = view.x, _not_finite(view, y)
    e = y - x
    if bad is not None:
        e, x = np.where(bad, np.float32(0), e), np.where(bad, np.float32(0), x)
    unit, unit_x = e * view.by, x * view.by
    return unit * unit, unit_x * unit_x


def _not_finite(view: View, y: F32) -> AnyArray | None:
    """Where x or y is not finite; None when that is nowhere."""
    finite = np.isfinite(y)
    if finite.all():
        return view.bad
    return ~finite if view.bad is None else ~finite | view.bad


def _count_sums(found: Sums, x: F32, y: F32, e: F32, view: View) -> None:
    found.n = x.size - found.lost
    found.sum_e = float(e.sum(dtype=np.float64))
    found.e2, found.x2, found.y2, found.xy = _dot(e, e), _dot(x, x), _dot(y, y), _dot(x, y)
    found.abs_x, found.abs_y = (float(np.abs(v).sum(dtype=np.float64)) for v in (x, y))
    found.max_error = float(np.abs(e).max())
    found.max_magnitude = float(np.abs(x).max())
    found.te_e2 = found.e2
    if view.raw.dtype != np.float32:
        rounded = y.astype(view.raw.dtype).astype(np.float32) - x
        found.te_e2 = _dot(rounded, rounded)


def _count_split(
    found: Sums, one: Format, q: Quantized, part: Any, x: F32, e2: F32, view: View, bad: AnyArray | None
) -> None:
    """The error by its cause, and the codes."""
    codes, clipped = q.codes[part], q.clipped[part]
    found.codes += _count(codes, 256)
    zero = codes & np.uint8(7 if one.has_e2m1 else 0x7F)
    if one.has_e2m1:
        found.code_e2 += _count(zero, 8, e2)
    under = (zero == 0) & view.nonzero
    found.nonzero = int(np.count_nonzero(view.nonzero))
    found.underflow, found.clipped = int(np.count_nonzero(under)), int(np.count_nonzero(clipped))
    found.underflow_e2 = float(e2[under].sum(dtype=np.float64))
    found.clipped_e2 = float(e2[clipped].sum(dtype=np.float64)) if found.clipped else 0.0
    found.exact_e2 = math.nan
    if q.exact is not None:
        exact = q.exact[part] - x
        if bad is not None:
            exact = np.where(bad, np.float32(0), exact)
        found.exact_e2 = _dot(exact, exact)


def _count_scales(found: Sums, one: Format, q: Quantized, x: F32, real: tuple[int, int]) -> None:
    """Scale bytes, one a block, and the error that rounding them makes by itself."""
    found.scale_e2 = math.nan
    if q.scales is None:
        return
    height, width = one.block[0], x.shape[1] // q.scales.shape[1]
    there = q.scales[: -(-real[0] // height) * height : height, : -(-real[1] // width)]
    found.scales += _count(there, 256)
    if one.family == "nvfp4":
        used = e4m3.VALUES[np.unique(there)]
        used = used[np.isfinite(used)]
        found.max_scale = float(np.abs(used).max()) if used.size else 0.0
    if q.ratio is not None:
        squares = np.einsum("rbk,rbk->rb", *(x.reshape(*q.scales.shape, width),) * 2, dtype=np.float64)
        gap = np.where(np.isfinite(q.ratio), q.ratio, np.float32(1)).astype(np.float64) - 1
        found.scale_e2 = float((squares * gap * gap).sum())


def _block_errors(one: Format, e2: F32, x2: F32, real: tuple[int, int]) -> AnyArray:
    """Blocks by their relative error power."""
    ratio = block_ratios(e2, x2, one.block)
    height, width = one.block
    there = ratio[: -(-real[0] // height), : -(-real[1] // width)]
    return _count(magnitude_bins(there[np.isfinite(there)]), BINS)


def block_ratios(e2: F32, x2: F32, block: tuple[int, int]) -> F32:
    """Σe²/Σx² of each block, float32 (R/height, K/width); NaN for blocks of zeros."""
    height, width = block
    sums = []
    for square in (e2, x2):
        across = square.reshape(square.shape[0], -1, width).sum(axis=2)
        sums.append(across.reshape(-1, height, across.shape[1]).sum(axis=1))
    with np.errstate(all="ignore"):
        ratio: F32 = sums[0] / sums[1]
    return ratio


def _count_histograms(
    found: Sums, x: F32, e: F32, unit: F32, e2: F32, x2: F32, view: View, bad: AnyArray | None
) -> None:
    """unit, e2, x2: e, its square and that of x in the view's unit."""
    bins, nonzero = view.bins, view.nonzero
    if bad is not None:
        good = ~bad
        x, e, unit, e2, x2, bins, nonzero = (v[good] for v in (x, e, unit, e2, x2, bins, nonzero))
    with np.errstate(all="ignore"):
        of_rms, relative = unit / view.rms, e / x
    if not nonzero.all():
        relative = relative[nonzero]
    found.signed += _count(_signed_bins(of_rms), SIGNED)
    found.relative += _count(_signed_bins(relative), SIGNED)
    found.log_error += _count(magnitude_bins(np.abs(of_rms)), BINS)
    found.log_relative += _count(magnitude_bins(np.abs(relative)), BINS)
    found.mag_n += _count(bins, BINS)
    found.mag_e2 += _count(bins, BINS, e2)
    found.mag_x2 += _count(bins, BINS, x2)


def count_draws(found: Sums, x: F32, draws: Iterable[F32], bad: AnyArray | None = None) -> None:
    """The squared error of the mean of the first B draws, for the B of DRAWS, and the variance of the last.

    Elements that are ``bad``, or that any draw makes NaN or Inf, are left out of all of them.
    """
    total, squares = np.zeros(x.shape), np.zeros(x.shape)
    good = np.ones(x.shape, np.bool_) if bad is None else ~bad
    gaps = []
    for count, y in enumerate(draws, 1):
        finite = np.isfinite(y)
        good &= finite
        y = np.where(finite, y, np.float32(0))
        total += y
        squares += np.square(y, dtype=np.float64)
        if count in DRAWS:
            gaps.append(total / count - x)
    found.draws += [float((gap * gap)[good].sum()) for gap in gaps]
    variance = (squares - total * total / count) / (count - 1)
    found.draws_variance += float(variance[good].sum()) / count
    kept = np.where(good, x, np.float32(0))
    found.draws_x2 += _dot(kept, kept)


# -- figures ---------------------------------------------------------------------------------------------------------


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def figures(one: Format, s: Sums) -> dict[str, float]:
    """The figures of one format on one tensor, or on several whose Sums were added; NaN where one has no meaning."""
    relative = _ratio(s.e2, s.x2)
    blocks = int(s.scales.sum())
    elements = int(s.codes.sum())
    nvfp4 = one.family == "nvfp4"
    code = s.codes[:16].reshape(2, 8).sum(axis=0) if one.has_e2m1 else s.codes.reshape(2, 128).sum(axis=0)
    most, bias = _ratio(s.draws[-1], s.draws_x2), _ratio(s.draws_variance, s.draws_x2)
    return {
        "relative_mse": relative,
        "snr_db": -10 * math.log10(relative) if relative > 0 else math.inf if relative == 0 else math.nan,
        "cosine": _ratio(s.xy, math.sqrt(s.x2 * s.y2)),
        "gain": _ratio(s.xy, s.x2),
        "shrinkage": _ratio(s.abs_y, s.abs_x),
        "max_error_of_amax": _ratio(s.max_error, s.max_magnitude),
        "scale_only": _ratio(s.scale_e2, s.x2),
        "scale_part": _ratio(s.e2 - s.exact_e2, s.e2),
        "underflow_part": _ratio(s.underflow_e2, s.e2),
        "clipping_part": _ratio(s.clipped_e2, s.e2),
        "rounding_part": _ratio(s.e2 - s.underflow_e2 - s.clipped_e2, s.e2),
        "zero_codes": _ratio(int(code[0]), elements),
        "largest_codes": _ratio(int(code[7]), elements) if one.has_e2m1 else math.nan,
        "clipped": _ratio(s.clipped, elements),
        "te_underflows_percent": 100 * _ratio(s.underflow, elements),
        "te_mse": _ratio(s.te_e2, s.n),
        "scale_zero": _ratio(int(s.scales[0]), blocks) if nvfp4 else math.nan,
        "scale_subnormal": _ratio(int(s.scales[1:8].sum()), blocks) if nvfp4 else math.nan,
        "scale_utilisation": _ratio(s.max_scale, float(e4m3.MAX)) if nvfp4 else math.nan,
        "block_mse_median": quantile(s.blocks, 0.5),
        "block_mse_p99": quantile(s.blocks, 0.99),
        "transposed_inconsistency": _ratio(s.transposed_e2, s.transposed_x2) if s.transposed else math.nan,
        "transposed_differ": _ratio(s.transposed_n, s.transposed),
        **{f"mean_of_{b}": _ratio(v, s.draws_x2) for b, v in zip(DRAWS, s.draws.tolist(), strict=True)},
        "bias_power": most - bias,
        "lost": float(s.lost),
    }


def line_figures(e2: F64 | None, x2: F64 | None, what: str) -> dict[str, float]:
    """Spread of the relative error over rows or channels ("row", "channel"), and which is the worst."""
    names = [f"{what}_mse_{q}" for q in ("min", "median", "p99", "max")]
    if e2 is None or x2 is None or not (there := x2 > 0).any():
        return dict.fromkeys([*names, f"worst_{what}"], math.nan)
    ratio = e2[there] / x2[there]
    values = np.quantile(ratio, (0, 0.5, 0.99, 1)).tolist()
    return {**dict(zip(names, values, strict=True)), f"worst_{what}": float(np.flatnonzero(there)[ratio.argmax()])}


def tensor_figures(facts: Facts, shape: Shape, channels_x2: F64 | None) -> dict[str, float]:
    """The figures of a tensor that no format has a part in."""
    count = shape.moments[1].n
    outlying = math.nan
    if channels_x2 is not None and (channels_x2 > 0).any():
        rms = np.sqrt(channels_x2)
        outlying = float(np.mean(rms > OUTLIER_CHANNEL * np.median(rms)))
    crest = shape.moments[1].crest
    return {
        "amax": facts.largest,
        "rms": facts.rms,
        "zeros": _ratio(facts.zeros, facts.n),
        "dynamic_range": math.log2(facts.largest / facts.least) if facts.largest > 0 else math.nan,
        "block_range_max": shape.largest_range if shape.ranges.any() else math.nan,
        "block_crest_median": quantile(crest, 0.5, crest_edges()),
        "kurtosis": shape.moments[1].kurtosis,
        **{f"kurtosis_rht{size}": shape.moments[size].kurtosis for size in HADAMARD},
        "outliers": _ratio(shape.outliers, count),
        "outlier_channels": outlying,
        "nan": float(facts.nan),
        "inf": float(facts.inf),
    }


def quantile(counts: AnyArray, q: float, edges: F64 | None = None) -> float:
    """A quantile of what was counted in bins, of magnitudes by default: the middle of its bin; NaN of nothing."""
    total = counts.sum()
    if total == 0:
        return math.nan
    bin_ = int(np.searchsorted(np.cumsum(counts), q * total))
    edges = magnitude_edges() if edges is None else edges
    return float(edges[bin_] + edges[bin_ + 1]) / 2
