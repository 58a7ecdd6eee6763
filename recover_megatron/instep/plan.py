"""What an epoch decides, from what its members joined with: pure, the same answer on every worker.

Every worker joins with a ``Status``; the coordinator gives all of them to all (one place, one order), and ``decide``
makes of them who works where, and who runs what of the step under way.

    statuses --decide--> Decision:  grid        the replicas of this epoch, each with its workers by position
                                    spares      live workers without a place
                                    at          the newest decision that any replica works on
                                    rerun       microbatches of that step that are in nobody's gradient, by replica
                                    regroup     new replicas can be put together where nobody is in a step
                                    fresh       those that this epoch put together, and from whom they get their state
                                    mirrors     spares that keep the state of the last replica
                                    order       that of the rings, where some cannot talk to each other
                                    put_out     replicas for which there is no such order

The grid changes only where no replica is in the middle of anything: at the *boundary* before a step.  Everybody who
sees ``regroup`` comes to an epoch of its own there, and that one places the spares.  When no replica is whole any more
there is nobody to wait for: orphans that hold one version of the state between them begin again where it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from recover_megatron.instep.decision import Decision, JoinStatus, Rules
from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.workload import Candidate, Placement, Shape, assemble, reassign
from recover_megatron.workload.edges import Edge, edge
from recover_megatron.workload.seating import can_join, free_of, ring_of, seated


def decide(epoch: int, statuses: Mapping[int, JoinStatus], launch: LaunchGrid, rules: Rules | None = None) -> Decision:
    """The decision of an epoch whose members joined with ``statuses``.

    Raises Disagreement when the workers of one replica tell different things.
    """
    rules = rules or Rules()
    broken = _broken(statuses)
    whole, put_out = seated(_whole(statuses, launch), broken, rules.mesh)
    told = {replica: _told(replica, [statuses[worker] for worker in workers]) for replica, workers in whole.items()}
    at = max((status.at for status in told.values()), default=0)
    begun = {replica: status for replica, status in told.items() if status.at == at and status.step}
    boundary = any(status.at == at and status.boundary for status in told.values()) and not begun
    placement = _placement(whole, statuses, launch, rules, broken)
    grid, fresh, version = dict(whole), tuple[int, ...](), None
    if not whole:
        grid, version = _from_orphans(statuses, launch, rules, broken)  # rarely anything: see there
        fresh, at = tuple(grid), max((status.at for status in statuses.values()), default=0) + 1
    elif boundary:
        grid, fresh = dict(sorted({**whole, **placement.replicas}.items())), tuple(placement.replicas)
        version = _version({status.version for status in told.values()})
    holders, mended, disputed = _holders(whole, fresh, grid, statuses, broken) if boundary else ({}, (), [])
    newest = max(statuses.values(), key=lambda status: (status.iteration, status.checkpoint), default=JoinStatus(None))
    working = {worker for workers in grid.values() for worker in workers}
    enough, state_lost = _prospects(whole, grid, statuses, launch, rules, broken)
    if disputed and rules.strict:
        enough, state_lost = 0, _DISPUTED.format(", ".join(map(str, disputed)))
    return Decision(
        epoch,
        grid,
        tuple(sorted(set(statuses) - working)),
        newest.iteration,
        newest.checkpoint,
        at,
        bool(begun),
        _lost(begun, list(grid), launch, rules) if begun else {},
        regroup=bool(placement.replicas) and not boundary and bool(whole),
        fresh=fresh,
        version=version,
        transfers={worker: heard[0] for worker, heard in holders.items()},
        holders=holders,
        mended=mended,
        disputed=tuple(disputed),
        rebuild=placement.rebuild if whole else {},
        mirrors=_mirrors(grid, statuses, placement, broken) if len(grid) == 1 and not rules.spread else {},
        enough=enough,
        state_lost=state_lost,
        peer_stores={worker: statuses[worker].peer_store for worker in sorted(working)},
        broken=broken,
        order=ring_of(grid, broken),
        put_out=put_out,
    )


_GONE = "nobody holds the state of one of its positions any more"
_DISPUTED = "the states of workers {} differ, and as many say one thing as another: nobody knows which is right"


# ---- who can talk to whom


def _broken(statuses: Mapping[int, JoinStatus]) -> frozenset[Edge]:
    """One end's word is enough: whoever cannot be reached cannot be told so."""
    return frozenset(
        edge(worker, other) for worker, status in statuses.items() for other in status.unreached if other in statuses
    )


