"""The places in an epoch, who of its members takes them (``Members``), and which nodes it does without.

All of it is pure, the same answer on every worker, from what the members joined with (`plan` calls it).

Nodes that are to be switched off (``draining_of``, ``without``, ``leaving_of``):

    asked --epoch: accepted--> spares of the node leave at once; all know which replicas are to (``Decision.leaving``)
                                   |  until the next boundary they compute as ever; there what only they hold of a
                                   |  state that is spread is given to others
                                   '--epoch at that boundary--> they have no place in it, and leave

Every epoch decides anew: where a death means that the run cannot do without a node any more it stays.
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
from recover_megatron.workload.placement import Edge, build_ahead, can_join, edge, free_of

GONE = "nobody holds the state of one of its positions any more"

Grid = dict[int, tuple[int, ...]]
"""Replica -> its workers by position."""
Statuses = Mapping[int, JoinStatus]
"""Worker -> what it has joined with."""


def whole_replicas(statuses: Statuses, launch: LaunchGrid) -> Grid:
    """The replicas that are complete among those who say that they have a place."""
    places: dict[int, dict[int, int]] = {}
    for worker, status in statuses.items():
        if status.replica is not None and status.position is not None:
            its = places.setdefault(status.replica, {})
            if status.position in its:
                raise Disagreement(f"workers {its[status.position]} and {worker} both say they are in one place")
            its[status.position] = worker
    return {
        replica: tuple(its[position] for position in range(launch.size))
        for replica, its in sorted(places.items())
        if len(its) == launch.size
    }


def room(whole: int, waiting: int, launch: LaunchGrid, spares: int) -> int:
    """How many new replicas a run may get that has ``whole`` ones; see ``workload.openings``."""
    return openings(whole, waiting, launch.size, launched=launch.launched, most=len(launch.replicas), spares=spares)


def most(values: Sequence[str]) -> str:
    """What is there most often; of equally many the smallest."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


@dataclass(frozen=True)
class Members:
    """All who have joined; ``whole``: the complete replicas; ``broken``: pairs of whom one cannot reach the other."""

    statuses: Statuses
    whole: Mapping[int, tuple[int, ...]]
    launch: LaunchGrid
    rules: Rules
    broken: frozenset[Edge]
    missed: int = 0
    """So many decisions were committed after the newest that any of them has begun; none where a replica is whole."""

    @property
    def _shape(self) -> Shape:
        return Shape(self.launch.size, self.launch.tensor_groups, self.rules.cross_node)

    def _assembled(self, candidates: Mapping[int, Candidate], whole: Iterable[int] = ()) -> Placement:
        """New replicas of these beside the ``whole`` ones, as many as there is room for."""
        there = set(whole)
        most = room(len(there), len(candidates), self.launch, self.rules.spares)
        return assemble(there, candidates, self._shape, len(self.launch.replicas), most)

    @property
    def _working(self) -> set[int]:
        return {worker for workers in self.whole.values() for worker in workers}

    @property
    def _coming(self) -> set[int | None]:
        """The positions of those who are on their way out of the training, with a state."""
        every = self.statuses.values()
        return {s.position for s in every if s.position is not None and not s.ready and not s.building}

    def candidates(self) -> dict[int, Candidate]:
        """Everybody who could take a place: orphans on their way out of the training count as not ready yet.

        A worker that is not ready and has no position is out for good: its training is over.
        """
        working = self._working
        return {
            worker: Candidate(status.position, status.node, fixed=not status.ready, ready=status.ready)
            for worker, status in self.statuses.items()
            if worker not in working and (status.ready or status.position is not None)
        }

    def usable(self) -> dict[int, Candidate]:
        """Those of them that can talk to all who work, and to each other."""
        return free_of(self.candidates(), self._working, self.broken)

    def placement(self) -> Placement:
        """New replicas; where edges are broken of those who can talk to all who work, and to each other."""
        placement = self._assembled(self.candidates(), self.whole)
        if self.broken and not can_join(self.whole, placement, self.broken):
            placement = self._assembled(self.usable(), self.whole)
        return placement

    def ahead(self, grid: Mapping[int, Sequence[int]], placement: Placement) -> dict[int, int]:
        """Spare -> position for which it builds a model though nobody misses it yet."""
        working = {worker for workers in grid.values() for worker in workers}
        taken = (
            working | {worker for workers in placement.replicas.values() for worker in workers} | set(placement.rebuild)
        )
        spares = {worker: one for worker, one in self.candidates().items() if worker not in taken}
        nodes = {worker: self.statuses[worker].node for worker in working}
        return build_ahead(spares, list(grid.values()), nodes, self._shape)

    def orphans(self) -> tuple[Grid, int | None]:
        """Nobody's replica is whole: the replicas that the orphans make, and the version of their state.

        The newest version that orphans in all positions hold: that after the last iteration, or that before it.  The
        older one means that a step is made again from the very state that it began with; that is decided only when
        everybody has told.  What is older still is for a rollback (``held``).
        """
        last = max((status.iteration for status in self.statuses.values()), default=0) - 1
        versions = [version for version in self._versions() if version >= last and not self.missed]
        return self._of_one(versions[:1] if self.on_their_way else versions)

    def held(self) -> tuple[Grid, int | None]:
        """The same of those that were set aside, where there are no ``orphans``: all go back to their older version."""
        late = replace(self, statuses={worker: status for worker, status in self.statuses.items() if status.aside})
        return late._of_one(late._versions())

    @property
    def on_their_way(self) -> bool:
        """Whether somebody who had a place has not told yet what it holds."""
        return bool(self._coming)

    def _versions(self) -> list[int]:
        """Those that are held, newest first."""
        held = {self.statuses[worker].version for worker, one in self.candidates().items() if one.ready}
        return sorted((version for version in held if version is not None), reverse=True)

    def _of_one(self, versions: Sequence[int]) -> tuple[Grid, int | None]:
        """The replicas of the first of these versions of which there are any."""
        candidates = {worker: one for worker, one in self.candidates().items() if one.ready}
        for version in versions:
            holders = {
                worker: candidate
                for worker, candidate in candidates.items()
                if self.statuses[worker].version == version
                and self.statuses[worker].digest == self._digest_of_most(worker, version)
            }
            usable = free_of(holders, set(), self.broken)
            found = self._assembled(usable).replicas
            if found:
                return dict(sorted(found.items())), version
        return {}, None

    def going_back(self) -> Placement | None:
        """The replicas that those who wait make, whatever they hold, to load a state; None: some are still to come."""
        if self._coming:
            return None
        ready = {worker: one for worker, one in self.usable().items() if one.ready}
        return self._assembled(ready)

    def _digest_of_most(self, worker: int, version: int) -> str:
        """The digest that most holders of a version have at this worker's position (of equally many the smallest)."""
        position = self.statuses[worker].position
        digests = [
            s.digest for s in self.statuses.values() if (s.position, s.version, s.ready) == (position, version, True)
        ]
        return most(digests)

    def prospects(self, grid: Mapping[int, Sequence[int]]) -> tuple[int, str]:
        """How many replicas there may be when all have done what they are told; and what of the state forbids it."""
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
        # Nobody computes: what counts is what the orphans hold between them, or may hold when they have come.
        held = self._coming | {s.position for s in self.statuses.values() if s.ready and s.version is not None}
        if self._coming and len(held) == self.launch.size and first.replicas:
            return len(first.replicas), ""
        return number, GONE if number > 0 else ""

    def mirrors(self, grid: Mapping[int, tuple[int, ...]], placement: Placement) -> dict[int, int]:
        """The last replica's state is nowhere else: a spare in each position keeps it, too, outside of the domains of
        the worker that has it if there is one."""
        (workers,) = grid.values()
        keepers: dict[int, tuple[int, int]] = {}
        for worker, status in self.statuses.items():
            if not status.ready or status.position is None or worker in (*workers, *placement.rebuild):
                continue
            given = workers[status.position]
            mine = len({*status.domains} & {*self.statuses[given].domains}), worker
            if edge(worker, given) not in self.broken:
                keepers[status.position] = min(keepers.get(status.position, mine), mine)
        return {worker: workers[position] for position, (_, worker) in sorted(keepers.items())}


