"""What a person sees: numbers, rates, plain lines, and a live display that other processes' output does not garble."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.progress import lines, progress, words
from echelon.progress.plain import PlainProgress, interval
from echelon.progress.status import bar, status
from echelon.progress.tally import Tally

START = {"event": "start", "plan": "dp4+zero2", "workers": 4, "steps": 1000, "run": "runs/demo", "parameters": 34826}
SUMS = {"op": "all_reduce", "bytes": 2_000_000, "transports": ["shm", "tcp"], "calls": 1000, "seconds": 1.5}
END = {"event": "end", "steps": 1000, "seconds": 12.34, "loss": 0.3412, "digest": "ab" * 32, "run": "runs/demo"}


def a_step(step: int, **fields: Any) -> dict[str, Any]:
    usual = {"loss": 0.5, "samples": 256, "seconds": 0.01, "bytes": 1.2e6, "shares": {"0": 2, "1": 2}}
    return {"event": "step", "step": step, **usual, **fields}


class Clock:
    """Time that passes when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.34123, "0.3412"),
        (0, "0.0000"),
        (12345.678, "12345.6780"),
        (1e-7, "1.000e-07"),
        (2.5e8, "2.500e+08"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (None, "-"),
        ("text", "text"),
    ],
)
def test_a_loss_is_short_and_never_hides_what_it_is(value: Any, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.052, "0.052"),
        (4.2, "4.2"),
        (99.96, "100.0"),
        (512, "512"),
        (5120, "5,120"),
        (1.25e6, "1.25M"),
        (3e9, "3.00G"),
    ],
)
def test_rates_have_about_three_digits(value: float, text: str) -> None:
    assert words.amount(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.2e6, "1.2 MB"), (99.97e6, "100 MB"), (5e15, "5000 TB")],
)
def test_sizes_are_in_decimal_units(count: float, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0:00"), (41.9, "0:41"), (723, "12:03"), (11110, "3:05:10"), (2 * 86400 + 4 * 3600, "2d 04h")],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.001, "1.0 ms"), (0.018, "18 ms"), (2.41, "2.41 s"), (12.34, "12.3 s"), (60, "1:00")]
)
def test_spans_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert words.span(seconds) == text


def test_shares_are_in_order_of_rank_even_after_json_made_ranks_text() -> None:
    assert words.shares({"10": 1, "9": 7, "2": 3}) == "3/7/1"


def test_shares_of_many_workers_are_summed_up() -> None:
    assert words.shares(dict.fromkeys(range(16), 2)) == "16 x 2"
    assert words.shares({rank: 1 + rank % 3 for rank in range(16)}) == "16 x 1-3"


# --- the tally -------------------------------------------------------------------------------------------------------


def after(*events: tuple[float, dict[str, Any]]) -> Tally:
    tally = Tally()
    for now, event in events:
        tally.add(event, now)
    return tally


def test_the_rate_counts_the_steps_whose_events_were_thinned_out() -> None:
    tally = after((0, START), (1, a_step(10)), (2, a_step(110)), (3, a_step(210)))
    assert tally.samples_per_second == pytest.approx(25600)
    assert tally.left(3) == pytest.approx(7.9)


def test_time_left_counts_down_between_the_events_of_long_steps() -> None:
    tally = after((0, START | {"steps": 5}), (60, a_step(1)), (120, a_step(2)))
    assert tally.left(120) == pytest.approx(180)
    assert tally.left(150) == pytest.approx(150)
    assert tally.left(999) == 0


def test_one_long_step_is_enough_for_a_rate() -> None:
    tally = after((0, START | {"steps": 11}), (60, a_step(1, seconds=60.0)))
    assert tally.left(60) == pytest.approx(600)


def test_the_rate_forgets_a_slow_beginning() -> None:
    slow_start = [(float(second), a_step(second)) for second in range(1, 11)]
    fast_later = [(10 + i / 10, a_step(10 + i)) for i in range(1, 250)]
    assert after((0, START), *slow_start, *fast_later).step_seconds == pytest.approx(0.1)


