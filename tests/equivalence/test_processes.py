"""Real processes, forked from this one: the same bits on any number, stopped and resumed, and what a run leaves."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import echelon
from echelon.checkpoint import digest
from echelon.errors import CheckpointCorrupt, ConfigError, Diverged, Stopped, UserError
from echelon.events import read_events
from echelon.runs import claim
from equivalence.jobs import BATCH, JOBS, SLICES, Dense, Images, Noisy, adamw, classify, job, momentum, warm_up
from lockstep import Fleet

STEPS = 7


@pytest.fixture(scope="module")
def expected():
    """A job's digest, computed in this process."""
    known = {}

    def digest_of(name, **more):
        key = (name, *more.items())
        if key not in known:
            known[key] = Fleet(lambda: JOBS[name](**more), 1).run().digest()
        return known[key]

    return digest_of


@pytest.fixture
def train(tmp_path):
    """`echelon.train` in exact mode into one folder; what was shown is in `train.shown`."""

    def run(what, workers, **options):
        run.shown = []
        return echelon.train(
            what, workers=workers, **{"exact": True, "out": tmp_path / "run", "show": run.shown.append, **options}
        )

    return run


def events(result_or_path):
    return list(read_events(result_or_path / "events.jsonl"))


def steps_of(path):
    return [e["step"] for e in events(path) if e["event"] == "step"]


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workers"),
    [("dense", 1), ("dense", 2), ("dense", 3), ("dense", 4), ("sometimes", 3), ("images", 2), ("words", 4)],
)
def test_any_number_of_processes_gives_the_same_bits(train, expected, name, workers):
    assert train(JOBS[name](), workers).digest == expected(name)


@pytest.mark.parametrize("topology", ["ring", "tree", "star", "hier"])
def test_every_topology_gives_the_same_bits(train, expected, topology):
    assert train(JOBS["dense"](), 3, plan=f"dp+{topology}").digest == expected("dense")


def test_gloo_can_be_asked_for_and_gives_the_same_bits(train, expected):
    assert train(JOBS["dense"](), 2, backend="gloo").digest == expected("dense")
    (traffic,) = (e for e in train.shown if e["event"] == "traffic")
    assert {name for row in traffic["by"] for name in row["transports"]} == {"gloo"}


def test_what_cannot_carry_the_bytes_is_refused(train):
    with pytest.raises(ConfigError, match="backend: there are echelon and gloo; got 'mpi'"):
        train(JOBS["dense"](), 2, backend="mpi")
    with pytest.raises(ConfigError, match="tree: is how echelon sends"):
        train(JOBS["dense"](), 2, plan="dp+tree", backend="gloo")


@pytest.mark.parametrize("plan", ["dp", "dp+tree"])
def test_a_run_says_what_it_sent_and_it_is_what_was_predicted(train, tmp_path, plan):
    result = train(JOBS["dense"](), 3, plan=plan)
    log = events(tmp_path / "run")
    (traffic,) = (e for e in log if e["event"] == "traffic")
    assert traffic["bytes"] == traffic["predicted"] == result.bytes_sent == sum(r["bytes"] for r in traffic["rows"])
    sums = next(row for row in traffic["by"] if row["op"] == "all_reduce")
    assert sums["bytes"] == sums["predicted"] > 0
    assert sums["transports"] == ["shm"]
    assert sums["calls"] >= STEPS
    assert 0 < sums["seconds"] < 60
    # Every step says what its calls send; after the last one only small things are agreed on.
    of_steps = sum(e["bytes"] for e in log if e["event"] == "step")
    assert sums["bytes"] <= of_steps <= traffic["bytes"]


