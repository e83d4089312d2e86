"""How the ranks of a fabric find each other and make a link to each.

Every rank writes into the store where it can be reached. The one of the higher rank connects; both prove that they know
the secret which rank 0 left in the store. Ranks that share a kernel and a network namespace meet at a Unix socket,
through which they pass each other their inbox; others over TCP.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from echelon.comm.drive import Driver
from echelon.comm.fabric import Fabric
from echelon.comm.link import Link, RingLink
from echelon.comm.ring import Reader, Segment, Writer, make_segment
from echelon.comm.stream import StreamLink
from echelon.errors import PeerLost, Timeout

LANES = 4
"""Connections to a peer on another host."""
SPINS = 100
_HELLO = struct.Struct("<8sIII32s")
_MAGIC = b"echelon1"
_NONCE = 32
_SHARED_MEMORY = platform.machine() in ("x86_64", "AMD64", "i686")


def meet(store: dist.Store, rank: int, names: Sequence[int], timeout_s: float) -> tuple[Driver, list[str]]:
    """Link this rank to all others; what drives the links, and the host of every rank."""
    size = len(names)
    with closing(_listen_unix()) as unix:
        gathering = _Gathering(store, rank, size, time.monotonic() + timeout_s, timeout_s)
        hosts = gathering.share("host", {"host": _host_id(), "unix": unix.getsockname().decode()[1:]})
        mine = hosts[rank]["host"]
        near = [peer for peer in range(size) if hosts[peer]["host"] == mine]
        secret = gathering.secret()
        with _Listeners(unix, store, is_alone=len(near) == size) as listeners:
            tcp = gathering.share("tcp", listeners.addresses) if len({h["host"] for h in hosts}) > 1 else [[]] * size
            linking = _Linking(gathering, secret, rank, near, names)
            try:
                for peer in range(rank):
                    is_near = peer in near
                    linking.connect(peer, ["\0" + hosts[peer]["unix"]] if is_near else list(map(tuple, tcp[peer])))
                linking.accept(listeners)
            except BaseException:
                linking.give_up()
                raise
    spins = SPINS if len(near) <= len(os.sched_getaffinity(0)) else SPINS // 10
    linking.done()
    driver = Driver(Fabric(rank, names, linking.links), linking.inbox, linking.wake, spins)
    return driver, [h["host"] for h in hosts]


def _host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116


def _listen_unix() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0echelon-" + secrets.token_hex(12))  # abstract: it is in no folder, and goes with its owner
    listener.listen(512)
    return listener


class _Gathering:
    """What every rank says to all others, through the store."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.deadline = deadline
        self.timeout_s = timeout_s

    def left_s(self, waiting_for: int) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Timeout(f"joining the group, waiting for rank {waiting_for},", self.timeout_s)
        return left

    def share(self, what: str, mine: Any) -> list[Any]:
        self.store.set(f"{what}/{self.rank}", json.dumps(mine))
        return [json.loads(self._get(f"{what}/{peer}", peer)) for peer in range(self.size)]

    def secret(self) -> bytes:
        if self.rank == 0:
            self.store.set("secret", secrets.token_hex(32))
        return bytes.fromhex(self._get("secret", 0).decode())

    def _get(self, key: str, peer: int) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=self.left_s(peer)))
        except RuntimeError as error:
            raise Timeout(f"joining the group, waiting for rank {peer},", self.timeout_s) from error
        return bytes(self.store.get(key))


class _Listeners:
    """The sockets at which higher ranks arrive."""

    def __init__(self, unix: socket.socket, store: dist.Store, *, is_alone: bool) -> None:
        self.unix = unix
        self.tcp: list[socket.socket] = []
        if not is_alone:
            self.tcp = [_listen_tcp(address) for address in _own_addresses(store)]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [listener.getsockname()[:2] for listener in self.tcp]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.tcp:
            listener.close()


