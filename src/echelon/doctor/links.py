"""How ranks would reach each other: interfaces, free ports on the loopback, and how fast that is."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import statistics
import threading
import time
from collections.abc import Callable

from echelon.doctor.finding import Finding, missing, ok, warning

LOOPBACK = "127.0.0.1"
PORTS = 64
ROUNDS = 200
WAIT_S = 5.0
BLOCK = bytes(1 << 20)
BLOCKS = 64


def check_interfaces() -> Finding:
    try:
        names = _interfaces()
    except OSError as error:
        return warning(
            "interfaces", error.strerror or str(error), "a sandbox hides them; workers of this host may still work"
        )
    others = [name for name in names if name != "lo"]
    if "lo" not in names:
        return missing(
            "interfaces", ", ".join(names) or "none", "bring the loopback up: ip link set lo up", needed=True
        )
    return ok("interfaces", "lo" + ("".join(f", {name}" for name in others) or "; workers of this host only"))


def _interfaces() -> list[str]:
    """With psutil, those that are up, with speed and address; without, their names."""
    if importlib.util.find_spec("psutil") is None:
        return [name for _, name in socket.if_nameindex()]
    import psutil

    addresses, found = psutil.net_if_addrs(), []
    for name, stats in psutil.net_if_stats().items():
        if stats.isup:
            speed = f" {stats.speed / 1000:g} Gbit/s" if stats.speed and name != "lo" else ""
            address = [a.address for a in addresses.get(name, []) if a.family == socket.AF_INET and name != "lo"]
            found.append(name + "".join(f" {one}" for one in address[:1]) + speed)
    return found


def check_ports() -> Finding:
    """Whether the system hands out ports on the loopback, and not only the last few."""
    with contextlib.ExitStack() as held:
        try:
            for _ in range(PORTS):
                held.enter_context(socket.create_server((LOOPBACK, 0)))
        except OSError as error:
            advice = f"{LOOPBACK} must accept listening sockets: check the sandbox and net.ipv4.ip_local_port_range"
            return missing("ports", error.strerror or str(error), advice, needed=True)
    return ok("ports", f"free ones on {LOOPBACK}")


def check_loopback() -> Finding:
    """A round trip of one byte (median) and the rate of 64 MiB, over TCP as between two workers of this host."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(WAIT_S)
            echo = threading.Thread(target=_quiet(_echo), args=(server,), daemon=True)
            echo.start()
            with socket.create_connection(server.getsockname(), timeout=WAIT_S) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                trip_s, rate = _measure(link)
            echo.join(WAIT_S)
    except OSError as error:
        advice = f"connections to {LOOPBACK} must be allowed: check the firewall"
        return missing("loopback", error.strerror or str(error), advice, needed=True)
    detail = f"round trip {trip_s * 1e6:.0f} us, {rate / 1e9:.1f} GB/s"
    if trip_s > 1e-3:
        return warning("loopback", detail, "slow: is the machine busy?")
    return ok("loopback", detail)


def _measure(link: socket.socket) -> tuple[float, float]:
    trips = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        link.sendall(b"x")
        if not link.recv(1):
            raise ConnectionResetError("the loopback closed the connection")
        trips.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(BLOCKS):
        link.sendall(BLOCK)
    if not link.recv(1):
        raise ConnectionResetError("the loopback closed the connection")
    return statistics.median(trips), BLOCKS * len(BLOCK) / (time.perf_counter() - began)


def _echo(server: socket.socket) -> None:
    """The other end: answers `ROUNDS` bytes one by one, then takes the blocks and answers once."""
    link, _ = server.accept()
    with link:
        link.settimeout(WAIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            link.sendall(link.recv(1))
        left, buffer = BLOCKS * len(BLOCK), bytearray(1 << 20)
        while left > 0:
            taken = link.recv_into(buffer)
            if not taken:
                return
            left -= taken
        link.sendall(b"x")


def _quiet(serve: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """The near end reports a broken link; the far end has nothing to add."""

    def served(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            serve(server)

    return served
