"""verify raises no false alarm, whatever the job, and says what it did; bad jobs end as they do in training."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import proof_jobs
import pytest
import torch
from torch import nn

import echelon
from echelon.errors import ConfigError, Diverged, Stopped, UserError
from echelon.proof import verify_file
from echelon.result import Result

JOB_FILE = """
import torch, echelon
from torch.nn import functional as F

x = torch.linspace(-1, 1, 90).reshape(30, 3)
job = echelon.Job(
    model=lambda: torch.nn.Linear(3, 2),
    loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"][:, :2]),
    data=echelon.Columns(x=x),
    optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
    batch=8, steps=50, slices=4,
)
"""


@pytest.mark.parametrize("exact", [False, True], ids=["rounding", "exact"])
@pytest.mark.parametrize("name", proof_jobs.JOBS)
def test_a_sound_plan_is_not_accused(name: str, exact: bool) -> None:
    report = echelon.verify(proof_jobs.JOBS[name](), workers=3 if not exact else 2, exact=exact)
    assert report.equal, report.text()
    assert report.first_difference is None
    assert report.likely_reason == ""
    if exact:
        assert report.max_abs_diff == 0.0


@pytest.mark.parametrize("exact", [False, True], ids=["rounding", "exact"])
@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_is_proved(workers: int, exact: bool) -> None:
    report = echelon.verify(proof_jobs.JOBS["clip and schedule"](), workers=workers, exact=exact)
    assert report.equal, report.text()
    assert report.workers == workers


def test_the_steps_include_the_end_of_an_epoch_that_is_near() -> None:
    report = echelon.verify(proof_jobs.make(batch=30, steps=None, epochs=2))
    assert report.steps == 4
    assert report.rows[-1].step == 4
    assert any("one epoch and one step more" in note for note in report.notes)


def test_dropout_is_proved_without_merging_and_the_report_says_so() -> None:
    report = echelon.verify(proof_jobs.make(model=proof_jobs.dropout_mlp), workers=2, steps=2)
    assert report.equal, report.text()
    assert any("not merged" in note and "random numbers" in note for note in report.notes)


def test_a_loss_that_is_no_mean_over_samples_is_pointed_out() -> None:
    report = echelon.verify(proof_jobs.JOBS["contrast"](), workers=2, steps=2)
    assert any("depends on the number of workers" in note for note in report.notes), report.notes


def test_a_buffer_that_forward_changes_is_named_and_not_compared() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return self.out(x)

    report = echelon.verify(proof_jobs.make(model=Counting), workers=2, steps=2)
    assert report.equal, report.text()
    assert any("seen" in note for note in report.notes)


def test_a_buffer_that_feeds_back_into_the_loss_is_the_reason() -> None:
    class Feedback(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 4)
            self.register_buffer("level", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.level *= 1.0 + 0.1 * x.detach().abs().mean()
            return self.out(x) * self.level

    report = echelon.verify(proof_jobs.make(model=Feedback), workers=2, steps=2)
    assert not report.equal
    assert "forward changes the buffer level" in report.likely_reason, report.text()


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    echelon.verify(proof_jobs.make(), workers=2, steps=1)
    with pytest.raises(UserError):
        echelon.verify(proof_jobs.make(loss=lambda model, batch: 1 / 0), workers=2, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_a_job_is_said_as_in_training() -> None:
    with pytest.raises(ConfigError, match="cannot share"):
        echelon.verify(proof_jobs.make(), workers=6)
    with pytest.raises(ConfigError, match="is empty"):
        echelon.verify(proof_jobs.make(data=[]), workers=2)
    with pytest.raises(Diverged, match="step 1"):
        echelon.verify(proof_jobs.make(loss=lambda m, b: proof_jobs.mean_loss(m, b) * float("nan")), workers=2)
    with pytest.raises(ConfigError, match="must be an"):
        echelon.verify("job.py")  # type: ignore[arg-type]


def test_a_job_in_a_file_is_proved_by_processes_that_import_it(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB_FILE)
    seen: list[dict[str, object]] = []
    report = verify_file(str(file), plan="dp", workers=2, exact=True, steps=2, show=seen.append)
    assert report.equal, report.text()
    assert {"reference", "step"} <= {str(event["event"]) for event in seen}
    assert not any(event["event"] == "end" for event in seen)
    assert report.steps == 2
    values = json.loads(json.dumps(report.to_dict()))
    assert values["equal"] is True
    assert values["max_abs_diff"] == 0.0
    assert values["first_difference"] is None


def test_the_command_line_says_equal_in_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB_FILE)
    command = [sys.executable, "-m", "echelon", "verify", str(file), "--workers", "2", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["equal"] is True
    assert values["max_abs_diff"] < 1e-5
    result = Result(**{field.name: values[field.name] for field in dataclasses.fields(Result)})
    assert (result.steps, result.samples, result.plan, result.workers, result.run) == (2, 16, "dp", 2, "")
    assert result.loss == values["rows"][-1]["loss"]
    assert len(result.digest) == 64
    assert result.start_ms > 0
    assert result.bytes_sent > 0
    assert list(tmp_path.iterdir()) == [file] or {p.name for p in tmp_path.iterdir()} <= {"job.py", "__pycache__"}


def test_a_file_that_calls_verify_without_a_guard_is_proved_once(tmp_path: Path) -> None:
    """An import would come by the call again, and start workers of its own: forks of the script are used instead."""
    file = tmp_path / "job.py"
    file.write_text(JOB_FILE + "print(echelon.verify(job, workers=2, steps=1).equal)\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


PLANTED = """
from echelon.agree import update
def twice(self, original=update.Update.apply):
    original(self)
    return original(self)
