"""Collectives on one host: the backend `echelon` against gloo, in the same processes, taking turns.

Every number is the time of one all-reduce of float32, seen by the slower rank. Both backends live in the same ranks;
whatever else the machine does meets both.

    python benchmarks/collectives.py [--json] [--pairs 20]
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
from pathlib import Path

import torch
import torch.distributed as dist

import echelon.comm  # noqa: F401 (makes the backend known)

TARGETS = {
    2: {4 << 10: 2.0, 1 << 20: 3.0, 25 << 20: 2.5, 100 << 20: 2.5},
    4: {4 << 10: 3.0, 1 << 20: 3.0, 25 << 20: 2.0, 100 << 20: 2.0},
}
"""How many times faster, by ranks and size in bytes."""
LIMIT_S = 1800


def repeats(size_bytes: int) -> int:
    """So many calls in a turn that a turn is long enough to be measured."""
    return max(3, min(200, (100 << 20) // (size_bytes + (1 << 18))))


def seconds_of(group: dist.ProcessGroup, tensor: torch.Tensor, count: int) -> float:
    """Seconds of one call, of the slower rank; all start together."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor, group=group)
    took = torch.tensor([(time.perf_counter() - began) / count])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(rank: int, ranks: int, folder: str, pairs: int) -> None:
    """One rank. Rank 0 writes down the seconds of every turn."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "echelon": dist.new_group(backend="echelon")}
    found: dict[str, dict[int, list[float]]] = {name: {} for name in groups}
    for size in TARGETS[ranks]:
        tensor = torch.zeros(size // 4)
        for pair in range(pairs + 1):
            order = list(groups.items())
            for name, group in order if pair % 2 else reversed(order):
                took = seconds_of(group, tensor, repeats(size))
                if pair:  # the first warms up
                    found[name].setdefault(size, []).append(took)
    if rank == 0:
        Path(folder, f"found-{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group(groups.pop("echelon"))
    dist.destroy_process_group()


def run_ranks(ranks: int, folder: str, pairs: int) -> dict[str, dict[str, list[float]]]:
    words = [sys.executable, __file__, "--pairs", str(pairs), "--folder", folder, "--ranks", str(ranks), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen([*words, str(rank)], env=environment) for rank in range(ranks)]
    try:
        codes = [child.wait(LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    found: dict[str, dict[str, list[float]]] = json.loads(Path(folder, f"found-{ranks}.json").read_text())
    return found


def words_of(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KB"


def claims_of(ranks: int, found: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    claims = []
    for size, target in TARGETS[ranks].items():
        ours, peer = found["echelon"][str(size)], found["gloo"][str(size)]
        ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
        claims.append(
            {
                "claim": f"all-reduce of {words_of(size)} over gloo's, {ranks} ranks on one host",
                "ours": round(statistics.median(ours) * 1000, 3),
                "peer": round(statistics.median(peer) * 1000, 3),
                "ratio": round(ratio, 3),
                "target": f"at most {1 / target:.2f}",
                "met": ratio <= 1 / target,
                "unit": "ms",
            }
        )
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="how often the contenders take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.ranks, arguments.folder, arguments.pairs)
        return 0
    began = time.perf_counter()
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in TARGETS:
            claims += claims_of(ranks, run_ranks(ranks, folder, arguments.pairs))
    for row in claims:
        print(f"{row['claim']}: {row['ours']} / {row['peer']} ms = {row['ratio']} ({row['target']})")
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "collectives", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
