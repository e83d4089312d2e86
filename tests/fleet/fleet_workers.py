"""Worker functions that the tests of the fleet start, by name from a template or by fork. None of them needs torch."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PeerLost, Stopped, UserError

if TYPE_CHECKING:
    from echelon.fleet import WorkerStart

PATIENCE_S = 30.0


def _begin(worker: WorkerStart) -> None:
    worker.tether.send({"kind": "event", "event": {"event": "worker", "rank": worker.rank, "pid": os.getpid()}})
    worker.tether.send({"kind": "ready"})
    worker.tether.wait_go(PATIENCE_S)


def finish(worker: WorkerStart) -> int:
    _begin(worker)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    seen = {
        "environment": {name: os.environ.get(name) for name in names},
        "request": worker.request,
        "pid": os.getpid(),
        "draw": random.random(),
        "stdin": os.read(0, 1).decode() if worker.workers > 1 else "",
        "store": worker.store_fd is not None,
        "argv": sys.argv,
        "frozen": gc.get_freeze_count(),
    }
    worker.tether.send({"kind": "done", **seen})
    return 0


def sleep(worker: WorkerStart) -> int:
    """Begins and then neither computes nor stops."""
    _begin(worker)
    worker.tether.send({"kind": "event", "event": {"event": "begun", "rank": worker.rank}})
    time.sleep(PATIENCE_S)
    return 0


def stop_when_asked(worker: WorkerStart) -> int:
    _begin(worker)
    worker.tether.send({"kind": "event", "event": {"event": "begun", "rank": worker.rank}})
    deadline = time.monotonic() + PATIENCE_S
    while not worker.tether.stop_requested and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1 * worker.rank)  # the others are still saving when the first has stopped
    worker.tether.send({"kind": "event", "event": {"event": "saved", "rank": worker.rank}})
    raise Stopped(7, "runs/x")


def fail_one(worker: WorkerStart) -> int:
    """Rank 1 fails; the others lose it, and some of them say so first."""
    if worker.request.get("before_ready") and worker.rank == 1:
        raise ConfigError("data", "it is empty")
    _begin(worker)
    if worker.rank == 1:
        time.sleep(0.1)
        raise UserError(1, "ValueError: broken sample", "Traceback ...")
    raise PeerLost(1, "all-reduce")


def end_one(worker: WorkerStart) -> int:
    """Rank 1 ends as the request says; the others notice and report only that."""
    _begin(worker)
    if worker.rank == 1:
        how = worker.request["how"]
        if how == "sys.exit":
            sys.exit(5)
        if how == "os._exit":
            os._exit(0)
        if how == "raise":
            raise RuntimeError("unexpected")
        if how == "return":
            return 0
        os.kill(os.getpid(), signal.Signals[how])
    raise PeerLost(1, "all-reduce")


def talk_a_lot(worker: WorkerStart) -> int:
    _begin(worker)
    for number in range(2000):
        worker.tether.send({"kind": "event", "event": {"event": "number", "number": number, "text": "x" * 1000}})
    worker.tether.send({"kind": "done"})
    return 0


def draw_with_torch(worker: WorkerStart) -> int:
    import numpy as np
    import torch

    _begin(worker)
    draws = {"numpy": float(np.random.rand()), "torch": float(torch.rand(())), "python": random.random()}
    worker.tether.send({"kind": "done", **draws})
    return 0


def rendezvous(worker: WorkerStart) -> int:
    """All meet at the store whose socket the launcher made."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    _begin(worker)
    options = {} if worker.store_fd is None else {"master_listen_fd": worker.store_fd}
    store = TCPStore(
        "127.0.0.1", worker.store_port, None, worker.rank == 0, timedelta(seconds=20), wait_for_workers=False, **options
    )
    store.set(str(worker.rank), "here")
    store.wait([str(rank) for rank in range(worker.workers)])
    store.add("left", 1)
    while worker.rank == 0 and store.add("left", 0) < worker.workers:
        time.sleep(0.01)
    worker.tether.send({"kind": "done", "threads": sum(1 for _ in Path("/proc/self/task").iterdir())})
    return 0


def leave_a_process(worker: WorkerStart) -> int:
    """Starts something that would go on for long, and ends without a thought for it."""
    import multiprocessing
    import subprocess

    _begin(worker)
    note = Path(worker.request["folder"]) / f"{worker.rank}.pid"
    forks, kind = multiprocessing.get_context("fork"), worker.request["kind"]
    kept: list[object] = []  # so that nothing ends because nobody holds it any more
    if kind == "daemon":
        kept.append(process := forks.Process(target=time.sleep, args=(PATIENCE_S,), daemon=True))
        process.start()
        note.write_text(str(process.pid))
    elif kind == "manager":
        kept.append(manager := forks.Manager())
        note.write_text(str(manager._process.pid))
    elif kind == "program":
        kept.append(program := subprocess.Popen(["sleep", str(PATIENCE_S)]))
        note.write_text(str(program.pid))
    else:
        subprocess.run(["sh", "-c", f"setsid sleep {PATIENCE_S} & echo $! > {note}"], check=True)
    sys.modules[__name__].__dict__["kept"] = kept
    worker.tether.send({"kind": "event", "event": {"event": "started"}})
    how = worker.request.get("how", "done")
    if how != "done" and worker.rank == 0:
        while not all(note.with_name(f"{rank}.pid").exists() for rank in range(worker.workers)):
            time.sleep(0.01)
        if how == "raise":
            raise UserError(0, "broken")
        os.kill(os.getpid(), signal.Signals[how])
    if how != "done":
        time.sleep(PATIENCE_S)
    worker.tether.send({"kind": "done"})
    return 0


def leave_things_open(worker: WorkerStart) -> int:
    """What a script may leave to the end of the interpreter."""
    import atexit
    import tempfile
    import threading

    _begin(worker)
    folder, rank = Path(worker.request["folder"]), worker.rank
    log = (folder / f"log-{rank}").open("w")
    log.write("an important line\n")
    scratch = tempfile.TemporaryDirectory()

    def finish_later() -> None:
        time.sleep(0.1)
        (folder / f"thread-{rank}").write_text("finished")

    threading.Thread(target=finish_later).start()
    atexit.register(lambda: (folder / f"exit-{rank}").write_text("ran"))
    sys.modules[__name__].__dict__["kept"] = [log, scratch]
    worker.tether.send({"kind": "done", "scratch": scratch.name})
    return 0


def fail_at_length(worker: WorkerStart) -> int:
    """Fails with what is too long to be told, or no text."""
    _begin(worker)
    raise UserError(0, "broken", "x" * (20 << 20) if worker.request["why"] == "long" else object())  # type: ignore[arg-type]
