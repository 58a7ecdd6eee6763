"""Return of an orphan to the training, in the order of its steps.

    leave            leave the training: no other worker waits for this worker, and interrupted work is dropped
    come_back        repeat until this worker has a place:
      wait             wait as a spare, and offer the state that this worker has
      take_place       take a place in the replica that a plan has formed: groups, state, ranks
    build_elsewhere  if a plan wants this worker in another position: Megatron's state is dropped, and this worker alone
                     calls pretrain() again, up to ``come_back``

Meanwhile the other workers train.  At the boundary before a step (`training_parts`) they wait for this worker.  They
send it the state while they compute that step (`state_exchange`), and depend on it from then on.  The part without
Megatron is `instep.meeting.orphan`.  A worker that builds a model alone is the only member of its groups (see
`parallel_groups`): it sends nothing and waits for no other worker; later it receives information with the state.

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
    """Removes one worker from the training and returns it, with its present model.  Used by its main thread."""

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
            f"worker {view.worker} has lost its place ({in_short(error)}); it waits as a spare, "
            f"having left the training {view.spare_seconds:.3f} s after its replica broke"
        )
        # The traceback's frames hold tensors of the training, and connections whose closing other workers wait for.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._checkpoints.forget()

    def come_back(self) -> None:
        """Wait as a spare until a plan has a place for this worker, and take it; then train() can be entered.

        Raises ``OtherPosition`` if the run wants this worker in another position, ``RunOver`` if the run is over, and
        ``Disagreement`` for a state that cannot be right.
        """
        self._groups.leave_training()  # send nothing before the first boundary, which other workers reach later
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
        """Wait until the run ends, which raises ``RunOver``."""
        me = self._manager.view.worker
        log.warning(
            f"worker {me}: {why}; the run continues without this worker. Check the network between its host and the "
            "other hosts, stop this worker, and add another worker with recover-run --join"
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
        if sharded is not None:  # updates by other workers will outdate its shards
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
        """Disable torch's profiler in train(), because it counts iterations from the entry of train()."""
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
            # Now, concurrently with groups and state: other workers open their rings, which need this worker, before
            # they compute.
            self._parts.open_rings()
            self._groups.regroup(manager.view)
            manager.inject("regroup", first)
            grouped = time.perf_counter()
            size = 0
            if back_to is not None and back_to.source != HELD:
                state.go_back(back_to.iteration)  # all workers load together once all have their places
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
    """Stop the profiler of train(), which train() leaves running after an exception, so that memory would fill.

    The profiler's records are dropped.  A profiler that the script itself started stays on.
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

    ``built``: True if Megatron still holds an earlier model, which is then dropped.
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
    """Wrap the seams of a pretrain() that one worker runs alone, as this worker does while ``groups.alone`` is True.

    load_checkpoint                      loads nothing, because the state comes from a peer
    build_train_valid_test_data_loaders  gets do_train from here, since other workers train; at launch rank 0 broadcasts
                                         whether there is data
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
"""Megatron's arguments -> values for a rollback, which loads a complete checkpoint even if the launch loaded a part."""


@dataclass(eq=False)
class Rollback:
    """Rollback after a loss of state: all workers with a place load one checkpoint, in place, and train from it.

        plan: rollback --> every worker leaves the training, and takes its place without a state
           |
        section    Megatron's own load_checkpoint(), over the groups of the epoch, or a snapshot of the memory tier;
           |         if a worker dies, the survivors repeat the section;
           |         a worker that cannot read the checkpoint reports this and leaves, and the next plan uses the
           |         checkpoint before it
           v
        once all workers have loaded the checkpoint, they enter train(), at the iteration after the checkpoint's

    The plan names the checkpoint (`instep.meeting.timelines`), so all workers load the same checkpoint.  If the plan
    names the state of workers that were set aside, nothing is loaded.  Used by the main thread.
    """

    _manager: Manager
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _console: Console
    _done: int = field(default=0, init=False)
    """Epoch of the last completed rollback."""

    def carry_out(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Do the rollback, if any, of the plan that gave this worker its place; called before ``train`` is entered.

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

        if target.source != HELD:  # with HELD, workers received the state with their places
            manager.section("rollback", run, moved=moved)
            take_up[0]()
        self._done = decision.epoch
        self._checkpoints.went_back(target.iteration)
        tier = "memory" if target.source in (HELD, MEMORY) else "disk"
        folder = "" if tier == "memory" else _folder(target)
        seconds = time.monotonic() - began
        one = manager.view.worker == min(decision.workers)  # True: this worker logs the note for recover-status
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
        """Load the checkpoint of ``target``; returns its count of floating-point operations.

        Raises Megatron's errors, and ValueError if the loaded iteration is another.
        """
        args = get_args()
        # With one random state per replica a checkpoint may have too few states, because the run may have grown since.
        no_states = args.no_save_rng or getattr(args, "data_parallel_random_init", False)
        at = target.iteration
        # Megatron reads the contents of a Megatron-FSDP checkpoint from --load, whatever folder it loads.
        as_saved = {**AS_SAVED, "no_load_rng": no_states, "ckpt_step": at, "load": _folder(target)}
        known = {name: value for name, value in as_saved.items() if hasattr(args, name)}
        # Without these replacements Megatron would read, in the legacy format, the optimizer's part of the checkpoint
        # that the tracker file names, and would prefer a non-persistent checkpoint that is not older.
        wanted = monkeypatch.replaced(
            checkpointing,
            read_metadata=lambda tracker: (at, False),
            _get_non_persistent_iteration=lambda *unused: -1,
        )
        with self._groups.in_section(), monkeypatch.replaced(args, **known), wanted:
            # Not training.load_checkpoint, which loads nothing on a worker that built its model alone.
            iteration, operations = checkpointing.load_checkpoint(
                model, optimizer, scheduler, load_arg="load", strict=True
            )
            # A worker that built its model alone, in a position without data, does not know whether there is data.
            has_data = torch.tensor(
                [int(args.do_valid), int(args.do_test)], device=self._manager.view.communication.device
            )
            dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
            args.do_valid, args.do_test = has_data.tolist()
        if iteration != target.iteration:
            raise ValueError(f"it belongs to iteration {iteration}")
        return int(operations)

    def _explain(self, error: BaseException, target: Target) -> None:
        """Return if the caller must raise ``error`` unchanged; otherwise raise the exception to raise instead."""
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
        log.warning(f"{why}; the run rolls back to an earlier state, if one exists")
        self._manager.leave(why[:500])
        raise Orphaned(why) from error


def _folder(target: Target) -> str:
    """Return the folder with the checkpoint of ``target``."""
    args = get_args()
    if target.source != NON_PERSISTENT:
        return str(getattr(args, target.source))
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))
