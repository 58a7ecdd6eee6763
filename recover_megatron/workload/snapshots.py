"""Snapshots of the training state in host memory: the workers that keep them, the interval, and the parts.

A position's state is lost with the last worker that holds it.  If all workers that hold it are in one failure domain
(in Megatron's default order a node has the same stage of every replica), the run needs a copy outside that domain:

    domain a: position 0 of both replicas          domain b: position 1 of both replicas
       giver of 0, keeper of 1         <------->       giver of 1, keeper of 0

A *giver* copies a state to its *keeper* in another domain, and keeps a copy itself.  Whichever domain is lost, the
other domain has the states of all positions, all from the same iteration.  A snapshot consists of *parts*.  The first
parts are the states of the positions.  If the optimizer state is spread over the replicas, one part for each worker
follows, with the shards for which this worker is the primary (``part_of``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover_megatron.workload.domains import Touched, fewest_shared, touched_by

FIRST_INTERVAL = 10
"""Number of iterations between two snapshots before the cost of a snapshot has been measured."""
DOMAIN_SECONDS = 5000 * 3600.0
"""Assumed mean time between losses of one node, in seconds.  Llama 3's training had 6,300 hours (419 interruptions in
54 days of 2,048 hosts); older clusters had less."""
MOST_SHARE = 0.01
"""Greatest share of an iteration's time that snapshots may take, on average."""

Groups = Mapping[frozenset[str], Sequence[int]]
"""Set of domains -> the workers that are in exactly these domains, ascending."""


@dataclass(frozen=True)
class Spread:
    """Distribution of the shards of an optimizer state over the replicas."""

    holders: int = 1
    """Number of replicas that hold each shard."""
    placed: bool = True
    """True if the holders are chosen by domain (shadows); false if Megatron places them (optimizer instances)."""


def copies(
    replicas: Sequence[Sequence[int]], domains: Mapping[int, Sequence[str]], tier: str, spread: Spread | None = None
) -> dict[int, tuple[int, int]]:
    """Return a dict: number of a snapshot part -> (giver, keeper).  The dict is empty if no snapshots are taken,
    which is always the case with a single worker.

    ``replicas``: the workers of each replica by position.  ``domains``: worker -> its domains.  ``tier``: with
    "always" and "off", snapshots are taken always or never; with "auto", only if the loss of one domain would take all
    holders of some state, and a worker outside that domain can keep a copy.  ``spread``: None if the optimizer state is
    not spread over the replicas.
    """
    workers = [worker for row in replicas for worker in row]
    own = {worker: frozenset(domains.get(worker, ())) for worker in workers}
    columns = list(zip(*replicas, strict=True))
    if tier == "off" or len(workers) < 2:
        return {}
    everywhere = frozenset.intersection(*own.values())  # domains that contain all workers: no keeper is outside
    if tier == "auto" and not any(
        frozenset.intersection(*(own[worker] for worker in column)) - everywhere for column in columns
    ):
        touched = {worker: names - everywhere for worker, names in touched_by(replicas, domains).items()}
        if spread is None or not _takes_shards([row[0] for row in replicas], touched, spread):
            return {}
    load = dict.fromkeys(workers, 0)
    groups: dict[frozenset[str], list[int]] = {}
    for worker, names in sorted(own.items()):
        groups.setdefault(names, []).append(worker)
    found = [_column_copies(column, own, groups, load) for column in columns]
    if spread is not None:
        found += _shard_copies(own, groups, load)
    return dict(enumerate(found))


def part_of(worker: int, workers: Sequence[int], positions: int) -> int:
    """Return the number of the snapshot part with the shards of ``worker``.

    ``workers``: the workers that took the snapshot; ``positions``: number of positions, whose parts come first.
    """
    return positions + sorted(workers).index(worker)


