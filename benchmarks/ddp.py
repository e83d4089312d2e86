"""DDP's whole step with the backend `echelon` against the same with gloo: two ranks on one host, in the same processes,
taking turns.

The loop is a hand-written one with nothing but PyTorch in it; only the process group differs. A step is forward,
backward with its all-reduce, and AdamW, on a 3-layer MLP.

    python benchmarks/ddp.py [--json] [--pairs 30]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import echelon.comm  # noqa: F401 (makes the backend known)

RANKS, BATCH = 2, 128
TARGETS = {64: 1.0, 512: 0.99}
STEPS = {64: 50, 512: 15}
LIMIT_S = 1800


class Trainer:
    """DDP over one group."""

    def __init__(self, hidden: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(BATCH // RANKS, hidden)
        self.y = torch.randint(hidden, (BATCH // RANKS,))
        self.steps = STEPS[hidden]

    def run(self) -> None:
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()


def seconds_of(run: Callable[[], None], steps: int) -> float:
    """Seconds of a step, of the slower rank; both start together."""
    dist.barrier()
    began = time.perf_counter()
    run()
    took = torch.tensor([(time.perf_counter() - began) / steps])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(rank: int, folder: str, pairs: int) -> None:
    """One rank. Rank 0 writes down the seconds of every turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    groups = {"gloo": dist.group.WORLD, "echelon": dist.new_group(backend="echelon")}
    found: dict[str, dict[int, list[float]]] = {name: {} for name in groups}
    for hidden in TARGETS:
        trainers = {name: Trainer(hidden, group) for name, group in groups.items()}
        for pair in range(pairs + 2):
            order = list(trainers.items())
            for name, trainer in order if pair % 2 else reversed(order):
                took = seconds_of(trainer.run, trainer.steps)
                if pair >= 2:  # the first warm up, and DDP makes its buckets anew
                    found[name].setdefault(hidden, []).append(took)
        del trainers, trainer
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group(groups.pop("echelon"))
    dist.destroy_process_group()


def run_ranks(folder: str, pairs: int) -> dict[str, dict[str, list[float]]]:
    words = [sys.executable, __file__, "--pairs", str(pairs), "--folder", folder, "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen([*words, str(rank)], env=environment) for rank in range(RANKS)]
    try:
        codes = [child.wait(LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    found: dict[str, dict[str, list[float]]] = json.loads(Path(folder, "found.json").read_text())
    return found


def claim_of(hidden: int, ours: list[float], peer: list[float]) -> dict[str, object]:
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    return {
        "claim": f"DDP step over the same on gloo, 3-layer MLP, hidden {hidden}, {RANKS} ranks on one host",
        "ours": round(statistics.median(ours) * 1000, 3),
        "peer": round(statistics.median(peer) * 1000, 3),
        "ratio": round(ratio, 3),
        "target": f"at most {TARGETS[hidden]:.2f}",
        "met": ratio <= TARGETS[hidden],
        "unit": "ms",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="how often the contenders take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.folder, arguments.pairs)
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(folder, arguments.pairs)
    claims = [claim_of(hidden, found["echelon"][str(hidden)], found["gloo"][str(hidden)]) for hidden in TARGETS]
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} ms = {row['ratio']} ({row['target']})")
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "ddp", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
