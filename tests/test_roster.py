"""Workers that would not train one and the same job are refused by name, before anything is computed."""

from __future__ import annotations

import pytest
import torch

from echelon.assemble import prepare
from echelon.errors import ConfigError
from echelon.plan import Plan
from echelon.request import Request
from echelon.roster import check_alike, describe, remarks
from equivalence.jobs import JOBS

dense = JOBS["dense"]

ALIKE = {
    "samples": 10,
    "data": "a1",
    "parameters": [["weight", [2, 3]], ["bias", [2]]],
    "arithmetic": {"instructions": "AVX2", "torch": "2.13.0"},
}


def hosts(**other):
    return [{"rank": 0, **ALIKE}, {"rank": 1, **ALIKE}, {"rank": 2, **ALIKE, **other}]


@pytest.mark.parametrize(
    ("other", "exact", "words"),
    [
        ({"samples": 9}, False, ["data", "rank 2 has 9 samples and rank 0 10"]),
        (
            {"parameters": [["bias", [2]], ["weight", [2, 3]]]},
            False,
            ["model", "bias (2,) where rank 0 has weight (2, 3)"],
        ),
        ({"parameters": [["weight", [2, 3]]]}, False, ["model", "none where rank 0 has bias"]),
        ({"data": "b2"}, True, ["exact", "rank 2 holds other samples"]),
        ({"arithmetic": {"instructions": "AVX512", "torch": "2.13.0"}}, True, ["rank 2", "AVX512", "AVX2"]),
    ],
)
def test_a_worker_that_is_not_like_the_others_is_refused(other, exact, words):
    with pytest.raises(ConfigError) as caught:
        check_alike(hosts(**other), exact=exact)
    for word in words:
        assert word in str(caught.value)


def test_other_samples_are_remarked_on_where_bits_are_not_promised():
    check_alike(hosts(data="b2"), exact=False)
    assert "rank 2" in remarks(hosts(data="b2"))[0]


def prepared(steps):
    return prepare(dense(steps=steps), Plan(), workers=1, device=torch.device("cpu"), exact=False)


@pytest.mark.parametrize("text", ["dp", "dp1"])
def test_a_run_is_described_by_the_plan_as_it_was_given(text):
    assert describe(Request(plan=text), prepared(3), hosts())["plan"] == text


@pytest.mark.parametrize(("asked", "committed", "steps"), [(3, 0, 3), (3, 8, 8), (9, 8, 9)])
def test_steps_that_a_run_has_stay_its_own_when_fewer_are_asked_for(asked, committed, steps):
    assert describe(Request(), prepared(asked), hosts(), committed)["steps"] == steps


def test_workers_that_are_alike_are_no_matter():
    check_alike(hosts(), exact=True)
    assert remarks(hosts()) == ()
