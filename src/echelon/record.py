"""Writes down what a run really did, step by step, for whoever wants to prove it: samples, losses, gradients, weights.

FOLDER/rank-0/step-00000001.safetensors   gradient/NAME (mean, before clipping) and model/NAME (after the update)
FOLDER/rank-R/step-00000001.json          sample ids, losses and weights by slice, norm, learning rates, and of every
                                          tensor a hash and the sum of its magnitudes
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

from echelon.agree import Applied
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

    def gradients(self, _step: Step, gradients: Mapping[str, Tensor]) -> None:
        """Called with the agreed mean gradient, before it is clipped and applied."""
        self._gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def step(self, done: StepDone, state: State) -> None:
        """Called once the step is committed."""
        model = {path: tensor for path, tensor in state.tensors.items() if path.startswith("model/")}
        tensors = {**model, **{f"gradient/{name}": gradient for name, gradient in self._gradients.items()}}
        outcome = done.outcome
        norm = outcome.norm if isinstance(outcome, Applied) else None
        entry = {
            "step": done.step.number,
            "samples": self._samples,
            "shares": [[share.start, share.stop] for share in done.shares],
            "losses": outcome.losses,
            "loss": outcome.loss,
            "weight": outcome.weight,
            "applied": isinstance(outcome, Applied),
            "norm": None if norm is None else float(norm),
            "rates": [float(group["lr"]) for group in state.values["optimizer"]["groups"] if "lr" in group],
            "hashes": {path: hash_of(t) for path, t in {**state.tensors, **tensors}.items()},
            "sums": {path: magnitude_of(t) for path, t in tensors.items()},
        }
        name = f"step-{done.step.number:08d}"
        if self._keeps_tensors:
            write_tensors(
                self._folder / f"{name}.safetensors", {path: t.detach().cpu() for path, t in tensors.items()}, {}
            )
        (self._folder / f"{name}.json").write_text(json.dumps(entry))
        self._samples = []
        self._gradients = {}


def hash_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def magnitude_of(tensor: Tensor) -> float:
    """The sum of absolute values: says how far two tensors differ whose hashes do."""
    values = tensor.detach()
    return float((values.abs() if values.is_complex() else values.double().abs()).double().sum())
