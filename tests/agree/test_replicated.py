"""What a worker refuses to become: the copy of one whose weights mean something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.errors import ConfigError
from equivalence.jobs import JOBS, Dense
from lockstep import Fleet


class Wide(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)


def double() -> nn.Module:
    return Dense().double()


@pytest.mark.parametrize(
    ("make", "name", "there", "here"),
    [
        (Wide, "last.bias", r"\(3,\) float32", r"\(4,\) float32"),
        (double, "first.bias", r"\(12,\) float32", r"\(12,\) float64"),
    ],
)
def test_a_state_of_another_shape_or_dtype_is_refused_by_name(make, name, there, here):
    state = Fleet(JOBS["dense"], 1).run(1, 1).export()
    other = Fleet(lambda: JOBS["dense"](model=make), 1)
    before = {name: p.detach().clone() for name, p in other.parts[0].module.named_parameters()}
    with pytest.raises(ConfigError, match=f"{name} is {there} there and {here} in the model") as caught:
        other.restore(state)
    assert caught.value.term == "model"
    assert all(torch.equal(p, before[name]) for name, p in other.parts[0].module.named_parameters())
