"""What one rank sends in a ring, by the names that torch and we have for a collective.

An all-reduce of B bytes over n ranks sends 2 (n-1)/n B from each; reduce-scatter and all-gather, (n-1)/n B each
(Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

_WHOLE = ("broadcast", "reduce", "alltoall_base", "alltoall", "all_to_all")
_ROWS = ("_allgather_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced")


def ring_bytes(op: str, size_bytes: int, ranks: int) -> int:
    """`size_bytes`: of the tensors that torch names first. For a gather these are all ranks' (`all_gather`: this
    rank's), for a reduce-scatter this rank's. A broadcast and a reduction are charged to all alike.
    """
    if op.replace("_", "").startswith("allreduce"):
        return 2 * (ranks - 1) * size_bytes // ranks
    if op in _WHOLE or op in _ROWS:
        return (ranks - 1) * size_bytes // ranks
    return (ranks - 1) * size_bytes
