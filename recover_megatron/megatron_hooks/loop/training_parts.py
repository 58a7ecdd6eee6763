"""Objects that recovery needs for one built model of a worker (``TrainingParts``), and their work between two steps.

The parts are created together when train() is entered, and dropped together with the model.

at_boundary         holds a rendezvous if workers join or leave; compares states, repairs them, and sends them to new
                    replicas; takes a snapshot if one is due
before_checkpoint   ensures that each worker has its parameters and its part of the optimizer's state, before any
                    worker writes a checkpoint
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from recover_megatron.arguments import RecoverConfig
from recover_megatron.collectives.device import drained
from recover_megatron.instep.manager import Manager
from recover_megatron.instep.trainer import alive
from recover_megatron.integrate import Services
from recover_megatron.megatron_hooks.checkpoint.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.checkpoint.state_exchange import StateExchange
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState
from recover_megatron.megatron_hooks.fsdp.fsdp_buckets import FsdpBuckets, FsdpBuckets2
from recover_megatron.megatron_hooks.fsdp.fsdp_state import is_fsdp
from recover_megatron.megatron_hooks.fsdp.outer import InShardGroups
from recover_megatron.megatron_hooks.fsdp.version2 import is_version2
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.gradients.maxima import AttentionLogits, Scales
from recover_megatron.megatron_hooks.gradients.microbatches import Accumulated
from recover_megatron.megatron_hooks.layout import spreads_optimizer
from recover_megatron.megatron_hooks.logging import dumps
from recover_megatron.megatron_hooks.logging.trackers import RouterSums, Trackers
from recover_megatron.megatron_hooks.optimizer.keeping import InBuckets
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.parallel_groups import Groups


class StepGuard:
    """Decides whether an orphan's parameters really have the version that the orphan has counted.

    On a GPU an update waits in the queue behind the all-reduce of the gradients' norm inside the replica.  If a peer of
    the replica is dead, the abort of the process group completes this all-reduce with garbage.  The garbage scales the
    update, possibly without an exception.  So the update counts only if the device executed it before the abort:

        IDLE --begin--> UPDATING --end--> QUEUED --the device is done--> IDLE
          |                |                |
          '----seal()------+----seal()------'      the groups are about to be aborted
          |                |
        believed       not believed, until ``reset``

    On the CPU every update counts, because a failed operation raises before its result is used.

    The main thread calls ``begin``, ``end`` and ``reset``; any thread may call ``seal``.  ``event``: function that
    creates a device event, with ``record`` and ``query``; None if the device is the CPU.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._make_event = event
        self._lock = threading.Lock()
        self._updating = False
        self._event: Any = None
        self._sealed = False
        self.believed = True

    @classmethod
    def of(cls, device: torch.device) -> StepGuard:
        return cls(torch.cuda.Event if device.type == "cuda" else None)

    def begin(self) -> None:
        if self._make_event is None:
            return
        with self._lock:
            self._updating = True
            self.believed = self.believed and not self._sealed

    def end(self) -> None:
        """Record that the complete update is in the device's queue."""
        if self._make_event is None:
            return
        event = self._make_event()
        event.record()
        with self._lock:
            self._updating, self._event = False, event

    def seal(self) -> None:
        """Record that the replica's process groups will be aborted, so that unfinished work may produce garbage."""
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
            queued = self._event is not None and not self._event.query()
            self.believed = self.believed and not self._updating and not queued

    def reset(self) -> None:
        """Trust this worker's state again, which was received from other workers, or found equal to their state."""
        with self._lock:
            self._updating, self._event, self._sealed, self.believed = False, None, False, True


