"""Snapshots of states in other workers' memory: their keepers, their interval, their parts.

A position's state is lost with the last worker that holds it.  If all workers that hold it are in one failure domain
(in Megatron's default order a node has the same stage of every replica), the run needs a copy outside that domain:

    domain a: position 0 of both replicas          domain b: position 1 of both
       giver of 0, keeper of 1         <------->       giver of 1, keeper of 0

A giver keeps its own copy, too: whichever domain is lost, the other domain has the states of all positions, of one
iteration.  A snapshot is made of *parts*: first one for each position; then, if the optimizer state is in shards over
the replicas, one for each worker, with the shards for which this worker is the primary (``part_of``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover_megatron.workload.domains import Touched, fewest_shared, touched_by

FIRST_INTERVAL = 10
"""Number of iterations between two snapshots until their cost has been measured."""
DOMAIN_SECONDS = 5000 * 3600.0
"""Mean seconds between losses of one node: a value between the 6,300 hours of Llama 3's training (419 interruptions in
54 days of 2,048 hosts) and the hours of older clusters."""
MOST_SHARE = 0.01
"""Greatest share of an iteration's time that snapshots may take, on average."""

Groups = Mapping[frozenset[str], Sequence[int]]
"""Set of domains -> the workers that are in exactly these domains, ascending."""


@dataclass(frozen=True)
class Spread:
    """Spread of an optimizer state over the replicas."""

    holders: int = 1
    """Number of replicas that hold each shard."""
    placed: bool = True
    """True if the holders are chosen by their domains (shadows), not by Megatron (its optimizer instances)."""


def copies(
    replicas: Sequence[Sequence[int]], domains: Mapping[int, Sequence[str]], tier: str, spread: Spread | None = None
) -> dict[int, tuple[int, int]]:
    """Return snapshot part -> its giver and its keeper; empty: no snapshots are taken.

    ``replicas``: the workers of each replica by position.  ``domains``: worker -> its domains.  ``tier``: "always";
    "off"; "auto": only if the loss of one domain would take all holders of a part of the state, and some worker is
    outside that domain.  ``spread``: None if the optimizer state is not spread.
    """
    workers = [worker for row in replicas for worker in row]
    own = {worker: frozenset(domains.get(worker, ())) for worker in workers}
    columns = list(zip(*replicas, strict=True))
    if tier == "off" or len(workers) < 2:
        return {}
    everywhere = frozenset.intersection(*own.values())  # the loss of such a domain takes all workers
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
    """Return the number of the part with the shards of ``worker``; ``workers``: those that took the snapshot."""
    return positions + sorted(workers).index(worker)


def _takes_shards(replicas: Sequence[int], touched: Touched, spread: Spread) -> bool:
    """Return whether the loss of some domain breaks all replicas that hold a shard, and so loses its state.

    ``replicas``: one worker of each replica, in ring order.  If Megatron places the shards, their holders are not
    known: returns whether a domain breaks as many replicas as hold a shard.
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
    """Return a position's giver and keeper.  The keeper is a worker that shares the fewest domains with the giver.

    Of these workers the one that keeps the fewest parts is chosen; among equals a worker of the same position, which
    has the state already.
    """
    giver = min(column, key=lambda worker: (load[worker], worker))
    others, same = _farthest(giver, own, groups), set(column)
    keeper = min((load[worker], worker not in same, worker) for worker in others if worker != giver)[2]
    load[giver] += 1
    load[keeper] += 1
    return giver, keeper


def _farthest(giver: int, own: Mapping[int, frozenset[str]], groups: Groups) -> list[int]:
    """Return the workers that share the fewest domains with ``giver``, which may be among them."""
    shared = {names: len(own[giver] & names) for names, there in groups.items() if there != [giver]}
    fewest = min(shared.values())
    return [worker for names, many in shared.items() if many == fewest for worker in groups[names]]


def _shard_copies(own: Mapping[int, frozenset[str]], groups: Groups, load: dict[int, int]) -> list[tuple[int, int]]:
    """Return giver and keeper of each worker's shards: the giver is this worker.

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
    """Return the worker in the heap ``queue`` that keeps the fewest parts and is not ``giver``; update its loads."""
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

    With it the snapshots cost as much time as the iterations that are run again after losses.  ``cost``: seconds that
    the training waits for a snapshot; ``behind``: seconds that a snapshot takes in the background, which should end
    before the next snapshot; ``iteration``: seconds of an iteration; ``domains``: number of domains that may be lost.
    """
    if iteration <= 0:
        return FIRST_INTERVAL
    between = math.sqrt(2 * cost * DOMAIN_SECONDS / max(1, domains))
    return max(1, math.ceil(max(between, behind, cost / MOST_SHARE) / iteration))


def needed(kept: int, largest: int) -> int:
    """Return the host memory, in bytes, that a worker needs for two snapshots of ``kept`` parts of up to ``largest``
    bytes each."""
    return 2 * kept * largest
