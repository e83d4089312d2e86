"""Over which addresses two hosts reach each other: the one on the way to the store, and others they both have a network
for.

    this host                the other                  routes
    10.0.0.1/24  (first)     10.0.0.2/24  (first)       to 10.0.0.2
    10.0.1.1/24              10.0.1.2/24                10.0.1.1 -> 10.0.1.2
    172.17.0.1/16            172.17.0.1/16              none: each is its own
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path

PROBE_S = 2.0
"""How long is waited for addresses that nothing depends on. Longer than a round trip anywhere, and one lost packet."""

_GET_ADDRESSES, _DUMP, _DONE, _ERROR, _NEW_ADDRESS = 22, 0x301, 3, 2, 20
_ADDRESS, _LOCAL = 1, 2
_UNUSABLE = 0x08 | 0x20 | 0x40  # a duplicate, deprecated, or not known to be ours alone
_GET_FLAGS, _UP, _LOOPBACK = 0x8913, 0x1, 0x8
_MESSAGE, _ADDRESS_MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a host with its network. `speed` is that of the interface in Mbit/s, where the kernel knows it."""

    ip: IPv4Interface | IPv6Interface
    name: str = ""
    speed: int | None = None

    @property
    def is_loopback(self) -> bool:
        return self.ip.is_loopback


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a rank listens."""

    address: Address
    port: int

    def to_json(self) -> list[object]:
        return [str(self.address.ip), self.port, self.address.speed]

    @classmethod
    def from_json(cls, words: Sequence[object]) -> Offer:
        ip, port, speed = words
        assert isinstance(port, int)
        return cls(Address(ip_interface(str(ip)), speed=speed if isinstance(speed, int) else None), port)


@dataclass(frozen=True, slots=True)
class Route:
    """Where to connect to, and from which address; the kernel chooses if that is None."""

    target: tuple[str, int]
    source: str | None = None

    def open(self) -> socket.socket:
        """A socket that is not connected yet."""
        opened = socket.socket(socket.AF_INET6 if ":" in self.target[0] else socket.AF_INET, socket.SOCK_STREAM)
        if self.source is not None:
            try:
                opened.bind((self.source, 0))
            except OSError:
                opened.close()
                raise
        return opened


def all_addresses() -> list[Address]:
    """Every address of an interface that is up, asked of the kernel (rtnetlink(7)); none where it does not say."""
    try:
        return [address for address in _read_addresses() if _flags(address.name) & _UP]
    except OSError:
        return []


def _read_addresses() -> Iterator[Address]:
    with closing(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)) as netlink:
        netlink.settimeout(PROBE_S)
        body = _ADDRESS_MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        netlink.send(_MESSAGE.pack(_MESSAGE.size + len(body), _GET_ADDRESSES, _DUMP, 1, 0) + body)
        while True:
            answer = netlink.recv(1 << 17)
            while answer:
                size, kind, _, _, _ = _MESSAGE.unpack_from(answer)
                if kind in (_DONE, _ERROR):
                    return
                if kind == _NEW_ADDRESS:
                    yield from _parse(answer[_MESSAGE.size : size])
                answer = answer[(size + 3) & ~3 :]


def _parse(message: bytes) -> Iterator[Address]:
    _, prefix, flags, _, index = _ADDRESS_MESSAGE.unpack_from(message)
    found: dict[int, bytes] = {}
    rest = message[_ADDRESS_MESSAGE.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : size]
        rest = rest[(max(size, _ATTRIBUTE.size) + 3) & ~3 :]
    raw = found.get(_LOCAL) or found.get(_ADDRESS)
    if raw is not None and not flags & _UNUSABLE:
        family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
        name = socket.if_indextoname(index)
        yield Address(ip_interface(f"{socket.inet_ntop(family, raw)}/{prefix}"), name, _speed(name))


def _flags(name: str) -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sH14x", name.encode(), 0))
    return int(struct.unpack_from("H", answer, 16)[0])


def _speed(name: str) -> int | None:
    with suppress(OSError, ValueError):
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
        return speed if speed > 0 else None
    return None


def addresses_beside(first: str, everything: Sequence[Address]) -> list[Address]:
    """The address `first`, and those of other networks of its kind: private or public, of its family. A loopback has
    nothing beside it.
    """
    own = next((a for a in everything if str(a.ip.ip) == first), Address(ip_interface(first)))
    if own.is_loopback:
        return [own]
    return [own, *(a for a in everything if a.ip != own.ip and _is_alike(a, own))]


def _is_alike(address: Address, other: Address) -> bool:
    one, two = address.ip, other.ip
    return (
        one.version == two.version
        and not one.is_loopback
        and not one.is_link_local
        and one.is_private == two.is_private
        and one.network.num_addresses > 1
    )


def addresses_of(names: Iterable[str], everything: Sequence[Address]) -> list[Address]:
    """The addresses of the interfaces that were asked for, in that order. A ValueError where there is none."""
    found: list[Address] = []
    for name in names:
        its = [a for a in everything if a.name == name and not a.ip.is_link_local]
        if not its:
            there = ", ".join(dict.fromkeys(a.name for a in everything)) or "none"
            raise ValueError(f"interfaces: {name!r} is not up here or has no address; there are: {there}")
        found += [Address(a.ip, a.name) for a in its]  # who names them wants them, however slow they are
    return found


def routes_to(theirs: Sequence[Offer], mine: Sequence[Address]) -> list[Route]:
    """The way to a peer's first address, and one to each of its others in a network that this host is in as well.

    Not over what is slower than the first way: the lanes of a link carry equal parts.
    """
    first = theirs[0]
    routes = [Route((str(first.address.ip.ip), first.port))]
    own = {address.ip.ip for address in mine}
    by_network = {a.ip.network: itertools.cycle([m for m in mine if m.ip.network == a.ip.network]) for a in mine}
    for offer in theirs[1:]:
        there = offer.address
        if there.ip.network in by_network and there.ip.ip not in own:
            here = next(by_network[there.ip.network])
            if _speed_between(here, there) >= _speed_between(mine[0], first.address):
                routes.append(Route((str(there.ip.ip), offer.port), str(here.ip.ip)))
    return routes


def _speed_between(one: Address, other: Address) -> float:
    """In Mbit/s; 0 if nobody knows, so that such a way is used beside one of which nobody knows either."""
    return min((address.speed for address in (one, other) if address.speed is not None), default=0)


def reachable(routes: Iterable[Route], longest_s: float) -> set[Route]:
    """Those of the routes over which a connection comes about in time, all tried at once."""
    poll = select.poll()
    trying: dict[int, tuple[Route, socket.socket]] = {}
    found: set[Route] = set()
    for route in routes:
        with suppress(OSError):
            opened = route.open()
            opened.setblocking(False)
            if opened.connect_ex(route.target) not in (0, errno.EINPROGRESS):
                opened.close()
                continue
            trying[opened.fileno()] = route, opened
            poll.register(opened, select.POLLOUT)
    until = time.monotonic() + longest_s
    while trying and (left_s := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            route, opened = trying.pop(fd)
            poll.unregister(fd)
            if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                found.add(route)
            opened.close()
    for _, opened in trying.values():
        opened.close()
    return found
