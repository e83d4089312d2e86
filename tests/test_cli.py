"""The command line: what it passes on, what it prints where, and the exit code of every ending."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon import errors
from echelon.cli import LATER, main
from echelon.cli.options import build_parser
from echelon.result import Result

SRC = Path(__file__).parents[1] / "src"
FIELDS = [field.name for field in dataclasses.fields(Result)]
NOTHING = dict.fromkeys(FIELDS)
PROVED = {**NOTHING, "equal": True, "max_abs_diff": 0.0, "first_difference": None}
DIFFERS = {**PROVED, "equal": False, "max_abs_diff": float("inf"), "first_difference": {"step": 3, "kind": "loss"}}
RESULT = {"steps": 7, "loss": 0.25, "digest": "ab" * 32, "metrics": {"accuracy": float("nan")}}


class Report:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def text(self) -> str:
        return "the report"

    @property
    def equal(self) -> bool:
        return bool(self.values["equal"])

    def difference(self) -> str:
        return "step 3: loss"


class Calls:
    """Stands in for what the verbs call: keeps the arguments, then returns or raises as it was told."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outcome: Any = Report(RESULT)
        self.event: dict[str, Any] | None = None
        self.started: float | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        show, self.started = options.pop("show", None), options.pop("started", None)
        self.made.append((args, options))
        if show and self.event:
            show(self.event)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    api, proof = types.ModuleType("echelon.api"), types.ModuleType("echelon.proof")
    vars(api)["train_file"] = calls
    vars(proof).update(verify_file=calls, replay=calls)
    monkeypatch.setitem(sys.modules, "echelon.api", api)
    monkeypatch.setitem(sys.modules, "echelon.proof", proof)
    return calls


