"""Workers that torchrun has started, not we: the same bits, one voice."""

from __future__ import annotations

import json
import subprocess
import sys

from equivalence.jobs import JOBS
from lockstep import Fleet

PATIENCE_S = 120.0
JOB = """
import sys
sys.path.insert(0, {tests!r})
from equivalence.jobs import JOBS
job = JOBS["dense"]()
"""


def torchrun(folder, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_command_joins_torchrun_s_workers(tmp_path, pytestconfig):
    expected = Fleet(JOBS["dense"], 1).run().digest()
    (tmp_path / "job.py").write_text(JOB.format(tests=str(pytestconfig.rootpath / "tests")))

    out = torchrun(tmp_path, "-m", "echelon", "train", "job.py", "--exact", "--json", "--out", "command")
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(result["digest"], result["workers"]) for result in results] == [(expected, 2)]
    assert (tmp_path / "command" / "model.safetensors").exists()