class TrainingParts:
    """The objects that recovery needs for one model, created from train()'s arguments.  Used by the main thread.

    ``accumulated``: counter of the gradients that Megatron adds.  ``blank``: see ``TrainingState``.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        validation: Any,
        *,
        manager: Manager,
        groups: Groups,
        accumulated: Accumulated,
        services: Services,
        config: RecoverConfig,
        blank: bool,
    ) -> None:
        args = get_args()
        self._manager, self._groups, self._services = manager, groups, services
        self.buckets = _buckets(model, manager, accumulated, config.shadow_shards)
        self.trackers = Trackers(args, self.buckets.tail, manager.view.grid)
        self.routers = RouterSums(model)
        self.logits = AttentionLogits(args, model)
        self.scales = Scales(args, model)
        self.beside = (self.routers, self.trackers, self.logits, self.scales)
        """Sources of the values that a step sums in addition to gradients, in the order of the step's tail."""
        self.sharded = _sharded(optimizer, self.buckets, manager, config)
        """The sharded optimizer; None if each worker of a column has the column's complete optimizer state."""
        self.state = TrainingState(
            model,
            optimizer,
            scheduler,
            validation,
            services.operations,
            running=getattr(services, "running", float),
            blank=blank,
            sharded=self.sharded,
            scales=self.scales,
        )
        self.places = StateExchange(manager, self.state)
        wanted = config.memory_tier != "off"
        self.memory = MemoryTier(manager, self.state, self.sharded, wanted=wanted, every=config.memory_interval)

    def wait_for_device(self) -> None:
        """Wait until the device has finished all queued work.  Raises ``Orphaned`` if this replica is broken."""
        device = self._manager.view.communication.device
        if device.type == "cuda":
            drained(device, self._manager.check)

    def count_updates(self, optimizer: Any, step_guard: StepGuard) -> None:
        """Wrap the optimizer's step to count updates, so that an interrupted worker knows its parameters' version."""
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.places.withdraw()
            self.memory.before_update()
            step_guard.begin()
            if self.sharded is None:
                result = step(*args, **kwargs)
            else:
                result = self.sharded.step(partial(step, *args, **kwargs))
                if dumps.of_parameters():
                    self.complete()
            self.scales.move()
            self.state.stepped(bool(result[0]))
            step_guard.end()
            return result

        optimizer.step = counted

    # ---- between two steps

    def at_boundary(self) -> None:
        """Do the work between two steps: let new replicas join, compare and send states, take a snapshot if due.

        Raises ``Orphaned`` if this worker's state is wrong and could not be replaced.
        """
        manager = self._manager
        self._groups.open()
        self.state.begin()
        manager.at_boundary(self._before_meeting)
        if manager.view.decision.holders:
            self.complete()
            self.open_rings()  # concurrently with the transfer of states
        self.places.at_boundary()
        self._repartition()
        if self.sharded is not None and manager.view.verifying and not manager.view.joining_next:
            self.sharded.verify()
            self._repartition()
        self.memory.at_boundary()

    def open_rings(self) -> None:
        """Begin to open the rings of the current epoch, in the order in which a step uses them."""
        view = self._manager.view
        view.groups.open_rings([alive(column, view.live) for column in self.buckets.rings])

    def _before_meeting(self) -> None:
        self._services.finish_saves()  # before the rendezvous, because only the workers that began a save can finish it
        self.complete()
        if self._manager.view.decision.leaving:
            self._repartition()  # before the rendezvous, because leaving workers may be the only holders of some state

    def before_checkpoint(self) -> None:
        """Complete the parameters and shards of this worker; called before the section that writes a checkpoint."""
        self.complete()
        self._repartition()

    def saving(self) -> AbstractContextManager[None]:
        """Return the context of a checkpoint write.  The caller enters it once, even if the section is repeated."""
        return nullcontext() if self.sharded is None else self.sharded.saving()

    def complete(self) -> None:
        """Wait until the distributed optimizer's last update, which may overlap with the next step, is complete."""
        if self.sharded is not None:
            self.sharded.complete()

    def _repartition(self) -> None:
        """Repartition a sharded optimizer's state over the current workers, if necessary."""
        if self.sharded is not None and self.sharded.due():
            self.sharded.renew()


def _buckets(
    model: Any, manager: Manager, accumulated: Accumulated, shadows: int
) -> Buckets | FsdpBuckets | FsdpBuckets2:
    if is_version2(model[0]):
        return FsdpBuckets2(model, manager, accumulated)
    if is_fsdp(model[0]):
        return FsdpBuckets(model, manager, accumulated, shadows if spreads_optimizer(get_args()) else None)
    return Buckets(model, manager, shadows)


def _sharded(
    optimizer: Any, buckets: Buckets | FsdpBuckets | FsdpBuckets2, manager: Manager, config: RecoverConfig
) -> ShardedOptimizer | None:
    if isinstance(buckets, FsdpBuckets2) or buckets.shards is None:
        return None
    keeping = InBuckets(buckets) if isinstance(buckets, Buckets) else InShardGroups(buckets.outer)
    shadow_device = torch.device("cpu") if config.shadow_device == "cpu" else None
    return ShardedOptimizer(optimizer, buckets, keeping, manager, config.shadow_shards, shadow_device)


def from_first_rank(counts: list[int]) -> list[int]:
    """Return the ``counts`` of the model-parallel group's first rank, which broadcasts them."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return counts
    sent = torch.tensor(counts, device=torch.cuda.current_device())
    torch.distributed.broadcast(sent, group=group, group_src=0)
    return [int(count) for count in sent.tolist()]
