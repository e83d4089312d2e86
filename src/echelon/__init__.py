"""Echelon: one system for distributed training in Python, on PyTorch.

Names are imported when they are first used, so that the command line starts without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.api import launch, train
    from echelon.data.columns import Columns
    from echelon.job import Evaluate, Job
    from echelon.plan import Plan
    from echelon.proof import verify
    from echelon.result import Result

__version__ = "0.1.0"

_HOMES = {
    "Columns": "echelon.data.columns",
    "Evaluate": "echelon.job",
    "Job": "echelon.job",
    "Plan": "echelon.plan",
    "Result": "echelon.result",
    "launch": "echelon.api",
    "train": "echelon.api",
    "verify": "echelon.proof",
}

__all__ = ["Columns", "Evaluate", "Job", "Plan", "Result", "launch", "train", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
