"""Speed of the bit-accurate matmul() beside plain float64 BLAS and beside a Python model that goes word by word.

    python benchmarks/gemm.py [--size 1024] [--rounds 9] [--layer 8192] [--check]

The rounds are interleaved: every contender runs once, then each once more, so that a slow minute of the machine
slows all of them; the ratio is the median of the rounds' ratios.  A run is the whole call: NVFP4Tensors in,
float32 out.  BLAS multiplies float64 matrices of the same size and uses its own threads.  The Python model is
timed over some hundred words and extrapolated.  "windowed" operands have scales so far apart that no word may be
taken exactly.  The last line is the peak memory of a process that multiplies 1024 tokens by a square layer.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import nvfp4ref as nv  # noqa: E402

REQUIRED = {"share of BLAS": 0.25, "times Python": 1000.0, "gigabytes": 8.0}
TOKENS = 1024  # of the layer whose memory is measured
Run = Callable[[], Any]


# -- operands ------------------------------------------------------------------------------------------------------


def normal(size: int, seed: int) -> nv.NVFP4Tensor:
    return nv.quantize(np.random.default_rng(seed).standard_normal((size, size)).astype(np.float32))


def far_apart(size: int, seed: int) -> nv.NVFP4Tensor:
    """Every block's scale the smallest or the largest there is, at random: 28 binades apart in every word."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (size, size // 2), np.uint8)
    scales = rng.choice(np.array([0x01, 0x7E], np.uint8), (size, size // 16))
    return nv.NVFP4Tensor.from_arrays(packed, scales, np.float32(2688))


# -- contenders ----------------------------------------------------------------------------------------------------


def contenders(size: int) -> dict[str, Run]:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((size, size)), rng.standard_normal((size, size))
    a, b = normal(size, 0), normal(size, 1)
    far_a, far_b = far_apart(size, 3), far_apart(size, 4)
    return {
        "float64 BLAS": lambda: x @ y.T,
        "matmul": lambda: nv.matmul(a, b),
        "  threads=1": lambda: nv.matmul(a, b, threads=1),
        "  windowed": lambda: nv.matmul(far_a, far_b),
        "  window39-k4, windowed": lambda: nv.matmul(far_a, far_b, model="window39-k4"),
        "  group64": lambda: nv.matmul(a, b, model="group64"),
        "  exact": lambda: nv.matmul(a, b, model="exact"),
        "  fp32": lambda: nv.matmul(a, b, model="fp32"),
    }


HALVES = (0, 1, 2, 3, 4, 6, 8, 12)


def python_word(a: list[int], b: list[int], c: float, sa: list[int], sb: list[int]) -> float:
    """One word of the default model, one product at a time: what a straightforward emulator does."""
    groups = []
    for g in range(4):
        total = 0
        for x, y in zip(a[16 * g : 16 * g + 16], b[16 * g : 16 * g + 16], strict=True):
            product = HALVES[x & 7] * HALVES[y & 7]
            total += -product if (x ^ y) & 8 else product
        (ma, ea), (mb, eb) = ((s & 7 | 8, (s >> 3) - 7) if s >> 3 else (s & 7, -6) for s in (sa[g], sb[g]))
        groups.append((total * ma * mb, ea + eb))
    floor = max([e for _, e in groups] + ([math.frexp(c)[1] - 1] if c else [])) - 35
    units = int(c * 2.0**-floor)
    for total, e in groups:
        shift = e - 8 - floor
        cut = abs(total) << shift if shift >= 0 else abs(total) >> -shift
        units += -cut if total < 0 else cut
    extra = max(abs(units).bit_length() - 24, 0)
    cut = abs(units) >> extra << extra
    return (-cut if units < 0 else cut) * 2.0**floor


def python_seconds(size: int, words: int = 400) -> float:
    """Seconds for a size³ product by the Python model, from the time of some words."""
    a, b = normal(64, 0), normal(64, 1)
    operands = [q.codes[0].tolist() for q in (a, b)] + [q.scales[0].tolist() for q in (a, b)]
    codes_a, codes_b, scales_a, scales_b = operands
    start = time.perf_counter()
    c = 0.0
    for _ in range(words):
        c = python_word(codes_a, codes_b, c, scales_a, scales_b)
    return (time.perf_counter() - start) / words * size * size * -(-size // 64)


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """name -> seconds of each round, the contenders taking turns after one run each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def peak_gigabytes(layer: int) -> float:
    """Peak memory of a process of its own that quantizes and multiplies (TOKENS, layer) by (layer, layer)."""
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, os.path.abspath(__file__), "--serve-layer", str(layer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return float(done.stdout)


def serve_layer(layer: int) -> None:
    rng = np.random.default_rng(0)
    x = nv.quantize(rng.standard_normal((TOKENS, layer), np.float32))
    w = nv.quantize(rng.standard_normal((layer, layer), np.float32), block=(16, 16))
    nv.matmul(x, w)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9)


def ratios(times: dict[str, list[float]], name: str) -> list[float]:
    """BLAS's seconds over this contender's, round by round."""
    return [blas / mine for blas, mine in zip(times["float64 BLAS"], times[name], strict=True)]


def report(size: int, rounds: int, layer: int, check: bool) -> int:
    times = measure(contenders(size), rounds)
    python = python_seconds(size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{size}x{size}x{size}, {cores} cores, median of {rounds} interleaved rounds")
    print(f"{'':24} {'median ms':>10} {'share of BLAS':>14} {'best … worst ms':>20}")
    for name, seconds in times.items():
        span = f"{min(seconds) * 1e3:.1f} … {max(seconds) * 1e3:.1f}"
        share = statistics.median(ratios(times, name))
        print(f"{name:24} {statistics.median(seconds) * 1e3:10.1f} {share:14.2f} {span:>20}")
    print(f"{'Python, word by word':24} {python * 1e3:10.0f}   extrapolated")

    share, faster = statistics.median(ratios(times, "matmul")), python / statistics.median(times["matmul"])
    verdicts = [
        (share >= REQUIRED["share of BLAS"], f"{share:.2f} of the speed of float64 BLAS (required 0.25)"),
        (faster >= REQUIRED["times Python"], f"{faster:,.0f} x the Python model (required 1000)"),
    ]
    if layer:
        used = peak_gigabytes(layer)
        words = f"{used:.2f} GB at the peak of {TOKENS}x{layer}x{layer} (allowed {REQUIRED['gigabytes']:.0f})"
        verdicts.append((used <= REQUIRED["gigabytes"], words))
    for met, words in verdicts:
        print(f"{'met ' if met else 'MISSED'}  {words}")
    return 1 if check and not all(met for met, _ in verdicts) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the bit-accurate matmul beside float64 BLAS.")
    parser.add_argument("--size", type=int, default=1024, help="rows, columns and K, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each contender; the median counts")
    parser.add_argument("--layer", type=int, default=8192, help="width of the layer for the memory; 0: none")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    parser.add_argument("--serve-layer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_layer:
        serve_layer(options.serve_layer)
        return 0
    if options.size < 64 or options.size % 64 or options.rounds < 1 or options.layer < 0 or options.layer % 64:
        parser.error("size is a positive multiple of 64, rounds a positive number, layer a multiple of 64 or 0")
    return report(options.size, options.rounds, options.layer, options.check)


if __name__ == "__main__":
    sys.exit(main())
