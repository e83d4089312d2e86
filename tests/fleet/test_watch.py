from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import (
    Bug,
    ConfigError,
    EchelonError,
    PeerLost,
    Stopped,
    Timeout,
    TooFewWorkers,
    UserError,
    encode,
)
from echelon.fleet.stopping import AGAIN_S, LONGEST_S, Progress, Stopping
from echelon.fleet.watch import EXIT_PATIENCE_S, NOTICE_EVERY_S, Command, Finish, Show, Tell, Watch

GO = Tell(message={"kind": "go"})
STOP = Tell(message={"kind": "stop"})
READY = {"kind": "ready"}
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def make(workers: int = 2, *, going: bool = True) -> Watch:
    watch = Watch(
        workers=workers,
        begun=0.0,
        finish_s=40.0,
        stopping=Stopping(grace_s=20.0, save_s=60.0),
        progress=Progress(run="runs/x"),
    )
    if going:
        for rank in range(workers):
            watch.heard(rank, READY, 0.0)
    return watch


def done(**payload: Any) -> dict[str, Any]:
    return {"kind": "done", **payload}


def failed(error: EchelonError) -> dict[str, Any]:
    return {"kind": "failed", "error": encode(error)}


def event(**fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": fields}


def verdict(commands: Iterable[Command]) -> Finish:
    found = [command for command in commands if isinstance(command, Finish)]
    assert len(found) == 1
    return found[0]


def shown(commands: Iterable[Command]) -> list[dict[str, Any]]:
    return [command.event for command in commands if isinstance(command, Show)]


def advance(watch: Watch) -> tuple[float, list[Command]]:
    """What happens when time alone passes, up to the verdict, and when that is."""
    commands: list[Command] = []
    for _ in range(1000):
        now = watch.wake_at()
        commands += watch.tick(now)
        if any(isinstance(command, Finish) for command in commands):
            return now, commands
    raise AssertionError("no end in sight")


def test_go_is_told_once_and_only_when_all_are_ready() -> None:
    watch = make(3, going=False)
    assert watch.heard(2, READY, 0.0) == []
    assert watch.heard(0, READY, 0.0) == []
    assert watch.heard(0, READY, 0.0) == []
    assert watch.heard(1, READY, 0.0) == [GO]
    assert watch.heard(1, READY, 0.0) == []


def test_results_come_by_rank_once_all_are_done_and_gone() -> None:
    watch = make(2)
    watch.heard(1, done(loss=1.0), 1.0)
    watch.heard(0, done(loss=0.5), 2.0)
    assert watch.ended(1, 0, 2.0) == []
    assert verdict(watch.ended(0, 0, 2.0)) == Finish(results=({"loss": 0.5}, {"loss": 1.0}))


def test_a_process_that_does_not_end_after_it_is_done_is_named_and_its_result_kept() -> None:
    watch = make(2)
    watch.heard(0, done(), 1.0)
    watch.heard(1, done(), 1.0)
    watch.ended(0, 0, 1.0)
    now, commands = advance(watch)
    assert now == 1.0 + EXIT_PATIENCE_S
    assert "rank 1 did not end" in shown(commands)[-1]["message"]
    assert verdict(commands).error is None


def test_a_bad_end_after_done_is_a_warning() -> None:
    watch = make(1)
    watch.heard(0, done(), 1.0)
    commands = watch.ended(0, int(signal.SIGSEGV), 1.0)
    assert shown(commands)[0]["event"] == "warning"
    assert verdict(commands).error is None


def test_a_worker_that_wedges_when_the_others_are_done_is_named_in_time() -> None:
    watch = make(3)
    watch.heard(0, done(), 5.0)
    watch.heard(1, done(), 6.0)
    now, commands = advance(watch)
    error = verdict(commands).error
    assert now == 5.0 + 40.0
    assert isinstance(error, Timeout)
    assert "rank 2" in str(error)
    assert any("rank 2" in found["message"] for found in shown(commands))


def test_the_cause_is_awaited_after_its_symptom() -> None:
    watch = make(3)
    assert watch.heard(0, failed(PeerLost(2, "x")), 1.0) == []
    assert watch.wake_at() > 1.5
    commands = watch.heard(2, failed(UserError(2, "broken")), 1.5)
    assert isinstance(verdict(commands).error, UserError)


def test_a_checkpoint_that_is_being_written_when_a_worker_dies_is_waited_for() -> None:
    watch = make(2)
    watch.heard(0, event(event="saving", step=10), 1.0)
    assert not [c for c in watch.ended(1, int(signal.SIGKILL), 2.0) if isinstance(c, Finish)]
    assert not [c for c in watch.tick(30.0) if isinstance(c, Finish)]
    found = verdict(watch.heard(0, event(event="checkpoint", step=10), 31.0))
    assert "--resume --out runs/x" in str(found.error)


def test_nothing_is_awaited_when_nobody_is_left_to_speak() -> None:
    watch = make(2)
    watch.heard(0, failed(PeerLost(1, "x")), 1.0)
    watch.ended(0, 76 << 8, 1.0)
    assert isinstance(verdict(watch.ended(1, int(signal.SIGKILL), 1.0)).error, TooFewWorkers)


def test_a_bad_job_fails_before_any_worker_goes() -> None:
    watch = make(2, going=False)
    watch.heard(0, READY, 0.0)
    watch.heard(1, failed(ConfigError("data", "empty")), 0.1)
    _, commands = advance(watch)
    assert isinstance(verdict(commands).error, ConfigError)
    assert GO not in commands


def test_a_slow_start_is_told_and_ends_nothing() -> None:
    watch = make(3, going=False)
    watch.heard(1, READY, 1.0)
    assert watch.tick(NOTICE_EVERY_S - 0.1) == []
    commands = [command for now in (10.0, 20.0, 30.0) for command in watch.tick(now)]
    assert [found["event"] for found in shown(commands)] == ["waiting"] * 3
    assert "ranks 0, 2" in shown(commands)[0]["message"]


def test_a_long_training_is_not_commented_on() -> None:
    watch = make(2)
    assert watch.tick(1e6) == []


def test_the_first_interrupt_asks_and_a_later_one_ends() -> None:
    watch = make(2)
    assert watch.interrupted(INT, 1.0) == [Show(event={"event": "stopping"}), STOP]
    assert isinstance(verdict(watch.interrupted(INT, 1.1 + AGAIN_S)).error, Stopped)


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_signals_in_quick_succession_are_one_request(number: int) -> None:
    watch = make(2)
    watch.interrupted(number, 1.0)
    assert [watch.interrupted(number, now) for now in (1.0, 1.000_01, 1.9)] == [[]] * 3


@pytest.mark.parametrize("number", [TERM, HUP])
def test_only_a_person_insists(number: int) -> None:
    watch = make(2)
    watch.interrupted(number, 1.0)
    assert [watch.interrupted(number, now) for now in (3.0, 5.0, 8.0)] == [[]] * 3
    assert isinstance(verdict(watch.interrupted(INT, 9.0)).error, Stopped)


def test_a_worker_may_ask_for_the_stop_and_asks_once() -> None:
    watch = make(2)
    assert STOP in watch.heard(1, {"kind": "stop"}, 1.0)
    assert watch.heard(0, {"kind": "stop"}, 1.0) == []


def test_a_signal_sent_to_all_processes_at_once_is_one_request() -> None:
    watch = make(2)
    watch.heard(1, {"kind": "stop"}, 1.0)
    assert watch.interrupted(INT, 1.1) == []
    assert watch.interrupted(INT, 1.2) == []


def test_stopping_before_the_start_ends_at_once() -> None:
    watch = make(2, going=False)
    error = verdict(watch.interrupted(INT, 1.0)).error
    assert isinstance(error, Stopped)
    assert error.step == 0


def test_workers_that_stop_leave_the_others_time_to_save() -> None:
    watch = make(2)
    watch.interrupted(INT, 1.0)
    assert watch.heard(0, failed(Stopped(7, "runs/x")), 2.0) == []
    assert watch.ended(0, 75 << 8, 2.0) == []
    assert watch.tick(20.0) == [] or shown(watch.tick(20.0)) == []
    watch.heard(1, failed(Stopped(7, "runs/x")), 20.5)
    error = verdict(watch.ended(1, 75 << 8, 20.6)).error
    assert isinstance(error, Stopped)
    assert error.step == 7


def test_workers_that_do_not_stop_are_named_and_killed_after_the_grace() -> None:
    watch = make(2)
    watch.heard(0, event(event="checkpoint", step=4), 0.5)
    watch.interrupted(INT, 1.0)
    watch.heard(0, failed(Stopped(9, "runs/x")), 2.0)
    now, commands = advance(watch)
    assert now == 21.0
    assert "rank 1 did not stop" in shown(commands)[-1]["message"]
    assert isinstance(verdict(commands).error, Stopped)


@pytest.mark.parametrize(
    ("events", "step", "text"),
    [
        ([], 0, "before the first step; nothing was trained"),
        ([("step", 15)], 0, "at step 15; nothing was saved yet, so start it again"),
        ([("step", 4), ("checkpoint", 4)], 4, "after step 4; go on with --resume --out runs/x"),
        ([("step", 4), ("checkpoint", 4), ("step", 5)], 4, "after step 4 (saved); 1 later step will"),
        ([("step", 4), ("checkpoint", 4), ("step", 9)], 4, "at least 5 later steps will be computed again: go on with"),
        ([("resume", 7)], 7, "after step 7; go on with --resume --out runs/x"),
        ([("resume", 7), ("step", 9)], 7, "at least 2 later steps will be computed again"),
    ],
)
def test_an_end_by_force_says_what_is_saved_and_what_is_lost(
    events: list[tuple[str, int]], step: int, text: str
) -> None:
    watch = make(1)
    for kind, number in events:
        watch.heard(0, event(event=kind, step=number), 0.5)
    watch.interrupted(INT, 1.0)
    error = verdict(watch.interrupted(INT, 3.0)).error
    assert isinstance(error, Stopped)
    assert (error.step, error.run) == (step, "runs/x")
    assert text in str(error)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], "by hand; start it again"),
        ([("step", 3)], "nothing was saved yet, so start it again"),
        ([("resume", 3)], "go on with --resume --out runs/x"),
        ([("step", 3), ("checkpoint", 3)], "go on with --resume --out runs/x"),
    ],
)
def test_a_death_says_to_go_on_only_from_what_was_saved(events: list[tuple[str, int]], text: str) -> None:
    for lose in (lambda watch: watch.ended(0, 9, 1.0), lambda watch: watch.starter_lost("was ended by hand", 1.0)):
        watch = make(1)
        for kind, number in events:
            watch.heard(0, event(event=kind, step=number), 0.5)
        commands = lose(watch)
        found = verdict(commands or advance(watch)[1]).error
        assert isinstance(found, TooFewWorkers)
        assert str(found).endswith(text.removeprefix("by hand; "))


