"""Progress on a terminal: a display at the bottom, and everybody's output scrolling above it.

The workers write to the terminal themselves, so this process cannot know where their output left the cursor. Therefore
the bottom rows are taken out of the scrolling region (DECSTBM, as apt and dpkg do): whoever prints, scrolls the rows
above, and the display is painted with the cursor saved and restored.

    +----------------------------------------------+
    | $ echelon train job.py --workers 4           |  scrolls: header, evaluations, warnings,
    | echelon  plan dp  4 workers  1,000 steps     |  whatever the user's code prints
    | a line printed by a worker                   |
    | _                                            |  the cursor
    |  step  412/1000  ━━━━━━━━━━╺━━━━━  left 0:41 |  reserved
    |  loss 0.3412   5,120 samples/s   1.2 MB/step |  reserved
    +----------------------------------------------+

All writing is done by one thread, so a stopped terminal (Ctrl-S) never holds up the launcher.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TextIO

from rich.console import Console

from echelon.progress import lines
from echelon.progress.plain import new_warning, write
from echelon.progress.status import BAD, DONE, LABEL, TODO, VALUE, Row, status
from echelon.progress.tally import Tally

REFRESH_S = 0.25
CLOSE_S = 2.0
ENDING_SIGNALS = (signal.SIGQUIT, signal.SIGHUP)  # the others end it by an exception, or cannot be heard
RESERVED_ROWS = 2  # the row above them stays free as well: there the cursor waits
LEAST_ROWS, LEAST_COLUMNS = 8, 30
SAVE, RESTORE, DOWN, CLEAR_LINE, CLEAR_BELOW = "\x1b7", "\x1b8", "\x1bD", "\x1b[2K", "\x1b[J"


class Terminal:
    """The reserved rows of a terminal: what to write so that they exist, show a text, and are gone again."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self.plain_letters = not _can_encode(stream, "━╸╺")
        self._styles = {style: self._render_style(style) for style in ("", LABEL, VALUE, BAD, DONE, TODO)}
        self._size: tuple[int, int] | None = None
        self._rows: list[str] = []

    @property
    def usable(self) -> bool:
        columns, rows = self._measure()
        return self.console.is_terminal and not self.console.is_dumb_terminal and min(columns, rows) > 0

    @property
    def columns(self) -> int:
        return self._measure()[0]

    def paint(self, rows: list[Row]) -> str:
        """Writes that put these rows at the bottom; nothing if they are there already."""
        columns, height = self._measure()
        if columns < LEAST_COLUMNS or height < LEAST_ROWS:
            return self.release()
        out = ""
        if (columns, height) != self._size:
            out += self._reserve(columns, height)
        texts = [self._render(row, columns) for row in rows][:RESERVED_ROWS]
        texts = [""] * (RESERVED_ROWS - len(texts)) + texts
        changed = [i for i, text in enumerate(texts) if i >= len(self._rows) or self._rows[i] != text]
        self._rows = texts
        if changed:
            first = height - RESERVED_ROWS + 1
            painted = "".join(f"\x1b[{first + i};1H{texts[i]}\x1b[0m\x1b[K" for i in changed)
            out += SAVE + painted + RESTORE
        return out

    def release(self) -> str:
        """Writes that give the rows back, cleared; nothing if none are held."""
        if self._size is None:
            return ""
        first = self._size[1] - RESERVED_ROWS + 1
        self._size, self._rows = None, []
        clear = "".join(f"\x1b[{first + i};1H{CLEAR_LINE}" for i in range(RESERVED_ROWS))
        return f"{SAVE}{clear}\x1b[r{RESTORE}"

    def _reserve(self, columns: int, height: int) -> str:
        # The old rows, if any, lie below the cursor wherever a resize moved them. Scroll until there is room below the
        # cursor; setting the region would send it home, so it is saved around that.
        out = CLEAR_BELOW + DOWN * RESERVED_ROWS + f"\x1b[{RESERVED_ROWS}A"
        if self._size is not None:
            out = f"{SAVE}\x1b[r{RESTORE}{out}"
        self._size, self._rows = (columns, height), []
        return f"{out}{SAVE}\x1b[1;{height - RESERVED_ROWS}r{RESTORE}"

    def _render(self, row: Row, columns: int) -> str:
        # The last column stays free: a character there would leave the cursor in the state "about to wrap".
        return "".join(self._styles[style].replace("*", text) for text, style in row.cut(columns - 1))

    def _render_style(self, style: str) -> str:
        """An asterisk in this style, in the codes that this terminal knows: none where colour is not wanted."""
        with self.console.capture() as capture:
            self.console.print("*", style=style, end="")
        return capture.get()

    def _measure(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            return 0, 0
        return columns, rows


class LiveProgress:
    """Keeps the display up to date from a thread of its own, a few times a second."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
        self._lock = threading.Lock()
        self._tally = Tally()
        self._pending: list[str] = []
        self._warned: set[str] = set()
        self._closing = threading.Event()
        self._painter: threading.Thread | None = None
        self._process = os.getpid()

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        with self._lock:
            if kind == "start":
                self._tally = Tally()
            self._tally.add(event, self._clock())
            if kind not in ("step", "checkpoint") and (kind != "warning" or new_warning(event, self._warned)):
                self._pending += lines.describe(event)
        if self._painter is None and not self._closing.is_set():
            self._painter = threading.Thread(target=self._paint_until_closed, name="echelon-progress", daemon=True)
            self._painter.start()
            atexit.register(self.close)
            self._give_back_on_signals()

    def close(self) -> None:
        """Gives the terminal back. Waits only so long: it may be stopped."""
        self._closing.set()
        if self._painter is not None and self._process == os.getpid():
            self._painter.join(CLOSE_S)
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                if signal.getsignal(number) == self._end:
                    signal.signal(number, signal.SIG_DFL)

    def _give_back_on_signals(self) -> None:
        """Also when a signal ends this process (Ctrl-\\), where nobody else has a use for it."""
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._end)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _paint_until_closed(self) -> None:
        try:
            while not self._closing.wait(REFRESH_S):
                self._paint()
            with self._lock:
                self._tally.running = False
            self._paint()
        except (OSError, ValueError):  # the terminal is gone: so is the display, and the training goes on
            return

    def _paint(self) -> None:
        with self._lock:
            news, self._pending = self._pending, []
            running = self._tally.running
            rows = status(self._tally, self._clock(), self._terminal.columns - 1, self._terminal.plain_letters)
        out = "".join(f"{line}\n" for line in news)
        out = out + self._terminal.paint(rows) if running else self._terminal.release() + out
        if out:
            write(self._terminal.stream, out)


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
