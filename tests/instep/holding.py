"""Holds a training at the boundary before an iteration until something has come about that takes its time.

All workers with a place wait there.  When an epoch is over meanwhile, since a newcomer has come or is ready, they meet
at that boundary and wait on.  So no iteration is used up by an epoch, of which there are the more the further apart the
newcomers come, by the machine's load.  An iteration is made early only

    for new replicas    of which the epoch consists that was made for it: other newcomers wait for its commit
    with those          who have begun it already: they wait for this worker in it
    and where           an asynchronous checkpoint is under way: who has begun it would wait for its writers first, so
                        the step is made, and all meet in it
"""

from __future__ import annotations

import time
from collections.abc import Callable

from recover_megatron.instep.decision import Decision
from recover_megatron.instep.rendezvous import Boundary


def hold(waits: Callable[[Decision, int], bool]) -> None:
    """Hold every iteration, counted from 1, for which ``waits`` is true of the epoch's decision and the iteration."""
    wanted = Boundary._wanted

    def held(self: Boundary) -> bool:
        mine = self._assignment
        if wanted(self):
            return True
        while waits(mine.decision, self._hooks.iteration()):
            fresh = mine.decision.fresh and mine.decision.at == self._next
            if fresh or mine.begun_by_others(self._next):
                return False
            if mine.epoch_groups.over:
                from megatron.training import async_utils  # not before the script has chosen the device

                return bool(async_utils.is_empty_async_queue())
            time.sleep(0.01)
        return False

    Boundary._wanted = held  # type: ignore[method-assign]
