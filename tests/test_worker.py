"""A worker and its surroundings: what the environment says, where it may be stopped, what a job's file may change."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from echelon.errors import ConfigError, PeerLost
from echelon.request import Request
from echelon.worker import port_wanted, rank_around_us, run_joined, workers_around_us

PATIENCE_S = 100.0
JOB = """
import os, time
import numpy as np, torch, echelon
from torch import nn
{before}

def squared(model, batch):
    say("computing")
    time.sleep({slow})
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])

def say(what):
    print(what, flush=True)

def make():
    say("made")
    return nn.Linear(4, 1)

job = echelon.Job(
    model=make, loss=squared, data=echelon.Columns(x=np.ones((8, 4), np.float32), y=np.ones((8, 1), np.float32)),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=4, slices=2, steps=2,
)
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def say(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return say


@pytest.fixture
def start(tmp_path):
    """Starts the command beside a job file; what is left of it at the end is killed."""
    started = []

    def start(*words, before="", slow=0, **environment):
        (tmp_path / "job.py").write_text(JOB.format(before=before, slow=slow))
        command = [sys.executable, "-m", "echelon", "train", "job.py", "--out", "run", *words]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)


def wait_for(process, word):
    """Until the process has printed the word."""
    said, end = b"", time.monotonic() + PATIENCE_S
    while word.encode() not in said:
        assert select.select([process.stdout], [], [], end - time.monotonic())[0], f"{word} was never said"
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, f"it ended without having said {word}"
        said += piece


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_served(port):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens at {port}")


# --- the environment -------------------------------------------------------------------------------------------------


def test_without_another_launcher_there_is_nobody_around(environment):
    assert (workers_around_us(), rank_around_us(), port_wanted()) == (None, 0, None)


def test_torchrun_says_who_is_around(environment):
    environment(RANK="2", WORLD_SIZE="3", MASTER_PORT="29511")
    assert (workers_around_us(), rank_around_us(), port_wanted()) == (3, 2, 29511)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RANK", {"RANK": "abc", "WORLD_SIZE": "2"}),
        ("RANK", {"RANK": "", "WORLD_SIZE": "2"}),
        ("RANK", {"RANK": "-1", "WORLD_SIZE": "2"}),
        ("RANK", {"RANK": "2", "WORLD_SIZE": "2"}),
        ("WORLD_SIZE", {"RANK": "0", "WORLD_SIZE": "abc"}),
        ("WORLD_SIZE", {"RANK": "0", "WORLD_SIZE": "0"}),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(environment, name, values):
    environment(**values)
    with pytest.raises(ConfigError) as caught:
        workers_around_us()
    assert caught.value.term == name
    assert repr(values[name]) in caught.value.why


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "x"), ("LOCAL_RANK", "")],
)
def test_a_place_on_this_machine_that_cannot_be_is_refused_by_name(environment, name, value):
    environment(RANK="0", WORLD_SIZE="2", **{name: value})
    with pytest.raises(ConfigError) as caught:
        run_joined(None, None)
    assert caught.value.term == name


@pytest.mark.parametrize("port", ["abc", "99999", "-1", "1.5"])
def test_a_port_that_is_none_is_refused_by_a_joining_worker_too(environment, port):
    environment(RANK="0", WORLD_SIZE="2", MASTER_PORT=port)
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        port_wanted()
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        run_joined(None, None)


@pytest.mark.parametrize(("rank", "cause"), [(1, "rank 1 says why, unless"), (-1, "another rank says why")])
def test_who_lost_another_rank_says_where_to_look_for_the_cause(environment, monkeypatch, capsys, rank, cause):
    def lose(*_):
        raise PeerLost(rank, "the sum")

    environment(RANK="0", WORLD_SIZE="2")
    monkeypatch.setattr("echelon.one_worker.run_one", lose)
    with pytest.raises(SystemExit) as ended:
        run_joined(Request(), None)
    assert ended.value.code == PeerLost.exit_code
    assert cause in capsys.readouterr().err


def test_the_command_refuses_an_impossible_rank(start):
    process = start("--json", RANK="abc", WORLD_SIZE="2")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, err
    assert json.loads(out.splitlines()[-1])["error"]["term"] == "RANK"


# --- being stopped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_waits_for_the_others_ends_at_the_first_signal(start, tmp_path, rank, number):
    port = free_port()
    process = start(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port))
    wait_for(process, "made")
    if rank == 0:
        wait_until_served(port)
    time.sleep(0.5)  # it is in C++ now; if not yet, the test proves less but nothing wrong
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    assert [line for line in err.splitlines() if line.startswith("echelon:")] == [
        f"echelon: rank {rank}: stopped on request before the first step; nothing was trained"
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["job.py"]


def test_an_interrupt_after_the_first_request_ends_a_worker_in_the_middle_of_a_step(start, tmp_path):
    process = start(slow=2 * PATIENCE_S, **ALONE)
    wait_for(process, "computing")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)  # sooner would be taken for the same request, said twice
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    assert "ended by the second request to stop" in err


def test_a_worker_that_trains_stops_after_the_step(start, tmp_path):
    process = start("--steps", "1000", slow=0.1, **ALONE)
    wait_for(process, "computing")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name < "step-00001000"
    assert "stopped on request after step" in err


# --- what the job's file does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [{}, ALONE], ids=["ours", "torchrun"])
def test_a_file_that_goes_elsewhere_trains_in_the_folder_that_was_named(start, tmp_path, around):
    foreign = tmp_path / "elsewhere" / "run"
    (foreign / "checkpoints").mkdir(parents=True)
    process = start("--json", before="os.chdir('elsewhere')", **around)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["run"] == "run"
    assert [entry.name for entry in (tmp_path / "elsewhere").iterdir()] == ["run"]
    assert [entry.name for entry in foreign.iterdir()] == ["checkpoints"]
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [
        "checkpoints", "events.jsonl", "job.json", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("around", [{}, ALONE], ids=["ours", "torchrun"])
@pytest.mark.parametrize(
    ("before", "code", "phrase"),
    [
        (
            "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
            2,
            "init_process_group: was called before training; Echelon makes the process group itself",
        ),
        (
            "import torch.distributed as d; d.init_process_group('gloo')",
            2,
            "init_process_group: was called before training; Echelon makes the process group itself",
        ),
        ("torch.set_default_device('meta')", 2, "set_default_device: torch's default device was set to meta"),
    ],
)
def test_what_a_file_must_not_do_is_said(start, before, code, phrase, around):
    process = start(before=before, **around)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, err
    assert phrase in err.splitlines()[-1]


def test_a_file_that_raises_keyboard_interrupt_itself_is_the_user_s_failure(start):
    process = start(before="raise KeyboardInterrupt")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    assert "did not import: KeyboardInterrupt" in err.splitlines()[-1]
