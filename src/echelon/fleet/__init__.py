"""Starting, watching over and outliving workers. Nothing here imports torch in the launching process."""

from __future__ import annotations

from echelon.fleet.launcher import launch
from echelon.fleet.start import PRELOAD, Start, WorkerStart
from echelon.fleet.tether import Tether

__all__ = ["PRELOAD", "Start", "Tether", "WorkerStart", "launch"]
