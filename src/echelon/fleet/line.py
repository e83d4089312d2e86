"""The launcher's end of one worker's line. It never waits: a worker may be paused, or not there yet."""

from __future__ import annotations

import socket
from typing import Any, Self

from echelon.fleet.wire import Lines, to_line


class Line:
    """A socket pair: `theirs` goes to the worker, and is closed here when it has; its end of file ends the worker."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self._lines = Lines()
        self._unsent = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ours.close()
        self.theirs.close()

    @property
    def waits_to_send(self) -> bool:
        return bool(self._unsent)

    def say(self, message: dict[str, Any]) -> None:
        """Send now what the socket takes; `go_on` sends the rest."""
        self._unsent += to_line(message)
        self.go_on()

    def go_on(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.ours.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the worker is gone; its process will tell

    def read(self) -> list[dict[str, Any]] | None:
        """What has arrived, perhaps nothing; None once the worker's end is closed. Raises `Garbled`."""
        try:
            data = self.ours.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._lines.feed(data) if data else None
