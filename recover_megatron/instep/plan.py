"""What an epoch decides, from what its members joined with: pure, the same answer on every worker.

Every worker joins with a ``Status``; the coordinator gives all of them to all (one place, one order), and ``decide``
makes of them which replicas work, and who runs what of the step under way.

    statuses --decide--> Decision:  replicas   whole, in this epoch
                                    spares     live workers without a place
                                    at         the newest decision that any replica works on
                                    rerun      microbatches of that step that are in nobody's gradient, by replica, lane
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.workload import assemble, reassign


@dataclass(frozen=True)
class Status:
    """What a worker tells when it joins an epoch."""

    replica: int | None
    """Its replica; None: a spare."""
    at: int = 0
    """The decision that it works on (steps, evaluations and checkpoints are counted together), or has just finished."""
    step: bool = False
    """Whether that is a training step that has begun."""
    total: int = 0
    """Microbatches of that step, over all replicas."""
    ran: Sequence[int] = ()
    """Ids whose gradients the workers of this replica hold, all lanes together."""
    iteration: int = 0
    """The training iteration under way, from 1; a spare's: when it became one."""
    checkpoint: str = ""
    """The last checkpoint that it knows of, in words."""
    note: str = ""
    """Why it is a spare, for the log."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ran": list(self.ran)}

    @classmethod
    def from_json(cls, value: Any) -> Status:
        """Raises Disagreement for what no worker of this version sends."""
        try:
            return cls(**{**value, "ran": tuple(value["ran"])})
        except (TypeError, KeyError) as error:
            raise Disagreement(f"a worker joined with a status that this version does not know: {value!r}") from error


@dataclass(frozen=True)
class Decision:
    """See the module's text."""

    epoch: int
    replicas: tuple[int, ...]
    spares: tuple[int, ...]
    iteration: int = 0
    """The newest that anybody tells of."""
    checkpoint: str = ""
    """The last that is known to who is at that iteration."""
    at: int = 0
    step: bool = False
    """Whether ``at`` is a step that some replica has gradients of."""
    rerun: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Replica -> by lane, the ids to run on top of what it ran."""

    def workers(self, grid: LaunchGrid) -> list[int]:
        """All that have a place in this epoch, ascending."""
        return sorted(worker for replica in self.replicas for worker in grid.replicas[replica])


def decide(epoch: int, statuses: Mapping[int, Status], grid: LaunchGrid, *, multiple_of: int = 1) -> Decision:
    """The decision of an epoch whose members joined with ``statuses``.

    ``multiple_of``: what every replica's number of re-run microbatches must be a multiple of, per lane.  Raises
    Disagreement when the workers of one replica tell different things.
    """
    placed = [worker for worker, status in statuses.items() if status.replica is not None]
    replicas = tuple(assemble(placed, grid.replicas).replicas)
    told = {replica: _told(replica, [statuses[worker] for worker in grid.replicas[replica]]) for replica in replicas}
    working = {worker for replica in replicas for worker in grid.replicas[replica]}
    spares = tuple(sorted(set(statuses) - working))
    at = max((status.at for status in told.values()), default=0)
    begun = {replica: status for replica, status in told.items() if status.at == at and status.step}
    newest = max(statuses.values(), key=lambda status: (status.iteration, status.checkpoint), default=Status(None))
    if not begun:
        return Decision(epoch, replicas, spares, newest.iteration, newest.checkpoint, at)
    totals = {status.total for status in begun.values()}
    if len(totals) > 1:
        raise Disagreement(f"replicas disagree on the microbatches of one step: {sorted(totals)}")
    ran = sorted(j for status in begun.values() for j in status.ran)
    if len(set(ran)) != len(ran):
        raise Disagreement(f"microbatches are in the gradients of two replicas: {_told_of(begun)}")
    lost = sorted(set(range(totals.pop())) - set(ran))
    load = {replica: len(status.ran) for replica, status in begun.items()}
    late = {replica: 0 for replica in replicas if replica not in begun}
    # Whoever has not begun has all of its share still to run; the others have finished theirs and wait.
    before = dict.fromkeys(replicas, 0) if not late else {**load, **late}
    shares = reassign(lost, grid.lanes, replicas, load=before, multiple_of=multiple_of * grid.lanes)
    return Decision(epoch, replicas, spares, newest.iteration, newest.checkpoint, at, True, shares)


def _told(replica: int, statuses: Sequence[Status]) -> Status:
    """What a whole replica says: its workers run in lock-step, so they must say the same.

    But for one case: a decision is over, one worker has heard so and begun the next, and the coordinator died before
    all were told.  The next plan tells the others; none of their replica can have run anything meanwhile.
    """
    newest = max(statuses, key=lambda status: (status.at, status.step))
    for status in statuses:
        if status.at == newest.at and status.step == newest.step and set(status.ran) != set(newest.ran):
            raise Disagreement(f"workers of replica {replica} ran different microbatches: {status} and {newest}")
    if any(status.at < newest.at - bool(not newest.ran) for status in statuses):
        raise Disagreement(f"workers of replica {replica} are at different decisions: {list(statuses)}")
    return newest


def _told_of(begun: Mapping[int, Status]) -> dict[int, list[int]]:
    return {replica: list(status.ran) for replica, status in begun.items()}
