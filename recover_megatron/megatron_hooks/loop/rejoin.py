"""Return of an orphan or spare to the training, and rollback of all workers to a checkpoint.

    leave            leave the training: no other worker waits for this worker, and interrupted work is dropped
    come_back        repeat until this worker has a place:
      wait             wait as a spare, and offer the state that this worker has
      take_place       take a place in the replica that a plan has formed: join its groups, receive its state
    build_elsewhere  if a plan assigns another position: drop Megatron's state, and run pretrain() again, without other
                     workers, until pretrain()'s train() calls ``come_back``

Meanwhile the other workers train.  At the boundary before one step (`training_parts`) they wait until this worker takes
its place.  While they compute that step, they send this worker the state (`state_exchange`), and from then on they
depend on this worker.  The code without Megatron is `instep.meeting.orphan`.  A worker that builds a model alone is the
only member of its groups (`parallel_groups`), so it needs no other worker until it receives the state.

If a part of the state is lost, all workers roll back to one checkpoint, in place (``Rollback``).
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
from recover_megatron.megatron_hooks.fsdp.fsdp_state import forget_meshes
from recover_megatron.megatron_hooks.logging import writers
from recover_megatron.megatron_hooks.logging.console import Console
from recover_megatron.megatron_hooks.loop.training_parts import StepGuard, TrainingParts
from recover_megatron.megatron_hooks.loop.untaken_places import UntakenPlaces
from recover_megatron.megatron_hooks.parallel_groups import Groups
from recover_megatron.membership.records import MembershipError

log = get_logger(__name__)


@dataclass(eq=False)
class Rejoin:
    """Removes this worker from the training, and returns it with the model that it has built.  Main thread only."""

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _step_guard: StepGuard
    _untaken: UntakenPlaces = field(default_factory=UntakenPlaces, init=False)

    def leave(self, error: BaseException) -> None:
        """Leave the training because of ``error``: notify all other workers, and drop interrupted work."""
        self._manager.leave(error)
        if not isinstance(error, Orphaned) and not is_communication(error):
            traceback.print_exception(error)
        self._groups.leave_training()
        view = self._manager.view
        log.info(
            f"worker {view.worker} has lost its place ({in_short(error)}); it waits as a spare. "
            f"It left the training {view.spare_seconds:.3f} s after its replica broke"
        )
        # Frames of the traceback keep tensors and connections alive.  Other workers wait until the connections close.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._checkpoints.forget()

    def come_back(self) -> None:
        """Wait as a spare until a plan has a place for this worker, and take this place.

        When this function returns, train() can be entered.  Raises ``OtherPosition`` if a plan assigns this worker
        another position, ``RunOver`` if the run is over, and ``Disagreement`` if the received state is of another
        iteration or does not fit the model.
        """
        # Operations over replicas send nothing before the first boundary, because other workers reach it later.
        self._groups.leave_training()
        while True:
            decision = self._wait()
            try:
                self._take_place(decision)
                self._untaken.taken()
                self._stay_unprofiled()
                return
            except INTERRUPTED as error:
                why = self._untaken.failed(error, decision)
                self._manager.leave(why, note=why if self._untaken.retired else "")
            if self._untaken.retired:
                self._stay_retired(why)
            time.sleep(self._untaken.pause)

    def _stay_retired(self, why: str) -> NoReturn:
        """Wait until the run ends, without asking for a place again; then raise ``RunOver``."""
        me = self._manager.view.worker
        log.warning(
            f"worker {me}: {why}; the run continues without this worker. Check the network between this host and the "
            "other hosts, stop this worker, and add another worker with recover-run --join"
        )
        self._groups.left(self._manager)
        self._manager.wait_for_place(position=None, ready=False)
        raise AssertionError("a retired worker was given a place")

    def _wait(self) -> Decision:
        """Wait for a plan with a place for this worker.  Raises a CUDA error if this worker's device is broken."""
        state, sharded = self._parts.state, self._parts.sharded
        device = self._manager.view.communication.device
        check_device(device)
        self._groups.left(self._manager)
        stop_profiler(device)
        state.tidy()
        if sharded is not None:  # other workers will update their shards, so this worker's shards are useless
            sharded.forget()
            state.version = None
        if not self._step_guard.believed:
            state.version = None
        if state.version is None:
            state.make_room()
        state.finish_schedule()
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
        """Disable torch's profiler in train(), which would count iterations from the entry of train()."""
        args = get_args()
        ranks = getattr(args, "profile_ranks", None)
        if getattr(args, "use_pytorch_profiler", False) and (not ranks or args.rank in ranks):
            setattr(args, "profile" if hasattr(args, "profile") else "use_pytorch_profiler", False)
            log.info(
                f"worker {self._manager.view.worker} is not profiled, because it joined the training late: torch's "
                "profiler would record other iterations than the flags select, and might overwrite a lost worker's file"
            )

    def _take_place(self, decision: Decision) -> None:
        """Take the place that ``decision`` has for this spare: join the groups and receive the state.

        If the epoch ends first, raises one of ``INTERRUPTED``, and this worker remains a spare with its old state.
        """
        manager, started, back_to = self._manager, time.perf_counter(), decision.rollback
        state = self._parts.state
        if back_to is not None and back_to.source == HELD:
            state.timeline = decision.timeline[0]  # kept even if the epoch ends before this worker has its place
        first = first_iteration(decision)
        if first > manager.view.iteration:  # other workers have completed the iteration in which this worker left
            writers.missed_steps()
        with manager.take_place(decision, self._groups.traffic):
            # Before the groups and the state, because other workers wait for this worker's rings before they compute.
            self._parts.open_rings()
            self._groups.regroup(manager.view)
            manager.inject("regroup", first)
            grouped = time.perf_counter()
            size = 0
            if back_to is not None and back_to.source != HELD:
                state.go_back(back_to.iteration)  # ``Rollback`` loads the state once all workers have their places
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
"""Flags that enable profiling in Megatron-LM's and Bridge's loops."""


