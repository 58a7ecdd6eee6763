"""Failure domains: what may be lost at once, how copies are placed for that, and what it costs to lose a node.

A domain is whatever fails as a whole: a node, the nodes of a rack or behind a switch.  A worker stands in several, one
inside the other; a replica breaks with each of them that any of its workers stands in: it *touches* them.

    ring, two replicas a node     r0 (a)   r1 (a)   r2 (b)   r3 (b)
    stride 1                      with node a go what r0 owns, and its copy on r1
    stride 2                      r0's copy is on r2, r1's on r3: whichever node is lost, each unit has a holder left

What the loss of each domain of a launch would cost is known before anything is started, from sizes and names alone
(``domain_losses``); whether the run can do without a node, and which replicas leave with it, when it is to be switched
off (``drain``).
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
"""So many are tried, and what puts the copies of one domain's workers outside of it, where these stand in a row."""


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
    """In how many domains all copies of a unit still are with that stride, summed; but for those of all replicas."""
    return _best(ring, touched, copies, 1)[1]


def _best(ring: Sequence[int], touched: Touched, copies: int, before: int) -> tuple[int, int]:
    """The stride, and that number."""
    size, copies = len(ring), min(copies, len(ring))
    everywhere = frozenset.intersection(*(touched[worker] for worker in ring))  # nothing can be done about those
    apart = [touched[worker] - everywhere for worker in ring]
    if copies < 2:
        return 1, _shared(apart, copies, 1)
    rows = {-(-most // (copies - 1)) for most in Counter(name for its in apart for name in its).values()}
    tried = [before, *sorted({*range(1, min(size - 1, _MOST_STRIDES) + 1), *rows, size // 2, size // copies})]
    best, least = 1, sum(map(len, apart)) + 1
    for stride in tried:
        if any(stride * hop % size == 0 for hop in range(1, copies)):
            continue  # it would come back to a holder
        found = _shared(apart, copies, stride, least)
        if found < least:
            best, least = stride, found
        if not found:
            break
    return best, least


def _shared(apart: Sequence[frozenset[str]], copies: int, stride: int, enough: float = inf) -> int:
    """In how many domains all copies are, summed over all units; counted up to ``enough``."""
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
    checkpoint: bool = False
    """Whether the run goes back to a checkpoint in place where there is no such snapshot."""
    across: bool = False
    """Whether a tensor-parallel group may be put together of workers of different nodes."""
    blocks: bool = True
    """Whether Megatron takes ``pipeline_before_data`` with these sizes."""


@dataclass(frozen=True)
class Loss:
    """What the loss of one domain costs."""

    domain: str
    workers: int
    """Lost with it."""
    broken: int
    """Replicas of which it has a part."""
    whole: int
    """Replicas that go on, or that go back; 0: none does."""
    later: int
    """Replicas when all who are left have been put together, if each builds what is wanted of it."""
    lost: str
    """What nobody has any more, in words; empty: no state is lost."""
    back: str = ""
    """What the run goes back to for it, with ``whole`` replicas: ``SNAPSHOTS``, ``CHECKPOINT``; empty: nothing."""
    waits: bool = False
    """Whether it has that, but those who are left are too few for a replica."""


SNAPSHOTS, CHECKPOINT = "snapshots in memory", "the newest checkpoint"


def on_nodes(world: int, per_node: int, more: Sequence[Sequence[str]] = ()) -> list[tuple[str, ...]]:
    """The domains of each rank of a launch, on nodes of ``per_node`` in their order: "node 0", and ``more`` by node."""
    nodes = [(f"node {n}", *(more[n] if n < len(more) else ())) for n in range(-(-world // per_node))]
    return [nodes[rank // per_node] for rank in range(world)]


def domain_losses(training: Training, domains: Sequence[Sequence[str]], spares: int = 0) -> list[Loss]:
    """Of each domain of a launch, in the order of ranks; ``domains``: each worker's, its node first; spares last.

    Replicas that have a part in the domain are broken; their other workers wait as orphans.  Where some are whole they
    go on, if they hold all of the optimizer's state between them; where none is, orphans begin again if every position
    has one left, and each holds all of its state.  Else the state is lost with the domain, and all go back, if there is
    anything to go back to.

    ValueError if the sizes do not fill the world.
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
    workers = Counter(name for its in domains for name in its)
    broken = Counter(name for its in replicas for name in touched[its[0]])
    most, nobody = Counter[str](), Counter[str]()
    for column in zip(*replicas, strict=True):
        for name, number in Counter(name for worker in column for name in domains[worker]).items():
            most[name] = max(most[name], number)
            nobody[name] += number == len(replicas)
    # A worker outside of whole replicas has missed the step's update.
    shared = (
        frozenset.intersection(*(touched[replicas[at][0]] for at in its))
        for its in _copies(training, replicas, touched)
    )
    without_state = frozenset().union(*shared)
    groups = (its[at : at + training.tensor] for its in replicas for at in range(0, size, training.tensor))
    anew = training.across or all(len({domains[worker][0] for worker in group}) == 1 for group in groups)
    found = []
    for name, there in workers.items():
        left, whole, lost = len(domains) - there, len(replicas) - broken[name], ""
        if not left:
            whole, lost = 0, "every worker is there"
        elif name in without_state:
            whole, lost = 0, "all copies of some shards"
        elif not whole:
            whole = (len(replicas) - most[name]) * anew
            lost = f"all of {nobody[name]} of {size} positions" if nobody[name] else ""
        later = max(whole, min(len(replicas), whole + (left - whole * size) // size * anew))
        back = SNAPSHOTS if training.memory else CHECKPOINT if training.checkpoint else ""
        back = back if lost and left else ""
        whole = later if back else whole
        found.append(
            Loss(name, there, broken[name], whole, later, lost, back if later else "", bool(back) and not later)
        )
    return found


def _copies(training: Training, replicas: Replicas, touched: Touched) -> set[frozenset[int]]:
    """The replicas that have each part of a spread optimizer's state; columns: see `workload.grid.ring_order`."""
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
            continue  # its replicas stand in the same order
        known.add(len(column))
        found |= {frozenset(of[worker] for worker in its) for its in _holders(training, column, touched)}
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
    """What is decided of the nodes that are to be switched off."""

    accepted: tuple[str, ...]
    refused: Mapping[str, str]
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

    ``nodes``: of every live worker.  ``replicas``: those that are whole now.  ``fewest``: so many must be left; what
    spares and the healthy workers of the leaving ones make of themselves afterwards comes on top of it.  ``shards``: in
    how many an optimizer instance is cut, replica by replica, where such instances are the only copies.
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
