"""PyTorch's own tests of a backend, run against `echelon`: its source with our name where it says gloo's.

Not collected by itself; see ../test_torch_suite.py. Ranks are forked: a spawned one would import all of this again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path

FOLDER = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
os.environ.update(BACKEND="echelon", INIT_METHOD=f"file://{FOLDER}/shared_init")
os.environ.setdefault("WORLD_SIZE", "3")

import torch  # noqa: E402 (the suite reads the environment when it is imported)
from torch.testing._internal import common_distributed  # noqa: E402

import echelon.comm  # noqa: E402, F401 (makes the backend known)

torch.set_num_threads(1)
for feature in ("ddp", "subgroup", "plugin", "gpu", "cuda"):
    common_distributed.DistTestCases.backend_feature[feature].add("echelon")


def load_suite() -> types.ModuleType:
    """The suite with gloo's name, and MPI's where it stands for all-to-all on a CPU, read as ours."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text().replace('"gloo"', '"echelon"')
    source = source.replace('BACKEND != "mpi", "Only', 'BACKEND != "echelon", "Only')
    module = types.ModuleType("torch_suite_source")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


suite = load_suite()


class TestBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