def last_object(out: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values: dict[str, Any] = json.loads(out.splitlines()[-1], parse_constant=refuse)
    return values


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_passes_on_what_was_said(calls: Calls) -> None:
    line = (
        "train job.py:small --plan dp+zero2 --workers 4 --exact --steps 9 --out r --resume --port 4321 --backend gloo"
    )
    assert main(line.split()) == 0
    options = {
        "plan": "dp+zero2",
        "workers": 4,
        "exact": True,
        "steps": 9,
        "out": "r",
        "resume": True,
        "port": 4321,
        "backend": "gloo",
    }
    assert calls.made == [(("job.py:small",), options)]


def test_train_leaves_to_the_job_what_was_not_said(calls: Calls) -> None:
    assert main(["train", "job.py"]) == 0
    options = {
        "plan": "dp",
        "workers": None,
        "exact": False,
        "steps": None,
        "out": None,
        "resume": False,
        "port": None,
        "backend": "echelon",
    }
    assert calls.made == [(("job.py",), options)]


def test_workers_may_be_a_least_and_a_most(calls: Calls) -> None:
    assert main(["train", "job.py", "--workers", "02:4"]) == 0
    assert calls.made[0][1]["workers"] == "2:4"


def test_progress_goes_to_standard_output(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.event = {"event": "warning", "message": "careful"}
    assert main(["train", "job.py"]) == 0
    assert capfd.readouterr() == ("warning: careful\n", "")


def test_with_json_progress_goes_to_standard_error_and_the_result_is_the_last_line(
    calls: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    calls.event = {"event": "warning", "message": "careful"}
    assert main(["train", "job.py", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == "warning: careful\n"
    assert last_object(out) == {**RESULT, "metrics": {"accuracy": "nan"}}


def test_the_json_is_a_line_of_its_own_even_after_a_worker_left_half_a_line(
    calls: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(1, b"half a line")
    assert main(["train", "job.py", "--json"]) == 0
    assert last_object(capfd.readouterr().out)["steps"] == 7


def test_a_loop_that_prepared_nothing_has_an_object_too(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = None
    assert main(["train", "job.py:main", "--json"]) == 0
    assert last_object(capfd.readouterr().out) == NOTHING


def test_a_process_that_is_not_to_report_prints_no_json(
    calls: Calls, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.outcome = None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "job.py", "--json"]) == 0
    assert capfd.readouterr().out == ""


# --- failures --------------------------------------------------------------------------------------------------------

FAILURES = [
    (errors.ConfigError("data", "is empty"), 2, "error: data: is empty"),
    (errors.UserError(2, "ValueError: no", "Traceback: the one\n"), 3, "error: rank 2: ValueError: no"),
    (errors.Diverged(7, "the loss is nan", 1), 3, "error: step 7, rank 1: the loss is nan"),
    (errors.VerificationFailed("differs"), 4, "error: differs"),
    (errors.Stopped(12, "runs/a"), 75, "stopped on request after step 12; go on with --resume --out runs/a"),
    (errors.TooFewWorkers("rank 1 died"), 76, "error: rank 1 died"),
    (errors.PeerLost(1, "all-reduce"), 76, "error: rank 1 was lost during all-reduce"),
    (errors.Timeout("all-reduce", 30), 76, "error: all-reduce did not finish within 30 s"),
    (errors.StorageFailed("runs", "no space"), 77, "error: runs: no space"),
    (errors.CheckpointCorrupt("runs/c", "altered"), 78, "error: runs/c: altered; it was not loaded"),
]


@pytest.mark.parametrize(("error", "code", "line"), FAILURES, ids=lambda value: type(value).__name__)
def test_every_failure_has_its_code_and_one_line(
    calls: Calls, capfd: pytest.CaptureFixture[str], error: errors.EchelonError, code: int, line: str
) -> None:
    calls.outcome = error
    assert main(["train", "job.py", "--json"]) == code
    out, err = capfd.readouterr()
    assert err.splitlines()[-1] == f"echelon: {line}"
    assert last_object(out) == {**NOTHING, "error": {**errors.encode(error), "message": str(error)}}


@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_failure_has_every_field_of_its_command_and_what_is_known_in_it(
    calls: Calls, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    calls.outcome = errors.Stopped(12, "runs/a")
    calls.outcome.known = {"steps": 12, "loss": 0.5, "workers": 2}
    assert main([verb, "job.py", "--json"]) == 75
    values = last_object(capfd.readouterr().out)
    assert (values["steps"], values["loss"], values["workers"], values["digest"]) == (12, 0.5, 2, None)
    extra = ["equal", "max_abs_diff", "first_difference"] if verb == "verify" else []
    assert sorted(values) == sorted([*FIELDS, *extra, "error"])
    assert all(values[name] is None for name in extra)


@pytest.mark.parametrize(
    "error", [errors.UserError(-1, "no"), errors.Diverged(1, "no", -1), errors.PeerLost(-1, "x"), errors.Bug(-1, "no")]
)
def test_no_rank_is_null_and_never_minus_one(
    calls: Calls, capfd: pytest.CaptureFixture[str], error: errors.EchelonError
) -> None:
    calls.outcome = error
    main(["verify", "job.py", "--json"])
    out, err = capfd.readouterr()
    assert "-1" not in err
    assert last_object(out)["error"]["rank"] is None


def test_a_traceback_of_the_user_comes_first_and_once(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = errors.UserError(2, "ValueError: no", "Traceback: the one\n  in their file\n")
    assert main(["train", "job.py"]) == 3
    assert capfd.readouterr() == ("", "Traceback: the one\n  in their file\nechelon: error: rank 2: ValueError: no\n")


def test_a_reason_of_several_lines_is_said_in_one(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = errors.ConfigError("data", "is\n  empty\n")
    main(["train", "job.py"])
    assert capfd.readouterr().err == "echelon: error: data: is empty\n"


def test_anything_else_is_a_bug_of_ours_with_its_traceback(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = ZeroDivisionError("surprise")
    assert main(["train", "job.py", "--json"]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("echelon: error: ZeroDivisionError: surprise (a bug in Echelon")
    assert last_object(out)["error"]["type"] == "Bug"


def test_an_interrupt_before_training_ends_as_stopped(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = KeyboardInterrupt()
    assert main(["train", "job.py"]) == 75
    assert capfd.readouterr().err == "echelon: stopped on request before the first step; nothing was trained\n"


# --- verify and replay -----------------------------------------------------------------------------------------------


def test_verify_prints_the_report_of_an_equal_plan(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = Report(PROVED)
    assert main(["verify", "job.py", "--plan", "dp+zero1", "--workers", "3", "--steps", "5", "--exact"]) == 0
    assert calls.made == [
        (("job.py",), {"plan": "dp+zero1", "workers": 3, "steps": 5, "exact": True, "backend": "echelon"})
    ]
    assert capfd.readouterr() == ("the report\n", "")


def test_verify_ends_with_4_and_says_where_when_there_is_a_difference(
    calls: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = Report(DIFFERS)
    assert main(["verify", "job.py"]) == 4
    said = "the plan does not compute what one process computes; they differ first in step 3: loss"
    assert capfd.readouterr() == ("the report\n", f"echelon: error: {said}\n")


def test_verify_proves_as_many_workers_as_the_function_unless_a_number_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = build_parser().parse_args(["verify", "job.py"]).workers
    assert said == inspect.signature(echelon.verify).parameters["workers"].default == 2
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert "number of workers (default: 2)" in capfd.readouterr().out


def test_verify_gives_a_program_the_report_whatever_it_found(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    calls.outcome = Report(DIFFERS)
    assert main(["verify", "job.py", "--json"]) == 4
    values = last_object(capfd.readouterr().out)
    assert values.pop("error")["type"] == "VerificationFailed"
    assert values == {**DIFFERS, "max_abs_diff": "inf"}
    calls.outcome = Report(PROVED)
    assert main(["verify", "job.py", "--json"]) == 0
    assert last_object(capfd.readouterr().out) == calls.outcome.values


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_replay_names_run_step_and_slice(calls: Calls, capfd: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["replay", "runs/a", "--step", "12", "--slice", "0", *options]) == 0
    assert calls.made == [(("runs/a", 12, 0), {})]
    out = capfd.readouterr().out
    assert last_object(out)["steps"] == 7 if options else out == "the report\n"


# --- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train", "FILE[:job]"),
        ("train job.py --workers 0", "--workers: '0' is not a whole number from 1 up"),
        ("train job.py --workers four", "'four'"),
        ("train job.py --workers 3:2", "3:2 asks for at least 3 of 2"),
        ("train job.py --workers :2", "''"),
        ("train job.py --steps -1", "--steps"),
        ("train job.py --port 70000", "70000 is not a port"),
        ("train job.py --work 3", "--work"),
        ("replay runs/a --step 3", "--slice"),
        ("replay runs/a --step 0 --slice 0", "--step"),
        ("trian job.py", "trian"),
    ],
)
def test_wrong_use_ends_with_2_one_line_and_the_way_to_the_help(
    calls: Calls, capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main([*line.split(), "--json"]) == 2
    out, err = capfd.readouterr()
    assert calls.made == []
    assert len(err.splitlines()) == 1
    assert said in err
    assert "--help" in err
    values = last_object(out)
    assert values.pop("error")["type"] == "ConfigError"
    assert values == NOTHING


@pytest.mark.parametrize("verb", LATER)
def test_commands_still_to_come_say_so(capfd: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "job.py", "--faults", "kill:rank=1"]) == 2
    assert f"echelon: error: {verb}: not available yet" in capfd.readouterr().err


def test_nothing_at_all_shows_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "echelon doctor" in capfd.readouterr().err


@pytest.mark.parametrize("verb", [[], ["train"], ["verify"], ["replay"], ["doctor"], ["bench"]])
def test_every_help_teaches_by_example_and_fits_a_terminal(capfd: pytest.CaptureFixture[str], verb: list[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([*verb, "--help"])
    out = capfd.readouterr().out
    assert ending.value.code == 0
    assert out.count(f"  echelon {' '.join(verb)}") >= 1
    assert max(map(len, out.splitlines())) <= 120


# --- the process -----------------------------------------------------------------------------------------------------


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": ""}  # empty: buffered, as users have it
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=60, text=True, stderr=subprocess.PIPE, **options
    )


def test_parsing_and_failing_import_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from echelon.cli import main; from echelon.cli.options import build_parser\n"
        "build_parser().parse_args(['train', 'job.py', '--workers', '2'])\n"
        "assert main(['train']) == 2\n"
        "import echelon.progress\n"
        "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    assert run_python(code, stdout=subprocess.PIPE).stdout == "[]\n"


def test_the_start_of_the_command_includes_that_of_the_interpreter() -> None:
    code = "import time; time.sleep(0.2); began = time.time(); from echelon.cli import _process_start\n"
    before = time.time()
    child = run_python(code + "print(_process_start(), began)", stdout=subprocess.PIPE)
    started, began = map(float, child.stdout.split())
    assert before - 0.05 < started < began - 0.1


def test_a_call_from_a_program_starts_when_it_is_made(calls: Calls) -> None:
    before = time.time()
    main(["train", "job.py"])
    assert calls.started is not None
    assert calls.started >= before


def test_the_module_runs_as_the_command() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "echelon", "chaos"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("echelon: error: chaos: not available yet")


def test_a_reader_that_went_away_changes_neither_the_code_nor_the_last_words() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from echelon.cli import main; sys.exit(main(['chaos', '--json']))"
    child = run_python(code, stdout=writing)
    os.close(writing)
    assert child.returncode == 2
    assert child.stderr.count("\n") == 1


def test_an_output_that_takes_no_more_is_a_failure_of_storage(tmp_path):
    words = [sys.executable, "-m", "echelon", "doctor", "--json"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ran = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ran.returncode == 77
    assert ran.stderr.startswith("echelon: error: standard output: cannot be written: No space left on device")
