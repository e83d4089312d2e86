"""What all tests share: property tests are bounded by cases, never by the clock of a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("echelon", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echelon")
