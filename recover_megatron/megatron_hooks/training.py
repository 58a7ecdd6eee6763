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
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training

from recover_megatron.errors import UserError
from recover_megatron.instep.blame import Blame
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.errors import NoReplica, OtherPosition, RunOver, StateLost, UnknownOperation
from recover_megatron.instep.gradients import EXTRAS, Tail
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.step import Outcome, Step
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch, writers
from recover_megatron.megatron_hooks.accumulated import Accumulated
from recover_megatron.megatron_hooks.balancing import rebalance
from recover_megatron.megatron_hooks.buckets import Buckets, BucketSeams
from recover_megatron.megatron_hooks.checkpoints import Checkpoints
from recover_megatron.megatron_hooks.data import sources_of
from recover_megatron.megatron_hooks.evaluation import Evaluation
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.optimizer import sharded_optimizer
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.over_parameters import OverParameters
from recover_megatron.megatron_hooks.records import Records
from recover_megatron.megatron_hooks.rejoin import Rejoin
from recover_megatron.megatron_hooks.rng import MicrobatchSeeds
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import StateExchange
from recover_megatron.megatron_hooks.step_guard import StepGuard
from recover_megatron.megatron_hooks.trackers import Trackers, TrackerSeam
from recover_megatron.megatron_hooks.trainer import MegatronTrainer, NominalCount
from recover_megatron.membership.errors import CoordinatorLost, Fenced

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
"""What is not the fault of a broken replica, even if it comes to a worker of one."""


