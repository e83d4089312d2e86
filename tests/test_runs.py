"""Run folders: a new one for everybody, the right one to resume, one writer."""

from __future__ import annotations

import errno
import os
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


def test_a_folder_is_found_from_where_the_command_was_given(here, monkeypatch):
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    with claim("a", "job", resume=False, base=str(here)) as run, claim("", "job", resume=False, base=str(here)) as new:
        assert (run, new.parent) == (Path("a"), Path("runs"))
        (here / "a" / "checkpoints").mkdir()
        (here / new / "checkpoints" / "step-00000001").mkdir(parents=True)
    with claim("", "job", resume=True, base=str(here)) as newest:
        assert newest == new
    assert set_aside(Path("a"), str(here)) == Path("a.1")
    assert (here / "a.1" / "checkpoints").is_dir()
    assert list((here / "elsewhere").iterdir()) == []


def test_the_folder_that_a_command_was_given_in_stays_even_if_it_is_empty(here):
    with claim(".", "job", resume=False, base=str(here)):
        pass
    assert here.is_dir()


@pytest.fixture
def refuse(monkeypatch):
    """Renames that the operating system refuses, from now on."""
    rename = Path.rename

    def refuse(number, refused):
        def attempt(path, target):
            if refused(path, Path(target)):
                raise OSError(number, os.strerror(number))
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", attempt)

    return refuse


def earlier_run(folder):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "events.jsonl").write_text(folder.name)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY])
def test_on_a_mount_point_every_earlier_run_is_moved_inside(here, refuse, number):
    refuse(number, lambda path, target: here / "x" not in target.parents)
    for time in (1, 2):
        earlier_run(here / "x")
        assert set_aside(Path("x")) == Path(f"x/earlier.{time}")
        assert sorted(part.name for part in (here / "x" / f"earlier.{time}").iterdir()) == [
            "checkpoints",
            "events.jsonl",
        ]
    assert sorted(entry.name for entry in here.iterdir()) == ["x"]
    assert sorted(entry.name for entry in (here / "x").iterdir()) == ["earlier.1", "earlier.2"]


def test_an_earlier_run_that_cannot_be_moved_whole_stays_whole(here, refuse):
    refuse(errno.EBUSY, lambda path, _: path.name == "checkpoints")  # one part is a mount point itself
    earlier_run(here / "x")
    with pytest.raises(StorageFailed, match=r"cannot be moved.*--resume, or another --out") as caught:
        set_aside(Path("x"))
    assert caught.value.path == "x"
    assert sorted(entry.name for entry in here.iterdir()) == ["x"]
    assert sorted(entry.name for entry in (here / "x").iterdir()) == ["checkpoints", "events.jsonl"]
