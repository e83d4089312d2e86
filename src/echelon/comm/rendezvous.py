"""How the ranks of a fabric find each other and make a link to each.

Every rank writes into the store where it can be reached. The one of the higher rank connects; both prove that they know
the secret which rank 0 left in the store. Ranks that share a kernel and a network namespace meet at a Unix socket,
through which they pass each other their inbox; others over TCP, over every network they share (interfaces.py).
"""

from __future__ import annotations

import errno
import hmac
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self

import torch.distributed as dist

from echelon.comm.drive import Driver
from echelon.comm.fabric import Fabric
from echelon.comm.gathering import Gathering
from echelon.comm.interfaces import (
    PROBE_S,
    Address,
    Offer,
    Route,
    addresses_beside,
    addresses_of,
    all_addresses,
    reachable,
    routes_to,
)
from echelon.comm.link import Link, RingLink
from echelon.comm.ring import Reader, Segment, Writer, make_segment
from echelon.comm.stream import StreamLink
from echelon.errors import PeerLost

FAR_S = 0.003
"""The round trip from which on a peer is far: the window of one connection, 4 MB, carries 10 Gbit/s up to there."""
FAR_LANES = 4
"""Connections over each way to a far peer. To a near one a second would only compete with the first: on a link of
100 Mbit/s four lose packets in its queue, and on an idle machine they halve the speed.
"""
MOST_LANES = 256
SPINS = 100
_HELLO = struct.Struct("<8sIIII32s")
_MAGIC = b"echelon1"
_NONCE = 32
_SHARED_MEMORY = platform.machine() in ("x86_64", "AMD64", "i686")


def meet(
    store: dist.Store, rank: int, names: Sequence[int], timeout_s: float, interfaces: Sequence[str] | None = None
) -> tuple[Driver, list[str]]:
    """Link this rank to all others; what drives the links, and the host of every rank. `interfaces` are those to be
    used towards other hosts: all that both have a network for, if it is None.
    """
    size = len(names)
    with closing(_listen_unix()) as unix:
        gathering = Gathering(store, rank, size, time.monotonic() + timeout_s, timeout_s)
        hosts = gathering.share("host", {"host": _host_id(), "unix": unix.getsockname().decode()[1:]})
        mine = hosts[rank]["host"]
        near = [peer for peer in range(size) if hosts[peer]["host"] == mine]
        secret = gathering.secret()
        far = [peer for peer in range(rank) if peer not in near]
        with _Listeners(unix, _addresses(store, interfaces) if len(near) < size else []) as listeners:
            is_spread = len({h["host"] for h in hosts}) > 1
            tcp = gathering.share("tcp", [offer.to_json() for offer in listeners.offers]) if is_spread else []
            linking = _Linking(gathering, secret, rank, near, names)
            try:
                routes = _find_routes({peer: list(map(Offer.from_json, tcp[peer])) for peer in far}, listeners.offers)
                for peer in range(rank):
                    if peer in routes:
                        linking.connect_far(peer, routes[peer])
                    else:
                        linking.connect_near(peer, "\0" + hosts[peer]["unix"])
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


