"""An orphan's way back into the training, from top to bottom.

    leave            out of the training: the others need not wait, and what it was in the middle of is forgotten
    come_back        until it has a place:
      wait             as a spare, with the state that it has to offer
      take_place       in the replica that a plan has put together: groups, state, ranks
    build_elsewhere  where a model for another position is wanted: Megatron is forgotten, pretrain() is called once
                     more, alone, and comes to ``come_back``

Meanwhile the others train. They meet this worker at the boundary before a step (`training_parts`), give it its state
while they compute that step (`state_exchange`), and need it from there on.  What has no Megatron in it is
`instep.meeting.orphan`.  Where a worker builds alone, its groups hold nobody else (see `groups`): nothing is sent and
nothing is waited for, and what it would learn from others comes with the state later.

Where the state is lost all go back to one checkpoint, in place (``Rollback``).
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.training import checkpointing, get_args
from torch.distributed import distributed_c10d as c10d

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.errors import InStepError
from recover_megatron.instep.decision import HELD, MEMORY, NON_PERSISTENT, Decision
from recover_megatron.instep.decision import Rollback as Target
from recover_megatron.instep.faults import (
    Orphaned,
    check_device,
    in_short,
    is_communication,
    is_of_device,
    is_own,
    signature,
)
from recover_megatron.instep.manager import Manager
from recover_megatron.integrate import Loop
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoint.checkpoints import Checkpoints
from recover_megatron.megatron_hooks.checkpoint.state_exchange import INTERRUPTED, first_iteration
from recover_megatron.megatron_hooks.data.children import moved
from recover_megatron.megatron_hooks.fsdp.state import forget_meshes
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.logging import writers
from recover_megatron.megatron_hooks.logging.console import Console
from recover_megatron.megatron_hooks.loop.training_parts import StepGuard, TrainingParts
from recover_megatron.megatron_hooks.loop.untaken_places import UntakenPlaces
from recover_megatron.membership.records import MembershipError

log = get_logger(__name__)


@dataclass(eq=False)
class Rejoin:
    """Takes one worker out of the training and back, with the model that it has.  Called by its main thread."""

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _step_guard: StepGuard
    _untaken: UntakenPlaces = field(default_factory=UntakenPlaces, init=False)

    def leave(self, error: BaseException) -> None:
        """Leave the training, which ``error`` has ended: have all others told, and forget what was begun."""
        self._manager.leave(error)
        if not isinstance(error, Orphaned) and not is_communication(error):
            traceback.print_exception(error)
        self._groups.stand_apart()
        view = self._manager.view
        log.info(
            f"worker {view.worker} has no place any more ({in_short(error)}); it waits as a spare, "
            f"out of the training {view.spare_seconds:.3f} s after its replica broke"
        )
        # The frames of the training hold its tensors, and connections that others wait to see closed.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._checkpoints.forget()

    def come_back(self) -> None:
        """Wait as a spare until there is a place, and take it; afterwards train() can be entered.

        Raises ``OtherPosition`` and ``RunOver``, and ``Disagreement`` for a state that cannot be right.
        """
        self._groups.stand_apart()  # nothing is sent before the first boundary: the others are elsewhere
        while True:
            decision = self._wait()
            try:
                self._take_place(decision)
                self._untaken.taken()
                self._stay_unprofiled()
                return
            except INTERRUPTED as error:
                why = self._untaken.failed(error, decision)
                self._manager.leave(why, note=why if self._untaken.aside else "")
            if self._untaken.aside:
                self._stay_aside(why)
            time.sleep(self._untaken.pause)

    def _stay_aside(self, why: str) -> NoReturn:
        """Wait for the end of the run.  Raises ``RunOver``."""
        me = self._manager.view.worker
        log.warning(
            f"worker {me}: {why}; it gets no other, and the run goes on without it. Look at what connects its host to "
            "the others, end it, and bring another with recover-run --join"
        )
        self._groups.left(self._manager)
        self._manager.wait_for_place(position=None, ready=False)
        raise AssertionError("a worker that is put aside was given a place")

    def _wait(self) -> Decision:
        """Wait for the plan that has a place for this worker.  Raises a CUDA error where its device is broken."""
        state, sharded = self._parts.state, self._parts.sharded
        device = self._manager.view.communication.device
        check_device(device)
        self._groups.left(self._manager)
        stop_profiler(device)
        state.tidy()
        if sharded is not None:  # what others have updated meanwhile is of no use
            sharded.forget()
            state.version = None
        if not self._step_guard.believed:
            state.version = None
        if state.version is None:
            state.make_room()
        state.settle()
        digest = "" if state.version is None else state.digest()
        view = self._manager.view
        log.info(f"worker {view.worker} is ready for position {view.position}")
        return self._manager.wait_for_place(
            version=state.version,
            digest=digest,
            iteration=view.iteration,
            state_of=state.timeline,
            last_step=state.last_step,
        )

    def _stay_unprofiled(self) -> None:
        """Have train() make no profiler of torch's, which counts its iterations from the entry of train()."""
        args = get_args()
        ranks = getattr(args, "profile_ranks", None)
        if getattr(args, "use_pytorch_profiler", False) and (not ranks or args.rank in ranks):
            setattr(args, "profile" if hasattr(args, "profile") else "use_pytorch_profiler", False)
            log.info(
                f"worker {self._manager.view.worker} is not profiled: it has come into the training late, and "
                "torch's profiler would record other iterations than --profile-step-start says, into the same file"
            )

    def _take_place(self, decision: Decision) -> None:
        """Take the place that ``decision`` has for this spare.

        Raises what is in ``INTERRUPTED`` if this epoch ends first: this worker is then a spare with the state it had.
        """
        manager, started, back_to = self._manager, time.perf_counter(), decision.rollback
        state = self._parts.state
        if back_to is not None and back_to.source == HELD:
            state.timeline = decision.timeline[0]  # also if this plan is over before it has its place
        first = first_iteration(decision)
        if first > manager.view.iteration:  # the one in which this worker left; with the state it is the first
            writers.missed_steps()
        with manager.take_place(decision, self._groups.traffic):
            # Now, beside the groups and the state: the others open theirs before they compute, and need this worker.
            self._parts.open_rings()
            self._groups.regroup(manager.view)
            manager.inject("regroup", first)
            grouped = time.perf_counter()
            size = 0
            if back_to is not None and back_to.source != HELD:
                state.go_back(back_to.iteration)  # loaded with the others, when all are here
            else:
                size = self._parts.places.fetch_state(decision)
            manager.inject("regroup", first)
            self._step_guard.reset()
        ended, view = time.perf_counter(), manager.view
        log.info(
            f"worker {view.worker} takes position {view.position} of replica {view.replica} from iteration {first} on: "
            f"groups {grouped - started:.3f} s, state {ended - grouped:.3f} s, {size} bytes"
        )


