"""Snapshots of states in other workers' memory: who keeps which, how often they are taken, what they are.

A position's state is lost with the last worker that holds it.  If all of these lie in one failure domain (a node of
Megatron's default order has the same stage of every replica), a copy outside of it is wanted:

    domain a: position 0 of both replicas          domain b: position 1 of both
       giver of 0, keeper of 1         <------->       giver of 1, keeper of 0

A giver keeps its own copy, too: whichever domain is lost, the other one has all positions, of one iteration.  A
snapshot is made of *parts*: one for each position, and, where the optimizer's state is in shards over the replicas,
behind them one for each worker, with the shards for which it speaks (``part_of``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover_megatron.workload.domains import Touched, fewest_shared, touched_by

FIRST_INTERVAL = 10
"""Iterations between two snapshots as long as nothing is measured."""
DOMAIN_SECONDS = 5000 * 3600.0
"""After how long, on average, a node is lost: between the 6,300 hours of Llama 3's training (419 interruptions in 54
days of 2,048 hosts) and older clusters."""
MOST_SHARE = 0.01
"""Of an iteration's time that snapshots may take, on average."""

Groups = Mapping[frozenset[str], Sequence[int]]
"""Domains -> the workers that are in just these, ascending."""


@dataclass(frozen=True)
class Spread:
    """How an optimizer's state is spread over the replicas."""

    holders: int = 1
    """So many replicas hold each shard."""
    placed: bool = True
    """Whether they are chosen by their domains (shadows), not by Megatron (its optimizer instances)."""


def copies(
    replicas: Sequence[Sequence[int]], domains: Mapping[int, Sequence[str]], tier: str, spread: Spread | None = None
) -> dict[int, tuple[int, int]]:
    """Part -> who gives its snapshot, who else keeps it; for workers by replica and position; empty: none are wanted.

    ``domains``: each worker's own.  ``tier``: "always"; "auto": if the loss of one domain would take all that hold a
    part of the state, and somebody is outside of it; "off".  ``spread``: None if the optimizer's state is not.
    """
    workers = [worker for its in replicas for worker in its]
    own = {worker: frozenset(domains.get(worker, ())) for worker in workers}
    columns = list(zip(*replicas, strict=True))
    if tier == "off" or len(workers) < 2:
        return {}
    everywhere = frozenset.intersection(*own.values())  # with it all are lost
    if tier == "auto" and not any(
        frozenset.intersection(*(own[worker] for worker in column)) - everywhere for column in columns
    ):
        touched = {worker: its - everywhere for worker, its in touched_by(replicas, domains).items()}
        if spread is None or not _takes_shards([its[0] for its in replicas], touched, spread):
            return {}
    load = dict.fromkeys(workers, 0)
    groups: dict[frozenset[str], list[int]] = {}
    for worker, its in sorted(own.items()):
        groups.setdefault(its, []).append(worker)
    found = [_column_copies(column, own, groups, load) for column in columns]
    if spread is not None:
        found += _shard_copies(own, groups, load)
    return dict(enumerate(found))


def part_of(worker: int, workers: Sequence[int], positions: int) -> int:
    """The part that has the shards of ``worker``, one of ``workers``, all that took the snapshot."""
    return positions + sorted(workers).index(worker)


def _takes_shards(replicas: Sequence[int], touched: Touched, spread: Spread) -> bool:
    """Whether some domain breaks all replicas that hold a shard: what a worker of a broken one has is out of date.

    ``replicas``: of each a worker, in the ring's order.  Where Megatron places them: whether it breaks as many.
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
    """A position's keeper shares as few domains with its giver as any worker; of these the one that keeps least.

    A worker of the same position goes before another one that keeps as much: it has the state already.
    """
    giver = min(column, key=lambda worker: (load[worker], worker))
    others, same = _farthest(giver, own, groups), set(column)
    keeper = min((load[worker], worker not in same, worker) for worker in others if worker != giver)[2]
    load[giver] += 1
    load[keeper] += 1
    return giver, keeper


def _farthest(giver: int, own: Mapping[int, frozenset[str]], groups: Groups) -> list[int]:
    """Those that share as few domains with ``giver`` as anybody does; itself may be among them."""
    shared = {its: len(own[giver] & its) for its, there in groups.items() if there != [giver]}
    fewest = min(shared.values())
    return [worker for its, many in shared.items() if many == fewest for worker in groups[its]]


def _shard_copies(own: Mapping[int, frozenset[str]], groups: Groups, load: dict[int, int]) -> list[tuple[int, int]]:
    """The same for each worker's shards, which it gives itself; in time linear in the workers, nearly."""
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
    """The worker of ``queue``, a heap, that keeps least and is not ``giver``; its loads are brought up to date."""
    aside = []
    while True:
        told, worker = queue[0]
        if told != load[worker]:
            heapq.heapreplace(queue, (load[worker], worker))
        elif worker == giver:
            aside.append(heapq.heappop(queue))
        else:
            break
    for entry in aside:
        heapq.heappush(queue, entry)
    return worker


def interval(cost: float, behind: float, iteration: float, domains: int) -> int:
    """Iterations between two snapshots, by Young and Daly: where they cost as much as what is run again after losses.

    ``cost``: seconds that the training waits for one; ``behind``: that it takes in the background, which it should have
    ended before the next; ``iteration``: seconds of one; ``domains``: how many there are to be lost.
    """
    if iteration <= 0:
        return FIRST_INTERVAL
    between = math.sqrt(2 * cost * DOMAIN_SECONDS / max(1, domains))
    return max(1, math.ceil(max(between, behind, cost / MOST_SHARE) / iteration))


def needed(kept: int, largest: int) -> int:
    """Bytes of host memory of a worker that keeps ``kept`` parts, none larger than ``largest``: two of each."""
    return 2 * kept * largest
