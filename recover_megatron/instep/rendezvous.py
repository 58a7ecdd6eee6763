"""How the main thread of a worker with a place meets all others: at the start, after a loss, and at a boundary.

leave, if my replica is broken --> the old epoch's groups are closed --> Planner.meet --> the plan is taken up
                                                                             '--> no place for this worker: Orphaned
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from recover_megatron.instep.announcements import Announcements
from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.instep.edges import why_out
from recover_megatron.instep.errors import Drained, Orphaned
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.orphan import Orphan
from recover_megatron.instep.planner import Planner
from recover_megatron.instep.progress_reports import ProgressReports
from recover_megatron.membership.session import Session


@dataclass(eq=False)
class Rendezvous:
    """Of one worker that has a place; its main thread calls it."""

    _session: Session
    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _planner: Planner
    _orphan: Orphan
    _announcements: Announcements

    def in_step(self, number: int, total: int, ran: Sequence[int]) -> None:
        """As ``meet``, in the middle of step ``number`` of ``total`` microbatches: my replica holds ``ran``."""
        self.meet(self._planner.status(at=number, step=True, total=total, ran=tuple(ran)))

    def in_section(self, number: int) -> None:
        """As ``meet``, in the middle of section ``number``."""
        self.meet(self._planner.status(at=number))

    def before_step(self, number: int, digest: str) -> None:
        """As ``meet``, at the boundary before step ``number``; ``digest``: of this worker's state."""
        self.meet(self._planner.status(at=number, boundary=True, digest=digest))

    def meet(self, status: JoinStatus) -> None:
        """Meet the others and take up the plan of the next epoch.

        Raises ``Orphaned`` when this worker has no place any more, ``Drained`` when its node is to be switched off,
        ``NoReplica`` when nobody has a place, ``Fenced`` and ``CoordinatorLost`` when this worker is out.
        """
        self._orphan.leave_if_broken()
        self._assignment.epoch_groups.close()
        self._progress.inject("recovery")
        self._join(status)

    def start(self) -> None:
        """Join the first epoch: from now on deaths are survived.  Raises as ``meet`` does."""
        self._join(self._planner.status())

    def committed_before_the_end(self, number: int) -> bool:
        """After ``EpochRevoked``: whether decision ``number`` was committed in the epoch that ends.

        All workers of that epoch get the same answer. A worker that repeats a decision which it had reported in an
        earlier epoch must not go to a rendezvous then: its mates go on, into operations inside the replica that need
        it. (A coordinator tells of its commits before it tells of the epoch's end, so at the end they are known.)
        Raises as ``Orphan.stay`` does.
        """
        self._orphan.leave_if_broken()
        self._planner.ask()  # nothing, if the end is known
        self._session.wait_revoked()
        return self._session.committed >= number

    def _join(self, status: JoinStatus) -> None:
        mine, planner = self._assignment, self._planner
        started, before = time.perf_counter(), mine.taken_up
        decision, lost = planner.meet(status, "asked for by a worker")
        planner.tell_news(before, decision)
        planner.give_up_unless_enough(decision)
        if decision.place(mine.me) is None:
            if planner.node in decision.draining:
                self._orphan.finished = True
                self._session.leave_idle()
                raise Drained(planner.node)
            reason = why_out(decision, mine.replica) or "a worker of its replica has no place any more"
            self._orphan.leave(reason)
            raise Orphaned(reason)
        self._announcements.settled()
        mine.take_up(decision)
        mine.wait_for_step(decision if decision.step and status.at != decision.at else None)
        self._hooks.planned(decision)
        planner.log(decision, lost, time.perf_counter() - started)
