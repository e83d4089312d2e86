"""A job is checked once, when it is made: every refusal names the field and what would be right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from echelon.errors import ConfigError
from echelon.job import Evaluate, Job

GOOD = {"model": list, "loss": max, "data": [1], "optimizer": list, "batch": 8, "steps": 1}


def make(**changes):
    return Job(**{**GOOD, **changes})


def test_a_job_of_defaults_is_accepted():
    job = make()
    assert (job.slices, job.seed, job.precision, job.keep) == (8, 0, "fp32", 3)


def test_a_job_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().batch = 9


@pytest.mark.parametrize(
    ("changes", "term"),
    [
        ({"model": 1}, "model"),
        ({"loss": None}, "loss"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"schedule": 3}, "schedule"),
        ({"collate": "stack"}, "collate"),
        ({"batch": 0}, "batch"),
        ({"batch": True, "slices": 1}, "batch"),
        ({"batch": 8.0}, "batch"),
        ({"batch": 7}, "batch"),
        ({"slices": 0}, "slices"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"steps": None}, "steps"),
        ({"epochs": 2}, "steps"),
        ({"steps": 0}, "steps"),
        ({"steps": None, "epochs": 0}, "epochs"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"microbatch": -4}, "microbatch"),
        ({"keep": 0}, "keep"),
        ({"clip": 0}, "clip"),
        ({"clip": True}, "clip"),
        ({"clip": float("nan")}, "clip"),
        ({"precision": "fp16"}, "precision"),
        ({"evaluate": [1]}, "evaluate"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, term):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.term == term


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**63 - 1},
        {"batch": 8, "slices": 8},
        {"clip": 1},
        {"clip": float("inf")},
        {"steps": None, "epochs": 1},
        {"precision": "bf16"},
    ],
)
def test_the_edge_of_what_works_is_accepted(changes):
    make(**changes)


def test_a_model_that_was_made_already_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"Linear that was made already.*model=lambda: Linear\(\.\.\.\)") as caught:
        make(model=torch.nn.Linear(2, 1))
    assert caught.value.term == "model"
    make(model=torch.nn.Linear)


def test_a_batch_too_small_for_its_slices_says_both_ways_out():
    with pytest.raises(ConfigError, match=r"batch=8 or more, or slices=5 or fewer"):
        make(batch=5)


@pytest.mark.parametrize(
    ("changes", "term"),
    [({"metric": 1}, "evaluate.metric"), ({"every": 0}, "evaluate.every"), ({"batch": 0.5}, "evaluate.batch")],
)
def test_an_evaluation_that_cannot_work_is_refused_by_name(changes, term):
    with pytest.raises(ConfigError) as caught:
        Evaluate(**{"data": [1], "metric": max, **changes})
    assert caught.value.term == term
