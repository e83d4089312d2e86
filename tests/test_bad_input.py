"""Everything that a user can get wrong, through the real command: one clear line, the contract's exit code, JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echelon.result import Result

PATIENCE_S = 100.0
FIELDS = [field.name for field in dataclasses.fields(Result)]
JOB = """
import os, sys, time
import torch, echelon
from torch import nn
from torch.utils.data import TensorDataset

RANK = os.environ.get("RANK")

def squared(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def numbers():
    return TensorDataset(torch.ones(40, 4), torch.ones(40, 1))

FIELDS = dict(
    model=lambda: nn.Linear(4, 1), loss=squared, data=numbers, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch=8, slices=4, steps=3,
)
calls = 0
{before}
job = echelon.Job(**dict(FIELDS, {changes}))
{after}
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of one command."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def object(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.object["error"]
        return found

    @property
    def line(self) -> str:
        return self.err.rstrip("\n").splitlines()[-1]


class Echelon:
    """The command, in a folder with a job file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, changes: str = "", before: str = "", after: str = "") -> Path:
        path = self.folder / "job.py"
        path.write_text(JOB.format(changes=changes, before=before, after=after))
        return path

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "echelon", "train", "job.py", "--json", "--out", "run", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> Ran:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Ran(code=process.returncode, out=out, err=err, folder=self.folder)

    def __call__(self, *words: str, changes: str = "", before: str = "", after: str = "", **environment: str) -> Ran:
        self.write(changes, before, after)
        return self.end(self.start(*words, **environment))


@pytest.fixture
def echelon(tmp_path):
    return Echelon(tmp_path)


def check(ran: Ran, code: int, kind: str, *phrases: str, traces: int = 0) -> None:
    assert ran.code == code, ran.err
    assert ran.line.startswith("echelon: "), ran.err
    for phrase in phrases:
        assert phrase in ran.line
    assert ran.error["type"] == kind
    assert ran.object.keys() == {"error", *FIELDS}
    assert " ".join(ran.error["message"].split()) in ran.line
    assert ran.err.count("Traceback (most recent call last)") == traces, ran.err


def test_a_good_job_trains(echelon):
    ran = echelon("--workers", "2")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.splitlines()[-1])["steps"] == 3


# --- wrong use, job or plan (2) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["--plan", "dp+magic"], ["magic"]),
        (["--plan", "dp2.tp2", "--workers", "2"], ["dp2.tp2", "4", "tp2 is not available yet"]),
        (["--plan", "dp.tp2", "--workers", "2"], ["tp2: is not available yet"]),
        (["--plan", "dp4", "--workers", "2"], ["dp4", "needs 4 workers"]),
        (["--workers", "0"], ["workers"]),
        (["--workers", "3:2"], ["workers"]),
        (["--steps", "0"], ["steps"]),
        (["--port", "99999"], ["99999"]),
    ],
    ids=" ".join,
)
def test_what_is_wrong_in_the_words_themselves(echelon, words, phrases):
    check(echelon(*words), 2, "ConfigError", *phrases)


def test_a_file_that_is_not_there(tmp_path):
    echelon = Echelon(tmp_path)
    check(echelon.end(echelon.start()), 2, "ConfigError", "job.py is not there")


class Taken:
    """A port that another program listens on."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return str(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_port_in_use(echelon):
    with Taken() as port:
        check(echelon("--port", port), 2, "ConfigError", "port", f"{port} is in use")


def test_a_port_of_the_environment_in_use(echelon):
    with Taken() as port:
        check(echelon("--workers", "2", MASTER_PORT=port), 2, "ConfigError", "port", f"{port} is in use")


def test_a_port_of_the_environment_that_is_none(echelon):
    check(echelon(MASTER_PORT="http"), 2, "ConfigError", "MASTER_PORT", "'http'")


def test_the_port_that_is_asked_for_counts_more_than_the_environment_s(echelon):
    with Taken() as port, Taken() as other:
        check(echelon("--port", port, MASTER_PORT=other), 2, "ConfigError", f"{port} is in use")


def test_torchrun_with_another_number_of_workers(echelon):
    check(echelon("--workers", "2", RANK="0", WORLD_SIZE="3"), 2, "ConfigError", "workers", "2", "WORLD_SIZE is 3")


def test_a_process_group_that_the_data_make_themselves(echelon):
    before = (
        "import torch.distributed as d\n"
        "def grouped():\n"
        "    d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "    return numbers()"
    )
    ran = echelon("--workers", "2", before=before, changes="data=grouped")
    check(ran, 2, "ConfigError", "init_process_group", "Echelon makes the process group itself")


NO_EVALUATION = "evaluate=echelon.Evaluate(data=[], metric=squared)"
SPARSE = "model=lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))"
COUNTING = """
class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return super().forward(x)
"""
UNSAVABLE = """
class Plan(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.log = object()
"""
HOARDER = """
class Hoarder(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = object()
"""
ITERABLE = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1
"""


@pytest.mark.parametrize(
    ("words", "changes", "before", "phrases"),
    [
        pytest.param(["--plan", "dp+zero2", "--workers", "2"], "", "", ["zero2", "not available yet"], id="zero2"),
        pytest.param(["--workers", "2"], "slices=1", "", ["2 workers cannot share 1 slices"], id="few slices"),
        pytest.param([], "batch=3", "", ["3 samples a step cannot be cut into 4 slices"], id="small batch"),
        pytest.param([], "data=[]", "", ["list is empty"], id="no samples"),
        pytest.param([], NO_EVALUATION, "", ["evaluate.data", "list is empty"], id="no evaluation"),
        pytest.param([], "model=nn.Linear(4, 1)", "", ["Linear that was made already", "lambda"], id="module"),
        pytest.param([], "data=Endless()", ITERABLE, ["map-style dataset is needed"], id="iterable"),
        pytest.param([], "optimizer=lambda p: torch.optim.LBFGS(p)", "", ["LBFGS"], id="LBFGS"),
        pytest.param([], "model=lambda: nn.SyncBatchNorm(4)", "", ["SyncBatchNorm", "use BatchNorm"], id="sync norm"),
        pytest.param([], SPARSE, "", ["sparse=False"], id="sparse"),
        pytest.param(["--exact"], "compile=True", "", ["exact", "compile=False"], id="exact compile"),
        pytest.param(
            ["--exact", "--workers", "2"], "model=Counting", COUNTING, ["buffer seen of Counting"], id="exact buffer"
        ),
        pytest.param([], "schedule=Plan", UNSAVABLE, ["schedule", "'log'", "cannot be kept"], id="unsavable"),
        pytest.param([], "optimizer=Hoarder", HOARDER, ["'kept' of", "cannot be kept"], id="unsavable state"),
        pytest.param([], "schedule=lambda o: None", "", ["must return a torch LRScheduler"], id="no schedule"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_work(echelon, words, changes, before, phrases):
    ran = echelon(*words, changes=changes, before=before)
    check(ran, 2, "ConfigError", *phrases)
    assert not list(ran.folder.glob("run/checkpoints/step-*"))


def test_a_file_without_a_job(echelon):
    check(echelon(after="job = None"), 2, "ConfigError", "no module-level name 'job'", "echelon.Job")


def test_training_at_import_without_the_guard(echelon):
    ran = echelon(after="echelon.train(job, workers=2)")
    check(ran, 2, "ConfigError", "train", "if __name__ == '__main__':")


# --- the user's code (3) ---------------------------------------------------------------------------------------------

POISON = """
def poisoned(model, batch):
    global calls
    calls += 1
    return squared(model, batch) * (float("nan") if RANK == "1" and calls == 4 else 1.0)
"""
RAISING = """
class Brittle:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 13:
            raise ValueError("sample is torn")
        return torch.ones(4), torch.ones(1)
"""
MIXED = """
def mixed(model, batch):
    global calls
    calls += 1
    value = squared(model, batch)
    return value if calls % 2 else (value, 1.0)
"""


def test_a_loss_that_is_nan_names_step_slice_and_rank_after_saving_what_was_committed(echelon):
    ran = echelon("--workers", "2", "--exact", changes="loss=poisoned", before=POISON)
    check(ran, 3, "Diverged", "step 2", "slice 3", "rank 1", "nan")
    assert (ran.error["step"], ran.error["rank"]) == (2, 1)
    known = {name: value for name, value in ran.object.items() if value is not None and name != "error"}
    assert known.pop("loss") >= 0
    assert known == {"plan": "dp", "workers": 2, "run": "run", "steps": 1, "samples": 8, "metrics": {}}
    assert [path.name for path in (ran.folder / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_dataset_that_raises_at_one_index_shows_that_traceback_once_and_the_rank(echelon):
    ran = echelon("--workers", "3", changes="data=Brittle(), steps=5", before=RAISING)
    check(ran, 3, "UserError", "rank ", "ValueError: sample is torn", "reading the dataset", traces=1)
    assert ran.error["rank"] in range(3)
    assert ran.err.count("raise ValueError") == 1
    assert "while reading sample 13 of the dataset" in ran.err
    assert "in __getitem__" in ran.err


@pytest.mark.parametrize(
    ("changes", "before", "phrases", "traces"),
    [
        pytest.param("loss=lambda m, b: m(b[0])", "", ["tensor of shape (8, 1)", "scalar"], 0, id="no scalar"),
        pytest.param("loss=lambda m, b: 3.0", "", ["float", "scalar"], 0, id="no tensor"),
        pytest.param("loss=lambda m, b: squared(m, b).detach()", "", ["does not depend"], 0, id="no gradient"),
        pytest.param("loss=lambda m, b: 1 / 0", "", ["ZeroDivisionError", "computing the loss"], 1, id="raises"),
        pytest.param("model=lambda: 1 / 0", "", ["ZeroDivisionError", "making the model"], 1, id="model raises"),
        pytest.param("data=lambda: 1 / 0", "", ["ZeroDivisionError", "making data"], 1, id="data raises"),
        pytest.param("loss=lambda m, b: sys.exit(0)", "", ["sys.exit(0)"], 1, id="exits"),
        pytest.param("loss=lambda m, b: os._exit(0)", "", ["rank 0", "os._exit"], 0, id="leaves"),
        pytest.param("loss=mixed, microbatch=2", MIXED, ["always return the same"], 0, id="mixed"),
        pytest.param("", "raise ValueError('no')", ["did not import", "ValueError: no"], 1, id="import"),
        pytest.param("", "def broken(:", ["did not import", "SyntaxError"], 1, id="syntax"),
        pytest.param("", "sys.exit(4)", ["did not import", "SystemExit: 4"], 1, id="import exits"),
    ],
)
def test_code_that_fails(echelon, changes, before, phrases, traces):
    check(echelon(changes=changes, before=before), 3, "UserError", *phrases, traces=traces)


# --- storage (77, 78) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "file/below", "/sys/kernel/echelon-test"])
def test_a_folder_that_cannot_be_written(echelon, place, tmp_path):
    (tmp_path / "file").write_text("here already")
    ran = echelon("--out", place)
    check(ran, 77, "StorageFailed", place, "--out")
    assert (tmp_path / "file").read_text() == "here already"


def test_a_corrupt_checkpoint_is_refused(echelon):
    assert echelon().code == 0
    run = echelon.folder / "run"
    (checkpoint,) = (run / "checkpoints").iterdir()
    tensors = checkpoint / "state.safetensors"
    os.truncate(tensors, tensors.stat().st_size - 1)
    ran = echelon("--resume")
    check(ran, 78, "CheckpointCorrupt", "not loaded")
    assert checkpoint.exists()


def test_a_checkpoint_of_another_model_is_refused(echelon):
    assert echelon().code == 0
    ran = echelon("--resume", changes="model=lambda: nn.Sequential(nn.Linear(4, 1))")
    check(ran, 2, "ConfigError", "model", "start anew with another --out")


# --- stopped and lost (75, 76) ---------------------------------------------------------------------------------------

SLOW = """
class Slow:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4), torch.ones(1)
"""


def wait_for(process: subprocess.Popen[str], is_there: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def logged(path: Path, word: str) -> bool:
    return path.exists() and f'"event": "{word}"' in path.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stop_saves_and_can_be_gone_on_from(echelon, number):
    echelon.write("data=Slow(), steps=500", SLOW)
    process = echelon.start("--workers", "2")
    wait_for(process, lambda: logged(echelon.folder / "run" / "events.jsonl", "step"))
    os.killpg(process.pid, number)  # a terminal's Ctrl-C goes to every process
    ran = echelon.end(process)
    check(ran, 75, "Stopped", "--resume --out run")
    assert ran.error["step"] >= 1
    assert [name for name, value in ran.object.items() if value is None] == []
    assert (ran.object["steps"], ran.object["run"]) == (ran.error["step"], "run")
    assert ran.object["samples"] == 8 * ran.object["steps"]
    assert len(ran.object["digest"]) == 64
    assert (echelon.folder / "run" / "checkpoints" / f"step-{ran.error['step']:08d}").is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stop_while_the_job_is_imported_ends_at_once(echelon, number):
    echelon.write(before="open('importing', 'w').close(); time.sleep(600)")
    process = echelon.start("--workers", "2")
    wait_for(process, (echelon.folder / "importing").exists)
    os.killpg(process.pid, number)
    ran = echelon.end(process)
    check(ran, 75, "Stopped", "nothing was trained")
    assert {name: value for name, value in ran.object.items() if value is not None and name != "error"} == {
        "plan": "dp",
        "workers": 2,
    }


DYING = """
def dying(model, batch):
    global calls
    calls += 1
    if RANK == "1" and calls == 2:
        os.kill(os.getpid(), 9)
    return squared(model, batch)
"""


def test_a_worker_killed_names_the_rank(echelon):
    ran = echelon("--workers", "3", changes="loss=dying", before=DYING)
    check(ran, 76, "TooFewWorkers", "rank 1", "SIGKILL", "nothing was saved yet, so start it again")


def test_a_worker_killed_after_a_checkpoint_says_how_to_go_on(echelon):
    later = DYING.replace("calls == 2", "calls == 9 and not time.sleep(1)")  # the first checkpoint is on disk by then
    ran = echelon("--workers", "3", "--steps", "12", changes="loss=dying, checkpoint_every=1", before=later)
    check(ran, 76, "TooFewWorkers", "rank 1", "SIGKILL", "go on with --resume --out run")


def test_memory_that_runs_out_says_what_to_do(echelon):
    ran = echelon(changes="loss=lambda m, b: torch.empty(2**60).sum()")
    check(ran, 2, "OutOfMemory", "memory", "microbatch")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    yield
    assert not [path for path in Path("/proc").glob("[0-9]*") if works_in(path, tmp_path)]
    shutil.rmtree(tmp_path)


def works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        return False
