"""Where tensors live: turns a worker's slices into local gradients."""

from echelon.layout.build import build_module, check_module, model_tensors, parameters_of, persistent_buffers
from echelon.layout.statistics import RunningStatistics, too_small
from echelon.layout.whole import Microbatches, SliceLoss, StepResult, WholeModel, Window

__all__ = [
    "Microbatches",
    "RunningStatistics",
    "SliceLoss",
    "StepResult",
    "WholeModel",
    "Window",
    "build_module",
    "check_module",
    "model_tensors",
    "parameters_of",
    "persistent_buffers",
    "too_small",
]
