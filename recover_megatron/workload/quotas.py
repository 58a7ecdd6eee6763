"""Quotas: the number of microbatches of each replica, from given speeds (``quotas``) or measured speeds (``Balance``).

All microbatches of an iteration cost the same, so an iteration takes as long as its slowest replica: ``max(quota /
speed)``.  A greedy rule minimises this time: give each unit to the replica that would finish it first.  Proof: a better
solution gives fewer units to the replica that finishes last, so it gives another replica at least one more.  But the
greedy rule gave the slowest replica its last unit because no other replica would have finished another unit earlier.

A unit is ``multiple_of`` microbatches, because all inner ranks of a replica run the same number.  An interleaved
pipeline schedule runs at least as many microbatches as it has stages (`assign`), so a replica has at least ``least``
microbatches, or none.
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
    """Share out ``total`` microbatches; return replica id -> quota, in the order of the ids.

    The quotas sum to ``total`` and minimise max(quota / speed).  Each quota is a multiple of ``multiple_of``, and is
    zero or at least ``least``.  If there are enough microbatches, each replica gets some, however slow it is, because
    otherwise its speed would never be measured again.  If two replicas would finish a unit at the same time, the
    replica with the lower id gets it: 32 microbatches on 7 replicas are 5, 5, 5, 5, 4, 4, 4.

    ``speeds``: replica -> microbatches per second, or values proportional to that; default: all are equal.  A replica
    without a speed gets the median speed.

    Raises ValueError if there are no replicas or a repeated replica; if the total is negative, no multiple of
    ``multiple_of``, or too small for one replica; or if a speed is not a positive finite number.
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
    """Share out ``units`` so that the last replica finishes as early as possible; return replica -> units.

    Each replica gets no units, or at least ``fewest``.  ``load``, ``speeds``, ``unit``: as for `greedy`.  If
    ``fewest`` is above 1, as few replicas get units as possible without delaying the time at which the last replica
    finishes.

    Raises ValueError if ``units`` is above 0 and below ``fewest``.
    """
    if fewest <= 1 or not units:
        return greedy(units, load, speeds, unit)
    if units < fewest:
        raise ValueError(f"{units} units cannot be shared out: a replica needs at least {fewest}")

    def ends(replica: int, given: int) -> float:
        return (load[replica] + given * unit) / speeds[replica]

    def chosen(by: float) -> list[int]:
        """Return the replicas that get units if all must finish by the time ``by``; empty if that is impossible."""
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
    """Convert ``least`` microbatches to units of ``multiple_of``, rounded up.  Raises ValueError if ``least`` < 1."""
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
    """Share out ``units``, each to the replica that would finish it first; return replica -> units.

    ``load``: replica -> number of microbatches that it already has; ``unit``: number of microbatches in a unit;
    ``most``: replica -> greatest number of microbatches, including ``load`` (default: no limit).  The limits must
    leave room for all units.
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
    """Return the replica ids in ascending order.  Raises ValueError if there are no ids, or an id is repeated."""
    ids = sorted(set(replicas))
    if not ids:
        raise ValueError("there are no replicas for the microbatches")
    if len(ids) != len(replicas):
        raise ValueError(f"a replica is repeated in {list(replicas)}")
    return ids


def whole_units(total: int, multiple_of: int) -> int:
    """Convert ``total`` microbatches to units of ``multiple_of``.  Raises ValueError if ``total`` is negative or no
    multiple of it."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}, not at least 1")
    if total < 0 or total % multiple_of:
        raise ValueError(f"{total} microbatches are no multiple of {multiple_of}")
    return total // multiple_of


def known_speeds(ids: Sequence[int], speeds: Mapping[int, float] | None) -> dict[int, float]:
    """Return the speed of each replica; a replica without a speed gets the median speed, or 1 if no speed is known.

    ``speeds`` may also be seconds per microbatch.  Raises ValueError for a speed that is not a positive finite number.
    """
    known = {replica: float(speeds[replica]) for replica in ids if speeds is not None and replica in speeds}
    for replica, speed in known.items():
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"replica {replica}: {speed} is not a positive finite number")
    middle = median(known.values()) if known else 1.0
    return {replica: known.get(replica, middle) for replica in ids}


