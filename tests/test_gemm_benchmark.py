"""benchmarks/gemm.py runs, its Python model is the oracle's, and its operands are what it says they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nvfp4ref import gemm

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gemm.py"


@pytest.fixture(name="benchmark")
def imported() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gemm_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_a_small_run() -> None:
    done = run("--size", "64", "--rounds", "1", "--layer", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("64x64x64, ") and "median of 1 interleaved rounds" in lines[0]
    for name in ("float64 BLAS", "matmul", "  windowed", "Python, word by word"):
        assert any(line.startswith(name) for line in lines)
    assert any("GB at the peak of 1024x64x64 (allowed 8)" in line and line.startswith("met") for line in lines)
    assert run("--size", "64", "--rounds", "1", "--layer", "0", "--check").returncode in (0, 1)


def test_sizes_that_are_no_words_are_refused() -> None:
    done = run("--size", "96")
    assert done.returncode == 2 and "size is a positive multiple of 64" in done.stderr


def test_the_python_model_is_the_oracle(benchmark: ModuleType) -> None:
    for operands in (benchmark.normal, benchmark.far_apart):
        a, b = operands(128, 0), operands(128, 1)
        found = np.zeros((4, 4), np.float32)
        for i, j in np.ndindex(4, 4):
            c = 0.0
            for w in range(2):
                codes, scales = slice(64 * w, 64 * w + 64), slice(4 * w, 4 * w + 4)
                c = benchmark.python_word(
                    a.codes[i, codes].tolist(), b.codes[j, codes].tolist(), c,
                    a.scales[i, scales].tolist(), b.scales[j, scales].tolist(),
                )  # fmt: skip
            found[i, j] = c
        np.testing.assert_array_equal(found, gemm.accumulate(a, b)[:4, :4])


def test_far_apart_operands_are_windowed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    words = []
    plain = gemm._windowed_word
    monkeypatch.setattr(gemm, "_windowed_word", lambda *given: words.append(given[2]) or plain(*given))
    gemm.accumulate(benchmark.far_apart(128, 3), benchmark.far_apart(128, 4))
    assert sorted(words) == [0, 0, 1, 1]  # both words of both tiles
