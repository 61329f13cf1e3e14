"""Global scales: what one cannot be, and what those of all tensors say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from conformance.checkpoint import Quantized
from conformance.lint.facts import Facts
from conformance.lint.matrix import Array
from conformance.lint.report import Finding, fault, note
from nvfp4ref import e4m3

M = 2688.0  # 6·448: a global scale of decode form is amax/M
_WEIGHT_MAX = 256.0  # weights beyond it are not impossible, but a global scale that implies them is suspect
_FEW_SCALES = 0x76  # 224: below it a scale range that ends at 448 (or 256) has no largest element
_UNUSED = 0x66  # 56: three binades of the range are never used


def implied_amax(value: float, form: str) -> float:
    """The amax that a stored value stands for."""
    if form == "amax":
        return value
    return M * value if form == "decode" else M / value if value else math.inf


def whole_values(one: Quantized) -> Array | None:
    """The global scales or amaxes of a tensor, flat float32; None when there are none to read."""
    if one.whole is None or not one.whole.is_float or one.whole.size == 0:
        return None
    with np.errstate(over="ignore"):
        return one.whole.values().astype(np.float32)


def check(one: Quantized, facts: list[Facts]) -> Iterator[Finding]:
    """The global scale: one value, one an expert, or one a row."""
    values = whole_values(one)
    if values is None or one.whole is None:
        return
    rows = sum(each.matrix.rows for each in facts)
    if len(values) not in (1, len(facts), rows):
        yield fault(
            "global-scale.shape",
            f"the global scale is {'×'.join(map(str, one.whole.shape))}, expected one value"
            + (f", or one for each of {len(facts)} experts" if len(facts) > 1 else ""),
        )
        return
    yield from _not_positive(one, values, "expert" if len(values) == len(facts) else "row")
    yield from _magnitude(one, values, lambda index: facts[index * len(facts) // len(values)].all_zero)


def _not_positive(tensor: Quantized, values: Array, unit: str) -> Iterator[Finding]:
    """Values that are no positive number; ``unit`` is what each of several is of."""
    form = tensor.family.form
    what = "amax" if form == "amax" else "global scale"
    for name, wrong, means in (
        ("nan", np.isnan(values), "every element is NaN"),
        ("infinite", np.isinf(values), _INFINITE[form]),
        ("negative", values < 0, "every element has the wrong sign, or the bytes are something else"),
        ("zero", values == 0, _ZERO[form]),
    ):
        count = int(np.count_nonzero(wrong))
        if count:
            which = f"the {what}" if len(values) == 1 else f"the {what} of {unit} {_places(wrong)}"
            yield fault(f"global-scale.{name}", f"{which} {_WORDS[name]}: {means}", count, len(values))


_WORDS = {"nan": "is NaN", "infinite": "is infinite", "negative": "is negative", "zero": "is 0"}
_INFINITE = {
    "encode": "2688/amax of an amax of 0, an expert that was never loaded or never quantized; store 1 for it",
    "decode": "every element is infinite or NaN",
    "amax": "the input had an Inf",
}
_ZERO = {
    "encode": "the division by it makes every element infinite or NaN",
    "decode": "an amax of 0, an expert that was never loaded or never quantized: every element reads as 0",
    "amax": "every element reads as 0",
}


def _places(wrong: Array) -> str:
    places = np.flatnonzero(wrong)
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return f"{', '.join(map(str, places[:5]))}{more} (of {len(wrong)})"


def _magnitude(tensor: Quantized, values: Array, all_zero: Callable[[int], bool]) -> Iterator[Finding]:
    """Global scales that imply a size which the tensor cannot have, but would have if they were inverted.

    all_zero: whether the matrix with that value's index holds zeros only; then any value will do.
    """
    form = tensor.family.form
    if form == "amax":
        return
    limit = M if tensor.family.weights else 2.0**20
    for index, value in enumerate(values.tolist()):
        if not (0 < value < math.inf) or all_zero(index):
            continue
        amax = implied_amax(value, form)
        other = M * M / amax
        stored, meant = ("amax/2688", "2688/amax") if form == "decode" else ("2688/amax", "amax/2688")
        if amax <= limit or value == 1:
            continue
        said = f"the global scale {value:.6g} read as {stored} implies values up to {amax:.4g}"
        if other <= (_WEIGHT_MAX if tensor.family.weights else M):
            yield fault(
                "global-scale.inverted",
                f"{said}, read as {meant} up to {other:.4g}: it is stored inverted; {tensor.family.name} has {stored}",
                1,
                len(values),
            )
        else:
            yield note(
                "global-scale.implausible",
                f"{said}, read as {meant} up to {other:.4g}: is it the amax itself, or a factor off?",
            )
        return


# ---- together --------------------------------------------------------------------------------------------------


class Range:
    """The largest block scale of a matrix, and the global scale that it shares with others perhaps."""

    def __init__(self, tensor: int, one: Quantized, key: tuple[str, bytes], value: float, facts: Facts) -> None:
        self.tensor, self.key, self.value, self.top = tensor, key, value, facts.top
        self.weights, self.form = one.family.weights, one.family.form


def ranges(index: int, one: Quantized, facts: list[Facts]) -> Iterator[Range]:
    """The ranges of a tensor's matrices, for the comparison with the others; ``index`` is its place in the report."""
    values = whole_values(one)
    if values is None or len(values) not in (1, len(facts)):
        return
    for position, each in enumerate(facts):
        value = values[position if len(values) > 1 else 0]
        if each.top and not each.all_zero and not each.from_mxfp4 and value > 0:
            yield Range(index, one, (one.family.form, value.tobytes()), float(value), each)


def unused_ranges(found: list[Range]) -> Iterator[tuple[int, Finding]]:
    """Tensors whose block scales end far below 448, and so do those of all that share their global scale.

    Layers that are fused at run time share one on purpose: the largest of them uses the range for all.
    """
    tops: dict[tuple[str, bytes], int] = {}
    for one in found:
        tops[one.key] = max(tops.get(one.key, 0), one.top)
    told: set[int] = set()
    for one in found:
        top = tops[one.key]
        if top >= _FEW_SCALES or one.tensor in told:
            continue
        told.add(one.tensor)
        largest = float(e4m3.VALUES[top])
        said = f"the largest block scale is {largest:g}, where a global scale from the amax makes it 448"
        if one.value == 1 and one.form != "amax":
            yield one.tensor, fault("global-scale.none", f"the global scale is 1, and {said}: it does nothing")
        elif top <= _UNUSED and one.weights:
            wasted = f"1/{448 / largest:.0f} of the range is used"
            yield one.tensor, fault("global-scale.unused-range", f"{said}: {wasted}, and small blocks underflow")
        else:
            yield one.tensor, note("global-scale.unused-range", f"{said}: it was made from another, larger amax")
