"""Meetings with all other workers, for a worker that has a place: at the start, after a loss, and at a boundary.

leave if the replica is broken --> the old epoch's groups are closed --> Planner.meet --> the worker takes its place
                                                                             '--> no place for this worker: Orphaned

Work that needs workers of all replicas is part of a *decision*: a training step (`step`), or a section (``Sections``),
which is an evaluation, a checkpoint or a barrier of all workers.  All workers take part in the same decisions in the
same order, and number them.  A decision is over when all workers have reported it done (``agree``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.instep.faults import Drained, Orphaned
from recover_megatron.instep.hooks import Announcements, Hooks, ProgressReports
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.edges import why_out
from recover_megatron.instep.meeting.orphan import Orphan
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.membership.io.session import Session


@dataclass(eq=False)
class Rendezvous:
    """Meetings of one worker that has a place; called by its main thread."""

    _session: Session
    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _planner: Planner
    _orphan: Orphan
    _announcements: Announcements

    def meet(self, number: int, **where: Any) -> None:
        """Meet the other workers at decision ``number``, and take this worker's place in the next epoch.

        ``where``: the fields of ``JoinStatus`` for a step, or for the boundary before a step; none for a section.
        Raises ``Orphaned`` if this worker has no place any more, ``Drained`` if its node is drained, ``NoReplica``
        or ``StateLost`` if the run cannot continue, ``Fenced`` and ``CoordinatorLost`` if this worker is out of the
        run.
        """
        self._orphan.leave_if_broken()
        self._assignment.epoch_groups.close()
        self._progress.inject("recovery")
        self._join(self._planner.status(at=number, **where))

    def start(self) -> None:
        """Join the first epoch; from then on the run survives deaths.  Raises as ``meet`` does."""
        self._join(self._planner.status())

    def committed_before_the_end(self, number: int) -> bool:
        """Return whether decision ``number`` was committed before the epoch ended; call it after ``EpochRevoked``.

        Waits until the epoch has ended.  All workers of the epoch get the same answer, since the coordinator sends its
        commits before it ends the epoch.

        If the answer is True, this worker must not join a rendezvous now, because its model-parallel peers continue
        with operations inside the replica, which need this worker.  Raises as ``Orphan.stay`` does.
        """
        self._orphan.leave_if_broken()
        self._planner.ask()  # no effect if the epoch has ended
        self._session.wait_revoked()
        return self._session.committed >= number

    def _join(self, status: JoinStatus) -> None:
        assignment, planner = self._assignment, self._planner
        started, before = time.perf_counter(), assignment.taken_up
        decision, lost = planner.meet(status, "requested by a worker")
        planner.tell_news(before, decision)
        planner.give_up_unless_enough(decision)
        if decision.place(assignment.me) is None:
            if planner.node in decision.draining:
                self._orphan.finished = True
                self._session.leave_idle()
                raise Drained(planner.node)
            reason = why_out(decision, assignment.replica) or "a worker of its replica has no place any more"
            self._orphan.leave(reason)
            raise Orphaned(reason)
        self._announcements.close_repeats()
        assignment.take_up(decision)
        assignment.wait_for_step(decision if decision.step and status.at != decision.at else None)
        self._hooks.planned(decision)
        planner.log(decision, lost, time.perf_counter() - started)


@dataclass(eq=False)
class Boundary:
    """Meetings of one worker at the boundaries before its steps; the main thread calls ``meet_if_wanted``.

    If a plan announces that spares will form replicas, all workers meet before the next step.  The plan of that meeting
    gives the spares places, and the step is their first decision.  ``verify_interval``: iterations between comparisons
    of states (0: no comparisons).  For a comparison all workers meet, and the plan finds workers whose state differs
    from the majority of their column.
    """

    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _rendezvous: Rendezvous
    verify_interval: int
    _verified: int = field(default=0, init=False)
    """Last iteration before which states were compared."""

    def meet_if_wanted(self, prepare: Callable[[], Any]) -> None:
        """Meet the other workers before the next step if a plan or a comparison of states requires it.

        ``prepare`` is called before the meeting, for work that must be done without the joining workers; it may run
        sections.  Raises as ``Rendezvous.meet`` does.
        """
        assignment = self._assignment
        while self._wanted():
            before = assignment.decision
            prepare()
            if assignment.decision is before:
                self._verified = self._hooks.iteration()
                self._rendezvous.meet(self._next, boundary=True, digest=self._hooks.digest())
        assignment.shares.easing = assignment.decision.at == self._next and bool(assignment.decision.holders)

    @property
    def _next(self) -> int:
        return self._progress.at + 1

    def _wanted(self) -> bool:
        decision = self._assignment.decision
        if self._assignment.begun_by_others(self._next):
            return False  # the meeting is postponed to the next boundary
        if decision.at == self._next and decision.version is not None:
            return False  # the epoch was formed for this boundary
        if decision.regroup:
            return True
        return self.verifying and self._verified != self._hooks.iteration()

    @property
    def verifying(self) -> bool:
        """True if states are compared before the step of this iteration."""
        return self.verify_interval > 0 and self._hooks.iteration() % self.verify_interval == 0

    @property
    def joining_next(self) -> bool:
        """True if other workers have begun the next step, or if fresh replicas begin with it (they may have no state
        yet)."""
        decision = self._assignment.decision
        return self._assignment.begun_by_others(self._next) or (decision.at == self._next and bool(decision.fresh))

    @property
    def in_section_of_others(self) -> bool:
        """True if the epoch was formed while other workers were in a section that comes before the next step."""
        decision = self._assignment.decision
        return decision.at == self._next and not decision.step and decision.version is None


class SavedInputs:
    """Copies of tensors that operations of the present section overwrote, so that the section can run again."""

    def __init__(self) -> None:
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forget(self) -> None:
        """Drop all copies; called at the beginning and at the end of a section."""
        self._inputs.clear()

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Copy tensors that an operation will overwrite."""
        self._inputs += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Set the tensors to their values at the beginning of the section, before the section runs again."""
        with torch.no_grad():
            for tensor, copy in reversed(self._inputs):
                tensor.copy_(copy)
        self.forget()


@dataclass(eq=False)
class Sections:
    """Runs one worker's sections, and restarts a section if a worker is lost; called by the main thread."""

    _hooks: Hooks
    _progress: ProgressReports
    _assignment: Assignment
    _orphan: Orphan
    _rendezvous: Rendezvous
    kind: str = field(default="", init=False)
    """Kind of the present section, or of the last one."""
    kept: SavedInputs = field(default_factory=SavedInputs, init=False)
    """Copies of the inputs that operations of the present section overwrote."""

    def run(
        self, kind: str, run: Callable[[], Any], *, reset: Callable[[], None] = lambda: None, together: bool = False
    ) -> Any:
        """Call ``run``, which needs all workers, until a call is not interrupted by a loss; return its result.

        ``reset`` undoes effects of an interrupted ``run``, so that a second call does not double them.  Inputs that
        operations over replicas overwrote are restored from ``kept``.

        ``together``: True if the workers of a replica wait for each other in ``run``, which then must not raise
        ``EpochRevoked``.  All of them call ``run``, even if some of them know that the epoch is over.

        Raises as ``Rendezvous.meet`` does, and what ``run`` raises.
        """
        number = self._progress.begin()
        result = None
        self.kind = kind
        self.kept.forget()
        while True:
            try:
                if together:
                    self._orphan.leave_if_broken()
                else:
                    self._orphan.check()
                result = run()
                # ``run`` may have continued after a failed operation (``Mode.DEFERRED``) before the session received
                # the revoke.  So check the epoch before ``agree``, whose report counts in later epochs, too.
                self._orphan.check()
                if self._assignment.decision.at == number:
                    # The epoch was formed in the middle of this section.  If a worker reported in an earlier epoch that
                    # the section is done, this report still counts.  So the section could be committed while some
                    # worker still runs it again and needs other workers: wait until all workers have run it again.
                    # Once the section is committed, the result of this run counts, even if this worker has not reported
                    # it done.
                    with self._progress.waiting(kind):
                        self._assignment.epoch_groups.any(False, tuple(sorted(self._assignment.live)))
                self._progress.agree(number)
                self.kept.forget()
                return result
            except EpochRevoked:
                if self._rendezvous.committed_before_the_end(number):
                    return result
                self._rendezvous.meet(number)
                if self._assignment.committed(number):  # all workers, including this one, had reported it done
                    return result
                self.kept.restore()
                reset()
                self._hooks.log("again", what=kind)
