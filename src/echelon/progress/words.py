"""Numbers as short text whose width changes as little as possible, so that a display does not jump about."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

MOST_SHARES = 8  # more workers than this are summed up instead of listed


def number(value: Any) -> str:
    """A loss or metric: four places, or three and an exponent where those would say nothing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return str(float(value))
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def amount(value: float) -> str:
    """A count or rate with about three digits: `0.052`, `4.2`, `512`, `5,120`, `1.25M`."""
    if value >= 1e6:
        scale, unit = (1e9, "G") if value >= 1e9 else (1e6, "M")
        return f"{value / scale:.2f}{unit}"
    if value >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.2g}"


def size(count: float) -> str:
    """Bytes in decimal units, as links and disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Time as on a clock: `0:41`, `12:03`, `3:05:10`, `2d 04h`."""
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{hours // 24}d {hours % 24:02d}h"


def span(seconds: float) -> str:
    """How long something took: `0.4 ms`, `18 ms`, `2.41 s`, `12.3 s`, `1:01`."""
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return duration(seconds)


def shares(counts: Mapping[Any, int]) -> str:
    """Slices by rank: `2/2/3/1`; for many workers the range and their number. Ranks that went through JSON are text."""
    by_rank = [count for _, count in sorted((int(rank), count) for rank, count in counts.items())]
    if len(by_rank) <= MOST_SHARES:
        return "/".join(map(str, by_rank))
    low, high = min(by_rank), max(by_rank)
    each = f"{low}" if low == high else f"{low}-{high}"
    return f"{len(by_rank)} x {each}"


def harmless(text: str) -> str:
    """The text without control characters: a message must not be able to steer the terminal."""
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