update.Update.apply = twice
"""


def test_a_difference_is_exit_code_4_and_names_step_and_parameter(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(PLANTED + JOB_FILE)
    command = [sys.executable, "-m", "echelon", "verify", str(file), "--workers", "2", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["equal"] is False
    assert values["first_difference"]["step"] == 1
    assert values["first_difference"]["name"] == "weight"
    assert "applied twice" in values["likely_reason"]
    assert values["error"]["type"] == "VerificationFailed"
    assert (values["steps"], values["workers"]) == (2, 2)
    assert "they differ first in step 1: parameter weight by " in done.stderr
    assert "{" not in done.stderr


def test_a_proof_that_is_stopped_under_the_plan_says_how_far_that_came(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB_FILE)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="nothing was kept") as caught:
        verify_file(str(tmp_path / "job.py"), steps=1000, show=stop)
    known = Result(**caught.value.known)
    assert 1 <= known.steps == caught.value.step < 1000
    assert (known.samples > 0, len(known.digest), known.run) == (True, 64, "")


def test_what_fails_in_the_one_process_names_no_rank(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        JOB_FILE.replace("loss=lambda model, batch: ", "loss=lambda m, b: 1 / 0 if m else ")
    )
    command = [sys.executable, "-m", "echelon", "verify", "job.py", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "echelon: error: in one process: ZeroDivisionError" in done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert (values["error"]["rank"], values["plan"], values["workers"], values["steps"]) == (None, "dp", 2, None)


def test_the_first_difference_is_told_in_words() -> None:
    report = echelon.verify(proof_jobs.make(), workers=1, steps=1)
    assert report.difference() == ""
    place = {"step": 4, "kind": "gradient", "name": "out.bias", "difference": 0.5, "tolerance": 0.0}
    assert replace(report, first_difference=place).difference() == (
        "step 4: gradient out.bias by 5.00e-01 (tolerance 0)"
    )
    alone = {"step": 4, "kind": "loss", "name": "loss"}
    assert replace(report, first_difference=alone).difference() == "step 4: loss"