def test_a_checkpoint_that_nobody_was_left_to_tell_of_counts_once_the_folder_is_this_run_s() -> None:
    progress = Progress(run="runs/x", on_disk=lambda: 4)
    assert progress.way_on() == "start it again"
    progress.note({"event": "start"})
    progress.note({"event": "step", "step": 6})
    assert progress.way_on() == "go on with --resume --out runs/x"
    assert progress.stopped().fields == {"step": 4, "run": "runs/x", "unsaved": 2}


def test_a_step_and_its_saving_may_take_long_once_there_is_work_to_lose() -> None:
    watch = make(1)
    watch.heard(0, event(event="step", step=3), 0.5)
    watch.interrupted(INT, 1.0)
    waiting = [found for now in (11.0, 21.0, 31.0) for found in shown(watch.tick(now))]
    assert [found["event"] for found in waiting] == ["waiting"] * 3
    assert "rank 0 to finish the step and save it" in waiting[0]["message"]
    assert "Ctrl-C again ends it at once" in waiting[0]["message"]
    watch.heard(0, event(event="step", step=4), 60.0)
    assert advance(watch)[0] == 60.0 + 60.0


def test_only_progress_makes_the_wait_for_a_stop_longer() -> None:
    watch = make(1)
    watch.interrupted(INT, 1.0)
    watch.heard(0, event(event="waiting", message="rank 1 is late"), 15.0)
    watch.heard(0, event(event="warning", message="x"), 15.0)
    assert advance(watch)[0] == 21.0


