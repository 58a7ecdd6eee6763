"""Members of an epoch: complete replicas, candidates for places, new replicas (``Members``), and nodes to be drained.

`plan` calls these pure functions: from the statuses of the members every worker computes the same result.

Nodes to be drained (``draining_of``, ``without``, ``leaving_of``):

    asked --an epoch accepts--> spares of the node leave now; the plan names the replicas that will leave
                                    |  (``Decision.leaving``): they compute until the next boundary, and there send to
                                    |  other workers the shards of a spread state that no other worker holds
                                    '--the epoch at that boundary--> these replicas get no place, and leave

Every epoch decides again: if a death makes a node necessary, the node stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import JoinStatus, Rules
from recover_megatron.workload import Candidate, Placement, Shape, assemble, openings
from recover_megatron.workload.domains import Drain, drain, leaving
from recover_megatron.workload.grid import LaunchGrid
from recover_megatron.workload.placement import Edge, build_ahead, can_connect, connectable, edge

GONE = "no live worker has the state of one of the replica's positions"

Grid = dict[int, tuple[int, ...]]
"""Replica -> its workers by position."""
Statuses = Mapping[int, JoinStatus]
"""Worker -> the status with which this worker joined."""


def whole_replicas(statuses: Statuses, launch: LaunchGrid) -> Grid:
    """Return the complete replicas of workers that report a place; raise Disagreement if two report the same place."""
    places: dict[int, dict[int, int]] = {}
    for worker, status in statuses.items():
        if status.replica is not None and status.position is not None:
            members = places.setdefault(status.replica, {})
            if status.position in members:
                raise Disagreement(f"workers {members[status.position]} and {worker} both report the same place")
            members[status.position] = worker
    return {
        replica: tuple(members[position] for position in range(launch.size))
        for replica, members in sorted(places.items())
        if len(members) == launch.size
    }


def room(whole: int, waiting: int, launch: LaunchGrid, spares: int) -> int:
    """Return how many new replicas may be formed; see ``workload.openings``.

    ``whole``: number of complete replicas.  ``waiting``: number of workers without a place.
    """
    return openings(whole, waiting, launch.size, launched=launch.launched, most=len(launch.replicas), spares=spares)


def most(values: Sequence[str]) -> str:
    """Return the most frequent value; if several values are equally frequent, the smallest of them."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