def _listen_tcp(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(512)
    return listener


def _own_addresses(store: dist.Store) -> list[str]:
    """The address of this host on the way to the store: the network that the user named."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or socket.gethostname()
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(where)
        return [str(probe.getsockname()[0])]


class _Linking:
    """Makes the links of one rank."""

    def __init__(
        self, gathering: _Gathering, secret: bytes, rank: int, near: Sequence[int], names: Sequence[int]
    ) -> None:
        self.links: dict[int, Link] = {}
        self.inbox: Segment | None = None
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._gathering = gathering
        self._secret = secret
        self._rank = rank
        self._names = names
        self._near = near
        self._fd = -1
        if _SHARED_MEMORY and len(near) > 1:
            self._fd, self.inbox = make_segment(len(near) - 1)

    def _place(self, reader: int, writer: int) -> int:
        """Which ring of the reader's inbox is the writer's."""
        return [peer for peer in self._near if peer != reader].index(writer)

    def connect(self, peer: int, addresses: Sequence[Any]) -> None:
        lanes = 1 if peer in self._near else LANES
        self._add(peer, [self._connect(peer, addresses[lane % len(addresses)], lane) for lane in range(lanes)])

    def _connect(self, peer: int, address: Any, lane: int) -> socket.socket:
        is_unix = isinstance(address, str)
        family = socket.AF_UNIX if is_unix else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(self._gathering.left_s(self._names[peer]))
        try:
            connection.connect(address)
            nonce = secrets.token_bytes(_NONCE)
            connection.sendall(_HELLO.pack(_MAGIC, self._rank, lane, 0, nonce))
            theirs = _read(connection, 2 * _NONCE)
            challenge, proof = theirs[:_NONCE], theirs[_NONCE:]
            if not hmac.compare_digest(proof, self._prove(b"accepts", nonce, challenge)):
                raise PeerLost(self._names[peer], "joining the group (what answers at its address is not it)")
            connection.sendall(self._prove(b"connects", nonce, challenge))
        except OSError as error:
            connection.close()
            raise PeerLost(self._names[peer], f"joining the group ({error.strerror or error})") from error
        return connection

    def _prove(self, role: bytes, nonce: bytes, challenge: bytes) -> bytes:
        return hmac.digest(self._secret, role + nonce + challenge, "sha256")

    def accept(self, listeners: _Listeners) -> None:
        """Until every higher rank has come. A stranger is sent away."""
        lanes: dict[int, dict[int, socket.socket]] = {}
        wanted = {p: (1 if p in self._near else LANES) for p in range(self._rank + 1, self._gathering.size)}
        poll = _Poll([listeners.unix, *listeners.tcp])
        while wanted:
            first = min(wanted)
            for listener in poll.ready(self._gathering.left_s(self._names[first])):
                connection, _ = listener.accept()
                found = self._welcome(connection)
                if found is None:
                    connection.close()
                    continue
                peer, lane = found
                if peer not in wanted or lane >= wanted[peer]:
                    connection.close()
                    continue
                lanes.setdefault(peer, {})[lane] = connection
                if len(lanes[peer]) == wanted[peer]:
                    self._add(peer, [lanes[peer][lane] for lane in range(wanted.pop(peer))])

    def _welcome(self, connection: socket.socket) -> tuple[int, int] | None:
        connection.settimeout(5.0)
        try:
            magic, peer, lane, _, nonce = _HELLO.unpack(_read(connection, _HELLO.size))
            if magic != _MAGIC:
                return None
            challenge = secrets.token_bytes(_NONCE)
            connection.sendall(challenge + self._prove(b"accepts", nonce, challenge))
            if hmac.compare_digest(_read(connection, _NONCE), self._prove(b"connects", nonce, challenge)):
                return peer, lane
        except OSError:
            pass
        return None

    def _add(self, peer: int, connections: list[socket.socket]) -> None:
        if peer in self._near and self.inbox is not None:
            self.links[peer] = self._share_memory(peer, connections[0])
            return
        for connection in connections:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = f"{min(peer, self._rank)}-{max(peer, self._rank)}".encode()
        key = int.from_bytes(hmac.digest(self._secret, pair, "sha256")[:4], "little")
        self.links[peer] = StreamLink(peer, connections, key)

    def _share_memory(self, peer: int, connection: socket.socket) -> RingLink:
        assert self.inbox is not None
        connection.settimeout(self._gathering.left_s(self._names[peer]))
        try:
            socket.send_fds(connection, [b"+"], [self._fd, self.wake])
            _, fds, _, _ = socket.recv_fds(connection, 1, 2)
        except OSError as error:
            raise PeerLost(self._names[peer], f"joining the group ({error.strerror or error})") from error
        if len(fds) != 2:
            raise PeerLost(self._names[peer], "joining the group (it closed the connection)")
        theirs = Segment(fds[0], self.inbox.rings)
        os.close(fds[0])
        watch = connection.detach()
        alive = [watch, *_pidfd(watch)]
        writer = Writer(theirs, self._place(peer, self._rank), fds[1])
        reader = Reader(self.inbox, self._place(self._rank, peer), fds[1])
        return RingLink(peer, writer, reader, alive, [*alive, fds[1]])

    def done(self) -> None:
        """The others have this rank's inbox; its descriptor is needed no more."""
        if self._fd >= 0:
            os.close(self._fd)

    def give_up(self) -> None:
        for link in self.links.values():
            link.close()
        os.close(self.wake)
        self.done()


class _Poll:
    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._by_fd = {s.fileno(): s for s in sockets}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def ready(self, timeout_s: float) -> list[socket.socket]:
        return [self._by_fd[fd] for fd, _ in self._poll.poll(timeout_s * 1000)]


def _pidfd(connection: int) -> list[int]:
    """A descriptor that tells when the process at the other end is gone, also if a child of it holds the socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection)) as peek:
        pid, _, _ = struct.unpack("3i", peek.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if pid > 0:
            return [os.pidfd_open(pid)]
    return []


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("it closed the connection")
        found += part
    return found
