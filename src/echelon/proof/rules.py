"""The documented rules of a job, written down a second time: seeds, the order of samples, the cut into slices.

Nothing here shares a line with the machinery that it is compared with; it is scalar, slow and meant to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_64_BITS = 2**64 - 1


def derive(seed: int, *path: int | str) -> int:
    """The 64-bit number for this path below `seed`: 8 bytes of BLAKE2b over the packed parts."""
    hashed = blake2b(digest_size=8)
    for part in (seed, *path):
        if isinstance(part, int):
            hashed.update((part % 2**64).to_bytes(8, "little"))
        else:
            hashed.update(len(part.encode()).to_bytes(8, "little"))
            hashed.update(part.encode())
    return int.from_bytes(hashed.digest(), "little")


def sample_at(position: int, epoch: int, size: int, seed: int) -> int:
    """The sample id at a position of an epoch: a Feistel network over just enough bits, walked until it is in range."""
    bits = max(1, (size - 1).bit_length())
    low_bits = bits - bits // 2
    high_bits = bits // 2
    key = derive(seed, "order", epoch)
    number = position
    while True:
        high, low = number >> low_bits, number & ((1 << low_bits) - 1)
        for turn in range(16 if bits <= 8 else 8):
            turn_key = derive(key, "round", turn)
            if turn % 2 == 0:
                high ^= _mix(low, turn_key, high_bits)
            else:
                low ^= _mix(high, turn_key, low_bits)
        number = (high << low_bits) + low
        if number < size:
            return number


def _mix(value: int, key: int, bits: int) -> int:
    mixed = ((value + key) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed ^= mixed >> 32
    mixed = (mixed * 0x94D049BB133111EB) & _64_BITS
    return mixed >> (64 - bits) if bits else 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One slice of a step, or several neighbouring ones: its (first) index and its sample ids."""

    index: int
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One step: its number (the first is 1), its epoch, whether it is the epoch's last, its slices in order."""

    number: int
    epoch: int
    is_last: bool
    pieces: tuple[Piece, ...]

    @property
    def samples(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)


def steps_per_epoch(size: int, batch: int) -> int:
    return (size + batch - 1) // batch


def lesson(number: int, *, size: int, batch: int, slices: int, seed: int) -> Lesson:
    """What step `number` computes: samples of one epoch only, cut into pieces whose lengths differ by at most one."""
    per_epoch = steps_per_epoch(size, batch)
    epoch, index = (number - 1) // per_epoch, (number - 1) % per_epoch
    begin, end = index * batch, min((index + 1) * batch, size)
    ids = [sample_at(position, epoch, size, seed) for position in range(begin, end)]
    edges = [len(ids) * i // slices for i in range(slices + 1)]
    pieces = tuple(Piece(index=i, ids=tuple(ids[edges[i] : edges[i + 1]])) for i in range(slices))
    return Lesson(number=number, epoch=epoch, is_last=index == per_epoch - 1, pieces=pieces)


def merge(pieces: tuple[Piece, ...], limit: int | None) -> tuple[Piece, ...]:
    """Neighbouring pieces as one, as long as it has at most `limit` samples; empty ones are left out."""
    merged: list[Piece] = []
    for piece in pieces:
        if not piece.ids:
            continue
        if merged and (limit is None or len(merged[-1].ids) + len(piece.ids) <= limit):
            merged[-1] = Piece(index=merged[-1].index, ids=merged[-1].ids + piece.ids)
        else:
            merged.append(piece)
    return tuple(merged)


def steps_to_prove(per_epoch: int, total: int, few: int = 4, near: int = 12) -> int:
    """How many steps verify takes when nobody says: 4, or one more than an epoch if its end is within 12 steps."""
    return min(total, max(few, per_epoch + 1 if per_epoch <= near else few))
