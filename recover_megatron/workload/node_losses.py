"""What it costs a run to do without a node.

A loss: what that of each node of a launch would cost is known before anything is started, from sizes alone.

    replicas that have a part on the node are broken; its other workers wait as orphans
        some are whole  --> they go on, if they hold all of the optimizer's state between them
        none is whole   --> orphans begin again where every position has one left, and each holds all of its state

Otherwise the state is lost with the node, and what remains is the memory tier: all go back to a snapshot.

Draining: whether the run can do without a node whose replicas leave in order, and which replicas those are.

    asked, or accepted before --drain--> accepted   at the next boundary every replica with a worker there leaves
                              '--------> refused    the reason, for people; nothing changes

Replicas are counted that are whole now: what spares and the healthy workers of the leaving replicas make of themselves
afterwards comes on top of it.  A column's parameters are held by every replica that stays.  Where its optimizer state
is spread over the column the parts of the leaving are given to others before they go; only where Megatron's own
optimizer instances are the copies (``shards``) must a holder of each shard be among those who stay.

Pure functions; the same answer on every worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from recover_megatron.workload.domains import Replicas, replicas_of, stride_of, touched_by
from recover_megatron.workload.shards import Instances, layout_of


@dataclass(frozen=True)
class Training:
    """What of a training decides that: sizes as Megatron's flags have them."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    inner_ranks: int = 1
    """Data-parallel ranks of a replica."""
    pipeline_before_data: bool = False
    experts: bool = False
    """Whether columns of experts are others than those of dense parameters."""
    shard_groups: bool = False
    """Whether a replica is a shard group of Megatron-FSDP, of which each position has a column of its own."""
    spread: bool = False
    """Whether the optimizer's state is spread over the replicas (``--use-distributed-optimizer``)."""
    shadows: int = 1
    instances: int = 1
    """Of the distributed optimizer: so many workers have each part."""
    memory: bool = False
    """Whether snapshots of such states are kept on other nodes (``workload.snapshots``)."""
    blocks: bool = True
    """Whether Megatron takes ``pipeline_before_data`` with these sizes."""


@dataclass(frozen=True)
class NodeLoss:
    """Of one node."""

    node: int
    workers: int
    """Lost with it."""
    broken: int
    """Replicas of which it has a part."""
    whole: int
    """Replicas that go on, or that its orphans make, if each builds what is wanted of it; 0: the run ends."""
    lost: str
    """What nobody has any more, in words; empty: the run goes on."""
    back: bool = False
    """Whether the run goes back to a snapshot for it, with ``whole`` replicas."""
    waits: bool = False
    """Whether it would, but those who are left are too few for a replica: it waits for workers in their place."""


def node_losses(training: Training, world: int, per_node: int) -> list[NodeLoss]:
    """Of each node of a launch whose ranks lie on nodes of ``per_node`` in their order.

    ValueError if the sizes do not fill the world.
    """
    replicas = replicas_of(
        world,
        tensor=training.tensor,
        context=training.context,
        pipeline=training.pipeline,
        inner_ranks=training.inner_ranks,
        pipeline_before_data=training.pipeline_before_data,
    )
    nodes = -(-world // per_node)
    touched = touched_by(replicas, {rank: [_name(rank // per_node)] for rank in range(world)})
    broken = Counter(name for workers in replicas for name in touched[workers[0]])
    # A worker outside of whole replicas has missed the step's update.
    gone = [frozenset.intersection(*(touched[w] for w in its)) for its in _copies(training, replicas, touched)]
    without_state = frozenset().union(*gone)
    found = []
    for node in range(nodes):
        name, there = _name(node), min(per_node, world - node * per_node)
        whole, lost = len(replicas) - broken[name], ""
        if name in without_state:
            whole, lost = 0, "parts of the optimizer's state have all their copies in replicas that it breaks"
        elif not whole:
            whole, lost = _of_orphans(replicas, node, per_node)
        kept, enough = bool(lost) and training.memory, world - there >= len(replicas[0])
        whole = (world - there) // len(replicas[0]) if kept and enough else whole
        found.append(NodeLoss(node, there, broken[name], whole, lost, kept and enough, kept and not enough))
    return found


def _name(node: int) -> str:
    return f"node {node}"


def _of_orphans(replicas: Replicas, node: int, per_node: int) -> tuple[int, str]:
    """How many replicas those make who are left; and what is lost if they make none."""
    left = [sum(rank // per_node != node for rank in column) for column in zip(*replicas, strict=True)]
    lost = f"of {left.count(0)} of the {len(left)} positions of a replica every worker is there"
    return min(left), "" if min(left) else lost


def _copies(training: Training, replicas: Replicas, touched: Mapping[int, frozenset[str]]) -> list[frozenset[int]]:
    """The workers that have each part of an optimizer's state that is spread over the replicas; else nothing.

    Columns are in the order of their ring (``instep.shards.ring_order``).
    """
    if not training.spread:
        return []
    inside = training.tensor * training.context
    size = inside * training.pipeline
    dense: dict[tuple[int, int], list[int]] = {}
    for position in range(len(replicas[0])):
        place = position % size
        dense.setdefault((place // inside, place % training.tensor), []).append(position)
    each = [[position] for position in range(len(replicas[0]))]
    every = each if training.shard_groups else [*dense.values(), *(each if training.experts else [])]
    columns = [tuple(workers[position] for position in positions for workers in replicas) for positions in every]
    return list(frozenset().union(*(_holders(training, column, touched) for column in columns)))


def _holders(
    training: Training, column: Sequence[int], touched: Mapping[int, frozenset[str]]
) -> frozenset[frozenset[int]]:
    if training.instances > 1:
        shards = len(column) // training.instances
        homes = Instances(tuple(tuple(sorted(column)[shard::shards]) for shard in range(shards)))
        return frozenset(frozenset(homes.holders(unit)) for unit in homes.units)
    stride = stride_of(column, touched, training.shadows + 1)
    layout = layout_of(list(column), column, training.shadows, stride)
    return frozenset(frozenset(layout.holders(unit)) for unit in layout.units)


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
