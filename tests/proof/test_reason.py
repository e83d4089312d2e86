"""From findings to a sentence: pure, so every cause has its case here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.proof.findings import Clues, Figure, Findings, Tensors
from echelon.proof.reason import likely_reason

SAME = Figure(plan=1.0, reference=1.0)
OFF = Figure(plan=2.0, reference=1.0)
EQUAL = Findings(
    step=3,
    last_of_epoch=False,
    workers=4,
    loss=SAME,
    weight=SAME,
    norm=SAME,
    gradients=Tensors(count=3),
    parameters=Tensors(count=3),
    buffers=Tensors(),
)


def some(*names: str) -> Tensors:
    return Tensors(difference=1.0, different=names, count=3)


def gradient(cause: str, number: float = 0.0, names: tuple[str, ...] = ("a", "b", "c")) -> Findings:
    return replace(EQUAL, gradients=some(*names), clues=Clues(gradient_cause=cause, gradient_number=number))


CASES = [
    (replace(EQUAL, missing=(7,), last_of_epoch=True), "sample 7 was skipped at the end of an epoch"),
    (replace(EQUAL, missing=(7,)), "sample 7 was skipped in step 3"),
    (replace(EQUAL, extra=(7, 8)), "sample 7, 8 was read more than once"),
    (replace(EQUAL, missing=(1,), extra=(2,)), "another order"),
    (replace(EQUAL, loss=OFF, clues=Clues(draws=True, ranks_off=(1, 2, 3))), "a seed depends on the rank"),
    (replace(EQUAL, loss=OFF, clues=Clues(ranks_off=(2,))), "rank 2 computed other losses"),
    (replace(EQUAL, loss=OFF, clues=Clues(draws=True, ranks_off=(0, 1, 2, 3))), "not set by slice and sample"),
    (replace(EQUAL, loss=OFF, clues=Clues(ranks_off=(0, 1, 2, 3))), "the parameters, the inputs or the precision"),
    (replace(EQUAL, loss=OFF), "added or weighted wrongly"),
    (replace(EQUAL, loss=OFF, clues=Clues(changed_buffers=("u",))), "forward changes the buffer u"),
    (replace(EQUAL, loss=OFF, clues=Clues(rounding_only=True)), "within rounding but not in bits"),
    (replace(EQUAL, weight=OFF), "total weight is 2 and should be 1"),
    (gradient("worker mean"), "all 3 gradients are averaged by worker"),
    (gradient("own", names=("b",)), "the gradients of b are those of rank 0's own slices: left out of the reduction"),
    (gradient("weights ignored"), "the loss's weight was not used"),
    (gradient("clipped by worker"), "clipped by each worker's local norm"),
    (gradient("stale"), "a stale gradient was applied"),
    (gradient("slice missing", 5), "lack slice 5"),
    (gradient("slice twice", 5), "contain slice 5 twice"),
    (gradient("factor", 4.0), "summed over 4 workers and not averaged"),
    (gradient("factor", 0.25), "divided once too often by the number of workers"),
    (gradient("factor", 2.0, names=("a",)), "counted twice, as a tied parameter"),
    (gradient("factor", 1.5), "a constant factor is wrong"),
    (gradient("absent", names=("a",)), "left them without a gradient"),
    (gradient("rounding"), "agree within rounding but not in bits"),
    (gradient(""), "look between backward and the reduction"),
    (replace(EQUAL, clip_norm=OFF, parameters=some("a")), "a local norm"),
    (replace(EQUAL, parameters=some("a"), clues=Clues(update_cause="not clipped")), "not clipped"),
    (replace(EQUAL, parameters=some("a"), clues=Clues(update_cause="twice")), "applied twice"),
    (replace(EQUAL, parameters=some("a"), clues=Clues(update_cause="none")), "no update was applied"),
    (replace(EQUAL, parameters=some("a"), clues=Clues(update_cause="negative")), "the wrong sign"),
    (replace(EQUAL, parameters=some("a")), "a did not become what the optimizer makes of the agreed gradient"),
    (replace(EQUAL, parameters=some("a", "b", "c")), "optimizer state, learning rate or clipping differ"),
    (replace(EQUAL, rates=(OFF,)), "the schedule was not stepped exactly once"),
    (replace(EQUAL, buffers=some("m"), clues=Clues(buffer_cause="rank 0")), "those of rank 0's slices only"),
    (replace(EQUAL, buffers=some("m"), clues=Clues(buffer_cause="untouched")), "were not updated"),
    (replace(EQUAL, buffers=some("m")), "the buffers m differ although the parameters agree"),
    (replace(EQUAL, ranks=("a",)), "the workers do not agree with each other on a"),
]


@pytest.mark.parametrize(("found", "words"), CASES, ids=[words for _, words in CASES])
def test_a_cause_has_its_sentence(found: Findings, words: str) -> None:
    assert words in likely_reason(found)
    assert found.kind


def test_no_difference_has_no_reason() -> None:
    assert EQUAL.kind == ""
    assert likely_reason(EQUAL) == ""


def test_a_loss_that_is_no_number_differs() -> None:
    assert replace(EQUAL, loss=Figure(plan=float("nan"), reference=1.0, tolerance=9.0)).kind == "loss"


def test_causes_come_before_what_they_cause() -> None:
    found = replace(EQUAL, missing=(7,), loss=OFF, gradients=some("a"), parameters=some("b"), ranks=("c",))
    assert found.kind == "samples"
    assert found.name == "a"
    assert "skipped" in likely_reason(found)
