"""Mistakes to plant in the machinery: each takes a function that replaces an attribute, as monkeypatch.setattr does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon import assemble
from echelon.agree import buckets, summation, update
from echelon.comm import group
from echelon.layout import statistics, whole
from echelon.slices import Course

Set = Callable[[Any, str, Any], None]


def average_by_worker(put: Set) -> None:
    original = whole.Microbatches.account
    groups = whole.Microbatches.groups

    def remember(self: Any, step: Any, mine: range) -> Any:
        self._own_samples = sum(len(step.slices[i]) for i in mine)
        return groups(self, step, mine)

    def account(self: Any, step: Any, group_: Any, value: Any, result: Any) -> Any:
        loss = original(self, step, group_, value, result)
        factor = step.samples / (self._own_samples * dist.get_world_size())
        return replace(loss, scale=loss.scale * factor)

    put(whole.Microbatches, "groups", remember)
    put(whole.Microbatches, "account", account)


def leave_out_of_reduction(put: Set) -> None:
    """The first tensor of the first bucket: the model's last parameter."""
    original = group.Group.sum
    size = 4

    class Restoring:
        def __init__(self, pending: Any, tensor: Any, kept: Any) -> None:
            self.pending, self.tensor, self.kept = pending, tensor, kept

        def wait(self) -> None:
            self.pending.wait()
            self.tensor[:size] = self.kept

    def sum_most(self: Any, tensor: Any, during: str) -> Any:
        kept = tensor[:size].clone()
        return Restoring(original(self, tensor, during), tensor, kept)

    put(group.Group, "sum", sum_most)


def seed_by_rank(put: Set) -> None:
    original = whole.Microbatches.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "seed": options["seed"] + options["rank"]})

    put(whole.Microbatches, "__init__", init)


def update_twice(put: Set) -> None:
    original = update.Update.apply

    def apply(self: Any) -> Any:
        norm = original(self)
        original(self)
        return norm

    put(update.Update, "apply", apply)


def skip_last_sample(put: Set) -> None:
    original = Course.step

    def step(self: Any, number: int) -> Any:
        full = original(self, number)
        if full.slices[-1].stop < self.size:
            return full
        last = replace(full.slices[-1], stop=self.size - 1)
        return replace(full, slices=(*full.slices[:-1], last), samples=full.samples - 1)

    put(Course, "step", step)


def clip_by_local_norm(put: Set) -> None:
    original = update.global_norm

    def local(gradients: Any, exact: bool) -> Any:
        mine = sorted(gradients)[dist.get_rank() :: dist.get_world_size()]
        return original({name: gradients[name] for name in mine}, exact)

    put(update, "global_norm", local)


def statistics_of_rank_0(put: Set) -> None:
    original = statistics.RunningStatistics.apply

    def apply(self: Any, rows: Any) -> None:
        kept = rows.clone()
        kept[len(assemble.assign(len(rows), [1.0] * dist.get_world_size())[0]) :] = 0
        original(self, kept)

    put(statistics.RunningStatistics, "apply", apply)


def no_statistics(put: Set) -> None:
    put(statistics.RunningStatistics, "apply", lambda self, rows: None)


def ignore_weights(put: Set) -> None:
    original = whole.Microbatches.account

    def account(self: Any, step: Any, group_: Any, value: Any, result: Any) -> Any:
        total, weight = value
        return original(self, step, group_, (total / weight, 1.0), result)

    put(whole.Microbatches, "account", account)


def step_schedule_by_worker(put: Set) -> None:
    original = update.Update._advance

    def advance(self: Any) -> None:
        for _ in range(dist.get_world_size()):
            original(self)

    put(update.Update, "_advance", advance)


def _after_finish(put: Set, change: Callable[[Any], None]) -> None:
    for kind in (summation.FloatSum, summation.GridSum):

        def finish(self: Any, *args: Any, original: Any = kind.finish) -> None:
            original(self, *args)
            change(self)

        put(kind, "finish", finish)


def stale_gradient(put: Set) -> None:
    kept: dict[int, Any] = {}

    def swap(self: Any) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                new = parameter.grad.clone()
                parameter.grad = kept.get(id(parameter), new)
                kept[id(parameter)] = new

    _after_finish(put, swap)


def count_tied_twice(put: Set) -> None:
    def double(self: Any) -> None:
        for bucket in self.buckets:
            for name, parameter in zip(bucket.plan.names, bucket.parameters, strict=True):
                if name == "words.weight":
                    parameter.grad = parameter.grad * 2

    _after_finish(put, double)


def sum_over_workers(put: Set) -> None:
    def scale(self: Any) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = parameter.grad * dist.get_world_size()

    _after_finish(put, scale)


def forget_a_slice(put: Set) -> None:
    original = whole.Microbatches.account

    def account(self: Any, step: Any, group_: Any, value: Any, result: Any) -> Any:
        loss = original(self, step, group_, value, result)
        return replace(loss, scale=0.0) if loss.index == 4 else loss

    put(whole.Microbatches, "account", account)


def compute_a_slice_twice(put: Set) -> None:
    def overlapping(slices: int, weights: Any) -> Any:
        return (range(3), range(2, 4), range(4, slices))

    put(assemble, "assign", overlapping)


def merge_in_exact_mode(put: Set) -> None:
    original = whole.Microbatches.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._merge = True

    put(whole.Microbatches, "__init__", init)


def forget_to_clip(put: Set) -> None:
    original = update.Update.apply

    def apply(self: Any) -> Any:
        clip, self._clip = self._clip, 1e9
        norm = original(self)
        self._clip = clip
        return norm

    put(update.Update, "apply", apply)


def forget_a_parameter(put: Set) -> None:
    original = buckets.Bucket.hand_back

    def hand_back(self: Any, present: Any) -> None:
        original(self, present)
        self.parameters[0].grad = None

    put(buckets.Bucket, "hand_back", hand_back)


def forget_the_update(put: Set) -> None:
    put(update.Update, "apply", lambda self: None)


def drift_on_rank_1(put: Set) -> None:
    original = update.Update.apply

    def apply(self: Any) -> Any:
        norm = original(self)
        if dist.get_rank() == 1:
            next(iter(self._parameters.values())).data.view(-1)[0] += 1e-3
        return norm

    put(update.Update, "apply", apply)
