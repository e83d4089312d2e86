"""The results page says what the benchmarks printed, and a benchmark that fails is named, not left out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIM = {
    "claim": "step | small",
    "ours": 3.14159,
    "peer": 3.3,
    "ratio": 0.952,
    "target": "at most 1.10",
    "met": True,
    "unit": "ms",
}
RESULT = {"benchmark": "good", "claims": [CLAIM], "machine": "2 cores", "seconds": 1.5}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "shared.py").write_text("def measure(): ...")
    return module


def write_benchmark(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(f"import sys\ndef main():\n    {body}\nif __name__ == '__main__':\n    main()\n")


def run(results: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["results.py", *arguments])
    return int(results.main())


def test_claims_become_a_page(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_benchmark(
        tmp_path, "good", f"assert sys.argv[1:] == ['--json']; print('warming up'); print({json.dumps(RESULT)!r})"
    )
    page = tmp_path / "docs" / "results.md"
    assert run(results, monkeypatch, "--write", str(page)) == 0
    assert "## good\n\n2 cores; 2 s in all.\n" in page.read_text()
    assert "| step \\| small | 3.14 ms | 3.3 ms | 0.952 | at most 1.10 | yes |" in page.read_text()


def test_a_claim_that_is_not_met_stands_out_and_the_page_is_written(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = CLAIM | {"met": False, "peer": None, "ratio": None}
    write_benchmark(tmp_path, "good", f"print({json.dumps(RESULT | {'claims': [claim]})!r})")
    page = tmp_path / "results.md"
    assert run(results, monkeypatch, "--write", str(page)) == 0
    assert "| 3.14 ms |  |  | at most 1.10 | **no** |" in page.read_text()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("print('fast')", "no JSON object"),
        ("pass", "no JSON object"),
        ("print('[1]')", "lacks some of benchmark, claims, machine, seconds"),
        (f"print({json.dumps(RESULT | {'claims': [{'claim': 'x'}]})!r})", "a claim lacks ours, peer"),
    ],
)
def test_a_benchmark_that_fails_is_named_and_nothing_is_written(
    results: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    reason: str,
) -> None:
    write_benchmark(tmp_path, "bad", body)
    page = tmp_path / "results.md"
    assert run(results, monkeypatch, "--write", str(page)) == 1
    assert reason in capsys.readouterr().out
    assert not page.exists()


def test_one_benchmark_can_be_asked_for_by_name(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_benchmark(tmp_path, "good", f"print({json.dumps(RESULT)!r})")
    write_benchmark(tmp_path, "bad", "raise SystemExit(3)")
    assert run(results, monkeypatch, "good") == 0
    with pytest.raises(SystemExit):
        run(results, monkeypatch, "gone")
    assert "no such benchmark: gone; there are: bad, good" in capsys.readouterr().err