def test_a_rate_is_kept_over_steps_longer_than_the_window() -> None:
    tally = after((0, START), *((60.0 * i, a_step(i)) for i in range(1, 5)))
    assert tally.step_seconds == pytest.approx(60)


def test_there_is_no_time_left_to_tell_when_the_total_is_unknown() -> None:
    tally = after((0, START | {"steps": None}), (1, a_step(1)), (2, a_step(2)))
    assert tally.left(2) is None
    assert "left" not in lines.step_line(tally, 2)
    assert "step 2  loss" in lines.step_line(tally, 2)


def test_steps_taken_back_start_a_new_rate() -> None:
    tally = after((0, START), (1, a_step(100)), (2, a_step(200)), (30, a_step(150, seconds=0.5)))
    assert tally.step_seconds == 0.5


def test_silence_is_worth_saying_only_when_it_is_longer_than_steps_are() -> None:
    fast = after((0, START), (1, a_step(1)), (2, a_step(2)))
    slow = after((0, START), (60, a_step(1)), (120, a_step(2)))
    assert fast.silent(6) is None
    assert fast.silent(9) == pytest.approx(7)
    assert slow.silent(200) is None
    assert slow.silent(320) == pytest.approx(200)


def test_two_events_at_the_same_time_divide_nothing_by_zero() -> None:
    tally = after((0, START), (1, a_step(1)), (1, a_step(2)))
    assert tally.step_seconds is None
    assert lines.step_line(tally, 1).startswith("step 2/1000  loss 0.5000  1.2 MB/step")


# --- plain lines -----------------------------------------------------------------------------------------------------


class Shown:
    """A plain display, its clock and what it wrote."""

    def __init__(self) -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.display = PlainProgress(self.stream, self.clock)

    def run(self, *events: dict[str, Any], every: float = 0.0) -> list[str]:
        for event in events:
            self.display(event)
            self.clock.now += every
        return self.stream.getvalue().splitlines()


def test_the_header_says_plan_workers_and_run_folder() -> None:
    assert Shown().run(START) == [
        "echelon  plan dp4+zero2  4 workers  1,000 steps  34,826 parameters",
        "run      runs/demo",
    ]


def test_plain_lines_show_the_first_step_then_one_now_and_then_and_the_last() -> None:
    got = Shown().run(START | {"steps": 500}, *(a_step(i) for i in range(1, 501)), END, every=0.01)
    steps = [int(m[1]) for line in got if (m := re.match(r"step (\d+)/500", line))]
    assert steps == [1, 201, 401, 500]


def test_the_last_step_is_shown_even_when_its_number_was_not_known_before() -> None:
    got = Shown().run(START | {"steps": None}, a_step(1), a_step(2), END)
    assert [line.split("  ")[0] for line in got[2:4]] == ["step 1", "step 2"]


def test_a_step_line_says_everything_in_a_line() -> None:
    shown = Shown()
    shown.run(START, a_step(1), every=5.0)
    assert shown.run(a_step(119), every=1.0)[-1] == (
        "step 119/1000  loss 0.5000  6,042 samples/s  1.2 MB/step  shares 2/2  left 0:37"
    )


def test_steps_of_a_minute_are_each_shown() -> None:
    got = Shown().run(START, *(a_step(i, loss=float("nan")) for i in range(1, 6)), every=60.0)
    assert len(got) == 2 + 5
    assert all("loss nan" in line for line in got[2:])


def test_a_long_log_stays_short() -> None:
    assert (interval(10), interval(300), interval(86400)) == (2, 10, 30)


def test_the_same_warning_from_every_rank_is_said_once() -> None:
    warning = {"event": "warning", "message": "parameter a.b has no gradient"}
    assert Shown().run(warning, warning) == ["warning: parameter a.b has no gradient"]


