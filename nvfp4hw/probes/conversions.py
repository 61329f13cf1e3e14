"""Probes of nearest-even conversion: every float32 through the instructions, and through NVIDIA's header on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvfp4hw.probes.base import Array, Findings, Output, Probe, required
from nvfp4hw.probes.runs import (
    ALL,
    NEGATIVE_NAN,
    POSITIVE_NAN,
    Runs,
    compare,
    float_runs,
    read_runs,
    restored,
    stored,
)
from nvfp4ref import e2m1, e4m3

#: What a conversion does with the values that are no ordinary numbers: label -> patterns, both ends included.
SPECIAL = {
    "+0": (0x00000000, 0x00000000),
    "-0": (0x80000000, 0x80000000),
    "smallest subnormal": (0x00000001, 0x00000001),
    "-smallest subnormal": (0x80000001, 0x80000001),
    "+Inf": (0x7F800000, 0x7F800000),
    "-Inf": (0xFF800000, 0xFF800000),
    "+NaN": POSITIVE_NAN,
    "-NaN": NEGATIVE_NAN,
}


def special(runs: Runs) -> dict[str, list[str]]:
    """The codes of the special values on every curve."""
    return {label: [hex(code) for code in runs.codes_between(*ends)] for label, ends in SPECIAL.items()}


def float32_facts(bits: int) -> dict[str, str]:
    """A float32 pattern for a counterexample: in hexadecimal and as a number (text, for NaN is no JSON)."""
    return {"x": f"0x{bits:08X}", "value": str(np.uint32(bits).view(np.float32))}


def encode_e2m1(curve: Array, bits: Array) -> Array:
    """The oracle's E2M1 codes of float32 patterns, on every curve alike."""
    with np.errstate(invalid="ignore"):
        return e2m1.encode(bits.view(np.float32))


def encode_e4m3(curve: Array, bits: Array) -> Array:
    """The oracle's E4M3 bytes of float32 patterns, on every curve alike."""
    with np.errstate(invalid="ignore"):
        return e4m3.encode(bits.view(np.float32))


#: format -> (encode, largest magnitude code, sign bit)
NEAREST = {"e2m1": (encode_e2m1, 7, 8), "e4m3": (encode_e4m3, 0x7E, 0x80)}


@functools.cache
def expected_runs(form: str, curves: int) -> Runs:
    """The oracle's runs over all float32."""
    encode, last, sign = NEAREST[form]
    return float_runs(encode, curves, last, sign)


class NearestProbe(Probe):
    """Every float32 through a conversion to ``form``; ``curves`` names the ways it went."""

    form: str
    curves: tuple[str, ...]

    def collect(self, output: Output) -> dict[str, Array]:
        return stored(read_runs(output, "runs.bin"), "runs")

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        kinds = {"runs_curve": np.uint16, "runs_start": np.uint32, "runs_code": np.uint16}
        required(arrays, {name: (kind, None) for name, kind in kinds.items()})
        runs = restored(arrays, "runs", len(self.curves))
        different, first = compare(runs, expected_runs(self.form, len(self.curves)), self._describe)
        return Findings(ALL * len(self.curves), different, first, {"special": special(runs), "runs": len(runs.start)})

    def _describe(self, curve: int, point: int) -> dict[str, Any]:
        return {"operand": self.curves[curve], **float32_facts(point)}


class RnE2m1(NearestProbe):
    name = "rn-e2m1"
    rules = ("E2M1-RNE", "E2M1-SATURATE", "E2M1-NAN", "E2M1-ZERO")
    what = "Does cvt.rn.satfinite.e2m1x2.f32 give the oracle's E2M1 code for all 2^32 float32, in both operands?"
    architectures = ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
    source = "rn_e2m1.cu"
    instruction = r"F2FP\.SATFINITE\.E2M1\.F32\.PACK_AB_MERGE_C "
    form = "e2m1"
    curves = ("a", "b")


class RnE4m3(NearestProbe):
    name = "rn-e4m3"
    rules = ("E4M3-RNE", "E4M3-SATURATE", "E4M3-NAN")
    what = "Does cvt.rn.satfinite.e4m3x2.f32 give the oracle's E4M3 byte for all 2^32 float32, in both operands?"
    architectures = ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
    source = "rn_e4m3.cu"
    instruction = r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C "
    form = "e4m3"
    curves = ("a", "b")


class Fp4Header(NearestProbe):
    name = "fp4-header"
    rules = ("E2M1-RNE", "E2M1-SATURATE", "E2M1-NAN", "E2M1-ZERO")
    what = (
        "Does NVIDIA's cuda_fp4.h, its own arithmetic compiled for a GPU, give the oracle's code for all 2^32 float32?"
    )
    architectures = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
    source = "fp4_header.cu"
    instruction = r"F2F\.F64\.F32 "  # the header's own arithmetic starts from double
    form = "e2m1"
    curves = ("single", "pair x", "pair y")
