"""What a worker trains with once Megatron has built its model, and what it does with that between two steps.

at_boundary         others are met if somebody comes or goes; states are compared, mended, given to fresh replicas; a
                    snapshot is taken where one is due
before_checkpoint   each worker that writes has its parameters, and its part of the optimizer's state
rebalance           --recover-balance: a slow replica gets fewer microbatches
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.step import Outcome
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.integrate.loop import Services
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.fsdp.buckets import FsdpBuckets
from recover_megatron.megatron_hooks.fsdp.outer import InShardGroups
from recover_megatron.megatron_hooks.fsdp.state import is_fsdp
from recover_megatron.megatron_hooks.layout import spreads_optimizer
from recover_megatron.megatron_hooks.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.microbatches import Accumulated
from recover_megatron.megatron_hooks.optimizer.keeping import InBuckets
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange
from recover_megatron.megatron_hooks.trackers import AttentionLogits, RouterSums, Trackers


class StepGuard:
    """Whether the parameters of an orphan are those of the version that it counts.

    On a GPU the host is ahead: an update is in the queue behind the norm of the gradients, an all-reduce inside the
    replica.  If a mate is dead, that ends when its group is aborted, with garbage, by which the update is scaled; no
    exception need come.  So the update counts only if the device had carried it out before anything was aborted:

        IDLE --begin--> UPDATING --end--> QUEUED --the device is done--> IDLE
          |                |                |
          '----seal()------+----seal()------'      the groups are about to be aborted
          |                |
        believed       not believed, until ``reset``

    On the CPU an operation that fails raises before anything is computed from it: all is believed.

    ``begin``, ``end``, ``reset``: by the main thread; ``seal``: by any.  ``event``: makes one of the device's, with
    ``record`` and ``query``; None: the device is the CPU.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._make_event = event
        self._lock = threading.Lock()
        self._updating = False
        self._event: Any = None
        self._sealed = False
        self._believed = True

    @classmethod
    def of(cls, device: torch.device) -> StepGuard:
        return cls(torch.cuda.Event if device.type == "cuda" else None)

    @property
    def believed(self) -> bool:
        return self._believed

    def begin(self) -> None:
        """The update of an iteration begins."""
        if self._make_event is None:
            return
        with self._lock:
            self._updating = True
            self._believed = self._believed and not self._sealed

    def end(self) -> None:
        """All of it is in the device's queue."""
        if self._make_event is None:
            return
        event = self._make_event()
        event.record()
        with self._lock:
            self._updating, self._event = False, event

    def seal(self) -> None:
        """The groups inside the replica are about to be aborted: what is not computed by now may become garbage."""
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
            queued = self._event is not None and not self._event.query()
            self._believed = self._believed and not self._updating and not queued

    def reset(self) -> None:
        """The state is one that others have told of, or was found to be theirs: the worker has a place."""
        with self._lock:
            self._updating, self._event, self._sealed, self._believed = False, None, False, True


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
