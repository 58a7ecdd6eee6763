"""The workers that epochs have found missing, and the lines, among the training's own, that tell people of them.

``Failures`` knows who they were, where they ran, and what they were last seen doing.  The lines are pure functions:

iteration 103: worker 5 (node b-1, GPU 5) lost in forward/backward; 2 microbatches run again by replicas 0, 3;
    0.11 s; 7 of 8 replicas
iteration 140: replica 5 is back with worker 12 (node b-1, GPU 5), 37 iterations after its loss; 8 of 8 replicas
iteration 160: replica 8 is new, with worker 14 (node b-2, GPU 6); 9 replicas (8 at the launch)
rolled back to iteration 100 (from disk, /save), since nobody held all of the state any more; 40 iterations are run
    again; 3.20 s; 8 of 8 replicas
iteration 150: spare worker 9 (node c-2, GPU 1) lost; 1 spare is left
iteration 200: degraded for 10 min: 7 of 8 replicas since iteration 103; no spare is left
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from recover_megatron.instep.meeting.decision import Decision, JoinStatus, Rollback
from recover_megatron.instep.meeting.grid import LaunchGrid
from recover_megatron.membership.records import ranges

READY = "is a spare, and ready"
"""After a worker's name: why it asks for an epoch."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that is gone; what is not known is empty or None."""

    worker: int
    node: str = ""
    device: int | None = None
    """Number of its device on its node, from 0."""
    phase: str = ""
    """What it was doing in the iteration of its loss, by its last heartbeat, which is up to an interval old."""

    def __str__(self) -> str:
        places = [f"node {self.node}"] * bool(self.node) + [f"GPU {self.device}"] * (self.device is not None)
        return f"worker {self.worker}" + (f" ({', '.join(places)})" if places else "")


@dataclass(frozen=True)
class Failure:
    """Workers that an epoch found missing."""

    iteration: int
    lost: tuple[LostWorker, ...]
    replicas: tuple[int, ...] = ()
    """Those that they had a place in."""

    @property
    def workers(self) -> list[int]:
        return [lost.worker for lost in self.lost]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.workers))} (iteration {self.iteration})"


class Failures:
    """All losses of a run, as one worker has met them.  ``grid``: where everybody stands before the first decision."""

    def __init__(self, grid: LaunchGrid) -> None:
        self._every: list[Failure] = []
        launched = enumerate(grid.replicas[: grid.launched])
        self._places: dict[int, int] = {worker: number for number, workers in launched for worker in workers}
        self._known = set(self._places)
        self.whereabouts: dict[int, LostWorker] = {}
        """Where those run that were there when it was asked last."""

    def note(
        self,
        decision: Decision,
        before: Decision | None,
        statuses: Mapping[int, JoinStatus] | None = None,
        told: Mapping[str, Mapping[str, object]] | None = None,
        left: Collection[int] = (),
    ) -> Failure | None:
        """The workers missing in ``decision`` and not before; ``before``: the last one that this worker took up.

        ``statuses``: with what those that are there have joined; ``told``: by worker id, what the coordinator says of
        those that are gone, ``phase`` and ``iteration`` of their last heartbeat.  ``left``: who went in order.
        """
        present = {*decision.workers, *decision.spares}
        aside = {int(worker) for worker, last in (told or {}).items() if last.get("aside")}  # alive, and will be back
        missing = sorted(self._known - present - set(left) - aside)
        self._known = present
        before_now = self.whereabouts
        self.whereabouts = {
            worker: LostWorker(worker, status.node, status.device) for worker, status in (statuses or {}).items()
        }
        if not missing:
            return None
        places = self._places
        if before is not None:
            places = {worker: replica for replica, workers in before.grid.items() for worker in workers}
        iteration = decision.rollback.under_way if decision.rollback else decision.iteration
        replicas = sorted({places[worker] for worker in missing if worker in places})
        lost = []
        for worker in missing:
            last = (told or {}).get(str(worker), {})
            phase = str(last.get("phase", "")) if last.get("iteration") == iteration else ""
            known = before_now.get(worker, LostWorker(worker))
            lost.append(LostWorker(worker, known.node, known.device, phase))
        self._every.append(Failure(iteration, tuple(lost), tuple(replicas)))
        return self._every[-1]

    def why_it_ends(self, decision: Decision, wanted: int) -> str:
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


