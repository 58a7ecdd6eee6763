"""Joins epochs for one worker, and computes their decisions; used by the main thread and by a spare's thread.

    status (place, state, unreachable workers) --Session.join--> the statuses of all --decide--> Decision

The planner also decides whether the run can continue.  All workers get the same statuses, so all reach the same
decision.

Each worker reports digests of its flags and of its program (`comparison`).  The planner compares these digests before
it computes the decision, since workers with different flags may use different rules:

    a newcomer's digests differ             the newcomer requests the run's values from another worker, logs the
                                            differences, and exits
    a launched worker's digests differ      the run does not begin: all workers exit, and log the differences
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from recover_megatron.collectives.comparison import ASKED_SECONDS, ComparedStatus, OwnDescription, odd_ones
from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import (
    Beyond,
    Checkpoint,
    Decision,
    Failure,
    JoinStatus,
    Rules,
    Timeline,
    merged,
)
from recover_megatron.instep.faults import EXIT_REFUSED, NoReplica, OtherFlags, StateLost
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.edges import MOST, Edges, explanation, news
from recover_megatron.instep.meeting.losses import Failures
from recover_megatron.instep.meeting.members import finished_of, room
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EXIT_LOST_MAJORITY, CoordinatorLost
from recover_megatron.workload.grid import Slot

log = get_logger(__name__)

REPLACED_SECONDS = 300.0
"""Seconds for which live workers that are too few for a replica wait for replacements, to go back to a checkpoint or a
snapshot; then the run ends."""


@dataclass(eq=False)
class Planner:
    """Joins epochs for one worker, and remembers facts of the last epoch.  Used by one thread at a time.

    ``node``, ``domains``, ``device``, ``peer_store``, and the contents of ``snapshots`` become part of the worker's
    status.
    """

    _session: Session
    _hooks: Hooks
    _assignment: Assignment
    _edges: Edges
    _rules: Rules
    node: str
    domains: Sequence[str]
    device: int | None
    peer_store: str
    snapshots: SnapshotStore
    own: OwnDescription = field(default_factory=lambda: OwnDescription({}, {}, None, b""))
    _statuses: dict[int, JoinStatus] = field(default_factory=dict, init=False)
    _explained: str = field(default="", init=False)
    timeline: Timeline = field(default=(0, 0), init=False)
    """Timeline of the last epoch that this worker has joined."""
    _same_as: int = field(default=-1, init=False)
    """Value of ``Decision.same_as`` in the last epoch's decision."""
    _draining: tuple[str, ...] = field(default=(), init=False)
    """Nodes that the last epoch has decided to drain."""
    _undone: int = field(default=0, init=False)
    """Value of ``JoinStatus.undone`` for this worker's next status; 0: no rollback is pending."""
    _undone_until: int = field(default=0, init=False)
    """Number of the last epoch's first decision; when it is committed, a pending rollback has been carried out."""
    _left: frozenset[int] = field(default=frozenset(), init=False)
    finished: bool = field(default=False, init=False)
    """True if some worker has left because the training was over; workers on drained nodes do not count."""
    _checkpoints: tuple[Checkpoint, ...] = field(default=(), init=False)
    """Checkpoints that the members of the last epoch knew."""
    _short_since: float | None = field(default=None, init=False)
    """Time (``time.monotonic``) at which live workers became too few for a rollback; None: they are enough."""
    why: str = field(default="", init=False)
    """Reason why the last epoch ended, as the coordinator reported it."""
    lost: Failure | None = field(default=None, init=False)
    """Workers found missing when this worker joined its last epoch; None: no worker was missing."""

    def __post_init__(self) -> None:
        self.losses = Failures(self._assignment.grid)

    def status(self, **fields: Any) -> JoinStatus:
        """Return the status with which this worker joins an epoch; ``fields`` are added, or replace known fields."""
        hooks, assignment = self._hooks, self._assignment
        known = {
            "position": assignment.position,
            "version": hooks.version(),
            "state_of": hooks.state_of(),
            "last_step": hooks.last_step(),
            "node": self.node,
            "domains": self.domains,
            "device": self.device,
            "peer_store": self.peer_store,
            "pace": assignment.shares.balance.paces.get(assignment.replica, 0.0),
            **fields,
        }
        return JoinStatus(assignment.replica, iteration=hooks.iteration(), checkpoint=hooks.last_checkpoint(), **known)

    def meet(self, status: JoinStatus, reason: str) -> tuple[Decision, Failure | None]:
        """Join the next epoch with ``status``; return the epoch's decision, and the workers found missing, if any.

        ``reason``: why this worker asks for an epoch, used if no other worker has asked before.  Raises ``Fenced``,
        ``CoordinatorLost``, ``Disagreement``, and ``OtherFlags`` if this worker was started with other flags than the
        run, or runs another program.
        """
        assignment = self._assignment
        kept, unreadable = self._hooks.checkpoints()
        if self._session.committed >= self._undone_until:
            self._undone = 0
        status = replace(
            status,
            unreached=self._edges.look(status.at, lambda: self._session.opened_members),
            timeline=self.timeline,
            same_as=self._same_as,
            undone=self._undone,
            checkpoints=merged(kept, self._checkpoints),
            unreadable=tuple(unreadable),
            draining=self._draining,
            flags=self.own.given,
            code=self.own.code,
            **self.snapshots.join_status(),
        )
        plan = self._session.join(status.to_json(), reason)
        statuses = self._of_the_same_program({int(worker): sent for worker, sent in plan.data["statuses"].items()})
        asked = [str(node) for node in plan.data.get("drain", ())]
        seen = max((last["iteration"] for last in plan.data.get("lost", {}).values()), default=0)
        beyond = Beyond(plan.committed, seen, bool(plan.data.get("aside")))
        decision = decide(plan.epoch, statuses, assignment.grid, self._rules, asked, beyond)
        self.timeline, self._checkpoints = decision.timeline, decision.checkpoints
        self._same_as = decision.same_as
        newly, self._left = self._session.left - self._left, self._session.left
        self.finished |= bool(finished_of(newly, self._statuses, {*self._draining, *decision.draining}))
        self._draining = decision.draining
        self._undone, self._undone_until = decision.undone, decision.at
        if assignment.me == min(decision.workers or statuses):
            for node in sorted({*asked, *decision.undrained}):
                self._session.answer_drain(node, decision.undrained.get(node, ""))
        self.snapshots.follow(decision)
        self._edges.record(decision, statuses, plan.committed)
        self._statuses = statuses
        note = explanation(decision, assignment.me, assignment.replica if assignment.placed else None, self._explained)
        if note != self._explained:
            self._explained = note
            self._session.note(note)
        with assignment.lock:
            assignment.committed_by_plan = plan.committed
            left = self._session.left
            self.lost = self.losses.note(decision, assignment.taken_up, statuses, plan.data.get("lost", {}), left)
            return decision, self.lost

    def _of_the_same_program(self, joined: Mapping[int, Any]) -> dict[int, JoinStatus]:
        """Return the statuses of all workers whose flags are those of the run.

        A worker without a place is left out if its flags differ, or if its status cannot be read.  If this worker has
        no place, and its flags or its program differ, raises ``OtherFlags``.  If a worker with a place differs, ends
        the run for all workers, with ``EXIT_REFUSED``.
        """
        me, session = self._assignment.me, self._session
        known = {
            worker: ComparedStatus.of(status, "replica", "version", "peer_store") for worker, status in joined.items()
        }
        odd = odd_ones(known)
        placed = sorted(worker for worker in odd.workers if known[worker].placed)
        different = self.own.different(me, known, odd)
        if different and not known[me].placed:
            raise OtherFlags(f"it {different}")
        if different:
            session.give_up(EXIT_REFUSED, f"worker {me} on node {self.node} {different}")
        elif placed:
            session.wait_revoked(2 * ASKED_SECONDS)  # let the worker with different flags report the differences first
            session.give_up(EXIT_REFUSED, f"the flags of worker {placed[0]} differ from those of worker {odd.model}")
        if different or placed:
            session.wait_revoked()
            session.check()
        statuses = {}
        for worker, status in joined.items():
            try:
                if worker not in odd.workers:
                    statuses[worker] = JoinStatus.from_json(status)
            except Disagreement:
                if known[worker].placed:
                    raise
        return statuses

    def tell_news(self, before: Decision | None, decision: Decision) -> None:
        """If no worker died, log why a new epoch has begun; only the lowest worker with a place logs the reason."""
        if self._assignment.me == min(decision.workers, default=self._assignment.me):
            for line in news(before, decision, self._statuses, self._edges.tries, self.why):
                log.info(line)

    def log(self, decision: Decision, lost: Failure | None, seconds: float) -> None:
        """Log the event ``plan``.  ``lost``: workers found missing.  ``seconds``: duration of the meeting."""
        self._hooks.log(
            "plan",
            epoch=decision.epoch,
            replicas=list(decision.replicas),
            spares=list(decision.spares),
            lost_workers=lost.workers if lost else [],
            lost=[asdict(worker) for worker in lost.lost] if lost else [],
            lost_replicas=list(lost.replicas) if lost else [],
            grid={str(replica): list(workers) for replica, workers in decision.grid.items()},
            fresh=list(decision.fresh),
            repaired=list(decision.repaired),
            rollback=None if decision.rollback is None else asdict(decision.rollback),
            disputed=list(decision.disputed),
            broken=[list(pair) for pair in sorted(decision.broken)],
            draining=list(decision.draining),
            undrained=dict(decision.undrained),
            leaving=sorted(decision.leaving),
            left_out={str(replica): [list(pair) for pair in edges] for replica, edges in decision.left_out.items()},
            seconds={"rendezvous": round(seconds, 6)},
            **self._hooks.describe(decision),
        )

    # ---- why an epoch must end

    def ask(self) -> None:
        """Ask the coordinator for the next epoch, and report why, if this worker knows it; no effect if the epoch is
        over."""
        assignment = self._assignment
        lost = assignment.epoch_groups.lost
        if lost is None:
            self._session.ask("an operation of the epoch has failed", None)
            return
        worker = None if lost.peer is None else assignment.occupants.get(Slot(lost.peer))
        if worker is not None and lost.unreachable:
            self._edges.noticed(worker)
        elif lost.unreachable:
            self._edges.suspect(assignment.decision.workers)
        self._session.ask(str(lost) + ("" if worker is None else f" (with worker {worker})"), worker)

    # ---- why the run must end

    def give_up_unless_enough(self, decision: Decision) -> None:
        """Terminate the run for all workers if it cannot continue; return if it can, or may wait for replacements.

        Raises ``NoReplica`` or ``StateLost``, which name the lost workers, if too few replicas are left or the state is
        lost; ``CoordinatorLost`` if the run makes no progress (``MOST`` repeated epochs at one decision).
        """
        if self._edges.tries >= MOST:
            reason = f"{self._edges.tries + 1} epochs at one decision without a loss; the last epoch ended: {self.why}"
            self._session.give_up(EXIT_LOST_MAJORITY, reason)
            raise CoordinatorLost(reason, EXIT_LOST_MAJORITY)
        if decision.enough >= self._rules.min_replicas:
            self._short_since = None
            return
        if decision.short and self.patience() > 0:
            return
        self._end(decision)

    def has_all_replicas(self, decision: Decision) -> bool:
        """Return whether there are at least as many replicas as at launch, and the spares cannot form another."""
        return not room(len(decision.replicas), len(decision.spares), self._assignment.grid, self._rules.spares)

    @property
    def can_go_back(self) -> bool:
        """True if a checkpoint or snapshot exists to which the run could go back if its state were lost."""
        if self.snapshots.newest is not None:
            return True
        kept, unreadable = self._hooks.checkpoints()
        return any(iteration not in unreadable for iteration, _ in merged(kept, self._checkpoints))

    def patience(self) -> float:
        """Return how many seconds remain to wait for the workers that a rollback needs; 0 or less: stop waiting."""
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
            log.info(
                f"worker {self._assignment.me} waits up to {REPLACED_SECONDS:.0f} s for other workers: the live "
                "workers are too few for a replica; when enough have joined, all go back to a checkpoint or a snapshot"
            )
        return self._short_since + REPLACED_SECONDS - now

    def lose_state(self, what: str) -> NoReturn:
        """Terminate the run for all workers, because no live worker has the part ``what`` of the training's state."""
        self._end(replace(self._assignment.decision, state_lost=what))

    def _end(self, decision: Decision) -> NoReturn:
        message = self.losses.why_it_ends(decision, self._rules.min_replicas)
        end = StateLost(message) if decision.state_lost else NoReplica(message)
        self._session.give_up(end.code, message)
        raise end
