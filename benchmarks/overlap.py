"""How much of communication hides behind computing: DDP on two hosts of one rank each, the link shaped so that the
gradients take about as long as what they can hide behind.

    computing alone      forward | backward of 24 layers | update
    communication alone                  bucket | bucket | bucket ...
    a step               forward | backward
                                    bucket | bucket | bucket ... | update

Communication can begin when the first bucket is full, and the last bucket begins when the backward pass ends. So with
F for what is before the first bucket, C for computing and K for all buckets, no step takes less than

    bound = max(F + K + update, C + last bucket)

which is more than the larger of C and K; the bound is what our step is compared with as well. Computing is done twice:
on the core of the rank, where moving bytes takes some of it away and everything else on the machine does, too; and
elsewhere, as on an accelerator, while the rank sleeps.

The same without DDP: asynchronous all-reduces are begun, matrices multiplied for as long as they take, and then they
are waited for. Nothing has to come first there.

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

LAYERS, WIDTH, BUCKET_MB = 24, 256, 0.5
BATCH, BATCH_ELSEWHERE, LAYER_S = 6144, 16, 0.005
"""On the core a large batch takes its time; elsewhere every layer takes this long forward, twice as long backward."""
TARGET = 1.15
SETTINGS = {"on the core": {"backward": 1.0}, "elsewhere": {"backward": 1.0, "computing": 1.5}}
"""Where is computed; what communication takes as long as, and how long that is over the backward pass."""
CALLS, CALL_BYTES, CALLS_RATE = 4, 1 << 20, "100mbit"
WIRE = 1.05
"""Bytes of a packet over those of its payload."""
PORT, LIMIT_S = 29577, 900


class Elsewhere(torch.autograd.Function):
    """A layer that is computed by somebody else while this rank sleeps."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * LAYER_S)
        return gradient


class Layer(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        return Elsewhere.apply(y) if self.where == "elsewhere" else y


class Trainer:
    """DDP over a group, and its step taken apart."""

    def __init__(self, group: dist.ProcessGroup, where: str) -> None:
        model = nn.Sequential(*(Layer(where) for _ in range(LAYERS)))
        self.model = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(BATCH_ELSEWHERE if where == "elsewhere" else BATCH, WIDTH)
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


def buckets_of(group: dist.ProcessGroup, where: str) -> tuple[list[int], float]:
    """The elements of each bucket in the order in which they are sent, and the seconds of a step before the first."""
    trainer, sizes, at = Trainer(group, where), [], []

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
    return list(sizes), min(before[2:])


class Rank:
    """One rank: everything that is compared, taking turns."""

    def __init__(self, rank: int, store_host: str, steps: int) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore(store_host, PORT, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
        self.ours = dist.new_group(backend="echelon")
        self.steps = steps
        self.buckets: list[torch.Tensor] = []
        self.trainers: dict[str, Trainer] = {}

    def communicate(self) -> None:
        """The same buckets, with nothing to hide behind."""
        for work in [dist.all_reduce(bucket, group=self.ours, async_op=True) for bucket in self.buckets]:
            work.wait()

    def slowest(self, seconds: list[float]) -> list[float]:
        together = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def computing(self) -> dict[str, float]:
        """The parts of a step that sends nothing, at their fastest; to choose the speed of the link by."""
        trainer = self.trainers["echelon"]
        parts = []
        for _ in range(10):
            dist.barrier()
            trainer.compute()
            parts.append([b - a for a, b in zip(trainer.marks, trainer.marks[1:], strict=False)])
        fastest = self.slowest([min(column) for column in zip(*parts[2:], strict=True)])
        return dict(zip(("forward", "backward", "update"), fastest, strict=True))

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

    def beside(self) -> dict[str, Any]:
        """Seconds of calls alone, of as much multiplying alone, and of both together."""
        subprocess.run(shaping(CALLS_RATE), check=True)
        tensors = [torch.zeros(CALL_BYTES // 4) for _ in range(CALLS)]
        matrix = torch.randn(512, 512)

        def begin(group: dist.ProcessGroup) -> list[dist.Work]:
            return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        def seconds_of(group: dist.ProcessGroup | None, times: int) -> float:
            dist.barrier()
            began = time.perf_counter()
            pending = begin(group) if group is not None else []
            multiply(times)
            for work in pending:
                work.wait()
            return time.perf_counter() - began

        once = min(seconds_of(None, 100) for _ in range(5)) / 100
        times = int(self.slowest([seconds_of(self.ours, 0)])[0] / self.slowest([once])[0])
        groups = {"echelon": self.ours, "gloo": dist.group.WORLD}
        found: dict[str, list[float]] = {name: [] for name in ("compute", "communicate", *groups)}
        for turn in range(self.steps + 1):
            took = {"compute": seconds_of(None, times), "communicate": seconds_of(self.ours, 0)}
            for name in groups if turn % 2 else reversed(groups):
                took[name] = seconds_of(groups[name], times)
            for name in found if turn else ():
                found[name].append(took[name])
        return {name: self.slowest(seconds) for name, seconds in found.items()}

    def measure(self) -> list[dict[str, Any]]:
        """A row for the calls, and one for every setting of DDP."""
        rows = [self.beside()]
        for where, shares in SETTINGS.items():
            sizes, first_s = buckets_of(dist.group.WORLD, where)
            self.buckets = [torch.zeros(size) for size in sizes]
            size_bytes = sum(bucket.nbytes for bucket in self.buckets)
            self.trainers = {"echelon": Trainer(self.ours, where), "gloo": Trainer(dist.group.WORLD, where)}
            parts = {**self.computing(), "first": self.slowest([first_s])[0], "last": sizes[-1] * 4 / size_bytes}
            for what, share in shares.items():
                rate = round(WIRE * 8 * size_bytes / (share * parts["backward"]))
                subprocess.run(shaping(f"{rate}bit"), check=True)
                rows.append({"where": where, "what": what, "rate": rate, **parts, **self.take_turns()})
        return rows

    def leave(self) -> None:
        self.trainers.clear()
        dist.destroy_process_group(self.ours)
        dist.destroy_process_group()


def claims_of(row: dict[str, Any]) -> list[dict[str, object]]:
    compute, communicate, ours, gloo = (
        statistics.median(row[name]) for name in ("compute", "communicate", "echelon", "gloo")
    )
    larger = f"the larger of computing ({compute * 1e3:.0f}) and communication ({communicate * 1e3:.0f})"
    if "where" not in row:
        what = f"{CALLS} asynchronous all-reduces of 1 MB beside as much computing, {CALLS_RATE}"
        return [
            claim(f"{what}, over {larger}", ours, max(compute, communicate), TARGET),
            claim(f"{what}, over the same on gloo", ours, gloo, None),
        ]
    bound = max(row["first"] + communicate + row["update"], compute + row["last"] * communicate)
    where = f"computing {row['where']}, communication as long as {row['what']} ({row['rate'] / 1e6:.0f} Mbit/s)"
    target = TARGET if row["what"] == "backward" else None
    return [
        claim(f"DDP step over {larger}, {where}", ours, max(compute, communicate), target),
        claim(f"DDP step over the least it could take, {where}", ours, bound, None),
        claim(f"DDP step over the same on gloo, {where}", ours, gloo, None),
    ]


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
        rows = json.loads(Path(folder, "found.json").read_text())
    claims = [claim for row in rows for claim in claims_of(row)]
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} ms = {row['ratio']} ({row['target']})")
    if words.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "overlap", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
