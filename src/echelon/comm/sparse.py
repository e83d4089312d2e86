"""The sum of sparse tensors: every rank gets all indices and values, and adds them up itself."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.calls import Asked, Calls
from echelon.comm.memory import Memory


def all_reduce_sparse(calls: Calls, tensor: Tensor, asked: Asked) -> None:
    """Sum a COO tensor over all ranks, in place and before this returns."""
    if asked.reduction != "sum":
        raise ValueError(f"sparse tensors can be summed; {asked.reduction} is not defined for them here")
    mine = tensor.coalesce()
    counts = [int(count) for count in _gather(calls, torch.tensor([mine._nnz()]), [1] * calls.size, asked)]
    width = mine.sparse_dim()
    indices = _gather(calls, mine.indices().t().contiguous(), [count * width for count in counts], asked)
    per_value = mine.values()[:1].numel() if mine._nnz() else int(torch.tensor(mine.shape[width:]).prod())
    values = _gather(calls, mine.values().contiguous(), [count * per_value for count in counts], asked)
    total = torch.sparse_coo_tensor(
        torch.cat([piece.view(-1, width) for piece in indices]).t(),
        torch.cat([piece.view(-1, *mine.shape[width:]) for piece in values]),
        mine.shape,
        check_invariants=False,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _gather(calls: Calls, mine: Tensor, numels: list[int], asked: Asked) -> list[Tensor]:
    """What every rank gives; each may give another number of elements."""
    rows = [torch.empty(numel, dtype=mine.dtype) for numel in numels]
    results = [Memory(row) for row in rows]
    operation = calls.all_gather([memory.array for memory in results], mine, results, asked)
    calls.driver.wait(operation)
    if operation.error is not None:
        raise operation.error
    return rows
