"""What an epoch decides, from what its members joined with: pure, the same answer on every worker.

Every worker joins with a ``JoinStatus``; the coordinator gives all of them to all (one place, one order), and
``decide`` makes of them who works where, and who runs what of the step under way (``Decision``).

The grid changes only where no replica is in the middle of anything: at the *boundary* before a step.  Everybody who
sees ``regroup`` comes to an epoch of its own there, and that one places the spares.  When no replica is whole any more
there is nobody to wait for: orphans that hold one version of the state between them begin again where it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recover_megatron.errors import Disagreement
from recover_megatron.instep.decision import (
    HELD,
    Beyond,
    Decision,
    JoinStatus,
    Kept,
    Rollback,
    Rules,
    Timeline,
    merged,
)
from recover_megatron.instep.meeting import timelines
from recover_megatron.instep.meeting.standing import (
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
from recover_megatron.workload.placement import Edge, edge, seated
from recover_megatron.workload.snapshots import FIRST_INTERVAL, Spread, copies

_DISPUTED = (
    "the states of workers {} differ, and as many say one thing as another: nobody knows which is right; what was "
    "saved since they were compared last may be wrong, too"
)


def decide(
    epoch: int,
    statuses: Mapping[int, JoinStatus],
    launch: LaunchGrid,
    rules: Rules | None = None,
    drain: Sequence[str] = (),
    beyond: Beyond | None = None,
) -> Decision:
    """The decision of an epoch whose members joined with ``statuses``.

    ``drain``: nodes that somebody is about to switch off, beside those on which earlier epochs have decided.

    Raises Disagreement when the workers of one replica tell different things.
    """
    rules = rules or Rules()
    beyond = beyond or Beyond()
    heard = _hear(statuses, launch, rules, drain, beyond)
    members, there, stands = heard.members, heard.members.statuses, _stand(epoch, heard, beyond)
    grid, whole = stands.grid, members.whole
    holders, mended, disputed = _holders(members, stands.fresh, grid) if heard.boundary else ({}, (), [])
    enough, state_lost = stands.enough, stands.state_lost
    if disputed and rules.strict:
        enough, state_lost = 0, _DISPUTED.format(", ".join(map(str, disputed)))
    working = {worker for workers in grid.values() for worker in workers}
    domains = {worker: there[worker].domains for worker in working}
    staying = {replica: its for replica, its in grid.items() if replica not in heard.leaving}
    wanted = copies(list(staying.values()), domains, rules.memory, _spread(staying, launch, rules))
    paces = {replica: pace for replica, workers in whole.items() if (pace := there[workers[0]].pace) > 0}
    return Decision(
        epoch,
        grid,
        tuple(sorted(set(heard.everybody) - working)),
        stands.iteration,
        _newest(there).checkpoint,
        stands.at,
        bool(heard.begun),
        _lost(heard.begun, list(grid), launch, rules, paces) if heard.begun else {},
        paces,
        regroup=bool(heard.leaving) or (bool(stands.placement.replicas) and not heard.boundary and bool(grid)),
        fresh=stands.fresh,
        version=stands.version,
        holders=holders,
        mended=mended,
        disputed=tuple(disputed),
        rollback=stands.rollback,
        undone=timelines.undone(statuses) if stands.rollback is None else stands.rollback.next,
        timeline=stands.timeline,
        before=heard.timeline,
        same_as=stands.same_as,
        short=enough == 0 and not state_lost and not whole and stands.back_to is not None and rules.replaced,
        checkpoints=merged(*(status.checkpoints for status in there.values()), until=stands.rollback),
        copies=wanted,
        kept=stands.in_memory,
        covered=timelines.covered(stands.in_memory, wanted),
        snapshot_interval=rules.memory_interval or _interval(there),
        rebuild=stands.rebuild,
        mirrors=members.mirrors(grid, stands.placement) if len(grid) == 1 and not rules.spread else {},
        enough=enough,
        state_lost=state_lost,
        peer_stores={worker: there[worker].peer_store for worker in sorted(working)},
        touched=touched_by(grid.values(), domains),
        broken=members.broken,
        put_out=heard.put_out,
        draining=heard.draining,
        undrained=heard.undrained,
        leaving=heard.leaving,
    )


# ---- what they have told


@dataclass(frozen=True)
class _Heard:
    """``members``: who goes on, of ``everybody``.  ``told``: what each whole replica says, the leaving ones included.

    ``at``: the newest decision of any; ``begun``: who is in the step of that one; ``boundary``: all are before it.
    """

    members: Members
    everybody: Mapping[int, JoinStatus]
    told: Mapping[int, JoinStatus]
    at: int
    begun: Mapping[int, JoinStatus]
    boundary: bool
    timeline: Timeline
    put_out: Mapping[int, tuple[Edge, ...]]
    draining: tuple[str, ...]
    undrained: Mapping[str, str]
    leaving: frozenset[int]


def _hear(
    statuses: Mapping[int, JoinStatus], launch: LaunchGrid, rules: Rules, drain: Sequence[str], beyond: Beyond
) -> _Heard:
    timeline = timelines.newest(statuses)
    everybody = timelines.of_timeline(statuses, timeline)
    broken = _broken(everybody)
    whole, put_out = seated(whole_replicas(everybody, launch), broken)
    told = {replica: _told(replica, [everybody[worker] for worker in workers]) for replica, workers in whole.items()}
    at = max((status.at for status in told.values()), default=0)
    begun = {replica: status for replica, status in told.items() if status.at == at and status.step}
    boundary = any(status.at == at and status.boundary for status in told.values()) and not begun
    draining, undrained = draining_of(everybody, whole, rules, drain)
    going_on, whole = without(draining, everybody, whole, boundary)
    newest = max((status.at for status in everybody.values()), default=0)
    missed = 0 if told else max(0, beyond.committed - newest)
    members = Members(going_on, whole, launch, rules, broken, missed)
    leaving = leaving_of(whole, going_on, draining)
    return _Heard(members, everybody, told, at, begun, boundary, timeline, put_out, draining, undrained, leaving)


# ---- where they stand


@dataclass(frozen=True)
class _Stands:
    """The grid of the epoch and the state with which it begins; what `Decision` says of each.

    ``placement``: the replicas that can be put together, now or at the next boundary.  ``in_memory``: the snapshots
    that are kept; ``back_to``: the state to which all could go back.
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
    in_memory: Kept | None
    back_to: Rollback | None
    enough: int
    state_lost: str


