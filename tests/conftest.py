"""Settings shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# the slow twin works in exact rationals, so an example has no deadline; on a public CI runs repeat exactly
settings.register_profile(
    "nvfp4ref",
    deadline=None,
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nvfp4ref")


@pytest.fixture(autouse=True, scope="module")
def no_compiled_functions_are_kept() -> Iterator[None]:
    """What XLA compiled for one file takes memory, gigabytes in all, and serves no other."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