def own_loop(run):
    model, optimizer, batches = run.prepare(
        Dense(), adamw, Noisy(), batch=BATCH, slices=SLICES, steps=STEPS, clip=0.5, schedule=warm_up, seed=11
    )
    for batch in batches:
        run.backward(classify(model, batch))
        optimizer.step()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_loop_of_one_s_own_gives_the_job_s_bits(tmp_path, expected, workers):
    result = echelon.launch(own_loop, workers=workers, exact=True, seed=11, out=tmp_path, show=lambda event: None)
    assert result is not None
    assert result.digest == expected("dense")
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_without_exact_the_weights_agree_within_rounding(train, tmp_path):
    # Not with Adam: it makes a whole step of the rounding error that is all the gradient of a bias before BatchNorm.
    exact = Fleet(lambda: JOBS["images"](optimizer=momentum), 1).run().parts[0].module.state_dict()
    train(JOBS["images"](optimizer=momentum), 2, exact=False)
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=1e-4, atol=1e-6), name


def accuracy(model, batch):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y)), "loss": (classify(model, batch) * len(y), len(y))}


def test_metrics_do_not_depend_on_the_number_of_workers(train):
    evaluate = echelon.Evaluate(data=Images(70), metric=accuracy, every=3, batch=16)
    one, three = (train(JOBS["images"](evaluate=evaluate), workers).metrics for workers in (1, 3))
    assert one == three
    assert set(one) == {"accuracy", "loss"}
    assert [e["step"] for e in train.shown if e["event"] == "evaluate"] == [3, 6, 7]


