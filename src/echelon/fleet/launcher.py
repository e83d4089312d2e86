"""Starts workers on this machine, watches them to the end and turns whatever happens into results or one cause.

What to do is decided by `watch.py` and `verdict.py`; here are the sockets, the processes, the signals and the clock.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.errors import ConfigError
from echelon.fleet.caller import CallerStarter
from echelon.fleet.from_template import TemplateStarter
from echelon.fleet.line import Line
from echelon.fleet.start import Start
from echelon.fleet.starter import TOO_MANY_FILES, Ended, Lost, News, Starter, Unable, Warned, too_many_files
from echelon.fleet.stopping import Progress, Stopping
from echelon.fleet.streams import open_missing
from echelon.fleet.watch import Command, Finish, Show, Tell, Watch
from echelon.fleet.wire import Garbled

FILES, FILES_PER_WORKER = 64, 4  # open at a time: a worker has a job's files, and a connection or two to each other
LOOPBACK = "127.0.0.1"
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal was closed
BACKLOG = 4096  # every worker of a large fleet may connect to the store at the same moment


def launch(start: Start, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """The `done` payload of each rank, or the typed root cause raised. Nothing it started is left behind.

    In the main thread Ctrl-C, SIGTERM and SIGHUP ask the workers to stop; Ctrl-C once more ends them.
    """
    open_missing()
    with _refusals(start.workers), ExitStack() as cleanup:
        alarm, bell = socket.socketpair()
        cleanup.enter_context(alarm)
        cleanup.enter_context(bell)
        cleanup.enter_context(_ring_on_signals(bell))
        store = cleanup.enter_context(_listen(start.port))
        lines = [cleanup.enter_context(Line()) for _ in range(start.workers)]
        for rank, line in enumerate(lines):
            line.say(_introduction(start, rank, store.getsockname()[1]))
        selector = cleanup.enter_context(selectors.DefaultSelector())
        starter = _starter(start)
        fleet = _Fleet(start=start, show=show, lines=lines, selector=selector, starter=starter, alarm=alarm)
        cleanup.callback(fleet.close)
        fleet.start_workers(store, [selector, alarm, bell])
        verdict = fleet.run()
    if verdict.error is not None:
        raise verdict.error
    return list(verdict.results)


class _Fleet:
    """The edge of one launch: events go into `Watch`, its commands are obeyed."""

    def __init__(
        self,
        *,
        start: Start,
        show: Callable[[dict[str, Any]], None],
        lines: list[Line],
        selector: selectors.BaseSelector,
        starter: Starter,
        alarm: socket.socket,
    ) -> None:
        self._show = show
        self._run = start.run
        self._lines = lines
        self._selector = selector
        self._starter = starter
        self._verdict: Finish | None = None
        self._oom_kills = _oom_kills()
        self._watch = Watch(
            workers=start.workers,
            begun=time.monotonic(),
            finish_s=start.finish_s,
            stopping=Stopping(grace_s=start.grace_s, save_s=start.save_s),
            progress=Progress(run=start.run, on_disk=partial(newest_checkpoint, Path(start.run))),
        )
        for rank, line in enumerate(lines):
            selector.register(line.ours, selectors.EVENT_READ, partial(self._hear, rank))
        selector.register(starter, selectors.EVENT_READ, self._hear_starter)
        selector.register(alarm, selectors.EVENT_READ, partial(self._interrupt, alarm))

    def start_workers(self, store: socket.socket, private: Sequence[Any]) -> None:
        """Ask for every worker; what only they should hold is closed here."""
        for rank, line in enumerate(self._lines):
            theirs = {line.theirs.fileno()} | ({store.fileno()} if rank == 0 else set())
            ends = [end.fileno() for each in self._lines for end in (each.ours, each.theirs)]
            ours = {*ends, store.fileno(), *(thing.fileno() for thing in private), *_open_on(self._run)}
            foreign = sorted(fd for fd in ours - theirs if fd >= 0)
            self._starter.start(rank, line.theirs, store if rank == 0 else None, foreign)
            line.theirs.close()
            if rank == 0:
                store.close()

    def run(self) -> Finish:
        """Wait for events and act on them until there is a verdict."""
        while self._verdict is None:
            wait_s = max(self._watch.wake_at() - time.monotonic(), 0)
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._obey(self._watch.tick(time.monotonic()))
        return self._verdict

    def close(self) -> None:
        left = self._starter.close()
        if left:
            self._tell_user({"event": "warning", "message": f"the processes of ranks {left} cannot be killed"})

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Tell(message=message):
                    for rank, line in enumerate(self._lines):
                        line.say(message)
                        self._expect(rank)
                case Show(event=event):
                    self._tell_user(event)
                case Finish():
                    self._verdict = command

    def _tell_user(self, event: dict[str, Any]) -> None:
        self._show({"time": time.time(), **event})

    def _hear(self, rank: int) -> None:
        self._lines[rank].go_on()
        self._listen_to(rank)
        self._expect(rank)

    def _listen_to(self, rank: int) -> bool:
        """Take in what the worker has said; whether there may be more."""
        try:
            messages = self._lines[rank].read()
        except Garbled as garbled:
            self._obey(self._watch.garbled(rank, str(garbled), time.monotonic()))
            messages = None
        if messages is None:
            self._hang_up(rank)
            return False
        for message in messages:
            self._obey(self._watch.heard(rank, message, time.monotonic()))
        return bool(messages)

    def _hear_starter(self) -> None:
        for news in self._starter.news():
            self._obey(self._learn(news))
            if isinstance(news, Lost):
                self._selector.unregister(self._starter)

    def _learn(self, news: News) -> list[Command]:
        now = time.monotonic()
        match news:
            case Ended(rank=rank, status=status):
                while rank in self._connected() and self._listen_to(rank):
                    pass  # what it said before it ended comes first
                return self._watch.ended(rank, status, now, out_of_memory=_oom_kills() > self._oom_kills)
            case Lost(why=why):
                return self._watch.starter_lost(why, now)
            case Unable(error=error):
                return self._watch.failed(error)
            case Warned(message=message):
                return [Show(event={"event": "warning", "message": message})]
        return []

    def _interrupt(self, alarm: socket.socket) -> None:
        for number in alarm.recv(64):
            self._obey(self._watch.interrupted(number, time.monotonic()))

    def _connected(self) -> set[int]:
        return {rank for rank, line in enumerate(self._lines) if line.ours in self._selector.get_map()}

    def _hang_up(self, rank: int) -> None:
        if rank in self._connected():
            self._selector.unregister(self._lines[rank].ours)

    def _expect(self, rank: int) -> None:
        line = self._lines[rank]
        if rank in self._connected():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.waits_to_send else 0)
            self._selector.modify(line.ours, wanted, partial(self._hear, rank))


def newest_checkpoint(run: Path) -> int:
    """The step of the newest checkpoint in a run's folder, 0 if there is none. It gets its name when it is whole."""
    with suppress(OSError):
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in (run / "checkpoints").iterdir()]
        return max((int(match[1]) for match in found if match), default=0)
    return 0


