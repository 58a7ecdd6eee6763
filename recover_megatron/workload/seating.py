"""Who works together where edges are broken: replicas and their workers, by what `edges` finds of numbers.

Pure functions, the same answer on every worker.  ``mesh``: replicas all connect to all when they sum, not in a ring.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recover_megatron.workload.edges import Edge, arrange, between, cover, edge, inside
from recover_megatron.workload.placement import Candidate, Placement


def seated(
    whole: Mapping[int, tuple[int, ...]], broken: Collection[Edge], mesh: bool
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[Edge, ...]]]:
    """The replicas that can go on together, and those that cannot, with the edges that are the reason.

    A replica whose own workers cannot talk to each other is none.
    """
    torn = inside(whole, broken)
    rest = {replica: workers for replica, workers in whole.items() if replica not in torn}
    out = {*torn, *arrange(list(rest), between(rest, broken), mesh=mesh).out}
    standing = {worker for workers in whole.values() for worker in workers}
    reasons = {
        replica: tuple(sorted(pair for pair in broken if set(pair) <= standing and set(pair) & set(whole[replica])))
        for replica in sorted(out)
    }
    return {replica: workers for replica, workers in whole.items() if replica not in out}, reasons


def ring_of(grid: Mapping[int, Sequence[int]], broken: Collection[Edge]) -> tuple[int, ...]:
    """The order of the rings; empty: that of the ids does, or none (a mesh was asked for, and nothing is broken)."""
    edges = between(grid, broken)
    return arrange(list(grid), edges).order if edges else ()


def free_of(candidates: Mapping[int, Candidate], working: set[int], broken: Collection[Edge]) -> dict[int, Candidate]:
    """Those of the candidates that can talk to all who work and to each other."""
    cut_off = {pair[1 - at] for pair in broken for at in (0, 1) if pair[at] in working}
    rest = set(candidates) - cut_off
    cut_off |= cover({pair for pair in broken if set(pair) <= rest})
    return {worker: candidate for worker, candidate in candidates.items() if worker not in cut_off}


def can_join(whole: Mapping[int, Sequence[int]], placement: Placement, broken: Collection[Edge], mesh: bool) -> bool:
    """Whether new replicas can be had as they are: rings go round all of them, and each worker hears a donor."""
    grid = {**whole, **placement.replicas}
    if inside(grid, broken) or arrange(list(grid), between(grid, broken), mesh=mesh).out:
        return False
    donors = list(zip(*whole.values(), strict=True))
    return not placement.rebuild and all(
        not donors or any(edge(worker, donor) not in broken for donor in donors[position])
        for workers in placement.replicas.values()
        for position, worker in enumerate(workers)
    )
