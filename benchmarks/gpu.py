"""One GPU: the example GPT at about 120 M parameters, bf16, compiled, against a hand-written loop of the same model.

Both live in one process and take turns. Without a GPU there is nothing to measure, and it says so.

    python benchmarks/gpu.py [--json] [--pairs 20] [--steps 10]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from echelon.assemble import prepare
from echelon.comm import Group
from echelon.job import Job
from echelon.loop import train
from echelon.plan import Plan
from echelon.request import Request
from echelon.session import Session

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

SHAPE = {"layers": 17, "width": 768, "heads": 12, "context": 1024}
BATCH = 32
TARGET = 0.98


class Quiet:
    """A line to nobody."""

    def meet(self) -> None:
        pass

    def show(self, record: dict[str, object]) -> None:
        pass

    def stop_requested(self) -> bool:
        return False


def make_job() -> Job:
    job = gpt.make_job(**SHAPE, dropout=0.0, batch=BATCH, steps=10**6, precision="bf16", compiled=True)
    fields = {name: getattr(job, name) for name in job.__dataclass_fields__}
    return Job(**{**fields, "optimizer": make_optimizer, "evaluate": None, "checkpoint_every": None})


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), fused=True)  # type: ignore[arg-type]


def hand_written(device: torch.device) -> Iterator[None]:
    """The same model, data, clipping and schedule, one step at a time."""
    torch.manual_seed(0)
    model = gpt.GPT(**SHAPE, dropout=0.0).to(device)
    compiled = torch.compile(model)
    optimizer = make_optimizer(model.parameters())
    schedule = gpt.make_schedule(optimizer, steps=10**6)
    data = gpt.windows(SHAPE["context"], held_out=False)
    columns = data.columns
    size = len(data)
    for _ in itertools.count():
        order = torch.randperm(size)
        for start in range(0, size - BATCH + 1, BATCH):
            ids = order[start : start + BATCH]
            batch = {name: column[ids].pin_memory().to(device, non_blocking=True) for name, column in columns.items()}
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = gpt.loss(compiled, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP)
            optimizer.step()
            schedule.step()
            yield


def ours(device: torch.device, folder: str) -> Callable[[int], None]:
    prepared = prepare(make_job(), Plan.parse("dp"), workers=1, device=device, exact=False)
    session = Session(Request(out=folder), prepared, Group(None, device), Quiet())

    def run(steps: int) -> None:
        parts = session.parts
        turns = itertools.islice(parts.turns(), steps)
        train(parts.executor, parts.agreement, turns, 0, session.stop_requested, [session.after])

    return run


def timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(pairs: int, steps: int, device: torch.device) -> dict[str, list[float]]:
    torch.set_float32_matmul_precision("high")
    seconds: dict[str, list[float]] = {"echelon": [], "hand-written": []}
    with tempfile.TemporaryDirectory() as folder:
        peer, run = hand_written(device), ours(device, folder)
        contenders = {
            "echelon": partial(run, steps),
            "hand-written": lambda: list(itertools.islice(peer, steps)),
        }
        for pair in range(pairs + 2):
            order = list(contenders.items())
            for name, contender in order if pair % 2 else reversed(order):
                took = timed(contender) / steps
                if pair >= 2:
                    seconds[name].append(took)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="how often the two take turns")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    began = time.perf_counter()
    claims = []
    machine = "no GPU here: not measured"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        seconds = measure(arguments.pairs, arguments.steps, torch.device("cuda", 0))
        ratio = statistics.median(b / a for a, b in zip(seconds["echelon"], seconds["hand-written"], strict=True))
        tokens = {name: BATCH * SHAPE["context"] / statistics.median(took) for name, took in seconds.items()}
        claims.append(
            {
                "claim": "tokens/s of a GPT of 120 M parameters, bf16, compiled, over a hand-written loop",
                "ours": round(tokens["echelon"]),
                "peer": round(tokens["hand-written"]),
                "ratio": round(ratio, 4),
                "target": f"at least {TARGET}",
                "met": ratio >= TARGET,
                "unit": "tokens/s",
            }
        )
    print(claims[0] if claims else machine)
    if arguments.json:
        seconds_all = round(time.perf_counter() - began, 1)
        print(json.dumps({"benchmark": "gpu", "claims": claims, "machine": machine, "seconds": seconds_all}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
