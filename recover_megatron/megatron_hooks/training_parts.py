"""What a worker trains with once Megatron has built its model: made as one when train() is entered, dropped as one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.training import get_args

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.traffic import Traffic
from recover_megatron.integrate import Services
from recover_megatron.megatron_hooks.between_steps import BetweenSteps
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets
from recover_megatron.megatron_hooks.fsdp.outer import InShardGroups
from recover_megatron.megatron_hooks.fsdp.state import is_fsdp
from recover_megatron.megatron_hooks.layer_sums import AttentionLogits, RouterSums
from recover_megatron.megatron_hooks.layout import spreads_optimizer
from recover_megatron.megatron_hooks.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.microbatches import Accumulated
from recover_megatron.megatron_hooks.optimizer.keeping import InBuckets
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange
from recover_megatron.megatron_hooks.step_guard import StepGuard
from recover_megatron.megatron_hooks.trackers import Trackers


@dataclass(frozen=True)
class StateCopies:
    """The copies of the training's state that no step needs: as the flags want them."""

    shadows: int = 1
    """Of each part of a distributed optimizer's state, beside its owner's."""
    shadow_device: torch.device | None = None
    """Where they are; None: where the owner's is."""
    memory_tier: str = "off"
    memory_interval: int = 0
    """Iterations between two snapshots; 0: by what they cost."""


@dataclass(frozen=True)
class TrainingParts:
    """The parts that belong to one model."""

    buckets: Buckets | FsdpBuckets
    trackers: Trackers
    routers: RouterSums
    logits: AttentionLogits
    sharded: ShardedOptimizer | None
    """None: every worker of a column has all of the optimizer's state."""
    state: TrainingState
    places: StateExchange
    memory: MemoryTier
    between_steps: BetweenSteps

    def count_updates(self, optimizer: Any, step_guard: StepGuard) -> None:
        """Know whether the parameters are those before or after the step under way, whatever interrupts it."""
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.places.withdraw()
            self.memory.before_update()
            step_guard.begin()
            if self.sharded is None:
                result = step(*args, **kwargs)
            else:
                result = self.sharded.step(partial(step, *args, **kwargs))
            self.state.stepped(bool(result[0]))
            step_guard.end()
            return result

        optimizer.step = counted


def assemble(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    validation: Any,
    *,
    recovery: Recovery,
    traffic: Traffic,
    accumulated: Accumulated,
    copies: StateCopies,
    services: Services,
    blank: bool,
) -> TrainingParts:
    """Make the parts for what train() is entered with.  ``blank``: see ``TrainingState``."""
    buckets = _buckets(model, recovery, accumulated, copies.shadows)
    sharded = None
    if buckets.shards is not None:
        keeping = InBuckets(buckets) if isinstance(buckets, Buckets) else InShardGroups(buckets.outer)
        sharded = ShardedOptimizer(optimizer, buckets, keeping, recovery, copies.shadows, copies.shadow_device)
    state = TrainingState(model, optimizer, scheduler, validation, services.operations, blank=blank, sharded=sharded)
    wanted = copies.memory_tier != "off"
    places = StateExchange(recovery, state)
    memory = MemoryTier(recovery, state, sharded, wanted=wanted, every=copies.memory_interval)
    return TrainingParts(
        buckets,
        Trackers(get_args(), buckets.tail, recovery.assignment.grid),
        RouterSums(model),
        AttentionLogits(get_args(), model),
        sharded,
        state,
        places,
        memory,
        BetweenSteps(recovery, traffic, services.finish_saves, state, places, sharded, memory),
    )


def _buckets(model: Any, recovery: Recovery, accumulated: Accumulated, shadows: int) -> Buckets | FsdpBuckets:
    if is_fsdp(model[0]):
        return FsdpBuckets(model, recovery.assignment, accumulated, shadows if spreads_optimizer(get_args()) else None)
    return Buckets(model, recovery.assignment, shadows)