def stop_profiler(device: torch.device) -> None:
    """Stop the profiler that train() leaves running after an exception; otherwise its records would fill the memory.

    The records are dropped.  If Megatron's profiling is off, a profiler of the user's script keeps running.
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
        log.warning(f"cannot stop torch's profiler, whose records may fill the memory: {in_short(error)}")


def build_elsewhere(manager: Manager, groups: Groups, loop: Loop, position: int, *, built: bool) -> None:
    """Prepare this process for a pretrain() that builds the model of ``position`` without communication.

    ``built``: True if Megatron still holds an earlier model, which this function drops.
    """
    view = manager.view
    slot = view.grid.replicas[0][position]
    log.info(f"worker {view.worker} builds the model of position {position}")
    groups.again(slot)  # before the model is dropped, because the groups refer to the model
    if built:
        _forget_megatron(loop)
    os.environ["RANK"] = str(slot)


def _forget_megatron(loop: Loop) -> None:
    """Free the model: drop the last references to it, which are in Megatron's globals and torch's process groups."""
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
    """Wrap functions of pretrain(), for a worker that runs pretrain() without other workers (``groups.alone``).

    load_checkpoint                      loads nothing, because this worker will receive the state from a peer
    build_train_valid_test_data_loaders  assumes that training data exists, since other workers train; at launch
                                         rank 0 broadcasts whether training data exists
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
    "ckpt_assume_constant_structure": False,  # the cached load plan was made for the workers of the launch
    "ckpt_convert_update_legacy_dist_opt_format": False,
}
"""Megatron's argument -> value during a rollback, which loads the whole checkpoint even if the launch loaded a part."""


