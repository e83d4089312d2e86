"""What programs do with a group besides calling it, and with tensors that it has moved: the same as on gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from comm.ranks import check, run_ranks
from echelon.comm.memory import Memory


def test_a_tensor_that_was_moved_can_be_resized(tmp_path):
    def work(rank: int) -> None:
        summed, rows, message = torch.ones(5), [torch.empty(3) for _ in range(2)], torch.ones(4)
        dist.all_reduce(summed)
        dist.all_gather(rows, torch.ones(3))
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        for tensor in (summed, *rows, message):
            tensor.resize_(1000)
            tensor.untyped_storage().resize_(0)

    check(run_ranks(tmp_path, 2, work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8, torch.bfloat16, torch.float8_e5m2])
def test_memory_outlives_the_tensor_that_it_was_seen_of(dtype):
    array = Memory(torch.ones(2, 1000).to(dtype).t()).array
    others = [torch.zeros(2000, dtype=torch.uint8).to(dtype) for _ in range(100)]
    assert array.any()
    assert len(array) == others[0].numel()
    assert (array == array[0]).all()


def test_what_has_no_memory_of_its_own_is_refused(tmp_path):
    def work(rank: int) -> None:
        whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        for tensor in (whole, freed):
            with pytest.raises(ValueError, match="no memory of its own"):
                dist.all_reduce(tensor)
        dist.barrier()

    check(run_ranks(tmp_path, 2, work))


def test_a_group_says_what_torch_asks_of_it(tmp_path):
    def work(rank: int) -> None:
        group = dist.group.WORLD
        assert torch.device("cpu") in group._device_types
        assert dist.distributed_c10d._get_pg_default_device(group) == torch.device("cpu")
        assert group._get_backend(torch.device("cpu")).name() == "echelon"
        with pytest.raises(RuntimeError, match="no backend for meta"):
            group._get_backend(torch.device("meta"))
        assert group.group_desc == "default_pg"
        assert dist.new_group(group_desc="of the experts").group_desc == "of the experts"

    check(run_ranks(tmp_path, 2, work))


def test_calls_within_compiled_functions(tmp_path):
    """Some become part of the graph, some break it, and some torch makes from C++, where dynamo sees our frames."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        dist.barrier()
        work = dist.broadcast(y, 0, async_op=True)
        work.wait()
        dist.send(y, 1) if dist.get_rank() == 0 else dist.recv(y, 0)
        return y + dist.get_world_size()

    def work(rank: int) -> list[float]:
        return torch.compile(step, backend="aot_eager")(torch.ones(3)).tolist()

    assert check(run_ranks(tmp_path, 2, work)) == [[6.0, 6.0, 6.0]] * 2


def test_the_compiler_is_not_imported_for_nothing():
    code = "import sys, echelon.comm; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


WORKER = """
import os, signal, sys
import torch, torch.distributed as dist, echelon.comm
dist.init_process_group("echelon")
x = torch.ones(1000)
dist.all_reduce(x)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < 2 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
open(f"{sys.argv[1]}/done-{dist.get_rank()}", "w").write(str(attempt))
dist.destroy_process_group()
"""


def test_workers_that_torchrun_starts_again_do_not_hear_the_dead(tmp_path):
    """Its store is the same in each attempt, and holds the addresses and the secret of the last."""
    (tmp_path / "worker.py").write_text(WORKER)
    options = ["--standalone", "--nproc-per-node=3", "--max-restarts=2", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "worker.py"), str(tmp_path)]
    done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(3)] == ["2"] * 3
