from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fleet_workers
import pytest

from echelon.errors import Bug, ConfigError, EchelonError, Stopped, TooFewWorkers, UserError
from echelon.fleet import Start, WorkerStart, launch, launcher
from echelon.fleet.from_template import TemplateStarter
from echelon.fleet.line import Line
from echelon.fleet.starter import Started

WAYS = ("template", "caller")


def run(name: str, way: str = "template", workers: int = 3, **options: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    entry = f"fleet_workers:{name}" if way == "template" else getattr(fleet_workers, name)
    events: list[dict[str, Any]] = []
    options.setdefault("preload", ())
    return launch(Start(entry=entry, workers=workers, **options), events.append), events


@pytest.mark.parametrize("way", WAYS)
def test_every_worker_gets_its_place_and_the_request_and_its_result_comes_back_by_rank(way: str) -> None:
    results, events = run("finish", way, request={"x": [1, None]})
    for rank, result in enumerate(results):
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        assert expected.items() <= result["environment"].items()
        assert result["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert result["request"] == {"x": [1, None]}
        assert result["store"] == (rank == 0)
        assert result["stdin"] == ""
        assert result["argv"] == sys.argv
    assert len({result["pid"] for result in results} | {os.getpid()}) == 4
    assert sorted(event["rank"] for event in events) == [0, 1, 2]
    assert all("time" in event for event in events)


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_in_one_worker_is_raised_and_not_the_symptoms_of_the_others(way: str) -> None:
    with pytest.raises(UserError, match="broken sample") as raised:
        run("fail_one", way)
    assert raised.value.rank == 1
    assert raised.value.trace == "Traceback ..."


def test_a_bad_job_is_found_before_training_starts() -> None:
    with pytest.raises(ConfigError, match="it is empty"):
        run("fail_one", request={"before_ready": True})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("SIGKILL", TooFewWorkers, "rank 1 was ended by SIGKILL"),
        ("SIGSEGV", TooFewWorkers, "rank 1 was ended by SIGSEGV"),
        ("sys.exit", UserError, "exit"),
        ("os._exit", UserError, "exit code 0"),
        ("return", UserError, "exit code 0"),
        ("raise", Bug, "RuntimeError: unexpected"),
    ],
)
def test_a_worker_that_ends_early_is_named_with_how_it_ended(
    way: str, how: str, kind: type[EchelonError], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        run("end_one", way, request={"how": how})
    assert "1" in str(raised.value)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_too_long_for_a_line_or_not_json_keeps_its_type(way: str) -> None:
    for why in ("long", "object"):
        with pytest.raises(UserError, match="broken") as raised:
            run("fail_at_length", way, workers=1, request={"why": why})
        assert len(raised.value.trace) < 100_000


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="fleet_workers:nonsense"):
        run("nonsense")


def test_collecting_garbage_in_a_worker_leaves_what_the_template_imported_alone() -> None:
    results, _ = run("finish", preload=("numpy",))
    assert all(result["frozen"] > 10_000 for result in results)


def test_what_cannot_be_imported_beforehand_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        run("finish", preload=("no_such_module",))


@pytest.mark.parametrize("way", WAYS)
def test_many_messages_all_arrive(way: str) -> None:
    _, events = run("talk_a_lot", way, workers=2)
    numbers = [event["number"] for event in events if event["event"] == "number"]
    assert sorted(numbers) == sorted([*range(2000)] * 2)


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {port} is in use"):
            run("finish", port=port, request={"not": object()})  # nothing gets as far as the request


