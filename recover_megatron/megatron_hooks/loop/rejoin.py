"""An orphan's way back into the training, from top to bottom.

    leave            leave the training: the others need not wait, and interrupted work is dropped
    come_back        repeat until it has a place:
      wait             as a spare, offering its state
      take_place       in the replica that a plan has formed: groups, state, ranks
    build_elsewhere  if another position needs a model: Megatron's state is dropped, and pretrain() is called again,
                     alone, up to ``come_back``

Meanwhile the others train. They meet this worker at the boundary before a step (`training_parts`), send it the state
while they compute that step (`state_exchange`), and depend on it from there on.  The part without Megatron is
`instep.meeting.orphan`.  If a worker builds alone, it is the only member of its groups (see `groups`): it sends nothing
and waits for no other worker; information from others arrives with the state later.

If the state is lost, all workers roll back to one checkpoint, in place (``Rollback``).
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
    """Takes one worker out of the training and back, with its present model.  Called by its main thread."""

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _step_guard: StepGuard
    _untaken: UntakenPlaces = field(default_factory=UntakenPlaces, init=False)

    def leave(self, error: BaseException) -> None:
        """Leave the training, which ``error`` has ended: notify all others, and drop interrupted work."""
        self._manager.leave(error)
        if not isinstance(error, Orphaned) and not is_communication(error):
            traceback.print_exception(error)
        self._groups.leave_training()
        view = self._manager.view
        log.info(
            f"worker {view.worker} has lost its place ({in_short(error)}); it waits as a spare "
            f"and left the training {view.spare_seconds:.3f} s after its replica broke"
        )
        # The traceback's frames hold tensors of the training, and connections whose closing other workers wait for.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._checkpoints.forget()

    def come_back(self) -> None:
        """Wait as a spare until there is a place, and take it; afterwards train() can be entered.

        Raises ``OtherPosition`` and ``RunOver``, and ``Disagreement`` for a state that cannot be right.
        """
        self._groups.leave_training()  # nothing may be sent before the first boundary: the others are not there yet
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
        """Wait for the end of the run.  Raises ``RunOver``."""
        me = self._manager.view.worker
        log.warning(
            f"worker {me}: {why}; the run continues without it. Check the network between its host and the others, "
            "stop this worker, and add another one with recover-run --join"
        )
        self._groups.left(self._manager)
        self._manager.wait_for_place(position=None, ready=False)
        raise AssertionError("a retired worker was given a place")

    def _wait(self) -> Decision:
        """Wait for a plan with a place for this worker.  Raises a CUDA error if its device is broken."""
        state, sharded = self._parts.state, self._parts.sharded
        device = self._manager.view.communication.device
        check_device(device)
        self._groups.left(self._manager)
        stop_profiler(device)
        state.tidy()
        if sharded is not None:  # its shards will be outdated by the others' updates
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
        """Disable torch's profiler in train(), which counts iterations from the entry of train()."""
        args = get_args()
        ranks = getattr(args, "profile_ranks", None)
        if getattr(args, "use_pytorch_profiler", False) and (not ranks or args.rank in ranks):
            setattr(args, "profile" if hasattr(args, "profile") else "use_pytorch_profiler", False)
            log.info(
                f"worker {self._manager.view.worker} is not profiled: it joined the training late, and torch's "
                "profiler would record other iterations than --profile-step-start, into the same file"
            )

    def _take_place(self, decision: Decision) -> None:
        """Take the place that ``decision`` has for this spare.

        Raises one of ``INTERRUPTED`` if this epoch ends first: this worker is then a spare with its old state.
        """
        manager, started, back_to = self._manager, time.perf_counter(), decision.rollback
        state = self._parts.state
        if back_to is not None and back_to.source == HELD:
            state.timeline = decision.timeline[0]  # also if this plan ends before the worker has its place
        first = first_iteration(decision)
        if first > manager.view.iteration:  # the iteration in which this worker left
            writers.missed_steps()
        with manager.take_place(decision, self._groups.traffic):
            # Now, concurrently with groups and state: the others open theirs before they compute, and need this worker.
            self._parts.open_rings()
            self._groups.regroup(manager.view)
            manager.inject("regroup", first)
            grouped = time.perf_counter()
            size = 0
            if back_to is not None and back_to.source != HELD:
                state.go_back(back_to.iteration)  # loaded together with the others, once all have their places
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
    """Stop train()'s profiler: after an exception train() does not stop it, and the memory would fill.

    The records are dropped.  A profiler of the script itself stays on.
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
        log.warning(f"cannot stop the profiler, which may fill the memory: {in_short(error)}")


def build_elsewhere(manager: Manager, groups: Groups, loop: Loop, position: int, *, built: bool) -> None:
    """Prepare this process for another pretrain(), which builds the model of ``position`` without communication.

    ``built``: whether Megatron still holds an earlier model, which is dropped.
    """
    view = manager.view
    slot = view.grid.replicas[0][position]
    log.info(f"worker {view.worker} builds the model of position {position}")
    groups.again(slot)  # first: the groups refer to the model that is dropped
    if built:
        _forget_megatron(loop)
    os.environ["RANK"] = str(slot)


def _forget_megatron(loop: Loop) -> None:
    """Drop Megatron's globals and torch's groups, and so the last references to the model."""
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
    """Wrap the seams of a pretrain() that one worker runs alone; ``groups.alone``: this worker does.

    load_checkpoint                      nothing is loaded: the state comes from a peer
    build_train_valid_test_data_loaders  at launch rank 0 broadcasts that there is data: here it is known, they train
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
    "ckpt_assume_constant_structure": False,  # the load plan of the launch was for other workers
    "ckpt_convert_update_legacy_dist_opt_format": False,
}
"""Megatron's arguments that may have limited the load at launch to a part of a checkpoint: a rollback loads all."""


