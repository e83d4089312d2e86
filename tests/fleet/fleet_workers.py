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
