"""State that forward changes is noticed, however it does it, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.layout import RunningStatistics
from echelon.layout.guard import Guard, bits, buffers_kept


class Counting(nn.Module):
    """`how`: what forward does to the buffer."""

    def __init__(self, how, persistent=True):
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(2), persistent=persistent)

    def forward(self):
        if self.how == "in place":
            self.seen += 1
        elif self.how == "anew":
            self.seen = self.seen + 1
        elif self.how == "anew twice":
            self.seen = self.seen * 2
            self.seen = self.seen + 1
        elif self.how == "by copy":
            self.seen.copy_(torch.ones(2))
        elif self.how == "without grad":
            with torch.no_grad():
                self.seen.mul_(0.9)


def watched(how, exact, persistent=True):
    module = Counting(how, persistent)
    guard = Guard(module, frozenset(), exact)
    for _ in range(3):
        guard.open()
        module()
        guard.close()
    return guard.buffers


@pytest.mark.parametrize("how", ["in place", "anew", "anew twice", "by copy", "without grad"])
def test_a_buffer_that_forward_changes_is_noticed(how):
    assert watched(how, exact=False) == {"seen"}
    with pytest.raises(ConfigError, match="buffer seen of Counting"):
        watched(how, exact=True)


class OwnNorm(nn.BatchNorm2d):
    """A norm with a rule that we do not know."""

    def forward(self, x):
        return super().forward(x).mul(1.5)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(3, track_running_stats=True), OwnNorm(3)])
def test_running_statistics_without_a_rule_of_ours_are_noticed(norm):
    statistics = RunningStatistics(norm, 2)
    guard = Guard(norm, statistics.names, exact=True)
    guard.open()
    norm(torch.randn(2, 3, 4, 4))
    with pytest.raises(ConfigError, match=r"running_mean|num_batches_tracked"):
        guard.close()


def test_a_buffer_replaced_at_the_same_address_is_noticed():
    module = Counting("")
    guard = Guard(module, frozenset(), False)
    guard.open()
    address, module.seen = id(module.seen), None
    for _ in range(1000):
        module.seen = torch.ones(2)
        if id(module.seen) == address:
            break
        module.seen = None
    guard.close()
    assert guard.buffers == {"seen"}


def test_buffers_that_forward_only_reads_are_fine():
    assert watched("", exact=True) == set()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_cache_that_is_not_part_of_the_state_may_change(calls):
    module = Counting("anew", persistent=False)
    guard = Guard(module, frozenset(), exact=True)
    for call in range(6):
        guard.open()
        if call < calls:
            module()
        guard.close()


def test_what_changes_with_every_slice_is_no_cache():
    assert watched("anew", exact=False, persistent=False) == {"seen"}
    with pytest.raises(ConfigError, match="buffer seen"):
        watched("anew", exact=True, persistent=False)


class Drifting(nn.Linear):
    """Changes itself in ways that torch does not count, or does."""

    def __init__(self, how):
        super().__init__(3, 3)
        self.how = how
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        if self.how == "behind torch's back":
            self.weight.data.mul_(0.5)
        elif self.how == "openly":
            with torch.no_grad():
                self.weight.mul_(0.5)
        elif self.how == "natively":
            return nn.functional.batch_norm(super().forward(x), self.mean, self.var, training=True)
        elif self.how == "a buffer behind torch's back":
            self.mean.data.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("how", "parameters", "buffers"),
    [
        ("behind torch's back", {"weight"}, set()),
        ("openly", {"weight"}, set()),
        ("natively", set(), {"mean", "var"}),
        ("a buffer behind torch's back", set(), {"mean"}),
    ],
)
def test_what_forward_changes_is_noticed_however_it_does_it(how, parameters, buffers):
    guard = Guard(module := Drifting(how), frozenset(), exact=False)
    guard.open()
    module(torch.randn(4, 3))
    guard.close()
    assert (guard.parameters, guard.buffers) == (parameters, buffers)
    guard = Guard(module, frozenset(), exact=True)
    guard.open()
    module(torch.randn(4, 3))
    with pytest.raises(ConfigError, match="|".join(parameters | buffers)):
        guard.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_number_for_the_bits_of_any_tensor(dtype):
    one, other = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    other[3] = 0
    first, second, third, nothing, empty = bits([one, other, one.clone(), None, torch.ones(0, dtype=dtype)])
    assert first == third != second
    assert nothing is None
    assert empty == 0


def test_what_happens_to_buffers_is_undone():
    module = Counting("anew")
    seen = module.seen
    with buffers_kept(module):
        seen.mul_(7)
        module()
    assert module.seen is seen
    assert torch.equal(seen, Counting("").seen)


def test_buffers_known_to_have_a_rule_are_left_to_it():
    module = Counting("in place")
    guard = Guard(module, frozenset({"seen"}), True)
    guard.open()
    module()
    guard.close()
