"""Settings shared by all tests."""

from __future__ import annotations

import os

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
