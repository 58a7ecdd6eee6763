"""Failure domains: what may be lost at once, and how copies are placed so that no single loss takes all of them.

A domain is whatever fails as a whole: a node, the nodes of a rack or behind a switch.  A worker stands in several, one
inside the other; a replica breaks with each of them that any of its workers stands in: it *touches* them.

    ring, two replicas a node     r0 (a)   r1 (a)   r2 (b)   r3 (b)
    stride 1                      with node a go what r0 owns, and its copy on r1
    stride 2                      r0's copy is on r2, r1's on r3: whichever node is lost, each unit has a holder left

Pure functions; the same answer on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
