"""Spare: a live worker without a place.  A thread joins every epoch for the spare, so that no worker waits for the
spare.

    orphaned --> JOINING --plan--> IDLE --epoch revoked, or a new status to report--> JOINING ...
                    |
                    |--the plan gives it a place-------------> Decision        the main thread takes it
                    |--the plan needs it in another position-> OtherPosition   the main thread builds another model
                    |--the plan makes it mirror a state------> Mirror          the main thread copies that state
                    |--the run ends, the spare is evicted, or
                    |  its flags differ from the run's-------> RunOver         the main thread terminates the process
                    |--the spare's node is drained-----------> Drained         the same, but the run continues
                    '--the main thread does not arrive in time-----> the process exits: a stuck worker is of no use

The main thread may still be leaving the training, or be stuck.  Until it calls ``arrive`` the spare is not ready, and
gets no task and no place.  The time limit depends on what the main thread does (``_back_by``).  To leave the training:
the longer of ``STUCK_SECONDS`` and the hang timeout, plus the allowance of the last mark.  To build a model:
``BUILD_SECONDS``.  To mirror a state: until the epoch ends, plus ``STUCK_SECONDS``.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.instep.faults import Drained, NoReplica, OtherFlags, OtherPosition, RunOver, StateLost
from recover_megatron.instep.meeting.losses import READY
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EXIT_FENCED, CoordinatorLost, EpochRevoked, Fenced

log = get_logger(__name__)

LINGER_SECONDS = 10.0
"""Seconds for which a worker that is out of the run waits for its main thread before the process exits."""
GRACE_SECONDS = 0.25
"""Seconds for which a spare waits for its main thread before it joins an epoch.  If the main thread arrives later,
another epoch may be needed."""
STUCK_SECONDS = 60.0
"""Seconds after which a main thread without a task counts as stuck if it has not called ``arrive``."""
BUILD_SECONDS = 3600.0
"""Seconds after which a main thread that builds a model counts as stuck."""


@dataclass(frozen=True)
class Mirror:
    """Task of a spare: mirror the state of a worker of the last replica until the epoch of ``decision`` ends."""

    decision: Decision


Outcome = Decision | Mirror | OtherPosition | RunOver
"""Result of a spare's wait: a task, the reason why the spare must exit, or the decision that gives it a place."""


