"""In exact mode every example trains the same bits: on 1 to 4 workers, stopped and resumed on fewer, under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from small import NAMES, PROGRAMS, run

SMALL = Path(__file__).with_name("small.py")
PATIENCE_S = 120


def quiet(_: object) -> None:
    """Shows nothing."""


@cache
def digest_of(name: str, workers: int) -> str:
    with TemporaryDirectory() as folder:
        return run(name, workers=workers, exact=True, out=f"{folder}/run", show=quiet).digest


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, whatever happens in between."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun's workers outlive it if it is killed
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
        process.kill()
        process.communicate(timeout=10)


def train_command(name: str, out: Path, workers: int, *more: str) -> list[str]:
    target = f"{SMALL}:{name}"
    options = ["--workers", str(workers), "--out", str(out), "--exact", *more]
    return [sys.executable, "-m", "echelon", "train", target, *options]


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        if word in line:
            return "".join(read)
    pytest.fail(f"ended without {word!r}:\n{''.join(read)}")


def digest_in(run_folder: Path) -> str:
    *_, last = (run_folder / "events.jsonl").read_text().splitlines()
    record = json.loads(last)
    assert record["event"] == "end", record
    return record["digest"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_any_number_of_workers_trains_the_bits_of_one(name: str, workers: int) -> None:
    assert digest_of(name, workers) == digest_of(name, 1)


def test_a_loop_of_ones_own_trains_the_bits_of_the_job_it_stands_for() -> None:
    assert digest_of("own_loop", 2) == digest_of("gpt", 1)


def test_different_examples_have_different_digests() -> None:
    same = {"own_loop", "gpt"}
    others = [digest_of(name, 1) for name in NAMES if name not in same]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("name", PROGRAMS)
def test_stopped_on_three_workers_and_resumed_on_two_it_trains_the_bits_of_a_run_never_stopped(
    name: str, tmp_path: Path
) -> None:
    out, gate = tmp_path / "run", tmp_path / "gate"
    with started(*train_command(name, out, 3), SMALL_GATE=str(gate)) as process:
        said = read_until(process, "step 1/")
        process.send_signal(signal.SIGTERM)
        said += read_until(process, "stopping")
        time.sleep(0.3)  # for the workers to hear of it; the steps that are left take longer
        gate.touch()
        said += process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 75, said
    steps = [event for event in map(json.loads, (out / "events.jsonl").open()) if event["event"] == "step"]
    assert 0 < len(steps) < 25, "it was to be stopped on the way"

    resume = train_command(name, out, 2, "--resume")
    done = subprocess.run(resume, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"after step {len(steps)}" in done.stdout
    assert digest_in(out) == digest_of(name, 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_torchrun_trains_the_same_bits(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with started(*torchrun, str(SMALL), name, str(out)) as process:
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, said
    assert digest_in(out) == digest_of(name, 1)