def _stand(epoch: int, heard: _Heard, beyond: Beyond) -> _Stands:
    members, statuses, at = heard.members, heard.members.statuses, heard.at
    placement = members.placement()
    grid, fresh, version = dict(members.whole), tuple[int, ...](), None
    if not grid:
        grid, version = members.orphans()  # rarely anything: see there
        fresh = tuple(grid)
    elif heard.boundary:
        grid, fresh = dict(sorted({**grid, **placement.replicas}.items())), tuple(placement.replicas)
        version = _version({status.version for status in heard.told.values()})
    seen = beyond.seen if members.missed else 0
    iteration, timeline, same = max(_newest(statuses).iteration, seen), heard.timeline, timelines.same_as(statuses)
    rollback = timelines.not_told(statuses, version) if fresh and not members.whole else None
    rebuild = placement.rebuild if members.whole else {}
    enough, state_lost = members.prospects(grid)
    in_memory = timelines.kept(statuses, timeline)
    of_old, held = members.held() if state_lost else ({}, None)
    if members.missed and held is not None:
        seen = max(seen, held + 2)  # the decision in which its holders were late was committed
    back_to = timelines.target(statuses, in_memory, held, seen, beyond.committed)
    if beyond.aside and not grid:
        enough, state_lost = max(1, enough), ""  # who is aside comes back with a state, or is put out: then it is told
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
            same = heard.timeline[0] if back_to.source == HELD else -1
    if grid and not members.whole:
        placement = replace(members, whole=grid).placement()  # beside those that begin now
        rebuild = placement.rebuild
    if grid:
        rebuild = {**members.ahead(grid, placement), **rebuild}
    if not members.whole:
        newest = max((status.at for status in statuses.values()), default=0)
        at = newest + members.missed + 1 if grid else newest
    if state_lost:
        unseen = "; iterations were committed that nobody who lives has seen" if members.missed else ""
        enough, state_lost = 0, state_lost + unseen + timelines.unreadable(statuses)
    return _Stands(
        grid, fresh, version, at, iteration, timeline, same, rollback, rebuild, placement, in_memory, back_to, enough,
        state_lost,
    )  # fmt: skip


