"""What a caller of `torch.distributed` holds while a collective is under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.drive import Driver
from echelon.comm.gpu import first_tensor
from echelon.comm.operation import Operation
from echelon.comm.suspicion import GRACE_S
from echelon.comm.uncompiled import uncompiled


@uncompiled
class EchelonWork(dist.Work):
    """One or several operations that are waited for together; `result` is what its future holds."""

    def __init__(self, driver: Driver, operations: Sequence[Operation], result: Any) -> None:
        super().__init__()
        self._driver = driver
        self._operations = operations
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        self.find_source: Callable[[], int] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all is done. A timeout that passes is an error, and the work goes on."""
        until = time.monotonic() + timeout.total_seconds() if timeout and timeout > timedelta(0) else None
        for operation in self._operations:
            if not operation.done and not self._driver.wait(operation, until):
                raise RuntimeError(f"{operation.name} has timed out: not done after {timeout}")
            if operation.error is not None:
                raise operation.error
        return True

    def late(self) -> list[int]:
        """The ranks for whom this waits: they are asked where they are, and have a moment to answer."""
        operation = next((operation for operation in self._operations if not operation.done), None)
        if operation is None:
            return []
        communicator = operation.communicator
        with communicator.fabric.lock:
            communicator.suspicion.ask(operation)
        if self._driver.wait(operation, time.monotonic() + GRACE_S):
            return []
        with communicator.fabric.lock:
            return communicator.suspicion.late()

    def is_completed(self) -> bool:
        return all(operation.done for operation in self._operations)

    def is_success(self) -> bool:
        return all(operation.done and operation.error is None for operation in self._operations)

    def exception(self) -> Exception | None:
        return next((operation.error for operation in self._operations if operation.error), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return list(self._result)

    def source_rank(self) -> int:
        if self.find_source is None:
            raise RuntimeError("only a receive knows its source rank")
        return self.find_source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future(devices=_devices(self._result))
            left = [len(self._operations)]
            future, result = self._future, self._result

            def one_ended(operation: Operation) -> None:
                left[0] -= 1
                if operation.error is not None and not future.done():
                    future.set_exception(operation.error)
                elif not left[0] and not future.done():
                    future.set_result(result)

            for operation in self._operations:
                operation.then(partial(one_ended, operation))
            if not self._operations:
                future.set_result(result)
        return self._future


def _devices(result: Any) -> list[int | str | torch.device] | None:
    """The CUDA devices of the tensors in a result, which a future has to know."""
    tensor = first_tensor([result])
    return [tensor.device] if tensor is not None and tensor.is_cuda else None
