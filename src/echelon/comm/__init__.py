"""Bytes between ranks: joining, collectives with a bound on every wait, and a meter of what was sent."""

from echelon.comm.group import Group, Pending
from echelon.comm.join import Meeting, join, leave
from echelon.comm.meter import Meter

__all__ = ["Group", "Meeting", "Meter", "Pending", "join", "leave"]
