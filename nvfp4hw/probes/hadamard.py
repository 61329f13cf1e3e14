"""Probes of the random Hadamard transform on bfloat16 tensor cores: the raw sums of more than 10^8 outputs.

The program makes its inputs from a hash, chunk by chunk (2^16 vectors of 16, one of eight kinds of data), compares
every sum and its rounding with the integer model on the device, and keeps one 64-bit digest for each of the first 128
chunks: Σ (bfloat16·2^32 + float32 bits)·weight mod 2^64 with odd weights that depend on the place, so that one changed
word changes the digest.  Here the oracle makes the same inputs and recomputes every digest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nvfp4hw.probes.base import SHOWN, Array, BadRecord, Findings, Output, Probe, is_simulated, required
from nvfp4hw.probes.stochastic import hashed
from nvfp4ref import hadamard
from nvfp4ref.fp32 import from_bfloat16, to_bfloat16

VECTORS = 1 << 16
CHUNK = VECTORS * 16
DIGESTED = 128  # chunks whose digests a real record has: 134,217,728 outputs
SAMPLED = 32  # vectors of each kind whose sums are kept as they are
KINDS = (
    "any pattern",
    "any finite number",
    "8 exponents",
    "32 exponents",
    "16 exponents",
    "subnormal and just above",
    "up to the largest",
    "zeros and cancellation",
)


def vectors(chunk: int) -> Array:
    """The bfloat16 patterns of a chunk, (2^16, 16)."""
    pairs = np.arange(VECTORS * 8, dtype=np.uint32)
    random = hashed(hashed(np.array([chunk], np.uint32)) ^ pairs).astype("<u4").view("<u2")
    kept, choice = random & 0x807F, random >> 7 & 0xFF

    def exponent(first: int, count: int) -> Array:
        out: Array = kept | (first + choice % count) << 7
        return out

    kind = chunk % len(KINDS)
    if kind == 0:
        x = random
    elif kind == 1:
        x = kept | np.where(choice == 255, 127, choice) << 7
    elif kind < 7:
        x = exponent(*{2: (120, 8), 3: (110, 32), 4: (118, 16), 5: (0, 16), 6: (239, 16)}[kind])
    else:
        x = np.where(choice & 1, random & 0x8000, (random & 0x8040) | (124 + choice % 8) << 7)
    return x.astype(np.uint16).reshape(VECTORS, 16)


def sums(patterns: Array) -> Array:
    """The oracle's float32 sums of vectors (n, 16), one row each."""
    with np.errstate(all="ignore"):
        columns = hadamard.accumulate(from_bfloat16(np.ascontiguousarray(patterns.T)), hadamard.RHT(round_to="float32"))
    return np.ascontiguousarray(columns.T)


@functools.cache
def weights() -> Array:
    """Odd 64-bit weights of a chunk's outputs."""
    place = np.arange(CHUNK, dtype=np.uint32)
    out: Array = hashed(place).astype(np.uint64) << np.uint64(32) | hashed(~place) | np.uint64(1)
    return out


def digest(total: Array) -> int:
    """Digest of a chunk's sums, (2^16, 16) float32."""
    words = total.reshape(-1).view(np.uint32).astype(np.uint64)
    words |= to_bfloat16(total.reshape(-1)).astype(np.uint64) << np.uint64(32)
    return int((words * weights()).sum(dtype=np.uint64))


@functools.cache
def expected(chunk: int) -> tuple[int, Array]:
    """The oracle's digest of a chunk, and the sums of its first vectors as bit patterns."""
    total = sums(vectors(chunk))
    return digest(total), total[:SAMPLED].view(np.uint32).copy()


class Hadamard(Probe):
    name = "rht"
    rules = ("RHT-MATRIX", "RHT-SUM", "RHT-ROUND", "RHT-SPECIAL")
    what = (
        "Do bfloat16 tensor cores (mma.sync) give the oracle's raw float32 sums of the random Hadamard transform, on "
        "data of every range?"
    )
    architectures: tuple[str, ...] = (
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_110a",
        "sm_120a",
        "sm_121a",
    )
    source = "rht.cu"
    instruction = r"HMMA\.16816\.F32\.BF16 "

    def collect(self, output: Output) -> dict[str, Array]:
        digested, _ = output.integers("chunks", 2)
        return {
            "digests": output.array("digests.bin", "<u8", (digested,)).astype(np.uint64),
            "samples": output.array("samples.bin", "<u4", (len(KINDS), SAMPLED, 16)).astype(np.uint32),
        }

    def stated(self, output: Output) -> dict[str, Any]:
        return {
            "chunks_on_device": output.integers("chunks", 2)[1],
            "device_rounded_different": output.integers("rounded")[0],
        }

    def examine(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Findings:
        required(arrays, {"digests": (np.uint64, None), "samples": (np.uint32, (len(KINDS), SAMPLED, 16))})
        digests, samples = arrays["digests"], arrays["samples"]
        chunks = len(KINDS) if is_simulated(record) else DIGESTED
        if len(digests) != chunks:
            raise BadRecord(f"it has digests of {len(digests)} chunks; expected {chunks}")
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            oracle = list(pool.map(expected, range(len(digests))))
        first: list[dict[str, Any]] = []
        different = 0
        for chunk, (ours, _) in enumerate(oracle):
            if int(digests[chunk]) != ours:
                different += 1
                first.append(
                    {
                        "chunk": chunk,
                        "data": KINDS[chunk % len(KINDS)],
                        "found": hex(digests[chunk]),
                        "expected": hex(ours),
                    }
                )
        shown = []
        for kind, (_, sampled) in enumerate(oracle[: len(KINDS)]):
            places = np.argwhere(samples[kind] != sampled)
            different += len(places)
            shown += [self._describe(kind, v, j, samples[kind], sampled) for v, j in places[:1].tolist()]
        first = shown + first
        facts = {"digested": len(digests), "kinds": list(KINDS)}
        chunks_there = record.get("chunks_on_device")
        if type(chunks_there) is not int or chunks_there < chunks:
            raise BadRecord(f"the device compared {chunks_there} chunks; expected {chunks} or more")
        rounded = record.get("device_rounded_different")
        if type(rounded) is not int or rounded:
            first.append({"what": "sums that the device rounded otherwise", "found": rounded, "expected": 0})
        return Findings(len(digests) * CHUNK, different, first[:SHOWN], facts, on_device=chunks_there * CHUNK)

    @staticmethod
    def _describe(kind: int, vector: int, j: int, found: Array, ours: Array) -> dict[str, Any]:
        return {
            "data": KINDS[kind],
            "x": [f"0x{int(bits):04X}" for bits in vectors(kind)[vector]],
            "output": j,
            "found": f"0x{int(found[vector, j]):08X}",
            "expected": f"0x{int(ours[vector, j]):08X}",
        }


class HadamardTcgen05(Hadamard):
    name = "rht-tcgen05"
    what = (
        "Does tcgen05.mma with bfloat16, which the fused kernels use, give the oracle's raw float32 sums of the random "
        "Hadamard transform?"
    )
    architectures = ("sm_100a", "sm_103a")
    source = "rht_tcgen05.cu"
    instruction = r"UTCHMMA "
