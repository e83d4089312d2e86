"""PyTorch's own suite for backends passes on ours; what does not apply is listed with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SUITE = Path(__file__).parent / "torch_suite" / "suite.py"

NOT_OFFERED = {
    "test_monitored_barrier": "torch itself refuses monitored_barrier to every backend but gloo",
    "test_ddp_logging_data_cpu": "asks for what torch logs about gloo's sockets, and logs for gloo alone",
}
"""Tests left out by name."""

DOES_NOT_APPLY = {
    r"CUDA|GPU|no_cuda|high priority": "needs GPUs",
    r"NCCL (Batch )?Send Recv|[Nn]ccl supports|NCCL backend": "needs NCCL",
    r"to be one of \{'nccl'\}": "is about NCCL",
    r"world ?size|world_size": "needs another number of ranks",
    r"github.com/pytorch/pytorch/(issues|pull)|flak": "is switched off in torch itself",
    r"torchvision": "needs torchvision",
    r"Coalescing manager": "is for NCCL's coalescing",
}
"""Why a skipped test does not apply, by what torch says when it skips."""


@pytest.mark.timeout(900)
def test_torch_s_own_suite_passes(tmp_path, capsys):
    report = tmp_path / "report.xml"
    left_out = " or ".join(NOT_OFFERED)
    words = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", "-k", f"not ({left_out})"]
    words += ["--junitxml", str(report), "--timeout", "120", "--override-ini", "addopts=", "-W", "ignore"]
    (tmp_path / "temp").mkdir()
    environment = {**os.environ, "TEMP_DIR": str(tmp_path / "temp"), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, capture_output=True, text=True, timeout=800, env=environment, cwd=tmp_path)
    assert report.exists(), ran.stdout + ran.stderr
    failed, why = [], Counter()
    passed = 0
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
        elif skipped is None:
            passed += 1
        else:
            why[reason_of(skipped.get("message", ""))] += 1
    with capsys.disabled():
        print(f"\ntorch's suite on 3 ranks: {passed} passed, {len(failed)} failed; skipped: {dict(why)}")
    assert failed == [], ran.stdout[-20_000:]
    assert passed >= 95


def reason_of(message: str) -> str:
    for pattern, reason in DOES_NOT_APPLY.items():
        if re.search(pattern, message):
            return reason
    raise AssertionError(f"skipped for a reason that is not known here: {message}")
