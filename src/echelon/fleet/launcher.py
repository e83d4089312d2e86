"""Starts workers on this machine, watches them to the end and turns whatever happens into results or one cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.fleet.start import Start


def launch(start: Start, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """The `done` payload of each rank, or the typed root cause raised. Nothing it started is left behind."""
    raise NotImplementedError