def test_checkpoints_every_few_milliseconds_do_not_flood_the_log() -> None:
    saved = [{"event": "checkpoint", "step": i, "path": "r/step-0", "seconds": 0.018} for i in range(1, 101)]
    got = Shown().run(START, *saved, every=0.03)
    assert got[2] == "step 1  saved  step-0  18 ms"
    assert len(got) == 2 + 2


def test_the_summary_gives_loss_digest_steps_seconds_and_folder() -> None:
    assert Shown().run(END | {"metrics": {"accuracy": 0.97}}) == [
        "done     1,000 steps  12.3 s  loss 0.3412  accuracy 0.9700",
        f"digest   {'ab' * 32}",
        "run      runs/demo",
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "resume", "step": 120, "path": "r/c"}, "resumed  after step 120  r/c"),
        ({"event": "evaluate", "step": 9, "metrics": {"acc": 0.5}}, "step 9  evaluated  acc 0.5000"),
        ({"event": "waiting", "message": "for rank 3"}, "waiting: for rank 3"),
        (
            {"event": "traffic", "bytes": 2_000_000, "predicted": 2_000_000, "by": [SUMS | {"bytes": 0}, SUMS]},
            "sent     2.0 MB  all_reduce 2.0 MB shm+tcp in 1,000 calls of 1.5 ms",
        ),
        (
            {"event": "traffic", "bytes": 2_000_000, "predicted": 1_000_000, "by": [SUMS | {"seconds": 0.0}]},
            "sent     2.0 MB (predicted 1.0 MB)  all_reduce 2.0 MB shm+tcp",
        ),
        ({"event": "rebalance", "message": "rank 1 gets 1 slice"}, "rebalance: rank 1 gets 1 slice"),
    ],
)
def test_every_kind_of_news_has_its_line(event: dict[str, Any], line: str) -> None:
    assert Shown().run(event) == [line]


def test_events_only_for_the_record_are_not_shown() -> None:
    assert Shown().run({"event": "worker", "rank": 0, "pid": 1, "host": "h"}) == []


def test_a_training_that_breaks_off_says_how_far_it_came() -> None:
    shown = Shown()
    shown.run(START, a_step(1), a_step(7))
    shown.display.close()
    assert shown.run()[-1].startswith("step 7/1000")


def test_a_training_that_was_stopped_shows_its_last_step_and_has_no_display_any_more() -> None:
    shown = Shown()
    assert shown.run(START, a_step(1), a_step(7), {"event": "stopped", "steps": 7})[-1].startswith("step 7/1000")
    assert not after((0, START), (1, a_step(1)), (2, {"event": "stopped"})).running


def test_a_second_training_starts_from_nothing() -> None:
    shown = Shown()
    shown.run(START, a_step(1), a_step(900), END, every=1.0)
    assert "left" not in shown.run(START, a_step(1, seconds=None, loss=9.0))[-1]


def test_a_message_cannot_steer_the_terminal() -> None:
    assert Shown().run({"event": "warning", "message": "a\x1b[2Jb\rc\u202ed"}) == ["warning: a[2Jbcd"]


def test_a_reader_that_went_away_does_not_stop_the_training() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        display = PlainProgress(stream)
        os.close(reading)
        display(START)
        display(END)
        display.close()
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_letters_that_the_stream_lacks_are_spelled_out() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainProgress(stream)({"event": "warning", "message": "größer"})
    assert raw.getvalue() == b"warning: gr\\xf6\\xdfer\n"


def test_a_file_gets_plain_lines() -> None:
    assert isinstance(progress(io.StringIO()), PlainProgress)


# --- the status rows -------------------------------------------------------------------------------------------------

numbers = st.one_of(st.none(), st.floats(), st.integers(0, 10**12))


