"""What the tests of the fleet share: worker functions that a template can import, and a launcher that can be killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PATIENCE_S = 30.0
sys.path.insert(0, str(HERE))  # so that tests, and the templates they start, find the worker functions

LAUNCHER = """
import json, sys
sys.path.insert(0, {here!r})
import fleet_workers
from echelon.errors import EchelonError
from echelon.fleet import Start, launch
if __name__ == "__main__":
    entry = {entry!r}
    if {fork!r}:
        entry = getattr(fleet_workers, entry.partition(":")[2])
    print(json.dumps({{"event": "launching"}}), flush=True)
    start = Start(entry=entry, workers={workers!r}, preload={preload!r}, run="runs/x", grace_s={grace_s!r})
    try:
        launch(start, lambda event: print(json.dumps(event), flush=True))
    except EchelonError as error:
        print(json.dumps({{"event": "error", "type": type(error).__name__, "why": str(error)}}), flush=True)
        sys.exit(error.exit_code)
"""


class Launcher:
    """A process that launches, with what it showed."""

    def __init__(self, entry: str, **options: Any) -> None:
        text = LAUNCHER.format(here=str(HERE), entry=f"fleet_workers:{entry}", **options)
        self.process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.events: list[dict[str, Any]] = []
        self._rest = b""

    def wait_for(self, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        assert self.process.stdout is not None
        while not what(self.events):
            left = deadline - time.monotonic()
            assert left > 0, f"not within {PATIENCE_S} s; so far {self.events}"
            select.select([self.process.stdout], [], [], left)
            data = self.process.stdout.read()
            assert data != b"", f"the launcher ended; so far {self.events}"
            *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
            self.events += [json.loads(line) for line in lines]

    def wait_for_each(self, event: str, workers: int) -> None:
        self.wait_for(lambda events: sum(found["event"] == event for found in events) == workers)

    def processes(self) -> list[int]:
        """Everything below the launcher, as handles that stay true when the processes are gone."""
        return [os.pidfd_open(pid) for pid in descendants(self.process.pid)]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launcher() -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def make(entry: str, **options: Any) -> Launcher:
        made.append(Launcher(entry, **{"workers": 3, "fork": False, "grace_s": 20.0, "preload": (), **options}))
        return made[-1]

    yield make
    for each in made:
        each.end()


def descendants(pid: int) -> list[int]:
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return found + [below for child in found for below in descendants(child)]
