"""Saves while training goes on, keeps the last few, and finds the newest that is whole."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from echelon.checkpoint import folder as checkpoints
from echelon.errors import CheckpointCorrupt, ConfigError, EchelonError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from echelon.checkpoint.folder import Snapshot
    from echelon.state import State


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is on the disk; `seconds` is what writing it took, beside the training or not."""

    step: int
    path: Path
    seconds: float


class Keeper:
    """The checkpoints of one run. One thread calls it, in one process at a time.

        save      | copy |  wait for the write before, if any  |  return
        thread                                                 | write, flush, rename, delete old ones |

    A write that failed raises at the next `save`, `save_now`, `wait` or `close`.
    """

    def __init__(self, folder: Path, keep: int = 3, *, timeout_s: float = 600.0) -> None:
        if keep < 1:
            raise ConfigError("keep", f"at least one checkpoint must be kept, not {keep}")
        self._folder = folder
        self._keep = keep
        self._timeout_s = timeout_s
        self._copies = (
            HostCopy(),
            HostCopy(),
        )  # the second comes to use only if saves follow faster than the disk writes
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._written: deque[Written] = deque()
        self._whole: set[int] = set()  # steps written or verified here: their bytes are not read again before others go

    def save(self, state: State) -> None:
        """Returns once the state is copied and no other write is under way; `state` may then change."""
        self._raise_failure()
        taken = checkpoints.snapshot(state)
        copy = self._copies[0] if self._writer is None or not self._writer.is_alive() else self._copies[1]
        held = copy.hold(taken)
        self.wait()
        if copy is self._copies[1]:
            self._copies = self._copies[1], self._copies[0]
        self._writer = threading.Thread(target=self._write_beside, args=(held,), name="echelon-checkpoint", daemon=True)
        self._writer.start()

    def save_now(self, state: State) -> Path:
        """Writes without a copy and returns when the disk holds it."""
        self.wait()
        return self._write(checkpoints.snapshot(state))

    def wait(self) -> None:
        """Until nothing is being written; `Timeout` if that takes too long."""
        if self._writer is not None:
            self._writer.join(self._timeout_s)
            if self._writer.is_alive():
                raise Timeout("writing a checkpoint", self._timeout_s)
            self._writer = None
        self._raise_failure()

    def close(self) -> None:
        """As `wait`, and gives the host memory back."""
        try:
            self.wait()
        finally:
            self._copies = (HostCopy(), HostCopy())

    def finished(self) -> list[Written]:
        """What has reached the disk since this was asked last, in order. Never waits."""
        return [self._written.popleft() for _ in range(len(self._written))]

    def steps(self) -> list[int]:
        return checkpoints.list_steps(self._folder)

    def latest(self, report: Callable[[str], None]) -> State | None:
        """The newest state that is whole, None if nothing was ever saved. Each corrupt one passed over is reported by a
        sentence; `CheckpointCorrupt` if no other is left.
        """
        self.wait()
        failure: CheckpointCorrupt | None = None
        steps = self.steps()
        for step in reversed(steps):
            try:
                state = checkpoints.read(checkpoints.path_of(self._folder, step))
            except CheckpointCorrupt as error:
                report(f"the checkpoint of step {step} is corrupt: {error}")
                failure = failure or error
            else:
                self._whole.add(step)
                return state
        if failure is not None:
            why = f"none of the {len(steps)} checkpoints is whole; the newest: {failure.why}"
            raise CheckpointCorrupt(str(self._folder), why) from failure
        return None

    def _write_beside(self, held: Snapshot) -> None:
        try:
            self._write(held)
        except BaseException as error:  # noqa: BLE001  a thread has nobody to raise to; the next call has
            self._failure = error

    def _write(self, taken: Snapshot) -> Path:
        start = time.monotonic()
        self._whole.discard(taken.step)
        path = checkpoints.write_snapshot(self._folder, taken)
        self._whole.add(taken.step)
        self._written.append(Written(step=taken.step, path=path, seconds=time.monotonic() - start))
        self._remove_old(taken.step)
        return path

    def _remove_old(self, newest: int) -> None:
        """Counts back from the one just written: corrupt ones do not count, and later ones are none of its business."""
        whole = 0
        for step in reversed(self.steps()):
            if step > newest:
                continue
            if whole >= self._keep:
                checkpoints.remove(checkpoints.path_of(self._folder, step))
                self._whole.discard(step)
            elif self._is_whole(step):
                whole += 1

    def _is_whole(self, step: int) -> bool:
        path = checkpoints.path_of(self._folder, step)
        try:
            if step in self._whole:
                checkpoints.check_outline(path)
            else:
                checkpoints.verify(path)
        except EchelonError:
            return False
        self._whole.add(step)
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class HostCopy:
    """A set of tensors on the host with the values others had at one moment. Memory is taken once and used again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def hold(self, taken: Snapshot) -> Snapshot:
        held: dict[str, Tensor] = {}
        streams = set()
        for name, tensor in taken.tensors.items():
            place = self._tensors.get(name)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                # The same strides where possible: a plain copy now, put in row-major order while it is written.
                place = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
            held[name] = place.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                streams.add(torch.cuda.current_stream(tensor.device))
        for stream in streams:
            stream.synchronize()
        self._tensors = held
        return replace(taken, tensors=held)
