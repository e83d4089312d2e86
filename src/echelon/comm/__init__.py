"""Bytes between ranks: joining, collectives with a bound on every wait, and a meter of what was sent.

Importing this is enough for any PyTorch program to say `dist.init_process_group("echelon")`.
"""

from echelon.comm.backend import Options, register
from echelon.comm.group import Group, Pending
from echelon.comm.join import Meeting, join, leave
from echelon.comm.meter import Meter
from echelon.comm.traffic import Snapshot

__all__ = ["Group", "Meeting", "Meter", "Options", "Pending", "Snapshot", "join", "leave"]

register()
