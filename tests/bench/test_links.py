"""`echelon bench links`: what it says, where, and that what it predicts in bytes is what was sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.bench import LinksReport, parse_size
from echelon.bench.ranks import hosts_of, summarize
from echelon.bench.report import LinkRow, write_size
from echelon.cli import main
from echelon.comm.collectives import TOPOLOGIES
from echelon.comm.timing import Line
from echelon.errors import ConfigError

SRC = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "echelon", "bench", "links"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "echelon", "bench", "links"]
LINE = Line(latency_s=50e-6, byte_s=2e-10)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def last_object(out: str) -> dict[str, object]:
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("command", [[*COMMAND, "--workers", "2"], TORCHRUN], ids=["started", "torchrun"])
def test_what_it_predicts_in_bytes_is_what_was_sent(command):
    done = run([*command, "--sizes", "4k,300000", "--json"])
    assert done.returncode == 0, done.stderr
    report = LinksReport.from_dict(last_object(done.stdout))
    assert report.hosts == ((0, 1),)
    assert {(row.src, row.dst) for row in report.links} == {(0, 1), (1, 0)}
    assert all(row.latency_us > 0 and row.gigabytes_per_s > 0 for row in report.links)
    by_size = {size: [row for row in report.all_reduce if row.size_bytes == size] for size in (4096, 300_000)}
    assert [row.topology for row in by_size[4096]] == [*TOPOLOGIES, "exchange"]
    assert [row.topology for row in by_size[300_000]] == list(TOPOLOGIES)
    for row in report.all_reduce:
        assert row.predicted_bytes == row.measured_bytes == 2 * row.size_bytes
        assert row.predicted_messages == row.measured_messages
        assert row.predicted_s > 0
        assert row.measured_s > 0
    assert "all-reduce of 4k, ring" in done.stderr


def test_on_a_terminal_or_in_a_file_it_is_two_matrices_and_a_table():
    done = run([*COMMAND, "--workers", "3", "--sizes", "4k"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("links between 3 ranks on 1 host")
    assert done.stdout.count("to 2") == 2
    assert "measuring" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def found_by(ranks: int, transport: str = "shm") -> list[dict[str, object]]:
    """What ranks would have measured on links that are exactly `LINE`."""
    sizes = [8, 65_536, 1 << 20]
    links = [
        {dst: [[size, LINE.seconds(size)] for size in sizes] for dst in range(ranks) if dst != src}
        for src in range(ranks)
    ]
    return [
        {
            "transports": {str(dst): transport for dst in links[src]},
            "alone": [[src, dst, samples] for dst, samples in links[src].items()],
            "together": [[src, dst, samples] for dst, samples in links[src].items()],
            "timed": [
                [1 << 20, name, {"seconds": [0.001 * (src + 1)], "size_bytes": 10, "messages": 1}]
                for name in (*TOPOLOGIES, None)
            ],
        }
        for src in range(ranks)
    ]


def test_a_round_takes_as_long_as_on_the_slowest_rank():
    report = summarize(found_by(3), [1 << 20])
    assert report.links[0] == LinkRow(
        src=0,
        dst=1,
        transport="shm",
        latency_us=pytest.approx(50),
        gigabytes_per_s=pytest.approx(5),
        busy_latency_us=pytest.approx(50),
        busy_gigabytes_per_s=pytest.approx(5),
    )
    assert {row.measured_s for row in report.all_reduce} == {0.003}
    assert {row.measured_bytes for row in report.all_reduce} == {30}
    assert [row.topology for row in report.all_reduce if row.is_default] == ["direct"]


def test_many_ranks_still_fit_a_screen():
    text = summarize(found_by(10), [1 << 20]).text()
    assert max(map(len, text.splitlines())) <= 140
    assert text.count("to 9") == 2


def test_ranks_without_shared_memory_are_hosts_of_their_own():
    assert hosts_of([{1: "shm", 2: "tcp"}, {0: "shm", 2: "tcp"}, {0: "tcp", 1: "tcp"}]) == ((0, 1), (2,))


@pytest.mark.parametrize(("text", "size"), [("4k", 4096), ("1M", 1 << 20), ("25m", 25 << 20), ("100", 100)])
def test_sizes_are_read_and_written_alike(text, size):
    assert parse_size(text) == size
    assert write_size(size) == text.lower()


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1.5m", "5t", "9g"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="sizes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench", "SUBJECT"),
        ("bench disks", "disks"),
        ("bench links --workers 1", "a link is between two"),
        ("bench links --sizes 4k,big", "'big' is no size"),
    ],
)
def test_wrong_use_ends_with_2_and_an_object_of_its_own(capfd, line, said):
    assert main([*line.split(), "--json"]) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert set(last_object(out)) == {"error"}


@pytest.mark.parametrize("words", [["bench"], ["bench", "links"]])
def test_its_help_teaches_by_example(capfd, words):
    with pytest.raises(SystemExit) as ending:
        main([*words, "--help"])
    out = capfd.readouterr().out
    assert ending.value.code == 0
    assert "  echelon bench links" in out
    assert max(map(len, out.splitlines())) <= 120
