"""Standard input, output and error that are there, also for a process that was started without them (`>&-`, a daemon).

Otherwise the next file or socket that is opened gets the number of a standard stream, and whoever writes to that, or
redirects it, breaks the socket.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STDERR = 2


def open_missing() -> None:
    """Open what is missing on the null device: 0 to 2, and the streams that Python had no descriptor for."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