# ---- who stands where


def _whole(statuses: Mapping[int, JoinStatus], launch: LaunchGrid) -> dict[int, tuple[int, ...]]:
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


def _candidates(whole: Mapping[int, Sequence[int]], statuses: Mapping[int, JoinStatus]) -> dict[int, Candidate]:
    """Everybody who could take a place: orphans on their way out of the training count as not ready yet.

    Who is not ready and has no position is out for good: its training is over.
    """
    working = {worker for workers in whole.values() for worker in workers}
    return {
        worker: Candidate(status.position, status.node, fixed=not status.ready, ready=status.ready)
        for worker, status in statuses.items()
        if worker not in working and (status.ready or status.position is not None)
    }


def _usable(
    whole: Mapping[int, Sequence[int]], statuses: Mapping[int, JoinStatus], broken: frozenset[Edge]
) -> dict[int, Candidate]:
    """Those of them that can talk to all who work, and to each other."""
    working = {worker for workers in whole.values() for worker in workers}
    return free_of(_candidates(whole, statuses), working, broken)


def _placement(
    whole: Mapping[int, Sequence[int]],
    statuses: Mapping[int, JoinStatus],
    launch: LaunchGrid,
    rules: Rules,
    broken: frozenset[Edge],
) -> Placement:
    """New replicas; where edges are broken either such that an order of the ring does, or of others."""
    candidates, shape, slots = _candidates(whole, statuses), _shape(launch, rules), len(launch.replicas)
    placement = assemble(set(whole), candidates, shape, slots)
    if broken and not can_join(whole, placement, broken, rules.mesh):
        placement = assemble(set(whole), _usable(whole, statuses, broken), shape, slots)
    return placement


def _shape(launch: LaunchGrid, rules: Rules) -> Shape:
    return Shape(launch.size, launch.tensor_groups, rules.cross_node)


def _from_orphans(
    statuses: Mapping[int, JoinStatus], launch: LaunchGrid, rules: Rules, broken: frozenset[Edge]
) -> tuple[dict[int, tuple[int, ...]], int | None]:
    """Nobody's replica is whole: the replicas that the orphans make, and the version of their state.

    The newest version that orphans in all positions hold: that after the last iteration, or that before it.  The older
    one means that a step is made again from the very state that it began with; that is decided only when everybody has
    told.  What is older still is of no use: committed steps are not taken back.
    """
    on_their_way = any(not status.ready and status.position is not None for status in statuses.values())
    candidates = {worker: one for worker, one in _candidates({}, statuses).items() if one.ready}
    last = max((status.iteration for status in statuses.values()), default=0) - 1
    held = {statuses[worker].version for worker in candidates}
    versions = sorted((version for version in held if version is not None and version >= last), reverse=True)
    for version in versions[:1] if on_their_way else versions:
        holders = {
            worker: candidate
            for worker, candidate in candidates.items()
            if statuses[worker].version == version and statuses[worker].digest in _majority(statuses, worker, version)
        }
        usable = free_of(holders, set(), broken)
        found = assemble(set(), usable, _shape(launch, rules), len(launch.replicas)).replicas
        if found:
            return dict(sorted(found.items())), version
    return {}, None


def _version(told: set[int | None]) -> int | None:
    """That of all replicas at a boundary: whoever has come there has done the same steps."""
    if len(told) > 1:
        raise Disagreement(f"replicas have seen different numbers of iterations before one step: {told}")
    return told.pop()


def _majority(statuses: Mapping[int, JoinStatus], worker: int, version: int) -> set[str]:
    """The digest that most holders of a version have at this worker's position (of equally many the smallest)."""
    position = statuses[worker].position
    digests = [s.digest for s in statuses.values() if (s.position, s.version, s.ready) == (position, version, True)]
    return {_most(digests)}


