"""What a process holds that a group may have left behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any


def what_is_held() -> dict[str, Any]:
    """Descriptors by kind, mapped inboxes, threads of Python and of the kernel, children."""
    gc.collect()
    own = Path("/proc/self")
    links = [str(fd.readlink()) for fd in (own / "fd").iterdir() if fd.is_symlink()]
    return {
        "descriptors": dict(sorted(Counter(link.split(":")[0] for link in links).items())),
        "mappings": (own / "maps").read_text().count("memfd:echelon"),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(list((own / "task").iterdir())),
        "children": "".join((task / "children").read_text() for task in (own / "task").iterdir()),
    }
