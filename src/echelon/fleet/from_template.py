"""Workers forked from a fresh process that has imported torch: the launcher's side of `template.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from echelon.errors import ConfigError
from echelon.fleet import family
from echelon.fleet.packets import receive_packet, send_packet
from echelon.fleet.starter import (
    KILL_PATIENCE_S,
    LAUNCHERS_SIGNALS,
    Ended,
    Lost,
    News,
    Processes,
    Started,
    Unable,
    Warned,
)

EXIT_PATIENCE_S = 2.0
HASHES = {"PYTHONHASHSEED": "0"}  # a set of strings has the same order in every start, unless the user says otherwise

# The template has to find what this process finds, and nothing more: `-m` would put the working directory first,
# where a file named like a standard module would be imported in its place.
BOOT = """
import json, sys
control, launcher, path = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
sys.path[:] = json.loads(path)
from echelon.fleet.template import main
main(int(control), int(launcher))
"""


class TemplateStarter:
    """Starts the template at once; requests wait in its socket until it has imported what it should."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._processes = Processes()
        self._asked = 0
        self._known: set[int] = set()
        self._lost = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
            # Held back until it ignores them: a Ctrl-C while Python itself is starting would end it with a traceback.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHERS_SIGNALS)
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**HASHES, **os.environ})
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        send_packet(self._control, {"preload": list(preload)})

    def start(self, rank: int, line: socket.socket, store: socket.socket | None, foreign: Sequence[int]) -> None:
        del foreign  # nothing of the launcher's is open in the template
        self._asked += 1
        send_packet(self._control, {"rank": rank}, [line.fileno(), *([store.fileno()] if store else [])])

    def fileno(self) -> int:
        return self._control.fileno()

    def news(self) -> list[News]:
        found: list[News] = []
        while not self._lost:
            try:
                message, fds = receive_packet(self._control, 1, wait=False)
            except BlockingIOError:
                break
            if message is None:
                self._lost = True
                return [*found, Lost(why=self._how_it_ended())]
            found.append(self._understand(message, fds))
        return found

    def close(self) -> list[int]:
        left = self._processes.kill()
        self._processes.forget()
        self._control.close()
        if left or len(self._known) < self._asked:
            theirs = family.below(self._process.pid)
            self._process.kill()  # busy importing, or stuck: what it has forked unseen dies with it
            family.end(theirs)
        try:
            self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_PATIENCE_S)
        return left

    def _understand(self, message: dict[str, Any], fds: list[int]) -> News:
        if "unable" in message:
            return Unable(error=ConfigError(message["unable"], message["why"]))
        if "warning" in message:
            return Warned(message=message["warning"])
        rank = message["rank"]
        if "pid" in message:
            self._known.add(rank)
            self._processes.add(rank, fds[0])
            return Started(rank=rank, pid=message["pid"])
        self._processes.drop(rank)
        return Ended(rank=rank, status=message["status"])

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "closed its line"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
