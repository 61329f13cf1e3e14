"""Speed of the JAX path: on a GPU against the card's memory, on a CPU against the NumPy oracle on the same core.

    python benchmarks/jax_quantize.py [--size N] [--rounds 5] [--check]

GPU (size 16384 unless said): calls are queued back to back, so that their launches are hidden.  The floor of a call is
the bytes that it must move, the input twice (amax comes first) and codes and scales once, over the bandwidth of a plain
device-to-device copy, bytes read plus bytes written, measured here.
CPU (size 2048): one core, turns of the oracle and of the compiled JAX path interleaved, the fastest of each.

With --check the exit status is 1 when a required ratio is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

GPU_REQUIRED = {"quantize": 0.65, "row + column, Hadamard, stochastic": 0.3}
CPU_REQUIRED = {"bfloat16": 1.0, "float32": 1.0}
QUEUED = 20
ONE_THREAD = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
}


def milliseconds(function: Callable[..., Any], *arguments: Any, rounds: int) -> float:
    """Of one call in a queue of QUEUED; the fastest of the rounds."""
    import jax

    jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(QUEUED):
            last = function(*arguments)
        jax.block_until_ready(last)
        best = min(best, time.perf_counter() - start)
    return best / QUEUED * 1e3


def waited(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result, when it is there."""
    import jax

    return jax.block_until_ready(function(*arguments))


def on_gpu(size: int, rounds: int) -> dict[str, float]:
    """Ratios of the floor, and a printed table."""
    import jax
    import jax.numpy as jnp

    import nvfp4ref as nv
    from nvfp4hw import jaxpath
    from nvfp4hw.jaxpath import kernel

    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    key = jax.random.key(1)
    copy = min(milliseconds(jax.jit(f), x, rounds=rounds) for f in (jnp.copy, jnp.negative))
    bandwidth = 2 * x.nbytes / copy * 1e3
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {size}x{size} bfloat16")
    print(f"copy {bandwidth / 1e12:.2f} TB/s read plus written")

    row = partial(jaxpath.quantize, block=(1, 16))
    both = partial(jaxpath.quantize_both, rht=nv.RHT())
    results = x.nbytes / 4 + x.nbytes / 32  # codes and scales
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
        "amax": (kernel.amax, (x,), x.nbytes),
        "quantize": (row, (x,), 2 * x.nbytes + results),
        "16x16": (partial(jaxpath.quantize, block=(16, 16)), (x,), 2 * x.nbytes + results),
        "stochastic": (
            lambda x, key: jaxpath.quantize(x, rounding="stochastic", rbits=key),
            (x, key),
            2 * x.nbytes + results,
        ),
        "row + column": (jaxpath.quantize_both, (x,), 2 * x.nbytes + 2 * results),
        "row + column, Hadamard": (both, (x,), 2 * x.nbytes + 2 * results),
        "row + column, Hadamard, stochastic": (
            lambda x, key: both(x, rounding="stochastic", rbits=key),
            (x, key),
            2 * x.nbytes + 2 * results,
        ),
    }
    ratios = {}
    print(f"{'':38}{'ms':>8}{'floor':>8}{'ratio':>7}")
    for name, (function, arguments, bytes_) in calls.items():
        found, floor = milliseconds(jax.jit(function), *arguments, rounds=rounds), bytes_ / bandwidth * 1e3
        ratios[name] = floor / found
        print(f"{name:38}{found:8.3f}{floor:8.3f}{ratios[name]:7.2f}")
    return ratios


def on_cpu(size: int, rounds: int) -> dict[str, float]:
    """Ratios of the oracle's time to the JAX path's, and a printed table."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    import nvfp4ref as nv
    from nvfp4hw import jaxpath

    x = np.random.default_rng(0).standard_normal((size, size), np.float32)
    words = np.random.default_rng(1).integers(0, 2**32, (size, size // 4), np.uint32)
    bf16 = x.astype(ml_dtypes.bfloat16)
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "bfloat16": (bf16, {}),
        "float32": (x, {}),
        "16x16": (bf16, {"block": (16, 16)}),
        "columnwise": (bf16, {"axis": 0}),
        "columnwise, Hadamard": (bf16, {"axis": 0, "rht": nv.RHT()}),
        "stochastic": (bf16, {"rounding": "stochastic", "rbits": words}),
        "row-scaled": (bf16, {"arithmetic": nv.arithmetic("te", row_scaled=True)}),
        "4over6": (bf16, {"arithmetic": "four-over-six"}),
    }
    print(f"jax {jax.__version__}, {size}x{size}, bfloat16 unless said, one core; million elements a second")
    print(f"{'':24}{'oracle':>8}{'jax':>8}{'ratio':>7}")
    ratios = {}
    for name, (array, options) in calls.items():
        fixed = {k: v for k, v in options.items() if k != "rbits"}
        random = [jnp.asarray(options["rbits"])] if "rbits" in options else [None]
        compiled = jax.jit(lambda x, rbits, fixed=fixed: jaxpath.quantize(x, rbits=rbits, **fixed))
        placed = jnp.asarray(array)
        turns: tuple[Callable[[], Any], ...] = (
            partial(nv.quantize, array, **options),
            partial(waited, compiled, placed, *random),
        )
        best = [float("inf"), float("inf")]
        for turn in turns:
            turn()
        for _ in range(rounds):
            for i, turn in enumerate(turns):
                start = time.perf_counter()
                turn()
                best[i] = min(best[i], time.perf_counter() - start)
        ratios[name] = best[0] / best[1]
        print(f"{name:24}{array.size / best[0] / 1e6:8.0f}{array.size / best[1] / 1e6:8.0f}{ratios[name]:7.2f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the JAX path on the default device.")
    parser.add_argument("--size", type=int, help="rows and columns, a multiple of 128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a required ratio is missed")
    parser.add_argument("--pinned", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or (options.size is not None and (options.size < 128 or options.size % 128)):
        parser.error("size is a positive multiple of 128, rounds at least 1")
    if options.pinned:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ratios, required = on_cpu(options.size or 2048, options.rounds), CPU_REQUIRED
    else:
        import jax

        if jax.default_backend() != "gpu":  # again in a process that is pinned before JAX has threads
            return subprocess.run([sys.executable, __file__, *sys.argv[1:], "--pinned"], env=ONE_THREAD).returncode
        ratios, required = on_gpu(options.size or 16384, options.rounds), GPU_REQUIRED
    missed = [f"{name}: {ratios[name]:.2f} of {needed}" for name, needed in required.items() if ratios[name] < needed]
    if missed:
        print("missed: " + "; ".join(missed))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
