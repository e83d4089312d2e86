"""Runs a function on several real processes that share a group: of the backend `echelon`, or of one to compare with."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.comm import Options

LIMIT_S = 60


def run_ranks(
    folder: Path,
    size: int,
    work: Callable[[int], Any],
    *,
    topology: str | None = None,
    timeout_s: float = 30,
    backend: str = "echelon",
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """By rank: `{"value": ...}` with what `work(rank)` returned (JSON), `{"error": ..., "trace": ...}` with what it
    raised, or None for one that was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def member(rank: int) -> Any:
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(folder / "store"), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            pg_options=Options(topology=topology) if backend == "echelon" else None,
        )
        value = work(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        return value

    children = {start(folder, str(rank), partial(member, rank)): rank for rank in range(size)}
    deadline = time.monotonic() + limit_s
    try:
        while children and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                children.pop(pid, None)
            else:
                time.sleep(0.005)
        assert not children, f"ranks {sorted(children.values())} did not end within {limit_s} s"
    finally:
        end(children)
    return [answer_of(folder, str(rank)) for rank in range(size)]


def start(folder: Path, name: str, work: Callable[[], Any]) -> int:
    """A process that does this and leaves its answer under its name."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        try:
            answer = {"value": work()}
        except BaseException as error:  # noqa: BLE001 (told to the parent)
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        beside = folder / f"writing-{name}"
        beside.write_text(json.dumps(answer))
        beside.rename(folder / f"answer-{name}")
    finally:
        os._exit(0)
    raise AssertionError


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def answer_of(folder: Path, name: str) -> Any:
    answer = folder / f"answer-{name}"
    return json.loads(answer.read_text()) if answer.exists() else None


def check(answers: list[Any]) -> list[Any]:
    """Every rank's value; fails with the tracebacks of those that raised."""
    wrong = [f"rank {rank} " + (answer["trace"] if answer else "died") for rank, answer in enumerate(answers)
             if not answer or "error" in answer]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    return [answer["value"] for answer in answers]
