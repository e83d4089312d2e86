"""The two rows of the live display, fitted to a width: where it is and when it ends; how it goes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from echelon.progress import words
from echelon.progress.tally import Tally

WIDEST_BAR = 60
NARROWEST_BAR = 8
LABEL, VALUE, BAD, DONE, TODO = "dim", "bold", "bold red", "cyan", "bright_black"


class Row:
    """Pieces of text, each in a style; all their letters are one column wide."""

    def __init__(self, *pieces: tuple[str, str]) -> None:
        self.pieces = list(pieces)

    def add(self, text: str, style: str = "") -> Row:
        self.pieces.append((text, style))
        return self

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def cut(self, width: int) -> Iterator[tuple[str, str]]:
        """The pieces that fit."""
        for text, style in self.pieces:
            yield text[: max(0, width)], style
            width -= len(text)


def status(tally: Tally, now: float, columns: int, plain_letters: bool = False) -> list[Row]:
    """Rows of at most `columns`; fields that do not fit are left out, the least telling first."""
    return [_place(tally, now, columns, plain_letters), _pace(tally, columns)]


def _place(tally: Tally, now: float, columns: int, plain_letters: bool) -> Row:
    row = Row((" ", ""), ("step ", LABEL))
    elapsed = f"{words.duration(now - tally.began)} elapsed"
    if tally.total is None:
        return row.add(str(tally.step), VALUE).add(f"   {_pause(tally, now) or elapsed}")
    row.add(f"{tally.step:>{len(str(tally.total))}}", VALUE).add(f"/{tally.total}")
    share = min(1.0, tally.step / tally.total)
    tail = f"  {math.floor(100 * share):>3}%   {_pause(tally, now) or _remaining(tally, now)}"
    room = min(WIDEST_BAR, columns - len(row.text) - len(tail) - 2)
    if room >= NARROWEST_BAR:
        done, todo = bar(share, room, plain_letters)
        row.add("  ").add(done, DONE).add(todo, TODO)
    row.add(tail)
    if len(row.text) + 3 + len(elapsed) <= columns:
        row.add(f"   {elapsed}", LABEL)
    return row


def _pause(tally: Tally, now: float) -> str:
    silent = tally.silent(now)
    if tally.stopping:
        return "stopping"
    return f"no step for {words.duration(silent)}" if silent is not None else ""


def _remaining(tally: Tally, now: float) -> str:
    left = tally.left(now)
    return "first step" if left is None else f"left {words.duration(left)}"


def _pace(tally: Tally, columns: int) -> Row:
    """Fields by importance; the rest is dropped at the first that does not fit."""
    row = Row()
    for field in _fields(tally):
        gap = "   " if row.pieces else " "
        if len(row.text) + len(gap) + len(field.text) > columns:
            break
        row.add(gap).pieces.extend(field.pieces)
    return row


def _fields(tally: Tally) -> Iterator[Row]:
    if tally.loss is None:
        yield Row(("waiting for the first step", LABEL))
        return
    finite = isinstance(tally.loss, (int, float)) and math.isfinite(tally.loss)
    yield Row(("loss ", LABEL), (f"{words.number(tally.loss):<6}", VALUE if finite else BAD))
    rate, seconds = tally.samples_per_second, tally.step_seconds
    if rate is not None:
        yield Row((words.amount(rate), VALUE), (" samples/s", LABEL))
    if tally.bytes is not None:
        yield Row((words.size(tally.bytes), VALUE), ("/step", LABEL))
    if tally.shares:
        yield Row(("shares ", LABEL), (words.shares(tally.shares), VALUE))
    if seconds is not None:
        yield Row((words.span(seconds), VALUE), ("/step", LABEL))
    if tally.saved is not None:
        yield Row(("saved ", LABEL), (str(tally.saved), VALUE))


def bar(share: float, width: int, plain_letters: bool = False) -> tuple[str, str]:
    """`━━━━━╸` and `━━━`, in half cells, to move smoothly; `####` and `----` where the letters do not exist."""
    if plain_letters:
        done = int(width * share)
        return "#" * done, "-" * (width - done)
    whole, half = divmod(int(2 * width * share), 2)
    rest = width - whole - half
    first = "╺" if whole and not half else "━"
    return "━" * whole + "╸" * half, (first + "━" * (rest - 1)) if rest else ""
