"""Counts the payload this rank hands to a transport.

gloo and NCCL do not say what they send, so it is counted by the algorithm they use (ring): an all-reduce of B bytes
over n ranks sends 2 (n-1)/n B from each (reduce-scatter and all-gather, (n-1)/n B each); Patarasuk and Yuan, 2009.
"""

from __future__ import annotations


def all_reduce_bytes(size_bytes: int, ranks: int) -> int:
    """What one rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) * size_bytes // ranks


def all_gather_bytes(size_bytes: int, ranks: int) -> int:
    """What one rank sends in a ring all-gather of `size_bytes` from each rank."""
    return (ranks - 1) * size_bytes


def broadcast_bytes(size_bytes: int, ranks: int) -> int:
    """What the root sends, charged to the root: every other rank receives the payload once."""
    return (ranks - 1) * size_bytes


class Meter:
    """Bytes sent since the start."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def add(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes


class Traffic:
    """What was sent: bytes and messages by operation, peer and transport."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, str], list[int]] = {}

    def count(self, op: str, peer: int, transport: str, size_bytes: int) -> None:
        row = self.rows.get((op, peer, transport))
        if row is None:
            row = self.rows[op, peer, transport] = [0, 0]
        row[0] += size_bytes
        row[1] += 1

    @property
    def sent_bytes(self) -> int:
        return sum(row[0] for row in self.rows.values())
