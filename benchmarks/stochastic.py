"""Speed of stochastic rounding beside other libraries' random numbers, on one core in the same minutes.

    python benchmarks/stochastic.py [--size 4096] [--rounds 7] [--check]

All of it runs in one process, on one core and one thread, in turns: a round runs each contender once, and the
fastest run of each counts.  Speeds are in millions of elements a second.  Generators make one 32-bit word for four
elements, as the kernels use them, so that their speeds compare with "Philox words"; a library that is not installed
is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

REQUIRED = {"quantize, words given": 60.0, "quantize, words included": 25.0}
ONE_THREAD = {
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}
Run = Callable[[], Any]


def oracle_runs(size: int) -> dict[str, Run]:
    import ml_dtypes
    import numpy as np

    import nvfp4ref as nv

    x = np.random.default_rng(0).standard_normal((size, size), np.float32).astype(ml_dtypes.bfloat16)
    philox = nv.Philox(1234, 0)
    words = philox.words(x.shape)
    uniforms = np.random.default_rng(1).random(x.shape, np.float32)

    def quantize(rbits: Any, rule: str = "sm100", **how: Any) -> Any:
        ar = nv.arithmetic("te", stochastic=rule)
        return nv.quantize(x, rounding="stochastic", rbits=rbits, arithmetic=ar, **how)

    columnwise = philox.words(x.shape, 0)
    return {
        "quantize, words given": lambda: quantize(words),
        "quantize, words included": lambda: quantize(philox),
        "  columnwise, words given": lambda: quantize(columnwise, axis=0),
        "  rule te-fallback, words given": lambda: quantize(words, "te-fallback"),
        "  rule ideal, uniforms given": lambda: quantize(uniforms, "ideal"),
        "  nearest even": lambda: nv.quantize(x),
        "Philox words": lambda: philox.words(x.shape),
    }


def generator_runs(size: int) -> dict[str, Run]:
    """Other generators of size·size/4 words."""
    import numpy as np

    count = size * size // 4
    runs: dict[str, Run] = {}
    for name in ("Philox", "PCG64"):
        generator = np.random.Generator(getattr(np.random, name)(1))
        runs[f"numpy {name}"] = lambda g=generator: g.integers(0, 2**32, count, np.uint32)
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        out = torch.empty(count, dtype=torch.int32)
        runs["torch"] = lambda: out.random_(-(2**31), 2**31 - 1)
    if importlib.util.find_spec("jax"):
        import jax

        key = jax.random.key(1)
        threefry = jax.jit(lambda k: jax.random.bits(k, (count,), jax.numpy.uint32))
        state = jax.numpy.array([1, 2, 3, 4], jax.numpy.uint32)
        algorithm = jax.lax.RandomAlgorithm.RNG_PHILOX
        philox = jax.jit(lambda s: jax.lax.rng_bit_generator(s, (count,), jax.numpy.uint32, algorithm)[1])
        runs["jax Threefry"] = lambda: jax.block_until_ready(threefry(key))
        runs["jax Philox"] = lambda: jax.block_until_ready(philox(state))
    return runs


def fastest(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds of the fastest run of each, the runs taking turns; the first turn is not counted."""
    seconds = dict.fromkeys(runs, float("inf"))
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def main() -> int:
    """1 when --check is given and a speed is below what is required."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns; default 4096")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, of which the fastest counts")
    parser.add_argument("--check", action="store_true", help="fail below 60 and 25 million elements a second")
    options = parser.parse_args()
    os.environ.update(ONE_THREAD)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    ours = oracle_runs(options.size)
    seconds = fastest(ours | generator_runs(options.size), options.rounds)
    speeds = {name: options.size**2 / 1e6 / s for name, s in seconds.items()}
    print(f"one core, {options.size}x{options.size} bfloat16, fastest of {options.rounds}\n")
    print(f"{'':<34}{'Melem/s':>9}{'seconds':>9}{'beside Philox words':>22}")
    for name, speed in speeds.items():
        ratio = "" if name in ours else f"{speeds['Philox words'] / speed:20.2f} x"
        print(f"{name:<34}{speed:9.0f}{seconds[name]:9.3f}{ratio:>22}")
    slow = [name for name, least in REQUIRED.items() if speeds[name] < least]
    for name, least in REQUIRED.items():
        print(f"{name}: {speeds[name]:.0f} Melem/s, required {least:.0f}: {'slow' if name in slow else 'ok'}")
    return int(options.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
