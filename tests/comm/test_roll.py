"""Who is late is told from what each rank says it waits for."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from echelon.comm.roll import Roll
from echelon.errors import OutOfStep


@pytest.fixture
def rolls():
    store = dist.HashStore()
    return [Roll(store, rank, 4) for rank in range(4)]


def test_who_has_said_nothing_or_waits_for_something_earlier_is_late(rolls):
    rolls[0].enter(41, "a sum")
    rolls[1].enter(40, "the sum before")
    rolls[2].enter(41, "a sum")
    assert rolls[0].call(41, "a sum") == ([1, 3], True)
    assert rolls[2].call(41, "a sum") == ([1, 3], False)


def test_when_all_are_there_nobody_is_late(rolls):
    for roll in rolls:
        roll.enter(7, "a sum")
    assert rolls[3].call(7, "a sum") == ([], False)


def test_who_has_gone_on_to_something_later_is_not_late(rolls):
    rolls[0].enter(7, "a sum")
    rolls[1].enter(8, "another")
    assert rolls[0].call(7, "a sum")[0] == [2, 3]


def test_ranks_that_wait_for_different_things_in_one_place_are_told_who_is_where(rolls):
    rolls[0].enter(7, "a sum")
    rolls[2].enter(7, "the end")
    with pytest.raises(OutOfStep) as caught:
        rolls[0].call(7, "a sum")
    assert all(word in str(caught.value) for word in ("rank 0", "a sum", "rank 2", "the end"))
