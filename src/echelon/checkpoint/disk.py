"""Bytes to and from the disk: hashed while they pass, flushed before they are relied on, refused with a typed error."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from echelon.errors import CheckpointCorrupt, StorageFailed
from echelon.storage import reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

CHUNK_BYTES = (
    4 << 20
)  # hashed and written while still in the cache; long enough that the interpreter lock is rarely taken
BATCH_BYTES = 256 << 10  # smaller pieces are gathered, so that ten thousand scalars are not ten thousand system calls

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the operating system refuses inside becomes `StorageFailed`; a sector that cannot be read is corruption. (A
    disk that fails while written to is none: there is nothing yet to be corrupt.)
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise CheckpointCorrupt(str(path), f"the disk cannot deliver it ({reason(error)})") from error
        raise StorageFailed(str(path), f"cannot be read: {reason(error)}") from error


class HashedFile:
    """A new file whose SHA-256 is known when it is closed. A `with` block that ends well flushes it to the disk."""

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._hash = hashlib.sha256()
        self._pending = bytearray()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        self.size_bytes += len(data)
        if len(self._pending) + len(data) <= BATCH_BYTES:
            self._pending += data
            return
        self._flush()
        self._put(memoryview(data))

    @property
    def sha256(self) -> str:
        assert not self._pending, "the hash is complete once the file is closed"
        return self._hash.hexdigest()

    def _flush(self) -> None:
        batch, self._pending = self._pending, bytearray()
        self._put(memoryview(batch))

    def _put(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self._hash.update(chunk)
            while chunk:
                chunk = chunk[os.write(self._fd, chunk) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


class HashedInput:
    """A regular file read from its beginning; what has been read so far is hashed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        # Not blocking: a pipe put in a checkpoint's place must not hold the reader for ever.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointCorrupt(str(path), "is not a regular file")
        except BaseException:
            os.close(self._fd)
            raise
        self.size_bytes = status.st_size

    def fill(self, target: memoryview) -> None:
        """Reads exactly as many bytes as `target` holds."""
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            rest = chunk
            while rest:
                count = os.readv(self._fd, [rest])
                if count == 0:
                    raise CheckpointCorrupt(str(self._path), "ends too early")
                rest = rest[count:]
            self._hash.update(chunk)

    def take(self, size_bytes: int) -> bytes:
        taken = bytearray(size_bytes)
        self.fill(memoryview(taken))
        return bytes(taken)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def sync_folder(path: Path) -> None:
    """A file or a rename is only sure to be there after a power loss once the folder that names it is flushed."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step (Linux renameat2). False where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one))
