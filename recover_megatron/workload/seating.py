"""The replicas and workers that work together where edges are broken, by what `edges` finds of numbers.

Pure functions, the same answer on every worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recover_megatron.workload.edges import Edge, between, cover, inside
from recover_megatron.workload.placement import Candidate, Placement


def seated(
    whole: Mapping[int, tuple[int, ...]], broken: Collection[Edge]
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[Edge, ...]]]:
    """The replicas that can go on together, and those that cannot, with the edges that are the reason.

    A replica whose own workers cannot talk to each other is none.  Of the others as few are out as can be.
    """
    torn = inside(whole, broken)
    rest = {replica: workers for replica, workers in whole.items() if replica not in torn}
    out = torn | cover(between(rest, broken))
    standing = {worker for workers in whole.values() for worker in workers}
    reasons = {
        replica: tuple(sorted(pair for pair in broken if set(pair) <= standing and set(pair) & set(whole[replica])))
        for replica in sorted(out)
    }
    return {replica: workers for replica, workers in whole.items() if replica not in out}, reasons


def free_of(candidates: Mapping[int, Candidate], working: set[int], broken: Collection[Edge]) -> dict[int, Candidate]:
    """Those of the candidates that can talk to all who work and to each other."""
    cut_off = {pair[1 - at] for pair in broken for at in (0, 1) if pair[at] in working}
    rest = set(candidates) - cut_off
    cut_off |= cover({pair for pair in broken if set(pair) <= rest})
    return {worker: candidate for worker, candidate in candidates.items() if worker not in cut_off}


def can_join(whole: Mapping[int, Sequence[int]], placement: Placement, broken: Collection[Edge]) -> bool:
    """Whether new replicas can be had as they are: all can talk to all, and nobody has to build another model first."""
    grid = {**whole, **placement.replicas}
    return not (placement.rebuild or inside(grid, broken) or between(grid, broken))
