"""An orphan's way back into the training, from top to bottom.

    leave            out of the training: the others need not wait, and what it was in the middle of is forgotten
    come_back        until it has a place:
      wait             as a spare, with the state that it has to offer
      take_place       in the replica that a plan has put together: groups, state, ranks
    build_elsewhere  where a model for another position is wanted: Megatron is forgotten, pretrain() is called once
                     more, alone, and comes to ``come_back``

Meanwhile the others train. They meet this worker at the boundary before a step (`between_steps`), give it its state
while they compute that step (`state_exchange`), and need it from there on.
The parts of ``leave``, ``wait`` and ``take_place`` that have no Megatron in them are `instep.orphan`.

Where a worker builds alone, pretrain() runs as at launch, with the rank of the new position, up to train(): its groups
hold nobody else (see `groups`), so nothing is sent and nothing is waited for.  What it would learn from others there
comes with the state later.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from megatron.core import tensor_parallel
from megatron.training import get_args
from torch.distributed import distributed_c10d as c10d

from recover_megatron.instep.decision import HELD, Decision
from recover_megatron.instep.faults import Orphaned, check_device, is_communication
from recover_megatron.instep.gradients import Column, alive
from recover_megatron.instep.recovery import Blame, Recovery
from recover_megatron.instep.spare import UntakenPlaces
from recover_megatron.instep.traffic import Mode
from recover_megatron.integrate import Loop
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.checkpoints import Checkpoints
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.state_exchange import INTERRUPTED, StateExchange, first_iteration
from recover_megatron.megatron_hooks.step_guard import StepGuard

log = get_logger(__name__)


@dataclass(eq=False)
class Rejoin:
    """Takes one worker out of the training and back, with the model that it has.  Called by its main thread."""

    _recovery: Recovery
    _groups: Groups
    _state: TrainingState
    _places: StateExchange
    _checkpoints: Checkpoints
    _sharded: ShardedOptimizer | None
    _blame: Blame
    _step_guard: StepGuard
    _rings: Sequence[Column]
    """The columns over which this worker sums in a step."""
    _untaken: UntakenPlaces = field(default_factory=UntakenPlaces, init=False)

    def leave(self, error: BaseException) -> None:
        """Leave the training, which ``error`` has ended: have all others told, and forget what was begun."""
        recovery = self._recovery
        if not isinstance(error, Orphaned):
            recovery.orphan.replica_failed(error)
            self._blame.left(recovery)
            if not is_communication(error):
                traceback.print_exception(error)
        self._groups.traffic.mode = Mode.ALONE
        log.info(
            f"worker {recovery.assignment.me} has no place any more ({str(error)[:120]}); it waits as a spare, "
            f"out of the training {recovery.orphan.spare_seconds:.3f} s after its replica broke"
        )
        # The frames of the training hold its tensors, and connections that others wait to see closed.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._checkpoints.forget()

    def come_back(self) -> None:
        """Wait as a spare until there is a place, and take it; afterwards train() can be entered.

        Raises ``OtherPosition`` and ``RunOver``, and ``Disagreement`` for a state that cannot be right.
        """
        self._groups.traffic.mode = Mode.ALONE  # nothing is sent before the first boundary: the others are elsewhere
        while True:
            decision = self._wait()
            try:
                self._take_place(decision)
                self._untaken.taken()
                return
            except INTERRUPTED as error:
                why = self._untaken.failed(error, decision)
                self._recovery.orphan.leave(why)
            if self._untaken.aside:
                self._stay_aside(why)
            time.sleep(self._untaken.pause)

    def _stay_aside(self, why: str) -> NoReturn:
        """Wait for the end of the run.  Raises ``RunOver``."""
        me = self._recovery.assignment.me
        log.warning(
            f"worker {me}: {why}; it gets no other, and the run goes on without it. Look at what connects its host to "
            "the others, end it, and bring another with recover-run --join"
        )
        self._recovery.session.note(why)
        self._groups.inside.left()
        self._recovery.orphan.wait(position=None, ready=False)
        raise AssertionError("a worker that is put aside was given a place")

    def _wait(self) -> Decision:
        """Wait for the plan that has a place for this worker.  Raises a CUDA error where its device is broken."""
        state = self._state
        check_device(self._recovery.comm_config.device)
        self._groups.inside.left()
        state.tidy()
        if self._sharded is not None:  # what others have updated meanwhile is of no use
            self._sharded.forget()
            state.version = None
        if not self._step_guard.believed:
            state.version = None
        if state.version is None:
            state.make_room()
        state.settle()
        digest = "" if state.version is None else state.digest()
        mine = self._recovery.assignment
        log.info(f"worker {mine.me} is ready for position {mine.position}")
        hooks = self._recovery.hooks
        newest = {"iteration": hooks.iteration(), "state_of": state.timeline, "last_step": state.last_step}
        return self._recovery.orphan.wait(version=state.version, digest=digest, **newest)

    def _take_place(self, decision: Decision) -> None:
        """Take the place that ``decision`` has for this spare.

        Raises what is in ``INTERRUPTED`` if this epoch ends first: this worker is then a spare with the state it had.
        """
        recovery, started, back_to = self._recovery, time.perf_counter(), decision.rollback
        if back_to is not None and back_to.source == HELD:
            self._state.timeline = decision.timeline[0]  # also if this plan is over before it has its place
        mine, progress, first = recovery.assignment, recovery.progress, first_iteration(decision)
        recovery.orphan.come_back(decision)
        progress.mark("regroup", waiting=True)
        self._groups.traffic.recovery = recovery
        # Now, beside the groups and the state: the others open theirs before they compute, and need this worker for it.
        mine.epoch_groups.open_rings([alive(column, mine.live) for column in self._rings])
        self._groups.regroup(mine, recovery.comm_config)
        progress.inject("regroup", first)
        grouped = time.perf_counter()
        size = 0
        if back_to is not None and back_to.source != HELD:
            self._state.go_back(back_to.iteration)  # loaded with the others, when all are here (`rollback`)
        else:
            size = self._places.fetch_state(decision)
        progress.inject("regroup", first)
        self._step_guard.reset()
        recovery.hooks.planned(decision)
        # Where a replica goes on, that one tells of the plan; this one only where all are new.
        recovery.planner.log(decision, None, 0.0)
        ended = time.perf_counter()
        log.info(
            f"worker {mine.me} takes position {mine.position} of replica {mine.replica} from iteration {first} on: "
            f"groups {grouped - started:.3f} s, state {ended - grouped:.3f} s, {size} bytes"
        )


def build_elsewhere(recovery: Recovery, groups: Groups, loop: Loop, position: int, *, built: bool) -> None:
    """Prepare this process for another pretrain(), which builds the model of ``position`` without talking to anybody.

    ``built``: whether Megatron still holds a model from before, which is dropped.
    """
    mine = recovery.assignment
    slot = mine.grid.replicas[0][position]
    log.info(f"worker {mine.me} builds the model of position {position}")
    if built:
        _forget_megatron(loop)
    os.environ["RANK"] = str(slot)
    mine.position = position
    groups.again(slot)


def _forget_megatron(loop: Loop) -> None:
    """Drop Megatron's globals and torch's groups; the model goes with what held it."""
    loop.services.forget()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    world = c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        known.clear()
    world.tags_to_pg.clear()
    c10d._update_default_pg(None)
    gc.collect()
    torch.cuda.empty_cache()


def install_building_alone(groups: Groups, loop: Loop) -> None:
    """Wrap the seams of a pretrain() that one worker runs alone; ``groups`` know whether this one does.

    load_checkpoint                      nothing is read: the state comes from a peer
    build_train_valid_test_data_loaders  whether there is data is what rank 0 says at launch: there is, they train
    append_to_progress_log               no job begins
    """

    def no_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return (0, 0) if groups.alone else original(*args, **kwargs)

        return load_checkpoint

    def data_is_there(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
            if groups.alone:
                get_args().do_train = True
            return original(*args, **kwargs)

        return build_train_valid_test_data_loaders

    def no_job_begins(original: Callable[..., Any]) -> Callable[..., Any]:
        def append_to_progress_log(*args: Any, **kwargs: Any) -> Any:
            # Not for good: with a place it waits for all others where they write of a checkpoint, as they do for it.
            return None if groups.traffic.mode is Mode.ALONE else original(*args, **kwargs)

        return append_to_progress_log

    loop.wrap("progress_log", no_job_begins)
    loop.wrap("load", no_checkpoint)
    loop.wrap("loaders", data_is_there)
