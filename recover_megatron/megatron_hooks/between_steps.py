"""Between two iterations: who is there for the next one, and what of the state changes hands before it.

at_boundary         others are met if somebody comes or goes; states are compared, mended, given to fresh replicas; a
                    snapshot is taken where one is due
before_checkpoint   whoever writes has its parameters, and its part of the optimizer's state
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.megatron_hooks.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange


@dataclass(eq=False)
class BetweenSteps:
    """Of one worker, with the model that it has; its main thread calls it."""

    _recovery: Recovery
    _traffic: Traffic
    _finish_saves: Callable[[], None]
    """Returns when no checkpoint is under way."""
    _state: TrainingState
    _places: StateExchange
    _sharded: ShardedOptimizer | None
    _memory: MemoryTier

    def at_boundary(self) -> None:
        """New replicas come in, states are compared and given.

        Raises ``Orphaned`` if this worker must not compute with the state that it has.
        """
        recovery = self._recovery
        self._traffic.mode = Mode.OPEN
        self._state.begin()
        recovery.boundary.meet_if_wanted(self._before_meeting)
        if recovery.assignment.decision.transfers:
            self.complete()
        self._places.at_boundary()
        self._settle()
        if self._sharded is not None and recovery.boundary.verifying and not recovery.boundary.joining_next:
            self._sharded.verify()
            self._settle()
        self._memory.at_boundary()

    def _before_meeting(self) -> None:
        self._finish_saves()  # by those who began it
        self.complete()
        if self._recovery.assignment.decision.leaving:
            self._settle()  # while those who leave are there to give what only they have

    def before_checkpoint(self) -> None:
        """What a checkpoint is written of is all there."""
        self.complete()
        self._settle()

    def saving(self) -> AbstractContextManager[None]:
        """While a checkpoint is written."""
        return nullcontext() if self._sharded is None else self._sharded.saving()

    def complete(self) -> None:
        """Wait for what a distributed optimizer does while the next step computes."""
        if self._sharded is not None:
            self._sharded.complete()

    def _settle(self) -> None:
        """Where the optimizer's state is spread: spread it over those who are there now."""
        if self._sharded is not None and self._sharded.due():
            self._sharded.renew()
