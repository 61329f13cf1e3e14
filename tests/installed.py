"""What a first user does, run by a Python that has nvfp4ref installed from its wheel and nothing else.

    python tests/installed.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import nvfp4ref as nv


def nvfp4(*arguments: str, expect: int = 0) -> str:
    """One command; its standard output."""
    done = subprocess.run([sys.executable, "-m", "conformance.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == expect, f"nvfp4 {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    """Quantize, check, break, diagnose; replay the recordings that the package brings."""
    for module in (nv, sys.modules["numpy"]):
        assert "site-packages" in Path(module.__file__ or "").parts, f"{module.__name__} is not the installed one"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        x = np.linspace(-3, 3, 4096, dtype=np.float32).reshape(64, 64)
        np.save("x.npy", x)
        nvfp4("quantize", "x.npy", "-o", "q.npz", "--both")
        assert "conforms to te" in nvfp4("check", "q.npz")
        q = nv.quantize(x, arithmetic=nv.arithmetic("te", packing="high-nibble-first"))
        nv.save_dump("wrong.npz", x=x, packed=q.packed, scales=q.scales, amax=q.amax)
        assert "packing.high-nibble-first" in nvfp4("check", "wrong.npz", expect=1)
        assert "scaled" in nvfp4("explain", "q.npz", "1", "2")
        nvfp4("dequantize", "q.npz", "-o", "y.npy", "--dtype", "float32")
        assert np.abs(np.load("y.npy") - x).max() < 0.5
        listed = nvfp4("conformance", "backends")
        assert "available: Transformer Engine" in listed and "not available: not installed" in listed
        assert "conforms" in nvfp4("conformance", "run", "--backend", "te-vectors")
    print(f"nvfp4ref {nv.__version__} installed from its wheel: works without extras")


if __name__ == "__main__":
    main()
