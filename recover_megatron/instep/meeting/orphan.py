"""Worker with a broken replica: it leaves the training, waits without a place, and later takes a place again.

                 rendezvous                              rendezvous
    PLACED(e) -------------> PLACED(e+1) ...  PLACED(e) ------------> too few replicas: the run ends, exit code 10
        |    ^
        |    '-- an epoch at a boundary gives it a place in a new replica ------.
        |  a worker of its replica is lost: a revoke reports that to the        |
        |  session's thread, or communication inside the replica fails before   |
        v                                                                       |
    SPARE --(joins every epoch without a place: spare.py)-----------------------+--> the run ends

An orphan's main thread may be stuck in a call that waits for a lost worker.  So the session's thread shuts the
connections inside the replica, and starts a thread that joins epochs for the orphan (`spare`).
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
"""Seconds for which a worker waits, after communication in its replica has failed, for the report of a death."""


@dataclass(eq=False)
class Orphan:
    """Takes this worker out of its broken replica, lets it wait as a spare, and gives it a place again.

    The session's thread calls ``revoked``, the main thread all other methods.  ``at_launch``: True if this worker had a
    place when the run was launched.
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
    """True if the training is over for this worker.  Then the worker ignores the end of an epoch."""

    @property
    def orphaned(self) -> bool:
        """True if this worker's replica is known to be broken."""
        with self._assignment.lock:
            return self._spare is not None

    @property
    def spare_seconds(self) -> float:
        """Seconds for which this worker has had no place; 0: it has a place."""
        with self._assignment.lock:
            return 0.0 if self._spare is None else self._spare.seconds

    # ---- whether to leave

    def check(self) -> None:
        """Raise ``Orphaned`` if this worker's replica is broken; ``EpochRevoked`` if the present epoch is over."""
        self.leave_if_broken()
        self._assignment.epoch_groups.check()

    def stay(self) -> None:
        """Raise ``Orphaned`` if the replica is broken, ``Fenced`` or ``CoordinatorLost`` if this worker is out of the
        run."""
        self.leave_if_broken()
        self._session.wait_revoked(0)

    def leave_if_broken(self) -> None:
        """Raise ``Orphaned`` if this worker's replica is broken."""
        if self.orphaned or self._lost_mates():
            self.leave("a worker of its replica is lost")
            raise Orphaned(f"replica {self._assignment.replica} is broken")

    def _lost_mates(self) -> list[int]:
        """Return the lost workers of this worker's replica if the epoch is revoked; else an empty list."""
        return self._assignment.lost_mates if self._session.revoked else []

    # ---- leave

    def replica_failed(self, error: BaseException) -> None:
        """Become a spare, because communication inside the replica failed with ``error`` in the main thread."""
        assignment, session = self._assignment, self._session
        epoch = session.epoch
        if self._spare is None and session.epoch == epoch and not session.revoked:
            session.wait_revoked(BLAME_SECONDS)
        if assignment.placed and not self._lost_mates():
            self._edges.suspect(assignment.decision.grid[assignment.replica])
        self.leave(f"{type(error).__name__}: {error}"[:500])

    def leave(self, note: str) -> None:
        """Become a spare; ``note``: the reason, for the log.  Called by the main thread or the session's thread."""
        if self.orphaned:
            return
        self._assignment.end(note)
        self._hooks.abort_replica(self._assignment.all_heard_of(self._session.epoch))
        self._be_spare(note)
        self._announcements.leave()

    def _be_spare(self, note: str) -> Spare:
        """Return the running ``Spare``, or start one."""
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
        """Wait until a plan gives this worker a place; return this plan.

        Called by the main thread, outside the training.

        ``offer``: fields of ``JoinStatus``: ``version`` and ``digest`` of this worker's state; ``position=None`` if
        this worker can take no place.  Raises ``OtherPosition`` if it must build the model of another position,
        ``Drained`` if its node is drained, ``RunOver`` if it will get no place.
        """
        spare = self._spare or self._be_spare("it has no place yet")
        while isinstance(outcome := spare.arrive(**offer), Mirror):
            epoch_groups = self._assignment.open_mirror_groups(outcome.decision)
            offer = offer | self._hooks.mirror(outcome.decision, epoch_groups)
            epoch_groups.close()
        if isinstance(outcome, InStepError):
            raise outcome
        return outcome

    # ---- come back

    def come_back(self, decision: Decision) -> None:
        """Take this spare's place in ``decision``, and continue with decision number ``decision.at``."""
        with self._assignment.lock:
            self._spare = None
        self._announcements.close_repeats()
        self._assignment.take_up(decision)
        if self._assignment.with_newcomers:
            self._progress.allow_first_decision()
        self._assignment.wait_for_step(None)
        self._progress.at = decision.at - 1

    # ---- in the session's thread

    def revoked(self, epoch: int, reason: str) -> None:
        """End the present groups.  ``epoch``: the rendezvous that was opened; 0 if this worker is out of the run."""
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
            pass  # the run has begun: the main thread is about to take its place in the first plan
        elif not started:
            if self.at_launch and self._session.dead:
                names = ", ".join(map(str, sorted(self._session.dead)))
                log.info(f"worker {names} died before the training, which cannot begin without all workers: {reason}")
                os._exit(EXIT_NO_REPLICA)
        elif lost := self._lost_mates():
            self.leave(f"worker {', '.join(map(str, lost))} of its replica is lost")

    def _out(self) -> None:
        """Make this process exit, even if its main thread is stuck, because this worker is out of the run."""
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
