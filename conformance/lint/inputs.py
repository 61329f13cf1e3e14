"""Scales of activations, which a checkpoint has one a layer, and what they say together."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from conformance.checkpoint import Quantized
from conformance.lint.report import Finding, fault, note
from conformance.lint.whole import M, implied_amax
from nvfp4ref.container import agreed

_ACTIVATION_MAX = 65504.0


@dataclass(frozen=True)
class InputScale:
    """The input scale of one tensor; None where the checkpoint has none."""

    tensor: int  # its index in the report
    name: str
    form: str
    value: float | None


def check_alone(one: Quantized) -> Iterator[Finding]:
    """What one input scale cannot be."""
    if one.inputs is None:
        return
    if not one.inputs.is_float:
        yield fault("input-scale.dtype", f"{one.inputs.name} is {one.inputs.dtype}, expected one F32")
        return
    values = one.inputs.values().astype(np.float64)
    for name, wrong, why in (
        ("nan", np.isnan(values), "is NaN: calibration saw NaN"),
        ("infinite", np.isinf(values), "is infinite: calibration saw no token (an expert that was never chosen)"),
        ("negative", values < 0, "is negative, which no amax gives"),
        ("zero", values == 0, "is 0: calibration saw no token (an expert that was never chosen), or only zeros"),
    ):
        count = int(np.count_nonzero(wrong))
        if count:
            yield fault(f"input-scale.{name}", f"{one.inputs.name} {why}; calibrate again", count, len(values))
    if (values == 1).all():
        yield note("input-scale.one", f"{one.inputs.name} is 1: it looks like a default, not a calibration")


def record(index: int, one: Quantized) -> InputScale:
    """The input scale for the comparison with the others: the largest, where there are several."""
    value = None
    if one.inputs is not None and one.inputs.is_float:
        values = one.inputs.values().astype(np.float64)
        good = values[np.isfinite(values) & (values > 0)]
        value = float(good.max()) if len(good) else math.nan
    return InputScale(index, one.name, one.family.form, value)


def check_together(scales: list[InputScale]) -> Iterator[tuple[int, Finding]]:
    """Findings, each with the index of its tensor, that the scales of all layers allow."""
    yield from _missing(scales)
    known = [one for one in scales if one.value is not None and one.value > 0 and one.value != 1]
    amaxes = {one.tensor: implied_amax(one.value or 0.0, one.form) for one in known}
    if not amaxes:
        return
    middle = median(amaxes.values())
    for one in known:
        amax = amaxes[one.tensor]
        inverse = M * M / amax
        # an amax beyond 65504 is none; one beyond 2688 is possible, but not for half of all layers
        if amax > _ACTIVATION_MAX or (len(amaxes) > 1 and middle > M and amax > M):
            stored, meant = ("amax/2688", "2688/amax") if one.form == "decode" else ("2688/amax", "amax/2688")
            yield (
                one.tensor,
                fault(
                    "input-scale.inverted",
                    f"the input scale {one.value:.6g} read as {stored} implies activations up to {amax:.4g}, "
                    f"read as {meant} up to {inverse:.4g}: it is stored inverted",
                ),
            )


def _missing(scales: list[InputScale]) -> Iterator[tuple[int, Finding]]:
    """Layers without an input scale among layers of the same name that have one: experts never chosen."""
    alike: dict[str, list[InputScale]] = defaultdict(list)
    for one in scales:
        alike[re.sub(r"\d+", "*", one.name)].append(one)
    for kind, group in alike.items():
        absent = [one for one in group if one.value is None]
        if absent and 2 * len(absent) < len(group):
            there = len(group) - len(absent)
            for one in absent:
                yield (
                    one.tensor,
                    fault(
                        "input-scale.missing",
                        f"has no input scale, and {there:,} of {len(group):,} {kind} "
                        f"{agreed(there, 'has', 'have')} one: calibration saw no token for it "
                        "(an expert that was never chosen)",
                    ),
                )
