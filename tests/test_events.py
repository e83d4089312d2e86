"""The event log: whole lines, honest JSON, and steps that are taken back when they will be computed again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from echelon.errors import StorageFailed
from echelon.events import EventLog, event, read_events, rewind

FULL = Path("/dev/full")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def write(path, *records):
    log = EventLog(path)
    for record in records:
        log(record)
    log.close()


def test_an_event_has_its_name_and_the_time_in_unix_seconds():
    before = time.time()
    record = event("step", step=3)
    assert record["event"] == "step"
    assert record["step"] == 3
    assert before <= record["time"] <= time.time()


def test_each_event_is_on_disk_as_soon_as_it_is_logged(path):
    log = EventLog(path)
    log(event("step", step=1))
    assert [e["step"] for e in read_events(path)] == [1]
    log.close()


def test_a_log_is_appended_to(path):
    write(path, event("step", step=1))
    write(path, event("step", step=2))
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_every_line_is_json_that_any_reader_takes(path):
    def refuse(constant):
        raise AssertionError(constant)

    write(path, event("evaluate", step=1, metrics={"empty": float("nan"), "top": float("inf")}))
    (line,) = path.read_text().splitlines()
    metrics = json.loads(line, parse_constant=refuse)["metrics"]
    assert {name: str(float(value)) for name, value in metrics.items()} == {"empty": "nan", "top": "inf"}


def test_a_torn_last_line_is_left_out(path):
    write(path, event("step", step=1))
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    assert [e["step"] for e in read_events(path)] == [1]


def test_steps_after_the_checkpoint_are_taken_back(path):
    write(path, event("start"), *(event("step", step=n) for n in (1, 2, 3, 4)), event("stopped"))
    assert rewind(path, 2) == 2
    assert [(e["event"], e.get("step")) for e in read_events(path)] == [
        ("start", None), ("step", 1), ("step", 2), ("stopped", None),
    ]  # fmt: skip


def test_pushes_and_evaluations_of_taken_back_steps_go_with_them(path):
    write(path, event("evaluate", step=2), event("push", step=3), event("evaluate", step=4))
    assert rewind(path, 2) == 0
    assert [(e["event"], e["step"]) for e in read_events(path)] == [("evaluate", 2)]


def test_a_torn_line_does_not_swallow_the_next_run_s_first_event(path):
    write(path, event("step", step=1))
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    rewind(path, 1)
    write(path, event("step", step=2))
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_a_line_that_is_no_event_does_not_stand_in_the_way_of_a_resume(path):
    write(path, event("step", step=1))
    with path.open("ab") as file:
        file.write(b"\x00\xff\x00\n7\n{}\n")
    write(path, event("step", step=2))
    assert rewind(path, 5) == 0
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_without_a_log_there_is_nothing_to_take_back(path):
    assert rewind(path, 0) == 0
    assert not path.exists()


def test_a_log_that_cannot_be_written_names_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed) as caught:
        EventLog(tmp_path / "file" / "events.jsonl")
    assert caught.value.path == str(tmp_path / "file" / "events.jsonl")


@pytest.mark.parametrize(
    "line", ['{"event": "step"}', '{"event": "step", "step": "7"}', '{"event": ["step"]}', "[" * 100_000, "null"]
)
def test_an_odd_line_does_not_stand_in_the_way_of_a_resume_either(path, line):
    write(path, event("step", step=1))
    with path.open("a") as file:
        file.write(line + "\n")
    write(path, event("step", step=2), event("step", step=3))
    assert rewind(path, 2) == 1
    assert [(e["event"], e["step"]) for e in read_events(path)] == [("step", 1), ("step", 2)]


def test_a_folder_in_the_log_s_place_is_a_failure_of_storage(path):
    path.mkdir()
    for attempt in (lambda: rewind(path, 0), lambda: EventLog(path)):
        with pytest.raises(StorageFailed, match="Is a directory"):
            attempt()


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_told_of_once_and_with_what_to_do():
    log = EventLog(FULL)
    with pytest.raises(StorageFailed, match="No space left on device; free some space there"):
        log(event("step", step=1))
    log.close()
