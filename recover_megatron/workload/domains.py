"""Failure domains: workers that may be lost together, the placement of copies, and the cost of losing a node.

A domain is hardware that fails together: a node, the nodes of a rack, or the nodes behind a switch.  A worker is in
several, nested domains.  A replica *touches* every domain that contains any of its workers, and breaks if one of these
domains is lost.

    ring, two replicas per node   r0 (a)   r1 (a)   r2 (b)   r3 (b)
    stride 1                      r1 has the copy of r0's shards: if node a is lost, the shards and the copy are lost
    stride 2                      r2 has the copy of r0's shards, r3 the copy of r1's: losing one node leaves a copy

Before the launch, ``domain_losses`` computes the cost of losing each domain from sizes and names alone.  ``drain``
decides which nodes the run can do without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, lcm
from typing import NamedTuple

from recover_megatron.workload.shards import Instances, layout_of

Touched = Mapping[int, frozenset[str]]
"""Worker -> the domains that its replica touches."""

_MOST_STRIDES = 64
"""All strides up to this number are tried, but only a few larger ones, such as the length of a domain in the ring."""


def names(node: str, domain: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a worker's domains: its node; then the user's domains or, if none is given, SLURM's switches.

    Each name starts with the kind of domain.  ``domain``: the user's names, separated by commas; may be empty.
    With a topology plugin, SLURM sets ``SLURM_TOPOLOGY_ADDR`` to the path to the node, for example "s0.s4.tux3", and
    ``SLURM_TOPOLOGY_ADDR_PATTERN`` to the kinds on that path, "switch.switch.node" (srun manual, "OUTPUT ENVIRONMENT
    VARIABLES").
    """
    found = [f"node {node}"] if node else []
    found += [f"domain {name.strip()}" for name in domain.split(",") if name.strip()]
    way = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(way) == len(pattern) and not domain.strip():
        found += [f"{kind} {'.'.join(way[: at + 1])}" for at, kind in enumerate(pattern) if kind not in ("", "node")]
    return tuple(found)


def touched_by(replicas: Iterable[Sequence[int]], domains: Mapping[int, Sequence[str]]) -> dict[int, frozenset[str]]:
    """Return worker -> the domains that its replica touches; ``domains``: worker -> the worker's domains."""
    found: dict[int, frozenset[str]] = {}
    for workers in replicas:
        found |= dict.fromkeys(workers, frozenset(name for worker in workers for name in domains.get(worker, ())))
    return found


def stride_of(ring: Sequence[int], touched: Touched, copies: int, before: int = 1) -> int:
    """Return the best stride: the distance, in the ring, between the copies of a unit of the optimizer state.

    With the best stride the fewest domains have all copies of a unit.  If several strides are equally good, returns
    ``before``, the present stride, if it is one of them, since a change moves every copy; otherwise the smallest, since
    a finished sum is sent over that distance.
    """
    return _best(ring, touched, copies, before)[0]


def fewest_shared(ring: Sequence[int], touched: Touched, copies: int) -> int:
    """Return, for the best stride, the number of pairs (unit, domain that has all copies of this unit).

    Does not count domains that contain all workers.
    """
    return _best(ring, touched, copies, 1)[1]


