"""Starting, watching over and outliving workers. Nothing here imports torch in the launching process."""

from __future__ import annotations

from echelon.fleet.launcher import launch
from echelon.fleet.start import Start, WorkerStart
from echelon.fleet.tether import Tether

__all__ = ["Start", "Tether", "WorkerStart", "launch"]
