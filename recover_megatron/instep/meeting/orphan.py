"""A worker whose replica is broken: how it leaves the training, waits without a place, and takes one again.

                 rendezvous                              rendezvous
    PLACED(e) -------------> PLACED(e+1) ...  PLACED(e) ------------> too few replicas: the run ends, exit code 10
        |    ^
        |    '-- an epoch at a boundary puts it into a new replica -------------.
        |  a worker of my own replica is gone (the session's thread sees it in  |
        |  the revoke; or my replica's communication fails, maybe earlier)      |
        v                                                                       |
    SPARE --(joins every epoch without a place: spare.py)-----------------------+--> the run's end

An orphan's main thread may be stuck in a call that nothing wakes, so the session's thread shuts the replica's
connections and starts the thread that joins in the orphan's name.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.errors import InStepError
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.faults import Orphaned
from recover_megatron.instep.hooks import Announcements, Hooks, ProgressReports
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.edges import Edges
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.instep.meeting.spare import LINGER_SECONDS, STUCK_SECONDS, Mirror, Spare
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EXIT_FENCED, EXIT_NO_REPLICA, CoordinatorLost, Fenced

log = get_logger(__name__)

BLAME_SECONDS = 1.0
"""Grace period: how long to wait for the news of a death after my replica's communication failed, before saying so."""


@dataclass(eq=False)
class Orphan:
    """Takes this worker out of its replica when that is broken, has it wait as a spare, and gives it a place again.

    ``revoked`` is called by the session's thread, everything else by the main one.  ``at_launch``: whether this worker
    had a place when the run was launched.
    """

    _session: Session
    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _planner: Planner
    _edges: Edges
    _announcements: Announcements
    at_launch: bool
    _spare: Spare | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    """Whether the training is over for this worker: nothing that is revoked matters any more."""

    @property
    def orphaned(self) -> bool:
        """Whether this worker's replica is known to be broken."""
        with self._assignment.lock:
            return self._spare is not None

    @property
    def spare_seconds(self) -> float:
        """How long this worker has been without a place."""
        with self._assignment.lock:
            return 0.0 if self._spare is None else self._spare.seconds

    # ---- whether to leave

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the present epoch is over, ``Orphaned`` if my replica is broken."""
        self.leave_if_broken()
        self._assignment.epoch_groups.check()

    def stay(self) -> None:
        """Raise ``Orphaned`` if my replica is broken, ``Fenced`` or ``CoordinatorLost`` if this worker is out."""
        self.leave_if_broken()
        self._session.wait_revoked(0)

    def leave_if_broken(self) -> None:
        """Raise ``Orphaned`` if my replica is broken."""
        if self.orphaned or self._lost_of_mine():
            self.leave("a worker of its replica is gone")
            raise Orphaned(f"replica {self._assignment.replica} is broken")

    def _lost_of_mine(self) -> list[int]:
        """Workers of my replica that the run does not count on any more."""
        return self._assignment.lost_mates if self._session.revoked else []

    # ---- leave

    def replica_failed(self, error: BaseException) -> None:
        """My replica's communication failed in the main thread; returns when this worker has become a spare."""
        mine, session = self._assignment, self._session
        epoch = session.epoch
        if self._spare is None and session.epoch == epoch and not session.revoked:
            session.wait_revoked(BLAME_SECONDS)
        if mine.placed and not self._lost_of_mine():
            self._edges.suspect(mine.decision.grid[mine.replica])
        self.leave(f"{type(error).__name__}: {error}"[:500])

    def leave(self, note: str) -> None:
        """Be a spare from now on; ``note`` says why, for the log.  Called by the main thread or the session's."""
        if self.orphaned:
            return
        self._assignment.end(note)
        self._hooks.abort_replica(self._assignment.all_heard_of(self._session.epoch))
        self._be_spare(note)
        self._announcements.leave()

    def _be_spare(self, note: str) -> Spare:
        """Have the spare's thread join from now on; the one that does so already, if there is."""
        with self._assignment.lock:
            if self._spare is not None:
                return self._spare
            status = self._planner.status(at=self._progress.at)
            late = self._assignment.me in self._session.aside
            status = replace(status, replica=None, version=None, ready=False, note=note, aside=late)
            leaving = max(STUCK_SECONDS, self._session.settings.hang_timeout) + self._progress.allowed
            self._spare = Spare(self._planner, self._session, self._assignment.me, status, leaving=leaving)
        self._session.show(None)
        self._session.mark(status.iteration, "spare")
        self._spare.start()
        return self._spare

    # ---- wait

    def wait(self, **offer: Any) -> Decision:
        """In the main thread, out of the training: wait for a place, and return the decision that gives one.

        ``offer``: fields of the status by which it is offered (``version`` and ``digest`` of its state; ``position``
        None: it cannot take a place).  Raises ``OtherPosition`` when it is to build the model of another position,
        ``Drained`` when its node is to be switched off, ``RunOver`` when there will be no place.
        """
        spare = self._spare or self._be_spare("it has no place yet")
        while isinstance(outcome := spare.arrive(**offer), Mirror):
            epoch_groups = self._assignment.look_on(outcome.decision)
            offer = offer | self._hooks.mirror(outcome.decision, epoch_groups)
            epoch_groups.close()
        if isinstance(outcome, InStepError):
            raise outcome
        return outcome

    # ---- come back

    def come_back(self, decision: Decision) -> None:
        """Take up the place that ``decision`` has for this spare: its next decision is the one that all begin now."""
        with self._assignment.lock:
            self._spare = None
        self._announcements.settled()
        self._assignment.take_up(decision)
        if self._assignment.with_newcomers:
            self._progress.begin_anew()
        self._assignment.wait_for_step(None)
        self._progress.at = decision.at - 1

    # ---- in the session's thread

    def revoked(self, epoch: int, reason: str) -> None:
        """An epoch has ended and ``epoch`` is the number of the next; 0: this worker's part in the run has ended."""
        self._planner.why = reason
        epoch_groups, started = self._assignment.present()
        if epoch_groups is not None:
            epoch_groups.end(reason)
        if epoch == 0:
            self._announcements.wake()
        else:
            self._announcements.opened(epoch, self._session.opened_members)
        if self.finished:
            return
        if epoch == 0:
            self._out()
        elif not started and self._session.plan is not None:
            pass  # the run has begun without this worker's main thread, which is about to take up its first plan
        elif not started:
            if self.at_launch and self._session.dead:
                names = ", ".join(map(str, sorted(self._session.dead)))
                log.info(f"worker {names} died before the training began, which needs all workers: {reason}")
                os._exit(EXIT_NO_REPLICA)
        elif lost := self._lost_of_mine():
            self.leave(f"worker {', '.join(map(str, lost))} of its replica is gone")

    def _out(self) -> None:
        """This worker is out; a main thread that is stuck inside its replica must not keep the process."""
        self._hooks.abort_replica(self._assignment.all_heard_of(self._session.epoch))
        code = EXIT_FENCED if self._session.fenced else self._exit_code()
        timer = threading.Timer(LINGER_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()

    def _exit_code(self) -> int:
        try:
            self._session.check()
        except CoordinatorLost as lost:
            return lost.code
        except (EpochRevoked, Fenced):
            pass
        return EXIT_FENCED
