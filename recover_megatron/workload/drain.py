"""Draining: whether the run can do without a node whose replicas leave in order, and which replicas those are.

    asked, or accepted before --drain--> accepted   at the next boundary every replica with a worker there leaves
                              '--------> refused    the reason, for people; nothing changes

Replicas are counted that are whole now: what spares and the healthy workers of the leaving replicas make of themselves
afterwards comes on top of it.  A column's parameters are held by every replica that stays.  Where its optimizer state
is spread over the column the parts of the leaving are given to others before they go; only where Megatron's own
optimizer instances are the copies (``shards``) must a holder of each shard be among those who stay.

A pure function; the same answer on every worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Drain:
    """What is decided of the nodes that are to be switched off."""

    accepted: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Node -> why not."""


def leaving(replicas: Mapping[int, Sequence[int]], nodes: Mapping[int, str], draining: Collection[str]) -> set[int]:
    """The replicas with a worker on a node that is ``draining``; ``nodes``: of each worker."""
    return {replica for replica, workers in replicas.items() if any(nodes[worker] in draining for worker in workers)}


def drain(
    wanted: Sequence[str],
    nodes: Mapping[int, str],
    replicas: Mapping[int, Sequence[int]],
    fewest: int = 1,
    shards: int = 0,
) -> Drain:
    """Decide of the nodes ``wanted``, in this order: each is accepted if the run can do without it and those before.

    ``nodes``: of every live worker.  ``replicas``: those that are whole now.  ``fewest``: so many must be left.
    ``shards``: in how many an optimizer instance is cut, replica by replica, where such instances are the only copies.
    """
    accepted: list[str] = []
    refused: dict[str, str] = {}
    for node in wanted:
        if node in nodes.values() and (reason := _why_not([*accepted, node], nodes, replicas, max(1, fewest), shards)):
            refused[node] = reason
        else:
            accepted.append(node)
    return Drain(tuple(accepted), refused)


def _why_not(
    draining: Collection[str],
    nodes: Mapping[int, str],
    replicas: Mapping[int, Sequence[int]],
    fewest: int,
    shards: int,
) -> str:
    """Why the run cannot do without these nodes; empty: it can."""
    if not replicas:
        return "no replica is whole now: ask again when the run has recovered"
    gone = leaving(replicas, nodes, draining)
    staying = set(replicas) - gone
    if len(staying) < fewest:
        left = "no whole replica" if not staying else f"{len(staying)} of {len(replicas)} whole replicas"
        need = "one is needed" if fewest == 1 else f"{fewest} are wanted (--recover-min-replicas)"
        there = (
            f"{len(gone)} of {len(replicas)} have workers on {' and '.join(sorted({*draining} & {*nodes.values()}))}"
        )
        return f"{left} would be left, {need}: {there}"
    if shards > 1 and (bare := {r % shards for r in replicas} - {r % shards for r in staying}):
        return f"the replicas that would be left hold nothing of shards {sorted(bare)} of the optimizer's state"
    return ""
