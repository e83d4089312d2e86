"""The whole model on one worker: slices in, gradients in `.grad` and one loss a slice out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, UserError, users_code
from echelon.layout.coming import fetch, send
from echelon.layout.guard import Guard
from echelon.layout.statistics import RunningStatistics, normalises_by_batch
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
    """The summed loss and the weight of a slice (or of several merged ones, under the first one's index).

    A GPU may still be computing them; `float` waits. `value` is what backward starts from, `scale` its gradient.
    """

    index: int
    total: SupportsFloat
    weight: SupportsFloat
    value: Tensor
    scale: float


@dataclass(kw_only=True)
class StepResult:
    """What a worker computed, filled while it computes.

    `means`: losses were means, not (sum, weight); None when it computed nothing. `changed`: parameters, and buffers
    other than BatchNorm's, that forward was seen to change, in this step or before.
    """

    losses: list[SliceLoss] = field(default_factory=list)
    means: bool | None = None
    changed: frozenset[str] = frozenset()


class Microbatches:
    """Cuts a worker's share of a step into micro-batches and keeps the books around each forward and backward.

        begin  ( read  [forward]  account  backward ) for each group  end

    Exact: every slice alone, backward from the sum of its samples' losses. Otherwise neighbouring slices are merged
    into micro-batches of at most `microbatch` samples, unless merging would change the result (BatchNorm) or is
    turned off.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Batches,
        statistics: RunningStatistics,
        find_generators: Callable[[], Generators],
        *,
        seed: int,
        device: torch.device,
        rank: int,
        merge: bool,
        exact: bool,
        microbatch: int | None,
    ) -> None:
        self._batches = batches
        self._statistics = statistics
        self._find_generators = find_generators
        self._generators = find_generators()
        self._is_first = True
        self._seed = seed
        self._device = device
        self._rank = rank
        self._merge = merge and not exact and not normalises_by_batch(module)
        self._exact = exact
        self._microbatch = microbatch
        self._guard = Guard(module, statistics.names, exact)

    def groups(self, step: Step, mine: range) -> list[tuple[Slice, ...]]:
        return group_slices(step.slices[mine.start : mine.stop], self._merge, self._microbatch)

    def begin(self) -> None:
        self._statistics.begin()

    def end(self) -> None:
        self._statistics.end()

    def read(self, step: Step, group: Sequence[Slice]) -> Any:
        """The samples of some neighbouring slices, with the random state set for their forward."""
        first, last = group[0], group[-1]
        seed = slice_seed(self._seed, step.number, first.index)
        with users_code("reading the dataset", self._rank):
            batch = to_device(self._batches.read(step.epoch, first.start, last.stop, seed), self._device)
        if self._generators.held:
            self._generators.set_held(seed)
        self._statistics.open()
        self._guard.open()
        return batch

    def account(self, step: Step, group: Sequence[Slice], value: Any, result: StepResult) -> SliceLoss:
        """Take what the loss function returned for the group into the result."""
        first, last = group[0], group[-1]
        self._guard.close()
        if self._is_first:
            self._look_for_new_generators()
        result.changed = frozenset(self._guard.buffers | self._guard.parameters)
        if self._statistics:
            self._statistics.close(first.index)
        is_pair = isinstance(value, tuple)
        if is_pair and len(value) != 2:
            raise UserError(
                self._rank, f"loss returned a tuple of {len(value)}; it must return a scalar tensor, or (sum, weight)"
            )
        if result.means is is_pair:
            raise UserError(self._rank, MIXED_LOSS)
        result.means = not is_pair
        scaled = not is_pair and not self._exact
        total, weight = value if is_pair else (value, None)
        self._check(total, step, first)
        samples = last.stop - first.start
        scale = 1.0 if is_pair else samples / step.samples if scaled else float(samples)
        factor = 1.0 if is_pair else float(samples)
        loss = SliceLoss(
            index=first.index,
            total=fetch(total.detach(), factor),
            weight=_weight(weight, self._rank) if is_pair else float(samples),
            value=total,
            scale=scale,
        )
        result.losses.append(loss)
        return loss

    @property
    def changed_parameters(self) -> frozenset[str]:
        """What forward was seen to change that only the optimizer should."""
        return frozenset(self._guard.parameters)

    def _look_for_new_generators(self) -> None:
        """The first forward may have made some; what they drew in it had no seed of ours."""
        self._is_first = False
        before, self._generators = self._generators, self._find_generators()
        if self._exact and self._generators.count > before.count:
            raise ConfigError(
                "exact",
                "the model, or the loss, made a random generator in its first forward, too late to be given a seed; "
                "make it in __init__, or at module level",
            )

    def backward(self, loss: SliceLoss, window: AbstractContextManager[None]) -> None:
        with window, users_code("running backward", self._rank):
            loss.value.backward(torch.full_like(loss.value, loss.scale))

    def _check(self, total: object, step: Step, first: Slice) -> None:
        where = f"in step {step.number}, slice {first.index}"
        if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
            shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise UserError(
                self._rank, f"loss returned {shape} {where}; it must return a scalar tensor, or (sum, weight)"
            )
        if not total.requires_grad:
            raise UserError(
                self._rank,
                f"the loss {where} does not depend on any parameter; was it detached, or made under no_grad?",
            )


class WholeModel:
    """Runs forward and backward of this worker's slices."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Any],
        microbatches: Microbatches,
        *,
        device: torch.device,
        rank: int,
        bf16: bool,
        compiled: bool,
    ) -> None:
        self._callable = torch.compile(module) if compiled else module
        self._loss = loss
        self._microbatches = microbatches
        self._device = device
        self._rank = rank
        self._bf16 = bf16

    def run(self, step: Step, mine: range, window: Window, result: StepResult) -> None:
        """Compute this worker's slices of the step. Gradients accumulate in `.grad`, under the window."""
        work = self._microbatches
        groups = work.groups(step, mine)
        work.begin()
        try:
            for position, group in enumerate(groups):
                batch = work.read(step, group)
                value = self._forward(batch)
                loss = work.account(step, group, value, result)
                work.backward(loss, window(position == len(groups) - 1))
        finally:
            work.end()
        if not groups:
            with window(True):
                pass

    def _forward(self, batch: Any) -> Any:
        with (
            torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext(),
            users_code("computing the loss", self._rank),
        ):
            return self._loss(self._callable, batch)


def _weight(weight: Any, rank: int) -> SupportsFloat:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return fetch(weight.detach())
    try:
        return float(weight)
    except (TypeError, ValueError) as error:
        raise UserError(rank, f"the weight that loss returned is no number: {weight!r:.100}") from error


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
    if isinstance(batch, Tensor):
        return send(batch, device)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((key, to_device(value, device)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