@given(
    columns=st.integers(29, 300),
    total=st.one_of(st.none(), st.integers(1, 10**9)),
    part=st.floats(0, 1.5),
    loss=numbers,
    sent=st.one_of(st.none(), st.floats(0, 1e18)),
    workers=st.integers(0, 40),
    gap=st.floats(0, 1e6),
    wait=st.floats(0, 1e6),
    letters=st.booleans(),
)
def test_no_status_row_is_ever_wider_than_the_terminal(
    columns: int,
    total: int | None,
    part: float,
    loss: Any,
    sent: Any,
    workers: int,
    gap: float,
    wait: float,
    letters: bool,
) -> None:
    step = int((total or 1000) * part)
    usual = {"loss": loss, "bytes": sent, "shares": dict.fromkeys(range(workers), 1)}
    tally = after((0, START | {"steps": total}), (1, a_step(step, **usual)), (1 + gap, a_step(step + 1, **usual)))
    for row in status(tally, 1 + gap + wait, columns, letters):
        assert len("".join(text for text, _ in row.cut(columns))) <= columns
        assert len(row.text) <= max(columns, 60), "cut off where there was room"


@given(share=st.floats(0, 1), width=st.integers(8, 60), letters=st.booleans())
def test_the_bar_always_has_its_width(share: float, width: int, letters: bool) -> None:
    assert len("".join(bar(share, width, letters))) == width


def test_the_bar_moves_by_half_a_letter() -> None:
    assert [bar(share, 4) for share in (0, 0.125, 0.25, 1)] == [
        ("", "━━━━"),
        ("╸", "━━━"),
        ("━", "╺━━"),
        ("━━━━", ""),
    ]


def texts(tally: Tally, now: float, columns: int) -> list[str]:
    return [row.text for row in status(tally, now, columns)]


def test_the_status_at_80_columns() -> None:
    tally = after((0, START), (1, a_step(300)), (2, a_step(412)))
    assert texts(tally, 2, 79) == [
        " step  412/1000  ━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━   41%   left 0:05",
        " loss 0.5000   28,672 samples/s   1.2 MB/step   shares 2/2   8.9 ms/step",
    ]


def test_a_wide_terminal_also_shows_the_elapsed_time_and_the_last_checkpoint() -> None:
    tally = after((0, START), (1, a_step(300)), (2, a_step(412)), (2, {"event": "checkpoint", "step": 400}))
    place, pace = texts(tally, 65, 139)
    assert place.endswith("no step for 1:03   1:05 elapsed")
    assert pace.endswith("saved 400")


def test_before_the_first_step_it_says_so() -> None:
    place, pace = texts(after((0, START)), 1, 79)
    assert "step    0/1000" in place
    assert place.endswith("first step")
    assert "waiting for the first step" in pace


def test_a_loss_that_is_no_number_stands_out() -> None:
    row = status(after((0, START), (1, a_step(1, loss=float("nan")))), 1, 79)[1]
    assert ("nan   ", "bold red") in row.pieces


# --- the live display ------------------------------------------------------------------------------------------------