class Spare:
    """Worker ``me`` as a spare, for which a thread joins epochs.

    ``status``: status of the spare until the main thread arrives.  ``leaving``: seconds within which the main thread
    must arrive.
    """

    def __init__(
        self, planner: Planner, session: Session, me: int, status: JoinStatus, *, leaving: float = STUCK_SECONDS
    ) -> None:
        self._planner = planner
        self._session = session
        self._me = me
        self._status = status
        self._since = time.perf_counter()
        self._outcome: Outcome | None = None
        self._changed = threading.Condition()
        self._here = False
        """True while the main thread waits in ``arrive``."""
        self._grace = GRACE_SECONDS
        self._last: Decision | None = None
        """The last decision in which this spare got no place; None: no decision was made yet."""
        self._back_by: float | None = time.monotonic() + leaving
        """Time (``time.monotonic``) at which a main thread that has not arrived counts as stuck; None: no limit in this
        epoch."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="spare", daemon=True).start()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def arrive(self, **offer: object) -> Outcome:
        """Report this spare as ready, and wait until the run needs it or is over; called by the main thread.

        ``offer``: changed fields of the spare's status.  After ``OtherPosition`` and ``Mirror`` the spare's thread
        continues to join epochs, as not ready, until the main thread calls this method again.
        """
        with self._changed:
            self._status = self._with({"ready": True, "building": False, **offer})
            self._here, self._grace = True, GRACE_SECONDS
            self._changed.notify_all()
        if self._is_news(self._last):
            with suppress(CoordinatorLost, Fenced):  # the spare's thread gets this error, too, and sets the outcome
                self._let_them_begin()
                self._session.ask(f"worker {self._me} {READY}")
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None)
            outcome = self._outcome
            if isinstance(outcome, (OtherPosition, Mirror)):
                self._outcome = None
        assert outcome is not None
        return outcome

    def _with(self, fields: dict[str, Any]) -> JoinStatus:
        """Return the status with changed ``fields``.

        ``iteration`` is replaced only by a newer iteration of the present timeline.  The main thread passes a newer one
        if it has begun another iteration since the status was created.
        """
        status = replace(self._status, **{name: value for name, value in fields.items() if name != "iteration"})
        same = status.state_of == self._planner.timeline[0]
        return replace(status, iteration=max(status.iteration, fields.get("iteration", 0) if same else 0))

    def _run(self) -> None:
        outcome: Outcome | None = None
        try:
            while outcome is None:
                outcome = self._take_part()
        except (OtherFlags, NoReplica, StateLost, CoordinatorLost) as end:
            outcome = RunOver(end.code, str(end))
            if isinstance(end, OtherFlags):
                self._session.leave_idle()
        except Fenced as fenced:
            outcome = RunOver(EXIT_FENCED, str(fenced))
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()
            here = self._changed.wait_for(lambda: self._here, LINGER_SECONDS)
        if isinstance(outcome, RunOver) and not here:
            log.info(f"worker {self._me} ends: {outcome}")
            os._exit(outcome.code)

    def _take_part(self) -> Outcome | None:
        """Join one epoch and wait for its end; return the outcome if the spare's thread must stop, else None."""
        me, planner, session = self._me, self._planner, self._session
        with self._changed:
            self._changed.wait_for(lambda: self._here, self._grace)
            sent, was_here = self._status, self._here
            if self._back_by is None:  # the main thread mirrored a state in the last epoch
                self._back_by = time.monotonic() + STUCK_SECONDS
        timeline = planner.timeline
        decision, _ = planner.meet(sent, f"worker {me} is a spare: {sent.note}")
        with self._changed:
            news = self._here and not was_here
            # Keep facts that other workers reported: if only this worker is left, it writes the failure report.
            self._status = replace(
                self._status,
                at=max(self._status.at, decision.at),
                iteration=max(decision.iteration, self._status.iteration if decision.timeline == timeline else 0),
                checkpoint=decision.checkpoint,
            )
        if decision.place(me) is not None:
            return decision
        if planner.node in decision.draining:
            session.leave_idle()
            return Drained(planner.node)
        if not decision.replicas and planner.finished:
            session.leave()
            return RunOver(0, "the training is over")
        planner.give_up_unless_enough(decision)
        self._last = decision
        session.idle(vacant=not decision.replicas)
        if sent.ready and me in decision.rebuild:
            position = decision.rebuild[me]
            self._back_by, self._grace = time.monotonic() + BUILD_SECONDS, 0.0
            self._have(OtherPosition(position), position=position, version=None, digest="", building=True)
        elif sent.ready and me in decision.mirrors:
            self._back_by = None
            self._have(Mirror(decision))
        if news and self._is_news(decision):
            self._let_them_begin()
            return None
        while not session.wait_revoked(self._patience(decision)):
            planner.give_up_unless_enough(decision)
            with self._changed:
                if not self._here:
                    return RunOver(1, "its main thread did not finish its last task in time")
        return None

    def _is_news(self, decision: Decision | None) -> bool:
        """Return whether a new epoch could give this ready spare a task or a place; otherwise no epoch is requested."""
        return decision is None or self._status.position is None or not self._planner.has_all_replicas(decision)

    def _patience(self, decision: Decision) -> float | None:
        """Return how many seconds to wait for the next epoch; None: no limit."""
        if decision.short:
            return max(0.0, self._planner.patience())
        by = self._back_by
        return None if self._here or by is None else max(0.0, by - time.monotonic())

    def _let_them_begin(self) -> None:
        """Wait until the fresh replicas of the present epoch have committed their first step, or the epoch is over.

        A request for a new epoch before this commit would interrupt the step.
        """
        last = self._last
        if last is not None and last.fresh:
            with suppress(EpochRevoked):
                self._session.wait_committed(last.at, last.epoch)

    def _have(self, task: OtherPosition | Mirror, **fields: object) -> None:
        """Give the main thread a task; until the main thread calls ``arrive`` again, this spare can take no place."""
        with self._changed:
            self._status = replace(self._status, ready=False, **fields)  # type: ignore[arg-type]
            self._outcome = task
            self._here = False
            self._changed.notify_all()