@dataclass(eq=False)
class Rollback:
    """Rollback after a loss of state: all workers with a place load one checkpoint, and continue from there.

        plan with a rollback --> every worker leaves the training, and takes its place without a state
           |
        section    load by Megatron's own load_checkpoint(), over the groups of the epoch, or from the memory tier.
           |         If a worker dies, the survivors repeat the section.
           |         If a worker cannot read the checkpoint, it reports this and leaves; the next plan uses an earlier
           |         checkpoint
           v
        all workers have loaded the checkpoint: they enter train() at the next iteration after the checkpoint

    The plan names the checkpoint (`instep.meeting.timelines`), so all workers load the same checkpoint.  If the plan
    names a state held by workers that were set aside, nothing is loaded here.  Used by the main thread.
    """

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _console: Console
    _done: int = field(default=0, init=False)
    """Epoch of the last completed rollback."""

    def carry_out(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Roll back, if the plan that gave this worker its place orders a rollback; called before ``train`` is entered.

        Raises ``Orphaned`` if this worker loses its place, for example because it cannot read the checkpoint.
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
            except BaseException as error:  # torch's CheckpointException derives from BaseException
                self._explain(error, target)
                raise
            manager.inject("rollback")

        if target.source != HELD:  # with HELD, each worker has received the state when it took its place
            manager.section("rollback", run, moved=moved)
            take_up[0]()
        self._done = decision.epoch
        self._checkpoints.went_back(target.iteration)
        tier = "memory" if target.source in (HELD, MEMORY) else "disk"
        folder = "" if tier == "memory" else _folder(target)
        seconds = time.monotonic() - began
        one = manager.view.worker == min(decision.workers)  # only one worker logs the note for recover-status
        manager.log(
            "rolled back",
            note=f"rolled back {target.lost} iterations to iteration {target.iteration} from {tier}" if one else "",
            epoch=decision.epoch,
            to=target.iteration,
            lost=target.lost,
            tier=tier,
            folder=folder,
            seconds=round(seconds, 6),
        )
        self._console.rolled_back(manager, target, folder, seconds)

    def _load(self, target: Target, model: Any, optimizer: Any, scheduler: Any) -> int:
        """Load the checkpoint of ``target``; return the checkpoint's count of floating-point operations.

        Raises Megatron's errors, and ValueError if the checkpoint belongs to another iteration.
        """
        args = get_args()
        # With one random state per replica, a checkpoint may have fewer states than the run now has replicas.
        no_states = args.no_save_rng or getattr(args, "data_parallel_random_init", False)
        at = target.iteration
        # Megatron reads some contents of a Megatron-FSDP checkpoint from --load, so "load" must name its folder.
        as_saved = {**AS_SAVED, "no_load_rng": no_states, "ckpt_step": at, "load": _folder(target)}
        known = {name: value for name, value in as_saved.items() if hasattr(args, name)}
        # Without the first replacement, Megatron would read the optimizer state of a legacy checkpoint from the newest
        # checkpoint.  Without the second, it would prefer a non-persistent checkpoint that is as new or newer.
        wanted = monkeypatch.replaced(
            checkpointing,
            read_metadata=lambda tracker: (at, False),
            _get_non_persistent_iteration=lambda *unused: -1,
        )
        with self._groups.in_section(), monkeypatch.replaced(args, **known), wanted:
            # Not training.load_checkpoint: its wrapper loads nothing on a worker that built its model alone.
            iteration, operations = checkpointing.load_checkpoint(
                model, optimizer, scheduler, load_arg="load", strict=True
            )
            # A worker that built its model alone, in a position without data, does not know which data sets exist.
            has_data = torch.tensor(
                [int(args.do_valid), int(args.do_test)], device=self._manager.view.communication.device
            )
            dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
            args.do_valid, args.do_test = has_data.tolist()
        if iteration != target.iteration:
            raise ValueError(f"the checkpoint belongs to iteration {iteration}")
        return int(operations)

    def _explain(self, error: BaseException, target: Target) -> None:
        """Raise a more specific exception in place of ``error``, which a load has raised; return if none is needed."""
        if isinstance(error, (EpochRevoked, MembershipError, InStepError, KeyboardInterrupt)):
            return
        epoch_groups = self._manager.view.groups
        if epoch_groups.over:  # the end of the epoch may have caused the error
            raise EpochRevoked(epoch_groups.number, signature(error)) from error
        if is_communication(error) or is_own(error) or is_of_device(error):
            return
        if target.source == MEMORY:
            what = f"the snapshot after iteration {target.iteration} in memory"
        else:
            what = f"the checkpoint of iteration {target.iteration} in {_folder(target)}"
            self._checkpoints.unreadable.add(target.iteration)
        why = f"worker {self._manager.view.worker} cannot load {what}: {signature(error)}"
        log.warning(f"{why}; the run rolls back to an earlier state, if one exists")
        self._manager.leave(why[:500])
        raise Orphaned(why) from error


def _folder(target: Target) -> str:
    """Return the folder with the checkpoint of ``target``."""
    args = get_args()
    if target.source != NON_PERSISTENT:
        return str(getattr(args, target.source))
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))