def test_a_run_that_goes_on_although_asked_to_stop_is_ended_even_so() -> None:
    watch, now, commands = make(1), 1.0, list[Command]()
    watch.interrupted(INT, now)
    while now < 2 * LONGEST_S and not any(isinstance(command, Finish) for command in commands):
        now += 30.0
        commands += watch.heard(0, event(event="step", step=int(now)), now)
    assert isinstance(verdict(commands).error, Stopped)
    assert now < LONGEST_S + 60


def test_training_that_finishes_although_asked_to_stop_is_finished() -> None:
    watch = make(1)
    watch.interrupted(INT, 1.0)
    watch.heard(0, done(x=1), 1.1)
    assert verdict(watch.ended(0, 0, 1.2)).results == ({"x": 1},)


@pytest.mark.parametrize("error", [{}, {"type": "Nonsense"}, {"type": "UserError"}, None, 3])
def test_a_failure_that_cannot_be_read_is_a_failure(error: Any) -> None:
    watch = make(1)
    watch.heard(0, {"kind": "failed", "error": error}, 1.0)
    _, commands = advance(watch)
    assert isinstance(verdict(commands).error, Bug)


def test_a_message_of_unknown_kind_is_a_failure() -> None:
    watch = make(1)
    watch.heard(0, {"kind": "chatter"}, 1.0)
    assert isinstance(verdict(advance(watch)[1]).error, Bug)


