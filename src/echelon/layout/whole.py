"""The whole model on one worker: slices in, gradients in `.grad` and one loss a slice out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, UserError
from echelon.layout.statistics import RunningStatistics
from echelon.randomness import Generators, slice_seed
from echelon.slices import Slice, Step

MIXED_LOSS = "loss returned a mean for one slice and (sum, weight) for another; it must always return the same"

Window = Callable[[bool], AbstractContextManager[None]]
"""`window(last)` is entered around each backward; `last` says that no other of this step follows on this worker."""


class Batches(Protocol):
    """Reads samples by position of an epoch, and leaves the random state that `seed` stands for."""

    def read(self, epoch: int, start: int, stop: int, seed: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class SliceLoss:
    """The summed loss and the weight of a slice (or of several merged ones, under the first one's index)."""

    index: int
    total: Tensor
    weight: Tensor | float


@dataclass(kw_only=True)
class StepResult:
    """What a worker computed, filled while it computes.

    `scaled`: gradients carry 1 / (the step's samples) already; None when it computed nothing. `buffers_changed`: forward
    changed buffers other than BatchNorm's.
    """

    losses: list[SliceLoss] = field(default_factory=list)
    scaled: bool | None = None
    buffers_changed: bool = False


class WholeModel:
    """Runs forward and backward of this worker's slices.

    Exact: every slice alone, backward from the sum of its samples' losses. Otherwise neighbouring slices are merged into
    micro-batches of at most `microbatch` samples, unless merging would change the result (BatchNorm) or is turned off.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Any],
        batches: Batches,
        statistics: RunningStatistics,
        *,
        seed: int,
        device: torch.device,
        rank: int,
        merge: bool,
        exact: bool,
        microbatch: int | None,
        bf16: bool,
        compiled: bool,
    ) -> None:
        self._module = module
        self._callable = torch.compile(module) if compiled else module
        self._loss = loss
        self._batches = batches
        self._statistics = statistics
        self._seed = seed
        self._device = device
        self._rank = rank
        self._merge = merge and not exact and not statistics
        self._exact = exact
        self._microbatch = microbatch
        self._bf16 = bf16
        self._guard = BufferGuard(module, statistics.names, exact)
        self._generators = Generators.of(module, loss)

    def run(self, step: Step, mine: range, window: Window, result: StepResult) -> None:
        """Compute this worker's slices of the step. Gradients accumulate in `.grad`, under the window."""
        groups = group_slices(step.slices[mine.start : mine.stop], self._merge, self._microbatch)
        self._statistics.begin()
        try:
            for position, group in enumerate(groups):
                loss = self._forward(step, group, result)
                result.losses.append(loss)
                scale = 1.0 / step.samples if result.scaled else 1.0
                with window(position == len(groups) - 1):
                    (loss.total * scale).backward()  # type: ignore[no-untyped-call]
        finally:
            self._statistics.end()
        if not groups:
            with window(True):
                pass

    def _forward(self, step: Step, group: Sequence[Slice], result: StepResult) -> SliceLoss:
        first, last = group[0], group[-1]
        seed = slice_seed(self._seed, step.number, first.index)
        batch = to_device(self._batches.read(step.epoch, first.start, last.stop, seed), self._device)
        if self._generators.held:
            self._generators.set_held(seed)
        self._statistics.open()
        self._guard.open()
        with torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext():
            value = self._loss(self._callable, batch)
        self._guard.close()
        result.buffers_changed = bool(self._guard.changed)
        if self._statistics:
            self._statistics.close(first.index)
        is_pair = isinstance(value, tuple)
        scaled = not is_pair and not self._exact
        if result.scaled not in (None, scaled):
            raise UserError(self._rank, MIXED_LOSS)
        result.scaled = scaled
        total, weight = value if is_pair else (value, None)
        self._check(total, step, first)
        if weight is None:
            samples = last.stop - first.start
            return SliceLoss(index=first.index, total=total * samples, weight=float(samples))
        return SliceLoss(index=first.index, total=total, weight=weight.detach() if isinstance(weight, Tensor) else float(weight))

    def _check(self, total: object, step: Step, first: Slice) -> None:
        where = f"in step {step.number}, slice {first.index}"
        if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
            shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise UserError(self._rank, f"loss returned {shape} {where}; it must return a scalar tensor, or (sum, weight)")
        if not total.requires_grad:
            raise UserError(self._rank, f"the loss {where} does not depend on any parameter; was it detached, or made under no_grad?")


def group_slices(slices: Sequence[Slice], merge: bool, microbatch: int | None) -> list[tuple[Slice, ...]]:
    """Slices to compute together: neighbours, at most `microbatch` samples; empty slices are left out."""
    groups: list[list[Slice]] = []
    for piece in slices:
        if not len(piece):
            continue
        samples = piece.stop - groups[-1][0].start if groups else 0
        if groups and merge and (microbatch is None or samples <= microbatch):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [tuple(group) for group in groups]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((key, to_device(value, device)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class BufferGuard:
    """Notices buffers, other than BatchNorm's, that forward changes: their value would depend on who computed what."""

    def __init__(self, module: nn.Module, known: frozenset[str], exact: bool) -> None:
        persistent = set(module.state_dict(keep_vars=True))
        self._owners = [
            (name, owner, key)
            for prefix, owner in module.named_modules()
            for key in owner._buffers
            for name in [f"{prefix}.{key}" if prefix else key]
            if name in persistent and name not in known
        ]
        self._exact = exact
        self._before: list[tuple[int, int]] = []
        self.changed: set[str] = set()

    def open(self) -> None:
        self._before = list(self._marks())

    def close(self) -> None:
        for (name, owner, _), before, after in zip(self._owners, self._before, self._marks(), strict=True):
            if before != after and name not in self.changed:
                if self._exact:
                    raise ConfigError(
                        "exact",
                        f"forward changes the buffer {name} of {type(owner).__name__}; only BatchNorm's running statistics "
                        "can be applied in slice order. Make it non-persistent if it is a cache, or train without --exact",
                    )
                self.changed.add(name)

    def _marks(self) -> Iterator[tuple[int, int]]:
        for _, owner, key in self._owners:
            buffer = owner._buffers[key]
            yield (0, 0) if buffer is None else (id(buffer), buffer._version)
