"""Hypothesis profiles: the same small set of examples at every run, or a longer random search."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline and no alarm about slow generation: both measure the load of the machine, and the
# first call of a kernel also reads it from disk.
settings.register_profile(
    "default",
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "check",
    max_examples=400,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
