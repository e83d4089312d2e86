"""Run folders: a new one for everybody, the right one to resume, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import ConfigError, StorageFailed
from echelon.runs import claim, set_aside


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(name, *parts):
    for part in parts:
        place = Path("runs") / name / part
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if part.startswith("checkpoints") else place.touch()


def test_runs_of_the_same_second_have_folders_of_their_own():
    with claim("", "job", resume=False) as one, claim("", "job", resume=False) as other:
        assert one != other
        assert one.is_dir()
        assert other.is_dir()


def test_a_folder_in_which_nothing_was_left_is_taken_away():
    with claim("", "job", resume=False) as run:
        pass
    assert not run.exists()


def test_a_folder_that_holds_something_stays():
    with claim("a/b", "job", resume=False) as run:
        (run / "events.jsonl").touch()
    assert (run / "events.jsonl").exists()


def test_only_one_run_writes_to_a_folder_and_the_next_may_when_it_has_ended():
    with (
        claim("x", "job", resume=False),
        pytest.raises(ConfigError, match="still going on"),
        claim("x", "job", resume=False),
    ):
        pass
    with claim("x", "job", resume=True):
        pass


def test_to_resume_the_newest_of_exactly_that_name_that_has_a_checkpoint_is_taken():
    make("job-20260101-000000", "checkpoints/step-00000003")
    make("job-20260102-000000", "checkpoints/step-00000003")
    make("job-20260102-000000-2", "checkpoints/step-00000003")
    make("job-20260103-000000", "events.jsonl")
    make("job-20260104-000000.1", "checkpoints/step-00000003")
    make("job-3-20260105-000000", "checkpoints/step-00000003")
    with claim("", "job", resume=True) as run:
        assert run.name == "job-20260102-000000-2"
    with claim("", "job-3", resume=True) as run:
        assert run.name == "job-3-20260105-000000"


def test_with_nothing_to_resume_a_new_folder_is_made():
    make("job-20260103-000000", "events.jsonl")
    with claim("", "job", resume=True) as run:
        assert run.name != "job-20260103-000000"


def test_a_file_in_the_folder_s_place_is_refused(here):
    (here / "x").touch()
    with pytest.raises(StorageFailed), claim("x", "job", resume=False):
        pass


def test_an_earlier_run_is_moved_beside_and_nothing_else(here):
    (here / "x" / "checkpoints").mkdir(parents=True)
    (here / "x" / "mine.txt").touch()
    (here / "x.1").mkdir()
    moved = set_aside(here / "x")
    assert moved == here / "x.2"
    assert (moved / "checkpoints").is_dir()
    assert [entry.name for entry in (here / "x").iterdir()] == ["mine.txt"]
    assert set_aside(here / "x") is None