def _newest(statuses: Mapping[int, JoinStatus]) -> JoinStatus:
    return max(statuses.values(), key=lambda status: (status.iteration, status.checkpoint), default=JoinStatus(None))


def _version(told: set[int | None]) -> int | None:
    """That of all replicas at a boundary: whoever has come there has done the same steps."""
    if len(told) > 1:
        raise Disagreement(f"replicas have seen different numbers of iterations before one step: {told}")
    return told.pop()


def _interval(statuses: Mapping[int, JoinStatus]) -> int:
    """Somebody may have missed the last time that it was chosen."""
    return max((status.snapshot_interval for status in statuses.values()), default=0) or FIRST_INTERVAL


def _spread(grid: Mapping[int, Sequence[int]], launch: LaunchGrid, rules: Rules) -> Spread | None:
    """How the optimizer's state is; with Megatron's instances a lost replica may have had any holder of a shard."""
    if not rules.spread:
        return None
    missing = 0 if rules.placed else launch.launched - len(grid)
    return Spread(max(1, rules.holders - missing), rules.placed)


# ---- who can talk to whom


def _broken(statuses: Mapping[int, JoinStatus]) -> frozenset[Edge]:
    """One end's word is enough: whoever cannot be reached cannot be told so."""
    return frozenset(
        edge(worker, other) for worker, status in statuses.items() for other in status.unreached if other in statuses
    )


def _holders(
    members: Members, fresh: Sequence[int], grid: Mapping[int, tuple[int, ...]]
) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], list[int]]:
    """Receiver -> those that hold its state; the receivers that had another one; who differ without a majority.

    Receivers are all of the fresh replicas, and those whose state is not that of most of their column; each begins with
    another holder.  Without a majority the lowest replica is followed, or nobody (``Rules.strict``).
    """
    statuses = members.statuses
    holders: dict[int, tuple[int, ...]] = {}
    mended: list[int] = []
    disputed: list[int] = []
    for position in range(len(next(iter(grid.values()), ()))):
        column = [workers[position] for workers in members.whole.values()]
        told = [worker for worker in column if statuses[worker].digest]
        right = most([statuses[worker].digest for worker in told]) if told else ""
        if told and 2 * sum(statuses[worker].digest == right for worker in told) <= len(told):
            disputed += told
            right = statuses[told[0]].digest
        donors = [worker for worker in column if not told or statuses[worker].digest == right]
        wrong = [worker for worker in told if statuses[worker].digest != right]
        mended += wrong
        for number, worker in enumerate([*wrong, *(grid[replica][position] for replica in fresh)]):
            first = number % len(donors)
            holders[worker] = (*donors[first:], *donors[:first])
    return dict(sorted(holders.items())), tuple(sorted(mended)), sorted(disputed)


# ---- who runs what


def _lost(
    begun: Mapping[int, JoinStatus],
    replicas: Sequence[int],
    launch: LaunchGrid,
    rules: Rules,
    paces: Mapping[int, float],
) -> dict[int, list[list[int]]]:
    """The microbatches of the step under way that are in nobody's gradient, shared out: replica -> by inner rank."""
    totals = {status.total for status in begun.values()}
    if len(totals) > 1:
        raise Disagreement(f"replicas disagree on the microbatches of one step: {sorted(totals)}")
    ran = sorted(j for status in begun.values() for j in status.ran)
    if len(set(ran)) != len(ran):
        told = {replica: list(status.ran) for replica, status in begun.items()}
        raise Disagreement(f"microbatches are in the gradients of two replicas: {told}")
    lost = sorted(set(range(totals.pop())) - set(ran))
    load = {replica: len(status.ran) for replica, status in begun.items()}
    late = {replica: 0 for replica in replicas if replica not in begun}
    # A replica that has not begun has all of its share still to run; the others have finished theirs and wait.
    before = dict.fromkeys(replicas, 0) if not late else {**load, **late}
    least, speeds = rules.least * launch.inner_ranks, {replica: 1 / pace for replica, pace in paces.items()}
    return reassign(lost, launch.inner_ranks, replicas, load=before, speeds=speeds, least=least)


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
