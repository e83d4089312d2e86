"""From the command to the first committed step with four workers: `echelon train` against torchrun, interleaved.

torchrun starts the very same job file (its workers join), and an ordinary hand-written DDP script of the same model.

    python benchmarks/start.py [--json] [--pairs 5]
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

WORKERS = 4
TARGET = 0.5
LIMIT_S = 120

JOB = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import echelon

x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
job = echelon.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    data=echelon.Columns(x=x, y=(x[:, 0] > 0).long()),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    batch=256,
    steps=2,
)
if __name__ == "__main__":
    echelon.train(job, out=sys.argv[1])
"""

DDP = """
import gc, json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
y = (x[:, 0] > 0).long()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    mine = slice(256 * step + 64 * rank, 256 * step + 64 * (rank + 1))
    optimizer.zero_grad()
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()
    if step == 0 and rank == 0:
        with open(os.path.join(sys.argv[1], "events.jsonl"), "w") as file:
            file.write(json.dumps({"event": "step", "time": time.time()}) + "\\n")
del model, optimizer
gc.collect()  # DDP is in a cycle; gloo left to the interpreter's end aborts the process now and then
dist.destroy_process_group()
"""


def seconds_to_first_step(command: list[str], out: Path) -> float:
    """Run the command; when its first step was committed, by its own log."""
    out.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.time()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=out.parent, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return float(next(event["time"] for event in events if event["event"] == "step")) - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="how often the contenders take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    began = time.perf_counter()
    took: dict[str, list[float]] = {"echelon": [], "torchrun": [], "ddp": []}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "job.py").write_text(JOB)
        (here / "ddp.py").write_text(DDP)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        ours = [sys.executable, "-m", "echelon", "train", "job.py", "--workers", str(WORKERS)]
        for pair in range(arguments.pairs):
            out = {name: here / f"{name}-{pair}" for name in took}
            commands = {
                "echelon": [*ours, "--out", str(out["echelon"])],
                "torchrun": [*torchrun, "job.py", str(out["torchrun"])],
                "ddp": [*torchrun, "ddp.py", str(out["ddp"])],
            }
            for name, command in commands.items():
                took[name].append(seconds_to_first_step(command, out[name]))
    claims = []
    for peer, what in (("torchrun", "the same job under torchrun"), ("ddp", "a DDP script under torchrun")):
        ratio = statistics.median(a / b for a, b in zip(took["echelon"], took[peer], strict=True))
        claims.append(
            {
                "claim": f"command to first step, {WORKERS} workers, over {what}",
                "ours": round(statistics.median(took["echelon"]), 2),
                "peer": round(statistics.median(took[peer]), 2),
                "ratio": round(ratio, 3),
                "target": f"at most {TARGET:.2f}",
                "met": ratio <= TARGET,
                "unit": "s",
            }
        )
        print(f"{claims[-1]['claim']}: {claims[-1]['ours']} / {claims[-1]['peer']} s = {ratio:.3f}")
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "start", "claims": claims, "machine": machine, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
