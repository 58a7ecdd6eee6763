"""A spare: a live worker without a place.  Its thread joins every epoch in its name, so that no worker waits for it.

    orphaned --> JOINING --plan--> IDLE --revoked, or a new status to report--> JOINING ...
                    |
                    |--the plan gives it a place-------------> Decision        the main thread takes it
                    |--the plan needs it in another position-> OtherPosition   the main thread builds another model
                    |--the plan makes it mirror a state------> Mirror          the main thread copies that state
                    |--the run ends, it is evicted, or its
                    |  flags differ from the run's-----------> RunOver         the main thread terminates the process
                    |--its node is drained-------------------> Drained         the same, and the run continues
                    '--the main thread does not come----------> the process exits: a stuck worker helps no other

The main thread may still be leaving the training, by the plan in which it had a place, or be stuck for good.  Until it
has arrived (``arrive``) the spare is not ready, and receives nothing except the end of the run.  How long it may take
depends on its task (``_back_by``): to leave the training, ``STUCK_SECONDS`` or the hang timeout, plus the allowance of
its last mark; to build a model, ``BUILD_SECONDS``; to mirror a state, as long as the epoch lasts, whose end ends that,
then ``STUCK_SECONDS``.
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
"""Seconds that a worker out of the run, or whose run has ended, waits for its main thread before it exits."""
GRACE_SECONDS = 0.25
"""Seconds that a join waits for a main thread that is about to arrive: it saves an epoch."""
STUCK_SECONDS = 60.0
"""Seconds after which a main thread that nothing keeps from arriving counts as stuck for good."""
BUILD_SECONDS = 3600.0
"""Seconds after which a main thread that builds a model counts as stuck."""


@dataclass(frozen=True)
class Mirror:
    """Task to mirror the state of a worker of the last replica, as long as the epoch lasts."""

    decision: Decision


Outcome = Decision | Mirror | OtherPosition | RunOver
"""Result of waiting as a spare: a place by this decision, a state to mirror, or the reason to wait no longer."""


class Spare:
    """Spare of worker ``me``.  ``status``: joins with it until its main thread arrives, within ``leaving`` seconds."""

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
        """True if the main thread waits."""
        self._grace = GRACE_SECONDS
        self._last: Decision | None = None
        """The last epoch's decision that had no place for this worker."""
        self._back_by: float | None = time.monotonic() + leaving
        """Time at which a main thread that has not arrived counts as stuck; None: not while the epoch lasts."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="spare", daemon=True).start()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def arrive(self, **offer: object) -> Outcome:
        """Offer this worker, in the main thread, with these fields of ``JoinStatus``, and wait.

        Returns when the run needs this worker, or is over.  After ``OtherPosition`` and ``Mirror`` the spare's thread
        keeps joining, as not ready, until this is called again.
        """
        with self._changed:
            self._status = self._with({"ready": True, "building": False, **offer})
            self._here, self._grace = True, GRACE_SECONDS
            self._changed.notify_all()
        if self._is_news(self._last):
            with suppress(CoordinatorLost, Fenced):  # the spare's thread gets this error, too, and returns the outcome
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
        """Return the status with these fields; an iteration only if it is newer, and of the present timeline.

        The worker became a spare while its main thread may have been about to begin the iteration in which it was lost
        to the others.
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
        """Take part in one epoch; return this worker's outcome, if it has one."""
        me, planner, session = self._me, self._planner, self._session
        with self._changed:
            self._changed.wait_for(lambda: self._here, self._grace)
            sent, was_here = self._status, self._here
            if self._back_by is None:  # the epoch for which it kept a state is over
                self._back_by = time.monotonic() + STUCK_SECONDS
        timeline = planner.timeline
        decision, _ = planner.meet(sent, f"worker {me} is a spare: {sent.note}")
        with self._changed:
            news = self._here and not was_here
            # If no other worker is left, this one writes the failure report: it remembers what the others reported.
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
                    return RunOver(1, "its main thread did not return from its last task in time")
        return None

    def _is_news(self, decision: Decision | None) -> bool:
        """Return whether an epoch might use the fact that this worker is ready; else the next one learns it anyway."""
        return decision is None or self._status.position is None or not self._planner.has_all_replicas(decision)

    def _patience(self, decision: Decision) -> float | None:
        """Return the seconds to wait for the next epoch; None: no limit."""
        if decision.short:
            return max(0.0, self._planner.patience())
        by = self._back_by
        return None if self._here or by is None else max(0.0, by - time.monotonic())

    def _let_them_begin(self) -> None:
        """Wait until the first step of the present epoch's fresh replicas is committed, or the epoch is over anyway."""
        last = self._last
        if last is not None and last.fresh:
            with suppress(EpochRevoked):
                self._session.wait_committed(last.at, last.epoch)

    def _have(self, task: OtherPosition | Mirror, **fields: object) -> None:
        """Give the main thread a task; until it has arrived again, this worker cannot take a place."""
        with self._changed:
            self._status = replace(self._status, ready=False, **fields)  # type: ignore[arg-type]
            self._outcome = task
            self._here = False
            self._changed.notify_all()
