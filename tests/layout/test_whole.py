"""Slices into micro-batches, batches onto devices, and buffers that forward must not change unnoticed."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.errors import ConfigError
from echelon.layout import build_module, check_module, parameters_of, persistent_buffers
from echelon.layout.whole import group_slices, to_device
from echelon.slices import cut

slices = st.builds(cut, st.just(0), st.integers(0, 60), st.integers(1, 20))
bounds = st.none() | st.integers(1, 70)


@given(pieces=slices, merge=st.booleans(), microbatch=bounds)
def test_groups_hold_every_sample_once_and_in_order(pieces, merge, microbatch):
    groups = group_slices(pieces, merge, microbatch)
    positions = [p for group in groups for piece in group for p in range(piece.start, piece.stop)]
    assert positions == list(range(pieces[0].start, pieces[-1].stop))
    assert all(len(piece) for group in groups for piece in group)


@given(pieces=slices, microbatch=bounds)
def test_without_merging_every_slice_is_alone(pieces, microbatch):
    assert all(len(group) == 1 for group in group_slices(pieces, False, microbatch))


@given(pieces=slices, microbatch=st.integers(1, 70))
def test_a_merged_group_is_within_its_bound_unless_one_slice_is_not(pieces, microbatch):
    for group in group_slices(pieces, True, microbatch):
        assert sum(map(len, group)) <= microbatch or len(group) == 1


@given(pieces=slices)
def test_without_a_bound_a_share_is_one_group(pieces):
    assert len(group_slices(pieces, True, None)) == (1 if any(map(len, pieces)) else 0)


Pair = namedtuple("Pair", "x y")  # noqa: PYI024  what users write


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), "text", 3],
        (torch.ones(2), None),
        {"x": torch.ones(2), "deep": [{"y": torch.ones(1)}]},
        OrderedDict(x=torch.ones(2)),
        Pair(torch.ones(2), 5),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_keeps_its_shape_on_its_way_to_a_device(batch, device):
    moved = to_device(batch, torch.device(device))
    assert type(moved) is type(batch)

    def devices(value):
        if isinstance(value, torch.Tensor):
            return [value.device.type]
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [found for item in inner for found in devices(item)]

    assert set(devices(moved)) == {device}


def test_what_knows_how_to_move_itself_does():
    class Graph:
        def to(self, device, non_blocking):
            return f"on {device}"

    assert to_device(Graph(), torch.device("meta")) == "on meta"


def test_a_model_is_made_under_the_job_s_own_random_state():
    def make():
        return nn.Linear(3, 3)

    one = build_module(make, 7, torch.device("cpu"))
    torch.randn(5)
    assert torch.equal(one.weight, build_module(make, 7, torch.device("cpu")).weight)
    assert not torch.equal(one.weight, build_module(make, 8, torch.device("cpu")).weight)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "1 is SyncBatchNorm"),
        (lambda: torch.compile(nn.Linear(2, 2)), "compiled already.*compile=True"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel"),
        (lambda: nn.LazyLinear(3), "Lazy module"),
        (Frozen, "nothing to train"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0 .*sparse=False"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), "sparse=False"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_training(make, why):
    with pytest.raises(ConfigError, match=why) as caught:
        check_module(make())
    assert caught.value.term == "model"


def test_a_factory_that_returns_no_module_is_refused():
    with pytest.raises(ConfigError, match="returned int"):
        build_module(lambda: 3, 0, torch.device("cpu"))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Embedding(4, 2)
        self.write = nn.Linear(2, 4, bias=False)
        self.write.weight = self.read.weight
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("cache", torch.ones(1), persistent=False)


def test_a_tied_parameter_is_trained_once_under_its_first_name():
    assert list(parameters_of(Tied())) == ["read.weight"]


def test_only_buffers_that_belong_to_the_state_are_kept():
    assert list(persistent_buffers(Tied())) == ["kept"]
