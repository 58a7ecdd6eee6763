"""How many microbatches each replica runs.

All microbatches of an iteration cost the same, so the time of an iteration is that of the replica that needs longest:
``max(quota / speed)``.  The least such maximum comes from a greedy rule: give one unit after the other to the replica
that would finish it first.  (Were there a better sharing, some replica would have fewer units in it than here; but the
greedy rule gave it that last unit because nobody could finish one earlier.)

A unit is ``multiple_of`` microbatches: all inner ranks of a replica run equally many.  An interleaved pipeline schedule
runs no fewer than it has stages (`assign`), so a replica has ``least`` microbatches or none.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median


def quotas(
    total: int,
    replicas: Sequence[int],
    *,
    speeds: Mapping[int, float] | None = None,
    multiple_of: int = 1,
    least: int = 1,
) -> dict[int, int]:
    """Share ``total`` microbatches out: replica id -> quota, in the order of the ids.

    The quotas are multiples of ``multiple_of``, zero or at least ``least``, sum to ``total`` and minimise
    max(quota / speed).  Where it is enough for each replica, each gets some, however slow: a replica without work would
    never be measured again.
    Equal finishing times go to the lower id: 32 on 7 replicas is 5, 5, 5, 5, 4, 4, 4.

    ``speeds``: microbatches per second, or anything proportional to it; default: all are equal.  A replica that is not
    in it is taken for a median one.

    Raises ValueError for no replicas, a repeated one, a total that is negative, no multiple or too small for one
    replica, a speed that is not a positive finite number.
    """
    ids = distinct(replicas)
    units, fewest = whole_units(total, multiple_of), fewest_units(least, multiple_of)
    speed = known_speeds(ids, speeds)
    if units < len(ids) * fewest:
        given = dealt(units, dict.fromkeys(ids, 0), speed, 1, fewest)
    else:
        first = dict.fromkeys(ids, fewest)
        more = greedy(units - sum(first.values()), first, speed, unit=1)
        given = {replica: first[replica] + more[replica] for replica in ids}
    return {replica: given[replica] * multiple_of for replica in ids}


def dealt(units: int, load: Mapping[int, int], speeds: Mapping[int, float], unit: int, fewest: int) -> dict[int, int]:
    """Give ``units`` out, to each replica none or at least ``fewest``, such that the last one finishes as early as can
    be: replica -> units given.

    ``load``, ``speeds``, ``unit``: as for `greedy`.  A replica without room by the time when the last one finishes gets
    none; of the others as few get some as that time allows.

    Raises ValueError for fewer than ``fewest`` units, but none.
    """
    if fewest <= 1 or not units:
        return greedy(units, load, speeds, unit)
    if units < fewest:
        raise ValueError(f"{units} units cannot be shared out: a replica takes {fewest} at least")

    def ends(replica: int, given: int) -> float:
        return (load[replica] + given * unit) / speeds[replica]

    def chosen(by: float) -> list[int]:
        """The replicas that run some and are over by then; none if that is too early."""
        room = {}
        for replica in load:
            fits = bisect_right(range(units + 1), by, key=lambda given: ends(replica, given)) - 1
            if fits >= fewest:
                room[replica] = fits
        largest = sorted(room, key=lambda replica: (-room[replica], replica))
        reached = list(accumulate(room[replica] for replica in largest))
        number = bisect_left(reached, units) + 1
        return largest[:number] if number <= len(largest) and number * fewest <= units else []

    kinds = {(load[replica], speeds[replica]): replica for replica in sorted(load, reverse=True)}.values()
    times = sorted({ends(replica, given) for replica in kinds for given in range(fewest, units + 1)})
    some = chosen(times[bisect_left(times, True, key=lambda by: bool(chosen(by)))])
    first = {replica: load[replica] + fewest * unit for replica in some}
    more = greedy(units - fewest * len(some), first, speeds, unit)
    return {replica: fewest + more[replica] if replica in more else 0 for replica in load}


def fewest_units(least: int, multiple_of: int) -> int:
    """The units of ``multiple_of`` microbatches that are at least ``least``.  Raises ValueError unless that is >= 1."""
    if least < 1:
        raise ValueError(f"least is {least}, not at least 1")
    return -(-least // multiple_of)


def greedy(
    units: int,
    load: Mapping[int, int],
    speeds: Mapping[int, float],
    unit: int,
    *,
    most: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Give ``units`` out, one by one, each to the replica that would finish it first: replica -> units given.

    ``load``: the microbatches that each replica has already; ``unit``: the microbatches in a unit; ``most``: what no
    replica's microbatches may exceed, together enough for all (default: no limit).
    """
    given = dict.fromkeys(load, 0)
    heap = [
        ((load[replica] + unit) / speeds[replica], replica)
        for replica in load
        if most is None or load[replica] + unit <= most[replica]
    ]
    heapq.heapify(heap)
    for _ in range(units):
        _, replica = heapq.heappop(heap)
        given[replica] += 1
        end = load[replica] + (given[replica] + 1) * unit
        if most is None or end <= most[replica]:
            heapq.heappush(heap, (end / speeds[replica], replica))
    return given


def distinct(replicas: Sequence[int]) -> list[int]:
    """The ids in order.  Raises ValueError if there are none, or one of them twice."""
    ids = sorted(set(replicas))
    if not ids:
        raise ValueError("no replicas to share the microbatches out to")
    if len(ids) != len(replicas):
        raise ValueError(f"a replica is named twice in {list(replicas)}")
    return ids


def whole_units(total: int, multiple_of: int) -> int:
    """How many units of ``multiple_of`` are in ``total``.  Raises ValueError unless they are a whole number >= 0."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}, not at least 1")
    if total < 0 or total % multiple_of:
        raise ValueError(f"{total} microbatches are no multiple of {multiple_of}")
    return total // multiple_of


def known_speeds(ids: Sequence[int], speeds: Mapping[int, float] | None) -> dict[int, float]:
    """The speed of each replica; the median of the known ones for one that is not there, 1 if none is known.

    (The same for seconds per microbatch.)  Raises ValueError for one that is not a positive finite number.
    """
    known = {replica: float(speeds[replica]) for replica in ids if speeds is not None and replica in speeds}
    for replica, speed in known.items():
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"replica {replica}: {speed} is not a positive finite number")
    middle = median(known.values()) if known else 1.0
    return {replica: known.get(replica, middle) for replica in ids}
