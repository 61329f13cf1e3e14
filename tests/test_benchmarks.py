"""The benchmark runs: its children answer, its table and its verdicts are made of what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "quantize.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_a_small_run_of_the_oracle_alone() -> None:
    done = run("--size", "64", "--rounds", "1", "--turn", "0", "--only", "nvfp4ref")
    assert done.returncode == 0, done.stderr
    for dtype in ("float32", "bfloat16"):
        assert f"64x64 {dtype}, 1x16 with amax, one core" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("nvfp4ref ")]
    assert len(rows) == 2 and all("x input" in row and " 1.00 " in row for row in rows)
    assert "RHT" in done.stdout and "dequantize" in done.stdout


def test_sizes_that_are_no_multiple_of_16_are_refused() -> None:
    done = run("--size", "100")
    assert done.returncode == 2 and "size is a positive multiple of 16" in done.stderr
