from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from echelon.errors import Timeout
from echelon.fleet.line import Line
from echelon.fleet.tether import Tether

PATIENCE_S = 20.0


@pytest.fixture
def line() -> Iterator[Line]:
    with Line() as made:
        yield made


def hear(line: Line, count: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    while len(found) < count:
        assert select.select([line.ours], [], [], PATIENCE_S)[0], f"{len(found)} of {count} arrived"
        found += line.read() or []
    return found


def fork(line: Line, body: Callable[[Tether], None]) -> int:
    """A worker that runs `body`."""
    pid = os.fork()
    if pid == 0:
        line.ours.close()
        body(Tether(line.theirs))
        os._exit(0)
    line.theirs.close()
    return pid


def end(line: Line, pid: int) -> int:
    """How the worker ends when its launcher does."""
    line.ours.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for_ever(tether: Tether) -> None:
    tether.listen()
    threading.Event().wait(PATIENCE_S)


def talk_for_ever(tether: Tether) -> None:
    while True:
        tether.send({"kind": "event"})


def wait_for_the_start(tether: Tether) -> None:
    tether.receive(PATIENCE_S)


@pytest.mark.parametrize("body", [wait_for_ever, talk_for_ever, wait_for_the_start])
def test_a_worker_whose_launcher_is_gone_is_killed_whatever_it_does(line: Line, body: Callable[[Tether], None]) -> None:
    assert end(line, fork(line, body)) == -signal.SIGKILL


def close_everything(tether: Tether) -> None:
    tether.listen()
    os.closerange(3, 200)
    threading.Event().wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "why"), [(wait_for_ever, "the launcher is gone"), (close_everything, "broke (Bad file descriptor)")]
)
def test_a_worker_that_ends_itself_says_why(line: Line, body: Callable[[Tether], None], why: str) -> None:
    reads, writes = os.pipe()

    def say_to_us(tether: Tether) -> None:
        os.dup2(writes, 2)
        body(tether)

    pid = fork(line, say_to_us)
    os.close(writes)
    if body is wait_for_ever:
        line.ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    text = os.read(reads, 4096).decode()
    os.close(reads)
    assert f"worker process {pid} ends itself: " in text
    assert why in text
    assert text.count("\n") == 1


def test_a_worker_that_nobody_reads_ends_itself_even_so(line: Line) -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)

    def say_to_nobody(tether: Tether) -> None:
        os.dup2(writes, 2)
        wait_for_ever(tether)

    assert end(line, fork(line, say_to_nobody)) == -signal.SIGKILL
    os.close(reads)
    os.close(writes)


def test_messages_pile_up_without_waiting_and_arrive_in_order(line: Line) -> None:
    sent_read, sent_write = os.pipe()

    def send_all_before_the_launcher_reads(tether: Tether) -> None:
        for number in range(5000):
            tether.send({"kind": "event", "number": number, "text": "x" * 100})
        os.write(sent_write, b"all" if not tether.flush(0) else b"nothing piled up")
        tether.listen()
        tether.flush(PATIENCE_S)
        tether.send({"kind": "flushed"})
        threading.Event().wait(PATIENCE_S)

    pid = fork(line, send_all_before_the_launcher_reads)
    assert os.read(sent_read, 100) == b"all"
    found = hear(line, 5001)
    assert [message.get("number") for message in found] == [*range(5000), None]
    assert end(line, pid) == -signal.SIGKILL
    os.close(sent_read)
    os.close(sent_write)


def test_stop_and_go_reach_the_worker(line: Line) -> None:
    def obey(tether: Tether) -> None:
        before = tether.stop_requested
        tether.listen()
        go = tether.wait_go(PATIENCE_S)
        tether.send({"kind": "done", "before": before, "go": go, "after": tether.stop_requested})
        threading.Event().wait(PATIENCE_S)

    line.say({"kind": "stop"})
    line.say({"kind": "go", "x": 1})
    pid = fork(line, obey)
    assert hear(line, 1) == [{"kind": "done", "before": False, "go": {"kind": "go", "x": 1}, "after": True}]
    end(line, pid)


def test_waiting_for_go_has_a_bound(line: Line) -> None:
    with pytest.raises(Timeout):
        Tether(line.theirs).wait_go(0.01)


def test_a_signal_handler_may_ask_to_stop_while_its_thread_is_sending(line: Line) -> None:
    def ask(tether: Tether) -> None:
        tether.listen()
        with tether._lock:  # what `send` holds when the signal comes
            tether.ask_to_stop()
        threading.Event().wait(PATIENCE_S)

    pid = fork(line, ask)
    assert hear(line, 1) == [{"kind": "stop"}]
    end(line, pid)


def test_a_launcher_never_waits_for_a_worker_that_does_not_read(line: Line) -> None:
    for number in range(2000):
        line.say({"kind": "x", "number": number, "text": "x" * 1000})
    assert line.waits_to_send
    tether, found = Tether(line.theirs), list[object]()
    while len(found) < 2000:
        found += [message["number"] for message in tether.receive(PATIENCE_S)]
        line.go_on()
    assert found == list(range(2000))


def test_what_piled_up_goes_out_with_the_next_message_before_there_is_a_thread(line: Line) -> None:
    tether, sent = Tether(line.theirs), 0
    while tether.flush(0):
        tether.send({"kind": "event", "number": sent, "text": "x" * 1000})
        sent += 1
    found = hear(line, sent - 1)
    tether.send({"kind": "event", "number": sent})
    found += hear(line, sent + 1 - len(found))
    assert [message["number"] for message in found] == list(range(sent + 1))
