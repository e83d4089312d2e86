"""Random operations as data: what every rank draws alike from a seed, and what each must then end with.

What a rank brings into an operation is a pure function of (its number, the rank), so every rank computes for itself
what must come out. Values are small integers, whose sums and products every type holds exactly: equality is exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PERIOD = 4093
"""Values repeat after so many elements: prime, so that no frame, piece or row begins where another does."""

TOPOLOGIES = (None, "direct", "ring", "tree", "star", "hier")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
MOVED_ONLY = (torch.float8_e4m3fn,)
KINDS = (
    *("all_reduce", "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "objects"),
    *(
        "all_gather",
        "all_gather_single",
        "all_gather_coalesced",
        "gather",
        "scatter",
        "all_to_all",
        "all_to_all_single",
    ),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_coalesced", "tagged", "anyone", "batch"),
)
REDUCING = tuple(kind for kind in KINDS if "reduce" in kind)
ROWS = ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter")
"""Kinds, and beginnings of kinds, that move a row for each rank."""
EDGES_BYTES = (0, 1, 8, 1000, 32 << 10, 64 << 10, (64 << 10) + 16, 256 << 10, (256 << 10) + 16, 1 << 20, 3 << 20)
"""Where the backend changes its ways: another topology, a question before sending, another frame."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """A group to make: its ranks, and the topology of its collectives."""

    ranks: tuple[int, ...]
    topology: str | None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """`group` is an index into the groups; `numel` the elements of one row where there are several."""

    number: int
    kind: str
    group: int
    root: int
    dtype: torch.dtype
    numel: int
    reduction: str
    strided: bool


def draw_groups(dice: random.Random, ranks: int) -> list[Members]:
    """One of all ranks for each topology, and three of some."""
    everyone = tuple(range(ranks))
    some = [tuple(sorted(dice.sample(everyone, dice.randint(1, ranks)))) for _ in range(3)]
    return [Members(ranks=everyone, topology=topology) for topology in TOPOLOGIES] + [
        Members(ranks=members, topology=dice.choice(TOPOLOGIES)) for members in some
    ]


def draw_operations(seed: int, ranks: int, count: int, largest_bytes: int) -> tuple[list[Members], list[Operation]]:
    """`count` operations; one in a hundred is of the largest size."""
    dice = random.Random(f"{seed}/{ranks}")
    groups = draw_groups(dice, ranks)
    return groups, [_draw_operation(dice, number, groups, largest_bytes) for number in range(count)]


def _draw_operation(dice: random.Random, number: int, groups: Sequence[Members], largest_bytes: int) -> Operation:
    # What is chosen when nobody says which topology is what most programs run.
    group = dice.choices(range(len(groups)), [4 if one.topology is None else 1 for one in groups])[0]
    size = len(groups[group].ranks)
    kind = dice.choice(KINDS)
    reduces = kind in REDUCING
    dtype = dice.choice(WHOLE + FLOATING + COMPLEX + (() if reduces else MOVED_ONLY))
    draw = dice.random()
    size_bytes = largest_bytes if draw < 0.01 else dice.choice(EDGES_BYTES) if draw < 0.4 else 2 ** dice.uniform(0, 20)
    rows = size if kind.startswith(ROWS) else 1
    return Operation(
        number=number,
        kind=kind,
        group=group,
        root=dice.randrange(size),
        dtype=dtype,
        numel=int(min(size_bytes, largest_bytes)) // dtype.itemsize // rows,
        reduction=dice.choice(reductions_of(dtype)) if reduces else "sum",
        strided=dice.random() < 0.3,
    )


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("sum", "product", "min", "max", "band", "bor", "bxor")
    if dtype in WHOLE:
        return ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    return ("sum", "avg") if dtype in COMPLEX else ("sum", "avg", "product", "min", "max")


def pattern(number: int, rank: int, dtype: torch.dtype, part: int = 0) -> Tensor:
    """The values of one period: from 0 to 3, which four ranks multiply to 81 at most, or around zero where it fits."""
    generator = torch.Generator().manual_seed((number * 64 + rank) * 64 + part)
    values = torch.randint(0, 4, (PERIOD,), generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double() - 1, torch.roll(values, 1).double() - 2).to(dtype)
    return (values - 1 if dtype.is_signed and dtype not in MOVED_ONLY else values).to(dtype)


def reduce_patterns(patterns: Sequence[Tensor], reduction: str) -> Tensor:
    """What a reduction of these gives, in their type."""
    dtype = patterns[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack(patterns).to(wide)
    match reduction:
        case "sum":
            total = stacked.sum(0)
        case "product":
            total = stacked.prod(0)
        case "min":
            total = stacked.amin(0)
        case "max":
            total = stacked.amax(0)
        case "avg" if dtype.is_complex:
            parts = torch.view_as_real(stacked.sum(0).to(dtype)) / len(patterns)
            total = torch.view_as_complex(parts)
        case "avg" if dtype.is_floating_point:
            # Divided in the type in which it was summed, rounded to its own after that.
            summed = torch.float64 if dtype == torch.float64 else torch.float32
            total = stacked.sum(0).to(summed) / len(patterns)
        case "avg":
            total = stacked.sum(0).div(len(patterns), rounding_mode="floor")
        case bitwise:
            combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[bitwise]
            total = stacked[0]
            for other in stacked[1:]:
                total = combine(total, other)
    return total.to(dtype)


def tile(values: Tensor, numel: int) -> Tensor:
    """A pattern repeated to a length."""
    bits = values.view(torch.uint8) if values.dtype in MOVED_ONLY else values
    return bits.repeat(numel // PERIOD + 1)[:numel].view(values.dtype)