def test_a_number_that_is_no_port_is_told() -> None:
    with pytest.raises(ConfigError, match="port: 70000"):
        run("finish", port=70000)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_open_or_running_after_many_launches(way: str) -> None:
    run("finish", way, workers=1)
    before = open_files(), threading.active_count()
    for number in range(20):
        if number % 2:
            run("finish", way, workers=2)
        else:
            with pytest.raises(UserError):
                run("fail_one", way, workers=2)
    assert (open_files(), threading.active_count()) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_the_caller_ends_the_workers(way: str) -> None:
    pids: list[int] = []

    def show(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise RuntimeError("the screen is gone")

    entry = "fleet_workers:sleep" if way == "template" else fleet_workers.sleep
    with pytest.raises(RuntimeError, match="the screen is gone"):
        launch(Start(entry=entry, workers=2, preload=()), show)
    assert not any(is_running(pid) for pid in pids)


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_closure_runs_in_forks_of_a_caller_with_other_threads() -> None:
    secret, quit_now, results = object(), threading.Event(), list[Any]()
    busy = [threading.Thread(target=quit_now.wait) for _ in range(3)]
    for thread in busy:
        thread.start()

    def work(worker: WorkerStart) -> int:
        worker.tether.send({"kind": "ready"})
        worker.tether.wait_go(20)
        worker.tether.send({"kind": "done", "secret": id(secret), "threads": threading.active_count()})
        return 0

    def launch_here() -> None:
        results.extend(launch(Start(entry=work, workers=2), lambda _event: None))

    launching = threading.Thread(target=launch_here)
    launching.start()
    launching.join(60)
    quit_now.set()
    for thread in busy:
        thread.join(20)
    assert results == [{"secret": id(secret), "threads": 2}] * 2  # its own and the tether's


def open_sockets() -> set[str]:
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            links.add(str(path.readlink()))
    return {link for link in links if link.startswith("socket:")}


def test_a_fork_holds_no_line_but_its_own_or_the_others_would_outlive_the_launcher() -> None:
    before = open_sockets()

    def work(worker: WorkerStart) -> int:
        worker.tether.send({"kind": "done", "sockets": len(open_sockets() - before)})
        return 0

    results = launch(Start(entry=work, workers=3), lambda _event: None)
    assert [result["sockets"] for result in results] == [2, 1, 1]  # its line, and for rank 0 the store's socket


def test_two_launches_run_side_by_side_in_threads() -> None:
    found: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda way=way: found.append(run("finish", way)[0])) for way in WAYS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(results) for results in found] == [3] * 4


def test_forking_is_refused_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

    class Torch:
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Torch)
    with pytest.raises(ConfigError, match="echelon train FILE"):
        run("finish", "caller")


@pytest.mark.parametrize("way", WAYS)
def test_no_worker_draws_what_another_draws_by_accident(way: str) -> None:
    import numpy as np
    import torch  # or a fork of this process would have no state of theirs to share

    assert np.random
    assert torch.random
    results, _ = run("draw_with_torch", way, preload=("numpy", "torch"))
    for library in ("python", "numpy", "torch"):
        assert len({result[library] for result in results}) == 3, library


def test_a_fork_computes_although_the_caller_has_computed_with_several_threads() -> None:
    import torch

    def compute() -> float:
        weights = torch.ones(400, 400, requires_grad=True)
        torch.nn.functional.softmax(weights @ weights, 1).sum().backward()
        return float(weights.detach().sum())

    def work(worker: WorkerStart) -> int:
        worker.tether.send({"kind": "ready"})
        worker.tether.wait_go(20)
        worker.tether.send({"kind": "done", "sum": compute()})
        return 0

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = compute()
        results = launch(Start(entry=work, workers=2), lambda _event: None)
    finally:
        torch.set_num_threads(before)
    assert results == [{"sum": expected}] * 2


def test_workers_meet_at_the_store_on_the_launchers_socket() -> None:
    results, events = run("rendezvous", preload=("torch", "torch.distributed"))
    assert len(results) == 3
    assert not [event for event in events if event["event"] == "warning"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("way", WAYS)
def test_the_signal_handlers_of_the_caller_are_put_back(way: str, number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda found, _frame: heard.append(found))
    try:
        run("finish", way)
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert heard == [number]


def test_the_launching_process_never_imports_torch() -> None:
    text = "import echelon.fleet, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("way", WAYS)
def test_a_stop_before_there_is_anything_to_stop_is_no_traceback(
    way: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = launcher._listen

    def be_interrupted(port: int | None) -> socket.socket:
        signal.raise_signal(number)
        return listen(port)

    monkeypatch.setattr(launcher, "_listen", be_interrupted)
    with pytest.raises(Stopped, match="nothing was trained"):
        run("finish", way)


def test_an_interrupt_of_the_template_while_python_starts_is_not_for_it() -> None:
    """It has the signals held back before it has a first line of code, and ignores them before it lets go of that."""
    starter, listening = TemplateStarter(()), Line()
    try:
        starter._process.send_signal(signal.SIGINT)
        with listening as line:
            starter.start(0, line.theirs, None, [])
            assert select.select([starter], [], [], 30)[0]
            assert isinstance(starter.news()[0], Started)
    finally:
        starter.close()


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launcher._ring_on_signals(socket.socket()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_in_the_middle_of_a_launch_stops_all() -> None:
    def show(event: dict[str, Any]) -> None:
        begun.append(event)
        if sum(found["event"] == "begun" for found in begun) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            begun.clear()

    begun: list[dict[str, Any]] = []
    with pytest.raises(Stopped) as raised:
        launch(Start(entry=fleet_workers.stop_when_asked, workers=3), show)
    assert raised.value.step == 7
    assert sorted(event["rank"] for event in begun if event["event"] == "saved") == [0, 1, 2]