PROFILING = ("profile", "use_pytorch_profiler", "use_nsys_profiler")
"""Flags of Megatron-LM's and Bridge's loops, with which they profile."""


def stop_profiler(device: torch.device) -> None:
    """Stop the profiler that train() has begun: left by an exception, train() does not, and the memory would fill.

    What was recorded is dropped.  A profiler of the script's own stays on.
    """
    if not any(getattr(get_args(), name, False) for name in PROFILING):
        return
    try:
        if torch.autograd._profiler_enabled():
            torch.autograd._disable_profiler()
            torch.autograd.profiler._run_on_profiler_stop()
        if device.type == "cuda":
            torch.cuda.cudart().cudaProfilerStop()
    except (RuntimeError, AttributeError) as error:
        log.warning(f"the profiler cannot be stopped: {in_short(error)}")


def build_elsewhere(manager: Manager, groups: Groups, loop: Loop, position: int, *, built: bool) -> None:
    """Prepare this process for another pretrain(), which builds the model of ``position`` without talking to anybody.

    ``built``: whether Megatron still holds a model from before, which is dropped.
    """
    view = manager.view
    slot = view.grid.replicas[0][position]
    log.info(f"worker {view.worker} builds the model of position {position}")
    groups.again(slot)  # first: the groups know the model that is dropped
    if built:
        _forget_megatron(loop)
    os.environ["RANK"] = str(slot)


def _forget_megatron(loop: Loop) -> None:
    """Drop Megatron's globals and torch's groups; the model goes with what held it."""
    loop.services.forget()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    world = c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        known.clear()
    world.tags_to_pg.clear()
    c10d._update_default_pg(None)
    forget_meshes()
    gc.collect()
    torch.cuda.empty_cache()


def install_building_alone(groups: Groups, loop: Loop) -> None:
    """Wrap the seams of a pretrain() that one worker runs alone; ``groups`` know whether this one does.

    load_checkpoint                      nothing is read: the state comes from a peer
    build_train_valid_test_data_loaders  whether there is data is what rank 0 says at launch: there is, they train
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

    loop.wrap("load", no_checkpoint)
    loop.wrap("loaders", data_is_there)


AS_SAVED = {
    "finetune": False,
    "no_load_optim": False,
    "pretrained_checkpoint": None,
    "override_ckpt_iteration": None,
    "strict_fsdp_dtensor_load": True,
    "ckpt_assume_constant_structure": False,  # who reads what was planned for other workers
    "ckpt_convert_update_legacy_dist_opt_format": False,
}
"""Megatron's arguments by which the launch may have begun with a part of a checkpoint: a rollback takes all of it."""


