"""The state is lost: everybody who has a place loads one checkpoint, in place, and the training goes on from there.

    plan: rollback --> every worker is out of the training (`rejoin`), and takes its place without a state
       |
    section    Megatron's own load_checkpoint(), over the groups of the epoch, or a snapshot of the memory tier; again,
       |         with whoever is left, if one dies
       |         who cannot read it says so and leaves: the next plan goes back to the one before
       v
    all have loaded it: train() is entered, at the iteration after the checkpoint's

Which it is is the plan's word (`instep.timelines`), so that all take the same.  Where it is the state of workers that
were set aside there is nothing to load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron.training import checkpointing, get_args

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.instep.decision import HELD, MEMORY, Checkpoint
from recover_megatron.instep.decision import Rollback as Target
from recover_megatron.instep.faults import InStepError, Orphaned, is_communication, is_of_device, is_own, signature
from recover_megatron.instep.recovery import Recovery
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoints import CHECKPOINT_SECONDS, Checkpoints
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.records import Console, Records
from recover_megatron.megatron_hooks.state import TrainingState
from recover_megatron.megatron_hooks.training_parts import TrainingParts
from recover_megatron.membership.records import MembershipError

log = get_logger(__name__)

AS_SAVED = {
    "finetune": False,
    "no_load_optim": False,
    "pretrained_checkpoint": None,
    "override_ckpt_iteration": None,
    "ckpt_assume_constant_structure": False,  # who reads what was planned for other workers
}
"""Megatron's arguments by which the launch may have begun with a part of a checkpoint: a rollback takes all of it."""


def kept(checkpoints: Checkpoints, state: TrainingState) -> list[Checkpoint]:
    """The complete checkpoints that this worker's run can go back to.  From any thread."""
    if not state.rolls_back:
        return []
    found = [(iteration, "save") for iteration in checkpoints.complete]
    return [*found, (state.loaded_at_launch, "load")] if state.loaded_at_launch else found


@dataclass(eq=False)
class Rollback:
    """Takes one worker back to a checkpoint, with the model that it has; its main thread calls it."""

    _recovery: Recovery
    _groups: Groups
    _parts: TrainingParts
    _checkpoints: Checkpoints
    _records: Records
    _console: Console
    _done: int = field(default=0, init=False)
    """The epoch of the last one that was carried out."""

    def carry_out(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Load what the plan that gave this worker its place says, if it says so.  Before ``train`` is entered.

        Raises ``Orphaned`` when this worker has no place any more: also where it could not read the checkpoint.
        """
        recovery, decision = self._recovery, self._recovery.assignment.decision
        target, state, sharded = decision.rollback, self._parts.state, self._parts.sharded
        if target is None or decision.epoch == self._done:
            return
        began = time.monotonic()
        take_up: list[Callable[[], None]] = []

        def run() -> None:
            recovery.progress.mark("rollback", allow=CHECKPOINT_SECONDS)
            state.go_back(target.iteration)
            recovery.progress.inject("rollback")
            take_up.clear()
            try:
                if target.source == MEMORY:
                    take_up.append(self._parts.memory.load(target))
                else:
                    with nullcontext(lambda: None) if sharded is None else sharded.loading() as then:
                        operations = self._load(target, model, optimizer, scheduler)
                        state.loaded(target.iteration, operations, decision.timeline[0])
                    take_up.append(then)
            except BaseException as error:  # torch's CheckpointException is none of Exception
                self._explain(error, target)
                raise
            recovery.progress.inject("rollback")

        if target.source != HELD:  # else all have begun from that state when they took their places
            recovery.sections.run("rollback", run)
            take_up[0]()
        self._done = decision.epoch
        tier = "memory" if target.source in (HELD, MEMORY) else "disk"
        folder = "" if tier == "memory" else str(getattr(get_args(), target.source))
        seconds = time.monotonic() - began
        self._records.log(
            recovery,
            "rolled back",
            epoch=decision.epoch,
            to=target.iteration,
            lost=target.lost,
            tier=tier,
            folder=folder,
            seconds=round(seconds, 6),
        )
        self._console.rolled_back(recovery, target, folder, seconds)
        if recovery.assignment.me == min(decision.workers):  # for recover-status, which asks no worker
            recovery.session.note(f"rolled back to iteration {target.iteration} from {tier}, {target.lost} lost")

    def _load(self, target: Target, model: Any, optimizer: Any, scheduler: Any) -> int:
        """Floating-point operations until then.  Raises whatever Megatron raises, and ValueError."""
        args = get_args()
        # Of the random states there is one for each replica, where they are many; the run may have grown since.
        no_states = args.no_save_rng or getattr(args, "data_parallel_random_init", False)
        as_saved = {**AS_SAVED, "no_load_rng": no_states, "ckpt_step": target.iteration}
        known = {name: value for name, value in as_saved.items() if hasattr(args, name)}
        with self._groups.in_section(), monkeypatch.replaced(args, **known):
            # Not training.load_checkpoint: a worker that was built alone has one that reads nothing.
            iteration, operations = checkpointing.load_checkpoint(
                model, optimizer, scheduler, load_arg=target.source, strict=True
            )
        if iteration != target.iteration:
            raise ValueError(f"it is of iteration {iteration}")
        return int(operations)

    def _explain(self, error: BaseException, target: Target) -> None:
        """Return where ``error`` is to be raised as it is; else raise what it means."""
        recovery = self._recovery
        if isinstance(error, (EpochRevoked, MembershipError, InStepError, KeyboardInterrupt)):
            return
        epoch_groups = recovery.assignment.epoch_groups
        if epoch_groups.over:  # whatever it is, the epoch's end may have led to it
            raise EpochRevoked(epoch_groups.number, signature(error)) from error
        if is_communication(error) or is_own(error) or is_of_device(error):
            return
        if target.source == MEMORY:
            what = f"the snapshot after iteration {target.iteration} in memory"
        else:
            what = f"the checkpoint of iteration {target.iteration} in {getattr(get_args(), target.source)}"
            self._checkpoints.unreadable.add(target.iteration)
        why = f"worker {recovery.assignment.me} cannot load {what}: {signature(error)}"
        log.warning(f"{why}; the run goes back to one before it, if there is one")
        recovery.orphan.leave(why[:500])
        raise Orphaned(why) from error