NAMED = 3
"""So many lost workers are told of one by one."""
PHASES = {"forward": "forward/backward", "reduce-scatter": "the gradient sums", "agree": "the agreement"}
"""What phases are called here; others by their own names. One mark covers both passes of a microbatch."""


def recovery_line(
    iteration: int, failures: Sequence[Failure], reran: Mapping[int, Sequence[int]], seconds: float, replicas: str
) -> str:
    """A step that was finished after losses, or a loss that cost nothing; ``replicas``: as ``of_all`` says it."""
    lost = [lost for failure in failures for lost in failure.lost]
    parts = [f"{_who(lost)} lost{_where(lost)}" if lost else "met again after an interruption, nobody was lost"]
    if count := sum(map(len, reran.values())):
        by = "replica" if len(reran) == 1 else "replicas"
        parts.append(f"{count} microbatch{'es' * (count > 1)} run again by {by} {', '.join(map(str, sorted(reran)))}")
    elif any(failure.replicas for failure in failures):
        parts.append("no microbatch had to be run again")
    parts += [f"{seconds:.2f} s"] * (seconds > 0)
    return f"iteration {iteration}: {'; '.join([*parts, replicas])}"


def spares_line(iteration: int, failure: Failure, spares: int) -> str:
    """The loss of workers that had no place in the training."""
    return f"iteration {iteration}: {_who(failure.lost, 'spare worker')} lost; {_left(spares)}"


def return_line(
    iteration: int, decision: Decision, places: Mapping[int, LostWorker], gone: Mapping[int, int], of: int
) -> str:
    """Replicas that ``decision`` has put together; ``gone``: in which iteration each was lost, where that is known."""
    parts = []
    for replica in decision.fresh:
        workers = [places.get(worker, LostWorker(worker)) for worker in decision.grid[replica]]
        if replica >= of and replica not in gone:
            parts.append(f"replica {replica} is new, with {_who(workers)}")
            continue
        since = f", {iteration - gone[replica]} iterations after its loss" if replica in gone else ""
        parts.append(f"replica {replica} is back with {_who(workers)}{since}")
    return f"iteration {iteration}: {'; '.join([*parts, of_all(decision, of)])}"


def rollback_line(target: Rollback, source: str, seconds: float, replicas: str) -> str:
    """The state was lost: all have gone back to a state that was kept; ``source``: where."""
    lost = f"{target.lost} iterations are" if target.lost != 1 else "1 iteration is"
    return (
        f"rolled back to iteration {target.iteration} ({source}), since nobody held all of the state any more; "
        f"{lost} run again; {seconds:.2f} s; {replicas}"
    )


def degraded_line(iteration: int, seconds: float, since: int, decision: Decision, of: int) -> str:
    """A reminder."""
    return (
        f"iteration {iteration}: degraded for {seconds / 60:.0f} min: {of_all(decision, of)} since iteration {since}; "
        f"{_left(len(decision.spares))}"
    )


def of_all(decision: Decision, of: int) -> str:
    """ "7 of 8 replicas": of those of the launch; "9 replicas (8 at the launch)" where the run has grown."""
    count = len(decision.replicas)
    return f"{count} of {of} replicas" if count <= of else f"{count} replicas ({of} at the launch)"


def _left(spares: int) -> str:
    return f"{spares or 'no'} spare{'s' * (spares > 1)} {'are' if spares > 1 else 'is'} left"


def _who(workers: Sequence[LostWorker], noun: str = "worker") -> str:
    """Workers with their places; many of them by node."""
    if len(workers) <= NAMED:
        return ", ".join(str(worker).replace("worker", noun, 1) for worker in workers)
    nodes: dict[str, list[int]] = {}
    for worker in workers:
        nodes.setdefault(worker.node, []).append(worker.worker)
    told = [f"{ranges(ids)}" + (f" (node {node})" if node else "") for node, ids in sorted(nodes.items())]
    more = [f"and those of {len(told) - NAMED} more nodes"] * (len(told) > NAMED)
    return f"{len(workers)} workers, " + ", ".join([*told[:NAMED], *more]) + ","


def _where(lost: Sequence[LostWorker]) -> str:
    phases = dict.fromkeys(PHASES.get(worker.phase, worker.phase) for worker in lost if worker.phase)
    return f" in {' and '.join(phases)}" if phases else ""
