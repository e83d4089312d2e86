"""Which terms of a plan can run today. All others are understood, and refused by name before any worker starts."""

from __future__ import annotations

from echelon.errors import ConfigError
from echelon.plan.value import Plan

AVAILABLE = frozenset({"dp"})


def check_available(plan: Plan) -> None:
    for feature, term in plan.terms().items():
        if feature not in AVAILABLE:
            raise ConfigError(term, "is not available yet; dp is")
