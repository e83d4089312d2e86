"""One plain process that computes what a job means: every slice in order, one update a step, nothing clever.

Written independently of the machinery, from the documented rules alone: it imports nothing of the data, layout,
agreement, loop or session code (import-linter checks it), so that a mistake there cannot hide here as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, Diverged, UserError, users_code
from echelon.job import Job
from echelon.proof.chance import Chance, state
from echelon.proof.norms import Norms, Row
from echelon.proof.reading import Samples
from echelon.proof.rules import Lesson, Piece, derive, lesson, steps_per_epoch
from echelon.proof.sums import ExactSum, accumulate, exact_norm


@dataclass(frozen=True, kw_only=True)
class Computed:
    """One micro-batch. `total` is the summed loss; `gradients` are of it, or unless exact of a mean's part of the mean.

    `drew`: random numbers were drawn after the samples had been made. `changed`: buffers that forward changed.
    """

    index: int
    total: float
    weight: float
    is_mean: bool
    gradients: dict[str, Tensor]
    row: Row
    drew: bool
    changed: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Done:
    """One step of the reference. `norm` is that which it clipped by, if it did."""

    lesson: Lesson
    losses: tuple[tuple[float, float], ...]
    weight: float
    gradients: dict[str, Tensor]
    norm: float | None
    drew: bool
    changed: frozenset[str]

    @property
    def loss(self) -> float:
        total = 0.0
        for loss, _ in self.losses:
            total += loss
        return total / self.weight if self.weight else 0.0


class Reference:
    """The job's model, data and optimizer in this one process."""

    def __init__(self, job: Job, *, exact: bool, device: torch.device) -> None:
        self.job = job
        self.exact = exact
        self.device = device
        Chance().set(derive(job.seed, "init"))
        with users_code("making the model"):
            self.module: nn.Module = job.model().to(device).train()
        with users_code("making the dataset"):
            data: Any = job.data
            Chance().set(derive(job.seed, "data"))
            is_factory = isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__"))
            dataset = data() if is_factory else data
        if not len(dataset):
            raise ConfigError("data", "it is empty; there is nothing to train on")
        self.size = len(dataset)
        self._samples = Samples(dataset, job.collate, job.seed)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.norms = Norms(self.module)
        self._chance = Chance(self.module, job.loss)
        self._call: Any = torch.compile(self.module) if job.compile else self.module
        self._sum = ExactSum(self.parameters, job.slices) if exact else None
        with users_code("making the optimizer and its schedule"):
            self.optimizer = job.optimizer(list(self.parameters.values()))
            self.schedule = job.schedule(self.optimizer) if job.schedule else None

    @property
    def total_steps(self) -> int:
        if self.job.steps is not None:
            return self.job.steps
        return (self.job.epochs or 0) * steps_per_epoch(self.size, self.job.batch)

    @property
    def merging_draws(self) -> bool:
        """Whether the model, the loss or the collate function hold generators, or look at random state."""
        return self._chance.can_draw or self._samples.collate_can_draw

    def lesson(self, number: int) -> Lesson:
        job = self.job
        return lesson(number, size=self.size, batch=job.batch, slices=job.slices, seed=job.seed)

    def step(self, number: int) -> Done:
        """Compute step `number` and apply its update. The model is then as it is after that step."""
        task = self.lesson(number)
        computed = self.compute(task, task.pieces)
        self.check(task, computed)
        weight = math.fsum(c.weight for c in computed)
        losses = [(0.0, 0.0)] * self.job.slices
        for c in computed:
            losses[c.index] = (c.total, c.weight)
        gradients, norm = {}, None
        if weight:
            gradients = self.mean(computed, weight)
            norm = self.update(gradients)
            self.norms.apply(c.row for c in computed)
        else:
            if self._sum is not None:
                self._sum.fit([c.gradients for c in computed])
            self.advance()
        return Done(
            lesson=task,
            losses=tuple(losses),
            weight=weight,
            gradients=gradients,
            norm=norm,
            drew=any(c.drew for c in computed),
            changed=frozenset().union(*(c.changed for c in computed)),
        )

    def compute(self, task: Lesson, pieces: Iterable[Piece]) -> list[Computed]:
        """Every piece that has samples, in order. BatchNorm's running statistics are left as they were."""
        before = self.norms.read()
        try:
            return [self._compute(task, piece, before) for piece in pieces if piece.ids]
        finally:
            self.norms.write(before)

    def read(self, task: Lesson, piece: Piece) -> Any:
        """A piece's batch, with the random state set for its forward."""
        value = derive(self.job.seed, "slice", task.number, piece.index)
        with users_code("reading the dataset"):
            batch = self._samples.read(task.epoch, piece.ids, value)
        self._chance.set_held(value)
        return move(batch, self.device)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | float | None]:
        """The loss function's value, as (total or mean, weight or None)."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.job.precision == "bf16" else nullcontext():
            value: Any = self.job.loss(self._call, batch)
        return value if isinstance(value, tuple) else (value, None)

    def _compute(self, task: Lesson, piece: Piece, norms: Row) -> Computed:
        batch = self.read(task, piece)
        at_start = self._samples.state_after_seeding
        self.norms.write(norms)
        buffers = self.other_buffers()
        versions = {name: (id(b), b._version) for name, b in buffers.items()}
        with users_code("computing the loss"):
            value, weight = self.forward(batch)
        drew = state() != at_start
        row = self.norms.read()
        changed = {name for name, b in self.other_buffers().items() if versions[name] != (id(b), b._version)}
        if value.numel() != 1:
            raise UserError(-1, "loss must return a scalar tensor, or (sum, weight)")
        samples = len(piece.ids)
        seed = 1.0 if weight is not None else samples / (1 if self.exact else task.samples)
        self.module.zero_grad(set_to_none=True)
        with users_code("running backward"):
            value.backward(torch.full_like(value, seed))
        gradients = {name: p.grad.detach() for name, p in self.parameters.items() if p.grad is not None}
        self.module.zero_grad(set_to_none=True)
        return Computed(
            index=piece.index,
            total=value.item() * (len(piece.ids) if weight is None else 1),
            weight=float(len(piece.ids)) if weight is None else float(weight),
            is_mean=weight is None,
            gradients=gradients,
            row=row,
            drew=drew,
            changed=frozenset(changed),
        )

    def check(self, task: Lesson, computed: Sequence[Computed]) -> None:
        for c in computed:
            if not (math.isfinite(c.total) and math.isfinite(c.weight)):
                raise Diverged(
                    task.number, f"the loss of slice {c.index} is {c.total}, in one process as well", rank=-1
                )
            for name, gradient in c.gradients.items() if self.exact else ():
                if not bool(torch.isfinite(gradient).all()):
                    raise Diverged(
                        task.number,
                        f"the gradient of {name} is not finite in slice {c.index}, in one process as well",
                        rank=-1,
                    )

    def mean(self, computed: Sequence[Computed], weight: float) -> dict[str, Tensor]:
        """The gradient of the mean loss."""
        if self._sum is not None:
            return self._sum.mean([c.gradients for c in computed], weight)
        total: dict[str, Tensor] = {}
        for c in computed:
            accumulate(total, c.gradients)
        return total if computed[0].is_mean else {name: gradient / weight for name, gradient in total.items()}

    def update(self, gradients: Mapping[str, Tensor]) -> float | None:
        """Clip by the global norm, step the optimizer and its schedule. The norm, if it was needed."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        norm = None
        if self.job.clip is not None:
            there = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            norm = exact_norm(there) if self.exact else torch.nn.utils.get_total_norm(list(there.values()))
            factor = (self.job.clip / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
            for gradient in there.values():
                gradient.mul_(factor)
        with users_code("stepping the optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.advance()
        return None if norm is None else float(norm)

    def advance(self) -> None:
        if self.schedule is not None:
            with users_code("stepping the schedule"):
                self.schedule.step()

    def other_buffers(self) -> dict[str, Tensor]:
        """Persistent buffers other than BatchNorm's running statistics."""
        kept = set(self.module.state_dict(keep_vars=True)) - self.norms.names
        return {name: buffer for name, buffer in self.module.named_buffers() if name in kept}

    def model(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, as they are now."""
        kept = set(self.module.state_dict(keep_vars=True))
        tensors = dict(self.module.named_parameters()) | {n: b for n, b in self.module.named_buffers() if n in kept}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these values into the model."""
        with torch.no_grad():
            for name, tensor in self.model().items():
                tensor.copy_(tensors[name])

    def set_grids(self, grids: Sequence[int] | None) -> None:
        """Go on with these grids of the exact sum, one for each bucket."""
        if self._sum is not None and grids:
            self._sum.k = list(grids)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state by PARAMETER/KEY. What belongs to no parameter is not compared."""
        kept = self.optimizer.state
        return {f"{name}/{key}": v for name, p in self.parameters.items() if p in kept for key, v in kept[p].items()}

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device, whatever it is made of."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, dict):
        return type(batch)((key, move(value, device)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
