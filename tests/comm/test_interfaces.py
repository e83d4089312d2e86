"""Several interfaces: which ways there are to a peer is pure; that they carry the bytes is seen between two hosts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from ipaddress import ip_interface
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from echelon.comm import Options, rendezvous
from echelon.comm.interfaces import (
    Address,
    Offer,
    Route,
    addresses_beside,
    addresses_of,
    all_addresses,
    reachable,
    routes_to,
)


def address(text: str, name: str = "", speed: int | None = None) -> Address:
    return Address(ip_interface(text), name, speed)


def offers(*addresses: Address) -> list[Offer]:
    return [Offer(one, 5000 + i) for i, one in enumerate(addresses)]


LOOPBACK, STORE_SIDE, SECOND = (
    address("127.0.0.1/8", "lo"),
    address("10.0.0.1/24", "eth0"),
    address("10.0.1.1/24", "eth1"),
)


def test_the_kernel_names_its_addresses():
    assert address("127.0.0.1/8", "lo") in all_addresses()


def test_what_meets_at_a_loopback_opens_nothing_else():
    assert addresses_beside("127.0.0.1", [LOOPBACK, STORE_SIDE, SECOND]) == [LOOPBACK]
    assert addresses_beside("127.0.0.7", [LOOPBACK, STORE_SIDE]) == [address("127.0.0.7/32")]
    assert addresses_beside("::1", [address("::1/128", "lo"), STORE_SIDE]) == [address("::1/128", "lo")]


@pytest.mark.parametrize(
    "other",
    ["8.8.8.8/24", "169.254.3.1/16", "fd00::1/64", "fe80::1/64", "10.0.9.1/32", "127.0.0.2/8"],
    ids=["public", "link-local", "of another family", "link-local, version 6", "without a network", "loopback"],
)
def test_only_addresses_of_the_kind_of_the_first_are_beside_it(other):
    everything = [LOOPBACK, address(other, "x"), STORE_SIDE, SECOND]
    assert addresses_beside("10.0.0.1", everything) == [STORE_SIDE, SECOND]


def test_routes_lead_over_the_networks_that_both_have():
    theirs = offers(address("10.0.0.2/24"), address("10.0.1.2/24"), address("10.0.7.2/24"))
    assert routes_to(theirs, [STORE_SIDE, SECOND]) == [
        Route(("10.0.0.2", 5000)),
        Route(("10.0.1.2", 5001), "10.0.1.1"),
    ]


def test_a_bridge_that_every_host_has_for_itself_is_no_way_to_another():
    bridge = address("172.17.0.1/16", "docker0")
    assert len(routes_to(offers(address("10.0.0.2/24"), bridge), [STORE_SIDE, bridge])) == 1


@pytest.mark.parametrize(("first", "second", "used"), [(1000, 1000, 2), (10_000, 1000, 1), (1000, None, 1)])
def test_a_slower_interface_is_left_alone(first, second, used):
    mine = [address("10.0.0.1/24", speed=first), address("10.0.1.1/24", speed=second)]
    theirs = offers(address("10.0.0.2/24", speed=first), address("10.0.1.2/24", speed=second))
    assert len(routes_to(theirs, mine)) == used


def test_interfaces_that_are_asked_for_are_used_in_that_order():
    assert addresses_of(["eth1", "eth0"], [LOOPBACK, STORE_SIDE, SECOND]) == [SECOND, STORE_SIDE]
    with pytest.raises(ValueError, match=r"'ib0' is not up here or has no address; there are: lo, eth0"):
        addresses_of(["ib0"], [LOOPBACK, STORE_SIDE])
    with pytest.raises(ValueError, match="leaves no way"):
        Options(interfaces=())


def test_a_way_that_leads_nowhere_is_known_in_time():
    nowhere = Route(("127.0.0.1", 1))  # refused
    began = time.monotonic()
    assert reachable([nowhere, Route(("127.0.0.1", 1), "203.0.113.9")], 0.5) == set()
    assert time.monotonic() - began < 2


def _load_hosts():
    spec = importlib.util.spec_from_file_location("hosts", Path(__file__).parents[2] / "benchmarks" / "hosts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hosts_module = _load_hosts()
WHY_NOT = hosts_module.why_not()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
NUMEL = 4_000_000


@contextmanager
def inside(namespace: str):
    """This thread, and those that it starts, on another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as there:  # noqa: PTH123
        if libc.setns(there.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    yield


@pytest.fixture
def apart(monkeypatch):
    """`apart(hosts)`: rank 0 on the first host, rank 1 on the second."""

    def apart(hosts, interfaces=None) -> None:
        def meet(store, rank, names, timeout_s, _interfaces):
            with inside(hosts.namespaces[rank]):
                there = dist.TCPStore(hosts.address(0), 29444, 2, is_master=rank == 0)
                return real(there, rank, names, timeout_s, interfaces)

        real = rendezvous.meet
        monkeypatch.setattr("echelon.comm.backend.meet", meet)

    return apart


def sum_and_lanes(_rank: int) -> list[float]:
    total = torch.ones(NUMEL)
    dist.all_reduce(total)
    (link,) = dist.group.WORLD.driver.fabric.links.values()
    return [total.sum().item(), len({lane.socket.getpeername()[0] for lane in link._lanes})]


@needs_hosts
def test_two_interfaces_carry_half_of_the_bytes_each(tmp_path, apart):
    with hosts_module.two_hosts(links=2) as hosts:
        apart(hosts)
        assert check(run_ranks(tmp_path, 2, sum_and_lanes)) == [[2 * NUMEL, 2]] * 2
        for host in range(2):
            sent = [hosts.sent_bytes(host, link) for link in range(2)]
            assert sum(sent) > 4 * NUMEL
            assert 0.45 < sent[0] / sum(sent) < 0.55


@needs_hosts
def test_only_the_interface_that_is_named_carries_bytes(tmp_path, apart):
    with hosts_module.two_hosts(links=2) as hosts:
        apart(hosts, ("link1",))
        assert check(run_ranks(tmp_path, 2, sum_and_lanes)) == [[2 * NUMEL, 1]] * 2
        assert hosts.sent_bytes(0, 0) < 100_000 < 4 * NUMEL < hosts.sent_bytes(0, 1)


DEATHS = {
    "down": ["ip", "link", "set", "link1", "down"],
    "silent": ["ip", "neighbour", "replace", "10.77.1.1", "lladdr", "02:00:00:00:00:99", "dev", "link1"],
}


@needs_hosts
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("host", [0, 1])
def test_a_dead_second_interface_keeps_nobody_from_joining(tmp_path, apart, death, host):
    with hosts_module.two_hosts(links=2) as hosts:
        words = [word.replace("10.77.1.1", hosts.address(1 - host, 1)) for word in DEATHS[death]]
        hosts.do(host, *words)
        apart(hosts)
        began = time.monotonic()
        assert check(run_ranks(tmp_path, 2, sum_and_lanes)) == [[2 * NUMEL, 1]] * 2
        assert time.monotonic() - began < 10


@needs_hosts
def test_hosts_go_with_whoever_made_them(tmp_path):
    script = tmp_path / "makes_hosts.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(Path(hosts_module.__file__).parent)!r})\n"
        "import hosts\nwith hosts.two_hosts() as two:\n    print(two.namespaces, flush=True)\n    time.sleep(60)\n"
    )
    maker = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    namespaces = re.findall(r"/proc/\d+/ns/net", maker.stdout.readline())
    assert len(namespaces) == 2
    assert all(os.path.exists(namespace) for namespace in namespaces)  # noqa: PTH110
    maker.kill()
    maker.communicate()
    until = time.monotonic() + 5
    while any(os.path.exists(namespace) for namespace in namespaces):  # noqa: PTH110
        assert time.monotonic() < until
        time.sleep(0.02)
