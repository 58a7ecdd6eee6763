"""How many microbatches each replica runs.

All microbatches of an iteration cost the same, so the time of an iteration is that of the replica that needs longest:
``max(quota / speed)``.  The least such maximum comes from a greedy rule: give one unit after the other to the replica
that would finish it first.  (Were there a better sharing, some replica would have fewer units in it than here; but the
greedy rule gave it that last unit because nobody could finish one earlier.)

A unit is ``multiple_of`` microbatches: all inner ranks of a replica run equally many, and an interleaved pipeline
schedule runs only whole multiples of its pipeline size in each inner rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from statistics import median


def quotas(
    total: int, replicas: Sequence[int], *, speeds: Mapping[int, float] | None = None, multiple_of: int = 1
) -> dict[int, int]:
    """Share ``total`` microbatches out: replica id -> quota, in the order of the ids.

    The quotas are multiples of ``multiple_of``, sum to ``total`` and minimise max(quota / speed).  Where there is a
    unit for each replica, each gets at least one, however slow: a replica without work would never be measured again.
    Equal finishing times go to the lower id: 32 on 7 replicas is 5, 5, 5, 5, 4, 4, 4.

    ``speeds``: microbatches per second, or anything proportional to it; default: all are equal.  A replica that is not
    in it is taken for a median one.

    Raises ValueError for no replicas, a repeated one, a total that is negative or no multiple, a speed that is not a
    positive finite number.
    """
    ids = distinct(replicas)
    units = whole_units(total, multiple_of)
    speed = known_speeds(ids, speeds)
    given = dict.fromkeys(ids, 1 if units >= len(ids) else 0)
    more = greedy(units - sum(given.values()), given, speed, unit=1)
    return {replica: (given[replica] + more[replica]) * multiple_of for replica in ids}


def balance(
    current: Mapping[int, int],
    seconds: Mapping[int, float],
    total: int,
    *,
    multiple_of: int = 1,
    threshold: float = 0.1,
) -> dict[int, int]:
    """Quotas for measured speeds, with hysteresis: ``current`` unless others are worth the change.

    ``current``: the quotas now; they sum to ``total``.  ``seconds``: measured seconds per microbatch; a replica that is
    not in it (it had nothing to run) is taken for a median one, replicas that have no quota are ignored.  The predicted
    time of an iteration is max(quota * seconds); the best quotas replace the current ones only if they shorten it by
    more than ``threshold`` (0.1: a tenth).

    So noise can't make it swing: once the best quotas for one measurement are taken, they stay for every other whose
    replicas differ from it by factors between a and b, as long as a / b >= 1 - ``threshold``.  A change of all replicas
    alike (a warmer room) never matters.

    Raises ValueError like `quotas`, and if ``current`` does not sum to ``total``, in multiples of ``multiple_of``, or
    the threshold is not in [0, 1).
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold {threshold} is not in [0, 1)")
    whole_units(total, multiple_of)
    if sum(current.values()) != total or any(q < 0 or q % multiple_of for q in current.values()):
        raise ValueError(
            f"the quotas {dict(current)} do not share {total} microbatches out in multiples of {multiple_of}"
        )
    ids = distinct(list(current))
    measured = known_speeds(ids, seconds)
    best = quotas(total, ids, speeds={replica: 1 / measured[replica] for replica in ids}, multiple_of=multiple_of)
    now = max(current[replica] * measured[replica] for replica in ids)
    then = max(best[replica] * measured[replica] for replica in ids)
    return best if then < now * (1 - threshold) else {replica: current[replica] for replica in ids}


def greedy(units: int, load: Mapping[int, int], speeds: Mapping[int, float], unit: int) -> dict[int, int]:
    """Give ``units`` out, one by one, each to the replica that would finish it first: replica -> units given.

    ``load``: the microbatches that each replica has already; ``unit``: the microbatches in a unit.
    """
    given = dict.fromkeys(load, 0)
    heap = [((load[replica] + unit) / speeds[replica], replica) for replica in load]
    heapq.heapify(heap)
    for _ in range(units):
        _, replica = heap[0]
        given[replica] += 1
        end = (load[replica] + (given[replica] + 1) * unit) / speeds[replica]
        heapq.heapreplace(heap, (end, replica))
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
