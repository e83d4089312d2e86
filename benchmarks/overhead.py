"""What Echelon costs over a hand-written DDP loop: two workers, the same model, data and optimizer, in the same
processes.

Both trainers live in the same two processes and take turns, block by block, so that whatever else the machine does
meets both. The peer is the leanest DDP loop there is: samples gathered by index from tensors in memory, gradients as
views of their buckets, no loss read, nothing logged; on gloo, which is what PyTorch has on a CPU. Ours is the whole
session: loop, exact weights, event log, progress; on our own backend.

    python benchmarks/overhead.py [--json] [--pairs 20] [--steps 30]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.assemble import prepare
from echelon.comm import Meeting, join, leave
from echelon.fleet import Start, WorkerStart
from echelon.fleet import launch as run_workers
from echelon.loop import train
from echelon.plan import Plan
from echelon.request import Request
from echelon.session import Session

WORKERS = 2
BATCH, SLICES, SAMPLES = 128, 8, 8192
TARGETS = {64: 1.10, 512: 1.05}
EXACT_TARGET = 1.25


def make_model(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
    )


def make_data(hidden: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, hidden, generator=generator)
    return x, torch.randint(hidden, (SAMPLES,), generator=generator)


def make_job(hidden: int) -> echelon.Job:
    x, y = make_data(hidden)
    return echelon.Job(
        model=lambda: make_model(hidden),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        data=echelon.Columns(x=x, y=y),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=BATCH,
        steps=10**6,
        slices=SLICES,
    )


class Quiet:
    """A line to nobody."""

    def meet(self) -> None:
        pass

    def show(self, record: dict[str, object]) -> None:
        pass

    def stop_requested(self) -> bool:
        return False


def ddp_steps(hidden: int, rank: int, gloo: dist.ProcessGroup) -> Iterator[None]:
    """The hand-written loop, one step at a time."""
    torch.manual_seed(0)
    x, y = make_data(hidden)
    model = DistributedDataParallel(make_model(hidden), process_group=gloo, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = BATCH // WORKERS
    for epoch in itertools.count():
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, SAMPLES - BATCH + 1, BATCH):
            ids = order[start + rank * share : start + (rank + 1) * share]
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            yield


class Ours:
    """A session of ours, driven a few steps at a time."""

    def __init__(self, hidden: int, group: object, rank: int, folder: Path, *, exact: bool, merge: bool) -> None:
        request = Request(out=str(folder / f"{hidden}-{exact}-{merge}"), exact=exact)
        Path(request.out).mkdir(exist_ok=True)
        prepared = prepare(
            make_job(hidden), Plan.parse("dp"), workers=WORKERS, device=torch.device("cpu"), exact=exact, merge=merge
        )
        self.session = Session(request, prepared, group, Quiet())  # type: ignore[arg-type]
        self.rank = rank

    def run(self, steps: int) -> None:
        parts = self.session.parts
        turns = itertools.islice(parts.turns(), steps)
        train(parts.executor, parts.agreement, turns, self.rank, self.session.stop_requested, [self.session.after])


def timed(run: Callable[[], object]) -> float:
    """Seconds of the slower rank, both starting together."""
    dist.barrier()
    began = time.perf_counter()
    run()
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(start: WorkerStart) -> int:
    """On each worker: every contender in turn, again and again."""
    torch.set_num_threads(1)
    request = start.request
    group = join(
        Meeting(rank=start.rank, size=WORKERS, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd),
        torch.device("cpu"),
    )
    gloo = dist.new_group(backend="gloo")
    steps, folder = request["steps"], Path(request["folder"])
    seconds: dict[str, list[float]] = {}
    start.tether.send({"kind": "ready"})
    for hidden in TARGETS:
        peer = ddp_steps(hidden, start.rank, gloo)
        ours = Ours(hidden, group, start.rank, folder, exact=False, merge=True)
        unmerged = Ours(hidden, group, start.rank, folder, exact=False, merge=False)
        exact = Ours(hidden, group, start.rank, folder, exact=True, merge=False)
        contenders: dict[str, Callable[[], object]] = {
            "ddp": lambda peer=peer: list(itertools.islice(peer, steps)),
            "echelon": lambda ours=ours: ours.run(steps),
            "unmerged": lambda unmerged=unmerged: unmerged.run(steps),
            "exact": lambda exact=exact: exact.run(steps),
        }
        for pair in range(request["pairs"] + 2):
            order = list(contenders.items())
            for name, run in order if pair % 2 else reversed(order):
                took = timed(run) / steps
                if pair >= 2:
                    seconds.setdefault(f"{name}-{hidden}", []).append(took)
        for one in (ours, unmerged, exact):
            one.session.close()
        del peer, contenders, ours, unmerged, exact
    leave()
    start.tether.send({"kind": "done", "seconds": seconds})
    return 0


def claim(what: str, ours: list[float], peer: list[float], target: float) -> dict[str, object]:
    """The median of the ratios of neighbours in time."""
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    return {
        "claim": what,
        "ours": round(statistics.median(ours) * 1000, 3),
        "peer": round(statistics.median(peer) * 1000, 3),
        "ratio": round(ratio, 3),
        "target": f"at most {target:.2f}",
        "met": ratio <= target,
        "unit": "ms",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="how often the contenders take turns")
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        request = {"pairs": arguments.pairs, "steps": arguments.steps, "folder": folder}
        seconds = run_workers(Start(entry=measure, request=request, workers=WORKERS), lambda _event: None)[0]["seconds"]
    claims = []
    for hidden, target in TARGETS.items():
        what = f"step of a 3-layer MLP over a hand-written DDP loop, hidden {hidden}, 2 workers"
        claims.append(claim(what, seconds[f"echelon-{hidden}"], seconds[f"ddp-{hidden}"], target))
        what = f"exact over not exact on the same micro-batches, hidden {hidden}, 2 workers"
        claims.append(claim(what, seconds[f"exact-{hidden}"], seconds[f"unmerged-{hidden}"], EXACT_TARGET))
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} ms = {row['ratio']} ({row['target']})")
    if arguments.json:
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        seconds_all = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "overhead", "claims": claims, "machine": machine, "seconds": seconds_all}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
