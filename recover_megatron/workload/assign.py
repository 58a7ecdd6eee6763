"""Assignment of an iteration's microbatches to the replicas.

The microbatches of an iteration have the ids 0..total-1.  At launch there are D0 data-parallel ranks (replicas * inner
ranks), and stock Megatron deals the ids round-robin: j = n * D0 + r is the n-th microbatch of rank r.  A replica has
``inner_ranks`` of these ranks; rank r is inner rank ``r % inner_ranks`` of replica ``r // inner_ranks``.

A replica has several inner ranks only if experts, or the shards of Megatron-FSDP, are spread over data-parallel ranks.
The inner ranks of a replica run in lock-step: all run their n-th microbatch at the same time, and these microbatches
share the experts.  So ids are given to another replica in rows of ``inner_ranks`` consecutive ids.  Then the same
microbatches share the experts as in a failure-free run.

An interleaved pipeline schedule sends a *group* of microbatches through a stage's first chunk of layers, then the same
group through the stage's second chunk, and so on; then comes the next group.  The last group may be smaller than the
other groups, but no group may be smaller than ``stages``:

    8 microbatches on 4 stages in groups of 4:   4, 4
    9 microbatches             in groups of 4:   4, 4, 1   refused: the last group is too small
                               in groups of 5:   5, 4
    7 microbatches             in groups of 7:   7         a single group of all microbatches is always valid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recover_megatron.workload.quotas import dealt, distinct, fewest_units, known_speeds, whole_units


def assign(
    total: int, inner_ranks: int, replicas: Sequence[int], counts: Mapping[int, int], launch_replicas: int
) -> dict[int, list[list[int]]]:
    """Return the ids of an iteration: replica -> inner rank -> ids in running order; each of 0..total-1 exactly once.

    ``counts``: replica -> number of microbatches, over all inner ranks of the replica (see `quotas`).  A replica first
    gets the ids that it has in a failure-free run, as many as its count allows.  The remaining ids are then dealt in
    ascending order, a row to each replica in turn.  ``launch_replicas``: number of replicas at launch.  If all these
    replicas are live and have equal counts, the result is the same as in a failure-free run.

    Raises ValueError if counts are not multiples of ``inner_ranks`` or do not sum to ``total``, or the total is no
    multiple of the number of data-parallel ranks at launch.
    """
    ids = distinct(replicas)
    _check_inner_ranks(inner_ranks)
    ranks = launch_replicas * inner_ranks
    if launch_replicas < 1 or total < 0 or total % ranks:
        raise ValueError(f"{total} microbatches: no multiple of {launch_replicas} replicas x {inner_ranks} inner ranks")
    _check_counts(ids, counts, inner_ranks)
    if sum(counts[replica] for replica in ids) != total:
        raise ValueError(f"the counts {dict(counts)} do not sum to {total}")
    own = {
        replica: range(replica * inner_ranks, total, ranks)[: counts[replica] // inner_ranks]
        if replica < launch_replicas
        else ()
        for replica in ids
    }
    shares: dict[int, list[list[int]]] = {
        replica: [[first + inner_rank for first in own[replica]] for inner_rank in range(inner_ranks)]
        for replica in ids
    }
    taken = {j for lists in shares.values() for ids_of_inner_rank in lists for j in ids_of_inner_rank}
    rest = [j for j in range(total) if j not in taken]
    _deal(rest, inner_ranks, {replica: counts[replica] // inner_ranks - len(own[replica]) for replica in ids}, shares)
    return shares


def reassign(
    lost: Sequence[int],
    inner_ranks: int,
    replicas: Sequence[int],
    *,
    load: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
    least: int = 1,
) -> dict[int, list[list[int]]]:
    """Share out the ids of ``lost`` microbatches; return replica -> inner rank -> ids in running order.

    Minimises the time at which the last replica finishes, max((load + share) / speed).  ``load``: replica -> number of
    microbatches that it runs before its share, over all its inner ranks (default: 0).  ``speeds``: as in `quotas`.
    Each share is empty, or a multiple of ``inner_ranks`` and at least ``least`` microbatches.

    Raises ValueError if there are no replicas, an id is repeated, a load is negative, or the number of ids is no
    multiple of ``inner_ranks`` or too small for one replica.
    """
    ids = distinct(replicas)
    _check_inner_ranks(inner_ranks)
    if len(set(lost)) != len(lost):
        raise ValueError(f"an id is repeated in {list(lost)}")
    unit, fewest = inner_ranks, fewest_units(least, inner_ranks)
    before = {replica: 0 if load is None else load.get(replica, 0) for replica in ids}
    if min(before.values()) < 0:
        raise ValueError(f"a load is negative in {before}")
    given = dealt(whole_units(len(lost), unit), before, known_speeds(ids, speeds), unit, fewest)
    shares: dict[int, list[list[int]]] = {replica: [[] for _ in range(inner_ranks)] for replica in ids}
    _deal(sorted(lost), inner_ranks, given, shares)
    return shares


def _deal(ids: Sequence[int], inner_ranks: int, rows: Mapping[int, int], shares: Mapping[int, list[list[int]]]) -> None:
    """Add ``ids`` to ``shares``: a row of ``inner_ranks`` ids to each replica in turn.

    ``rows``: replica -> number of rows that it gets.
    """
    turns = sorted((turn, replica) for replica, count in rows.items() for turn in range(count))
    for number, (_, replica) in enumerate(turns):
        for inner_rank, j in enumerate(ids[number * inner_ranks : (number + 1) * inner_ranks]):
            shares[replica][inner_rank].append(j)


def _check_inner_ranks(inner_ranks: int) -> None:
    if inner_ranks < 1:
        raise ValueError(f"a replica has at least one inner rank, not {inner_ranks}")


def _check_counts(ids: Sequence[int], counts: Mapping[int, int], inner_ranks: int) -> None:
    if missing := [replica for replica in ids if replica not in counts]:
        raise ValueError(f"no count for the replicas {missing}")
    if bad := {replica: counts[replica] for replica in ids if counts[replica] < 0 or counts[replica] % inner_ranks}:
        raise ValueError(f"the counts {bad} are negative, or no multiples of {inner_ranks}, the number of inner ranks")
    if stray := sorted(replica for replica, count in counts.items() if count and replica not in ids):
        raise ValueError(f"counts for unknown replicas: {stray}")


def runs(count: int, stages: int, group: int) -> bool:
    """Return whether a schedule of ``stages`` stages can run ``count`` microbatches in groups of ``group``."""
    rest = count % group
    return stages <= group <= count and (rest == 0 or rest >= stages)


def group_size(count: int, stages: int, usual: int) -> int:
    """Return the group size for ``count`` microbatches on ``stages`` stages.

    Returns ``usual``, the user's group size, if the schedule can run with it; otherwise the largest possible smaller
    size; if there is none, the smallest possible larger size.  Raises ValueError if there are fewer microbatches than
    stages.
    """
    if not 1 <= stages <= count:
        raise ValueError(f"an interleaved schedule of {stages} stages cannot run {count} microbatches")
    smaller, larger = range(min(usual, count), stages - 1, -1), range(max(usual + 1, stages), count + 1)
    return next(group for group in (*smaller, *larger) if runs(count, stages, group))
