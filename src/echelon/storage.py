"""What the operating system refuses when files are written: one typed error that says what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.errors import StorageFailed

FULL = "; free some space there, or choose another folder with --out"
FORBIDDEN = "; choose a folder that you can write to with --out"
WAYS_OUT = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EACCES: FORBIDDEN,
    errno.EPERM: FORBIDDEN,
    errno.EROFS: FORBIDDEN,
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system refuses inside becomes `StorageFailed`."""
    try:
        yield
    except OSError as error:
        way_out = WAYS_OUT.get(error.errno or 0, "")
        raise StorageFailed(str(path), f"cannot be written: {reason(error)}{way_out}") from error


def reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
