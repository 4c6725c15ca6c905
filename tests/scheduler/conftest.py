"""Properties here are tried on the same examples every time, however fast the machine is: a test that fails, fails
again. tests/system/scheduler looks for new ones."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
