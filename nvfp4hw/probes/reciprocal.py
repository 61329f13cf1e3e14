"""Probe of rcp.approx.ftz.f32, which the fused kernels' fast-math path uses: a measurement of its error table.

The instruction's bits are not specified; the PTX ISA promises an error of at most one unit in the last place.  The
probe passes when that holds and the table, with the exponent moved and subnormals flushed, gives all 2^32 results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvfp4hw.probes.base import SHOWN, Array, BadRecord, Findings, Output, Probe, required
from nvfp4hw.probes.conversions import float32_facts
from nvfp4hw.probes.runs import ALL, Runs, compare, read_runs, restored, stored

MANTISSAS = 1 << 23
#: SHA-256 of the int8 table of an H200, recorded in vectors/te-kernels-h200/rcp.npz.
HOPPER = "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"


def table_digest(table: Array) -> str:
    """SHA-256 of a table's bytes."""
    return hashlib.sha256(table.astype(np.int8).tobytes()).hexdigest()


class Reciprocal(Probe):
    name = "rcp"
    rules = ("FUSED-RHT-FAST-MATH",)
    what = (
        "What is the error of rcp.approx.ftz.f32 for each of the 2^23 mantissas, does that table give all 2^32 "
        "results, and is it the one of an H200?"
    )
    architectures = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
    source = "rcp.cu"
    instruction = r"MUFU\.RCP "

    def collect(self, output: Output) -> dict[str, Array]:
        table = output.array("table.bin", np.int8, (MANTISSAS,))
        return {"table": table, **stored(read_runs(output, "runs.bin"), "runs")}

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        kinds = {"runs_curve": np.uint16, "runs_start": np.uint32, "runs_code": np.uint16}
        required(arrays, {"table": (np.int8, (MANTISSAS,)), **{name: (kind, None) for name, kind in kinds.items()}})
        table = arrays["table"]
        runs = restored(arrays, "runs", 1)
        if int(runs.code.max()) > 1:
            raise BadRecord("its results are neither as predicted (0) nor otherwise (1)")
        zero = np.zeros(1, np.uint32)
        predicted = Runs(zero.astype(np.uint16), zero, zero.astype(np.uint16), 1)
        different, first = compare(runs, predicted, lambda curve, point: float32_facts(point))
        beyond = np.flatnonzero(np.abs(table.astype(np.int16)) > 1)
        first = [
            {**float32_facts(0x3F800000 | int(m)), "error in ulp": int(table[m]), "promised": "at most 1"}
            for m in beyond[: SHOWN - len(first)]
        ] + first
        digest = table_digest(table)
        hopper = digest == HOPPER
        if str(record.get("architecture", "")).startswith("sm_90") and not hopper:
            first.append({"what": "the table is not the one recorded on an H200", "found": digest, "expected": HOPPER})
        facts = {
            "table": digest,
            "table_is_hopper": hopper,
            "off_by_one": int(np.count_nonzero(table)),
            "beyond": int(beyond.size),
        }
        return Findings(ALL + MANTISSAS, different + int(beyond.size), first[:SHOWN], facts, on_device=ALL)