MEMORY = 50
"""Greatest number of measurements (one an iteration) from which the pace of a replica is estimated."""
DIFFERENCES = 512
"""Greatest number of differences between consecutive measurements from which the noise is estimated."""
CONFIRM = 3
"""Number of measurements that are needed to know a pace, or to detect a change of a pace."""
BAND = 0.05
"""A pace that differs from the median pace by less than this fraction counts as equal to the median pace."""
SIGMAS = 3.0
"""A pace that differs from the median pace by less than this many standard errors counts as equal to the median."""
CHANGE = 0.1
"""Smallest relative difference that counts as a change of a pace."""
SURPRISE = 2.0
"""A pace has changed if ``CONFIRM`` consecutive measurements differ from it by more than this many standard deviations,
and by more than ``CHANGE``."""
GAIN = 0.03
"""Fraction of an iteration's time that new quotas must save; more is required if the paces are less certain."""
STEP = 2
"""Greatest factor by which a quota changes from one iteration to the next."""
NOISE = 0.02
"""Least relative standard deviation that is assumed for a measurement."""
KNOWN = 10
"""Weight of a pace from a plan: it counts as this many measurements."""

_OF_MEDIAN = 1.2533
"""Standard error of a median divided by the standard error of a mean, for normal noise: sqrt(pi / 2)."""
_OF_DIFFERENCE = 1.0484
"""Standard deviation of a normal variable divided by the median of |x - y| of two such variables: 1.4826 / sqrt(2)."""


class Balance:
    """State machine that measures the paces of the replicas, and changes their quotas accordingly.

        begin(paces) --> measured(seconds) --> counts(current, total) --> measured(seconds) --> counts(...) ...
            ^                                                                                       |
            '------------------------------------ a new plan ---------------------------------------'

    The *pace* of a replica is its seconds per microbatch divided by the median of all replicas.  So a slowdown of all
    replicas (a warmer room, longer sequences) changes no pace.  A pace is estimated as the median of the measurements
    since the pace last changed.

    * One outlier does not change a pace.  If ``CONFIRM`` consecutive measurements differ from the pace by more than the
      noise, all in the same direction, the pace has changed, and earlier measurements are dropped.
    * A pace that differs from the median by less than the noise counts as equal to the median.  The noise is estimated
      from the differences of consecutive measurements of each replica, over all replicas.
    * New quotas are used only if they shorten the iteration by more than ``GAIN``, and by more than the standard error
      of every pace that differs from the median.  No quota changes by more than a factor of ``STEP`` in an iteration.
    """

    def __init__(self) -> None:
        self._history: dict[int, list[float]] = {}
        """Replica -> logarithms of its measured paces since its pace last changed."""
        self._latest: dict[int, float] = {}
        self._differences: list[float] = []
        """Absolute differences between logarithms of a replica's paces in consecutive iterations, over all replicas."""
        self.noise = NOISE
        """Relative standard deviation of one measurement."""

    def begin(self, paces: Mapping[int, float]) -> None:
        """Begin a new plan; ``paces``: replica -> its pace in the plan (median: 1.0); new replicas are absent."""
        self._history = {replica: [math.log(pace)] * KNOWN for replica, pace in paces.items() if pace > 0}
        self._latest, self._differences, self.noise = {}, [], NOISE

    def measured(self, seconds: Mapping[int, float]) -> None:
        """Add the measurements of one iteration; ``seconds``: measured replica -> its seconds per microbatch."""
        if not seconds:
            return
        middle = median(seconds.values())
        logs = {replica: math.log(value / middle) for replica, value in sorted(seconds.items())}
        self._differences += [abs(x - self._latest[replica]) for replica, x in logs.items() if replica in self._latest]
        self._differences = self._differences[-DIFFERENCES:]
        if self._differences:
            self.noise = max(NOISE, _OF_DIFFERENCE * median(self._differences))
        for replica, x in logs.items():
            history = [*self._history.get(replica, []), x][-MEMORY:]
            self._history[replica] = history[-CONFIRM:] if self._has_changed(history) else history
        self._latest = logs

    @property
    def paces(self) -> dict[int, float]:
        """Replica -> its pace, for replicas with at least ``CONFIRM`` measurements.

        The pace is exactly 1.0 if noise may explain its difference from the median.
        """
        return {replica: self._pace(x) for replica, x in self._history.items() if len(x) >= CONFIRM}

    def counts(self, current: Mapping[int, int], total: int, *, multiple_of: int = 1, least: int = 1) -> dict[int, int]:
        """Return the quotas of the next iteration of ``total`` microbatches; ``current``: the present quotas."""
        paces = self.paces
        error = max((self._error(self._history[replica]) for replica, pace in paces.items() if pace != 1), default=0.0)
        gain = min(0.5, max(GAIN, error))
        return rebalanced(current, paces, total, multiple_of=multiple_of, least=least, gain=gain)

    def _has_changed(self, history: list[float]) -> bool:
        """Return whether the last ``CONFIRM`` measurements show another pace than the measurements before them."""
        latest, before = history[-CONFIRM:], history[:-CONFIRM]
        if len(before) < CONFIRM:
            return False
        least, middle = max(CHANGE, SURPRISE * self.noise), median(before)
        return all(x > middle + least for x in latest) or all(x < middle - least for x in latest)

    def _pace(self, history: list[float]) -> float:
        found = median(history)
        return 1.0 if abs(found) < max(BAND, SIGMAS * self._error(history)) else math.exp(found)

    def _error(self, history: list[float]) -> float:
        """Return the relative standard error of the pace estimated from ``history``."""
        return _OF_MEDIAN * self.noise / math.sqrt(len(history))


