"""A slice of a run computed again: what it read, what it lost, where the first NaN comes from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import proof_jobs
import pytest

import echelon
from echelon.api import train_file
from echelon.errors import ConfigError, Diverged, UserError
from echelon.proof import replay

JOB_FILE = """
import torch, echelon
from torch import nn
from torch.nn import functional as F

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.log, self.drop, self.out = Log(), nn.Dropout(0.2), nn.Linear(4, 3)
    def forward(self, x):
        return self.out(self.drop(self.log(x)))

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

generator = torch.Generator().manual_seed(1)
x = torch.rand(100, 4, generator=generator) + 0.1
y = torch.randint(0, 3, (100,), generator=generator)
BAD
job = echelon.Job(model=Net, loss=loss, data=echelon.Columns(x=x, y=y), batch=10, steps=12, slices=5,
                  optimizer=lambda p: torch.optim.Adam(p, lr=0.01), checkpoint_every=3)
"""


def bad_sample() -> int:
    """The second sample of slice 2 of step 7."""
    from echelon.proof.rules import lesson

    return lesson(7, size=100, batch=10, slices=5, seed=0).pieces[2].ids[1]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in step 7 because of one bad sample in slice 2."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "job.py").write_text(JOB_FILE.replace("BAD", f"x[{bad_sample()}, 1] = -1.0"))
    with pytest.raises(Diverged) as caught:
        train_file(str(folder / "job.py"), workers=2, exact=True, out=folder / "run", show=lambda event: None)
    assert caught.value.exit_code == 3
    assert "step 7" in str(caught.value)
    assert "slice 2" in str(caught.value)
    return folder


def test_replay_shows_the_bad_sample_and_the_module(broken: Path) -> None:
    report = replay(broken / "run", 7, 2, show=lambda event: None)
    assert report.from_step == 6
    assert report.first_not_finite is not None
    assert report.first_not_finite["samples"] == [bad_sample()]
    assert report.first_not_finite["name"] == "log (Log)"
    assert bad_sample() in report.samples
    text = report.text()
    assert f"from sample {bad_sample()}" in text
    assert "log (Log)" in text
    assert json.dumps(report.to_dict())


def test_the_command_line_replays(broken: Path) -> None:
    command = [sys.executable, "-m", "echelon", "replay", str(broken / "run"), "--step", "7", "--slice", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["first_not_finite"]["name"] == "log (Log)"


def test_a_neighbour_that_is_not_finite_is_pointed_out(broken: Path) -> None:
    """A run that merges slices can only name the first one of them."""
    report = replay(broken / "run", 7, 0, show=lambda event: None)
    assert report.first_not_finite is None
    assert any("slice 2" in note for note in report.notes)
    norms = [norm for _, norm in report.gradients]
    assert norms == sorted(norms, reverse=True)


def test_a_slice_has_the_same_loss_from_a_checkpoint_and_from_the_start(broken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(broken / "run", run)
    late = replay(run, 5, 1, show=lambda event: None)
    assert late.from_step == 3
    shutil.rmtree(run / "checkpoints")
    seen: list[dict[str, object]] = []
    early = replay(run, 5, 1, show=seen.append)
    assert early.from_step == 0
    assert (early.loss, early.gradients) == (late.loss, late.gradients)
    assert sum(event["event"] == "replay" for event in seen) == 4


def test_a_corrupt_checkpoint_is_passed_over_and_the_report_says_so(broken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(broken / "run", run)
    state = run / "checkpoints" / "step-00000006" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-3])
    report = replay(run, 7, 1, show=lambda event: None)
    assert report.from_step == 3
    assert any("step-00000006" in note for note in report.notes)


def test_what_cannot_be_replayed_is_said(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 to 12"):
        replay(broken / "run", 13, 0)
    with pytest.raises(ConfigError, match="0 to 4"):
        replay(broken / "run", 1, 5)
    with pytest.raises(ConfigError, match="no run folder"):
        replay(tmp_path, 1, 0)
    echelon.train(proof_jobs.make(steps=1), out=tmp_path / "run", show=lambda event: None)
    with pytest.raises(ConfigError, match="not in a file"):
        replay(tmp_path / "run", 1, 0)


def changed(broken: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the run, of a job whose file has changed since."""
    run = folder / "run"
    shutil.copytree(broken / "run", run)
    file = folder / "job.py"
    file.write_text((broken / "job.py").read_text().replace(old, new))
    facts = json.loads((run / "job.json").read_text())
    facts["source"]["file"] = str(file)
    (run / "job.json").write_text(json.dumps(facts))
    return run


def test_a_file_that_has_changed_since_is_refused(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch=20 now"):
        replay(changed(broken, tmp_path, "batch=10", "batch=20"), 1, 0, show=lambda event: None)


@pytest.mark.parametrize("old", ["return torch.log(x)", "import torch, echelon"], ids=["forward", "import"])
def test_code_that_fails_when_it_is_replayed_is_no_rank_s(broken: Path, tmp_path: Path, old: str) -> None:
    run = changed(broken, tmp_path, old, old.replace("torch.log(x)", "1 / 0").replace("echelon", "echelon; 1 / 0"))
    with pytest.raises(UserError, match=r"^in one process: .*ZeroDivisionError"):
        replay(run, 1, 0, show=lambda event: None)


def test_a_step_of_a_run_that_was_resumed_with_fewer_steps_can_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB_FILE.replace("BAD", ""))
    options = {"exact": True, "out": tmp_path / "run", "show": lambda event: None}
    train_file(str(tmp_path / "job.py"), steps=8, **options)
    result = train_file(str(tmp_path / "job.py"), steps=3, resume=True, **options)
    assert result is not None
    assert result.steps == json.loads((tmp_path / "run" / "job.json").read_text())["steps"] == 8
    assert replay(tmp_path / "run", 5, 0, show=lambda event: None).step == 5
