"""Between two iterations: who is there for the next one, what of the state changes hands before it, and its quotas.

at_boundary         others are met if somebody comes or goes; states are compared, mended, given to fresh replicas; a
                    snapshot is taken where one is due
before_checkpoint   each worker that writes has its parameters, and its part of the optimizer's state
rebalance           --recover-balance: a slow replica gets fewer microbatches
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.step import Outcome
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.megatron_hooks.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange


@dataclass(eq=False)
class BetweenSteps:
    """What one worker does between two steps, with the model that it has; its main thread calls it."""

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


def rebalance(recovery: Recovery, outcome: Outcome, total: int) -> None:
    """Take up quotas for the next step by the paces of the one just committed; every worker of the replica calls it.

    How long a replica took per microbatch is summed with the gradients (``Tail``), so every worker of a column knows
    the same numbers when a step is committed.  Columns measure different ones (stages wait for each other differently),
    so the first rank of each model-parallel group, all of which stand in one column, decides for its group.  What one
    worker may have heard and another not must not part them, so a new plan begins with the paces that its members have
    told.  A worker that learnt of the commit from a plan changes nothing, nor do those whom the plan found further on;
    and no worker does after a step that fresh replicas began late: they ran little of it.
    """
    shares = recovery.assignment.shares
    if outcome.by_plan or shares.easing:
        return
    replicas = recovery.assignment.decision.replicas
    current = shares.counts(recovery.assignment.decision, total)
    paces = {replica: outcome.speeds[replica] for replica in replicas if replica in outcome.speeds}
    if len(paces) == len(replicas):
        shares.balance.measured(paces)
    wanted = shares.balance.counts(current, total, multiple_of=shares.granularity, least=shares.least)
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        counts = torch.tensor([wanted[replica] for replica in replicas], device=torch.cuda.current_device())
        torch.distributed.broadcast(counts, group=group, group_src=0)
        wanted = dict(zip(replicas, counts.tolist(), strict=True))
    if wanted != current:
        shares.rebalance(wanted)
        recovery.hooks.log(
            "quotas",
            quotas={str(replica): count for replica, count in wanted.items()},
            seconds_per_microbatch={str(replica): round(pace, 6) for replica, pace in paces.items()},
        )
