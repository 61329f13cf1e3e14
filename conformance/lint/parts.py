"""The parts of a tensor: arrays that are absent, or of a type that they cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.checkpoint import Quantized
from conformance.lint.report import Finding, fault, note


def check(one: Quantized) -> Iterator[Finding]:
    """Arrays that are absent or of a type that they cannot be."""
    family = one.family
    stem = one.name
    for part, suffix, what in ((one.packed, family.packed, "codes"), (one.scales, family.scales, "block scales")):
        if part is None:
            yield fault("checkpoint.missing-part", f"has no {what} ({stem}{suffix}): it cannot be dequantized")
    if one.whole is None and family.form != "amax":
        if not family.one_level and one.dump is None:
            yield fault(
                "checkpoint.missing-part", f"has no global scale ({stem}{family.whole}): it cannot be dequantized"
            )
        elif family.one_level:
            yield note("global-scale.none", "has no global scale: blocks below 2^-9·6 of the unit are lost")
    if one.packed is not None and one.packed.is_float:
        yield fault(
            "packing.dtype", f"the weight is {one.packed.dtype} beside NVFP4 scales: it was never packed to codes"
        )
    if one.scales is not None and not one.has_scale_bytes:
        yield fault(
            "scales.dtype", f"block scales are {one.scales.dtype}, expected F8_E4M3: their bytes are no E4M3 scales"
        )
    yield from _global_type(one)


def _global_type(one: Quantized) -> Iterator[Finding]:
    if one.whole is None or one.whole.dtype == "F32":
        return
    if one.whole.is_float:
        yield note("global-scale.bfloat16", f"the global scale is {one.whole.dtype}, where F32 keeps all of it")
    else:
        yield fault("global-scale.dtype", f"the global scale is {one.whole.dtype}, expected F32")
