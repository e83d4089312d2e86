"""Python and the packages: which are there, whether they load, what the optional ones would add."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from echelon.doctor.finding import Finding, missing, ok, warning

OLDEST_PYTHON = (3, 11)
NEEDED = {"torch": (2, 11), "numpy": (1, 26), "safetensors": (0, 5)}
OPTIONAL = {
    "rich": ("the live display (plain lines without it)", "display"),
    "psutil": ("details about interfaces", "doctor"),
    "sklearn": ("the data of the digits example", "examples"),
}
PROBE_S = 120.0

# In a process of its own: a torch that does not fit the machine may end the interpreter, or take long to load.
PROBE = """
import importlib, json, sys, time
seen = {}
for name in ("numpy", "torch", "safetensors"):
    began = time.perf_counter()
    try:
        module = importlib.import_module(name)
        seen[name] = {"version": module.__version__, "seconds": time.perf_counter() - began}
    except Exception as error:
        seen[name] = {"error": f"{type(error).__name__}: {error}"}
if "version" in seen["torch"]:
    import torch, torch.distributed as dist
    seen["distributed"] = dist.is_available()
    seen["nccl"] = dist.is_available() and dist.is_nccl_available()
    try:
        from echelon.agree.kernel import load_kernel
        seen["kernel"] = load_kernel() is not None
    except Exception as error:
        seen["kernel"] = False
    seen["cuda_build"] = torch.version.cuda
    seen["threads"] = torch.get_num_threads()
    try:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        seen["gpus"] = [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in devices]
    except Exception as error:
        seen["gpus"], seen["gpu_error"] = [], f"{type(error).__name__}: {error}"
print(json.dumps(seen))
"""


def check_python() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return missing("python", here, "Echelon needs Python 3.11 or newer", needed=True)
    if not sys.platform.startswith("linux"):
        return missing("python", f"{here} on {sys.platform}", "workers are started on Linux only", needed=True)
    return ok("python", f"{here}  {sys.executable}")


def probe(code: str = PROBE, limit_s: float = PROBE_S) -> dict[str, Any]:
    """What a fresh interpreter says about torch and its companions; `{"failed": why}` if it says nothing."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"importing them did not finish within {limit_s:g} s"}
    except OSError as error:
        return {"failed": str(error)}
    try:
        seen = json.loads(child.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"failed": f"importing them ended the interpreter (status {child.returncode})"}
    return seen if isinstance(seen, dict) else {"failed": "the probe said nothing"}


def check_needed(seen: dict[str, Any]) -> Iterator[Finding]:
    if "failed" in seen:
        yield missing("torch", seen["failed"], "try `python -c 'import torch'` and see what it says", needed=True)
        return
    for name, oldest in NEEDED.items():
        yield _check_package(name, oldest, seen[name])
    if "version" in seen["torch"] and not seen["distributed"]:
        advice = "install a torch that was built with distributed"
        yield missing("distributed", "not in this torch", advice, needed=True)


def _check_package(name: str, oldest: tuple[int, ...], seen: dict[str, Any]) -> Finding:
    wanted = ".".join(map(str, oldest))
    get = f"pip install '{name}>={wanted}'"
    if "error" in seen:
        return missing(name, " ".join(str(seen["error"]).split())[:200], get, needed=True)
    if numbers(seen["version"])[: len(oldest)] < oldest:
        return missing(name, f"{seen['version']} is too old", get, needed=True)
    slow = f"  loads in {seen['seconds']:.1f} s" if seen["seconds"] > 1 else ""
    return ok(name, f"{seen['version']}{slow}")


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def check_optional(seen: dict[str, Any]) -> Iterator[Finding]:
    if seen.get("kernel"):
        yield ok("exact sums", "compiled")
    elif "kernel" in seen:
        advice = "install a C compiler (Debian: apt-get install gcc), then install Echelon again"
        yield warning("exact sums", "not compiled; the same bits, but exact steps take longer", advice)
    for name, (use, extra) in OPTIONAL.items():
        package = "scikit-learn" if name == "sklearn" else name
        try:
            yield ok(package, f"{importlib.metadata.version(package)}  {use}")
        except importlib.metadata.PackageNotFoundError:
            yield warning(
                package, f"not installed; gives {use}", f"pip install {package}, or pip install 'echelon[{extra}]'"
            )