@dataclass(eq=False)
class Rollback:
    """Rollback after a loss of state: all workers with a place load one checkpoint, in place, and train on from there.

        plan: rollback --> every worker is out of the training, and takes its place without a state
           |
        section    Megatron's own load_checkpoint(), over the groups of the epoch, or a snapshot of the memory tier;
           |         if a worker dies, the survivors repeat it
           |         a worker that cannot read it reports that and leaves: the next plan uses the checkpoint before it
           v
        all have loaded it: train() is entered, at the iteration after the checkpoint's

    The plan names the checkpoint (`instep.meeting.timelines`), so all load the same.  If the source is the state of
    workers that were set aside, nothing is loaded.  Called by the main thread.
    """

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _console: Console
    _done: int = field(default=0, init=False)
    """Epoch of the last completed rollback."""

    def carry_out(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Do the rollback of the plan that gave this worker its place, if any.  Call it before ``train`` is entered.

        Raises ``Orphaned`` if this worker has lost its place, for example because it could not read the checkpoint.
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
            except BaseException as error:  # torch's CheckpointException is no Exception
                self._explain(error, target)
                raise
            manager.inject("rollback")

        if target.source != HELD:  # otherwise all took that state with their places
            manager.section("rollback", run, moved=moved)
            take_up[0]()
        self._done = decision.epoch
        self._checkpoints.went_back(target.iteration)
        tier = "memory" if target.source in (HELD, MEMORY) else "disk"
        folder = "" if tier == "memory" else _folder(target)
        seconds = time.monotonic() - began
        one = manager.view.worker == min(decision.workers)  # for recover-status, which does not query workers
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
        """Load a checkpoint; returns its floating-point operations.  Raises what Megatron raises, and ValueError."""
        args = get_args()
        # With random states per replica a checkpoint may have too few: the run may have grown since.
        no_states = args.no_save_rng or getattr(args, "data_parallel_random_init", False)
        at = target.iteration
        # Megatron reads the contents of a Megatron-FSDP checkpoint from --load, whatever folder it loads.
        as_saved = {**AS_SAVED, "no_load_rng": no_states, "ckpt_step": at, "load": _folder(target)}
        known = {name: value for name, value in as_saved.items() if hasattr(args, name)}
        # In the legacy format Megatron reads the optimizer's part of the checkpoint that the tracker file names; and it
        # prefers a non-persistent checkpoint that is not older: here all checkpoints are treated alike.
        wanted = monkeypatch.replaced(
            checkpointing,
            read_metadata=lambda tracker: (at, False),
            _get_non_persistent_iteration=lambda *unused: -1,
        )
        with self._groups.in_section(), monkeypatch.replaced(args, **known), wanted:
            # Not training.load_checkpoint: on a worker that was built alone it loads nothing.
            iteration, operations = checkpointing.load_checkpoint(
                model, optimizer, scheduler, load_arg="load", strict=True
            )
            # A worker that was built alone, in a position without data, does not know whether there is data.
            has_data = torch.tensor(
                [int(args.do_valid), int(args.do_test)], device=self._manager.view.communication.device
            )
            dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
            args.do_valid, args.do_test = has_data.tolist()
        if iteration != target.iteration:
            raise ValueError(f"it belongs to iteration {iteration}")
        return int(operations)

    def _explain(self, error: BaseException, target: Target) -> None:
        """Return if ``error`` must be raised unchanged; otherwise raise the exception that it means."""
        if isinstance(error, (EpochRevoked, MembershipError, InStepError, KeyboardInterrupt)):
            return
        epoch_groups = self._manager.view.groups
        if epoch_groups.over:  # the epoch's end may have caused it
            raise EpochRevoked(epoch_groups.number, signature(error)) from error
        if is_communication(error) or is_own(error) or is_of_device(error):
            return
        if target.source == MEMORY:
            what = f"the snapshot after iteration {target.iteration} in memory"
        else:
            what = f"the checkpoint of iteration {target.iteration} in {_folder(target)}"
            self._checkpoints.unreadable.add(target.iteration)
        why = f"worker {self._manager.view.worker} cannot load {what}: {signature(error)}"
        log.warning(f"{why}; the run rolls back to an earlier one, if it exists")
        self._manager.leave(why[:500])
        raise Orphaned(why) from error


def _folder(target: Target) -> str:
    """Return the folder with the checkpoint of ``target``."""
    args = get_args()
    if target.source != NON_PERSISTENT:
        return str(getattr(args, target.source))
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))
