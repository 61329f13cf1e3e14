"""Against the original weights: which reading of the bytes gives them back, and whose quantizer wrote them.

With the weights at hand every reading can be tried: nibbles either way, scales in every order, the global
scale in either form.  The right one leaves the error of 4-bit rounding, about a tenth; the others do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from conformance.checkpoint import Quantized, Stored, open_checkpoint
from conformance.compare import CONFORMS, check
from conformance.count import count_codes
from conformance.lint.facts import Facts
from conformance.lint.matrix import Matrix
from conformance.lint.report import FAULT, Finding, TensorReport, fault, note
from conformance.lint.whole import M, implied_amax
from conformance.side import Side
from nvfp4ref import e2m1, e4m3
from nvfp4ref.container import DumpError, PathLike
from nvfp4ref.dump import Dump

Array = np.ndarray[Any, Any]

_SAMPLE = 1 << 19  # elements on which readings and presets are tried
_CLOSE = 0.3  # relative error below which a reading gives the weights back
_EXACT = 0.03  # how far the fitted global scale may be from the stored one

_PACKINGS = ("low-nibble-first", "high-nibble-first", "split-half")


@dataclass
class Original:
    """The weights before quantization, by name; and the presets that fitted the last tensor."""

    arrays: dict[str, Stored]
    likely: tuple[str, ...] = field(default=tuple(nv.PRESETS))

    def find(self, one: Quantized) -> Stored | None:
        """The array that a tensor was made from."""
        return self.arrays.get(one.origin)


def open_original(path: PathLike) -> Original:
    """The floating-point arrays under a path.  Raises DumpError when it cannot be read or has none."""
    found = open_checkpoint(path)
    if found.errors:
        raise DumpError(found.errors[0])
    arrays = {one.name: one for one in found.others if one.is_float}
    if not arrays:
        raise DumpError(f"{path}: has no floating-point arrays to compare with")
    return Original(arrays)


def compared(report: TensorReport, one: Quantized, facts: list[Facts], source: Original | None) -> TensorReport:
    """The report with the comparison; as it is when there is nothing to compare with."""
    if one.dump is not None and one.dump.x is not None:
        return _judged_dump(report, one.dump, one.suffix)
    if source is None:
        return report
    original = source.find(one)
    if original is None:
        return _with(report, [note("original.missing", "the original has no tensor of this name")])
    try:
        layouts = [_Weights.of(original, each.matrix, len(facts)) for each in facts]
    except ValueError as error:
        return _with(report, [fault("original.shape", str(error))])
    values = _whole(one, len(facts))
    for each, weights, whole in zip(facts, layouts, values, strict=True):
        report = _one_matrix(report, each, weights, whole, source)
    return report


def _with(report: TensorReport, found: list[Finding], **original: Any) -> TensorReport:
    merged = {**(report.original or {}), **original} or None
    return replace(report, findings=(*report.findings, *found), original=merged)


def _judged_dump(report: TensorReport, dump: Dump, suffix: str) -> TensorReport:
    """A dump that has its input is judged as ``nvfp4 check`` does, once for both outputs."""
    if suffix and dump.packed is not None:
        return report
    judged = check(dump)
    if judged.verdict == CONFORMS:
        return _with(report, [], preset=judged.arithmetic)
    said = "; ".join((*judged.sentences, *((judged.error,) if judged.error else ())))
    severity, sentence = (fault if judged.verdict == "differs" else note), f"held against {judged.arithmetic}: {said}"
    return _with(report, [severity(f"check.{judged.stage or 'not-judged'}", sentence)])


def _whole(one: Quantized, count: int) -> list[Array | None]:
    """Global scale of each matrix, as stored; None where there is none, or one for every row."""
    if one.whole is None or not one.whole.is_float:
        return [None] * count
    values = one.whole.values().astype(np.float32)
    if len(values) not in (1, count):
        return [None] * count
    return [values[index if len(values) > 1 else 0] for index in range(count)]


# ---- the weights of one matrix -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """Rows of the original that belong to one matrix."""

    stored: Stored
    first: int  # flat index of its first element
    rows: int
    width: int
    transposed: bool

    @classmethod
    def of(cls, stored: Stored, matrix: Matrix, count: int) -> _Weights:
        """Raises ValueError, a sentence, when the shapes do not belong together."""
        rows, width = matrix.rows, 16 * matrix.columns
        first = (matrix.expert or 0) * rows * width
        turned = bool(matrix.quantized.suffix) or not matrix.upright  # its values are a transpose
        for transposed in (turned, not turned):
            one = (width, rows) if transposed else (rows, width)
            if stored.shape[-2:] == one and stored.size == count * rows * width:
                return cls(stored, first, rows, width, transposed)
        of = "×".join(map(str, (*((count,) if count > 1 else ()), rows, width)))
        raise ValueError(f"the original is {'×'.join(map(str, stored.shape))}, and the codes are of {of}")

    def read(self, start: int, stop: int) -> Array:
        """Rows in their own type, (stop - start, width)."""
        if self.transposed:
            whole = self.stored.values(self.first, self.first + self.rows * self.width)
            return np.ascontiguousarray(whole.reshape(self.width, self.rows).T[start:stop])
        begin, end = (self.first + row * self.width for row in (start, stop))
        return self.stored.values(begin, end).reshape(-1, self.width)


# ---- readings ----------------------------------------------------------------------------------------------


class _Fit(NamedTuple):
    """How well values without their global scale give the weights: the best factor, and the error it leaves."""

    factor: float
    error: float


class _Sums:
    """Inner products of weights and values."""

    def __init__(self) -> None:
        self.xx = self.xv = self.vv = 0.0

    def add(self, x: Array, v: Array) -> None:
        """Two float32 matrices: products of rows in float32, their sums in double precision."""
        with np.errstate(over="ignore"):
            found = [np.vecdot(one, two).sum(dtype=np.float64) for one, two in ((x, x), (x, v), (v, v))]
        if not np.isfinite(found).all() or min(found[0], found[2]) < 1e-25:  # squares that float32 cannot hold
            x, v = (one.reshape(-1).astype(np.float64) for one in (x, v))
            found = [np.dot(one, two) for one, two in ((x, x), (x, v), (v, v))]
        self.xx, self.xv, self.vv = (
            old + float(new) for old, new in zip((self.xx, self.xv, self.vv), found, strict=True)
        )

    @property
    def fit(self) -> _Fit:
        if not self.xx or not self.vv:
            return _Fit(0.0, 0.0 if self.xx == self.vv else 1.0)
        return _Fit(self.xv / self.vv, max(0.0, 1 - self.xv * self.xv / (self.xx * self.vv)) ** 0.5)


def decoded(packed: Array, scales: Array, packing: str) -> Array:
    """float32 (R, K): codes times block scales, NaN scales as 0."""
    q = nv.NVFP4Tensor.from_arrays(packed, scales, np.float32(1), arithmetic=nv.arithmetic("te", packing=packing))
    factor = np.nan_to_num(e4m3.VALUES[scales])
    values: Array = (q.values.reshape(*scales.shape, 16) * factor[..., None]).reshape(packed.shape[0], -1)
    return values


def _one_matrix(
    report: TensorReport, facts: Facts, weights: _Weights, whole: Array | None, source: Original
) -> TensorReport:
    matrix = facts.matrix
    if not matrix.orders:
        return report
    rows = _sample_rows(matrix)
    x = weights.read(0, rows)
    plain = _finite(x)
    declared = (matrix.quantized.family.packing, str(facts.order))
    readings = {
        (packing, order): _fit(plain, matrix, packing, order, rows) for packing in _PACKINGS for order in matrix.orders
    }
    best = min(readings, key=lambda reading: readings[reading].error)
    if readings[declared].error < _CLOSE / 2 or readings[best].error > 0.7 * readings[declared].error:
        best = declared
    total, amax = _whole_fit(matrix, weights, *best)
    where = "" if matrix.expert is None else f"in expert {matrix.expert}: "
    found = list(_judged(facts, best, declared, total, amax, whole))
    facts_said: dict[str, Any] = {"relative_error": round(float(total.error), 5), "amax": float(amax)}
    if facts.all_zero and amax == 0:
        report = replace(report, findings=tuple(one for one in report.findings if one.id != "codes.all-zero"))
        return _with(report, [], **facts_said)
    if total.error < _CLOSE and whole is not None and not any(one.severity == FAULT for one in found):
        fits = _presets(facts, best, x, whole, amax, source)
        facts_said |= {"presets": list(fits.names)}
        found += list(fits.findings)
    return _with(report, [replace(one, sentence=where + one.sentence) for one in found], **facts_said)


def _sample_rows(matrix: Matrix) -> int:
    rows = max(128, _SAMPLE // (16 * matrix.columns) // 128 * 128)
    return min(rows, matrix.rows)


def _finite(x: Array) -> Array:
    """float32, NaN and Inf as 0."""
    with np.errstate(over="ignore"):
        values = x.astype(np.float32)
    wrong = ~np.isfinite(values)
    if wrong.any():
        values[wrong] = 0
    return values


def _fit(x: Array, matrix: Matrix, packing: str, order: str, rows: int) -> _Fit:
    sums = _Sums()
    sums.add(x, decoded(matrix.packed(0, rows), matrix.scales(order, 0, rows), packing))
    return sums.fit


def _whole_fit(matrix: Matrix, weights: _Weights, packing: str, order: str) -> tuple[_Fit, np.float32]:
    """The fit of all rows, and max(abs(x))."""
    sums, amax = _Sums(), np.float32(0)
    for start, stop in matrix.slabs():
        x = _finite(weights.read(start, stop))
        amax = max(amax, np.abs(x).max(initial=np.float32(0)))
        sums.add(x, decoded(matrix.packed(start, stop), matrix.scales(order, start, stop), packing))
    return sums.fit, np.float32(amax)


# ---- findings ----------------------------------------------------------------------------------------------


def _judged(
    facts: Facts, best: tuple[str, str], declared: tuple[str, str], total: _Fit, amax: np.float32, whole: Array | None
) -> Iterator[Finding]:
    tensor = facts.tensor
    if total.error >= _CLOSE:
        if tensor.suffix:
            yield note("original.not-compared", "the columnwise output is of transformed values: not compared")
            return
        scaled = "; a pre_quant_scale lies beside it, so they were scaled before (AWQ)" if tensor.prescaled else ""
        severity = note if tensor.prescaled else fault
        yield severity(
            "original.differs",
            f"no reading of codes and scales gives the original weights (relative error {total.error:.2f}){scaled}: "
            "another tensor, or weights that were smoothed, rotated or trained since",
        )
        return
    if best[0] != declared[0]:
        yield fault(
            f"packing.{best[0]}" if best[0] != "low-nibble-first" else "packing.low-nibble-first",
            f"the weights come back with {best[0].replace('-', ' ')} (relative error {total.error:.2f}), where "
            f"{tensor.family.name} has {declared[0].replace('-', ' ')}",
        )
    if best[1] != declared[1]:
        name = {"swizzled": "scales.swizzled", "transposed": "scales.transposed"}.get(best[1], "scales.not-swizzled")
        yield fault(name, f"the weights come back with the scales read as {best[1]}, not {declared[1]}")
    if whole is not None and np.isfinite(whole) and whole > 0 and total.factor > 0:
        yield from _global(facts, total.factor, float(amax), float(whole))


def _global(facts: Facts, factor: float, amax: float, whole: float) -> Iterator[Finding]:
    """The stored global scale against the one that fits, and against the amax."""
    form = facts.tensor.family.form
    stored = implied_amax(whole, form) / M
    ratio = stored / factor
    if abs(ratio - 1) <= _EXACT:
        implied = M * stored
        if implied < amax * (1 - 2**-7):
            yield fault(
                "global-scale.wrong-amax",
                f"it was made from an amax of {implied:.6g}, and the weights go up to {amax:.6g}: the largest are cut",
            )
        elif implied > amax * (1 + 2**-7):
            yield note(
                "global-scale.wrong-amax",
                f"it was made from an amax of {implied:.6g}, and the weights go up to {amax:.6g}: shared with a "
                "layer that is fused with this one, or the range is not used",
            )
        return
    if abs(ratio * 1536 / M - 1) <= _EXACT or abs(ratio * M / 1536 - 1) <= _EXACT:
        severity = note if form == "amax" else fault
        yield severity("global-scale.e4m3-max-256", "block scales go up to 256, not 448: 1536/amax was used")
    elif form != "amax" and abs(stored * factor - 1) <= _EXACT:
        yield fault(
            "global-scale.inverted",
            f"the stored global scale is the inverse of the one that fits, {_fitting(form, factor)}",
        )
    else:
        yield fault(
            "global-scale.wrong-factor",
            f"values come out {ratio:.4g} times too large: stored is {whole:.6g}, {_fitting(form, factor)} fits",
        )


def _fitting(form: str, factor: float) -> str:
    return f"{ {'decode': factor, 'encode': 1 / factor, 'amax': M * factor}[form]:.6g}"


# ---- presets -----------------------------------------------------------------------------------------------


class _Presets(NamedTuple):
    names: tuple[str, ...]
    findings: tuple[Finding, ...]


def _presets(
    facts: Facts, best: tuple[str, str], x: Array, whole: Array, amax: np.float32, source: Original
) -> _Presets:
    """The presets that give these bytes from these weights; the nearest one, when none does."""
    dumps = list(_dumps(facts, best, x, whole, amax))
    for names in dict.fromkeys((source.likely, tuple(nv.PRESETS))):
        for dump in dumps:
            wrong = {name: different for name in names if (different := _different(dump, name)) is not None}
            fits = tuple(name for name, count in wrong.items() if count == 0)
            if fits:
                source.likely = fits
                return _Presets(fits, ())
    wrong = {name: different for name in nv.PRESETS if (different := _different(dumps[0], name)) is not None}
    if not wrong:
        return _Presets((), ())
    nearest = min(wrong, key=lambda name: wrong[name])
    total = x.size + x.size // 16
    return _Presets(
        (),
        (
            note(
                "original.no-preset",
                f"no preset gives these bytes from these weights; {nearest} is nearest, with {wrong[nearest]:,} of "
                f"{total:,} codes and scales different: GPTQ, AWQ and searched scales do so, and a changed operation",
                wrong[nearest],
                total,
            ),
        ),
    )


def _dumps(facts: Facts, best: tuple[str, str], x: Array, whole: Array, amax: np.float32) -> Iterator[Dump]:
    """The sample as a dump; and once more as float32, for quantizers that convert first."""
    rows = len(x) // 16 * 16 or len(x)
    packing, order = best
    packed, scales = facts.matrix.packed(0, rows), facts.matrix.scales(order, 0, rows)
    if packing != "low-nibble-first":
        ar = nv.arithmetic("te", packing=packing)
        packed = e2m1.pack(nv.NVFP4Tensor.from_arrays(packed, scales, np.float32(1), arithmetic=ar).codes)
    form = facts.tensor.family.form
    recorded: dict[str, Any] = {"amax": np.array([amax if form != "amax" else whole], np.float32)}
    if form != "amax":
        recorded |= {"global_scale": np.array([whole], np.float32), "global_scale_form": form}
    block = (16, 16) if facts.repeated and rows % 16 == 0 else (1, 16)
    known = x[:rows] if x.dtype != np.float64 else x[:rows].astype(np.float32)
    for values in (known, known.astype(np.float32)) if known.dtype != np.float32 else (known,):
        yield Dump(x=values, packed=packed, scales=scales, block=block, **recorded)


def _different(dump: Dump, preset: str) -> int | None:
    """Codes and scales that a preset gives otherwise, None when it cannot be asked."""
    side = Side(dump, "", nv.arithmetic(preset))
    try:
        expected = side.expected
    except ValueError:
        return None
    assert dump.packed is not None
    codes = count_codes(dump.packed, expected.packed).different
    return codes + int(np.count_nonzero(dump.scales != expected.scales))