class Screen:
    """The part of a VT100 that matters here: cursor, scrolling region, erasing. Unknown codes fail the test."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.x = self.y = 0
        self.saved = (0, 0)
        self.bottom = rows - 1

    def feed(self, text: str) -> None:
        for code, args, letter, char in re.findall(r"\x1b([78D])|\x1b\[([\d;]*)([A-Za-z])|(.|\n)", text):
            if char:
                self._put(char)
            elif code:
                self._escape(code)
            else:
                self._control([int(a) for a in args.split(";") if a], letter)

    def _put(self, char: str) -> None:
        assert char != "\x1b"
        if char == "\n":
            self.x = 0
            self._down()
        elif char == "\r":
            self.x = 0
        else:
            assert self.x < self.columns, "wrapped"
            self.cells[self.y][self.x] = char
            self.x += 1

    def _down(self) -> None:
        if self.y == self.bottom:
            self.cells[: self.bottom + 1] = [*self.cells[1 : self.bottom + 1], [" "] * self.columns]
        else:
            self.y = min(self.y + 1, self.rows - 1)

    def _escape(self, code: str) -> None:
        if code == "7":
            self.saved = (self.x, self.y)
        elif code == "8":
            self.x, self.y = self.saved
        else:
            self._down()

    def _control(self, args: list[int], letter: str) -> None:
        if letter == "H":
            self.y, self.x = args[0] - 1, args[1] - 1
        elif letter == "A":
            self.y = max(0, self.y - args[0])
        elif letter == "r":
            self.bottom = args[1] - 1 if args else self.rows - 1
            self.x = self.y = 0
        elif letter == "K":
            self.cells[self.y][0 if args == [2] else self.x :] = [" "] * (self.columns - (0 if args == [2] else self.x))
        elif letter == "J":
            self.cells[self.y][self.x :] = [" "] * (self.columns - self.x)
            self.cells[self.y + 1 :] = [[" "] * self.columns for _ in range(self.rows - self.y - 1)]
        else:
            assert letter == "m", f"unknown code {letter}"

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]


class Pty:
    """A terminal of a given size, and what was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.near, far = pty.openpty()
        self.stream = os.fdopen(far, "w", encoding="utf-8")
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        return os.read(self.near, 1 << 16).decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.stream.close()
        os.close(self.near)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    device = Pty(80, 24)
    yield device
    device.close()


def rows_at(step: int) -> list[Any]:
    return status(after((0, START), (1, a_step(step - 1)), (2, a_step(step))), 2, 79)


def test_output_of_other_processes_scrolls_above_the_display_and_stays_whole(terminal: Pty) -> None:
    from echelon.progress.live import Terminal

    bottom, screen = Terminal(terminal.stream), Screen(80, 24)
    screen.feed("$ echelon train job.py\n")
    for i in range(1, 60):
        screen.feed(bottom.paint(rows_at(10 + i)))
        screen.feed(f"printed by a worker {i}\n")
    assert screen.lines[:21] == [f"printed by a worker {i}" for i in range(39, 60)]
    assert screen.lines[21] == ""
    assert screen.lines[22].startswith(" step   69/1000  ━")
    assert screen.lines[23].startswith(" loss 0.5000")


def test_a_line_half_written_by_a_worker_is_finished_where_it_began(terminal: Pty) -> None:
    from echelon.progress.live import Terminal

    bottom, screen = Terminal(terminal.stream), Screen(80, 24)
    screen.feed("\n" * 23 + "half ")
    screen.feed(bottom.paint(rows_at(10)))
    screen.feed("a line")
    screen.feed(bottom.paint(rows_at(11)))
    assert screen.lines[21] == "half a line"


def test_a_display_that_did_not_change_writes_nothing(terminal: Pty) -> None:
    from echelon.progress.live import Terminal

    bottom = Terminal(terminal.stream)
    assert bottom.paint(rows_at(10))
    assert bottom.paint(rows_at(10)) == ""


def test_the_terminal_is_given_back_as_it_was(terminal: Pty) -> None:
    from echelon.progress.live import Terminal

    bottom, screen = Terminal(terminal.stream), Screen(80, 24)
    screen.feed("before\n" + bottom.paint(rows_at(10)) + "during\n" + bottom.release() + "after")
    assert screen.lines == ["before", "during", "after"] + [""] * 21
    assert screen.bottom == 23
    assert bottom.release() == ""


@pytest.mark.parametrize(("columns", "rows"), [(120, 40), (60, 12)])
def test_a_resized_terminal_gets_its_display_at_the_new_bottom(terminal: Pty, columns: int, rows: int) -> None:
    from echelon.progress.live import Terminal

    bottom, before = Terminal(terminal.stream), Screen(80, 24)
    before.feed("one\n" + bottom.paint(rows_at(10)))
    terminal.resize(columns, rows)
    screen = Screen(columns, rows)
    screen.feed("one\n\n step   10/1000 of the old size")
    screen.x, screen.y = 0, 1
    screen.feed(bottom.paint(rows_at(11)))
    assert screen.lines[0] == "one"
    assert [line for line in screen.lines[1:-2] if line] == []
    assert screen.lines[-2].startswith(" step   11/1000")
    assert screen.bottom == rows - 3


