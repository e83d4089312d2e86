"""Messages and collectives under a stopwatch, over whatever group the ranks have joined.

Every function is called by all ranks at once, and those whom it does not concern wait at its barrier. What comes back
is what this rank measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from echelon.comm.timing import Sample

EMPTY_BYTES = 8
"""The smallest message: its time is the latency."""
STREAM_BYTES = (16 << 10, 64 << 10, 1 << 20, 8 << 20)
WARM_UP = 2
BATCHES = 5

Link = tuple[int, int]
Samples = dict[Link, list[Sample]]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One collective: the seconds of every round on this rank, and what a round sent from here."""

    seconds: list[float]
    size_bytes: int
    messages: int


def rounds_of(size_bytes: int) -> int:
    return 100 if size_bytes <= 1 << 10 else 20 if size_bytes <= 1 << 17 else 8 if size_bytes <= 1 << 21 else 5


def measure_pairs(tell: Tell) -> Samples:
    """Every link while nothing else is sent. A message goes out, an empty one comes back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: Samples = {}
    pairs = list(combinations(range(size), 2))
    for number, (low, high) in enumerate(pairs, 1):
        tell(f"links, one pair at a time: {low} and {high} ({number} of {len(pairs)})")
        dist.barrier()
        if rank in (low, high):
            latency_s = 0.0
            for size_bytes in (EMPTY_BYTES, *STREAM_BYTES):
                for src, dst in ((low, high), (high, low)):
                    trips = sorted(_round_trips(src, dst, size_bytes))
                    if size_bytes == EMPTY_BYTES:
                        latency_s = trips[len(trips) // 2] / 2
                    if rank == src:
                        samples = [Sample(size_bytes=size_bytes, seconds=max(t - latency_s, t / 2)) for t in trips]
                        found.setdefault((src, dst), []).extend(samples)
    dist.barrier()
    return found


def _round_trips(src: int, dst: int, size_bytes: int) -> list[float]:
    """Seconds from the message of `src` until the empty answer of `dst` is there."""
    rank = dist.get_rank()
    data, answer = (torch.full((count,), 1, dtype=torch.uint8) for count in (size_bytes, EMPTY_BYTES))
    trips = []
    for number in range(WARM_UP + rounds_of(size_bytes)):
        began = time.perf_counter()
        if rank == src:
            dist.send(data, dst)
            dist.recv(answer, dst)
        else:
            dist.recv(data, src)
            dist.send(answer, src)
        if number >= WARM_UP:
            trips.append(time.perf_counter() - began)
    return trips


def measure_together(tell: Tell) -> Samples:
    """Every link while all ranks send: each to the one `distance` further, for every distance.

    A sample is the mean of several messages in a row: a single one seems to take no time if its sender was ahead.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    found: Samples = {}
    for distance in range(1, size):
        tell(f"links, all ranks at once ({distance} of {size - 1})")
        src, dst = (rank - distance) % size, (rank + distance) % size
        for size_bytes in (EMPTY_BYTES, *STREAM_BYTES):
            data, taken = (torch.full((size_bytes,), 1, dtype=torch.uint8) for _ in range(2))
            in_a_row = max(1, rounds_of(size_bytes) // BATCHES)
            dist.barrier()
            for number in range(1 + BATCHES):
                began = time.perf_counter()
                for _ in range(in_a_row):
                    out: Any = dist.isend(data, dst)
                    dist.recv(taken, src)
                    out.wait()
                if number:  # the first warms up
                    sample = Sample(size_bytes=size_bytes, seconds=(time.perf_counter() - began) / in_a_row)
                    found.setdefault((src, rank), []).append(sample)
    dist.barrier()
    return found


def time_all_reduce(group: Any, size_bytes: int) -> Timed:
    """Rounds that begin together, as far as a barrier can make them."""
    data = torch.full((max(1, size_bytes // 4),), 0.0)
    seconds = []
    rounds = rounds_of(size_bytes)
    for _ in range(WARM_UP):
        dist.all_reduce(data, group=group)
    before = group.traffic
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        seconds.append(time.perf_counter() - began)
    sent = [row for row in (group.traffic - before).sent if row.op == "all_reduce"]
    return Timed(
        seconds=seconds,
        size_bytes=sum(row.size_bytes for row in sent) // rounds,
        messages=sum(row.messages for row in sent) // rounds,
    )
