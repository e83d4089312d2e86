"""How long a call is going to take: its moves over links of which each has a latency and a bandwidth.

A message of b bytes takes `alpha + b / beta` seconds (Hockney, 1994). A collective is followed move by move:

    a move begins  when what it sends is there (its first frame: the rest follows as it comes), and the sender's part
                   of the phase before has left
    it takes       alpha + b / beta, and one latency more where the receiver has to ask for it first
    moves of one   rank through the same transport in one phase share the bandwidth: they end together, when all their
                   bytes have left. What comes to one rank is taken in at the same rate, whoever sent it.

So with r the moment at which the first frame is there, and R the last, a rank's port is busy in a phase until
`max(min r + sum(b / beta), max(R + frame / beta))`, and alpha later the bytes are at the other end. The call ends when
the last bytes have come anywhere.

What is left out: adding up, what ranks of a host take from each other by sharing cores beyond what the links were
measured under, and that ranks never begin at the same moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from echelon.comm.cost import Cost, Transfer
from echelon.comm.frame import EAGER_BYTES, FRAME_BYTES

LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One direction between two ranks: what a message of no bytes takes, and each byte more."""

    latency_s: float
    byte_s: float

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes * self.byte_s

    @property
    def bytes_per_s(self) -> float:
        return 1 / max(self.byte_s, 1e-15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One message, as it was measured."""

    size_bytes: int
    seconds: float


def fit(samples: Sequence[Sample]) -> Line:
    """The line through the medians of every size, with the least sum of squared relative errors.

    Medians, because a rank that lost its core makes a sample a hundred times too long and never too short. Relative
    errors, because absolute ones would leave the latency to the noise of the largest size: with weights w = 1 / t^2,
    the minimum of sum w (a + b s - t)^2 over a and b. Neither becomes negative.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_size[sample.size_bytes].append(max(sample.seconds, LEAST_S))
    assert by_size, "a line through nothing"
    points = [(size, median(times)) for size, times in sorted(by_size.items())]
    weights = [1 / (time * time) for _, time in points]
    total = sum(weights)
    middle = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    height = sum(w * time for w, (_, time) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - middle) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    rise = sum(w * (size - middle) * (time - height) for w, (size, time) in zip(weights, points, strict=True))
    slope = max(0.0, rise / spread) if spread else 0.0
    latency = height - slope * middle
    if latency < 0:  # through the origin then
        latency, slope = (
            0.0,
            sum(w * s * t for w, (s, t) in zip(weights, points, strict=True))
            / sum(w * s * s for w, (s, _) in zip(weights, points, strict=True)),
        )
    return Line(latency_s=latency, byte_s=slope)


def seconds_of(cost: Cost, lines: Mapping[tuple[int, int], Line]) -> float:
    """The seconds of a collective whose ranks begin together; `lines` by sender and receiver."""
    asked = {pair for pair, load in cost.between().items() if load.size_bytes > EAGER_BYTES}
    path = _Path(lines, asked)
    for _, phase in groupby(cost.transfers, key=lambda transfer: transfer.move.phase):
        path.follow(list(phase))
    return path.end_s


class _Path:
    """Follows the moves of a collective, phase by phase."""

    def __init__(self, lines: Mapping[tuple[int, int], Line], asked: set[tuple[int, int]]) -> None:
        self.end_s = 0.0
        self._lines = lines
        self._asked = asked
        self._there: dict[tuple[int, int], tuple[float, float]] = {}
        """By rank and piece, when the first frame of it was there, and the last."""
        self._free: dict[tuple[int, str], float] = {}

    def follow(self, phase: Sequence[Transfer]) -> None:
        ends = self._ends(phase)
        arrived: dict[tuple[int, int], tuple[float, float]] = {}
        for transfer in phase:
            move, line = transfer.move, self._lines[transfer.move.src, transfer.move.dst]
            frame_s = min(transfer.size_bytes, FRAME_BYTES) * line.byte_s
            first = self._begin(transfer) + line.latency_s + frame_s
            last = max(ends[True, move.src, transfer.transport], ends[False, move.dst, transfer.transport])
            last += line.latency_s
            place = move.dst, move.put
            before = arrived.get(place) or (self._there.get(place) if move.add else None) or (0.0, 0.0)
            arrived[place] = max(before[0], min(first, last)), max(before[1], last)
            self.end_s = max(self.end_s, last)
        self._there |= arrived
        for is_out, rank, transport in ends:
            if is_out:
                self._free[rank, transport] = ends[is_out, rank, transport]

    def _begin(self, transfer: Transfer) -> float:
        move = transfer.move
        first, _ = self._there.get((move.src, move.take), (0.0, 0.0))
        pair = move.src, move.dst
        granted = self._lines[pair].latency_s if pair in self._asked else 0.0
        return max(first, self._free.get((move.src, transfer.transport), 0.0), granted)

    def _ends(self, phase: Sequence[Transfer]) -> dict[tuple[bool, int, str], float]:
        """When every port, outward and inward, is done with this phase."""
        ports: dict[tuple[bool, int, str], list[Transfer]] = defaultdict(list)
        for transfer in phase:
            ports[True, transfer.move.src, transfer.transport].append(transfer)
            ports[False, transfer.move.dst, transfer.transport].append(transfer)
        ends = {}
        for port, transfers in ports.items():
            work = [(t, self._lines[t.move.src, t.move.dst].byte_s) for t in transfers]
            begin = min(self._begin(t) for t in transfers)
            busy = begin + sum(t.size_bytes * byte_s for t, byte_s in work)
            last = max(
                self._there.get((t.move.src, t.move.take), (0.0, 0.0))[1] + min(t.size_bytes, FRAME_BYTES) * byte_s
                for t, byte_s in work
            )
            ends[port] = max(busy, last)
        return ends
