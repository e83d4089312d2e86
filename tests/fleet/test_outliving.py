"""No worker outlives its launcher, however that ends; and what a user's signals do to a run."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.fleet.starter import KILL_PATIENCE_S
from echelon.fleet.stopping import AGAIN_S

WAYS = ("template", "caller")
SOON_S = 2.0


def make(launcher: Callable[..., Any], entry: str, way: str, **options: Any) -> Any:
    made = launcher(entry, fork=way == "caller", **options)
    made.wait_for_each("begun", 3)
    return made


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_gone(handles: list[int], seconds: float) -> bool:
    """Whether every process is gone within `seconds`; closes the handles."""
    deadline, gone = time.monotonic() + seconds, []
    for handle in handles:
        wait = select.poll()
        wait.register(handle, select.POLLIN)
        gone.append(bool(wait.poll(max(deadline - time.monotonic(), 0) * 1000)))
        os.close(handle)
    return all(gone)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_launcher_takes_everything_with_it(launcher: Callable[..., Any], way: str) -> None:
    made = make(launcher, "sleep", way)
    processes = made.processes()
    assert len(processes) == (4 if way == "template" else 3)
    made.process.kill()
    assert all_gone(processes, SOON_S)


@pytest.mark.parametrize("paused", ["template", "worker", "launcher", "all"])
def test_a_killed_launcher_takes_what_is_paused_with_it(launcher: Callable[..., Any], paused: str) -> None:
    made = make(launcher, "sleep", "template")
    (template,) = children(made.process.pid)
    pids = {"template": [template], "worker": children(template)[:1], "launcher": [made.process.pid]}
    pids["all"] = [template, *children(template), made.process.pid]
    processes = made.processes()
    for pid in pids[paused]:
        os.kill(pid, signal.SIGSTOP)
    made.process.kill()
    assert all_gone(processes, SOON_S)


def test_a_killed_template_ends_the_run_and_is_named(launcher: Callable[..., Any]) -> None:
    made = make(launcher, "sleep", "template")
    processes = made.processes()
    os.kill(children(made.process.pid)[0], signal.SIGKILL)
    assert made.process.wait(20) == 76
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert "the process that starts the workers was ended by SIGKILL" in made.events[-1]["why"]
    assert all_gone(processes, SOON_S)


def test_launcher_and_template_killed_together_leave_no_worker(launcher: Callable[..., Any]) -> None:
    made = make(launcher, "sleep", "template")
    (template,) = children(made.process.pid)
    processes = made.processes()
    os.kill(template, signal.SIGKILL)
    made.process.kill()
    assert all_gone(processes, SOON_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_worker_ends_the_run_and_is_named(launcher: Callable[..., Any], way: str) -> None:
    made = make(launcher, "sleep", way)
    victim = next(event for event in made.events if event["event"] == "worker" and event["rank"] == 2)
    processes = made.processes()
    os.kill(victim["pid"], signal.SIGKILL)
    assert made.process.wait(20) == 76
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert "rank 2 was ended by SIGKILL" in made.events[-1]["why"]
    assert all_gone(processes, SOON_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("way", WAYS)
def test_a_signal_to_the_launcher_stops_all_in_order(launcher: Callable[..., Any], way: str, number: int) -> None:
    made = make(launcher, "stop_when_asked", way)
    processes = made.processes()
    made.process.send_signal(number)
    assert made.process.wait(20) == 75
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert sorted(event["rank"] for event in made.events if event["event"] == "saved") == [0, 1, 2]
    assert sum(event["event"] == "stopping" for event in made.events) == 1
    assert "after step 7" in made.events[-1]["why"]
    assert all_gone(processes, SOON_S)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_at_once_stops_all_in_order(
    launcher: Callable[..., Any], way: str, number: int
) -> None:
    made = make(launcher, "stop_when_asked", way)
    pids = [made.process.pid, *children(made.process.pid)]
    pids += [pid for child in children(made.process.pid) for pid in children(child)]
    for pid in reversed(pids):
        os.kill(pid, number)
    assert made.process.wait(20) == 75
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert sorted(event["rank"] for event in made.events if event["event"] == "saved") == [0, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_arrives_several_times_at_once_loses_nothing(launcher: Callable[..., Any], number: int) -> None:
    """As `timeout` does it: the child first, then the group."""
    made = make(launcher, "stop_when_asked", "template")
    processes = made.processes()
    for _ in range(3):
        made.process.send_signal(number)
        time.sleep(0.02)
    assert made.process.wait(20) == 75
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert sorted(event["rank"] for event in made.events if event["event"] == "saved") == [0, 1, 2]
    assert all_gone(processes, SOON_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_later_interrupt_ends_workers_that_do_not_stop(launcher: Callable[..., Any], way: str) -> None:
    made = make(launcher, "sleep", way)
    processes = made.processes()
    made.process.send_signal(signal.SIGINT)
    made.wait_for(lambda events: events[-1]["event"] == "stopping")
    time.sleep(AGAIN_S + 0.1)
    made.process.send_signal(signal.SIGTERM)
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(20) == 75
    assert all_gone(processes, SOON_S)


def test_workers_that_do_not_stop_are_killed_after_the_grace(launcher: Callable[..., Any]) -> None:
    made = make(launcher, "sleep", "caller", grace_s=0.5)
    processes = made.processes()
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(20 + KILL_PATIENCE_S) == 75
    made.wait_for(lambda events: events[-1]["event"] == "error")
    assert any("ranks 0, 1, 2 did not stop" in event.get("message", "") for event in made.events)
    assert all_gone(processes, SOON_S)


def test_an_interrupt_while_the_template_still_imports_ends_at_once(launcher: Callable[..., Any]) -> None:
    made = launcher("finish", preload=("fleet_slow_import",))
    made.wait_for(lambda events: events[:1] == [{"event": "launching"}])
    deadline = time.monotonic() + 20
    while not children(made.process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    processes = made.processes()
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(20) == 75
    assert all_gone(processes, SOON_S)