def draining_of(statuses: Statuses, whole: Mapping[int, Sequence[int]], rules: Rules, asked: Sequence[str]) -> Drain:
    """The nodes that the run does without, those first that it has decided on before; and why not the others."""
    known = sorted({node for status in statuses.values() for node in status.draining})
    wanted = [*known, *(node for node in asked if node not in known)]
    return drain(wanted, _nodes(statuses), whole, rules.min_replicas, rules.shards)


def without(
    draining: Sequence[str], statuses: Statuses, whole: Mapping[int, tuple[int, ...]], boundary: bool
) -> tuple[dict[int, JoinStatus], dict[int, tuple[int, ...]]]:
    """The statuses of those that go on, and the replicas that do, of those that are ``whole``.

    Spares of these nodes do not.  Replicas leave at a boundary to which all have come knowing it: some may have had the
    plan that said so, and others not, since the coordinator died.
    """
    here = [worker for workers in whole.values() for worker in workers] if boundary else []
    ready = {node for node in draining if here and all(node in statuses[worker].draining for worker in here)}
    gone = leaving(whole, _nodes(statuses), ready)
    stay = {replica: workers for replica, workers in whole.items() if replica not in gone}
    working = {worker for workers in stay.values() for worker in workers}
    return {w: status for w, status in statuses.items() if w in working or status.node not in draining}, stay


def leaving_of(replicas: Mapping[int, Sequence[int]], statuses: Statuses, draining: Sequence[str]) -> frozenset[int]:
    """Those of ``replicas`` that are to leave at the next boundary."""
    return frozenset(leaving(replicas, _nodes(statuses), draining))


def finished_of(left: Collection[int], statuses: Statuses, draining: Collection[str]) -> frozenset[int]:
    """Those that have ``left`` in order and had finished: its node was not ``draining`` then.

    ``statuses``: the last with which they joined; who is not there is of a node that was drained, if any was.
    """
    nodes = _nodes(statuses)
    return frozenset(
        worker for worker in left if nodes.get(worker, "") not in draining and (worker in nodes or not draining)
    )


def _nodes(statuses: Statuses) -> dict[int, str]:
    return {worker: status.node for worker, status in statuses.items()}
