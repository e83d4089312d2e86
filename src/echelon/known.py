"""What is still known of a run that came to no result: the error that ended it carries it, and `--json` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError
from echelon.events import Event, read_events


class Known:
    """Fields of a `Result`, as far as they are known. `run` is the folder that will be there afterwards, if any."""

    def __init__(self, *, plan: str, workers: int) -> None:
        self.run: Path | None = None
        self._said = {"plan": plan, "workers": workers}
        self._log: Path | None = None
        self._begun = False

    def listen(self, log: Path, show: Callable[[Event], None]) -> Callable[[Event], None]:
        """`show`, listened to: before the run says `start`, what is in its folder may be an earlier run's log."""
        self._log = log

        def hear(record: Event) -> None:
            self._begun = self._begun or record.get("event") == "start"
            show(record)

        return hear

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error that ends the block carries what is known by then; what it knows better itself stays."""
        try:
            yield
        except EchelonError as error:
            error.known = {**self._values(), **error.known}
            raise

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(self._said)
        if self.run is not None and self.run.exists():  # it is taken away again if nothing was left in it
            values["run"] = str(self.run)
        if self._log is not None and self._begun:
            values |= committed(self._log)
        return values


def committed(log: Path) -> dict[str, Any]:
    """What a run's log tells of its committed steps; nothing of a log that cannot be read."""
    samples = 0
    last: Event = {"step": 0, "loss": None}
    metrics: dict[str, Any] = {}
    with suppress(OSError):
        for record in read_events(log):
            if record["event"] == "step":
                samples += record.get("samples") or 0
                last = record
            elif record["event"] == "evaluate":
                metrics = record.get("metrics") or {}
        return {"steps": last.get("step"), "samples": samples, "loss": last.get("loss"), "metrics": metrics}
    return {}
