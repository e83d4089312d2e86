"""Every example runs and does what it says. (That all of them train the same bits is test_same_bits.py's.)"""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXERCISES = sorted(path.stem for path in (EXAMPLES / "exercises").glob("*.py"))
PATIENCE_S = 120


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_right_where_the_naive_version_is_wrong(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    import_module(name).main()  # it asserts both
    assert len(capfd.readouterr().out.splitlines()) == 1


def test_every_exercise_that_exists_is_named_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    missing = [
        name for name in [*programs, *(f"exercises/{name}.py" for name in EXERCISES)] if f"({name})" not in index
    ]
    assert missing == []


def test_digits_learns(tmp_path: Path) -> None:
    said = run("echelon", "train", str(EXAMPLES / "digits.py"), "--workers", "2", "--steps", "120", cwd=tmp_path)
    *_, done = [line for line in said.splitlines() if line.startswith("done")]
    assert float(done.split("accuracy")[1]) > 0.85, said


def test_the_gpt_for_a_gpu_has_120_million_parameters() -> None:
    gpt = import_module("gpt")
    job = gpt.make_job(layers=17, width=768, heads=12, context=1024, batch=64, precision="bf16", compiled=True)
    with torch.device("meta"):
        model = job.model()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(120e6, rel=0.02)


def test_clicks_are_rare_and_items_are_skewed() -> None:
    log = import_module("clicks").make_log(held_out=True).columns  # in the size of the example, before it is shrunk
    shown = torch.bincount(log["item"]).sort(descending=True).values
    assert shown[:100].sum() > 0.3 * shown.sum(), "a hundred items of many thousands"
    assert 0.05 < (log["clicked"] * log["weight"]).sum() / log["weight"].sum() < 0.25


def test_the_ddp_script_learns_before_and_after(tmp_path: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    before = run(*torchrun, str(EXAMPLES / "ddp_before.py"), cwd=tmp_path)
    after = run(*torchrun, str(EXAMPLES / "ddp_after.py"), cwd=tmp_path)
    for said in (before, after):
        accuracy = [float(line.split()[1]) for line in said.splitlines() if line.startswith("accuracy")]
        assert len(accuracy) == 1, said
        assert accuracy[0] > 0.85, said


def code_lines(path: Path) -> list[str]:
    """The code without docstring, comments and blank lines."""
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]
    return ast.unparse(tree).splitlines()


def test_five_lines_make_an_echelon_script_of_a_ddp_script() -> None:
    diff = difflib.ndiff(code_lines(EXAMPLES / "ddp_before.py"), code_lines(EXAMPLES / "ddp_after.py"))
    written = [line for line in diff if line.startswith("+ ") and line[2:].strip()]
    assert len(written) <= 5, written
