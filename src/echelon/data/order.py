"""The order of an epoch's samples: a keyed permutation, computed and never stored: no dataset is too large for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.randomness import derive, order_seed

Ids: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

LARGEST = 2**48

_BLOCK = 4096  # positions computed at a time: 32 KiB, so that every pass stays in the first-level cache
_KEPT = 2  # blocks: a step may straddle two
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Order:
    """The id at every position of every epoch, for `size` samples.

    A Feistel network of R rounds with halves of unequal width (Luby and Rackoff 1988) permutes the numbers of b bits,
    where b = max(1, bit length of size - 1) and R = 16 if b <= 8, else 8: measured, 8 rounds leave the permutations of
    5 to 8 samples unequally likely, and 12 come close. For position p of an epoch, all arithmetic modulo 2**64:

        keys   k[r] = derive(order_seed(seed, epoch), "round", r)                r = 0 .. R - 1
        split  a = b // 2,  c = b - a,  high = p >> c (a bits),  low = p & (2**c - 1) (c bits)
        mix    F(x, k, w):  z = (x + k) * 0xBF58476D1CE4E5B9;  z ^= z >> 32;  z *= 0x94D049BB133111EB;
               the top w bits of z, as a number (0 if w = 0)
        round  r even: high ^= F(low, k[r], a)      r odd: low ^= F(high, k[r], c)
        join   p' = high << c | low

    If p' >= size, the network is applied to p' again until it is below size (cycle walking, Black and Rogaway 2002); as
    size > 2**(b-1), twice on average at most. The first p' below size is the id. (The multipliers: splitmix64's.)
    """

    def __init__(self, size: int, seed: int) -> None:
        assert 1 <= size <= LARGEST, size
        self.size = size
        self._seed = seed
        self._bits = max(1, (size - 1).bit_length())
        self._rounds = 16 if self._bits <= 8 else 8
        self._blocks: OrderedDict[tuple[int, int], Ids] = OrderedDict()
        self._keys: tuple[int, list[np.uint64]] = (-1, [])

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The ids at positions start to stop - 1 of this epoch, in an array of the caller's own."""
        assert 0 <= start <= stop <= self.size, (start, stop, self.size)
        first, last = start // _BLOCK, max(stop - 1, start) // _BLOCK
        if first == last:
            return self._block(epoch, first)[start - first * _BLOCK : stop - first * _BLOCK].copy()
        out = np.empty(stop - start, np.int64)
        for number in range(first, last + 1):
            low, high = max(start, number * _BLOCK), min(stop, (number + 1) * _BLOCK)
            out[low - start : high - start] = self._block(epoch, number)[low - number * _BLOCK : high - number * _BLOCK]
        return out

    def _block(self, epoch: int, number: int) -> Ids:
        block = self._blocks.get((epoch, number))
        if block is None:
            start = number * _BLOCK
            positions = np.arange(start, min(start + _BLOCK, self.size), dtype=np.uint64)
            block = self._permute(positions, self._round_keys(epoch)).view(np.int64)
            self._blocks[epoch, number] = block
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return block

    def _round_keys(self, epoch: int) -> list[np.uint64]:
        if self._keys[0] != epoch:
            key = order_seed(self._seed, epoch)
            self._keys = epoch, [np.uint64(derive(key, "round", r)) for r in range(self._rounds)]
        return self._keys[1]

    def _permute(self, positions: _Words, keys: Sequence[np.uint64]) -> _Words:
        ids = _feistel(positions, self._bits, keys)
        astray = np.flatnonzero(ids >= self.size)
        while astray.size:
            walked = _feistel(ids[astray], self._bits, keys)
            ids[astray] = walked
            astray = astray[walked >= self.size]
        return ids


def _feistel(numbers: _Words, bits: int, keys: Sequence[np.uint64]) -> _Words:
    narrow, wide = bits // 2, bits - bits // 2
    high = numbers >> np.uint64(wide)
    low = numbers & np.uint64(2**wide - 1)
    mixed, shifted = np.empty_like(numbers), np.empty_like(numbers)
    for number, key in enumerate(keys):
        source, target, width = (high, low, wide) if number % 2 else (low, high, narrow)
        if not width:
            continue
        np.add(source, key, out=mixed)
        np.multiply(mixed, _MIX_1, out=mixed)
        np.right_shift(mixed, np.uint64(32), out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.multiply(mixed, _MIX_2, out=mixed)
        np.right_shift(mixed, np.uint64(64 - width), out=mixed)
        np.bitwise_xor(target, mixed, out=target)
    np.left_shift(high, np.uint64(wide), out=high)
    high |= low
    return high