@dataclass(frozen=True)
class Members:
    """Members of an epoch.  ``whole``: complete replicas.  ``broken``: pairs of workers that cannot connect to each
    other."""

    statuses: Statuses
    whole: Mapping[int, tuple[int, ...]]
    launch: LaunchGrid
    rules: Rules
    broken: frozenset[Edge]
    missed: int = 0
    """Number of committed decisions that no member has begun; 0 if any replica is complete."""

    @property
    def _shape(self) -> Shape:
        return Shape(self.launch.size, self.launch.tensor_groups, self.rules.cross_node)

    def _assembled(self, candidates: Mapping[int, Candidate], whole: Iterable[int] = ()) -> Placement:
        """Form as many new replicas of ``candidates`` as ``room`` allows in addition to the replicas ``whole``."""
        there = set(whole)
        most = room(len(there), len(candidates), self.launch, self.rules.spares)
        return assemble(there, candidates, self._shape, len(self.launch.replicas), most)

    @property
    def _working(self) -> set[int]:
        return {worker for workers in self.whole.values() for worker in workers}

    @property
    def _coming(self) -> set[int | None]:
        """Positions of workers that are still leaving the training, and will offer the state of their position."""
        every = self.statuses.values()
        return {s.position for s in every if s.position is not None and not s.ready and not s.building}

    def candidates(self) -> dict[int, Candidate]:
        """Return worker -> candidate, for all workers without a place that are ready or have a model.

        Orphans that are still leaving the training are candidates that are not ready.  A worker that is not ready and
        has no model is no candidate: its training is over.
        """
        working = self._working
        return {
            worker: Candidate(status.position, status.node, fixed=not status.ready, ready=status.ready)
            for worker, status in self.statuses.items()
            if worker not in working and (status.ready or status.position is not None)
        }

    def usable(self) -> dict[int, Candidate]:
        """Return the candidates that can connect to each other and to all workers with a place."""
        return connectable(self.candidates(), self._working, self.broken)

    def placement(self) -> Placement:
        """Form new replicas of workers that can connect to each other and to all workers with a place."""
        placement = self._assembled(self.candidates(), self.whole)
        if self.broken and not can_connect(self.whole, placement, self.broken):
            placement = self._assembled(self.usable(), self.whole)
        return placement

    def ahead(self, grid: Mapping[int, Sequence[int]], placement: Placement) -> dict[int, int]:
        """Return spare -> position for which this spare builds a model in advance, before any worker is lost."""
        working = {worker for workers in grid.values() for worker in workers}
        taken = (
            working | {worker for workers in placement.replicas.values() for worker in workers} | set(placement.rebuild)
        )
        spares = {worker: one for worker, one in self.candidates().items() if worker not in taken}
        nodes = {worker: self.statuses[worker].node for worker in working}
        return build_ahead(spares, list(grid.values()), nodes, self._shape)

    def orphans(self) -> tuple[Grid, int | None]:
        """Return the replicas that orphans form if no replica is complete, and the version of their state.

        The version is the newest that orphans hold in all positions: the one after the newest iteration that any member
        reports, or the one before this iteration.  With the one before, the last step is run again.  While some workers
        are still leaving the training, only the newest version of any ready worker is used.  Older versions are used
        only by a rollback (``held``).
        """
        last = max((status.iteration for status in self.statuses.values()), default=0) - 1
        versions = [version for version in self._versions() if version >= last and not self.missed]
        return self._of_one(versions[:1] if self.on_their_way else versions)

    def held(self) -> tuple[Grid, int | None]:
        """Return the replicas that can be formed of workers that were set aside, and the version of their state.

        The version may be old.  If no other state is left, all workers go back to this version.
        """
        late = replace(self, statuses={worker: status for worker, status in self.statuses.items() if status.aside})
        return late._of_one(late._versions())

    @property
    def on_their_way(self) -> bool:
        """True if some worker that had a place has not reported its state yet."""
        return bool(self._coming)

    def _versions(self) -> list[int]:
        """Return the state versions of all ready candidates, newest first."""
        held = {self.statuses[worker].version for worker, one in self.candidates().items() if one.ready}
        return sorted((version for version in held if version is not None), reverse=True)

    def _of_one(self, versions: Sequence[int]) -> tuple[Grid, int | None]:
        """Find the first of ``versions`` that workers hold in all positions; return their replicas, and this version.

        If there is no such version, returns no replicas and None.
        """
        candidates = {worker: one for worker, one in self.candidates().items() if one.ready}
        for version in versions:
            holders = {
                worker: candidate
                for worker, candidate in candidates.items()
                if self.statuses[worker].version == version
                and self.statuses[worker].digest == self._digest_of_most(worker, version)
            }
            usable = connectable(holders, set(), self.broken)
            found = self._assembled(usable).replicas
            if found:
                return dict(sorted(found.items())), version
        return {}, None

    def going_back(self) -> Placement | None:
        """Form replicas of ready workers, whatever their state, for a rollback.

        Returns None if some workers are still leaving the training.
        """
        if self._coming:
            return None
        ready = {worker: one for worker, one in self.usable().items() if one.ready}
        return self._assembled(ready)

    def _digest_of_most(self, worker: int, version: int) -> str:
        """Return the most frequent digest of state ``version`` among workers at the position of ``worker`` (see
        ``most``).
        """
        position = self.statuses[worker].position
        digests = [
            s.digest for s in self.statuses.values() if (s.position, s.version, s.ready) == (position, version, True)
        ]
        return most(digests)

    def prospects(self, grid: Mapping[int, Sequence[int]]) -> tuple[int, str]:
        """Return the number of replicas that the live workers can form, and the reason why the state is lost.

        The reason is an empty string if the state is not lost.
        """
        candidates = {
            worker: Candidate(candidate.position, candidate.node) for worker, candidate in self.usable().items()
        }
        first = self._assembled(candidates, self.whole)
        rebuilt = {
            worker: Candidate(first.rebuild.get(worker, candidate.position), candidate.node)
            for worker, candidate in candidates.items()
        }
        number = len(self.whole) + len(self._assembled(rebuilt, self.whole).replicas)
        if self.whole or grid:
            return max(number, len(grid)), ""
        # No replica computes.  The state is not lost if orphans hold it, even if they are still leaving the training.
        held = self._coming | {s.position for s in self.statuses.values() if s.ready and s.version is not None}
        if self._coming and len(held) == self.launch.size and first.replicas:
            return len(first.replicas), ""
        return number, GONE if number > 0 else ""

    def mirrors(self, grid: Mapping[int, tuple[int, ...]], placement: Placement) -> dict[int, int]:
        """Return spare -> worker of the last replica whose state this spare mirrors, since no other replica has the
        state.

        There is at most one spare per position; spares outside the worker's failure domains are preferred.
        """
        (workers,) = grid.values()
        keepers: dict[int, tuple[int, int]] = {}
        for worker, status in self.statuses.items():
            if not status.ready or status.position is None or worker in (*workers, *placement.rebuild):
                continue
            given = workers[status.position]
            ranked = len({*status.domains} & {*self.statuses[given].domains}), worker
            if edge(worker, given) not in self.broken:
                keepers[status.position] = min(keepers.get(status.position, ranked), ranked)
        return {worker: workers[position] for position, (_, worker) in sorted(keepers.items())}


