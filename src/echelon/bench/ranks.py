"""What every rank of `echelon bench links` does: join, measure, and bring it together on rank 0, which predicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from echelon.bench.measure import Samples, Timed, measure_pairs, measure_together, time_all_reduce
from echelon.bench.report import LinkRow, LinksReport, ReduceRow, write_size
from echelon.comm import Meeting, Options, join, leave
from echelon.comm.choose import choose_topology
from echelon.comm.collectives import TOPOLOGIES, HostsKey
from echelon.comm.cost import predict
from echelon.comm.timing import Line, Sample, fit, seconds_of
from echelon.fleet import WorkerStart
from echelon.worker import TetherLine, be_inside, meeting_around_us

ITEMSIZE = 4
Show = Callable[[dict[str, Any]], None]


def run_started(start: WorkerStart) -> int:
    """A rank that our launcher has started."""
    be_inside()
    line = TetherLine(start.tether)
    line.meet()
    meeting = Meeting(
        rank=start.rank, size=start.workers, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd
    )
    show = line.show if start.rank == 0 else _nobody
    start.tether.send({"kind": "done", "report": _run(meeting, start.request, show)})
    return 0


def run_joined(request: dict[str, Any], show: Show) -> dict[str, Any] | None:
    """One of torchrun's ranks."""
    be_inside()
    return _run(meeting_around_us(), request, show)


def _nobody(_: dict[str, Any]) -> None:
    """Only rank 0 tells how far it is."""


def _run(meeting: Meeting, request: Mapping[str, Any], show: Show) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    join(meeting, torch.device("cpu"), "echelon")

    def tell(what: str) -> None:
        show({"event": "measuring", "message": what})

    try:
        alone, together = measure_pairs(tell), measure_together(tell)
        groups = {name: dist.new_group(pg_options=Options(topology=name)) for name in (*TOPOLOGIES, None)}
        timed: dict[tuple[int, str | None], Timed] = {}
        for size_bytes in request["sizes"]:
            for name, group in groups.items():
                tell(f"all-reduce of {write_size(size_bytes)}, {name or 'as it is chosen'}")
                timed[size_bytes, name] = time_all_reduce(group, size_bytes)
        mine = {
            "transports": {str(peer): link.transport for peer, link in _links().items()},
            "alone": _listed(alone),
            "together": _listed(together),
            "timed": [[size_bytes, name, asdict(one)] for (size_bytes, name), one in timed.items()],
        }
        everybody = _gather(mine)
        return summarize(everybody, request["sizes"]).to_dict() if meeting.rank == 0 else None
    finally:
        leave()


def _links() -> Mapping[int, Any]:
    group: Any = dist.group.WORLD
    links: Mapping[int, Any] = group.driver.fabric.links
    return links


def _listed(samples: Samples) -> list[list[Any]]:
    return [
        [src, dst, [[sample.size_bytes, sample.seconds] for sample in taken]] for (src, dst), taken in samples.items()
    ]


def _gather(value: Any) -> list[Any]:
    """What every rank has, on all of them."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([text.numel()]))
    rows = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    dist.all_gather(rows, text)
    return [json.loads(row.numpy().tobytes()) for row in rows]


def summarize(found: list[Any], sizes: list[int]) -> LinksReport:
    """The report, from what every rank has measured."""
    hosts = hosts_of([{int(peer): name for peer, name in one["transports"].items()} for one in found])
    alone, busy = _lines(found, "alone"), _lines(found, "together")
    links = [
        LinkRow(
            src=src,
            dst=dst,
            transport=found[src]["transports"][str(dst)],
            latency_us=line.latency_s * 1e6,
            gigabytes_per_s=line.bytes_per_s / 1e9,
            busy_latency_us=busy[src, dst].latency_s * 1e6,
            busy_gigabytes_per_s=busy[src, dst].bytes_per_s / 1e9,
        )
        for (src, dst), line in sorted(alone.items())
    ]
    rows = [row for size_bytes in sizes for row in _rows(found, size_bytes, hosts, busy)]
    return LinksReport(hosts=hosts, links=tuple(links), all_reduce=tuple(rows))


def hosts_of(transports: list[dict[int, str]]) -> HostsKey:
    """The ranks of each host: those whom shared memory links."""
    hosts: dict[int, list[int]] = {}
    for rank, links in enumerate(transports):
        first = min([rank, *(peer for peer, transport in links.items() if transport == "shm")])
        hosts.setdefault(first, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def _lines(found: list[Any], what: str) -> dict[tuple[int, int], Line]:
    return {
        (src, dst): fit([Sample(size_bytes=size, seconds=seconds) for size, seconds in samples])
        for one in found
        for src, dst, samples in one[what]
    }


def _rows(found: list[Any], size_bytes: int, hosts: HostsKey, lines: dict[tuple[int, int], Line]) -> list[ReduceRow]:
    numel = max(1, size_bytes // ITEMSIZE)
    default = choose_topology("all_reduce", numel * ITEMSIZE, hosts)
    rows = []
    for name in (*TOPOLOGIES, None):
        if name is None and default in TOPOLOGIES:
            continue
        cost = predict("all_reduce", hosts=hosts, numel=numel, topology=name)
        on_ranks = [
            timed for one in found for size, topology, timed in one["timed"] if (size, topology) == (size_bytes, name)
        ]
        rows.append(
            ReduceRow(
                size_bytes=size_bytes,
                topology=name or default,
                is_default=(name or default) == default,
                predicted_bytes=cost.size_bytes(),
                measured_bytes=sum(timed["size_bytes"] for timed in on_ranks),
                predicted_messages=sum(load.messages for load in cost.between().values()),
                measured_messages=sum(timed["messages"] for timed in on_ranks),
                predicted_s=seconds_of(cost, lines),
                # A round takes as long as on the rank on which it took longest.
                measured_s=median(map(max, zip(*(timed["seconds"] for timed in on_ranks), strict=True))),
            )
        )
    return rows
