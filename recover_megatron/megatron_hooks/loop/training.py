"""Hooks of Megatron's training loop.

train()                         joins the first epoch; from then on the run survives deaths.  If a worker's replica is
                                broken, the worker leaves train() by an exception, takes a place (`rejoin`), and enters
                                train() again
  train_step()                  before each step there is a boundary, at which new replicas join
    forward_backward_func()     --> instep.step: COMPUTE .. COMMITTED, then finalize_model_grads
    optimizer.step()            communicates inside the replica only (distributed optimizer: see `sharded_optimizer`)
  training_log()                each of its barriers is a section
  evaluate()                    a section; its microbatches are distributed over the live replicas (`evaluation`)
  save_checkpoint()             a section: after a loss the survivors write the checkpoint again from the start
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from recover_megatron.arguments import RecoverConfig
from recover_megatron.errors import UserError
from recover_megatron.instep.decision import Checkpoint
from recover_megatron.instep.faults import NoReplica, OtherPosition, RunOver, StateLost, UnknownOperation
from recover_megatron.instep.manager import Manager
from recover_megatron.instep.trainer import EXTRAS, Outcome, Tail
from recover_megatron.integrate import Loop
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.checkpoint.checkpoints import Checkpoints
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState
from recover_megatron.megatron_hooks.data.source import sources_of
from recover_megatron.megatron_hooks.gradients import buckets, microbatches
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.gradients.microbatches import Accumulated, MicrobatchSeeds
from recover_megatron.megatron_hooks.layout import batches_to_come, misfits
from recover_megatron.megatron_hooks.logging import dumps, trackers, writers
from recover_megatron.megatron_hooks.logging.console import Console
from recover_megatron.megatron_hooks.logging.records import Records
from recover_megatron.megatron_hooks.loop.evaluation import Evaluation
from recover_megatron.megatron_hooks.loop.rejoin import Rejoin, Rollback
from recover_megatron.megatron_hooks.loop.trainer import MegatronTrainer, NominalCount
from recover_megatron.megatron_hooks.loop.training_parts import StepGuard, TrainingParts, from_first_rank
from recover_megatron.megatron_hooks.optimizer import sharded_optimizer
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.parallel_groups import Groups
from recover_megatron.membership.records import CoordinatorLost, Fenced
from recover_megatron.workload.grid import LaunchGrid

log = get_logger(__name__)

FINAL = (
    NoReplica,
    StateLost,
    UnknownOperation,
    RunOver,
    OtherPosition,
    Fenced,
    CoordinatorLost,
    SystemExit,
    KeyboardInterrupt,
    UserError,
)
"""Exceptions that stop a worker even if its replica is broken, because a broken replica does not cause them."""


class TrainingHooks:
    """The hooks of one worker's training loop, and the parts that the hooks need while the worker trains.

    ``make_manager`` creates the worker's ``Manager``.  ``open`` calls ``make_manager`` when ``train`` is first entered;
    a newcomer, which waits for a place before it has a model, calls ``open`` earlier.
    """

    def __init__(
        self,
        loop: Loop,
        groups: Groups,
        make_manager: Callable[[Any, LaunchGrid | None], Manager],
        records: Records,
        device: torch.device,
        config: RecoverConfig,
    ) -> None:
        self.loop = loop
        self._groups = groups
        self._config = config
        self._make_manager = make_manager
        self._manager: Manager | None = None
        self._records = records
        self.console = Console()
        self._device = device
        self.step_guard = StepGuard.of(device)
        self._seeds = MicrobatchSeeds(device)
        self._nominal = NominalCount()
        self._accumulated = Accumulated()
        self._outcome: Outcome | None = None
        self._evaluation = Evaluation(groups, lambda: self.sharded, lambda: self._manager)
        self._checkpoints = Checkpoints(groups, records, lambda: self._parts, lambda: self._manager)
        self._parts: TrainingParts | None = None
        """None before ``train`` has been entered."""

    @property
    def parts(self) -> TrainingParts:
        """The ``TrainingParts`` of the model.  Raises AssertionError before ``train`` has been entered."""
        assert self._parts is not None, "train has not been entered"
        return self._parts

    @property
    def state(self) -> TrainingState | None:
        """The training state; None before ``train`` has been entered."""
        parts = self._parts  # read once, because the main thread may drop the parts
        return None if parts is None else parts.state

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The optimizer, if the optimizer's state is sharded over the replicas; else None."""
        return None if self._parts is None else self._parts.sharded

    @property
    def manager(self) -> Manager:
        """The manager.  Raises AssertionError before ``open`` has been called."""
        assert self._manager is not None, "training has not begun"
        return self._manager

    def open(self, args: Any = None, grid: LaunchGrid | None = None) -> None:
        """Create the manager.  ``args``, ``grid``: only for a newcomer, which has not initialized Megatron yet."""
        self._manager = self._make_manager(args, grid)

    @property
    def iteration(self) -> int:
        """The current iteration, from 1; 0 before ``train`` has been entered."""
        return 0 if self._parts is None else getattr(get_args(), "curr_iteration", -1) + 1

    def forget(self) -> None:
        """Drop the parts of the current model, before this worker builds a model for another position."""
        self._parts = self._outcome = None

    def planned(self) -> None:
        """Update, for a new epoch, the record of which worker holds which shards of the optimizer's state.

        Raises ``StateLost`` on all workers if a part of the state has no live holder.
        """
        if self.sharded is not None and self.sharded.shards.known:
            self.sharded.shards.planned()
            self.sharded.check()

    def kept_checkpoints(self) -> tuple[list[Checkpoint], set[int]]:
        """Return (checkpoints to which the run can roll back, iterations whose checkpoints this worker cannot read).

        Any thread may call this method.
        """
        state, found = self.state, list[Checkpoint]()
        if state is not None and not self._no_last_resort(state):
            found += self._checkpoints.complete
            found += [(state.loaded_at_launch, "load")] if state.loaded_at_launch else []
        return found, self._checkpoints.unreadable

    def _no_last_resort(self, state: TrainingState) -> str:
        """Return the reason why the run cannot roll back to a checkpoint in place; empty if it can, once one exists."""
        return "--recover-last-resort off" if self._config.last_resort == "off" else state.no_rollback_reason

    @property
    def begun(self) -> bool:
        """True if ``manager`` exists; before that, evaluations, checkpoints etc. run as in stock Megatron."""
        return self._manager is not None

    def install(self) -> None:
        """Wrap the seams of this loop and of Megatron-Core; raises UserError if their signatures are unknown."""
        loop = self.loop
        self._nominal.install()
        self._accumulated.install()
        buckets.install(self._buckets)
        sharded_optimizer.install()
        trackers.install(loop, lambda: self._parts is not None)
        microbatches.install(loop)
        dumps.install(lambda: (self._groups.me, get_args().iteration - self.parts.state.first + 1))
        loop.wrap("train", self._train)
        loop.wrap("train_step", self._train_step)
        loop.wrap("log", self._training_log)
        loop.wrap("schedule", self._schedule)
        self._evaluation.install(loop)
        self._checkpoints.install(loop)

    def _buckets(self) -> Buckets | None:
        """Return the buckets in Megatron's DDP; None before they exist."""
        found = None if self._parts is None else self._parts.buckets
        return found if isinstance(found, Buckets) else None

    # ---- the loop

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(
            forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, data: Any, validation: Any, *rest: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            late = self.begun  # True for a newcomer, which waited for a plan before it built a model
            if not late:
                _check_batches(get_args())
                self.open()
            parts = self._take_up(model, optimizer, scheduler, validation, late=late)
            rejoin = Rejoin(self.manager, self._groups, parts, self._checkpoints, self.step_guard)
            rollback = Rollback(self.manager, self._groups, parts, self._checkpoints, self.console)
            if late:
                rejoin.come_back()
            else:
                args = get_args()
                args.curr_iteration = args.iteration  # Megatron does not set this if the run is already complete
                self._start()
            while True:
                try:
                    rollback.carry_out(model, optimizer, scheduler)
                    done = original(forward_step_func, model, optimizer, scheduler, data, validation, *rest, **kwargs)
                    parts.complete()
                    return done
                except BaseException as error:
                    if isinstance(error, FINAL) or not self.replica_broken(error):
                        raise
                    rejoin.leave(error)
                rejoin.come_back()

        return train

    def _take_up(self, model: Any, optimizer: Any, scheduler: Any, validation: Any, *, late: bool) -> TrainingParts:
        """Create the parts for train()'s model and optimizer; the wrapped functions use these parts from now on."""
        self._groups.model = model
        parts = self._parts = TrainingParts(
            model,
            optimizer,
            scheduler,
            validation,
            manager=self.manager,
            groups=self._groups,
            accumulated=self._accumulated,
            services=self.loop.services,
            config=self._config,
            blank=late,
        )
        writers.stand_in()
        parts.count_updates(optimizer, self.step_guard)
        return parts

    def _start(self) -> None:
        """Join the first epoch, with all launched workers."""
        self.manager.start(self._groups.traffic)
        args, view = get_args(), self.manager.view
        if (
            (args.save or args.load)
            and (why := self._no_last_resort(self.parts.state))
            and view.worker == min(view.decision.workers)
        ):
            log.info(
                f"no last resort: {why}. If the last holder of a part of the state is lost and there is no snapshot in "
                "memory, the run ends with exit code 12; launch it again to resume from the newest checkpoint"
            )
        self._groups.open()
        if self.sharded is not None:
            self.sharded.adopt()

    def replica_broken(self, error: BaseException) -> bool:
        """Return whether the loss of a worker of this replica caused ``error``; if so, this worker must leave."""
        return self.manager.is_of_mates(error)

    def _train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(
            forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.parts.at_boundary()
            started = time.perf_counter()
            with self._groups.in_step():
                result = original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            self.manager.inject("optimizer")
            assert self._outcome is not None
            self._records.step(self.manager, self._outcome, result, time.perf_counter() - started)
            self.console.step(self.manager, self._outcome, get_args().curr_iteration + 1)
            return result

        return train_step

    def _training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(losses: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            state = self.parts.state
            state.totals.take_up(total)
            if "is_first_iteration" in kwargs:
                # Whatever --log-interval is, Megatron logs the first iteration of train(), with a barrier.  All workers
                # must reach the same barriers, so a worker that entered train() later must not log its first iteration.
                kwargs["is_first_iteration"] = iteration == state.first and not state.gone_back
            return original(losses, total, rate, iteration, *args, **kwargs)

        return training_log

    # ---- one pass of the schedule

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_func(**call: Any) -> Any:
                if not self.begun:
                    return schedule(**call)
                if call.get("forward_only"):
                    return self._evaluation.forward_only(self.manager, schedule, call)
                return self._step(schedule, call)

            return forward_backward_func

        return get_forward_backward_func

    def _step(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """Run one step to its commit (`instep.step`), then finish the gradients; return the losses to log."""
        args, manager, parts = get_args(), self.manager, self.parts
        view = manager.view
        nominal = get_num_microbatches()
        total = nominal * args.data_parallel_size
        column = parts.buckets.tail
        in_column = set(column) & set(view.grid.replicas[view.replica])
        for source in sources_of(call["data_iterator"]):
            source.begin(args.consumed_train_samples, view.share(total)[view.inner_rank], total)
        parts.trackers.begin()
        parts.routers.begin()
        parts.logits.begin(total)
        parts.scales.begin(total)
        parts.buckets.begin()
        trainer = MegatronTrainer(
            schedule, call, parts, manager, self._seeds, self._accumulated, args.curr_iteration + 1
        )
        room = EXTRAS + sum(one.size for one in parts.beside)
        tail = Tail(column, total, len(view.grid.replicas), self._device, room=room)
        self._nominal.count = nominal
        parts.state.last_step = args.curr_iteration + 1, view.number + 1
        try:
            balance = from_first_rank if self._config.balance else None
            outcome = manager.step(trainer, total, tail, 1 / len(in_column), balance)
        finally:
            self._nominal.count = None
        self._outcome = outcome
        losses = trainer.finish(outcome.extras)
        manager.mark("optimizer")
        manager.inject("optimizer")
        return losses


def _check_batches(args: Any) -> None:
    """Raise UserError if a coming batch of the batch size schedule cannot be distributed over the replicas."""
    if getattr(args, "step_batch_size_schedule", None):
        batches = batches_to_come(args, args.consumed_train_samples, args.iteration)
        if reasons := misfits(args, args.data_parallel_size, batches):
            raise UserError(*reasons)
