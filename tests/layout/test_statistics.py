"""BatchNorm's running statistics by slice, against torch's own that sees the slices one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from echelon.layout import RunningStatistics
from echelon.layout.statistics import normalises_by_batch


class Net(nn.Module):
    def __init__(self, norm, times=1):
        super().__init__()
        self.norm, self.times = norm, times

    def forward(self, x):
        for turn in range(self.times):
            x = self.norm(x) + turn
        return x


def batches(slices, shape=(4, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * (i + 1) + i for i in range(slices)]


def by_slice(module, parts, workers=1):
    """One step: each worker runs its slices from zero, rows are summed, every worker applies all of them."""
    copies = [copy.deepcopy(module) for _ in range(workers)]
    all_statistics = [RunningStatistics(each, len(parts)) for each in copies]
    for rank, (each, statistics) in enumerate(zip(copies, all_statistics, strict=True)):
        statistics.begin()
        for index in range(rank, len(parts), workers):
            statistics.open()
            each(parts[index])
            statistics.close(index)
        statistics.end()
    rows = torch.stack([statistics.rows for statistics in all_statistics]).sum(0)
    for statistics in all_statistics:
        statistics.apply(rows)
    return copies


NORMS = {
    "1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "2d": (lambda: nn.BatchNorm2d(3), (2, 3, 5, 5)),
    "3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 4, 4)),
    "fast": (lambda: nn.BatchNorm1d(3, momentum=0.9), (4, 3)),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "plain": (lambda: nn.BatchNorm1d(3, affine=False), (4, 3)),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", NORMS)
def test_they_are_what_torch_has_after_the_slices_in_order(kind, times):
    make, shape = NORMS[kind]
    plain, mine = Net(make(), times), Net(make(), times)
    for step in range(3):
        parts = batches(4, shape, step)
        for part in parts:
            plain(part)
        (mine,) = by_slice(mine, parts)
        assert torch.allclose(mine.norm.running_mean, plain.norm.running_mean, rtol=1e-5, atol=1e-6)
        assert torch.allclose(mine.norm.running_var, plain.norm.running_var, rtol=1e-5)
        assert mine.norm.num_batches_tracked == plain.norm.num_batches_tracked


@pytest.mark.parametrize("kind", NORMS)
def test_every_worker_has_the_same_bits_on_any_number_of_workers(kind):
    make, shape = NORMS[kind]
    parts = batches(7, shape)
    (alone,) = by_slice(Net(make()), parts)
    for workers in (2, 3, 7):
        for each in by_slice(Net(make()), parts, workers):
            assert torch.equal(each.norm.running_mean, alone.norm.running_mean)
            assert torch.equal(each.norm.running_var, alone.norm.running_var)


def test_between_begin_and_apply_the_committed_values_are_put_back():
    module = Net(nn.BatchNorm1d(3))
    module(batches(1)[0])
    before = module.norm.running_mean.clone()
    statistics = RunningStatistics(module, 2)
    statistics.begin()
    statistics.open()
    module(batches(1)[0])
    statistics.close(0)
    statistics.end()
    assert torch.equal(module.norm.running_mean, before)
    assert module.norm.num_batches_tracked == 1
    statistics.end()  # a second time, as when a step fails, changes nothing
    assert torch.equal(module.norm.running_mean, before)


def test_a_step_computed_again_starts_from_clean_rows():
    module = Net(nn.BatchNorm1d(3))
    statistics = RunningStatistics(module, 2)
    for part in batches(2):
        statistics.begin()
        statistics.open()
        module(part)
        statistics.close(0)
        statistics.end()
    first = statistics.rows.clone()
    fresh = RunningStatistics(module, 2)
    fresh.begin()
    fresh.open()
    module(batches(2)[1])
    fresh.close(0)
    fresh.end()
    assert torch.equal(first, fresh.rows)


def test_a_frozen_norm_keeps_its_values_and_takes_no_part():
    module = Net(nn.BatchNorm1d(3))
    module(batches(1)[0])
    before = copy.deepcopy(module.norm.state_dict())
    module.norm.eval()
    (after,) = by_slice(module, batches(3))
    assert all(torch.equal(value, before[name]) for name, value in after.norm.state_dict().items())


def test_a_single_slice_leaves_torch_s_own_bits():
    plain, mine = Net(nn.BatchNorm1d(3)), Net(nn.BatchNorm1d(3))
    for step in range(3):
        (part,) = batches(1, seed=step)
        plain(part)
        (mine,) = by_slice(mine, [part])
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in mine.state_dict().items())


def test_a_forward_in_eval_mode_inside_a_slice_is_normalised_by_the_committed_values():
    module = Net(nn.BatchNorm1d(3))
    for part in batches(5):
        module(part)
    x = batches(1)[0]
    module.norm.eval()
    right = module(x)
    module.norm.train()
    statistics = RunningStatistics(module, 2)
    statistics.begin()
    for index in range(2):
        statistics.open()
        module.norm.eval()
        assert torch.equal(module(x), right)
        module.norm.train()
        module(x)
        statistics.close(index)
    statistics.end()


def test_a_norm_without_a_count_of_its_batches_is_left_to_whoever_guards_buffers():
    module = nn.BatchNorm1d(3)
    module.num_batches_tracked = None
    assert not RunningStatistics(module, 1)


def test_a_norm_that_some_slices_do_not_reach_counts_only_those_that_do():
    class Sometimes(Net):
        def forward(self, x):
            return self.norm(x) if x[0, 0] > 1 else x

    plain, mine = Sometimes(nn.BatchNorm1d(3)), Sometimes(nn.BatchNorm1d(3))
    parts = batches(5)
    for part in parts:
        plain(part)
    (mine,) = by_slice(mine, parts)
    assert 0 < plain.norm.num_batches_tracked < 5
    assert mine.norm.num_batches_tracked == plain.norm.num_batches_tracked
    assert torch.allclose(mine.norm.running_mean, plain.norm.running_mean, rtol=1e-5)


def test_what_keeps_no_statistics_is_left_alone():
    module = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3), nn.InstanceNorm1d(3))
    statistics = RunningStatistics(module, 4)
    assert not statistics
    assert statistics.rows.numel() == 0
    assert statistics.names == frozenset()


def test_a_norm_at_two_places_of_the_model_is_one_norm():
    norm = nn.BatchNorm1d(3)
    statistics = RunningStatistics(nn.Sequential(norm, nn.ReLU(), norm), 1)
    assert statistics.width == 2 * 3 + 1


class Named(nn.BatchNorm1d):
    """A subclass that leaves forward as it is, as libraries write them."""


class Other(nn.BatchNorm1d):
    """One that does something of its own with its statistics."""

    def forward(self, x):
        return super().forward(x) + 1


def test_a_subclass_follows_the_rule_as_long_as_its_forward_is_torch_s():
    assert RunningStatistics(Named(3), 1)
    assert not RunningStatistics(Other(3), 1)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm2d(3, track_running_stats=False), Other(3)])
def test_whatever_normalises_by_batch_is_known_tracked_or_not(norm):
    assert normalises_by_batch(nn.Sequential(nn.Linear(3, 3), norm))
    assert not normalises_by_batch(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3)))


def test_statistics_in_half_precision_are_not_multiplied_by_a_rounded_factor():
    mine = Net(nn.BatchNorm1d(64, momentum=0.3).to(torch.bfloat16))
    parts = [part.to(torch.bfloat16) for part in batches(3, (4, 64))]
    start = mine.norm.running_var.clone()
    ends = [by_slice(mine, [part])[0].norm.running_var for part in parts]
    (mine,) = by_slice(mine, parts)
    expected = start
    for end in ends:
        expected = (expected - start) * 0.7 + end  # 0.7 is 0.69921875 in bfloat16
    assert torch.equal(mine.norm.running_var, expected)
