"""Buckets: a plan of the model alone, gradients in and out unharmed, reported in one order whatever arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.agree.buckets import Arrivals, Bucket, plan_buckets
from echelon.errors import ConfigError

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
shapes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(KINDS)), min_size=1, max_size=12)


def named(found):
    return {f"p{i}": torch.zeros(size, dtype=dtype) for i, (size, dtype) in enumerate(found)}


@given(found=shapes)
def test_every_parameter_is_in_one_bucket(found):
    parameters = named(found)
    plans = plan_buckets(parameters, first=64, cap=256)
    assert sorted(name for plan in plans for name in plan.names) == sorted(parameters)


@given(found=shapes)
def test_a_bucket_is_no_larger_than_its_bound_unless_one_parameter_is(found):
    for index, plan in enumerate(plan_buckets(named(found), first=64, cap=256)):
        size_bytes = plan.numel * plan.dtype.itemsize
        assert size_bytes <= (256 if index else 64) or len(plan.names) == 1


@given(found=shapes)
def test_doubles_have_buckets_of_their_own_and_everything_else_is_summed_as_singles(found):
    parameters = named(found)
    for plan in plan_buckets(parameters, first=64, cap=256):
        wide = {parameters[name].dtype == torch.float64 for name in plan.names}
        assert wide == {plan.dtype == torch.float64}


def test_the_last_parameters_are_in_the_first_bucket():
    plans = plan_buckets({name: torch.zeros(16) for name in "abcd"}, first=64, cap=128)
    assert [plan.names for plan in plans] == [("d",), ("c", "b"), ("a",)]


def parameters_of_all_kinds():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    return {
        "image": nn.Parameter(image),
        "half": nn.Parameter(torch.randn(5).bfloat16()),
        "wave": nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        "point": nn.Parameter(torch.randn(())),
        "idle": nn.Parameter(torch.randn(4)),
    }


@pytest.mark.parametrize("wire", [None, torch.float64])
def test_gradients_come_out_as_they_went_in(wire):
    parameters = parameters_of_all_kinds()
    (plan,) = plan_buckets(parameters)
    bucket = Bucket(plan, parameters, wire, tail=3)
    given_gradients = {}
    for name, parameter in parameters.items():
        if name != "idle":
            parameter.grad = torch.randn_like(parameter)
            given_gradients[name] = parameter.grad.clone()
    bucket.pack()
    bucket.clear()
    assert all(parameter.grad is None for parameter in parameters.values())
    bucket.hand_back(bucket.present)
    assert parameters["idle"].grad is None
    for name, gradient in given_gradients.items():
        assert torch.equal(parameters[name].grad, gradient)
        assert parameters[name].grad.dtype == parameters[name].dtype


def test_a_parameter_without_gradient_contributes_zeros_not_what_was_there_before():
    parameters = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}
    bucket = Bucket(plan_buckets(parameters)[0], parameters, None, tail=0)
    bucket.flat.fill_(9.0)
    parameters["a"].grad = torch.ones(2)
    bucket.pack()
    assert bucket.flat.sum() == 2.0


def test_the_tail_is_not_touched_by_gradients():
    parameters = {"a": nn.Parameter(torch.zeros(2))}
    bucket = Bucket(plan_buckets(parameters)[0], parameters, None, tail=3)
    bucket.tail.fill_(7.0)
    parameters["a"].grad = torch.ones(2)
    bucket.pack()
    assert bucket.tail.tolist() == [7.0] * 3
    assert bucket.flat.numel() == 5


def test_a_sparse_gradient_is_refused_with_what_to_do():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    parameters = dict(embedding.named_parameters())
    bucket = Bucket(plan_buckets(parameters)[0], parameters, None, tail=0)
    with pytest.raises(ConfigError, match="sparse=False"):
        bucket.pack()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(1)) for _ in range(3))


def watch(module, cut):
    """`cut`: how many parameters each bucket holds, from the last one on."""
    parameters = dict(module.named_parameters())
    names = list(reversed(parameters))
    edges = [sum(cut[:i]) for i in range(len(cut) + 1)]
    groups = [names[a:b] for a, b in pairwise(edges)]
    plans = [plan_buckets({n: parameters[n] for n in reversed(group)})[0] for group in groups]
    buckets = [Bucket(plan, parameters, None, tail=0) for plan in plans]
    reported = []
    return reported, Arrivals(buckets, groups, reported.append)


@pytest.mark.parametrize("used", [("a", "b", "c"), ("c", "b", "a"), ("a",), ("c",), ("b",), ("a", "c")], ids="".join)
def test_buckets_are_reported_once_and_in_order_whatever_arrives(used):
    module = Two()
    reported, arrivals = watch(module, [1, 1, 1])
    with arrivals.watch():
        sum(getattr(module, name) * index for index, name in enumerate(used, 1)).backward()
    assert reported == [0, 1, 2]


def test_a_full_bucket_is_reported_while_backward_is_still_running():
    module = Two()
    reported, arrivals = watch(module, [1, 2])
    early = []
    value = module.a * 2.0
    value.register_hook(lambda _: early.append(list(reported)))
    with arrivals.watch():
        (value + module.b).mul(module.c).backward()
    assert early == [[0]]


def test_nothing_is_reported_outside_of_a_watch_or_after_the_hooks_are_gone():
    module = Two()
    reported, arrivals = watch(module, [3])
    (module.a + module.b + module.c).backward()
    assert reported == []
    arrivals.close()
    with arrivals.watch():
        pass
    assert reported == [0]


def test_a_tied_parameter_arrives_once():
    module = Two()
    reported, arrivals = watch(module, [3])
    with arrivals.watch():
        (module.a * module.a * module.b + module.c).backward()
    assert reported == [0]


def test_a_backward_that_fails_reports_nothing_more():
    module = Two()
    reported, arrivals = watch(module, [1, 1, 1])
    value = module.a * 2.0
    value.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), arrivals.watch():
        (value * module.c).backward()
    assert reported in ([], [0])
