"""A loop of one's own: the job's bits, stopped and resumed, and a clear word for every way to get the loop wrong."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import echelon
from echelon.errors import ConfigError, Diverged, Stopped, UserError
from echelon.events import read_events
from equivalence.jobs import BATCH, JOBS, SLICES, Convolution, Dense, Images, Noisy, adamw, classify, warm_up
from lockstep import Fleet

OPTIONS = {"batch": BATCH, "slices": SLICES, "clip": 0.5, "schedule": warm_up, "seed": 11}


@pytest.fixture
def launch(tmp_path):
    def run(main, workers=1, **options):
        options = {"exact": True, "seed": 11, "out": tmp_path / "run", "show": lambda event: None, **options}
        return echelon.launch(main, workers=workers, **options)

    return run


def steps_of(tmp_path):
    return [e["step"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step"]


def ordinary(run, steps=7, data=None, model=Dense):
    model, optimizer, batches = run.prepare(model(), adamw, data or Noisy(), steps=steps, **OPTIONS)
    for batch in batches:
        optimizer.zero_grad()
        run.backward(classify(model, batch))
        optimizer.step()


@pytest.mark.parametrize("workers", [1, 3])
def test_it_gives_the_job_s_bits(launch, tmp_path, workers):
    result = launch(ordinary, workers)
    assert result.digest == Fleet(JOBS["dense"], 1).run().digest()
    assert (result.steps, result.samples, result.workers) == (7, 312, workers)
    assert steps_of(tmp_path) == list(range(1, 8))


def test_more_workers_than_a_short_step_has_samples(launch):
    def short(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(52), batch=50, slices=4, epochs=2, seed=11)
        for x, y in batches:
            run.backward((model.last(model.first(x)).square().sum(), len(y)))
            optimizer.step()

    assert launch(short, 4).digest == launch(short, 1).digest


def test_without_steps_each_pass_over_the_batches_is_one_epoch(launch, tmp_path):
    def by_epoch(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), **OPTIONS)
        for _ in range(2):
            for batch in batches:
                run.backward(classify(model, batch))
                optimizer.step()

    result = launch(by_epoch, 2)
    assert (result.steps, result.samples) == (6, 262)
    assert result.digest == Fleet(lambda: JOBS["dense"](steps=6), 1).run().digest()
    assert steps_of(tmp_path) == list(range(1, 7))


def looking(run, clip=None, microbatch=None):
    """Clips by hand, as any PyTorch loop does, and remembers what it clipped."""
    options = {**OPTIONS, "clip": None, "microbatch": microbatch}
    model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **options)
    norms = []
    for batch in batches:
        model.zero_grad()
        run.backward(classify(model, batch))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert max(norms) > 0.5


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_clipped_by_hand_are_the_agreed_ones(launch, exact):
    one, two = (launch(looking, workers, exact=exact) for workers in (1, 3))
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    if exact:
        assert one.digest == two.digest


def test_what_is_done_to_gradients_before_a_share_is_complete_changes_nothing(launch):
    def in_parts(run):
        looking(run, microbatch=8)

    assert launch(in_parts, 2, exact=False).loss == pytest.approx(launch(looking, 1).loss, rel=1e-4)


def test_clipping_by_hand_acts_as_the_clip_of_prepare(launch):
    by_hand, by_us = launch(looking, 2), launch(ordinary, 2)
    assert by_hand.loss == pytest.approx(by_us.loss, rel=1e-4)


def test_gradients_cannot_be_changed_in_a_step_in_which_a_worker_has_no_samples(launch):
    def short(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(52), batch=50, slices=4, epochs=1, seed=11)
        for x, y in batches:
            run.backward((model.last(model.first(x)).square().sum(), len(y)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    with pytest.raises(UserError, match=r"changed the gradients of step 2.*use clip="):
        launch(short, 4)


def test_a_loop_that_ends_in_the_middle_of_a_step_is_told_so(launch):
    def half(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **OPTIONS)
        for batch in batches:
            run.backward(classify(model, batch))
            optimizer.step()
            return

    with pytest.raises(UserError, match="in the middle of step 1"):
        launch(half, 2)


def test_a_closure_is_refused(launch):
    def closure(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **OPTIONS)
        for batch in batches:
            run.backward(classify(model, batch))
            optimizer.step(lambda: None)

    with pytest.raises(ConfigError, match="would compute the loss again"):
        launch(closure)


def test_batches_know_their_number_of_steps(launch):
    def count(run):
        _, _, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **OPTIONS)
        assert len(batches) == 7

    launch(count)


def test_leaving_the_loop_early_keeps_what_was_committed(launch, tmp_path):
    def until_three(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **{**OPTIONS, "slices": 2})
        for count, batch in enumerate(batches):
            run.backward(classify(model, batch))
            optimizer.step()
            if count == 2:  # one slice of each step is this worker's
                break

    result = launch(until_three, 2)
    assert result.steps == len(steps_of(tmp_path)) == 3


class Slow(Images):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


def test_stopped_and_resumed_on_other_workers_it_equals_one_never_stopped(launch, tmp_path):
    def slow(run):
        ordinary(run, 40, Slow(), Convolution)

    def stop(event):
        if event["event"] == "step" and event["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as caught:
        launch(slow, 2, show=stop)
    assert 1 <= caught.value.step < 40
    result = launch(slow, 3, resume=True)
    assert result.digest == Fleet(lambda: JOBS["images"](steps=40), 1).run().digest()
    assert steps_of(tmp_path) == list(range(1, 41))


def test_a_main_that_prepares_nothing_has_no_result(launch):
    assert launch(lambda run: None, 2) is None


def test_without_exact_it_agrees_within_rounding_and_merges_a_worker_s_slices(launch, tmp_path):
    def linear(run):
        model, optimizer, batches = run.prepare(torch.nn.Linear(72, 2), adamw, Images(), steps=3, **OPTIONS)
        sizes = []
        for x, y in batches:
            sizes.append(len(y))
            run.backward(torch.nn.functional.cross_entropy(model(x.flatten(1)), y))
            optimizer.step()
        (tmp_path / f"{run.exact}-{run.rank}").write_text(str(sizes))

    loose, exact = launch(linear, 2, exact=False), launch(linear, 1)
    assert (tmp_path / "False-0").read_text() == "[28, 28, 17]"  # four of the seven slices, at once
    assert (tmp_path / "True-0").read_text().count(",") == 3 * SLICES - 1
    assert loose.loss == pytest.approx(exact.loss, rel=1e-5)


def no_backward(run, model, optimizer, batch):
    optimizer.step()


def no_step(run, model, optimizer, batch):
    run.backward(classify(model, batch))


def nothing(run, model, optimizer, batch):
    pass


def backward_twice(run, model, optimizer, batch):
    run.backward(classify(model, batch))
    run.backward(classify(model, batch))


def prepare_twice(run, model, optimizer, batch):
    run.prepare(model, adamw, Noisy(), steps=3, **OPTIONS)


def loss_of_many(run, model, optimizer, batch):
    run.backward(model(batch[0]))


def raises(run, model, optimizer, batch):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (no_backward, UserError, "before run.backward"),
        (no_step, UserError, "without optimizer.step"),
        (nothing, UserError, "without run.backward"),
        (backward_twice, UserError, "once to each batch"),
        (prepare_twice, ConfigError, "called twice"),
        (loss_of_many, UserError, "scalar"),
        (raises, UserError, "ValueError: no"),
    ],
)
def test_a_loop_that_is_wrong_is_told_how(launch, body, kind, why):
    def main(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=3, **OPTIONS)
        for batch in batches:
            body(run, model, optimizer, batch)

    with pytest.raises(kind, match=why):
        launch(main)


def test_backward_before_prepare_is_told(launch):
    with pytest.raises(ConfigError, match=r"before run\.prepare"):
        launch(lambda run: run.backward(torch.ones(())))


def test_a_loop_without_a_step_on_the_last_slice_only_is_told_too(launch):
    def main(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=3, **OPTIONS)
        for count, batch in enumerate(batches, 1):
            run.backward(classify(model, batch))
            if count % SLICES:
                optimizer.step()

    with pytest.raises(UserError, match=r"without optimizer\.step"):
        launch(main)


def test_an_except_of_the_user_s_does_not_eat_a_divergence_and_what_was_committed_is_saved(launch, tmp_path):
    def main(run):
        model, optimizer, batches = run.prepare(Dense(), adamw, Noisy(), steps=7, **OPTIONS)
        for count, batch in enumerate(batches):
            run.backward(classify(model, batch) * (float("nan") if count > 2 * SLICES else 1.0))
            optimizer.step()

    with pytest.raises(Diverged) as caught:
        launch(main)
    assert caught.value.step == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
