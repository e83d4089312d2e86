"""How much of communication hides behind computing: DDP on two hosts of one rank each, the link shaped so that the
gradients take about as long as what they can hide behind.

    computing alone      forward | backward of 6 layers   | update
    communication alone                  bucket | bucket | bucket ...
    a step               forward | backward
                                    bucket | bucket | bucket ... | update

Communication can begin when the first bucket is full, and the last bucket begins when the backward pass ends. So with
F for what is before the first bucket, C for computing and K for all buckets, no step takes less than

    bound = max(F + K + update, C + last bucket)

which is more than the larger of C and K; the bound is what our step is compared with as well. In one row K is about
as long as the backward pass, in the other as computing as a whole.

    python benchmarks/overlap.py [--json] [--steps 20]
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
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import run_ranks, shaping, two_hosts, why_not
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon.comm  # noqa: F401 (makes the backend known)

LAYERS, WIDTH, BATCH, BUCKET_MB = 6, 512, 6144, 1.0
TARGET = 1.15
SHARES = {"its backward pass": 1.0, "all of its computing": 1.5}
"""What communication takes as long as, over the backward pass."""
WIRE = 1.05
"""Bytes of a packet over those of its payload."""
PORT, LIMIT_S = 29577, 900


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


class Trainer:
    """DDP over a group, and its step taken apart."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.model = DistributedDataParallel(
            make_model(), process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(BATCH, WIDTH)
        self.marks: list[float] = []
        """When the last step began, its backward pass began and ended, and it ended."""

    def step(self, *, synced: bool = True) -> None:
        began = time.perf_counter()
        with nullcontext() if synced else self.model.no_sync():
            loss = self.model(self.x).square().mean()
            backward = time.perf_counter()
            loss.backward()
        passed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.marks = [began, backward, passed, time.perf_counter()]

    def compute(self) -> None:
        self.step(synced=False)


def buckets_of(group: dist.ProcessGroup) -> tuple[list[int], float]:
    """The elements of each bucket in the order in which they are sent, and the seconds of a step before the first."""
    trainer, sizes, at = Trainer(group), [], []

    def note(_state, bucket):  # torch reads annotations and takes no strings
        at.append(time.perf_counter())
        sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    trainer.model.register_comm_hook(None, note)
    before = []
    for _ in range(8):
        sizes.clear()
        at.clear()
        trainer.step()
        before.append(at[0] - trainer.marks[0])
    return list(sizes), statistics.median(before[2:])


class Rank:
    """One rank: everything that is compared, taking turns."""

    def __init__(self, rank: int, store_host: str, steps: int) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore(store_host, PORT, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
        self.ours = dist.new_group(backend="echelon")
        self.steps = steps
        sizes, self.first_s = buckets_of(dist.group.WORLD)
        self.buckets = [torch.zeros(size) for size in sizes]
        self.size_bytes = sum(bucket.nbytes for bucket in self.buckets)
        self.trainers = {"echelon": Trainer(self.ours), "gloo": Trainer(dist.group.WORLD)}

    def communicate(self) -> None:
        """The same buckets, with nothing to hide behind."""
        self.send_buckets(self.ours)

    def send_buckets(self, group: dist.ProcessGroup) -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in self.buckets]:
            work.wait()

    def slowest(self, seconds: list[float]) -> list[float]:
        together = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def computing(self) -> dict[str, float]:
        """The parts of a step that sends nothing; to choose the speed of the link by."""
        trainer = self.trainers["echelon"]
        parts = []
        for _ in range(10):
            dist.barrier()
            trainer.compute()
            parts.append([b - a for a, b in zip(trainer.marks, trainer.marks[1:], strict=False)])
        medians = self.slowest([statistics.median(column) for column in zip(*parts[2:], strict=True)])
        return dict(zip(("forward", "backward", "update"), medians, strict=True))

    def take_turns(self) -> dict[str, list[float]]:
        contenders: dict[str, Callable[[], None]] = {
            "compute": self.trainers["echelon"].compute,
            "communicate": self.communicate,
            **{name: trainer.step for name, trainer in self.trainers.items()},
        }
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(self.steps + 2):
            order = list(contenders.items())
            for name, act in order if turn % 2 else reversed(order):
                dist.barrier()
                began = time.perf_counter()
                act()
                if turn >= 2:
                    found[name].append(time.perf_counter() - began)
        return {name: self.slowest(seconds) for name, seconds in found.items()}

    def measure(self) -> dict[str, Any]:
        parts = self.computing()
        found: dict[str, Any] = {**parts, "first": self.slowest([self.first_s])[0], "rows": {}}
        found["last_share"] = self.buckets[-1].nbytes / self.size_bytes
        for what, share in SHARES.items():
            rate = round(WIRE * 8 * self.size_bytes / (share * parts["backward"]))
            subprocess.run(shaping(f"{rate}bit"), check=True)
            found["rows"][what] = {"rate": rate, **self.take_turns()}
        return found

    def leave(self) -> None:
        self.trainers.clear()
        dist.destroy_process_group(self.ours)
        dist.destroy_process_group()


def claims_of(found: dict[str, Any]) -> list[dict[str, object]]:
    claims = []
    for what, row in found["rows"].items():
        compute, communicate, ours, gloo = (
            statistics.median(row[name]) for name in ("compute", "communicate", "echelon", "gloo")
        )
        bound = max(found["first"] + communicate + found["update"], compute + found["last_share"] * communicate)
        link = f"{LAYERS} layers of {WIDTH}, {row['rate'] / 1e6:.0f} Mbit/s: communication as long as {what}"
        larger = max(compute, communicate)
        named = f"step over the larger of computing ({compute * 1e3:.0f}) and communication ({communicate * 1e3:.0f})"
        target = TARGET if what == next(iter(SHARES)) else None
        claims.append(claim(f"{named}, {link}", ours, larger, target))
        claims.append(claim(f"step over the least it could take, {link}", ours, bound, None))
        claims.append(claim(f"step over DDP's on gloo, {link}", ours, gloo, None))
    return claims


def claim(what: str, ours: float, peer: float, target: float | None) -> dict[str, object]:
    return {
        "claim": what,
        "ours": round(ours * 1000, 1),
        "peer": round(peer * 1000, 1),
        "ratio": round(ours / peer, 3),
        "target": None if target is None else f"at most {target:.2f}",
        "met": None if target is None else ours / peer <= target,
        "unit": "ms",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="how often the contenders take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, kind in {"--rank": int, "--folder": str, "--store": str}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank is not None:
        rank = Rank(words.rank, words.store, words.steps)
        found = rank.measure()
        if words.rank == 0:
            Path(words.folder, "found.json").write_text(json.dumps(found))
        rank.leave()
        return 0
    missing = why_not()
    if missing:
        print(f"overlap: {missing}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        command = [__file__, "--steps", str(words.steps), "--folder", folder, "--store", hosts.address(0), "--rank"]
        run_ranks(hosts, 1, command, LIMIT_S)
        claims = claims_of(json.loads(Path(folder, "found.json").read_text()))
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} ms = {row['ratio']} ({row['target']})")
    if words.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "overlap", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
