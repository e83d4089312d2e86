"""The memory of one collective on one rank: what is sent from it, and how what comes is put or added there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.comm.arithmetic import Arithmetic, Array
from echelon.comm.program import Action, Form
from echelon.comm.ring import Bytes


@dataclass(slots=True)
class Piece:
    """`given` is what this rank contributes, `result` where the outcome goes; often the same memory. Either may be
    missing where the program never reads or writes it.
    """

    count: int
    given: Array | None
    result: Array | None


class Buffer:
    """Pieces of memory, and beside those of half precision their sums in float32 until they are complete."""

    def __init__(
        self, pieces: Sequence[Piece], arithmetic: Arithmetic | None, itemsize: int, rank: int, ranks: int
    ) -> None:
        self.pieces = pieces
        self._arithmetic = arithmetic
        self._itemsize = itemsize
        self._rank = rank
        self._ranks = ranks
        self._wide: dict[int, Array] = {}

    def _is_wide(self, action: Action) -> bool:
        return action.form is Form.PARTIAL and self._arithmetic is not None and self._arithmetic.wide is not None

    def itemsize(self, action: Action) -> int:
        """Bytes of an element as it travels."""
        return 4 if self._is_wide(action) else self._itemsize

    def source(self, action: Action) -> Bytes | None:
        """The bytes of the piece that is to be sent, as they are now."""
        piece = self.pieces[action.piece]
        if not piece.count:
            return None
        if self._is_wide(action):
            return self._wide[action.piece].view(np.uint8)
        array = piece.result if action.after else piece.given
        assert array is not None
        return array.view(np.uint8)

    def put(self, action: Action, start: int, stop: int, payload: Bytes) -> None:
        """Take the elements `start` to `stop` of a piece."""
        piece = self.pieces[action.piece]
        assert piece.result is not None
        if action.adds:
            self._add(action, piece, start, stop, payload)
        else:
            piece.result.view(np.uint8)[start * self._itemsize : stop * self._itemsize] = payload

    def _add(self, action: Action, piece: Piece, start: int, stop: int, payload: Bytes) -> None:
        arithmetic, result = self._arithmetic, piece.result
        assert arithmetic is not None
        assert result is not None
        before = piece.given if action.first else result
        assert before is not None
        if arithmetic.wide is None:
            mine, brought, out = before[start:stop], payload.view(arithmetic.plain), result[start:stop]
        else:
            out = self._sums(action.piece, piece.count, arithmetic.wide)[start:stop]
            mine = arithmetic.widen(before[start:stop]) if action.first else out
            plain = payload.view(arithmetic.wide if self._is_wide(action) else arithmetic.plain)
            brought = plain if self._is_wide(action) else arithmetic.widen(plain)
        # By rank, so that two ranks which exchange everything compute the very same.
        low, high = (brought, mine) if action.peer < self._rank else (mine, brought)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are values like others, as in torch
            arithmetic.combine(low, high, out=out)
            if action.completes:
                arithmetic.finish(out, self._ranks)
                if arithmetic.wide is not None:
                    arithmetic.narrow(out, result[start:stop])

    def _sums(self, piece: int, count: int, dtype: np.dtype[np.float32]) -> Array:
        sums = self._wide.get(piece)
        if sums is None:
            sums = self._wide[piece] = np.empty(count, dtype)
        return sums
