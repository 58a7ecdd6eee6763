"""Which microbatches each replica runs in a step, by the present plan."""

from __future__ import annotations

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.workload import assign, quotas

NEARLY_STILL = 1e-9
"""The speed of a replica that should run as little as can be."""


class Shares:
    """See the module's text.  All workers must have been told the same: the answers are the same then."""

    def __init__(self, grid: LaunchGrid, multiple_of: int) -> None:
        self._grid = grid
        self.granularity = multiple_of * grid.lanes
        """What the number of microbatches of a replica must be a multiple of."""
        self.easing = False
        """Whether the fresh replicas of the plan begin their first step, when their state has come: they run as little
        of that one as can be."""
        self._balanced: dict[int, int] | None = None
        self._kept: dict[tuple[int, int, bool], list[list[int]]] = {}

    def forget(self) -> None:
        """A new plan: quotas are even again."""
        self._balanced = None

    def counts(self, decision: Decision, total: int) -> dict[int, int]:
        """How many microbatches of a step of ``total`` each replica runs."""
        if self._balanced is not None and sum(self._balanced.values()) == total:
            return self._balanced
        speeds = dict.fromkeys(decision.replicas, 1.0)
        if self.easing:
            speeds |= dict.fromkeys(decision.fresh, NEARLY_STILL)
        return quotas(total, decision.replicas, speeds=speeds, multiple_of=self.granularity)

    def rebalance(self, counts: dict[int, int]) -> None:
        """From the next step on, until the next plan, replicas run so many.  All workers must say the same."""
        self._balanced = counts
        self._kept.clear()

    def of(self, decision: Decision, replica: int, total: int) -> list[list[int]]:
        """The ids of ``replica``, by lane."""
        key = (decision.epoch, total, self.easing)
        if key not in self._kept:
            counts = self.counts(decision, total)
            every = assign(total, self._grid.lanes, decision.replicas, counts, len(self._grid.replicas))
            self._kept = {key: every[replica]}
        return self._kept[key]
