"""Speed of quantize() beside other NVFP4 quantizers, each on one core of the same machine in the same minutes.

    python benchmarks/quantize.py [--size 4096] [--rounds 5] [--turn 0.5] [--only NAME]… [--check]

Every contender lives in a child process of its own, pinned to one core and told to use one thread before its
libraries load.  The rounds are interleaved: each contender has a turn of half a second or one run, of which its
fastest run counts, then each has another, so that a slow minute of the machine slows all of them.

A run is a whole quantization of a (size, size) matrix, 1x16 blocks, tensor amax included: packed codes and E4M3
scales.  jax-nn is timed without packing, as the package leaves it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

CONTENDERS = ("nvfp4ref", "jax-nn", "torchao", "modelopt", "compressed-tensors", "te-reference")
PEERS = ("jax-nn", "torchao", "modelopt")  # the fastest of these is what nvfp4ref is measured against
DTYPES = ("float32", "bfloat16")
REQUIRED = {"peer": 2.0, "te-reference": 6.0, "memory": 0.6}
ONE_THREAD = {
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}
Run = Callable[[], Any]


# -- the contenders, each imported in its own child ------------------------------------------------------------


def nvfp4ref_runs(x: Any) -> dict[str, Run]:
    """The plain path, which is compared, and the others, which are shown."""
    import numpy as np

    import nvfp4ref as nv

    q = nv.quantize(x)
    runs: dict[str, Run] = {
        "nvfp4ref": lambda: nv.quantize(x),
        "  threads=2": lambda: _with_cores(2, lambda: nv.quantize(x, threads=2)),
        "  amax given": lambda: nv.quantize(x, amax=q.amax),
        "  axis=0": lambda: nv.quantize(x, axis=0),
        "  16x16": lambda: nv.quantize(x, block=(16, 16)),
        "  4over6": lambda: nv.quantize(x, arithmetic="four-over-six"),
        "  dequantize": lambda: nv.dequantize(q, x.dtype),
    }
    if x.dtype != np.float32:
        runs["  RHT"] = lambda: nv.quantize(x, rht=nv.RHT())
    return runs


def jax_nn_runs(x: Any) -> dict[str, Run]:
    """JAX's quantize, jitted together with the amax."""
    import jax
    import jax.numpy as jnp

    from nvfp4hw.backends.jax_nn import BACKEND

    quantize, config = BACKEND._objects()
    matrix = jnp.asarray(x)
    jitted = jax.jit(lambda m: quantize(m, config("nvfp4", jnp.max(jnp.abs(m)).astype(jnp.float32) / 2688)))
    wait: Any = jax.block_until_ready
    return {"jax-nn": lambda: wait(jitted(matrix))}


def torchao_runs(x: Any) -> dict[str, Run]:
    import torch

    from nvfp4hw.backends import _package
    from nvfp4hw.backends.torchao import BACKEND

    torch.set_num_threads(1)
    to_nvfp4, amax_to_scale = BACKEND._objects()
    matrix = _package.to_torch(x)
    return {
        "torchao": lambda: to_nvfp4(matrix, per_tensor_scale=amax_to_scale(torch.max(torch.abs(matrix)))),
    }


def modelopt_runs(x: Any) -> dict[str, Run]:
    import torch

    from nvfp4hw.backends import _package
    from nvfp4hw.backends.modelopt import BACKEND

    torch.set_num_threads(1)
    quantize, _ = BACKEND._objects()
    matrix = _package.to_torch(x)
    return {"modelopt": lambda: quantize(matrix, 16)}


def compressed_tensors_runs(x: Any) -> dict[str, Run]:
    import torch

    from nvfp4hw.backends.base import Case
    from nvfp4hw.backends.compressed_tensors import BACKEND

    torch.set_num_threads(1)
    BACKEND._objects()
    backend, case = BACKEND(), Case("bench", "bench", x)
    return {"compressed-tensors": lambda: backend.quantize(case)}


