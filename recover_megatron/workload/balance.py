"""How many microbatches each replica runs when replicas differ in speed: a state machine without I/O or clock.

    begin(paces) --> measured(seconds) --> counts(current, total) --> measured(seconds) --> counts(...) ...
        ^                                                                                       |
        '------------------------------------ a new plan ---------------------------------------'

The *pace* of a replica is its seconds per microbatch over those of the median replica, so what slows all alike (a
warmer room, longer sequences) changes nothing.  It is estimated as the median of what was measured since it last
changed, ``MEMORY`` iterations at most:

* An outlier does not move it.  ``CONFIRM`` measurements in a row that are off by more than noise, all to the same side,
  are a change: what was before is forgotten.  So a replica that has become slow is known after ``CONFIRM`` iterations.
* What cannot be told from noise is none: a replica whose pace is within ``SIGMAS`` standard errors of the median
  replica's, or within ``BAND`` of it, counts as equally fast.  The noise is measured, too: by how much successive
  measurements of one replica differ, over all replicas.  The longer the noise is known, the finer the difference that
  can be told.
* Quotas change if that shortens the iteration by more than ``GAIN`` by these paces, and by more than the standard error
  of a pace that is not the median's; and none by more than a factor of ``STEP`` at once.

The same calls give the same answers, so workers that were told the same stay together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from recover_megatron.workload.quotas import distinct, fewest_units, greedy, known_speeds, quotas, whole_units

MEMORY = 50
"""Iterations over which a pace is estimated, at most."""
DIFFERENCES = 512
"""Of so many the noise is taken."""
CONFIRM = 3
"""Measurements that are needed to tell a pace, or a change of it."""
BAND = 0.05
"""Paces that differ by less, relatively, count as equal."""
SIGMAS = 3.0
"""Standard errors by which a pace must differ from the median's."""
CHANGE = 0.1
"""A change of a pace is at least that large, relatively."""
SURPRISE = 2.0
"""Standard deviations by which each of ``CONFIRM`` measurements in a row is off where a pace has changed."""
GAIN = 0.03
"""Quotas change for more than this part of an iteration; for more, where the paces are known less well."""
STEP = 2
"""The factor by which a quota may change at once."""
NOISE = 0.02
"""The relative noise of a measurement is taken for at least that."""
KNOWN = 10
"""For so many measurements counts a pace that a plan brings."""

_OF_MEDIAN = 1.2533
"""The standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
_OF_DIFFERENCE = 1.0484
"""Standard deviation of a normal variable over the median of |difference of two of them|: 1.4826 / sqrt(2)."""


class Balance:
    """The paces of the replicas of one plan, and the quotas that follow from them."""

    def __init__(self) -> None:
        self._history: dict[int, list[float]] = {}
        """Replica -> logarithms of its measured paces since its pace last changed."""
        self._latest: dict[int, float] = {}
        self._differences: list[float] = []
        """Of successive measurements, over all replicas, the latest."""
        self.noise = NOISE
        """The relative standard deviation of one measurement."""

    def begin(self, paces: Mapping[int, float]) -> None:
        """A new plan, with the paces that it brings (1.0: the median's); replicas that it does not know are new."""
        self._history = {replica: [math.log(pace)] * KNOWN for replica, pace in paces.items() if pace > 0}
        self._latest, self._differences, self.noise = {}, [], NOISE

    def measured(self, seconds: Mapping[int, float]) -> None:
        """One iteration: replica -> seconds per microbatch; those that ran none, or have not told, are not in it."""
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
        """Replica -> its pace, of those that were measured often enough; 1.0 exactly for all that noise may explain."""
        return {replica: self._pace(x) for replica, x in self._history.items() if len(x) >= CONFIRM}

    def counts(self, current: Mapping[int, int], total: int, *, multiple_of: int = 1, least: int = 1) -> dict[int, int]:
        """The quotas for the next iteration of ``total`` microbatches; ``current``: those of the last one."""
        paces = self.paces
        error = max((self._error(self._history[replica]) for replica, pace in paces.items() if pace != 1), default=0.0)
        gain = min(0.5, max(GAIN, error))
        return rebalanced(current, paces, total, multiple_of=multiple_of, least=least, gain=gain)

    def _has_changed(self, history: list[float]) -> bool:
        """Whether the latest measurements say that the pace is another than it was before them."""
        latest, before = history[-CONFIRM:], history[:-CONFIRM]
        if len(before) < CONFIRM:
            return False
        least, middle = max(CHANGE, SURPRISE * self.noise), median(before)
        return all(x > middle + least for x in latest) or all(x < middle - least for x in latest)

    def _pace(self, history: list[float]) -> float:
        found = median(history)
        return 1.0 if abs(found) < max(BAND, SIGMAS * self._error(history)) else math.exp(found)

    def _error(self, history: list[float]) -> float:
        """The standard error of a pace, relatively."""
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
    """Quotas for ``paces``: towards those that make max(quota * pace) least, or ``current`` if these gain too little.

    ``current``: the quotas now, which sum to ``total``; each stays within a factor of ``STEP`` of it, in units of
    ``multiple_of``, and at least ``least`` where it was above zero; who has none may get an even share, if ``least`` is
    one unit.  ``paces``: time per microbatch, in any unit; a replica that is not in it is taken for a median one.

    Raises ValueError for quotas that do not share ``total`` out in such units, and a pace that is not positive.
    """
    whole_units(total, multiple_of)
    fewest = fewest_units(least, multiple_of)
    if sum(current.values()) != total or any(q < 0 or q % multiple_of for q in current.values()):
        raise ValueError(
            f"the quotas {dict(current)} do not share {total} microbatches out in multiples of {multiple_of}"
        )
    ids = distinct(list(current))
    pace = known_speeds(ids, paces)
    speeds = {replica: 1 / pace[replica] for replica in ids}
    best = quotas(total, ids, speeds=speeds, multiple_of=multiple_of, least=least)
    now = max(current[replica] * pace[replica] for replica in ids)
    then = max(best[replica] * pace[replica] for replica in ids)
    idle = fewest > 1 and not all(current.values())  # who has none would need several at once
    if then >= now * (1 - gain) or idle:
        return {replica: current[replica] for replica in ids}
    units = {replica: current[replica] // multiple_of for replica in ids}
    even = -(-sum(units.values()) // len(ids))
    lowest = {replica: min(have, max(fewest, have // STEP)) for replica, have in units.items()}
    most = {replica: have * STEP if have else even for replica, have in units.items()}
    more = greedy(sum(units.values()) - sum(lowest.values()), lowest, speeds, unit=1, most=most)
    return {replica: (lowest[replica] + more[replica]) * multiple_of for replica in ids}