class Rescaled(nn.Module):
    """Forward changes a parameter and a buffer, each worker by what it has seen."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.fill_(1 / x.detach().abs().max())
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return self.last(x * self.scale)


class Growing(Rescaled):
    """Its buffer has as many entries as the worker has seen samples."""

    def forward(self, x):
        self.largest = torch.cat((self.largest.reshape(-1), x.detach()[:, 0]))
        return self.last(x)


def test_what_forward_changes_is_rank_0_s_on_every_worker(train):
    result = train(job(model=Rescaled, steps=3, schedule=None), 3, exact=False)
    assert not [e for e in train.shown if "differ in their last bits" in e.get("message", "")]
    assert result.steps == 3


def test_what_grows_differently_on_each_worker_is_refused_by_name(train):
    with pytest.raises(ConfigError, match="forward gives one of largest another shape or type on each worker"):
        train(job(model=Growing, steps=3, schedule=None), 3, exact=False)


# --- stopped and resumed ---------------------------------------------------------------------------------------------


class Slow(Images):
    """Long enough for a signal to arrive between the first step and the last."""

    def __getitem__(self, index):
        if "RANK" in os.environ:
            time.sleep(0.001)
        return super().__getitem__(index)


def test_a_run_stopped_and_resumed_on_other_workers_equals_one_never_stopped(tmp_path, expected):
    slow = JOBS["images"](data=Slow(), steps=40)
    run = tmp_path / "run"

    def stop_at_the_first_step(event):
        if event["event"] == "step" and event["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as caught:
        echelon.train(slow, workers=3, exact=True, out=run, show=stop_at_the_first_step)
    assert 1 <= caught.value.step < 40
    assert caught.value.run == str(run)
    assert steps_of(run) == list(range(1, caught.value.step + 1))
    assert events(run)[-1]["event"] == "stopped"

    result = echelon.train(slow, workers=2, exact=True, out=run, resume=True, show=lambda event: None)
    assert result.digest == expected("images", steps=40)
    assert result.steps == 40
    assert result.samples == Fleet(lambda: JOBS["images"](steps=40), 1).parts[0].course.samples_before(41)
    assert steps_of(run) == list(range(1, 41))
    assert [e["step"] for e in events(run) if e["event"] == "resume"] == [caught.value.step]


def test_a_sigterm_to_one_worker_stops_the_run_for_all(tmp_path):
    pids = {}

    def stop(event):
        if event["event"] == "worker":
            pids[event["rank"]] = event["pid"]
        if event["event"] == "step" and pids:
            os.kill(pids.pop(1), signal.SIGTERM)
            pids.clear()

    with pytest.raises(Stopped) as caught:
        echelon.train(JOBS["images"](data=Slow(), steps=40), workers=2, out=tmp_path, show=stop)
    assert 1 <= caught.value.step < 40


def test_resuming_with_nothing_to_resume_starts_anew_and_says_so(train, expected, tmp_path):
    assert train(JOBS["dense"](), 2, resume=True).digest == expected("dense")
    said = [e["message"] for e in train.shown if e["event"] == "warning"]
    assert any("nothing to resume" in message for message in said)
    assert not [e for e in events(tmp_path / "run") if e["event"] == "resume"]


def test_a_finished_run_resumed_changes_nothing(train, tmp_path):
    first = train(JOBS["dense"](), 2)
    again = train(JOBS["dense"](), 1, resume=True)
    assert (again.digest, again.steps, again.samples, again.loss) == (
        first.digest, first.steps, first.samples, first.loss,
    )  # fmt: skip
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def tensor_rate(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01))


def test_a_learning_rate_that_is_a_tensor_is_gone_on_with_on_other_workers(train, expected):
    train(JOBS["dense"](optimizer=tensor_rate, steps=3), 3)
    resumed = train(JOBS["dense"](optimizer=tensor_rate), 2, resume=True)
    assert resumed.digest == expected("dense", optimizer=tensor_rate)


def checkpoints(tmp_path):
    return sorted((tmp_path / "run" / "checkpoints").iterdir())


def truncate(folder):
    file = folder / "state.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def test_a_truncated_checkpoint_is_passed_over_and_written_anew(train, expected, tmp_path):
    train(JOBS["dense"](checkpoint_every=1, steps=4), 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003", "step-00000004"]
    truncate(checkpoints(tmp_path)[-1])
    result = train(JOBS["dense"](steps=4), 3, resume=True)
    said = [e["message"] for e in train.shown if e["event"] == "warning"]
    assert any("step 4 is corrupt" in message for message in said)
    assert [e["step"] for e in train.shown if e["event"] == "resume"] == [3]
    assert result.digest == expected("dense", steps=4)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]

    finished = train(JOBS["dense"](), 1, resume=True)
    assert [e["step"] for e in train.shown if e["event"] == "resume"] == [4]
    assert finished.digest == expected("dense")
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def test_when_every_checkpoint_is_corrupt_none_is_loaded(train, tmp_path):
    train(JOBS["dense"](checkpoint_every=1, steps=2), 1)
    before = steps_of(tmp_path / "run")
    for folder in checkpoints(tmp_path):
        truncate(folder)
    with pytest.raises(CheckpointCorrupt, match="none of the 2 checkpoints is whole"):
        train(JOBS["dense"](), 2, resume=True)
    assert steps_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "term"), [({"seed": 12}, "seed"), ({"slices": 5}, "slices"), ({"data": Images(100)}, "dataset")]
)
def test_a_checkpoint_of_another_job_is_refused(train, changes, term):
    train(JOBS["images"](steps=1), 1)
    with pytest.raises(ConfigError) as caught:
        train(JOBS["images"](**changes), 1, resume=True)
    assert caught.value.term == term


def warnings_of(run):
    return [e["message"] for e in run.shown if e["event"] == "warning"]


def test_other_samples_than_before_are_gone_on_with_and_warned_of(train):
    train(JOBS["images"](steps=1), 1)
    train(JOBS["images"](steps=2), 1, resume=True)
    assert not warnings_of(train)
    other = Images()
    other.x = other.x + 1
    assert train(JOBS["images"](steps=3, data=other), 1, resume=True).steps == 3
    (warning,) = warnings_of(train)
    assert "as many samples as the checkpoint was made from, but other ones" in warning


def test_fewer_steps_than_the_run_has_already_are_said_to_be_done(train, tmp_path):
    first = train(JOBS["dense"](steps=4), 1)
    again = train(JOBS["dense"](steps=2), 1, resume=True)
    assert (again.digest, again.steps) == (first.digest, 4)
    assert any("has 4 steps already and 2 were asked for" in message for message in warnings_of(train))
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "job.json").read_text())["steps"] == 4


# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_the_result_says_what_the_contract_names(train, tmp_path):
    before = time.time()
    result = train(JOBS["dense"](), 2)
    elapsed = time.time() - before
    assert (result.steps, result.samples, result.plan, result.workers) == (7, 312, "dp", 2)
    assert result.run == str(tmp_path / "run")
    assert 0 < result.seconds < elapsed
    assert 0 < result.step_ms < 1000 * elapsed
    assert 0 < result.start_ms < 1000 * elapsed
    assert result.bytes_sent > 0
    assert result.recoveries == 0
    assert result.metrics == {}
    (last,) = (e for e in events(tmp_path / "run") if e["event"] == "step" and e["step"] == STEPS)
    assert result.loss == last["loss"]
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert result.digest == digest(weights)


def test_alone_nothing_is_sent(train):
    assert train(JOBS["dense"](steps=1), 1).bytes_sent == 0


def test_the_events_are_those_of_the_contract(train, tmp_path):
    train(JOBS["dense"](checkpoint_every=3), 3)
    found = events(tmp_path / "run")
    assert all(isinstance(e["time"], float) for e in found)
    workers = [e for e in found if e["event"] == "worker"]
    assert [e["rank"] for e in workers] == [0, 1, 2]
    assert len({e["pid"] for e in workers}) == 3
    assert all(e["host"] for e in workers)
    steps = [e for e in found if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    assert [e["samples"] for e in steps] == [50, 50, 31, 50, 50, 31, 50]
    assert all(e["shares"] == {"0": 3, "1": 2, "2": 2} for e in steps)
    assert all(e["seconds"] > 0 and e["bytes"] > 0 for e in steps)
    saved = [e for e in found if e["event"] == "checkpoint"]
    assert [e["step"] for e in saved] == [e["step"] for e in found if e["event"] == "saving"] == [3, 6, 7]
    assert all(e["seconds"] > 0 and e["paused_seconds"] > 0 for e in saved)
    (start,) = (e for e in found if e["event"] == "start")
    assert (start["plan"], start["workers"], start["steps"], start["samples_total"]) == ("dp", 3, 7, 312)
    assert found[-1]["event"] == "end"


def test_what_is_shown_is_what_is_logged_but_not_every_step(train, tmp_path):
    train(JOBS["dense"](), 2)
    logged = events(tmp_path / "run")
    assert all(e in logged for e in train.shown)
    assert {e["event"] for e in train.shown} == {e["event"] for e in logged}
    shown = [e["step"] for e in train.shown if e["event"] == "step"]
    assert shown[0] == 1
    assert shown[-1] == STEPS


def test_a_parameter_that_nobody_uses_is_named_in_a_warning(train, tmp_path):
    train(JOBS["dense"](steps=2), 2)
    (warning,) = (e for e in events(tmp_path / "run") if e["event"] == "warning")
    assert "no gradient for idle" in warning["message"]


def test_slices_too_small_for_batchnorm_are_warned_of_at_the_start(train, tmp_path):
    train(JOBS["dense"](steps=1, batch=59), 1)
    first = next(e for e in events(tmp_path / "run") if e["event"] == "warning")
    assert "BatchNorm1d, which fails on a single sample, and 13 samples in 7 slices" in first["message"]


def test_job_json_says_what_ran(train, tmp_path):
    train(JOBS["dense"](), 2)
    record = json.loads((tmp_path / "run" / "job.json").read_text())
    assert (record["workers"], record["seed"], record["exact"]) == (2, 11, True)
    assert str(echelon.Plan.parse(record["plan"]).resolve(2)) == "dp2"
    assert record["versions"]["torch"] == torch.__version__


def test_an_earlier_run_is_moved_aside_not_mixed_with(train, tmp_path):
    first = train(JOBS["dense"](steps=2), 1)
    train(JOBS["dense"](steps=1), 1)
    assert steps_of(tmp_path / "run") == [1]
    assert steps_of(tmp_path / "run.1") == [1, 2]
    assert digest(load_file(tmp_path / "run.1" / "model.safetensors")) == first.digest


def test_a_start_that_fails_leaves_the_earlier_run_where_it_is(train, tmp_path):
    train(JOBS["dense"](steps=1), 1)
    with pytest.raises(UserError):
        train(JOBS["dense"](model=lambda: 1 / 0), 2)
    assert steps_of(tmp_path / "run") == [1]
    assert not (tmp_path / "run.1").exists()


def test_only_what_belongs_to_the_earlier_run_is_moved(train, tmp_path, monkeypatch):
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "notes.txt").write_text("mine")
    train(JOBS["dense"](steps=1), 1, out=".")
    train(JOBS["dense"](steps=2), 1, out=here)
    assert (here / "notes.txt").read_text() == "mine"
    assert steps_of(here) == [1, 2]
    assert steps_of(tmp_path / "project.1") == [1]


def test_a_folder_that_a_run_is_writing_to_is_refused(train, tmp_path):
    with claim(str(tmp_path / "run"), "job", resume=False), pytest.raises(ConfigError, match="still going on"):
        train(JOBS["dense"](steps=1), 1)


# --- divergence ------------------------------------------------------------------------------------------------------


def test_what_was_committed_before_a_divergence_is_saved_and_can_be_gone_on_from(train, expected, tmp_path):
    def poisoned(model, batch):
        poisoned.calls += 1
        return classify(model, batch) * (float("nan") if poisoned.calls > 15 else 1.0)  # in step 5: 3 or 4 slices each

    poisoned.calls = 0
    with pytest.raises(Diverged) as caught:
        train(job(loss=poisoned), 2)
    assert caught.value.step > 1
    last = caught.value.step - 1
    assert checkpoints(tmp_path)[-1].name == f"step-{last:08d}"
    assert steps_of(tmp_path / "run") == list(range(1, last + 1))
    assert train(JOBS["dense"](), 3, resume=True).digest == expected("dense")


class Cliff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize(("workers", "exact"), [(1, False), (2, False), (2, True)])
def test_a_gradient_that_is_no_number_is_applied_nowhere(train, expected, tmp_path, workers, exact):
    def loss(model, batch):
        value = classify(model, batch)
        loss.calls += 1
        return Cliff.apply(value) if loss.calls > 14 else value

    loss.calls = 0
    with pytest.raises(Diverged, match=r"a gradient is nan, among .* See: echelon replay .* --slice 0") as caught:
        train(job(loss=loss, clip=None), workers, exact=exact)
    last = caught.value.step - 1
    assert last >= 1
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{last:08d}"]
    saved = load_file(checkpoints(tmp_path)[-1] / "state.safetensors")
    assert not any(tensor.isnan().any() for name, tensor in saved.items() if name.startswith("model/"))


def test_weights_that_are_no_numbers_do_not_become_the_newest_checkpoint(train, tmp_path):
    def collapse(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else float("nan"))

    with pytest.raises(Diverged):
        train(job(schedule=collapse, checkpoint_every=1), 1, exact=False)
    assert checkpoints(tmp_path)[-1].name == "step-00000002"


# --- refused before training -----------------------------------------------------------------------------------------


class Unsavable(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.stream = object()


def test_a_schedule_that_cannot_be_saved_is_refused_before_training(train, tmp_path):
    with pytest.raises(ConfigError, match=r"schedule.*stream"):
        train(JOBS["dense"](schedule=Unsavable), 2)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_dataset_class_is_a_callable_that_returns_one(train, expected):
    assert train(JOBS["dense"](data=Noisy), 1).digest == expected("dense")
