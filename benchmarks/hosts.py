"""Two hosts on one machine: network namespaces, joined by one or several pairs of virtual interfaces.

    host 0: link0 10.77.0.1/24 ---- 10.77.0.2/24 link0 :host 1
            link1 10.77.1.1/24 ---- 10.77.1.2/24 link1

A namespace lives as long as the process that holds it, and the holder as long as its input is open: however whoever
made the hosts ends, nothing of them is left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
BURST = ("burst", "64kb", "latency", "50ms")


def why_not() -> str | None:
    """What is missing to make hosts here, and how to get it; None if nothing is."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        return f"{', '.join(missing)} not found: install {packages} (Debian: apt-get install {packages})"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made ({tried.stderr.strip()}): run as root, or with CAP_SYS_ADMIN"
    return None


class Hosts:
    """Two hosts that are there; see `two_hosts`."""

    def __init__(self, holders: Sequence[int], links: int) -> None:
        self.namespaces = [f"/proc/{pid}/ns/net" for pid in holders]
        self.links = links

    def inside(self, host: int, *words: str) -> list[str]:
        """A command, as it is run on that host."""
        return ["nsenter", f"--net={self.namespaces[host]}", *words]

    def do(self, host: int, *words: str) -> None:
        subprocess.run(self.inside(host, *words), check=True)

    def address(self, host: int, link: int = 0) -> str:
        return f"10.77.{link}.{host + 1}"

    def sent_bytes(self, host: int, link: int = 0) -> int:
        """What has left the host over a link."""
        table = Path(self.namespaces[host]).parent.parent / "net" / "dev"
        return sent_bytes(link, table)

    def count_every_packet(self, link: int = 0) -> None:
        """Packets as they would be on a wire, each with its headers, instead of up to 64 KB with one."""
        for host in range(2):
            self.do(host, "ip", "link", "set", f"link{link}", "gso_max_segs", "1", "gso_max_size", "1514")

    def shape(self, rate: str, link: int = 0) -> None:
        for host in range(2):
            self.do(host, *shaping(rate, link))


def shaping(rate: str, link: int = 0) -> list[str]:
    """The command that bounds what leaves a host over a link."""
    return ["tc", "qdisc", "replace", "dev", f"link{link}", "root", "tbf", "rate", rate, *BURST]


def sent_bytes(link: int = 0, table: Path = Path("/proc/net/dev")) -> int:
    """What has left the host that this process is on over a link: headers of Ethernet, IP and TCP included."""
    row = re.search(rf"^\s*link{link}:(.*)$", table.read_text(), re.MULTILINE)
    assert row is not None, f"no link{link} here"
    return int(row[1].split()[8])


@contextmanager
def two_hosts(links: int = 1) -> Iterator[Hosts]:
    """Two hosts with so many links between them, until the end of the block."""
    with ExitStack() as stack:
        holders = []
        for _ in range(2):
            words = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
            holder = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise RuntimeError(why_not() or "a network namespace ended before it was used")
            holders.append(holder.pid)
        hosts = Hosts(holders, links)
        for link in range(links):
            name = f"link{link}"
            hosts.do(0, "ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", str(holders[1]))
        for host in range(2):
            hosts.do(host, "ip", "link", "set", "lo", "up")
            for link in range(links):
                hosts.do(host, "ip", "address", "add", f"{hosts.address(host, link)}/24", "dev", f"link{link}")
                hosts.do(host, "ip", "link", "set", f"link{link}", "up")
        yield hosts


def run_ranks(hosts: Hosts, on_each: int, words: Sequence[str], limit_s: float) -> None:
    """`words` and the number of a rank as its last, on every rank of both hosts; until all have ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "link0"}
    children = [
        subprocess.Popen(hosts.inside(rank // on_each, sys.executable, *words, str(rank)), env=environment)
        for rank in range(2 * on_each)
    ]
    try:
        until = time.monotonic() + limit_s
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            if time.monotonic() > until:
                raise TimeoutError(f"the ranks did not end within {limit_s} s")
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
        codes = [child.wait() for child in children]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