def rebalanced(
    current: Mapping[int, int],
    paces: Mapping[int, float],
    total: int,
    *,
    multiple_of: int = 1,
    least: int = 1,
    gain: float = GAIN,
) -> dict[int, int]:
    """Return quotas with a lower max(quota * pace) than ``current``; return ``current`` if the gain is too small.

    ``current``: replica -> present quota; the quotas sum to ``total``.  Each quota changes by at most a factor of
    ``STEP``, is a multiple of ``multiple_of``, and stays at least ``least`` if it was above zero.  A replica with quota
    0 may get up to an even share, if ``least`` is one unit.  ``paces``: replica -> time per microbatch, in any unit; a
    replica without a pace gets the median pace.  ``gain``: smallest relative gain for which quotas change.

    Raises ValueError if a quota in ``current`` is negative or no multiple of ``multiple_of``, the quotas do not sum to
    ``total``, or a pace is not positive.
    """
    whole_units(total, multiple_of)
    fewest = fewest_units(least, multiple_of)
    if sum(current.values()) != total or any(q < 0 or q % multiple_of for q in current.values()):
        raise ValueError(
            f"the quotas {dict(current)} do not share out {total} microbatches in multiples of {multiple_of}"
        )
    ids = distinct(list(current))
    pace = known_speeds(ids, paces)
    speeds = {replica: 1 / pace[replica] for replica in ids}
    best = quotas(total, ids, speeds=speeds, multiple_of=multiple_of, least=least)
    now = max(current[replica] * pace[replica] for replica in ids)
    then = max(best[replica] * pace[replica] for replica in ids)
    idle = fewest > 1 and not all(current.values())  # some replica has quota 0, and would need several units to start
    if then >= now * (1 - gain) or idle:
        return {replica: current[replica] for replica in ids}
    units = {replica: current[replica] // multiple_of for replica in ids}
    even = -(-sum(units.values()) // len(ids))
    lowest = {replica: min(have, max(fewest, have // STEP)) for replica, have in units.items()}
    most = {replica: have * STEP if have else even for replica, have in units.items()}
    more = greedy(sum(units.values()) - sum(lowest.values()), lowest, speeds, unit=1, most=most)
    return {replica: (lowest[replica] + more[replica]) * multiple_of for replica in ids}
