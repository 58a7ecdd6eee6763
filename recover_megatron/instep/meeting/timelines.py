"""Rollbacks: choice of the state to which a run goes back, and removal of states of earlier timelines.

    timeline 0    1  2  3  4  5  6  7  the state is lost
                           |
    timeline e                '-- 5  6  7  8 ...        e: the epoch that decided to go back to iteration 4

A worker that missed the rollback may still offer a state of iteration 6.  This state is unusable: the other workers
have run iterations 5 and 6 again, with sums that differ by rounding.  All functions are pure, as in `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recover_megatron.instep.decision import (
    HELD,
    MEMORY,
    CompleteSnapshot,
    JoinStatus,
    Rollback,
    Timeline,
    merged,
)


def newest(statuses: Mapping[int, JoinStatus]) -> Timeline:
    """Return the newest timeline that any status reports."""
    return max((status.timeline for status in statuses.values()), default=(0, 0))


def same_as(statuses: Mapping[int, JoinStatus]) -> int:
    """Return the value of ``Decision.same_as`` that workers in the newest timeline report; -1: none."""
    return max((status.same_as for status in statuses.values() if status.timeline == newest(statuses)), default=-1)


def of_timeline(statuses: Mapping[int, JoinStatus], timeline: Timeline) -> dict[int, JoinStatus]:
    """Return the statuses with the iterations and states of earlier timelines removed.

    A state of an earlier timeline remains if ``timeline`` began with this state, since the state's worker may not have
    received the plan of the rollback.
    """
    found, (epoch, begun_after), before = dict(statuses), timeline, same_as(statuses)
    for worker, status in statuses.items():
        if status.timeline != timeline:
            found[worker] = replace(found[worker], iteration=begun_after + 1)
        if status.state_of != epoch:
            found[worker] = replace(found[worker], last_step=(0, 0))
            if (status.state_of, status.version) != (before, begun_after):
                found[worker] = replace(found[worker], version=None, digest="")
    return found


def pending_rollback(statuses: Mapping[int, JoinStatus], version: int | None) -> Rollback | None:
    """Return the ``HELD`` rollback that began the newest timeline, if no worker has carried out this rollback yet.

    Returns None otherwise, or if ``version`` is not the iteration of that rollback.
    """
    _, begun_after = newest(statuses)
    lost = undone(statuses) - 1 - begun_after
    held = same_as(statuses) >= 0 and version == begun_after
    return Rollback(begun_after, HELD, lost) if held and lost >= 0 else None


def unreadable(statuses: Mapping[int, JoinStatus]) -> str:
    """Return the end of a message that names the checkpoints that could not be loaded; empty if there are none."""
    found = sorted({iteration for status in statuses.values() for iteration in status.unreadable})
    if not found:
        return ""
    return f", and the checkpoints of iterations {', '.join(map(str, found))} could not be loaded"


def kept(statuses: Mapping[int, JoinStatus], timeline: Timeline) -> CompleteSnapshot | None:
    """Return the newest snapshot that no worker failed to load and whose parts all have a holder; None: none exists.

    Snapshots of earlier timelines do not count.  (Workers that took part in a rollback report their older snapshots
    under the new timeline.)
    """
    holders: dict[tuple[int, int, int], dict[int, dict[int, str]]] = {}
    for worker, status in sorted(statuses.items()):
        for part, iteration, of, taken, parts in status.snapshots:
            if of == timeline[0]:
                by_part = holders.setdefault((iteration, taken, parts), {})
                by_part.setdefault(part, {})[worker] = status.peer_store
    spoiled = {iteration for status in statuses.values() for iteration, of in status.spoiled if of == timeline[0]}
    complete = (one for one, by_part in holders.items() if len(by_part) == one[2] and one[0] not in spoiled)
    newest = max(complete, default=None)
    return None if newest is None else CompleteSnapshot(newest[0], holders[newest], newest[1])


def covered(kept: CompleteSnapshot | None, copies: Mapping[int, Sequence[int]]) -> bool:
    """Return whether every worker that ``copies`` names for a part holds this part of ``kept``."""
    if kept is None or not copies:
        return not copies
    if set(kept.holders) != set(copies):
        return False  # the snapshot has another number of parts
    return all(worker in kept.holders[part] for part, keepers in copies.items() for worker in keepers)


def undone(statuses: Mapping[int, JoinStatus]) -> int:
    """Return the least ``JoinStatus.undone`` of members in the newest timeline; 0: no rollback is pending."""
    return min((status.undone for status in statuses.values() if status.timeline == newest(statuses)), default=0)


def target(
    statuses: Mapping[int, JoinStatus],
    memory: CompleteSnapshot | None = None,
    held: int | None = None,
    seen: int = 0,
    committed: int = 0,
) -> Rollback | None:
    """Return the rollback to the newest state: ``held``, ``memory``, or a checkpoint that no worker failed to load.

    Returns None if there is no such state.  ``memory``: the newest snapshot.  ``held``: version of a state that workers
    hold.  ``seen``: iteration that was under way, even if no status reports it.  ``committed``: last committed
    decision.
    """
    unreadable = {iteration for status in statuses.values() for iteration in status.unreadable}
    every = merged(*(status.checkpoints for status in statuses.values()))
    under_way = max([seen, undone(statuses), *(status.iteration for status in statuses.values())])
    steps = (status.last_step for status in statuses.values())
    last = max([under_way - 1, *(iteration for iteration, decision in steps if decision <= committed)])
    found = [one for one in every if one[0] not in unreadable][:1]
    if memory is not None and (not found or memory.iteration >= found[0][0]):
        found = [(memory.iteration, MEMORY)]
    if held is not None and (not found or held >= found[0][0]):
        found = [(held, HELD)]
    for iteration, source in found:
        return Rollback(iteration, source, max(0, last - iteration), last >= under_way > iteration)
    return None
