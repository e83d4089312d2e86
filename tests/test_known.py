"""What an error says of a run that came to no result: what its log tells, and never what an earlier run's does."""

from __future__ import annotations

import pytest

from echelon.errors import Stopped, TooFewWorkers
from echelon.events import to_line
from echelon.known import Known, committed

STEPS = [{"event": "step", "step": step, "loss": 1 / step, "samples": 8} for step in (1, 2, 3)]
MEASURED = {"event": "evaluate", "step": 2, "metrics": {"accuracy": 0.5}}
TOLD = {"steps": 3, "samples": 24, "loss": 1 / 3, "metrics": {"accuracy": 0.5}}


@pytest.fixture
def log(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text("".join(map(to_line, [{"event": "start"}, *STEPS, MEASURED])) + '{"event": "step", "st')
    return log


def known_of(error, log, *events, run=None):
    known = Known(plan="dp", workers=2)
    known.run = run
    heard = []
    hear = known.listen(log, heard.append)
    for event in events:
        hear(event)
    with pytest.raises(type(error)) as caught, known.told():
        raise error
    assert heard == list(events)
    return caught.value.known


def test_a_log_tells_of_its_committed_steps(log):
    assert committed(log) == TOLD


def test_a_log_that_is_not_there_tells_nothing(tmp_path):
    assert committed(tmp_path / "none") == {}


def test_an_error_carries_what_the_run_had_committed_and_its_folder(log, tmp_path):
    known = known_of(TooFewWorkers("gone"), log, {"event": "start"}, run=tmp_path)
    assert known == {"plan": "dp", "workers": 2, "run": str(tmp_path), **TOLD}


def test_before_a_run_starts_the_log_in_its_folder_is_not_its_own(log):
    assert known_of(TooFewWorkers("gone"), log, {"event": "waiting"}) == {"plan": "dp", "workers": 2}


def test_a_folder_that_was_taken_away_is_not_named(log, tmp_path):
    assert "run" not in known_of(TooFewWorkers("gone"), log, run=tmp_path / "gone")


def test_what_an_error_knows_itself_stays(log):
    stopped = Stopped(9, "runs/a")
    stopped.known = {"steps": 9, "plan": "dp", "digest": "ab"}
    known = known_of(stopped, log, {"event": "start"})
    assert (known["steps"], known["digest"], known["samples"]) == (9, "ab", 24)