def _most(values: Sequence[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _holders(
    whole: Mapping[int, tuple[int, ...]],
    fresh: Sequence[int],
    grid: Mapping[int, tuple[int, ...]],
    statuses: Mapping[int, JoinStatus],
    broken: frozenset[Edge],
) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], list[int]]:
    """Who gets its state from whom: all of the fresh replicas, and who holds another state than most of its column.

    Of those who hold it, each receiver begins with another one.

    And who of a column differ without a majority: there the lowest replica is followed, or nobody (``Rules.strict``).
    """
    holders: dict[int, tuple[int, ...]] = {}
    mended: list[int] = []
    disputed: list[int] = []
    for position in range(len(next(iter(grid.values()), ()))):
        column = [workers[position] for workers in whole.values()]
        told = [worker for worker in column if statuses[worker].digest]
        right = _most([statuses[worker].digest for worker in told]) if told else ""
        if told and 2 * sum(statuses[worker].digest == right for worker in told) <= len(told):
            disputed += told
            right = statuses[told[0]].digest
        donors = [worker for worker in column if not told or statuses[worker].digest == right]
        wrong = [worker for worker in told if statuses[worker].digest != right]
        mended += wrong
        for number, worker in enumerate([*wrong, *(grid[replica][position] for replica in fresh)]):
            heard = [donor for donor in donors if edge(worker, donor) not in broken] or donors
            first = number % len(heard)
            holders[worker] = (*heard[first:], *heard[:first])
    return dict(sorted(holders.items())), tuple(sorted(mended)), sorted(disputed)


def _mirrors(
    grid: Mapping[int, tuple[int, ...]],
    statuses: Mapping[int, JoinStatus],
    placement: Placement,
    broken: frozenset[Edge],
) -> dict[int, int]:
    """The last replica's state is nowhere else: a spare in each position keeps it, too."""
    (workers,) = grid.values()
    keepers: dict[int, int] = {}
    for worker, status in sorted(statuses.items()):
        if not status.ready or status.position is None or worker in (*workers, *placement.rebuild):
            continue
        if edge(worker, workers[status.position]) not in broken:
            keepers.setdefault(status.position, worker)
    return {worker: workers[position] for position, worker in sorted(keepers.items())}


def _prospects(
    whole: Mapping[int, Sequence[int]],
    grid: Mapping[int, Sequence[int]],
    statuses: Mapping[int, JoinStatus],
    launch: LaunchGrid,
    rules: Rules,
    broken: frozenset[Edge],
) -> tuple[int, str]:
    """How many replicas there may be when all have done what they are told; and what of the state forbids more."""
    candidates = {
        worker: Candidate(candidate.position, candidate.node)
        for worker, candidate in _usable(whole, statuses, broken).items()
    }
    shape, slots = _shape(launch, rules), len(launch.replicas)
    first = assemble(set(whole), candidates, shape, slots)
    rebuilt = {
        worker: Candidate(first.rebuild.get(worker, candidate.position), candidate.node)
        for worker, candidate in candidates.items()
    }
    number = len(whole) + len(assemble(set(whole), rebuilt, shape, slots).replicas)
    if whole or grid:
        return max(number, len(grid)), ""
    # Nobody computes: what counts is what the orphans hold between them, or may hold when they have come.
    held = {s.position for s in statuses.values() if s.position is not None and (not s.ready or s.version is not None)}
    waited = any(not status.ready and status.position is not None for status in statuses.values())
    if waited and len(held) == launch.size and first.replicas:
        return len(first.replicas), ""
    return 0, _GONE if number > 0 else ""


# ---- who runs what


def _lost(
    begun: Mapping[int, JoinStatus], replicas: Sequence[int], launch: LaunchGrid, rules: Rules
) -> dict[int, list[list[int]]]:
    """The microbatches of the step under way that are in nobody's gradient, shared out: replica -> by inner rank."""
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
    return reassign(lost, launch.inner_ranks, replicas, load=before, multiple_of=rules.multiple_of * launch.inner_ranks)


def _told(replica: int, statuses: Sequence[JoinStatus]) -> JoinStatus:
    """What a whole replica says: its workers run in lock-step, so they must say the same.

    But for one case: a decision is over, one worker has heard so and begun the next, and the coordinator died before
    all were told.  The next plan tells the others; none of their replica can have run anything meanwhile.
    """
    newest = max(statuses, key=lambda status: (status.at, status.step, status.boundary))
    for status in statuses:
        if status.at == newest.at and status.step == newest.step and set(status.ran) != set(newest.ran):
            raise Disagreement(f"workers of replica {replica} ran different microbatches: {status} and {newest}")
    if any(status.at < newest.at - bool(not newest.ran) for status in statuses):
        raise Disagreement(f"workers of replica {replica} are at different decisions: {list(statuses)}")
    return newest


def _told_of(begun: Mapping[int, JoinStatus]) -> dict[int, list[int]]:
    return {replica: list(status.ran) for replica, status in begun.items()}