class TrainingHooks:
    """The hooks of one worker's training loop.  ``make_recovery`` is called when ``train`` begins."""

    def __init__(
        self,
        groups: Groups,
        make_recovery: Callable[[], Recovery],
        records: Records,
        device: torch.device,
        *,
        balance: bool = False,
        shadows: int = 1,
        shadow_device: torch.device | None = None,
    ) -> None:
        self._groups = groups
        self._balance = balance
        self._shadows = shadows
        self._shadow_device = shadow_device
        self._make_recovery = make_recovery
        self._records = records
        self._device = device
        self._blame = Blame()
        self._step_guard = StepGuard.of(device)
        self._seeds = MicrobatchSeeds(device)
        self._nominal = NominalCount()
        self._accumulated = Accumulated()
        self._bucket_monkeypatch = BucketSeams()
        self._tracker_seam = TrackerSeam()
        self._trackers: Trackers | None = None
        self._recovery: Recovery | None = None
        self._outcome: Outcome | None = None
        self._evaluation = Evaluation(groups)
        self._checkpoints = Checkpoints(groups, records, self._before_checkpoint)
        self._over_parameters = OverParameters(groups)
        self._sharded: ShardedOptimizer | None = None
        self._state: TrainingState | None = None
        self._places: StateExchange | None = None

    @property
    def _traffic(self) -> Traffic:
        return self._groups.traffic

    @property
    def state(self) -> TrainingState | None:
        """None before ``train`` has been entered."""
        return self._state

    @property
    def places(self) -> StateExchange | None:
        """None before ``train`` has been entered."""
        return self._places

    @property
    def recovery(self) -> Recovery:
        assert self._recovery is not None, "training has not begun"
        return self._recovery

    @recovery.setter
    def recovery(self, recovery: Recovery) -> None:
        """For a newcomer set from outside: it waits before it has anything to train."""
        self._recovery = self._checkpoints.recovery = self._evaluation.recovery = recovery
        self._over_parameters.recovery = recovery

    @property
    def _buckets(self) -> Buckets | None:
        return self._bucket_monkeypatch.buckets

    @property
    def iteration(self) -> int:
        """The one under way, from 1; 0 before ``train`` has been entered."""
        return 0 if self._state is None else getattr(get_args(), "curr_iteration", -1) + 1

    def forget(self) -> None:
        """The model is to be built again for another position."""
        self._bucket_monkeypatch.buckets, self._tracker_seam.active = None, False
        self._trackers = self._state = self._places = self._outcome = None
        self._sharded = self._over_parameters.sharded = None

    def replica_ends(self) -> None:
        """The groups inside the replica are about to be aborted; from any thread."""
        self._step_guard.seal()

    def planned(self, decision: Decision) -> None:
        """A new epoch.  Raises ``StateLost``, for all, where nobody has a part of the optimizer's state any more."""
        if self._sharded is not None and self._sharded.shards.known:
            self._sharded.shards.planned()
            self._sharded.check()

    @property
    def sharded(self) -> bool:
        """Whether the optimizer's state is spread over the replicas."""
        return self._sharded is not None

    @property
    def updated(self) -> int:
        """With such an optimizer: the iteration of its last update."""
        return 0 if self._sharded is None else self._sharded.updated

    @property
    def begun(self) -> bool:
        """Whether ``train`` has been entered."""
        return self._recovery is not None

    def install(self) -> None:
        """Wrap the seams; raises UserError if this Megatron's are not the ones we know."""
        step = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config")
        self._nominal.install()
        self._accumulated.install()
        self._bucket_monkeypatch.install()
        sharded_optimizer.install()
        self._tracker_seam.install()
        loop = ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator")
        monkeypatch.wrap(training, "train", (*loop, "valid_data_iterator"), self._train)
        monkeypatch.wrap(training, "train_step", step, self._train_step)
        monkeypatch.wrap(
            training, "training_log", ("loss_dict", "total_loss_dict", "learning_rate", "iteration"), self._training_log
        )
        monkeypatch.wrap(training, "get_forward_backward_func", (), self._schedule)
        self._evaluation.install()
        self._checkpoints.install()
        self._over_parameters.install()

    # ---- the loop

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(
            forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, data: Any, validation: Any, *rest: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            late = self._recovery is not None  # it waited, without a model, for somebody to want it
            if self._recovery is None:
                self.recovery = self._make_recovery()
            recovery = self.recovery
            self._groups.model = model
            buckets = self._bucket_monkeypatch.buckets = Buckets(model, recovery.assignment, self._shadows)
            self._trackers = Trackers(get_args(), len(buckets.tail))
            self._tracker_seam.active = True
            writers.stand_in()
            if buckets.shards is not None:
                self._sharded = ShardedOptimizer(optimizer, buckets, recovery, self._shadows, self._shadow_device)
                self._over_parameters.sharded = self._sharded
            state = TrainingState(model, optimizer, scheduler, validation, blank=late, sharded=self._sharded)
            self._state = state
            self._count_versions(optimizer)
            places = self._places = StateExchange(recovery, state)
            rejoin = Rejoin(
                recovery, self._groups, state, places, self._checkpoints, self._sharded, self._blame, self._step_guard,
                buckets.rings,
            )  # fmt: skip
            if late:
                rejoin.come_back()
            else:
                recovery.rendezvous.start()
                self._traffic.recovery = recovery
                self._traffic.mode = Mode.OPEN
                if self._sharded is not None:
                    self._sharded.adopt()
            while True:
                try:
                    done = original(forward_step_func, model, optimizer, scheduler, data, validation, *rest, **kwargs)
                    self._complete()
                    return done
                except BaseException as error:
                    if isinstance(error, FINAL) or not self.replica_broken(error):
                        raise
                    rejoin.leave(error)
                rejoin.come_back()

        return train

    def _count_versions(self, optimizer: Any) -> None:
        """Know whether the parameters are those before or after the step under way, whatever interrupts it."""
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            assert self._state is not None
            assert self._places is not None
            self._places.withdraw()
            self._step_guard.begin()
            if self._sharded is None:
                result = step(*args, **kwargs)
            else:
                result = self._sharded.step(lambda: step(*args, **kwargs))
            self._state.stepped(bool(result[0]))
            self._step_guard.end()
            return result

        optimizer.step = counted

    def replica_broken(self, error: BaseException) -> bool:
        """Whether the training was left because this worker's replica is broken: what it raises then is no fault."""
        return self._blame.of_mates(error, self.recovery)

    def _train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(
            forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._boundary()
            started = time.perf_counter()
            with self._traffic.during(Mode.STEP):
                result = original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            self.recovery.progress.inject("optimizer")
            assert self._outcome is not None
            self._records.step(self.recovery, self._outcome, result, time.perf_counter() - started)
            return result

        return train_step

    def _training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(losses: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            assert self._state is not None
            self._state.totals.take_up(total)
            if "is_first_iteration" in kwargs:
                # Megatron logs the first iteration of train(), with a barrier, and whoever came back has entered
                # train() anew: all must have the same decisions in an iteration.
                kwargs["is_first_iteration"] = iteration == self._state.first
            return original(losses, total, rate, iteration, *args, **kwargs)

        return training_log

    def _boundary(self) -> None:
        """Between two iterations: new replicas come in, states are compared and given."""
        assert self._state is not None
        assert self._places is not None
        self._traffic.mode = Mode.OPEN
        self._state.begin()
        self.recovery.boundary.meet_if_wanted(self._before_meeting)
        if self.recovery.assignment.decision.transfers:
            self._complete()
        self._places.at_boundary()
        self._settle()
        if self._sharded is not None and self.recovery.boundary.verifying and not self.recovery.boundary.joining_next:
            self._sharded.verify()
            self._settle()

    def _before_meeting(self) -> None:
        # A checkpoint under way is finished by those who began it.
        training.maybe_finalize_async_save(blocking=True)
        self._complete()

    def _before_checkpoint(self) -> None:
        self._complete()
        self._settle()

    def _complete(self) -> None:
        """Wait for what a distributed optimizer does while the next step computes."""
        if self._sharded is not None:
            self._sharded.complete()

    def _settle(self) -> None:
        """Where the optimizer's state is spread: spread it over those who are there now."""
        if self._sharded is not None and self._sharded.due():
            self._sharded.renew()

    # ---- one pass of the schedule

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_func(**call: Any) -> Any:
                if not self.begun:
                    return schedule(**call)
                if call.get("forward_only"):
                    return self._evaluation.forward_only(schedule, call)
                return self._step(schedule, call)

            return forward_backward_func

        return get_forward_backward_func

    def _step(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        args, recovery = get_args(), self.recovery
        mine, progress = recovery.assignment, recovery.progress
        assert self._buckets is not None
        assert self._trackers is not None
        nominal = get_num_microbatches()
        total = nominal * args.data_parallel_size
        mine.show(total)
        column = self._buckets.tail
        in_column = set(column) & set(mine.grid.replicas[mine.replica])
        for source in sources_of(call["data_iterator"]):
            source.begin(args.consumed_train_samples, mine.share(total)[mine.inner_rank], total)
        self._trackers.begin()
        trainer = MegatronTrainer(
            schedule,
            call,
            self._buckets,
            progress,
            self._seeds,
            self._accumulated,
            self._trackers,
            args.curr_iteration + 1,
        )
        room = EXTRAS + self._trackers.size
        tail = Tail(column, total, len(mine.grid.replicas), self._device, room=room)
        self._nominal.count = nominal
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
