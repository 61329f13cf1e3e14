"""Tensors split over devices: the tests of jaxpath_shards.py, in a process whose JAX has eight of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_on_eight_devices() -> None:
    tests = Path(__file__).with_name("jaxpath_shards.py")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(tests)]
    done = subprocess.run(command, cwd=tests.parent.parent, env=env, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
