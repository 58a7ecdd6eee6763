"""Tells people of losses, returns and degraded times, on the worker that prints Megatron's own lines of the training.

    planned: a loss in a step --> kept --the step is over: step--> one line, with what it cost
             any other loss, a return --> a line at once
    step:    fewer replicas than at the launch, for ten minutes --> a reminder, and so on

Every worker with a place keeps account, since any may be the next to print.
"""

from __future__ import annotations

import time

from megatron.training.utils import is_last_rank

from recover_megatron.instep import console
from recover_megatron.instep.decision import HELD, Rollback
from recover_megatron.instep.losses import Failure
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.step import Outcome
from recover_megatron.logger import get_logger

log = get_logger(__name__)

REMIND_SECONDS = 600.0


class Console:
    """Of one worker, by its main thread."""

    def __init__(self) -> None:
        self._kept: list[Failure] = []
        """Losses in the step under way."""
        self._gone: dict[int, int] = {}
        """Replica that is missing -> the iteration of its loss."""
        self._degraded: tuple[int, float] | None = None
        """Since which iteration and when there are fewer replicas than at the launch."""
        self._reminded = 0.0
        self._epoch = 0

    def planned(self, recovery: Recovery, iteration: int) -> None:
        """A new plan has been taken up, in ``iteration``."""
        decision, failure = recovery.assignment.decision, recovery.planner.lost
        if decision.epoch == self._epoch:
            return
        self._epoch = decision.epoch
        of = recovery.assignment.grid.launched
        if failure is not None and failure.replicas:
            iteration = failure.iteration
            self._gone |= dict.fromkeys(failure.replicas, iteration)
            if decision.step:
                self._kept.append(failure)
            else:
                _say(console.recovered(iteration, [failure], {}, 0.0, console.of_all(decision, of)))
        elif failure is not None:
            _say(console.spares_lost(iteration, failure, len(decision.spares)))
        if decision.fresh and decision.rollback is None:
            _say(console.back(iteration, decision, recovery.planner.whereabouts, self._gone, of))
        self._gone = {replica: at for replica, at in self._gone.items() if replica not in decision.replicas}
        if len(decision.replicas) >= of:
            self._degraded = None
        elif self._degraded is None:
            self._degraded, self._reminded = (iteration, time.monotonic()), time.monotonic()

    def rolled_back(self, recovery: Recovery, target: Rollback, folder: str, seconds: float) -> None:
        """The run has gone back to a checkpoint in ``folder``, or to a state in memory, and goes on from there."""
        replicas = console.of_all(recovery.assignment.decision, recovery.assignment.grid.launched)
        source = f"from disk, {folder}" if folder else "from memory"
        if target.source == HELD:
            source = "which workers that were set aside hold"
        _say(console.rolled_back(target, source, seconds, replicas))

    def step(self, recovery: Recovery, outcome: Outcome, iteration: int) -> None:
        """A step is over."""
        decision, of = recovery.assignment.decision, recovery.assignment.grid.launched
        if self._kept:
            seconds = sum(outcome.seconds.values())
            told = console.recovered(iteration, self._kept, outcome.reran, seconds, console.of_all(decision, of))
            self._kept.clear()
            _say(told)
        if self._degraded is not None and (now := time.monotonic()) - self._reminded >= REMIND_SECONDS:
            self._reminded = now
            since, begun = self._degraded
            _say(console.degraded(iteration, now - begun, since, decision, of))


def _say(text: str) -> None:
    if is_last_rank():
        log.info(text)
