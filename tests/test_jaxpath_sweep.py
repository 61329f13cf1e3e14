"""The sweep and the benchmark of the JAX path: what they cover, what they say, and that the sweep sees a fault."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv

jax = pytest.importorskip("jax")

from nvfp4hw import jaxpath  # noqa: E402
from nvfp4hw.jaxpath import sweep  # noqa: E402

ROWWISE = sweep.Call("rowwise", {})
BOTH = sweep.Call("both, Hadamard", {"rht": nv.RHT(), "rounding": "stochastic"}, True, both=True)
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "jax_quantize.py"


def test_every_call_meets_every_kind_in_every_dtype_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 24 of its turns; and the calls are those of the issue."""
    met: set[tuple[str, str, str, bool]] = set()
    kinds = [lambda random, size, dtype, n=n: np.full((size, size), n, dtype) for n in range(4)]

    def quantizer(call: sweep.Call) -> Any:
        def run(x: Any, key: Any, compiled: bool = False) -> Any:
            met.add((call.name, x.dtype.name, str(int(x[0, 0])), compiled))
            return ()

        return run

    monkeypatch.setattr(sweep, "KINDS", kinds)
    monkeypatch.setattr(sweep, "_run", quantizer)
    monkeypatch.setattr(sweep, "_expected", lambda *given: [])
    monkeypatch.setattr(sweep.jax, "jit", lambda run: lambda x, key: run(x, key, True))
    turns = 24 * sum(call.share for call in sweep.CALLS)
    for n, _ in enumerate(sweep.sweep(1, 16), 1):
        if n == turns:
            break
    for call in sweep.CALLS:
        dtypes = {"bfloat16"} if call.bfloat16 else {"bfloat16", "float32", "float16"}
        expected = {(call.name, d, str(k), c) for d in dtypes for k in range(4) for c in (False, True)}
        assert {each for each in met if each[0] == call.name} == expected
    names = {call.name for call in sweep.CALLS}
    assert {"rowwise", "16x16", "columnwise, Hadamard", "stochastic", "row-scaled", "4over6", "both"} <= names


def test_the_kinds() -> None:
    for dtype in sweep.DTYPES:
        for kind in sweep.KINDS:
            x = kind(np.random.default_rng(0), 64, dtype).astype(np.float32)
            assert x.shape == (64, 64) and not np.isinf(x).any() and (x != 0).any()
    lattice = sweep._lattice(np.random.default_rng(0), 64, np.dtype(np.float32))
    steps = nv.quantize(lattice).steps
    assert steps.global_scale == 3 and np.isin(np.abs(steps.scaled), (1.75, 2.5, 3.5, 5)).any()


def with_fault(function: Callable[..., Any], field: str) -> Callable[..., Any]:
    """The last value of a field of the last result changed."""

    def changed(a: Any) -> Any:
        flat = jax.lax.bitcast_convert_type(a, jax.numpy.uint32 if a.dtype == jax.numpy.float32 else a.dtype).reshape(
            -1
        )
        return jax.lax.bitcast_convert_type(flat.at[-1].add(flat.dtype.type(1)).reshape(a.shape), a.dtype)

    def run(*args: Any, **how: Any) -> Any:
        found = function(*args, **how)
        *others, q = found if isinstance(found, tuple) else (found,)
        parts = {name: getattr(q, name) for name in ("packed", "scales", "amax")}
        parts[field] = changed(parts[field])
        q = type(q)(**parts, block=q.block, arithmetic=q.arithmetic)
        return (*others, q) if others else q

    return run


@pytest.mark.parametrize("call", [ROWWISE, BOTH], ids=lambda call: call.name)
def test_a_fault_is_seen(call: sweep.Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "CALLS", (call,))
    monkeypatch.setattr(sweep, "DTYPES", sweep.DTYPES[:1])
    results = 2 if call.both else 1
    monkeypatch.setattr(sys, "argv", ["sweep", "--size", "32", "--elements", str(2 * 32 * 32 * results)])
    assert sweep.main() == 0
    text = capsys.readouterr().out
    assert f"jax {jax.__version__}" in text and f"{2048 * results:,} elements      0 differ   bfloat16" in text
    for field in ("packed",) if call.both else ("packed", "scales", "amax"):
        right = (jaxpath.quantize, jaxpath.quantize_both)
        faulty = SimpleNamespace(**{f.__name__: with_fault(f, field) for f in right})
        monkeypatch.setattr(sweep, "jaxpath", faulty)
        assert sweep.main() == 1
        assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["2", "differ"]  # one a tensor


@pytest.mark.parametrize("arguments", [["--size", "24"], ["--elements", "0"], ["--threads", "0"]])
def test_what_it_is_asked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2


# -- the benchmark ---------------------------------------------------------------------------------------------


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("jax_quantize", BENCHMARK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, pinned to one core; a call with its ratio a line."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--size", "128", "--rounds", "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"jax {jax.__version__}, 128x128" in lines[0] and lines[2].startswith("bfloat16") and len(lines) >= 10
    assert subprocess.run([sys.executable, str(BENCHMARK), "--size", "100"], capture_output=True).returncode == 2


def test_a_missed_ratio_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = benchmark()
    for ratio, status in ((1.5, 0), (0.5, 1)):
        monkeypatch.setattr(
            module, "on_cpu", lambda size, rounds, ratio=ratio: dict.fromkeys(module.CPU_REQUIRED, ratio)
        )
        monkeypatch.setattr(module.os, "sched_setaffinity", lambda *given: None, raising=False)
        monkeypatch.setattr(sys, "argv", ["jax_quantize", "--pinned", "--check"])
        assert module.main() == status
        assert ("missed: bfloat16: 0.50 of 1.0" in capsys.readouterr().out) == bool(status)
