"""A wait that is too long: who is to blame? Ask the others, and blame those that do not answer, or have not called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.comm.collective import Collective
from echelon.comm.frame import Call, Header, Kind
from echelon.comm.operation import Operation
from echelon.errors import PeerLost

if TYPE_CHECKING:
    from echelon.comm.communicator import Communicator

NOT_YET, UNDER_WAY, DONE = range(3)
GRACE_S = 0.5
"""How long those who are asked have to answer."""


class Suspicion:
    """Of one group. `answers` are filled as they arrive, by rank in the group."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.answers: dict[int, int] = {}
        self._judge_at: float | None = None

    def ask(self, operation: Operation) -> None:
        """Ask all members where they are; one that is in another call finds out by this, and says so."""
        self.answers.clear()
        call, seq = (operation.call, operation.seq) if isinstance(operation, Collective) else (Call(), 0)
        for peer in self._communicator.others:
            self._communicator.control(peer, Header(Kind.ASK, call, self._communicator.id, seq))

    def look(self, operation: Operation, now: float) -> None:
        """The bound of an operation has passed. Ask; and when there was time to answer, judge. Who finds nobody silent,
        and nobody who has not called, only waits for a rank that waits itself: it leaves the first word to others.
        """
        if self._judge_at is None:
            self._judge_at = now + GRACE_S
            self.ask(operation)
            return
        all_answered = len(self.answers) == len(self._communicator.others)
        knows_whom = NOT_YET in self.answers.values() if all_answered else now >= self._judge_at
        if knows_whom or now >= self._judge_at + GRACE_S:
            self._judge_at = None
            self._judge(operation)

    def late(self) -> list[int]:
        """The ranks that have not come to what they were asked about, or have not answered."""
        group = self._communicator
        return [group.name_of(peer) for peer in group.others if self.answers.get(peer, NOT_YET) == NOT_YET]

    def _judge(self, operation: Operation) -> None:
        group = self._communicator
        silent = [peer for peer in group.others if peer not in self.answers]
        behind = [peer for peer in group.others if self.answers.get(peer) == NOT_YET]
        awaited = [group.place[member] for member in sorted(operation.awaited())]
        bound = f"the timeout of {operation.timeout_s:g} s"
        if silent:
            peer, why = silent[0], f"it gave no sign of life within {bound}"
        elif behind:
            peer, why = behind[0], f"it is alive and has not called it within {bound}"
        else:
            peer, why = awaited[0] if awaited else group.rank, f"it is alive and did not finish it within {bound}"
        group.fail(PeerLost(group.name_of(peer), f"{operation.name} ({why})"))