def test_a_terminal_that_became_too_small_shows_nothing_and_is_given_back(terminal: Pty) -> None:
    from echelon.progress.live import Terminal

    bottom = Terminal(terminal.stream)
    bottom.paint(rows_at(10))
    terminal.resize(80, 4)
    assert "\x1b[r" in bottom.paint(rows_at(11))
    assert bottom.paint(rows_at(12)) == ""


def test_a_run_on_a_terminal_leaves_its_story_and_no_display(terminal: Pty) -> None:
    show, screen = progress(terminal.stream), Screen(80, 24)
    assert not isinstance(show, PlainProgress)
    warning = {"event": "warning", "message": "careful"}
    for event in (START, a_step(1), warning, warning, a_step(1000), END):
        show(event)
    show.close()
    show.close()
    screen.feed(terminal.read())
    assert screen.lines[:7] == [
        "echelon  plan dp4+zero2  4 workers  1,000 steps  34,826 parameters",
        "run      runs/demo",
        "warning: careful",
        "done     1,000 steps  12.3 s  loss 0.3412",
        f"digest   {'ab' * 32}",
        "run      runs/demo",
        "",
    ]
    assert set(screen.lines[7:]) == {""}


def test_a_display_closed_without_an_end_gives_the_terminal_back(terminal: Pty) -> None:
    show, screen = progress(terminal.stream), Screen(80, 24)
    show(START)
    while "loss" not in (text := terminal.read()):
        screen.feed(text)
        show(a_step(5))
    screen.feed(text)
    assert screen.bottom == 21
    show.close()
    screen.feed(terminal.read())
    assert screen.bottom == 23
    assert screen.lines[22:] == ["", ""]


SHOWING = """
import resource, signal, sys, time
from echelon.progress import progress
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
show = progress(sys.stdout)
show({"event": "start", "plan": "dp", "workers": 1, "steps": 100})
show({"event": "step", "step": 1, "loss": 0.5, "samples": 8, "seconds": 0.1})
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGHUP])
def test_a_signal_that_ends_the_command_gives_the_terminal_back(terminal: Pty, number: signal.Signals) -> None:
    showing, screen = subprocess.Popen([sys.executable, "-c", SHOWING], stdout=terminal.stream), Screen(80, 24)
    try:
        while "loss" not in (text := terminal.read()):
            screen.feed(text)
        screen.feed(text)
        assert screen.bottom == 21
        showing.send_signal(number)
        assert showing.wait(20) == -number
    finally:
        showing.kill()
    screen.feed(terminal.read())
    assert screen.bottom == 23
    assert screen.lines[22:] == ["", ""]


def test_a_closed_display_leaves_the_signals_as_they_were(terminal: Pty) -> None:
    show = progress(terminal.stream)
    show(START)
    assert signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL
    show.close()
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL


def test_a_display_without_a_stream_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output was closed when Python started."""
    monkeypatch.setattr(sys, "stdout", None)
    show = progress()
    show(START)
    show(a_step(1))
    show(END)
    show.close()


def test_a_terminal_that_went_away_does_not_stop_the_training(terminal: Pty) -> None:
    show = progress(terminal.stream)
    show(START)
    terminal.read()
    terminal.stream.close()
    show(a_step(1))
    show(END)
    show.close()


def test_a_terminal_without_rich_gets_plain_lines(terminal: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "echelon.progress.live", raising=False)
    assert isinstance(progress(terminal.stream), PlainProgress)


def test_a_dumb_terminal_gets_plain_lines(terminal: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress(terminal.stream), PlainProgress)