class _Listeners:
    """The sockets at which higher ranks arrive. Of several addresses only the first has to be one that can be used."""

    def __init__(self, unix: socket.socket, addresses: Sequence[Address]) -> None:
        self.unix = unix
        self.tcp: list[socket.socket] = []
        self.offers: list[Offer] = []
        for address in addresses:
            with suppress(OSError) if self.offers else nullcontext():
                listener = _listen_tcp(str(address.ip.ip))
                self.tcp.append(listener)
                self.offers.append(Offer(address, listener.getsockname()[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.tcp:
            listener.close()


def _listen_tcp(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def _addresses(store: dist.Store, interfaces: Sequence[str] | None) -> list[Address]:
    """Where to listen, the address that every other host reaches first."""
    if interfaces is not None:
        return addresses_of(interfaces, all_addresses())
    return addresses_beside(_own_addresses(store)[0], all_addresses())


def _own_addresses(store: dist.Store) -> list[str]:
    """The address of this host on the way to the store: the network that the user named."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or socket.gethostname()
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(where)
        return [str(probe.getsockname()[0])]


def _find_routes(theirs: dict[int, list[Offer]], mine: Sequence[Offer]) -> dict[int, list[Route]]:
    """The ways to each peer. The first is taken as it is; the others were tried, all at once."""
    routes = {peer: routes_to(offers, [offer.address for offer in mine]) for peer, offers in theirs.items()}
    further = {route for several in routes.values() for route in several[1:]}
    works = reachable(further, PROBE_S) if further else set()
    return {peer: [several[0], *(r for r in several[1:] if r in works)] for peer, several in routes.items()}


class _Linking:
    """Makes the links of one rank."""

    def __init__(
        self, gathering: Gathering, secret: bytes, rank: int, near: Sequence[int], names: Sequence[int]
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

    def connect_near(self, peer: int, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._joining(peer, connection):
            connection.connect(address)
        self._introduce(peer, connection, 0, 1)
        self._add(peer, [connection])

    def connect_far(self, peer: int, routes: Sequence[Route]) -> None:
        """One lane over every route, and several where a window is too small to fill it."""
        connections = [self._connect(peer, routes[0])]
        lanes = len(routes) * (FAR_LANES if _round_trip_s(connections[0]) > FAR_S else 1)
        for lane in range(lanes):
            if lane:
                connections.append(self._connect(peer, routes[lane % len(routes)]))
            self._introduce(peer, connections[lane], lane, lanes)
        self._add(peer, connections)

    def _connect(self, peer: int, route: Route) -> socket.socket:
        with self._joining(peer):
            connection = route.open()
        with self._joining(peer, connection):
            connection.connect(route.target)
        return connection

    @contextmanager
    def _joining(self, peer: int, connection: socket.socket | None = None) -> Iterator[None]:
        """What goes wrong on a connection is said of its peer; it has as long as joining has."""
        try:
            if connection is not None:
                connection.settimeout(self._gathering.left_s(self._names[peer]))
            yield
        except OSError as error:
            if connection is not None:
                connection.close()
            raise PeerLost(self._names[peer], f"joining the group ({error.strerror or error})") from error

    def _introduce(self, peer: int, connection: socket.socket, lane: int, lanes: int) -> None:
        hello = _HELLO.pack(_MAGIC, self._rank, peer, lane, lanes, secrets.token_bytes(_NONCE))
        with self._joining(peer, connection):
            connection.sendall(hello)
            theirs = _read(connection, 2 * _NONCE)
            challenge, proof = theirs[:_NONCE], theirs[_NONCE:]
            if not hmac.compare_digest(proof, self._prove(b"accepts", hello, challenge)):
                raise PeerLost(self._names[peer], "joining the group (what answers at its address is not it)")
            connection.sendall(self._prove(b"connects", hello, challenge))

    def _prove(self, role: bytes, hello: bytes, challenge: bytes) -> bytes:
        return hmac.digest(self._secret, role + hello + challenge, "sha256")

    def accept(self, listeners: _Listeners) -> None:
        """Until every higher rank has come. A stranger is sent away."""
        arrived: dict[int, dict[int, socket.socket]] = {p: {} for p in range(self._rank + 1, self._gathering.size)}
        poll = _Poll([listeners.unix, *listeners.tcp])
        while arrived:
            first = min(arrived)
            for listener in poll.ready(self._gathering.left_s(self._names[first])):
                connection, _ = listener.accept()
                found = self._welcome(connection)
                if found is None:
                    connection.close()
                    continue
                peer, lane, lanes = found
                if peer not in arrived or not lane < lanes <= MOST_LANES:
                    connection.close()
                    continue
                arrived[peer][lane] = connection
                if len(arrived[peer]) == lanes:
                    self._add(peer, [connection for _, connection in sorted(arrived.pop(peer).items())])

    def _welcome(self, connection: socket.socket) -> tuple[int, int, int] | None:
        """Which rank came, with which of how many lanes; None for a stranger, and for who looks for another rank."""
        connection.settimeout(5.0)
        try:
            hello = _read(connection, _HELLO.size)
            magic, peer, me, lane, lanes, _ = _HELLO.unpack(hello)
            if magic != _MAGIC or me != self._rank:
                return None
            challenge = secrets.token_bytes(_NONCE)
            connection.sendall(challenge + self._prove(b"accepts", hello, challenge))
            if hmac.compare_digest(_read(connection, _NONCE), self._prove(b"connects", hello, challenge)):
                return peer, lane, lanes
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
            _, fds, flags, _ = socket.recv_fds(connection, 1, 2)
        except OSError as error:
            raise PeerLost(self._names[peer], f"joining the group ({error.strerror or error})") from error
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "the descriptors of a peer were not received")
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


def _round_trip_s(connection: socket.socket) -> float:
    """As the kernel knows it from connecting: `tcpi_rtt` of tcp(7)."""
    (microseconds,) = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 68)
    return float(microseconds) / 1e6


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("it closed the connection")
        found += part
    return found
