"""Cores, memory, GPUs and the limits of this process: what the workers will have to share."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.doctor.finding import Finding, missing, ok, warning

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
GIB = 2**30
WORKER_BYTES = GIB // 2  # what torch alone takes in a process, roughly
FEWEST_FILES, FEWEST_PROCESSES = 1024, 256
NO_LIMIT = 2**60  # cgroup v1 writes "none" as a number near 2**63


def check_cores(cgroup: Path = CGROUP) -> Finding:
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    detail = f"{allowed} of {os.cpu_count()} usable"
    if quota is not None and quota < allowed:
        advice = f"use at most {max(1, int(quota))} workers, or raise the container's CPU quota"
        return warning("cores", f"{detail}, held to {quota:g} by a cgroup quota", advice)
    return ok("cores", detail)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Cores that a container may use, from cgroup v2 or v1; None without a limit."""
    words = _read(cgroup / "cpu.max").split()
    if not words:
        words = [_read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")]
    try:
        quota, period = float(words[0]), float(words[1])
    except (ValueError, IndexError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def check_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> Finding:
    entries = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    try:
        total, free = (int(entries[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return warning("memory", "could not be read", "look at `free -h`")
    detail, limit = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", memory_limit(cgroup)
    if limit is not None and limit < total:
        used = _number(_read(cgroup / "memory.current") or _read(cgroup / "memory/memory.usage_in_bytes")) or 0
        free = min(free, max(0, limit - used))
        detail = f"{free / GIB:.1f} GiB free, of {limit / GIB:.1f} that a cgroup allows"
    if free < WORKER_BYTES:
        return warning(
            "memory", detail, "a worker takes about 0.5 GiB before its model: close something, or use fewer workers"
        )
    return ok("memory", detail)


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """Bytes that a container may use; None without a limit."""
    limit = _number(_read(cgroup / "memory.max") or _read(cgroup / "memory/memory.limit_in_bytes"))
    return limit if limit is not None and limit < NO_LIMIT else None


def check_gpus(seen: dict[str, Any]) -> Finding:
    """From what `software.probe` saw; this process never touches a GPU."""
    gpus = seen.get("gpus") or []
    if gpus:
        detail = ", ".join(f"{gpu['name']} ({gpu['bytes'] / GIB:.0f} GiB)" for gpu in gpus)
        if not seen.get("nccl"):
            return warning(
                "gpus", detail, "this torch has no NCCL: several GPUs cannot talk; install a CUDA build with it"
            )
        return ok("gpus", detail)
    if shutil.which("nvidia-smi") is None:
        return ok("gpus", "none; training runs on the CPU")
    if not seen.get("cuda_build"):
        return warning("gpus", "a driver is there, but this torch is a CPU build", "install a CUDA build of torch")
    why = seen.get("gpu_error") or "torch sees none"
    return warning("gpus", f"a driver is there, but {why}", "compare `nvidia-smi` with torch.version.cuda")


def check_limits() -> Iterator[Finding]:
    yield _check_limit("open files", resource.RLIMIT_NOFILE, FEWEST_FILES, "ulimit -n 4096")
    yield _check_limit("processes", resource.RLIMIT_NPROC, FEWEST_PROCESSES, "ulimit -u 4096")


def _check_limit(name: str, which: int, fewest: int, advice: str) -> Finding:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    return ok(name, f"up to {soft:,}") if soft >= fewest else warning(name, f"only up to {soft:,}", advice)


def check_fork() -> Finding:
    """Workers are forked; a full process table or a sandbox forbids that."""
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    except OSError as error:
        return missing(
            "fork",
            error.strerror or str(error),
            "raise the process limit (ulimit -u), or leave the sandbox",
            needed=True,
        )
    return ok("fork", "works")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
