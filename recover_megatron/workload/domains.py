"""Failure domains: what may be lost at once, and how copies are placed so that no single loss takes all of them.

A domain is whatever fails as a whole: a node, the nodes of a rack or behind a switch.  A worker stands in several, one
inside the other; a replica breaks with each of them that any of its workers stands in: it *touches* them.

    ring, two replicas a node     r0 (a)   r1 (a)   r2 (b)   r3 (b)
    stride 1                      with node a go what r0 owns, and its copy on r1
    stride 2                      r0's copy is on r2, r1's on r3: whichever node is lost, each unit has a holder left

Where Megatron's order of ranks puts the workers of each replica is arithmetic, too (`replicas_of`).

Pure functions; the same answer on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm

Touched = Mapping[int, frozenset[str]]
"""Worker -> the domains that its replica touches."""

_MOST_STRIDES = 64
"""So many are tried, and half of the ring: nodes hold no more workers of a column."""


def names(node: str, domain: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The domains of a worker, by names that no other level has: its node, what the user says, SLURM's switches.

    ``domain``: names separated by commas; empty: nothing was said.  SLURM with a topology plugin tells the way to a
    node: ``SLURM_TOPOLOGY_ADDR`` "s0.s4.tux3" by ``SLURM_TOPOLOGY_ADDR_PATTERN`` "switch.switch.node" (its manual,
    srun, "OUTPUT ENVIRONMENT VARIABLES").
    """
    found = [f"node {node}"] if node else []
    found += [f"domain {name.strip()}" for name in domain.split(",") if name.strip()]
    way = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(way) == len(pattern) and not domain.strip():
        found += [f"{kind} {'.'.join(way[: at + 1])}" for at, kind in enumerate(pattern) if kind not in ("", "node")]
    return tuple(found)


def touched_by(replicas: Iterable[Sequence[int]], domains: Mapping[int, Sequence[str]]) -> dict[int, frozenset[str]]:
    """Of all workers of ``replicas``; ``domains``: each worker's own."""
    found: dict[int, frozenset[str]] = {}
    for workers in replicas:
        found |= dict.fromkeys(workers, frozenset(name for worker in workers for name in domains.get(worker, ())))
    return found


def stride_of(ring: Sequence[int], touched: Touched, copies: int, before: int = 1) -> int:
    """How many places further the next copy of a worker's unit is, such that fewest domains have all copies of any.

    Of equally good ones the smallest, since a finished sum has so far to go; but ``before``, the present one, stays if
    it is as good: a change moves every copy.  1 where nothing can be gained.
    """
    return _best(ring, touched, copies, before)[0]


def fewest_shared(ring: Sequence[int], touched: Touched, copies: int) -> int:
    """In how many domains all copies of a unit still are with that stride, summed over all units.

    Without those that all replicas touch, about which nothing can be done.
    """
    return _best(ring, touched, copies, 1)[1]


def _best(ring: Sequence[int], touched: Touched, copies: int, before: int) -> tuple[int, int]:
    """The stride, and that number."""
    size, copies = len(ring), min(copies, len(ring))
    everywhere = frozenset.intersection(*(touched[worker] for worker in ring))  # nothing can be done about those
    apart = [touched[worker] - everywhere for worker in ring]
    if copies < 2:
        return 1, _shared(apart, copies, 1)
    tried = [before, *range(1, min(size - 1, _MOST_STRIDES) + 1), size // 2]
    best, least = 1, sum(map(len, apart)) + 1
    for stride in tried:
        if any(stride * hop % size == 0 for hop in range(1, copies)):
            continue  # it would come back to a holder
        found = _shared(apart, copies, stride)
        if found < least:
            best, least = stride, found
        if not found:
            break
    return best, least


def _shared(apart: Sequence[frozenset[str]], copies: int, stride: int) -> int:
    """In how many domains all copies are, summed over all units."""
    size, total = len(apart), 0
    for at in range(size):
        common = apart[at]
        for hop in range(1, copies):
            if not common:
                break
            common = common & apart[(at + hop * stride) % size]
        total += len(common)
    return total


Replicas = tuple[tuple[int, ...], ...]
"""By number, the ranks of each, in the order (inner rank, stage, context, tensor), tensor fastest."""


def data_parallel_ranks_per_replica(*, tensor: int, context: int, expert: int, expert_tensor: int) -> int:
    """How many of Megatron's data-parallel ranks one replica (the fault unit) holds.

    Without experts spread over data-parallel ranks it is 1.  With them a replica is the smallest set of workers closed
    under both kinds of groups: dense ones take ``tensor * context`` neighbouring workers of a pipeline stage, expert
    ones ``expert_tensor * expert`` (Megatron's default order, tp-cp-ep-dp-pp), so the closed set is their least common
    multiple.

    >>> data_parallel_ranks_per_replica(tensor=2, context=1, expert=4, expert_tensor=1)
    2
    """
    dense = tensor * context
    return lcm(dense, expert * expert_tensor if expert > 1 else dense) // dense


def replicas_of(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> Replicas:
    """The replicas of Megatron's rank order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with ``pipeline_before_data``.

    ValueError if the sizes do not fill the world.

    >>> replicas_of(8, tensor=2, context=1, pipeline=2, inner_ranks=1)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    inner = tensor * context
    ranks, rest = divmod(world, inner * pipeline)
    if rest or ranks % inner_ranks:
        raise ValueError(f"{world} workers cannot hold replicas of {inner} x {pipeline} x {inner_ranks}")

    def worker(data: int, stage: int, at: int) -> int:
        if pipeline_before_data:
            return at + inner * (stage + pipeline * data)
        return at + inner * (data + ranks * stage)

    return tuple(
        tuple(
            worker(replica * inner_ranks + inner_rank, stage, at)
            for inner_rank in range(inner_ranks)
            for stage in range(pipeline)
            for at in range(inner)
        )
        for replica in range(ranks // inner_ranks)
    )
