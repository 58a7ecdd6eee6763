"""Joins an epoch in a worker's name and works out what it decides: for the main thread and for that of a spare.

    status (where I stand, what I hold, whom I cannot reach) --Session.join--> the statuses of all --decide--> Decision

Here it is decided, too, that the run cannot go on: the same way on every worker, which has the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.decision import Decision, JoinStatus, Rules
from recover_megatron.instep.edges import MOST, Edges, explanation, news
from recover_megatron.instep.errors import NoReplica, StateLost
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.instep.hooks import Hooks
from recover_megatron.instep.plan import decide
from recover_megatron.logger import get_logger
from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, EXIT_NO_REPLICA, EXIT_STATE_LOST, CoordinatorLost
from recover_megatron.membership.session import Session

log = get_logger(__name__)


@dataclass
class Failure:
    """Workers that an epoch found missing."""

    iteration: int
    workers: list[int]
    replicas: list[int] = field(default_factory=list)
    """Those that they had a place in."""

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {', '.join(map(str, self.workers))}"


class Failures:
    """All losses of a run, as one worker has met them.  ``grid``: where everybody stands before the first decision."""

    def __init__(self, grid: LaunchGrid) -> None:
        self._every: list[Failure] = []
        self._places = {slot: number for number, slots in enumerate(grid.replicas) for slot in slots}
        self._known = set(self._places)

    def note(self, decision: Decision, before: Decision | None) -> Failure | None:
        """Who is missing in ``decision`` and was not before; ``before``: the last one that this worker took up."""
        present = {*decision.workers, *decision.spares}
        missing = sorted(self._known - present)
        self._known = present
        if not missing:
            return None
        places = self._places
        if before is not None:
            places = {worker: replica for replica, workers in before.grid.items() for worker in workers}
        replicas = sorted({places[worker] for worker in missing if worker in places})
        self._every.append(Failure(decision.iteration, missing, replicas))
        return self._every[-1]

    def report_exception(self, decision: Decision, wanted: int) -> str:
        """Why a run ends that ``decision`` leaves fewer replicas than ``wanted``: who was lost, what is left."""
        lost = "; ".join(map(str, self._every))
        need = f"{wanted} are wanted" if wanted > 1 else "one is needed"
        what = f"{len(decision.replicas)} complete replicas are left, {need}."
        if decision.state_lost:
            what = f"Workers enough for a replica live, but {decision.state_lost}."
        return (
            f"{what} Workers lost: {lost or 'none'}; alive without a place: {len(decision.spares)}. "
            f"Last checkpoint: {decision.checkpoint}"
        )


class Planner:
    """Of one worker.  ``node``, ``peer_store``: told in its status.  Called by one thread at a time.

    ``min_replicas``: with fewer the run ends.
    """

    def __init__(
        self,
        session: Session,
        hooks: Hooks,
        assignment: Assignment,
        edges: Edges,
        rules: Rules,
        *,
        node: str,
        peer_store: str,
        min_replicas: int,
    ) -> None:
        self._session = session
        self._hooks = hooks
        self._assignment = assignment
        self._edges = edges
        self._rules = rules
        self._node = node
        self._peer_store = peer_store
        self._min_replicas = min_replicas
        self._losses = Failures(assignment.grid)
        self._statuses: dict[int, JoinStatus] = {}
        self._explained = ""
        self.why = ""
        """Why the last epoch ended, as the coordinator told."""

    def status(self, **fields: Any) -> JoinStatus:
        """What this worker joins with; ``fields`` are added to what holds wherever it is."""
        hooks, mine = self._hooks, self._assignment
        told = {
            "position": mine.position,
            "version": hooks.version(),
            "node": self._node,
            "peer_store": self._peer_store,
            **fields,
        }
        return JoinStatus(mine.replica, iteration=hooks.iteration(), checkpoint=hooks.last_checkpoint(), **told)

    def meet(self, status: JoinStatus, reason: str) -> tuple[Decision, Failure | None]:
        """Join the next epoch: what it decided, and whom it found missing.

        ``reason``: why, if this worker is the first to ask for the epoch.  Raises ``Fenced``, ``CoordinatorLost``,
        ``Disagreement``.
        """
        mine = self._assignment
        status = replace(status, unreached=self._edges.look(status.at, lambda: self._session.opened_members))
        plan = self._session.join(status.to_json(), reason)
        statuses = {int(worker): JoinStatus.from_json(value) for worker, value in plan.data["statuses"].items()}
        decision = decide(plan.epoch, statuses, mine.grid, self._rules)
        self._edges.told(decision, statuses, plan.committed)
        self._statuses = statuses
        note = explanation(decision, mine.me, mine.replica if mine.placed else None, self._explained)
        if note != self._explained:
            self._explained = note
            self._session.note(note)
        with mine.lock:
            mine.committed_by_plan = plan.committed
            return decision, self._losses.note(decision, mine.taken_up)

    def tell_news(self, before: Decision | None, decision: Decision) -> None:
        """On the console of one worker: of an epoch that nobody's death has made."""
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
            lost_replicas=lost.replicas if lost else [],
            grid={str(replica): list(workers) for replica, workers in decision.grid.items()},
            fresh=list(decision.fresh),
            mended=list(decision.mended),
            disputed=list(decision.disputed),
            broken=[list(pair) for pair in sorted(decision.broken)],
            order=list(decision.order),
            put_out={str(replica): [list(pair) for pair in its] for replica, its in decision.put_out.items()},
            seconds={"rendezvous": round(seconds, 6)},
            **self._hooks.describe(decision),
        )

    # ---- why an epoch cannot go on

    def ask(self) -> None:
        """Ask for the next epoch, and say why, as far as this worker knows; nothing if the present one is over."""
        self._session.ask(*self._failure())

    def _failure(self) -> tuple[str, int | None]:
        """What this worker has found, and with whom it failed, if that is known."""
        mine = self._assignment
        failure = mine.epoch_groups.failure
        if failure is None:
            return "an operation of the epoch has failed", None
        worker = None if failure.slot is None else mine.standing.get(failure.slot)
        if worker is not None and failure.road:
            self._edges.noticed(worker)
        elif failure.road:
            self._edges.suspect(mine.decision.workers)
        return failure.reason + ("" if worker is None else f" (with worker {worker})"), worker

    # ---- why the run cannot go on

    def give_up_unless_enough(self, decision: Decision) -> None:
        """End the run, for all, if too few replicas are left or may come; raises ``NoReplica`` or ``StateLost``.

        Both say who was lost when.  Also if the run does not get any further: raises ``CoordinatorLost``.
        """
        if self._edges.tries >= MOST:
            reason = f"{self._edges.tries + 1} epochs at one point, and nobody was lost; the last one ended: {self.why}"
            self._session.give_up(EXIT_LOST_MAJORITY, reason)
            raise CoordinatorLost(reason, EXIT_LOST_MAJORITY)
        if decision.enough >= self._min_replicas:
            return
        message = self._losses.report_exception(decision, self._min_replicas)
        self._session.give_up(EXIT_STATE_LOST if decision.state_lost else EXIT_NO_REPLICA, message)
        raise StateLost(message) if decision.state_lost else NoReplica(message)

    def lose_state(self, what: str) -> NoReturn:
        """End the run, for all: something of the training's state was lost with those who are gone."""
        message = self._losses.report_exception(replace(self._assignment.decision, state_lost=what), self._min_replicas)
        self._session.give_up(EXIT_STATE_LOST, message)
        raise StateLost(message)
