from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from pathlib import Path

from echelon.fleet.launcher import _Fleet, newest_checkpoint
from echelon.fleet.line import Line
from echelon.fleet.start import Start
from echelon.fleet.starter import Ended, News
from echelon.fleet.wire import to_line


class ToldOfTheEnd:
    """A starter that has news of a worker's end before anybody has read what the worker said."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"x")

    def start(self, rank: int, line: socket.socket, store: socket.socket | None, foreign: Sequence[int]) -> None:
        """There is no process."""

    def fileno(self) -> int:
        return self._ours.fileno()

    def news(self) -> list[News]:
        return [Ended(rank=0, status=0)]

    def close(self) -> list[int]:
        self._ours.close()
        self._theirs.close()
        return []


def test_the_newest_checkpoint_is_found_among_what_else_is_there(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == 0
    for name in ("step-00000004", "step-00000012", ".step-00000020.writing", "step-new", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12


def test_what_a_worker_said_before_it_ended_is_heard_before_its_end() -> None:
    starter, (alarm, bell) = ToldOfTheEnd(), socket.socketpair()
    with Line() as line, selectors.DefaultSelector() as selector, alarm, bell:
        line.theirs.send(to_line({"kind": "done", "loss": 1.0}))
        fleet = _Fleet(
            start=Start(entry="x:y"), show=print, lines=[line], selector=selector, starter=starter, alarm=alarm
        )
        fleet._hear_starter()
        verdict = fleet.run()
        fleet.close()
    assert verdict.error is None
    assert verdict.results == ({"loss": 1.0},)