def _takes_shards(replicas: Sequence[int], touched: Touched, spread: Spread) -> bool:
    """Return whether some domain breaks all replicas that hold some shard, so that the shard is lost with the domain.

    ``replicas``: one worker of each replica, in ring order.  If Megatron places the shards, their holders are not
    known here; then returns whether one domain breaks at least as many replicas as a shard has holders.
    """
    broken: dict[str, int] = {}
    for worker in replicas:
        for name in touched[worker]:
            broken[name] = broken.get(name, 0) + 1
    most = max(broken.values(), default=0)
    if most == len(replicas) or not spread.placed:
        return most >= min(spread.holders, len(replicas))
    return fewest_shared(replicas, touched, spread.holders) > 0


def _column_copies(
    column: Sequence[int], own: Mapping[int, frozenset[str]], groups: Groups, load: dict[int, int]
) -> tuple[int, int]:
    """Return the giver and the keeper of a position's state, and count both in ``load``.

    The giver is the worker of ``column`` with the lowest load.  Of the workers that share the fewest domains with the
    giver, the keeper is the worker with the lowest load; of equally loaded workers, preferably one of the same column,
    which has the state anyway.
    """
    giver = min(column, key=lambda worker: (load[worker], worker))
    others, same = _farthest(giver, own, groups), set(column)
    keeper = min((load[worker], worker not in same, worker) for worker in others if worker != giver)[2]
    load[giver] += 1
    load[keeper] += 1
    return giver, keeper


def _farthest(giver: int, own: Mapping[int, frozenset[str]], groups: Groups) -> list[int]:
    """Return the workers that share the fewest domains with ``giver``; the result may contain ``giver``."""
    shared = {names: len(own[giver] & names) for names, there in groups.items() if there != [giver]}
    fewest = min(shared.values())
    return [worker for names, many in shared.items() if many == fewest for worker in groups[names]]


def _shard_copies(own: Mapping[int, frozenset[str]], groups: Groups, load: dict[int, int]) -> list[tuple[int, int]]:
    """Return (giver, keeper) for the shards of each worker, in ascending order; the giver is the worker itself.

    Takes time nearly linear in the number of workers.
    """
    queues: dict[tuple[frozenset[str], int | None], list[tuple[int, int]]] = {}
    found = []
    for giver in sorted(own):
        key = own[giver], giver if groups[own[giver]] == [giver] else None
        if key not in queues:
            queues[key] = [(load[worker], worker) for worker in _farthest(giver, own, groups)]
            heapq.heapify(queues[key])
        keeper = _least(queues[key], load, giver)
        load[giver] += 1
        load[keeper] += 1
        found.append((giver, keeper))
    return found


def _least(queue: list[tuple[int, int]], load: Mapping[int, int], giver: int) -> int:
    """Return the worker in the heap ``queue`` with the lowest load, except ``giver``; update outdated loads in it."""
    skipped = []
    while True:
        known, worker = queue[0]
        if known != load[worker]:
            heapq.heapreplace(queue, (load[worker], worker))
        elif worker == giver:
            skipped.append(heapq.heappop(queue))
        else:
            break
    for entry in skipped:
        heapq.heappush(queue, entry)
    return worker


def interval(cost: float, behind: float, iteration: float, domains: int) -> int:
    """Return the number of iterations between two snapshots, by the rule of Young and Daly.

    With this interval the snapshots take as much time as the iterations that are repeated after losses.  ``cost``:
    seconds for which a snapshot delays the training.  ``behind``: seconds that a snapshot takes in the background; the
    interval is not shorter than this.  ``iteration``: seconds of an iteration; ``domains``: number of domains that may
    be lost.
    """
    if iteration <= 0:
        return FIRST_INTERVAL
    between = math.sqrt(2 * cost * DOMAIN_SECONDS / max(1, domains))
    return max(1, math.ceil(max(between, behind, cost / MOST_SHARE) / iteration))


def needed(kept: int, largest: int) -> int:
    """Return the bytes of host memory that a worker needs for two snapshots.

    ``kept``: number of parts that the worker keeps of a snapshot; ``largest``: bytes of the largest part.
    """
    return 2 * kept * largest
