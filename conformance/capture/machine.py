"""The machine of a recording: devices, driver and the packages that decide bits.  No names of hosts or people."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance.capture.bundle import without_folders

#: Distributions, by the start of their names, whose versions are written down.
_PACKAGES = (
    *("torch", "triton", "jax", "flax", "transformer-engine", "transformer_engine", "nvidia-", "flashinfer"),
    *("torchao", "compressed-tensors", "vllm", "cutlass", "cuda-", "cupy", "nvfp4ref", "safetensors"),
)
_QUERY = ("name", "compute_cap", "driver_version")


def facts() -> dict[str, Any]:
    """What a recording depends on: oracle, Python, packages, devices; a reason where there is no device."""
    devices, reason = gpus()
    return {
        "oracle": oracle(),
        "environment": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
        },
        "packages": packages(),
        "gpus": devices,
        "no_gpu": reason and without_folders(reason),
    }


def oracle() -> dict[str, str]:
    """Versions of the oracle and its specification, and a hash of its source: states of one version are told apart."""
    said = hashlib.sha256()
    folder = Path(nv.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        said.update(path.relative_to(folder).as_posix().encode())
        said.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return {"nvfp4ref": nv.__version__, "specification": nv.SPEC_VERSION, "sha256": said.hexdigest()}


def packages() -> dict[str, str]:
    """Installed distributions that may decide bits, and their versions."""
    found = ((str(one.metadata["Name"]).lower(), one.version) for one in metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name.startswith(_PACKAGES)))


def gpus() -> tuple[list[dict[str, str]], str | None]:
    """NVIDIA devices as nvidia-smi names them: name, compute capability, driver.  [] comes with the reason."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    except FileNotFoundError:
        return [], "nvidia-smi is not on PATH: no NVIDIA driver is installed, or the container was not given the GPU"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi cannot be run: {error}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or any(len(row) != len(_QUERY) for row in rows) or not rows:
        said = " ".join((done.stdout + done.stderr).split())[:300]
        return [], f"nvidia-smi finds no device (exit code {done.returncode}): {said}"
    return [{"name": name, "compute_capability": cap, "driver": driver} for name, cap, driver in rows], None


def described(header: dict[str, Any]) -> str:
    """The devices of a recording in a few words, or why there are none."""
    counted: dict[str, int] = {}
    for one in header.get("gpus") or []:
        said = f"{one['name']} (compute capability {one['compute_capability']}, driver {one['driver']})"
        counted[said] = counted.get(said, 0) + 1
    if not counted:
        return f"no GPU: {header.get('no_gpu')}"
    return ", ".join(said if n == 1 else f"{n} × {said}" for said, n in counted.items())


def recorder(header: dict[str, Any]) -> str:
    """The oracle beside which a recording was made, in a few words."""
    oracle = header.get("oracle") or {}
    return f"nvfp4ref {oracle.get('nvfp4ref')}, specification {oracle.get('specification')}"
