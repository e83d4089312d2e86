"""What `echelon bench links` found: a value, its text and its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.errors import ConfigError
from echelon.progress import words

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MOST_BYTES = 4 << 30
COLUMNS = 7  # of a matrix side by side


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """One direction between two ranks: measured alone, and while every rank sends and receives at once."""

    src: int
    dst: int
    transport: str
    latency_us: float
    gigabytes_per_s: float
    busy_latency_us: float
    busy_gigabytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ReduceRow:
    """One all-reduce. Bytes and messages are those of all ranks together; `is_default`: what runs if nobody says."""

    size_bytes: int
    topology: str
    is_default: bool
    predicted_bytes: int
    measured_bytes: int
    predicted_messages: int
    measured_messages: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class LinksReport:
    """`hosts` are the ranks of each host."""

    hosts: tuple[tuple[int, ...], ...]
    links: tuple[LinkRow, ...]
    all_reduce: tuple[ReduceRow, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinksReport:
        return cls(
            hosts=tuple(tuple(ranks) for ranks in values["hosts"]),
            links=tuple(LinkRow(**row) for row in values["links"]),
            all_reduce=tuple(ReduceRow(**row) for row in values["all_reduce"]),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        ranks = sum(map(len, self.hosts))
        on = f"{len(self.hosts)} host{'' if len(self.hosts) == 1 else 's'}"
        alone = {(row.src, row.dst): (row.transport, row.latency_us, row.gigabytes_per_s) for row in self.links}
        busy = {
            (row.src, row.dst): (row.transport, row.busy_latency_us, row.busy_gigabytes_per_s) for row in self.links
        }
        lines = [
            f"links between {ranks} ranks on {on}: transport, latency in us, bandwidth in GB/s",
            "",
            "one pair at a time",
            *_matrix(ranks, alone),
            "",
            "all ranks at once",
            *_matrix(ranks, busy),
            "",
            "all-reduce: what all ranks send, and how long it takes; * runs if no topology is asked for",
            *_table(self.all_reduce),
        ]
        return "\n".join(line.rstrip() for line in lines)


def _matrix(ranks: int, cells: Mapping[tuple[int, int], tuple[str, float, float]]) -> list[str]:
    lines = []
    for start in range(0, ranks, COLUMNS):
        shown = range(start, min(start + COLUMNS, ranks))
        lines.append(f"{'from':>8}" + "".join(f"{f'to {dst}':>18}" for dst in shown))
        for src in range(ranks):
            row = [_cell(cells[src, dst]) if src != dst else "-" for dst in shown]
            lines.append(f"{src:>8}" + "".join(f"{cell:>18}" for cell in row))
    return lines


def _cell(measured: tuple[str, float, float]) -> str:
    transport, latency_us, rate = measured
    return f"{transport} {latency_us:>6.0f} {rate:>5.2f}"


def _table(rows: Sequence[ReduceRow]) -> list[str]:
    names = f"{'predicted':>11}{'measured':>11}" * 3
    lines = [f"{'':>20}{'bytes':>22}{'messages':>22}{'time':>22}", f"{'size':>8}  {'topology':<10}{names}{'ratio':>8}"]
    return lines + [_line(row) for row in rows]


def _line(row: ReduceRow) -> str:
    cells = [
        words.size(row.predicted_bytes),
        words.size(row.measured_bytes),
        str(row.predicted_messages),
        str(row.measured_messages),
        _time(row.predicted_s),
        _time(row.measured_s),
    ]
    name = row.topology + ("*" if row.is_default else "")
    ratio = row.predicted_s / row.measured_s
    return f"{write_size(row.size_bytes):>8}  {name:<10}" + "".join(f"{cell:>11}" for cell in cells) + f"{ratio:>8.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else words.span(seconds)


def parse_size(text: str) -> int:
    """`4k`, `1m`, `25M` or a number of bytes; multiples of 1024."""
    match = re.fullmatch(r"(\d{1,12})([kmg]?)i?b?", text.strip().lower())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError("sizes", f"{text!r} is no size; write bytes, or 4k, 1m, 2g (at most 4g)")
    return size


def write_size(size_bytes: int) -> str:
    """As `parse_size` reads it."""
    for unit in ("g", "m", "k"):
        if size_bytes and size_bytes % UNITS[unit] == 0:
            return f"{size_bytes // UNITS[unit]}{unit}"
    return str(size_bytes)
