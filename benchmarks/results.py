"""Runs the benchmarks, one after the other, and prints or writes what they claim and what was measured.

A benchmark is a file beside this one with a `main()`. With `--json` its last line is one object:

    {"benchmark": "overhead", "machine": "2 cores, ...", "seconds": 41.0,
     "claims": [{"claim": "step time over DDP, hidden 64", "ours": 3.1, "peer": 3.3, "ratio": 0.94,
                 "target": "at most 1.10", "met": true, "unit": "ms"}]}

`peer`, `ratio` and `target` may be null where there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_S = 3600
KEYS = {"benchmark", "claims", "machine", "seconds"}
COLUMNS = ("claim", "ours", "peer", "ratio", "target", "met", "unit")


def main() -> int:
    """Run what is asked for; the exit code says whether every benchmark ran, not whether its claims were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="benchmarks to run, e.g. overhead (all of them)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results there as Markdown")
    arguments = parser.parse_args()
    found = find_benchmarks(HERE)
    unknown = sorted(set(arguments.names) - set(found))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(found) or 'none yet'}")
    results = [run_benchmark(found[name]) for name in arguments.names or found]
    print(to_markdown(results))
    broken = [result["benchmark"] for result in results if "error" in result]
    if broken:
        print(f"did not run: {', '.join(broken)}", file=sys.stderr)
    elif arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(to_markdown(results) + "\n", encoding="utf-8")
    return 1 if broken else 0


def find_benchmarks(folder: Path) -> dict[str, Path]:
    """The files that define `main`, by name; this one is not among them."""
    return {
        path.stem: path
        for path in sorted(folder.glob("*.py"))
        if path.stem != "results"
        and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)
    }


def run_benchmark(path: Path) -> dict[str, Any]:
    """What one benchmark printed as JSON, or an `error` in its place."""
    print(f"== benchmarks/{path.name}", file=sys.stderr, flush=True)
    try:
        command = [sys.executable, path, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"benchmark": path.stem, "error": f"it did not end within {LIMIT_S} s"}
    if done.returncode != 0:
        return {"benchmark": path.stem, "error": f"it ended with exit code {done.returncode}"}
    return read_result(path.stem, done.stdout)


def read_result(name: str, output: str) -> dict[str, Any]:
    """The object in the last line of a benchmark's output, checked for what a reader needs."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1] if lines else "")
    except json.JSONDecodeError:
        return {"benchmark": name, "error": "its last line is no JSON object"}
    if not isinstance(result, dict) or not result.keys() >= KEYS:
        return {"benchmark": name, "error": f"its last line lacks some of {', '.join(sorted(KEYS))}"}
    for claim in result["claims"]:
        missing = [column for column in COLUMNS if column not in claim]
        if missing:
            return {"benchmark": name, "error": f"a claim lacks {', '.join(missing)}"}
    return result


def to_markdown(results: list[dict[str, Any]]) -> str:
    """One table for each benchmark, with the machine it ran on."""
    lines = [
        "# Results",
        "",
        "Written by `make results`. Every ratio is ours over a peer measured in the same run, interleaved, by the",
        "median; times without their ratio mean little on another machine.",
    ]
    for result in results:
        lines += ["", f"## {result['benchmark']}", ""]
        if "error" in result:
            lines.append(f"Did not run: {result['error']}.")
            continue
        lines += [f"{result['machine']}; {result['seconds']:.0f} s in all.", ""]
        lines += ["| claim | ours | peer | ratio | wanted | met |", "|---|---|---|---|---|---|"]
        lines += [to_row(claim) for claim in result["claims"]]
    if not results:
        lines += ["", "There are no benchmarks yet."]
    return "\n".join(lines)


def to_row(claim: dict[str, Any]) -> str:
    """One claim as a row of its table."""
    unit = f" {claim['unit']}" if claim["unit"] else ""
    ours, peer = (to_text(claim[side]) + (unit if claim[side] is not None else "") for side in ("ours", "peer"))
    met = {True: "yes", False: "**no**"}.get(claim["met"], "")
    cells = [str(claim["claim"]), ours, peer, to_text(claim["ratio"]), to_text(claim["target"]), met]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_text(value: Any) -> str:
    """Three digits are what a measurement is worth."""
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
