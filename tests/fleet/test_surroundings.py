"""Training where the surroundings are not what a program expects: no standard streams, few open files, no folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 100.0
JOB = """
import torch, echelon

def make_job():
    return echelon.Job(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=8, slices=2, steps=2,
    )

if __name__ == "__main__":
    echelon.train(make_job(), workers=2, out="run")  # a job without a name is reached by forking this process
else:
    job = make_job()
"""
WAYS = {"command": "-m echelon train job.py --workers 2 --out run", "script": "job.py"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", line]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("files", [12, 20, 70])
def test_too_few_open_files_are_told_by_the_name_of_the_limit(folder: Path, way: str, files: int) -> None:
    ran = shell(f"ulimit -n {files}; exec {sys.executable} {WAYS[way]}", folder)
    assert ran.returncode == (2 if way == "command" else 1), ran.stderr
    assert "ulimit -n: " in ran.stderr.splitlines()[-1]
    assert not (folder / "run").exists()


def test_a_current_folder_that_was_deleted_is_told(folder: Path) -> None:
    words = f"-m echelon train {folder / 'job.py'} --out {folder / 'run'}"
    ran = shell(f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -P {words}", folder)
    assert ran.returncode == 2, ran.stderr
    assert "folder: the current folder was deleted" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_standard_streams(folder: Path, way: str, closed: str) -> None:
    ran = shell(f"exec {sys.executable} {WAYS[way]} {closed}", folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    events = [json.loads(line)["event"] for line in (folder / "run/events.jsonl").read_text().splitlines()]
    assert events[-1] == "end"