def _best(ring: Sequence[int], touched: Touched, copies: int, before: int) -> tuple[int, int]:
    """Return the best stride, and its number of pairs (unit, domain that has all copies of this unit)."""
    size, copies = len(ring), min(copies, len(ring))
    everywhere = frozenset.intersection(*(touched[worker] for worker in ring))  # domains that contain all workers
    apart = [touched[worker] - everywhere for worker in ring]
    if copies < 2:
        return 1, _shared(apart, copies, 1)
    rows = {-(-most // (copies - 1)) for most in Counter(name for each in apart for name in each).values()}
    tried = [before, *sorted({*range(1, min(size - 1, _MOST_STRIDES) + 1), *rows, size // 2, size // copies})]
    best, least = 1, sum(map(len, apart)) + 1
    for stride in tried:
        if any(stride * hop % size == 0 for hop in range(1, copies)):
            continue  # two copies would have the same holder
        found = _shared(apart, copies, stride, least)
        if found < least:
            best, least = stride, found
        if not found:
            break
    return best, least


def _shared(apart: Sequence[frozenset[str]], copies: int, stride: int, enough: float = inf) -> int:
    """Return the number of pairs (unit, domain that has all copies of this unit); stop counting at ``enough``."""
    size, total = len(apart), 0
    for at in range(size):
        common = apart[at]
        for hop in range(1, copies):
            if not common:
                break
            common = common & apart[(at + hop * stride) % size]
        total += len(common)
        if total >= enough:
            break
    return total


Replicas = tuple[tuple[int, ...], ...]
"""The ranks of each replica, in the order (inner rank, stage, context, tensor), tensor fastest."""


def data_parallel_ranks_per_replica(*, tensor: int, context: int, expert: int, expert_tensor: int) -> int:
    """Return the number of Megatron's data-parallel ranks in one replica (the fault unit).

    The number is 1 unless experts are spread over data-parallel ranks.  If they are, a replica is the smallest set of
    workers closed under dense groups and expert groups.  In Megatron's default order, tp-cp-ep-dp-pp, a dense group is
    ``tensor * context`` neighbouring workers of a pipeline stage, an expert group ``expert_tensor * expert``.  So the
    closed set has the least common multiple of these sizes.  Not for Megatron-FSDP, where a replica is a shard group.

    >>> data_parallel_ranks_per_replica(tensor=2, context=1, expert=4, expert_tensor=1)
    2
    """
    dense = tensor * context
    return lcm(dense, expert * expert_tensor if expert > 1 else dense) // dense


def replicas_of(
    world: int, *, tensor: int, context: int, pipeline: int, inner_ranks: int, pipeline_before_data: bool = False
) -> Replicas:
    """Return the ranks of each replica, for Megatron's rank order tp-cp-ep-dp-pp.

    ``pipeline_before_data``: for the order tp-cp-ep-pp-dp.  Raises ValueError if ``world`` is no multiple of a
    replica's size.

    >>> replicas_of(8, tensor=2, context=1, pipeline=2, inner_ranks=1)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    inner = tensor * context
    ranks, rest = divmod(world, inner * pipeline)
    if rest or ranks % inner_ranks:
        raise ValueError(f"{world} workers cannot form replicas of {inner} x {pipeline} x {inner_ranks} workers")

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


@dataclass(frozen=True)
class Training:
    """Settings of a training that determine the cost of losing a domain.

    ``tensor``, ``context``, ``pipeline``: sizes of the model-parallel groups.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    inner_ranks: int = 1
    """Number of data-parallel ranks in a replica."""
    pipeline_before_data: bool = False
    experts: bool = False
    """True if expert columns differ from the columns of dense parameters."""
    shard_groups: bool = False
    """True if a replica is a shard group of Megatron-FSDP, in which each position has its own column."""
    spread: bool = False
    """True if the optimizer state is spread over the replicas (``--use-distributed-optimizer``)."""
    shadows: int = 1
    instances: int = 1
    """Number of instances of the distributed optimizer, which is the number of workers that have each shard."""
    memory: bool = False
    """True if the run keeps snapshots of its state in the memory of other nodes (``workload.snapshots``)."""
    checkpoint: bool = False
    """True if the run rolls back to a checkpoint when the state is lost and no snapshot exists."""
    across: bool = False
    """True if a tensor-parallel group may span nodes."""
    blocks: bool = True
    """True if Megatron accepts ``pipeline_before_data`` with these sizes."""


@dataclass(frozen=True)
class Loss:
    """Cost of the loss of one domain."""

    domain: str
    workers: int
    """Number of workers lost with the domain."""
    broken: int
    """Number of replicas with a worker in the domain."""
    whole: int
    """Number of replicas that continue or, if the state is lost, roll back."""
    later: int
    """Number of replicas after the remaining workers have formed new replicas.

    Some of these workers may have to rebuild their models first.
    """
    lost: str
    """Part of the state that is lost with the domain, as text; empty if no state is lost."""
    back: str = ""
    """State to which the replicas counted in ``whole`` roll back: ``SNAPSHOTS`` or ``CHECKPOINT``; else empty."""
    waits: bool = False
    """True if a snapshot or checkpoint exists, but too few workers remain for a replica, so the run waits for more."""


SNAPSHOTS, CHECKPOINT = "snapshots in memory", "the newest checkpoint"


def on_nodes(world: int, per_node: int, more: Sequence[Sequence[str]] = ()) -> list[tuple[str, ...]]:
    """Return the domains of each rank: "node N" for its node N, then the further domains ``more[N]`` of this node.

    ``per_node``: number of ranks on a node.
    """
    nodes = [(f"node {n}", *(more[n] if n < len(more) else ())) for n in range(-(-world // per_node))]
    return [nodes[rank // per_node] for rank in range(world)]


def domain_losses(training: Training, domains: Sequence[Sequence[str]], spares: int = 0) -> list[Loss]:
    """Return the cost of losing each domain; the domains are in the order in which the workers name them.

    ``domains``: for each worker, its domains, the node first; the last ``spares`` workers are spares.

    A replica with a worker in the lost domain is broken, and its other workers become orphans.  The complete replicas
    continue if together they hold the complete optimizer state.  If no replica is complete, orphans form new replicas,
    provided that at every position an orphan with the position's complete state remains.  Otherwise the state is lost,
    and all remaining workers roll back to a snapshot or checkpoint, if one exists.

    Raises ValueError if the number of workers without the spares is no multiple of a replica's size.
    """
    replicas = replicas_of(
        len(domains) - spares,
        tensor=training.tensor,
        context=training.context,
        pipeline=training.pipeline,
        inner_ranks=training.inner_ranks,
        pipeline_before_data=training.pipeline_before_data,
    )
    touched, size = touched_by(replicas, dict(enumerate(domains))), len(replicas[0])
    workers = Counter(name for each in domains for name in each)
    broken = Counter(name for each in replicas for name in touched[each[0]])
    most, gone = Counter[str](), Counter[str]()
    for column in zip(*replicas, strict=True):
        for name, number in Counter(name for worker in column for name in domains[worker]).items():
            most[name] = max(most[name], number)
            gone[name] += number == len(replicas)
    # Workers of broken replicas miss the optimizer update of the step, so their shards do not count as copies.
    shared = (
        frozenset.intersection(*(touched[replicas[at][0]] for at in each))
        for each in _copies(training, replicas, touched)
    )
    without_state = frozenset().union(*shared)
    groups = (each[at : at + training.tensor] for each in replicas for at in range(0, size, training.tensor))
    formable = training.across or all(len({domains[worker][0] for worker in group}) == 1 for group in groups)
    found = []
    for name, there in workers.items():
        left, whole, lost = len(domains) - there, len(replicas) - broken[name], ""
        if not left:
            whole, lost = 0, "every worker is in this domain"
        elif name in without_state:
            whole, lost = 0, "all copies of some shards"
        elif not whole:
            whole = (len(replicas) - most[name]) * formable
            lost = f"all workers of {gone[name]} of {size} positions" if gone[name] else ""
        later = max(whole, min(len(replicas), whole + (left - whole * size) // size * formable))
        back = SNAPSHOTS if training.memory else CHECKPOINT if training.checkpoint else ""
        back = back if lost and left else ""
        whole = later if back else whole
        found.append(
            Loss(name, there, broken[name], whole, later, lost, back if later else "", bool(back) and not later)
        )
    return found


def _copies(training: Training, replicas: Replicas, touched: Touched) -> set[frozenset[int]]:
    """Return, for each part of a spread optimizer state, the set of replicas that hold a copy of the part.

    Orders the workers of a column as `workload.grid.ring_order` does.
    """
    if not training.spread:
        return set()
    inside = training.tensor * training.context
    size = inside * training.pipeline
    dense: dict[tuple[int, int], list[int]] = {}
    for position in range(len(replicas[0])):
        place = position % size
        dense.setdefault((place // inside, place % training.tensor), []).append(position)
    each = [[position] for position in range(len(replicas[0]))]
    every = each if training.shard_groups else [*dense.values(), *(each if training.experts else [])]
    of = {worker: number for number, workers in enumerate(replicas) for worker in workers}
    found: set[frozenset[int]] = set()
    known = set[int]()
    for positions in every:
        column = [workers[position] for position in positions for workers in replicas]
        if training.instances == 1 and len(column) in known:
            continue  # an earlier column has its replicas in the same order, and so gives the same sets
        known.add(len(column))
        found |= {frozenset(of[worker] for worker in each) for each in _holders(training, column, touched)}
    return found


def _holders(training: Training, column: Sequence[int], touched: Touched) -> set[tuple[int, ...]]:
    if training.instances > 1:
        shards = len(column) // training.instances
        homes = Instances(tuple(tuple(sorted(column)[shard::shards]) for shard in range(shards)))
        return {tuple(homes.holders(unit)) for unit in homes.units}
    stride = stride_of(column, touched, training.shadows + 1)
    layout = layout_of(list(column), column, training.shadows, stride)
    return {tuple(layout.holders(unit)) for unit in layout.units}


class Drain(NamedTuple):
    """Decision about the nodes that a user wants to drain."""

    accepted: tuple[str, ...]
    refused: Mapping[str, str]
    """Node -> the reason why the run cannot do without it."""


def leaving(replicas: Mapping[int, Sequence[int]], nodes: Mapping[int, str], draining: Collection[str]) -> set[int]:
    """Return the replicas that have a worker on one of the ``draining`` nodes; ``nodes``: worker -> node."""
    return {replica for replica, workers in replicas.items() if any(nodes[worker] in draining for worker in workers)}


def drain(
    wanted: Sequence[str],
    nodes: Mapping[int, str],
    replicas: Mapping[int, Sequence[int]],
    fewest: int = 1,
    shards: int = 0,
) -> Drain:
    """Accept each node of ``wanted``, in this order, if the run can do without it and the nodes accepted before.

    ``nodes``: live worker -> node.  ``replicas``: the complete replicas now.  ``fewest``: number of these replicas that
    must remain; replicas that the spares and other workers may form later do not count.  ``shards``: number of shards
    of an optimizer instance (replica r has shard r % shards), if the instances are the only copies of the state;
    otherwise 0.
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
    """Return the reason why the run cannot do without the ``draining`` nodes; an empty text if it can."""
    if not replicas:
        return "no replica is complete now: ask again when the run has recovered"
    gone = leaving(replicas, nodes, draining)
    staying = set(replicas) - gone
    if len(staying) < fewest:
        left = "no complete replica" if not staying else f"{len(staying)} of {len(replicas)} complete replicas"
        need = "one is required" if fewest == 1 else f"{fewest} are required (--recover-min-replicas)"
        there = (
            f"{len(gone)} of {len(replicas)} have workers on {' and '.join(sorted({*draining} & {*nodes.values()}))}"
        )
        return f"{left} would be left, {need}: {there}"
    if shards > 1 and (bare := {r % shards for r in replicas} - {r % shards for r in staying}):
        return f"the remaining replicas would not hold shards {sorted(bare)} of the optimizer state"
    return ""
