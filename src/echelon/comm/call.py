"""What was called, in numbers for the header of a frame and in words for an error."""

from __future__ import annotations

import torch

from echelon.comm.arithmetic import DTYPES, REDUCTIONS
from echelon.comm.collectives import ALL_TOPOLOGIES
from echelon.comm.frame import Call

KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
)
ANY_NUMEL = -1
"""Each pair of ranks moves its own number of elements."""


def encode_call(
    kind: str, topology: str, dtype: torch.dtype | None, reduction: str | None, root: int | None, numel: int
) -> Call:
    op = KINDS.index(kind) * len(ALL_TOPOLOGIES) + ALL_TOPOLOGIES.index(topology)
    return Call(
        op,
        DTYPES.index(dtype) + 1 if dtype in DTYPES else 0,
        REDUCTIONS.index(reduction) + 1 if reduction else 0,
        -1 if root is None else root,
        numel,
    )


def describe(call: Call) -> str:
    """A call as its caller would write it: `all_reduce(sum, 10 x float32, star)`."""
    kind, topology = divmod(call.op, len(ALL_TOPOLOGIES))
    said = []
    if call.reduce:
        said.append(REDUCTIONS[call.reduce - 1])
    if call.dtype:
        said.append(f"{call.numel} x {str(DTYPES[call.dtype - 1]).removeprefix('torch.')}")
    if call.root >= 0:
        said.append(f"root {call.root}")
    if KINDS[kind] != "send":
        said.append(ALL_TOPOLOGIES[topology])
    return f"{KINDS[kind]}({', '.join(said)})"
