"""Evaluation: a total over a total, the same however the data was cut and whoever measured which part."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from echelon.comm import Group
from echelon.errors import UserError
from echelon.layout.evaluation import Evaluation, average

ALONE = Group(None, torch.device("cpu"))


class Numbers:
    """Batches of the positions themselves."""

    def read(self, epoch, start, stop, seed):
        random.seed(seed)
        return torch.arange(start, stop, dtype=torch.float64)


class Worker:
    """One of several ranks; what the others say is put in afterwards."""

    device = torch.device("cpu")

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.said = None

    def gather(self, value, during):
        self.said = value
        return [value]


def evaluation(metric, group=ALONE, module=None, batch=4, size=10):
    module = module or nn.Dropout()
    return Evaluation(module, metric, Numbers(), group, size=size, batch=batch, seed=0, bf16=False)


def by_weight(model, batch):
    return {"mean": (batch.sum(), len(batch)), "even": ((batch % 2 == 0).sum(), float(len(batch)))}


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 64])
def test_the_figure_does_not_depend_on_how_the_data_is_cut(batch):
    assert evaluation(by_weight, batch=batch).run() == {"mean": 4.5, "even": 0.5}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_workers_share_the_chunks_and_leave_none_out(size):
    workers = [Worker(rank, size) for rank in range(size)]
    for worker in workers:
        with pytest.raises(KeyError):  # this stand-in hears nobody else's chunks
            evaluation(by_weight, worker, batch=1).run()
    chunks = sorted(int(chunk) for worker in workers for chunk in worker.said)
    assert chunks == list(range(10))


def test_what_counted_nothing_is_no_number():
    assert math.isnan(evaluation(lambda model, batch: {"empty": (0.0, 0)}).run()["empty"])


def test_a_name_that_only_some_chunks_have_is_averaged_over_those():
    assert average([{"a": (1.0, 1.0)}, {"a": (3.0, 1.0), "b": (4.0, 2.0)}]) == {"a": 2.0, "b": 2.0}


def test_the_model_is_in_evaluation_mode_and_afterwards_as_it_was():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    module[1].eval()
    seen = []

    def metric(model, batch):
        seen.append((model.training, model[0].training, torch.is_grad_enabled()))
        return {}

    evaluation(metric, module=module).run()
    assert set(seen) == {(False, False, False)}
    assert [m.training for m in module.modules()] == [True, True, False]


def test_a_metric_that_draws_gives_the_same_figure_every_time():
    def metric(model, batch):
        return {"chance": (random.random(), 1)}

    assert evaluation(metric).run() == evaluation(metric).run()


@pytest.mark.parametrize("value", [None, 3.0, {"a": 3.0}, {"a": (1.0, 2.0, 3.0)}, {"a": ("x", 1)}])
def test_a_metric_of_another_shape_is_the_user_s_failure(value):
    with pytest.raises(UserError, match=r"metric must return {name: \(sum, weight\)}"):
        evaluation(lambda model, batch: value).run()


def test_a_metric_that_raises_leaves_the_model_in_training_mode():
    module = nn.Dropout()
    with pytest.raises(UserError, match=r"ZeroDivisionError.*evaluating"):
        evaluation(lambda model, batch: 1 / 0, module=module).run()
    assert module.training
