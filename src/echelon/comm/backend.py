"""`dist.init_process_group("echelon")`: makes the links of the default group; its subgroups share them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from echelon.comm.collectives import TOPOLOGIES
from echelon.comm.drive import Driver
from echelon.comm.faults import Rule, parse_faults
from echelon.comm.faulty_link import inject
from echelon.comm.process_group import EchelonGroup
from echelon.comm.rendezvous import meet
from echelon.errors import ConfigError

NAME = "echelon"


@dataclass(frozen=True, kw_only=True)
class Options:
    """For `pg_options=`: the topology of every collective that can have it, by size and place if it is None; and the
    names of the network interfaces towards other hosts, the first of them for all that goes over one only. None is the
    interface on the way to the store and whatever else leads to a network that both hosts are in. `faults`, for tests,
    happen on the links of this rank. Interfaces and faults are the default group's to have.
    """

    topology: str | None = None
    interfaces: tuple[str, ...] | None = None
    faults: str | tuple[Rule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        return parse_faults(self.faults) if isinstance(self.faults, str) else self.faults

    def __post_init__(self) -> None:
        if self.topology is not None and self.topology not in TOPOLOGIES:
            raise ValueError(f"topology={self.topology!r} is none of {', '.join(TOPOLOGIES)}")
        if self.interfaces is not None and not self.interfaces:
            raise ValueError("interfaces=() leaves no way to another host; None means all that lead to one")
        assert isinstance(self.rules, tuple)  # and what is no rule is refused here


def make_group(torch_options: Any, options: Options | None = None) -> EchelonGroup:
    """What torch calls on every member of a new group."""
    members = list(torch_options.global_ranks_in_group)
    options = options if isinstance(options, Options) else Options()
    topology = options.topology
    default = dist.distributed_c10d.GroupMember.WORLD
    if isinstance(default, EchelonGroup):
        return default.subgroup(torch_options.group_id, members, torch_options.store, torch_options.timeout, topology)
    size = torch_options.group_size
    timeout_s = torch_options.timeout.total_seconds()
    everyone = list(range(size))
    try:
        with _files_allowed():
            driver, hosts = meet(
                torch_options.store, torch_options.group_rank, members or everyone, timeout_s, options.interfaces
            )
        if options.rules:
            _make_faulty(driver, options.rules)
    except BaseException:
        # torch has counted this group, and names groups by the count: the next one of this process would be called
        # otherwise than with a rank that is new, and they would wait for each other under two names.
        dist.distributed_c10d._world.group_count = 0
        raise
    return EchelonGroup(
        driver, torch_options.group_id, everyone, hosts, torch_options.store, torch_options.timeout, wanted=topology
    )


@contextmanager
def _files_allowed() -> Iterator[None]:
    """Too few open files are a matter of this process, and not of the peer that it was about to be linked to."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        why = "too few files may be open at a time to link a rank to all others; allow more (`ulimit -n 4096`)"
        raise ConfigError("ulimit -n", why) from error


def _make_faulty(driver: Driver, rules: tuple[Rule, ...]) -> None:
    try:
        inject(driver.fabric, rules)
    except ConfigError:
        driver.close()
        raise


def register() -> None:
    """Make the name known to torch, once a process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu", "cuda"])
