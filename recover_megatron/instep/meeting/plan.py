"""Computes an epoch's decision from the statuses of the members, with the same result on every worker.

Every worker joins with a ``JoinStatus``; the coordinator sends all statuses, in the same order, to all workers.  From
them ``decide`` computes which worker has which place, and which replica runs which microbatches of the step under way
(``Decision``).

While any replica is complete, spares get places only at a *boundary* before a step, where no replica is in the middle
of a decision.  If ``regroup`` is True, all workers meet at the next boundary in another epoch, whose plan gives the
spares places.  If no replica is complete, orphans that together hold one version of the state continue from that
version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import (
    HELD,
    Beyond,
    CompleteSnapshot,
    Decision,
    JoinStatus,
    Rollback,
    Rules,
    Timeline,
    merged,
)
from recover_megatron.instep.meeting import timelines
from recover_megatron.instep.meeting.members import (
    Grid,
    Members,
    draining_of,
    leaving_of,
    most,
    whole_replicas,
    without,
)
from recover_megatron.workload import Placement, reassign
from recover_megatron.workload.domains import touched_by
from recover_megatron.workload.grid import LaunchGrid
from recover_megatron.workload.placement import Edge, compatible_replicas, edge
from recover_megatron.workload.snapshots import FIRST_INTERVAL, Spread, copies

_DISPUTED = (
    "the states of workers {} differ, and no state has a majority: it is unknown which is right; checkpoints saved "
    "since the last comparison may be wrong, too"
)


def decide(
    epoch: int,
    statuses: Mapping[int, JoinStatus],
    launch: LaunchGrid,
    rules: Rules | None = None,
    drain: Sequence[str] = (),
    beyond: Beyond | None = None,
) -> Decision:
    """Return the decision of an epoch whose members joined with ``statuses``.

    ``drain``: nodes newly requested to be drained, in addition to those of earlier decisions.  ``beyond``: facts about
    workers that are not members.  Raises Disagreement if statuses that must agree differ.
    """
    rules = rules or Rules()
    beyond = beyond or Beyond()
    facts = _facts(statuses, launch, rules, drain, beyond)
    members, there, state = facts.members, facts.members.statuses, _state(epoch, facts, beyond)
    grid, whole = state.grid, members.whole
    holders, repaired, disputed = _holders(members, state.fresh, grid) if facts.boundary else ({}, (), [])
    enough, state_lost = state.enough, state.state_lost
    if disputed and rules.strict:
        enough, state_lost = 0, _DISPUTED.format(", ".join(map(str, disputed)))
    working = {worker for workers in grid.values() for worker in workers}
    domains = {worker: there[worker].domains for worker in working}
    staying = {replica: workers for replica, workers in grid.items() if replica not in facts.leaving}
    wanted = copies(list(staying.values()), domains, rules.memory, _spread(staying, launch, rules))
    paces = {replica: pace for replica, workers in whole.items() if (pace := there[workers[0]].pace) > 0}
    return Decision(
        epoch,
        grid,
        tuple(sorted(set(facts.everybody) - working)),
        state.iteration,
        _newest(there).checkpoint,
        state.at,
        bool(facts.begun),
        _lost(facts.begun, list(grid), launch, rules, paces) if facts.begun else {},
        paces,
        regroup=bool(facts.leaving) or (bool(state.placement.replicas) and not facts.boundary and bool(grid)),
        fresh=state.fresh,
        version=state.version,
        holders=holders,
        repaired=repaired,
        disputed=tuple(disputed),
        rollback=state.rollback,
        undone=timelines.undone(statuses) if state.rollback is None else state.rollback.next,
        timeline=state.timeline,
        before=facts.timeline,
        same_as=state.same_as,
        short=enough == 0 and not state_lost and not whole and state.back_to is not None and rules.replaced,
        checkpoints=merged(*(status.checkpoints for status in there.values()), until=state.rollback),
        copies=wanted,
        kept=state.in_memory,
        covered=timelines.covered(state.in_memory, wanted),
        snapshot_interval=rules.memory_interval or _interval(there),
        rebuild=state.rebuild,
        mirrors=members.mirrors(grid, state.placement) if len(grid) == 1 and not rules.spread else {},
        enough=enough,
        state_lost=state_lost,
        peer_stores={worker: there[worker].peer_store for worker in sorted(working)},
        touched=touched_by(grid.values(), domains),
        broken=members.broken,
        left_out=facts.left_out,
        draining=facts.draining,
        undrained=facts.undrained,
        leaving=facts.leaving,
    )


# ---- the statuses


@dataclass(frozen=True)
class _Facts:
    """Facts computed from the statuses.  ``everybody``: all statuses.  ``members``: the members that continue.

    ``common``: complete replica (even if it leaves) -> common status of its workers.  ``at``: newest decision of these
    replicas.  ``begun``: replica that has begun ``at``, if ``at`` is a step -> its common status.  ``boundary``:
    True if some replica is about to begin step ``at``, and no replica has begun it.
    """

    members: Members
    everybody: Mapping[int, JoinStatus]
    common: Mapping[int, JoinStatus]
    at: int
    begun: Mapping[int, JoinStatus]
    boundary: bool
    timeline: Timeline
    left_out: Mapping[int, tuple[Edge, ...]]
    draining: tuple[str, ...]
    undrained: Mapping[str, str]
    leaving: frozenset[int]


def _facts(
    statuses: Mapping[int, JoinStatus], launch: LaunchGrid, rules: Rules, drain: Sequence[str], beyond: Beyond
) -> _Facts:
    timeline = timelines.newest(statuses)
    everybody = timelines.of_timeline(statuses, timeline)
    broken = _broken(everybody)
    whole, left_out = compatible_replicas(whole_replicas(everybody, launch), broken)
    common = {replica: _common(replica, [everybody[w] for w in workers]) for replica, workers in whole.items()}
    at = max((status.at for status in common.values()), default=0)
    begun = {replica: status for replica, status in common.items() if status.at == at and status.step}
    boundary = any(status.at == at and status.boundary for status in common.values()) and not begun
    draining, undrained = draining_of(everybody, whole, rules, drain)
    going_on, whole = without(draining, everybody, whole, boundary)
    newest = max((status.at for status in everybody.values()), default=0)
    missed = 0 if common else max(0, beyond.committed - newest)
    members = Members(going_on, whole, launch, rules, broken, missed)
    leaving = leaving_of(whole, going_on, draining)
    return _Facts(members, everybody, common, at, begun, boundary, timeline, left_out, draining, undrained, leaving)


# ---- grid and state


@dataclass(frozen=True)
class _State:
    """Grid of an epoch, and the state with which the epoch begins; for most fields see ``Decision``.

    ``placement``: replicas that can be formed now or at the next boundary.  ``in_memory``: newest complete snapshot.
    ``back_to``: rollback that is possible if the state is lost; None: no older state is left.
    """

    grid: Grid
    fresh: tuple[int, ...]
    version: int | None
    at: int
    iteration: int
    timeline: Timeline
    same_as: int
    rollback: Rollback | None
    rebuild: Mapping[int, int]
    placement: Placement
    in_memory: CompleteSnapshot | None
    back_to: Rollback | None
    enough: int
    state_lost: str


def _state(epoch: int, facts: _Facts, beyond: Beyond) -> _State:
    members, statuses, at = facts.members, facts.members.statuses, facts.at
    placement = members.placement()
    grid, fresh, version = dict(members.whole), tuple[int, ...](), None
    if not grid:
        grid, version = members.orphans()  # no replicas, unless orphans hold one version in all positions
        fresh = tuple(grid)
    elif facts.boundary:
        grid, fresh = dict(sorted({**grid, **placement.replicas}.items())), tuple(placement.replicas)
        version = _version({status.version for status in facts.common.values()})
    seen = beyond.seen if members.missed else 0
    iteration, timeline, same = max(_newest(statuses).iteration, seen), facts.timeline, timelines.same_as(statuses)
    rollback = timelines.pending_rollback(statuses, version) if fresh and not members.whole else None
    rebuild = placement.rebuild if members.whole else {}
    enough, state_lost = members.prospects(grid)
    in_memory = timelines.kept(statuses, timeline)
    of_old, held = members.held() if state_lost else ({}, None)
    if members.missed and held is not None:
        seen = max(seen, held + 2)  # the holders were late for iteration held + 1, which was committed
    back_to = timelines.target(statuses, in_memory, held, seen, beyond.committed)
    if beyond.aside and not grid:
        enough, state_lost = max(1, enough), ""  # wait until late workers return with a state, or are evicted
    elif state_lost and back_to is not None:
        state_lost = ""
        if back_to.source == HELD:
            grid = {} if members.on_their_way else of_old
            fresh = tuple(grid)
        elif (found := members.going_back()) is not None:
            grid, fresh, rebuild = dict(sorted(found.replicas.items())), tuple(sorted(found.replicas)), found.rebuild
        if grid:
            rollback, version = back_to, back_to.iteration
            iteration, timeline = back_to.iteration + 1, (epoch, back_to.iteration)
            same = facts.timeline[0] if back_to.source == HELD else -1
    if grid and not members.whole:
        placement = replace(members, whole=grid).placement()  # replicas in addition to those that begin now
        rebuild = placement.rebuild
    if grid:
        rebuild = {**members.ahead(grid, placement), **rebuild}
    if not members.whole:
        newest = max((status.at for status in statuses.values()), default=0)
        at = newest + members.missed + 1 if grid else newest
    if state_lost:
        unseen = "; no live worker has seen the last committed iterations" if members.missed else ""
        enough, state_lost = 0, state_lost + unseen + timelines.unreadable(statuses)
    return _State(
        grid, fresh, version, at, iteration, timeline, same, rollback, rebuild, placement, in_memory, back_to, enough,
        state_lost,
    )  # fmt: skip


def _newest(statuses: Mapping[int, JoinStatus]) -> JoinStatus:
    return max(statuses.values(), key=lambda status: (status.iteration, status.checkpoint), default=JoinStatus(None))


def _version(versions: set[int | None]) -> int | None:
    """Return the state version of all replicas at a boundary; raise Disagreement if the versions differ."""
    if len(versions) > 1:
        raise Disagreement(f"replicas report different versions of the state before one step: {versions}")
    return versions.pop()


def _interval(statuses: Mapping[int, JoinStatus]) -> int:
    """Return the largest snapshot interval that any worker reports, since some workers may report an old one."""
    return max((status.snapshot_interval for status in statuses.values()), default=0) or FIRST_INTERVAL


def _spread(grid: Mapping[int, Sequence[int]], launch: LaunchGrid, rules: Rules) -> Spread | None:
    """Return how the optimizer state is spread over replicas; None: it is not spread.

    With Megatron's optimizer instances every lost replica may have held a copy of any shard, so each lost replica
    reduces the number of holders by one.
    """
    if not rules.spread:
        return None
    missing = 0 if rules.placed else launch.launched - len(grid)
    return Spread(max(1, rules.holders - missing), rules.placed)


# ---- reachability


def _broken(statuses: Mapping[int, JoinStatus]) -> frozenset[Edge]:
    """Return all pairs of workers of which at least one reports the other as unreachable."""
    return frozenset(
        edge(worker, other) for worker, status in statuses.items() for other in status.unreached if other in statuses
    )


def _holders(
    members: Members, fresh: Sequence[int], grid: Mapping[int, tuple[int, ...]]
) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], list[int]]:
    """Return receiver -> holders of the state that it needs; receivers to be repaired; workers of disputed columns.

    Receivers are all workers of fresh replicas, and the workers to be repaired, whose state differs from the majority
    of their column.  The order of holders differs between receivers, to share the work.  A column without a majority is
    disputed: it uses the state of its lowest replica, unless the run ends (``Rules.strict``).
    """
    statuses = members.statuses
    holders: dict[int, tuple[int, ...]] = {}
    repaired: list[int] = []
    disputed: list[int] = []
    for position in range(len(next(iter(grid.values()), ()))):
        column = [workers[position] for workers in members.whole.values()]
        compared = [worker for worker in column if statuses[worker].digest]
        right = most([statuses[worker].digest for worker in compared]) if compared else ""
        if compared and 2 * sum(statuses[worker].digest == right for worker in compared) <= len(compared):
            disputed += compared
            right = statuses[compared[0]].digest
        donors = [worker for worker in column if not compared or statuses[worker].digest == right]
        wrong = [worker for worker in compared if statuses[worker].digest != right]
        repaired += wrong
        for number, worker in enumerate([*wrong, *(grid[replica][position] for replica in fresh)]):
            first = number % len(donors)
            holders[worker] = (*donors[first:], *donors[:first])
    return dict(sorted(holders.items())), tuple(sorted(repaired)), sorted(disputed)


# ---- lost microbatches


def _lost(
    begun: Mapping[int, JoinStatus],
    replicas: Sequence[int],
    launch: LaunchGrid,
    rules: Rules,
    paces: Mapping[int, float],
) -> dict[int, list[list[int]]]:
    """Distribute the lost microbatches of the step under way to the replicas.

    Lost microbatches are in the gradients of no replica.  Returns replica -> for each inner rank, the ids that it runs.
    Raises Disagreement if replicas report different totals, or if two replicas ran the same microbatch.
    """
    totals = {status.total for status in begun.values()}
    if len(totals) > 1:
        raise Disagreement(f"replicas disagree on the microbatches of one step: {sorted(totals)}")
    ran = sorted(j for status in begun.values() for j in status.ran)
    if len(set(ran)) != len(ran):
        ran_by = {replica: list(status.ran) for replica, status in begun.items()}
        raise Disagreement(f"two replicas ran the same microbatches (replica: ids): {ran_by}")
    lost = sorted(set(range(totals.pop())) - set(ran))
    load = {replica: len(status.ran) for replica, status in begun.items()}
    late = {replica: 0 for replica in replicas if replica not in begun}
    # A replica that has not begun this step must run its complete share; all others have run their shares, and wait.
    before = dict.fromkeys(replicas, 0) if not late else {**load, **late}
    least, speeds = rules.least * launch.inner_ranks, {replica: 1 / pace for replica, pace in paces.items()}
    return reassign(lost, launch.inner_ranks, replicas, load=before, speeds=speeds, least=least)


def _common(replica: int, statuses: Sequence[JoinStatus]) -> JoinStatus:
    """Return the common status of a complete replica; raise Disagreement if its workers' statuses do not agree.

    The workers run in lock-step, so they are at the same decision, with one exception: if the coordinator died after it
    had notified only some workers of a commit, these have begun the next decision, but finished no microbatch of it.
    The plan of this epoch notifies the other workers of the commit.
    """
    newest = max(statuses, key=lambda status: (status.at, status.step, status.boundary))
    for status in statuses:
        if status.at == newest.at and status.step == newest.step and set(status.ran) != set(newest.ran):
            raise Disagreement(f"workers of replica {replica} ran different microbatches: {status} and {newest}")
    if any(status.at < newest.at - bool(not newest.ran) for status in statuses):
        raise Disagreement(f"workers of replica {replica} are at different decisions: {list(statuses)}")
    return newest
