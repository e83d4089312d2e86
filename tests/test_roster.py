"""Workers that would not train one and the same job are refused by name, before anything is computed."""

from __future__ import annotations

import pytest

from echelon.errors import ConfigError
from echelon.roster import check_alike, remarks

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


def test_workers_that_are_alike_are_no_matter():
    check_alike(hosts(), exact=True)
    assert remarks(hosts()) == ()
