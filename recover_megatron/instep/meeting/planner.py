"""Joins an epoch in a worker's name and works out what it decides: for the main thread and for that of a spare.

    status (where I stand, what I hold, whom I cannot reach) --Session.join--> the statuses of all --decide--> Decision

Whether the run can go on at all is decided here, too. All workers have the same statuses, so all decide the same.

Each tells digests of its flags and of its program (`comparison`), and before anything is decided by rules that workers
with others may not share:

    a newcomer has others                it asks a worker of the run for its own, says where they differ, and ends
    a worker of the launch has others    the run does not begin: everybody ends, with that line
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from recover_megatron.collectives.comparison import ASKED_SECONDS, OwnDescription, Told, odd_ones
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
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.instep.meeting.standing import finished_of, room
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EXIT_LOST_MAJORITY, CoordinatorLost
from recover_megatron.workload.grid import Slot

log = get_logger(__name__)

REPLACED_SECONDS = 300.0
"""How long those who live wait for workers in place of the lost, when they are too few to go back to a checkpoint."""


@dataclass(eq=False)
class Planner:
    """Joins epochs for one worker, and keeps what the last one has decided.  Called by one thread at a time.

    ``node``, ``domains``, ``device``, ``peer_store``, and what ``snapshots`` holds, go into its status.
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
    """That of the last epoch that this worker has joined."""
    _same_as: int = field(default=-1, init=False)
    """``Decision.same_as`` of that."""
    _draining: tuple[str, ...] = field(default=(), init=False)
    """What that epoch has decided to do without."""
    _undone: int = field(default=0, init=False)
    """See ``JoinStatus.undone``."""
    _undone_until: int = field(default=0, init=False)
    """The last epoch's decision; when it is committed the rollback was carried out: loading comes first."""
    _left: frozenset[int] = field(default=frozenset(), init=False)
    finished: bool = field(default=False, init=False)
    """Whether anybody has left the run that had finished its training; not since its node was drained."""
    _checkpoints: tuple[Checkpoint, ...] = field(default=(), init=False)
    """Those that the members of that epoch knew of."""
    _short_since: float | None = field(default=None, init=False)
    """Since when there are too few workers to go back to a checkpoint."""
    why: str = field(default="", init=False)
    """Why the last epoch ended, as the coordinator told."""
    lost: Failure | None = field(default=None, init=False)
    """The loss that the last epoch found and that this worker has met the others for."""

    def __post_init__(self) -> None:
        self.losses = Failures(self._assignment.grid)

    def status(self, **fields: Any) -> JoinStatus:
        """What this worker joins with; ``fields`` are added to what holds wherever it is."""
        hooks, mine = self._hooks, self._assignment
        told = {
            "position": mine.position,
            "version": hooks.version(),
            "state_of": hooks.state_of(),
            "last_step": hooks.last_step(),
            "node": self.node,
            "domains": self.domains,
            "device": self.device,
            "peer_store": self.peer_store,
            "pace": mine.shares.balance.paces.get(mine.replica, 0.0),
            **fields,
        }
        return JoinStatus(mine.replica, iteration=hooks.iteration(), checkpoint=hooks.last_checkpoint(), **told)

    def meet(self, status: JoinStatus, reason: str) -> tuple[Decision, Failure | None]:
        """Join the next epoch: what it decided, and whom it found missing.

        ``reason``: why, if this worker is the first to ask for the epoch.  Raises ``Fenced``, ``CoordinatorLost``,
        ``Disagreement``, and ``OtherFlags`` where this worker was started with other flags than the run, or runs
        another program.
        """
        mine = self._assignment
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
            **self.snapshots.told(),
        )
        plan = self._session.join(status.to_json(), reason)
        statuses = self._of_the_same_program({int(worker): told for worker, told in plan.data["statuses"].items()})
        asked = [str(node) for node in plan.data.get("drain", ())]
        seen = max((last["iteration"] for last in plan.data.get("lost", {}).values()), default=0)
        beyond = Beyond(plan.committed, seen, bool(plan.data.get("aside")))
        decision = decide(plan.epoch, statuses, mine.grid, self._rules, asked, beyond)
        self.timeline, self._checkpoints = decision.timeline, decision.checkpoints
        self._same_as = decision.same_as
        newly, self._left = self._session.left - self._left, self._session.left
        self.finished |= bool(finished_of(newly, self._statuses, {*self._draining, *decision.draining}))
        self._draining = decision.draining
        self._undone, self._undone_until = decision.undone, decision.at
        if mine.me == min(decision.workers or statuses):
            for node in sorted({*asked, *decision.undrained}):
                self._session.answer_drain(node, decision.undrained.get(node, ""))
        self.snapshots.follow(decision)
        self._edges.told(decision, statuses, plan.committed)
        self._statuses = statuses
        note = explanation(decision, mine.me, mine.replica if mine.placed else None, self._explained)
        if note != self._explained:
            self._explained = note
            self._session.note(note)
        with mine.lock:
            mine.committed_by_plan = plan.committed
            left = self._session.left
            self.lost = self.losses.note(decision, mine.taken_up, statuses, plan.data.get("lost", {}), left)
            return decision, self.lost

    def _of_the_same_program(self, joined: Mapping[int, Any]) -> dict[int, JoinStatus]:
        """Those who take part in the decision: all whose flags are those of the run.

        A worker without a place and with other flags is left out (where it is this one: raises ``OtherFlags``), and so
        is one whose status cannot be read.  One that runs another program sees that by itself, before it reads the
        statuses.  If a worker with a place differs, the launch cannot begin: the run ends, for all, with
        ``EXIT_REFUSED``.
        """
        mine, session = self._assignment.me, self._session
        told = {worker: Told.of(status, "replica", "version", "peer_store") for worker, status in joined.items()}
        odd = odd_ones(told)
        placed = sorted(worker for worker in odd.workers if told[worker].placed)
        different = self.own.different(mine, told, odd)
        if different and not told[mine].placed:
            raise OtherFlags(f"it {different}")
        if different:
            session.give_up(EXIT_REFUSED, f"worker {mine} on node {self.node} {different}")
        elif placed:
            session.wait_revoked(2 * ASKED_SECONDS)  # it knows more, and says so
            session.give_up(EXIT_REFUSED, f"worker {placed[0]} was started with other flags than worker {odd.model}")
        if different or placed:
            session.wait_revoked()
            session.check()
        statuses = {}
        for worker, status in joined.items():
            try:
                if worker not in odd.workers:
                    statuses[worker] = JoinStatus.from_json(status)
            except Disagreement:
                if told[worker].placed:
                    raise
        return statuses

    def tell_news(self, before: Decision | None, decision: Decision) -> None:
        """Say on the console, by one worker of the run, why there is a new epoch although nobody died."""
        if self._assignment.me == min(decision.workers, default=self._assignment.me):
            for line in news(before, decision, self._statuses, self._edges.tries, self.why):
                log.info(line)

    def log(self, decision: Decision, lost: Failure | None, seconds: float) -> None:
        """Write the plan's event; ``seconds``: what it took to meet."""
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
            mended=list(decision.mended),
            rollback=None if decision.rollback is None else asdict(decision.rollback),
            disputed=list(decision.disputed),
            broken=[list(pair) for pair in sorted(decision.broken)],
            draining=list(decision.draining),
            undrained=dict(decision.undrained),
            leaving=sorted(decision.leaving),
            put_out={str(replica): [list(pair) for pair in its] for replica, its in decision.put_out.items()},
            seconds={"rendezvous": round(seconds, 6)},
            **self._hooks.describe(decision),
        )

    # ---- why an epoch cannot go on

    def ask(self) -> None:
        """Ask for the next epoch, and say why, as far as this worker knows; nothing if the present one is over."""
        mine = self._assignment
        lost = mine.epoch_groups.lost
        if lost is None:
            self._session.ask("an operation of the epoch has failed", None)
            return
        worker = None if lost.peer is None else mine.standing.get(Slot(lost.peer))
        if worker is not None and lost.road:
            self._edges.noticed(worker)
        elif lost.road:
            self._edges.suspect(mine.decision.workers)
        self._session.ask(str(lost) + ("" if worker is None else f" (with worker {worker})"), worker)

    # ---- why the run cannot go on

    def give_up_unless_enough(self, decision: Decision) -> None:
        """End the run, for all, if too few replicas are left and no more may come, or if it gets no further.

        Raises ``NoReplica`` or ``StateLost`` (both say who was lost when); ``CoordinatorLost`` after ``MOST`` epochs at
        one decision.
        """
        if self._edges.tries >= MOST:
            reason = f"{self._edges.tries + 1} epochs at one point, and nobody was lost; the last one ended: {self.why}"
            self._session.give_up(EXIT_LOST_MAJORITY, reason)
            raise CoordinatorLost(reason, EXIT_LOST_MAJORITY)
        if decision.enough >= self._rules.min_replicas:
            self._short_since = None
            return
        if decision.short and self.patience() > 0:
            return
        self._end(decision)

    def has_all_replicas(self, decision: Decision) -> bool:
        """Whether there are as many replicas as at the launch, and no more can be made of the spares."""
        return not room(len(decision.replicas), len(decision.spares), self._assignment.grid, self._rules.spares)

    @property
    def can_go_back(self) -> bool:
        """Whether there is a checkpoint or a snapshot that the run could go back to, should its state be lost."""
        if self.snapshots.newest is not None:
            return True
        kept, unreadable = self._hooks.checkpoints()
        return any(iteration not in unreadable for iteration, _ in merged(kept, self._checkpoints))

    def patience(self) -> float:
        """Seconds that are left to wait for workers without whom the run cannot go back; 0 or less: no longer."""
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
            log.info(
                f"worker {self._assignment.me} waits up to {REPLACED_SECONDS:.0f} s for other workers: those that live "
                "are too few for a replica; when they have come all go back to a checkpoint or a snapshot"
            )
        return self._short_since + REPLACED_SECONDS - now

    def lose_state(self, what: str) -> NoReturn:
        """End the run, for all: something of the training's state was lost with those who are gone."""
        self._end(replace(self._assignment.decision, state_lost=what))

    def _end(self, decision: Decision) -> NoReturn:
        message = self.losses.why_it_ends(decision, self._rules.min_replicas)
        end = StateLost(message) if decision.state_lost else NoReplica(message)
        self._session.give_up(end.code, message)
        raise end
