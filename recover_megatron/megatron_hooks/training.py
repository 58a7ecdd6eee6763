"""Megatron's training loop, hooked: the one place that knows where in the loop what happens.

train()                         joins the first epoch; from here on deaths are survived.  Left by an exception where
                                the replica is broken, and entered again when there is a place (`rejoin`)
  train_step()                  before it, the boundary where new replicas come in
    forward_backward_func()     --> instep.step: COMPUTE .. COMMITTED, then finalize_model_grads
    optimizer.step()            inside a replica: needs nobody else; a distributed one: `sharded_optimizer`
  training_log()                barriers: sections of their own
  evaluate()                    `evaluation`: a section, whose microbatches are shared out, too
  save_checkpoint()             a section: written again from the start by whoever is left
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from recover_megatron.errors import UserError
from recover_megatron.instep.decision import Checkpoint
from recover_megatron.instep.faults import NoReplica, OtherPosition, RunOver, StateLost, UnknownOperation
from recover_megatron.instep.gradients import EXTRAS, Tail
from recover_megatron.instep.recovery import Blame, Recovery
from recover_megatron.instep.step import Outcome, Step
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.integrate import Loop
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import writers
from recover_megatron.megatron_hooks.between_steps import rebalance
from recover_megatron.megatron_hooks.buckets import Buckets, BucketSeams
from recover_megatron.megatron_hooks.checkpoints import Checkpoints
from recover_megatron.megatron_hooks.data import sources_of
from recover_megatron.megatron_hooks.evaluation import Evaluation, OverParameters
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.microbatches import Accumulated, MicrobatchSeeds, install_random_states
from recover_megatron.megatron_hooks.optimizer import sharded_optimizer
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.order import install_skipping
from recover_megatron.megatron_hooks.records import Console, Records
from recover_megatron.megatron_hooks.rejoin import Rejoin
from recover_megatron.megatron_hooks.rollback import Rollback, kept
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange
from recover_megatron.megatron_hooks.step_guard import StepGuard
from recover_megatron.megatron_hooks.trackers import TrackerSeam
from recover_megatron.megatron_hooks.trainer import MegatronTrainer, NominalCount
from recover_megatron.megatron_hooks.training_parts import StateCopies, TrainingParts, assemble
from recover_megatron.membership.records import CoordinatorLost, Fenced

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
"""Exceptions that end a worker as they are, even where its replica is broken: they do not come from that."""


class TrainingHooks:
    """The hooks of one worker's training loop, and the parts that they need while it trains.

    ``make_recovery`` opens this worker's part in the recovery; it is called when ``train`` is entered first.
    """

    def __init__(
        self,
        loop: Loop,
        groups: Groups,
        make_recovery: Callable[[], Recovery],
        records: Records,
        device: torch.device,
        copies: StateCopies,
        *,
        balance: bool = False,
    ) -> None:
        self.loop = loop
        self._groups = groups
        self._balance = balance
        self._copies = copies
        self._make_recovery = make_recovery
        self._records = records
        self.console = Console()
        self._device = device
        self._blame = Blame()
        self._step_guard = StepGuard.of(device)
        self._seeds = MicrobatchSeeds(device)
        self._nominal = NominalCount()
        self._accumulated = Accumulated()
        self._bucket_seams = BucketSeams()
        self._tracker_seam = TrackerSeam()
        self._outcome: Outcome | None = None
        self._evaluation = Evaluation(groups)
        self._checkpoints = Checkpoints(groups, records, self._before_checkpoint, self._saving)
        self._over_parameters = OverParameters(groups)
        self._parts: TrainingParts | None = None
        """None before ``train`` has been entered."""

    @property
    def _traffic(self) -> Traffic:
        return self._groups.traffic

    @property
    def state(self) -> TrainingState | None:
        """None before ``train`` has been entered."""
        parts = self._parts  # once: the main thread may be about to forget it
        return None if parts is None else parts.state

    @property
    def places(self) -> StateExchange | None:
        """None before ``train`` has been entered."""
        return None if self._parts is None else self._parts.places

    @property
    def _in_training(self) -> TrainingParts:
        assert self._parts is not None, "train has not been entered"
        return self._parts

    @property
    def _sharded(self) -> ShardedOptimizer | None:
        return None if self._parts is None else self._parts.sharded

    @property
    def recovery(self) -> Recovery:
        assert self._groups.recovery is not None, "training has not begun"
        return self._groups.recovery

    @property
    def iteration(self) -> int:
        """The iteration under way, from 1; 0 before ``train`` has been entered."""
        return 0 if self._parts is None else getattr(get_args(), "curr_iteration", -1) + 1

    def forget(self) -> None:
        """Drop all that belongs to the model: one for another position is to be built."""
        self._bucket_seams.buckets = self._over_parameters.sharded = None
        self._tracker_seam.active = False
        self._parts = self._outcome = None

    def replica_ends(self) -> None:
        """The groups inside the replica are about to be aborted.  Called in any thread."""
        self._step_guard.seal()

    def planned(self) -> None:
        """A new epoch.  Raises ``StateLost``, for all, where nobody has a part of the optimizer's state any more."""
        if self._sharded is not None and self._sharded.shards.known:
            self._sharded.shards.planned()
            self._sharded.check()

    def kept_checkpoints(self) -> tuple[list[Checkpoint], set[int]]:
        """The complete checkpoints that the run could go back to, and those that this worker has failed to load."""
        state = self.state
        return ([] if state is None else kept(self._checkpoints, state)), self._checkpoints.unreadable

    @property
    def sharded(self) -> bool:
        """Whether the optimizer's state is spread over the replicas."""
        return self._sharded is not None

    @property
    def updated(self) -> int:
        """Where it is spread: the iteration of the optimizer's last update; else 0."""
        return 0 if self._sharded is None else self._sharded.updated

    @property
    def begun(self) -> bool:
        """Whether ``train`` has been entered."""
        return self._groups.recovery is not None

    def install(self) -> None:
        """Wrap the seams; raises UserError if this loop's or Megatron-Core's are not the ones we know."""
        loop = self.loop
        self._nominal.install()
        self._accumulated.install()
        self._bucket_seams.install()
        sharded_optimizer.install()
        self._tracker_seam.install(loop)
        install_skipping(loop)
        install_random_states(loop)
        loop.wrap("train", self._train)
        loop.wrap("train_step", self._train_step)
        loop.wrap("log", self._training_log)
        loop.wrap("schedule", self._schedule)
        self._evaluation.install(loop)
        self._checkpoints.install(loop)
        self._over_parameters.install(loop)

    # ---- the loop

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(
            forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, data: Any, validation: Any, *rest: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            late = self.begun  # a newcomer, which waited without a model until it was to build one
            if not late:
                self._groups.recovery = self._make_recovery()
            parts = self._take_up(model, optimizer, scheduler, validation, late=late)
            rejoin, rollback = self._rejoin(parts), self._rollback(parts)
            if late:
                rejoin.come_back()
            else:
                self._start()
            while True:
                try:
                    rollback.carry_out(model, optimizer, scheduler)
                    done = original(forward_step_func, model, optimizer, scheduler, data, validation, *rest, **kwargs)
                    parts.between_steps.complete()
                    return done
                except BaseException as error:
                    if isinstance(error, FINAL) or not self.replica_broken(error):
                        raise
                    rejoin.leave(error)
                rejoin.come_back()

        return train

    def _take_up(self, model: Any, optimizer: Any, scheduler: Any, validation: Any, *, late: bool) -> TrainingParts:
        """Make the parts for the model and optimizer that train() was entered with, and tell the seams of them."""
        self._groups.model = model
        parts = self._parts = assemble(
            model,
            optimizer,
            scheduler,
            validation,
            recovery=self.recovery,
            traffic=self._traffic,
            accumulated=self._accumulated,
            copies=self._copies,
            services=self.loop.services,
            blank=late,
        )
        self._bucket_seams.buckets = parts.buckets if isinstance(parts.buckets, Buckets) else None
        self._over_parameters.sharded = parts.sharded
        self._tracker_seam.active = True
        writers.stand_in()
        parts.count_updates(optimizer, self._step_guard)
        return parts

    def _start(self) -> None:
        """Join the first epoch, with everybody who was launched."""
        self.recovery.rendezvous.start()
        self._traffic.recovery = self.recovery
        self._traffic.mode = Mode.OPEN
        if self._sharded is not None:
            self._sharded.adopt()

    def _rejoin(self, parts: TrainingParts) -> Rejoin:
        return Rejoin(
            self.recovery,
            self._groups,
            parts.state,
            parts.places,
            self._checkpoints,
            parts.sharded,
            self._blame,
            self._step_guard,
            parts.buckets.rings,
        )

    def _rollback(self, parts: TrainingParts) -> Rollback:
        return Rollback(
            self.recovery,
            self._groups,
            parts.state,
            self._checkpoints,
            self._records,
            self.console,
            parts.sharded,
            parts.memory,
        )

    def replica_broken(self, error: BaseException) -> bool:
        """Whether ``error`` comes from a mate's loss: this worker becomes a spare then, instead of ending by it."""
        return self._blame.of_mates(error, self.recovery)

    def _train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(
            forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._in_training.between_steps.at_boundary()
            started = time.perf_counter()
            with self._traffic.during(Mode.STEP):
                result = original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            self.recovery.progress.inject("optimizer")
            assert self._outcome is not None
            self._records.step(self.recovery, self._outcome, result, time.perf_counter() - started)
            self.console.step(self.recovery, self._outcome, get_args().curr_iteration + 1)
            return result

        return train_step

    def _training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(losses: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            state = self._in_training.state
            state.totals.take_up(total)
            if "is_first_iteration" in kwargs:
                # Megatron logs the first iteration of train(), with a barrier, and whoever came back has entered
                # train() anew: all must have the same decisions in an iteration.
                kwargs["is_first_iteration"] = iteration == state.first
            return original(losses, total, rate, iteration, *args, **kwargs)

        return training_log

    def _before_checkpoint(self) -> None:
        if self._parts is not None:
            self._parts.between_steps.before_checkpoint()

    def _saving(self) -> AbstractContextManager[None]:
        return nullcontext() if self._parts is None else self._parts.between_steps.saving()

    # ---- one pass of the schedule

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_func(**call: Any) -> Any:
                if not self.begun:
                    return schedule(**call)
                if call.get("forward_only"):
                    return self._evaluation.forward_only(self.recovery, schedule, call)
                return self._step(schedule, call)

            return forward_backward_func

        return get_forward_backward_func

    def _step(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """One step to its commit (`instep.step`), then what Megatron does once at its end; the losses for the log."""
        args, recovery = get_args(), self.recovery
        mine, progress, parts = recovery.assignment, recovery.progress, self._in_training
        nominal = get_num_microbatches()
        total = nominal * args.data_parallel_size
        mine.show(total)
        column = parts.buckets.tail
        in_column = set(column) & set(mine.grid.replicas[mine.replica])
        for source in sources_of(call["data_iterator"]):
            source.begin(args.consumed_train_samples, mine.share(total)[mine.inner_rank], total)
        parts.trackers.begin()
        parts.routers.begin()
        parts.logits.begin(total)
        trainer = MegatronTrainer(
            schedule,
            call,
            parts.buckets,
            progress,
            self._seeds,
            self._accumulated,
            parts.routers,
            parts.trackers,
            parts.logits,
            args.curr_iteration + 1,
        )
        room = EXTRAS + parts.routers.size + parts.trackers.size + parts.logits.size
        tail = Tail(column, total, len(mine.grid.replicas), self._device, room=room)
        self._nominal.count = nominal
        parts.state.last_step = args.curr_iteration + 1, progress.at + 1
        try:
            outcome = Step(recovery, trainer, total, tail, 1 / len(in_column)).run()
        finally:
            self._nominal.count = None
        self._outcome = outcome
        if self._balance:
            rebalance(recovery, outcome, total)
        losses = trainer.finish(outcome.extras)
        progress.mark("optimizer")
        progress.inject("optimizer")
        return losses
