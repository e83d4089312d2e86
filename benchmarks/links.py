"""Collectives between two hosts: bytes over the link against the least there can be, and time on a slow link against
gloo's, in the same processes, taking turns.

The hosts are network namespaces joined by a pair of virtual interfaces (hosts.py), with two ranks on each, and once
more with one. The least that must cross the link, for a tensor of B bytes on every rank of two hosts:

    all-reduce       a host cannot know the sum without B bytes from the other: B each way, 2 B in all
    reduce-scatter   each host ends with half of the sum: B/2 each way, B in all
    all-gather       each host begins with half of what both end with: B/2 each way, B in all

whatever the number of ranks on a host. A ring over 2m ranks sends what each rank sends, 2(n-1)/n B for all-reduce,
over the link each way: for four ranks 1.5 B. Bytes are counted twice: by our own meter (payload handed to TCP), and
by the interfaces, packet by packet, with the headers of Ethernet, IP and TCP, and acknowledgements. Both on the slow
link: the headers are 4.6 %. On a link without a bound the receiver is what is slow, and more acknowledgements go out:
1.08 to 1.14 were seen there. As interfaces count by default, one header may stand for 64 KB, and it is 1.002.

    python benchmarks/links.py [--json] [--pairs 10]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import Hosts, run_ranks, sent_bytes, shaping, two_hosts, why_not

import echelon.comm  # noqa: F401 (makes the backend known)

SIZE_BYTES, SMALL_BYTES = 4 << 20, 4 << 10
OPTIMUM = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0}
"""Bytes that must cross the link, both ways together, over those of the tensor."""
CALLS, SMALL_CALLS = 4, 50
RATE, RATE_BYTES_S = "100mbit", 100e6 / 8
PAYLOAD_TARGET, WIRE_TARGET = 1.02, 1.07
TIME_TARGETS = {"all-reduce": 1.0, "reduce-scatter": 0.55}
PORT, LIMIT_S = 29555, 900


def calls_of(group: dist.ProcessGroup, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Each collective over a tensor of so many bytes."""
    whole = torch.zeros(size_bytes // 4)
    share = torch.zeros(whole.numel() // group.size())
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce-scatter": lambda: group._reduce_scatter_base(share, whole).wait(),
        "all-gather": lambda: group._allgather_base(whole, share).wait(),
    }


def added(value: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


class Rank:
    """One rank, with a group of either backend."""

    def __init__(self, rank: int, on_each: int, store_host: str) -> None:
        torch.set_num_threads(1)
        self.leads = rank % on_each == 0
        store = dist.TCPStore(store_host, PORT + on_each, 2 * on_each, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * on_each, timeout=timedelta(seconds=120))
        self.groups = {"gloo": dist.group.WORLD, "echelon": dist.new_group(backend="echelon")}

    def payload_bytes(self) -> int:
        rows = self.groups["echelon"].driver.fabric.traffic.rows
        return sum(size for (_, _, transport), (size, _) in rows.items() if transport == "tcp")

    def bytes_of(self, backend: str, call: Callable[[], object]) -> dict[str, float]:
        """What one call sends over the link, both ways: by our meter, and by the interfaces."""
        call()
        dist.barrier()
        time.sleep(0.2)  # acknowledgements may take 40 ms
        payload, wire = self.payload_bytes(), sent_bytes()
        dist.barrier()
        for _ in range(CALLS):
            call()
        dist.barrier()
        time.sleep(0.2)
        wire = sent_bytes() - wire if self.leads else 0
        payload = self.payload_bytes() - payload if backend == "echelon" else 0
        return {"payload": added(payload) / CALLS, "wire": added(wire) / CALLS}

    def seconds_of(self, call: Callable[[], object], count: int) -> float:
        """Seconds of one call, of the slowest rank; all start together."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        took = torch.tensor([(time.perf_counter() - began) / count])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def times_of(self, op: str, size_bytes: int, count: int, pairs: int) -> dict[str, list[float]]:
        calls = {name: calls_of(group, size_bytes)[op] for name, group in self.groups.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for pair in range(pairs + 1):
            order = list(calls.items())
            for name, call in order if pair % 2 else reversed(order):
                took = self.seconds_of(call, count)
                if pair:  # the first warms up
                    found[name].append(took)
        return found

    def measure(self, pairs: int) -> dict[str, Any]:
        """Small calls on the link as it is; bytes, and times of large ones, on a slow one."""
        found: dict[str, Any] = {"bytes": {}, "times": {}}
        found["small"] = self.times_of("all-reduce", SMALL_BYTES, SMALL_CALLS, 2 * pairs)
        if self.leads:
            subprocess.run(shaping(RATE), check=True)
        for name, group in self.groups.items():
            for op, call in calls_of(group, SIZE_BYTES).items():
                found["bytes"][f"{op} {name}"] = self.bytes_of(name, call)
        for op in TIME_TARGETS:
            found["times"][op] = self.times_of(op, SIZE_BYTES, 1, pairs)
        return found

    def leave(self) -> None:
        dist.destroy_process_group(self.groups["echelon"])
        self.groups.clear()  # gloo's group, left to the end of the interpreter, aborts the process now and then
        dist.destroy_process_group()


def run_one_rank(words: argparse.Namespace) -> None:
    rank = Rank(words.rank, words.on_each, words.store)
    found = rank.measure(words.pairs)
    if words.rank == 0:
        Path(words.folder, f"found-{words.on_each}.json").write_text(json.dumps(found))
    rank.leave()


def run_all(hosts: Hosts, on_each: int, folder: str, pairs: int) -> dict[str, Any]:
    words = [__file__, "--pairs", str(pairs), "--folder", folder, "--on-each", str(on_each)]
    run_ranks(hosts, on_each, [*words, "--store", hosts.address(0), "--rank"], LIMIT_S)
    found: dict[str, Any] = json.loads(Path(folder, f"found-{on_each}.json").read_text())
    return found


def claim(
    what: str, ours: float, peer: float | None, ratio: float, target: float | None, unit: str
) -> dict[str, object]:
    """One row; the target is one for the ratio, and where the unit is the optimum, for ours."""
    return {
        "claim": what,
        "ours": round(ours, 4),
        "peer": None if peer is None else round(peer, 4),
        "ratio": round(ratio, 4),
        "target": None if target is None else f"at most {target:.2f}",
        "met": None if target is None else round(ours if unit == "x" else ratio, 3) <= target,
        "unit": unit,
    }


def bytes_claims(found: dict[str, Any], ranks: int) -> list[dict[str, object]]:
    """Bytes over the optimum: ours and gloo's, their ratio, and a bound for ours."""
    rows = []
    for op, least in OPTIMUM.items():
        ours, gloo = (found["bytes"][f"{op} {name}"] for name in ("echelon", "gloo"))
        optimum = least * SIZE_BYTES
        what = f"{op} of 4 MB, {ranks} ranks on 2 hosts, 100 Mbit/s, over the least that must cross:"
        payload, wire, peer = ours["payload"] / optimum, ours["wire"] / optimum, gloo["wire"] / optimum
        rows.append(claim(f"{what} payload", payload, None, payload, PAYLOAD_TARGET, "x"))
        rows.append(claim(f"{what} bytes of the interfaces", wire, peer, wire / peer, WIRE_TARGET, "x"))
        rows[-1]["target"] = f"ours at most {WIRE_TARGET}"
    return rows


def time_claims(found: dict[str, Any], ranks: int) -> list[dict[str, object]]:
    rows = []
    for op, times in {**found["times"], "small": found["small"]}.items():
        ratio = statistics.median(a / b for a, b in zip(times["echelon"], times["gloo"], strict=True))
        ours, gloo = (statistics.median(times[name]) for name in ("echelon", "gloo"))
        where = f"{ranks} ranks on 2 hosts"
        if op == "small":
            what = f"all-reduce of 4 KB over gloo's, {where}, link not slowed"
        else:
            share = OPTIMUM[op] * SIZE_BYTES / 2 / RATE_BYTES_S / ours
            what = f"{op} of 4 MB over gloo's, {where}, 100 Mbit/s (ours is at {share:.0%} of the link's bound)"
        rows.append(claim(what, ours * 1000, gloo * 1000, ratio, TIME_TARGETS.get(op), "ms"))
    return rows


def same_claim(several: dict[str, Any], single: dict[str, Any]) -> dict[str, object]:
    """What two ranks on each host send over the link is what one on each does."""
    ours, peer = (sum(found["bytes"][f"{op} echelon"]["payload"] for op in OPTIMUM) for found in (several, single))
    what = "payload over the link, 2 ranks on each host over 1 on each (all three collectives)"
    row = claim(what, ours / 1e6, peer / 1e6, ours / peer, 1.0, "MB")
    return {**row, "target": "equal", "met": ours == peer}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="how often the contenders take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, kind in {"--rank": int, "--on-each": int, "--folder": str, "--store": str}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank is not None:
        run_one_rank(words)
        return 0
    missing = why_not()
    if missing:
        print(f"links: {missing}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    began = time.perf_counter()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for on_each in (2, 1):
            with two_hosts() as hosts:
                hosts.count_every_packet()
                found[on_each] = run_all(hosts, on_each, folder, words.pairs)
    claims = [*bytes_claims(found[2], 4), same_claim(found[2], found[1])]
    claims += [*time_claims(found[2], 4), *time_claims(found[1], 2)]
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} {row['unit']} = {row['ratio']} ({row['target']})")
    if words.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "links", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
