"""`echelon doctor`: what this machine has, what it lacks, and how to get it.

    software   Python, what is needed, what is optional
    machine    cores, memory, GPUs, limits, forking
    links      interfaces, the loopback, ports
    storage    the disk of the run folder, shared memory

Every check looks and never changes anything that lasts, has a bound, and turns its own failure into a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from echelon.doctor import links, machine, software, storage
from echelon.doctor.finding import Finding, can_train, line, to_dict, verdict

__all__ = ["Finding", "examine", "can_train", "line", "to_dict", "verdict"]


def examine(folder: str | Path = "runs") -> Iterator[Finding]:
    """Findings as they are made; `folder` is where runs would be written."""
    yield software.check_python()
    seen = software.probe()
    yield from software.check_needed(seen)
    yield from software.check_optional(seen)
    yield machine.check_cores()
    yield machine.check_memory()
    yield machine.check_gpus(seen)
    yield from machine.check_limits()
    yield machine.check_fork()
    yield links.check_interfaces()
    yield links.check_ports()
    yield links.check_loopback()
    yield from storage.check_folder(Path(folder))
    yield storage.check_shared_memory(Path("/dev/shm"))  # noqa: S108  a mount to look at, not a place for a file