@dataclass(eq=False)
class Rollback:
    """The state is lost: everybody who has a place loads one checkpoint, in place, and the training goes on from there.

        plan: rollback --> every worker is out of the training, and takes its place without a state
           |
        section    Megatron's own load_checkpoint(), over the groups of the epoch, or a snapshot of the memory tier;
           |         again, with whoever is left, if one dies
           |         who cannot read it says so and leaves: the next plan goes back to the one before
           v
        all have loaded it: train() is entered, at the iteration after the checkpoint's

    The plan says which checkpoint it is (`instep.meeting.timelines`), so that all take the same.  Where it is the state
    of workers that were set aside there is nothing to load.  The main thread calls it, with the model of this worker.
    """

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _console: Console
    _done: int = field(default=0, init=False)
    """The epoch of the last one that was carried out."""

    def carry_out(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Load what the plan that gave this worker its place says, if it says so.  Before ``train`` is entered.

        Raises ``Orphaned`` when this worker has no place any more: also where it could not read the checkpoint.
        """
        manager, decision = self._manager, self._manager.view.decision
        target, state, sharded = decision.rollback, self._parts.state, self._parts.sharded
        if target is None or decision.epoch == self._done:
            return
        began = time.monotonic()
        take_up: list[Callable[[], None]] = []

        def run() -> None:
            state.go_back(target.iteration)
            manager.inject("rollback")
            take_up.clear()
            try:
                if target.source == MEMORY:
                    take_up.append(self._parts.memory.load(target))
                else:
                    with nullcontext(lambda: None) if sharded is None else sharded.loading() as then:
                        operations = self._load(target, model, optimizer, scheduler)
                        state.loaded(target.iteration, operations, decision.timeline[0])
                    take_up.append(then)
                with self._groups.in_section():
                    state.agree_on_start(manager.view.communication.device)
            except BaseException as error:  # torch's CheckpointException is none of Exception
                self._explain(error, target)
                raise
            manager.inject("rollback")

        if target.source != HELD:  # else all have begun from that state when they took their places
            manager.section("rollback", run, moved=moved)
            take_up[0]()
        self._done = decision.epoch
        self._checkpoints.went_back(target.iteration)
        tier = "memory" if target.source in (HELD, MEMORY) else "disk"
        folder = "" if tier == "memory" else _folder(target)
        seconds = time.monotonic() - began
        one = manager.view.worker == min(decision.workers)  # for recover-status, which asks no worker
        manager.log(
            "rolled back",
            note=f"rolled back to iteration {target.iteration} from {tier}, {target.lost} lost" if one else "",
            epoch=decision.epoch,
            to=target.iteration,
            lost=target.lost,
            tier=tier,
            folder=folder,
            seconds=round(seconds, 6),
        )
        self._console.rolled_back(manager, target, folder, seconds)

    def _load(self, target: Target, model: Any, optimizer: Any, scheduler: Any) -> int:
        """Floating-point operations until then.  Raises whatever Megatron raises, and ValueError."""
        args = get_args()
        # Of the random states there is one for each replica, where they are many; the run may have grown since.
        no_states = args.no_save_rng or getattr(args, "data_parallel_random_init", False)
        at = target.iteration
        # Megatron reads what a checkpoint of Megatron-FSDP has from --load, whichever folder it is to load.
        as_saved = {**AS_SAVED, "no_load_rng": no_states, "ckpt_step": at, "load": _folder(target)}
        known = {name: value for name, value in as_saved.items() if hasattr(args, name)}
        # Of the legacy format Megatron reads the optimizer's part of whatever the tracker file names; and what it keeps
        # the last one of if that is newer, or as old, as one of the default format: here each is one like all others.
        wanted = monkeypatch.replaced(
            checkpointing,
            read_metadata=lambda tracker: (at, False),
            _get_non_persistent_iteration=lambda *unused: -1,
        )
        with self._groups.in_section(), monkeypatch.replaced(args, **known), wanted:
            # Not training.load_checkpoint: a worker that was built alone has one that reads nothing.
            iteration, operations = checkpointing.load_checkpoint(
                model, optimizer, scheduler, load_arg="load", strict=True
            )
            # One that was built alone, in a position without data, knows of no data, and no peer has told it.
            there = torch.tensor(
                [int(args.do_valid), int(args.do_test)], device=self._manager.view.communication.device
            )
            dist.all_reduce(there, op=dist.ReduceOp.MAX)
            args.do_valid, args.do_test = there.tolist()
        if iteration != target.iteration:
            raise ValueError(f"it is of iteration {iteration}")
        return int(operations)

    def _explain(self, error: BaseException, target: Target) -> None:
        """Return where ``error`` is to be raised as it is; else raise what it means."""
        if isinstance(error, (EpochRevoked, MembershipError, InStepError, KeyboardInterrupt)):
            return
        epoch_groups = self._manager.view.groups
        if epoch_groups.over:  # whatever it is, the epoch's end may have led to it
            raise EpochRevoked(epoch_groups.number, signature(error)) from error
        if is_communication(error) or is_own(error) or is_of_device(error):
            return
        if target.source == MEMORY:
            what = f"the snapshot after iteration {target.iteration} in memory"
        else:
            what = f"the checkpoint of iteration {target.iteration} in {_folder(target)}"
            self._checkpoints.unreadable.add(target.iteration)
        why = f"worker {self._manager.view.worker} cannot load {what}: {signature(error)}"
        log.warning(f"{why}; the run goes back to one before it, if there is one")
        self._manager.leave(why[:500])
        raise Orphaned(why) from error


def _folder(target: Target) -> str:
    """Where the checkpoints are of which ``target`` is one."""
    args = get_args()
    if target.source != NON_PERSISTENT:
        return str(getattr(args, target.source))
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))
