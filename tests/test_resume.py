"""Checkpoints of a run: when they are written, what they replace, and to whom they belong."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.comm import Group
from echelon.errors import ConfigError, Diverged
from echelon.resume import Checkpoints, check_identity, identity, without_value
from echelon.state import State
from equivalence.jobs import Images, job


class Agreement:
    """A committed state that the test sets."""

    def __init__(self, step: int, value: float = 1.0) -> None:
        self.step, self.value = step, value
        self.restored: State | None = None

    def export(self) -> State:
        return State(step=self.step, tensors={"model/w": torch.tensor([self.value])}, values={})

    def restore(self, state: State) -> None:
        self.restored = state


class Watching(Group):
    """Notes which checkpoints there are whenever the workers wait for each other."""

    def __init__(self, folder) -> None:
        super().__init__(None, torch.device("cpu"))
        self.folder = folder
        self.seen: list[list[str]] = []

    def gather(self, value, during):
        self.seen.append(sorted(path.name for path in self.folder.glob("checkpoints/step-*")))
        return super().gather(value, during)


@pytest.fixture
def make(tmp_path):
    def make(agreement):
        group = Watching(tmp_path)
        return Checkpoints(tmp_path, job(data=Images()), 131, True, group, agreement), group

    return make


def test_all_wait_until_what_was_committed_is_on_disk_before_anybody_reports_a_divergence(make):
    checkpoints, group = make(Agreement(4))
    assert checkpoints.save_before_failing(0.5)["event"] == "checkpoint"
    assert group.seen == [["step-00000004"]]


def test_weights_that_are_nan_are_not_saved_before_a_failure_and_a_warning_says_so(make):
    checkpoints, group = make(Agreement(4, math.nan))
    record = checkpoints.save_before_failing(0.5)
    assert record["event"] == "warning"
    assert "w is NaN" in record["message"]
    assert group.seen == [[]]


def test_weights_that_are_nan_are_a_divergence_when_they_are_to_be_saved(make):
    checkpoints, _ = make(Agreement(4, math.nan))
    with pytest.raises(Diverged, match="w is NaN and was not saved"):
        checkpoints.save(0.5)


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf])
def test_only_nan_is_no_value(value):
    state = State(step=1, tensors={"model/w": torch.tensor([value]), "optimizer/w/x": torch.tensor([math.nan])})
    assert without_value(state) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_type_of_weight_can_be_looked_at(dtype):
    assert without_value(State(step=1, tensors={"model/w": torch.zeros(2).to(dtype)})) is None


def test_a_state_that_is_on_disk_is_not_written_twice(make):
    checkpoints, _ = make(Agreement(4))
    assert checkpoints.save(0.5) is not None
    assert checkpoints.save(0.5) is None


def test_a_run_goes_on_from_its_newest_state_with_its_last_loss(make):
    agreement = Agreement(4, 2.5)
    make(agreement)[0].save(0.5)
    agreement.step = 6
    make(agreement)[0].save(0.25)
    resumed = make(agreement)[0].resume()
    assert (resumed.step, resumed.loss, resumed.messages) == (6, 0.25, ())
    assert agreement.restored.step == 6
    assert agreement.restored.tensors["model/w"].tolist() == [2.5]


def test_nothing_to_resume_is_said(make):
    resumed = make(Agreement(0))[0].resume()
    assert (resumed.step, resumed.loss) == (0, None)
    assert "nothing to resume" in resumed.messages[0]


@pytest.mark.parametrize(
    ("changes", "size", "term"),
    [({"seed": 1}, 131, "seed"), ({"batch": 49}, 131, "batch"), ({"slices": 6}, 131, "slices"), ({}, 132, "dataset")],
)
def test_what_the_data_position_hangs_on_must_be_the_same(changes, size, term):
    state = State(step=3, values=identity(job(data=Images()), 131, True))
    check_identity(state, job(data=Images(), steps=99, clip=None), 131)
    with pytest.raises(ConfigError) as caught:
        check_identity(state, job(data=Images(), **changes), size)
    assert caught.value.term == term