def _starter(start: Start) -> Starter:
    if isinstance(start.entry, str):
        return TemplateStarter(start.preload)
    return CallerStarter(start.entry)


def _introduction(start: Start, rank: int, store_port: int) -> dict[str, Any]:
    """The first message to a worker: all that it is told about itself."""
    return {
        "kind": "start",
        "rank": rank,
        "workers": start.workers,
        "store_port": store_port,
        "entry": start.entry if isinstance(start.entry, str) else None,
        "request": start.request,
        "argv": sys.argv,
    }


def _listen(port: int | None) -> socket.socket:
    """The socket for rank 0 to host the store on, bound before anything starts so that nobody takes the port."""
    try:
        return socket.create_server((LOOPBACK, port or 0), backlog=BACKLOG)
    except OverflowError as error:
        why = f"{port} is no port number; use 1 to 65535, or none to get a free one"
        raise ConfigError("port", why) from error
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise
        if error.errno == errno.EADDRINUSE:
            why = f"{port} is in use by another program; name another, or none to get a free one"
            raise ConfigError("port", why) from error
        raise ConfigError("port", f"{LOOPBACK}:{port or 0} cannot be listened on: {error.strerror}") from error


@contextmanager
def _refusals(workers: int) -> Iterator[None]:
    """What the system refuses to a launcher, in words; and what it would refuse to its workers later, in theirs."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("folder", "the current folder was deleted; change to one that is there") from error
    needed = FILES + FILES_PER_WORKER * workers
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < needed:  # -1: no limit
        raise too_many_files()
    try:
        yield
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files() from error
        raise


@contextmanager
def _ring_on_signals(bell: socket.socket) -> Iterator[None]:
    """Signals that ask to stop write to `bell`. Only the main thread can hear them; one that is ignored stays so, as
    SIGHUP under nohup.
    """

    def ring(number: int, _frame: FrameType | None) -> None:
        try:
            bell.send(bytes([number]))
        except BlockingIOError:
            return  # rung often enough

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    bell.setblocking(False)
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in taken:
            signal.signal(number, ring)
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _open_on(folder: str) -> list[int]:
    """Descriptors of this process that are open on `folder`: the lock on it must not outlive the launcher in a fork."""
    found = []
    with suppress(OSError):
        wanted = Path(folder).stat()
        for each in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # the listing's own
                if os.path.samestat(each.stat(), wanted):
                    found.append(int(each.name))
    return found


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
