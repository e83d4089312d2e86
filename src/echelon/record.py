"""Writes down what a run really did, step by step, for whoever wants to prove it: samples, losses, gradients, parameters.

    FOLDER/rank-0/step-00000001.safetensors   gradient/NAME (mean, before clipping) and model/NAME (after the update)
    FOLDER/rank-R/step-00000001.json          sample ids, losses and weights by slice, norm, a hash of every tensor
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint import write_tensors
from echelon.comm import Group
from echelon.loop import StepDone
from echelon.slices import Step
from echelon.state import State


class Recorder:
    """One rank's record. Rank 0 keeps the tensors, the others their hashes."""

    def __init__(self, folder: Path, group: Group) -> None:
        self._folder = folder / f"rank-{group.rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keeps_tensors = group.rank == 0
        self._samples: list[list[int]] = []
        self._gradients: dict[str, Tensor] = {}

    def samples(self, ids: np.ndarray[Any, Any]) -> None:
        """Called whenever samples are read for training."""
        self._samples.append([int(i) for i in ids])

    def gradients(self, step: Step, gradients: Mapping[str, Tensor]) -> None:
        """Called with the agreed mean gradient, before it is clipped and applied."""
        self._gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def step(self, done: StepDone, state: State) -> None:
        """Called once the step is committed."""
        model = {path: tensor for path, tensor in state.tensors.items() if path.startswith("model/")}
        tensors = {**model, **{f"gradient/{name}": gradient for name, gradient in self._gradients.items()}}
        entry = {
            "step": done.step.number,
            "samples": self._samples,
            "losses": done.outcome.losses,
            "loss": done.outcome.loss,
            "weight": done.outcome.weight,
            "hashes": {path: hash_of(tensor) for path, tensor in tensors.items()},
        }
        name = f"step-{done.step.number:08d}"
        if self._keeps_tensors:
            write_tensors(self._folder / f"{name}.safetensors", {path: t.detach().cpu() for path, t in tensors.items()}, {})
        (self._folder / f"{name}.json").write_text(json.dumps(entry))
        self._samples = []
        self._gradients = {}


def hash_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
