"""Which terms of a plan can run today. All others are understood, and refused by name before any worker starts."""

from __future__ import annotations

from echelon.errors import ConfigError
from echelon.plan.parts import TOPOLOGIES, listed
from echelon.plan.value import Plan

AVAILABLE = frozenset({"dp", *TOPOLOGIES})

_AVAILABLE = listed(("dp", *TOPOLOGIES))


def resolve_available(plan: Plan, workers: int) -> Plan:
    """The plan on exactly so many workers. Who asks for too few workers, and for a term that cannot run either, is told
    both at once.
    """
    missing = next((term for feature, term in plan.terms().items() if feature not in AVAILABLE), None)
    try:
        resolved = plan.resolve(workers)
    except ConfigError as error:
        besides = f" (besides, {missing} is not available yet; {_AVAILABLE} are)" if missing else ""
        raise ConfigError(error.term, error.why + besides) from None
    if missing:
        raise ConfigError(missing, f"is not available yet; {_AVAILABLE} are")
    return resolved
