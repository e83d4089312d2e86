"""Every mistake that distributed trainers are known to make, planted once: verify finds it and names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import plants
import proof_jobs
import pytest
import torch

import echelon

WORKERS = 3


def clipped() -> echelon.Job:
    return proof_jobs.make(clip=0.2)


def scheduled() -> echelon.Job:
    return proof_jobs.make(schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))


PLANTED = [
    (plants.average_by_worker, proof_jobs.make, "averaged by worker", "gradient", 1),
    (
        plants.leave_out_of_reduction,
        proof_jobs.make,
        "2.bias are those of rank 0's own slices: left out",
        "gradient",
        1,
    ),
    (plants.seed_by_rank, proof_jobs.JOBS["noisy data"], "a seed depends on the rank", "loss", 1),
    (plants.update_twice, proof_jobs.make, "applied twice", "parameter", 1),
    (plants.skip_last_sample, proof_jobs.make, "was skipped at the end of an epoch", "samples", 4),
    (plants.clip_by_local_norm, clipped, "a local norm", "norm", 1),
    (plants.statistics_of_rank_0, proof_jobs.JOBS["conv"], "are those of rank 0's slices only", "buffer", 1),
    (plants.no_statistics, proof_jobs.JOBS["conv"], "were not updated", "buffer", 1),
    (plants.ignore_weights, proof_jobs.JOBS["weights"], "the loss's weight was not used", "loss", 1),
    (plants.step_schedule_by_worker, scheduled, "the schedule was not stepped exactly once", "learning rate", 1),
    (plants.stale_gradient, proof_jobs.make, "a stale gradient", "gradient", 2),
    (
        plants.count_tied_twice,
        proof_jobs.JOBS["gpt"],
        "words.weight are 2 times what they should be: counted twice",
        "gradient",
        1,
    ),
    (plants.sum_over_workers, proof_jobs.make, "summed over 3 workers and not averaged", "gradient", 1),
    (plants.forget_a_slice, proof_jobs.make, "lack slice 4", "gradient", 1),
    (plants.forget_to_clip, clipped, "not clipped", "parameter", 1),
    (plants.forget_a_parameter, proof_jobs.make, "left them without a gradient", "gradient", 1),
    (plants.drift_on_rank_1, proof_jobs.make, "the workers do not agree with each other on 0.weight", "ranks", 1),
    (plants.forget_the_update, proof_jobs.make, "no update was applied", "parameter", 1),
]


@pytest.mark.parametrize("exact", [False, True], ids=["rounding", "exact"])
@pytest.mark.parametrize(
    ("plant", "job", "words", "kind", "step"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[plants.Set], None],
    job: Callable[[], echelon.Job],
    words: str,
    kind: str,
    step: int,
    exact: bool,
) -> None:
    plant(partial(monkeypatch.setattr, raising=True))
    report = echelon.verify(job(), workers=WORKERS, exact=exact)
    assert not report.equal
    assert words in report.likely_reason, report.text()
    assert report.first_difference is not None
    assert (report.first_difference["step"], report.first_difference["kind"]) == (step, kind), report.text()
    assert report.max_abs_diff > 0 or kind in ("learning rate", "ranks")


def test_a_slice_that_two_workers_compute_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of that slice is counted twice: its samples, its loss, its weight, its gradient."""
    plants.compute_a_slice_twice(partial(monkeypatch.setattr, raising=True))
    report = echelon.verify(proof_jobs.make(), workers=WORKERS)
    assert not report.equal
    assert "was read more than once" in report.likely_reason, report.text()


def test_merged_slices_are_not_exact_and_the_sentence_says_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    plants.merge_in_exact_mode(partial(monkeypatch.setattr, raising=True))
    report = echelon.verify(proof_jobs.make(), workers=WORKERS, exact=True)
    assert not report.equal
    assert "within rounding but not in bits" in report.likely_reason, report.text()