def te_reference_runs(x: Any) -> dict[str, Run]:
    import torch

    from nvfp4hw.backends import _package, te_reference

    torch.set_num_threads(1)
    te_reference.BACKEND._objects()
    module = te_reference.reference()
    quantizer = module.NVFP4QuantizerRef(
        dtype=module.reference_utils.Fp4Formats.E2M1, rowwise=True, columnwise=False, quant_tile_shape=(1, 16)
    )
    matrix = _package.to_torch(x)
    return {"te-reference": lambda: quantizer.quantize(matrix)}


RUNS: dict[str, Callable[[Any], dict[str, Run]]] = {
    "nvfp4ref": nvfp4ref_runs,
    "jax-nn": jax_nn_runs,
    "torchao": torchao_runs,
    "modelopt": modelopt_runs,
    "compressed-tensors": compressed_tensors_runs,
    "te-reference": te_reference_runs,
}


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _pin(cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _with_cores(count: int, run: Run) -> Any:
    """Run on the last ``count`` of the machine's cores, then go back to the one core."""
    before = _cores()
    _pin(json.loads(os.environ["BENCHMARK_CORES"])[-count:] or before)
    try:
        return run()
    finally:
        _pin(before)


def matrices(size: int) -> dict[str, Any]:
    """The same normal numbers as float32 and bfloat16."""
    import ml_dtypes
    import numpy as np

    x = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    return {"float32": x, "bfloat16": x.astype(ml_dtypes.bfloat16)}


# -- the child -------------------------------------------------------------------------------------------------


def serve(contender: str, size: int, turn: float) -> None:
    """Answer each line "dtype name" on standard input with the seconds of one run, after saying what there is."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not disturb the conversation
    _pin(json.loads(os.environ["BENCHMARK_CORES"])[-1:] or _cores())
    try:
        runs = {dtype: RUNS[contender](x) for dtype, x in matrices(size).items()}
        for found in runs.values():
            for run in found.values():
                run()  # compile, page in
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"not run": str(error)}), file=answers)
        return
    print(json.dumps({dtype: list(found) for dtype, found in runs.items()}), file=answers)
    for line in sys.stdin:
        dtype, _, name = line.rstrip("\n").partition(" ")
        print(best_seconds(runs[dtype][name], turn), file=answers)


def best_seconds(run: Run, turn: float) -> float:
    """The fastest of the runs that fit into a turn, at least one: what else the core does only adds."""
    spent, best = 0.0, float("inf")
    while best == float("inf") or spent < turn:
        start = time.perf_counter()
        result = run()
        took = time.perf_counter() - start
        del result
        spent, best = spent + took, min(best, took)
    return best


def memory(size: int) -> None:
    """Print the peak of additional memory of one quantize(), besides its output, as multiples of the input."""
    import nvfp4ref as nv

    paths: dict[str, dict[str, Any]] = {"nvfp4ref": {}, "  axis=0": {"axis": 0}, "  16x16": {"block": (16, 16)}}
    found = {}
    for dtype, x in matrices(size).items():
        for name, options in paths.items():
            nv.quantize(x[:16, :16])
            tracemalloc.start()
            q = nv.quantize(x, **options)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            found[f"{dtype} {name}"] = (peak - q.packed.nbytes - q.scales.nbytes) / x.nbytes
    print(json.dumps(found))


# -- the parent ------------------------------------------------------------------------------------------------


class Child:
    """One contender's process, and what it can run."""

    def __init__(self, contender: str, size: int, turn: float) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--serve", contender]
        command += ["--size", str(size), "--turn", str(turn)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        first = self._answer()
        self.reason: str | None = first.get("not run") if first else "its process ended; see what it says alone"
        self.runs: dict[str, list[str]] = {} if self.reason else first

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def seconds(self, dtype: str, name: str) -> float:
        assert self.process.stdin is not None
        print(dtype, name, file=self.process.stdin, flush=True)
        answer = self._answer()
        if answer is None:
            raise RuntimeError(f"{name} ended during the benchmark")
        return float(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _environment() -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path, "BENCHMARK_CORES": json.dumps(_cores())}


def measure(children: dict[str, Child], rounds: int) -> dict[str, dict[str, list[float]]]:
    """dtype -> name -> seconds of each round, the contenders taking turns."""
    times: dict[str, dict[str, list[float]]] = {dtype: {} for dtype in DTYPES}
    for _ in range(rounds):
        for dtype in DTYPES:
            for child in children.values():
                for name in child.runs.get(dtype, ()):
                    times[dtype].setdefault(name, []).append(child.seconds(dtype, name))
    return times


def table(times: dict[str, list[float]], extra: dict[str, float], elements: int) -> list[str]:
    """Lines of one dtype: median, throughput, how many times nvfp4ref's time, range, extra memory."""
    base = statistics.median(times["nvfp4ref"]) if "nvfp4ref" in times else None
    lines = [
        f"{'':20} {'median ms':>10} {'Melem/s':>9} {'x nvfp4ref':>11} {'best … worst ms':>20} {'extra memory':>13}"
    ]
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        span = f"{min(seconds) * 1e3:.1f} … {max(seconds) * 1e3:.1f}"
        ratio = f"{middle / base:.2f}" if base else ""
        more = f"{extra[name]:.2f} x input" if name in extra else ""
        lines.append(f"{name:20} {middle * 1e3:10.1f} {elements / middle / 1e6:9.1f} {ratio:>11} {span:>20} {more:>13}")
    return lines


def verdicts(times: dict[str, list[float]], extra: dict[str, float]) -> list[tuple[bool, str]]:
    """Each requirement of one dtype: whether it is met, and in words."""
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    found = []
    peers = {name: middle[name] for name in PEERS if name in middle}
    if peers:
        fastest = min(peers, key=peers.__getitem__)
        ratio = peers[fastest] / middle["nvfp4ref"]
        found.append((ratio >= REQUIRED["peer"], f"{ratio:.2f} x the fastest peer, {fastest} (required 2, aim 3)"))
    if "te-reference" in middle:
        ratio = middle["te-reference"] / middle["nvfp4ref"]
        found.append(
            (ratio >= REQUIRED["te-reference"], f"{ratio:.1f} x Transformer Engine's Python reference (required 6)")
        )
    if extra:
        found.append(
            (
                extra["nvfp4ref"] <= REQUIRED["memory"],
                f"{extra['nvfp4ref']:.2f} x the input's bytes besides the output (allowed 0.6)",
            )
        )
    return found


def extra_memory(size: int) -> dict[str, float]:
    command = [sys.executable, os.path.abspath(__file__), "--memory", "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise RuntimeError(f"the memory measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of nvfp4ref beside other NVFP4 quantizers, one core each.")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender; their median counts")
    parser.add_argument("--turn", type=float, default=0.5, help="seconds of one turn")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="contenders to run (default: all)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size < 16 or options.size % 16 or options.rounds < 1:
        parser.error("size is a positive multiple of 16, rounds a positive number")
    if options.serve:
        serve(options.serve, options.size, options.turn)
        return 0
    if options.memory:
        memory(options.size)
        return 0
    return report(options.only or list(CONTENDERS), options)


def report(contenders: list[str], options: argparse.Namespace) -> int:
    size, rounds = options.size, options.rounds
    children = {name: Child(name, size, options.turn) for name in contenders}
    try:
        times = measure(children, rounds)
    finally:
        for child in children.values():
            child.close()
    extra = extra_memory(size) if "nvfp4ref" in contenders else {}
    met = True
    for dtype in DTYPES:
        mine = {key.partition(" ")[2]: value for key, value in extra.items() if key.startswith(dtype)}
        print(f"\n{size}x{size} {dtype}, 1x16 with amax, one core, median of {rounds} interleaved rounds")
        print("\n".join(table(times[dtype], mine, size * size)))
        if "nvfp4ref" in times[dtype]:
            for good, words in verdicts(times[dtype], mine):
                print(f"{'met ' if good else 'MISSED'}  {words}")
                met &= good
    for name, child in children.items():
        if child.reason:
            print(f"not run: {name}: {child.reason}")
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