def draining_of(statuses: Statuses, whole: Mapping[int, Sequence[int]], rules: Rules, asked: Sequence[str]) -> Drain:
    """Return the nodes to drain, and the reason for each refused node; nodes of earlier decisions come first."""
    known = sorted({node for status in statuses.values() for node in status.draining})
    wanted = [*known, *(node for node in asked if node not in known)]
    return drain(wanted, _nodes(statuses), whole, rules.min_replicas, rules.shards)


def without(
    draining: Sequence[str], statuses: Statuses, whole: Mapping[int, tuple[int, ...]], boundary: bool
) -> tuple[dict[int, JoinStatus], dict[int, tuple[int, ...]]]:
    """Return the statuses of the members that continue, and the replicas of ``whole`` that continue.

    Spares on draining nodes do not continue.  A replica with a worker on such a node leaves at the first boundary at
    which all workers with a place know of the drain.  (If the coordinator died, some workers may not have received the
    plan that announced the drain.)
    """
    here = [worker for workers in whole.values() for worker in workers] if boundary else []
    ready = {node for node in draining if here and all(node in statuses[worker].draining for worker in here)}
    gone = leaving(whole, _nodes(statuses), ready)
    stay = {replica: workers for replica, workers in whole.items() if replica not in gone}
    working = {worker for workers in stay.values() for worker in workers}
    return {w: status for w, status in statuses.items() if w in working or status.node not in draining}, stay


def leaving_of(replicas: Mapping[int, Sequence[int]], statuses: Statuses, draining: Sequence[str]) -> frozenset[int]:
    """Return the ``replicas`` that leave at the next boundary, because they have a worker on a draining node."""
    return frozenset(leaving(replicas, _nodes(statuses), draining))


def finished_of(left: Collection[int], statuses: Statuses, draining: Collection[str]) -> frozenset[int]:
    """Return the workers in ``left`` whose training was over; all others left because their node is ``draining``.

    ``statuses``: the last statuses of the members.  If any node drains, a worker without a status counts as drained.
    """
    nodes = _nodes(statuses)
    return frozenset(
        worker for worker in left if nodes.get(worker, "") not in draining and (worker in nodes or not draining)
    )


def _nodes(statuses: Statuses) -> dict[int, str]:
    return {worker: status.node for worker, status in statuses.items()}