EVENTS = st.sampled_from(
    ["ready", "done", "user", "lost", "stopped", "exit", "kill", "garbled", "stop", "interrupt", "nothing"]
)


@given(st.integers(1, 3), st.lists(st.tuples(EVENTS, st.integers(0, 2), st.floats(0, 5)), max_size=15))
def test_whatever_happens_there_is_one_verdict_and_it_is_never_late(
    workers: int, happenings: list[tuple[str, int, float]]
) -> None:
    watch, now, commands = make(workers, going=False), 0.0, list[Command]()
    ended: set[int] = set()
    for what, number, wait in happenings:
        now, rank = now + wait, number % workers
        if what == "interrupt":
            commands += watch.interrupted(INT, now)
        if rank in ended:
            continue
        if what in ("exit", "kill"):
            ended.add(rank)
            commands += watch.ended(rank, 0 if what == "exit" else 9, now)
        if what == "garbled":
            commands += watch.garbled(rank, "x", now)
        said = {"ready": READY, "done": done(), "stop": {"kind": "stop"}, "user": failed(UserError(rank, "x"))}
        said |= {"lost": failed(PeerLost(-1, "x")), "stopped": failed(Stopped(1, "r"))}
        if what in said:
            commands += watch.heard(rank, said[what], now)
    for rank in set(range(workers)) - ended:
        commands += watch.ended(rank, 9, now)
    if not any(isinstance(command, Finish) for command in commands):
        assert watch.wake_at() <= now + EXIT_PATIENCE_S
        commands += advance(watch)[1]
    assert (verdict(commands).error is None) == (len(verdict(commands).results) == workers)
