"""Checkpoints of a changing set of workers: if a worker is lost, the survivors start the checkpoint again.

save_checkpoint()              runs as a section; an asynchronous checkpoint is pending when this function returns
maybe_finalize_async_save()    runs as a section if a checkpoint is pending.  All workers abandon the checkpoint if a
                               worker that writes it is lost, or if the workers have different pending checkpoints;
                               then they save it again, unless another step has changed the state

Each run of the section writes into a separate folder (`attempts`), through wrapped functions of Megatron:

get_checkpoint_name()               returns the attempt's folder instead of the ``iter_`` folder
get_checkpoint_tracker_filename()   is called by rank 0 when all workers have written, and renames the folder first
schedule_async_save()               adds a finalize function that renames the folder before the tracker file is written
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import async_utils, get_args

from recover_megatron.errors import InStepError
from recover_megatron.instep.decision import NON_PERSISTENT, Checkpoint, merged
from recover_megatron.instep.faults import (
    DISK_QUOTA,
    CheckpointFailed,
    is_communication,
    is_full,
    is_of_folder,
    is_own,
    is_write,
    signature,
)
from recover_megatron.instep.manager import Manager
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoint import checkpoint_writers
from recover_megatron.megatron_hooks.checkpoint.attempts import Attempt, clean, discard, publish
from recover_megatron.megatron_hooks.checkpoint.checkpoint_writers import PartFailed, Parts
from recover_megatron.megatron_hooks.data.children import moved
from recover_megatron.megatron_hooks.logging.records import Records
from recover_megatron.megatron_hooks.loop.training_parts import TrainingParts
from recover_megatron.megatron_hooks.parallel_groups import Groups
from recover_megatron.membership.records import MembershipError

_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Names of modules, perhaps not loaded, that have a queue for the results of checkpoint writers."""
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Arguments of Megatron that a checkpoint contains, and that a skipped iteration or an evaluation changes."""
_LOST = object()
"""Result of a section that abandoned the last checkpoint before the state changed, so the state must be saved again."""


@dataclass(frozen=True)
class UnderWay:
    """A pending checkpoint: an asynchronous save that Megatron has not finalized."""

    attempt: Attempt
    folders: dict[str, str]
    """Folder of the attempt -> final folder."""
    writers: list[int]
    """Ids of the workers that write the checkpoint."""
    source: str
    """Source of the checkpoint (``instep.decision.SOURCES``): ``save`` or ``non_persistent``."""


class Checkpoints:
    """The checkpoints of one worker.

    ``trained``: function that returns the parts of the trained model, or None.  ``manager``: function that returns the
    manager, or None before the training begins; until then Megatron saves checkpoints without this class.
    """

    def __init__(
        self,
        groups: Groups,
        records: Records,
        trained: Callable[[], TrainingParts | None],
        manager: Callable[[], Manager | None],
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._records = records
        self._trained = trained
        self._parts = Parts()
        self._attempt: Attempt | None = None
        self._folders: dict[str, str] = {}
        """Folder of the present attempt -> final folder, to which it is renamed."""
        self._under_way: list[UnderWay] = []
        """The pending checkpoints, oldest first."""
        self._reconciled = 0
        """The last epoch in which the workers compared their pending checkpoints."""
        self._lost = False
        """True if any worker has abandoned the last asynchronous checkpoint."""
        self._again: tuple[int, Callable[[], Any]] | None = None
        """(iteration of the last asynchronous save, function that saves it again); None if there is none."""
        self._source = "save"
        """Source of the present or last attempt's checkpoint (``instep.decision.SOURCES``)."""
        self.complete: Sequence[Checkpoint] = ()
        """The newest complete checkpoints of this run."""
        self.unreadable: set[int] = set()
        """Iterations of checkpoints that this worker could not load."""
        self._notifications: list[Callable[[], Any]] = []
        """Postponed calls of Megatron's success report, made after the section, when folders have their final names."""

    def install(self, loop: Loop) -> None:
        """Wrap the loop's functions that save checkpoints; raises UserError if their signatures are unknown."""
        loop.wrap("save", self._save)
        loop.wrap("finalize_saves", self._finalize)
        loop.wrap("checkpoint_folder", self._name)
        loop.wrap("written", self._written)
        loop.wrap("schedule_save", self._schedule)
        loop.wrap("saved", self._notify_later)
        checkpoint_writers.install(self._parts)

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
            manager = self._manager()
            if manager is None:
                return original(iteration, *args, **kwargs)

            begun = False
            source = self._source = NON_PERSISTENT if kwargs.get("non_persistent_ckpt") else "save"

            def run() -> Any:
                nonlocal begun
                manager.inject("checkpoint")
                if begun:  # parts that the previous attempt wrote must not count as parts of this attempt
                    self._abandon(manager)
                self._reconcile(manager)
                if not self._under_way:
                    checkpoint_writers.without_lost_sockets()
                begun = True
                view = manager.view
                self._attempt = Attempt(iteration, view.term, view.epoch, view.number)
                self._folders = {}
                self._notifications.clear()
                try:
                    # After a loss other workers write the lost workers' parts, so Megatron must plan each save again.
                    replan = monkeypatch.replaced(get_args(), ckpt_assume_constant_structure=False)
                    with self._groups.in_section(), replan, self._parts.share_failures(manager):
                        result = original(iteration, *args, **kwargs)
                    if not get_args().async_save:
                        self._publish(manager, self._folders)
                    return result
                except BaseException as error:  # torch's CheckpointException does not derive from Exception
                    self._explain(error, f"the checkpoint of iteration {iteration}")
                    raise
                finally:
                    self._attempt = None

            if (trained := self._trained()) is not None:
                trained.before_checkpoint()
            with nullcontext() if trained is None else trained.saving():
                result = manager.section("checkpoint", run, moved=moved)
            if get_args().async_save:
                again = partial(_with_counters, _counters(), partial(save_checkpoint, iteration, *args, **kwargs))
                self._lost, self._again = False, (iteration, again)
                manager.log("checkpoint begun", begun=iteration)
            else:
                self._completed(manager, iteration, source)
            self._notify()
            return result

        return save_checkpoint

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
            manager = self._manager()
            # All workers take the same branch here, because workers that ran the last section together have the same
            # pending checkpoints, and no checkpoint is pending at a boundary at which workers join.
            if manager is None or async_utils.is_empty_async_queue():
                return original(*args, **kwargs)
            written: list[Checkpoint] = []

            def run() -> Any:
                written.clear()
                self._reconcile(manager)
                if self._lost and self._again is not None and self._again[0] == manager.view.iteration:
                    return _LOST
                finalized: UnderWay | None = None
                try:
                    with self._groups.in_section(), self._parts.share_failures(manager):
                        result = original(*args, **kwargs)
                    while len(self._under_way) > _calls():
                        finalized = self._under_way.pop(0)
                        self._publish(manager, finalized.folders)
                        written.append((finalized.attempt.iteration, finalized.source))
                    return result
                except BaseException as error:  # torch's CheckpointException does not derive from Exception
                    # Megatron removes a save from its queue once the save is written, and then finalizes it.  If its
                    # writer has died, the save is still in the queue.
                    at = len(self._under_way) - _calls() - (not isinstance(error, checkpoint_writers.WriterDied))
                    failed = [finalized] if finalized else self._under_way[max(at, 0) :]
                    which = f"of iteration {failed[0].attempt.iteration}" if failed else "being written"
                    self._explain(error, f"the checkpoint {which}")
                    raise

            section = partial(manager.section, "asynchronous checkpoint", run, phase="checkpoint", moved=moved)
            while (result := section()) is _LOST:
                assert self._again is not None
                self._again[1]()
            for iteration, source in written:
                self._completed(manager, iteration, source)
            self._notify()
            return result

        return maybe_finalize_async_save

    def _reconcile(self, manager: Manager) -> None:
        """Abandon all workers' pending checkpoints if these differ between workers, or if one of their writers is lost.

        All workers call this method at the start of a section.  It acts only in the first section of an epoch, because
        within an epoch all workers have the same pending checkpoints.  If the last epoch ended in the middle of a
        section, only some workers may have finalized or abandoned a checkpoint, and a lost worker's part may be
        incomplete.  Raises ``EpochRevoked``.
        """
        view = manager.view
        if view.epoch == self._reconciled:
            return
        same, lost = self._fingerprint(view.decision.workers), float(self._lost)
        highest, lowest, lost = view.groups.most([same, -same, lost], tuple(sorted(view.live)))
        same_for_all = highest == -lowest and highest >= 0
        self._reconciled, self._lost = view.epoch, bool(lost) or not same_for_all
        if not same_for_all:
            self._abandon(manager)
            # The next attempt removes the abandoned folders, so wait until no writer of any worker uses them.
            view.groups.any(False, tuple(sorted(view.live)))

    def _fingerprint(self, workers: list[int]) -> float:
        """Return a hash of the pending checkpoints; 0 if none is pending, -1 if one of them cannot be completed."""
        if len(self._under_way) != _calls() or any(each.writers != workers for each in self._under_way):
            return -1.0
        return 1.0 + zlib.crc32(repr([each.attempt for each in self._under_way]).encode()) if self._under_way else 0.0

    def _completed(self, manager: Manager, iteration: int, source: str) -> None:
        self._records.saved(manager, iteration)
        self.unreadable.discard(iteration)
        self.complete = merged(self.complete, [(iteration, source)])

    # ---- attempts

    def _name(self, original: Callable[..., str]) -> Callable[..., str]:
        def get_checkpoint_name(
            checkpoints_path: str, iteration: int, release: bool = False, *args: Any, **kwargs: Any
        ) -> str:
            name = original(checkpoints_path, iteration, release, *args, **kwargs)
            attempt = self._attempt
            if attempt is None or iteration != attempt.iteration or "://" in str(checkpoints_path):
                return name  # no attempt, or an object store, which has no folders and no half-written files
            final = original(checkpoints_path, iteration, release, return_base_dir=True)
            folder = attempt.folder(final)
            if folder not in self._folders:
                self._folders[folder] = final
                if dist.get_rank() == 0 or os.environ.get("LOCAL_RANK") == "0":  # each host may have its own disk
                    if (manager := self._manager()) is not None:
                        manager.wait_in_touch()
                    clean(checkpoints_path, attempt, [other.attempt for other in self._under_way])
            return folder + name[len(final) :]

        return get_checkpoint_name

    def _written(self, original: Callable[..., str]) -> Callable[..., str]:
        def written(path: str, *args: Any, **kwargs: Any) -> str:
            manager = self._manager()
            complete = self._attempt is not None and dist.get_rank() == 0 and not get_args().async_save
            if complete and manager is not None:
                self._publish(manager, self._folders)
                self._attempt = None  # later files (in Megatron's main: the tokenizer) belong to the final folder
            return original(self._folders.get(path, path), *args, **kwargs)

        return written

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_async_save(async_request: Any) -> Any:
            attempt, folders, manager = self._attempt, self._folders, self._manager()
            if attempt is not None and manager is not None and attempt not in (o.attempt for o in self._under_way):
                self._under_way.append(UnderWay(attempt, folders, manager.view.decision.workers, self._source))
                # Megatron counts asynchronous saves and requires equal counts on all workers, but a worker that joined
                # late, or whose attempt ended earlier, has counted fewer.  So the decision's number sets the count.
                _queue().call_idx = 2 * manager.view.number
            for at, function in enumerate(async_request.finalize_fns):
                if manager is not None and getattr(function, "__name__", "") == "iter_finalize_fn":
                    async_request.finalize_fns.insert(at, lambda: self._publish(manager, folders))
                    break
            return original(async_request)

        return schedule_async_save

    def _publish(self, manager: Manager, folders: dict[str, str]) -> None:
        """Rename ``folders`` (folder of the attempt -> final folder), after all workers have written.

        Rank 0 renames its folders.  Another worker renames a folder that it still sees, since hosts may have separate
        disks.  The tracker file is written next, so this method first checks that this worker, which may have been
        stopped, was not evicted.
        """
        manager.wait_in_touch()
        for folder, final in folders.items():
            if dist.get_rank() == 0:
                publish(folder, final)
            elif os.path.isdir(folder):
                with suppress(FileNotFoundError):  # a shared file system may still show a folder that was renamed
                    publish(folder, final)

    def _notify_later(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_save_checkpoint_success(checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
            for folders in (self._folders, *(each.folders for each in self._under_way)):
                for folder, final in folders.items():
                    if checkpoint_path.startswith(folder):
                        path = final + checkpoint_path[len(folder) :]
                        self._notifications.append(partial(original, path, *args, **kwargs))
                        return None
            return original(checkpoint_path, *args, **kwargs)

        return on_save_checkpoint_success

    def _notify(self) -> None:
        while self._notifications:
            self._notifications.pop(0)()

    # ---- failures

    def _explain(self, error: BaseException, what: str) -> None:
        """Raise ``CheckpointFailed``, so that this worker exits; return if an exit or a lost worker caused ``error``.

        ``what``: the checkpoint that failed, for the message.
        """
        if isinstance(error, (MembershipError, InStepError, SystemExit, KeyboardInterrupt)) or is_communication(error):
            return
        save = get_args().save
        for folder in [*self._folders, *(folder for each in self._under_way for folder in each.folders)]:
            discard(folder)  # no worker will complete the attempt, and the other workers need the space
        why, own = _reason(error, save)
        last, to_folder = self._records.last_checkpoint(), is_write(error, save)
        failed = f"cannot be written to {save}" if to_folder else "has failed"
        raise CheckpointFailed(
            f"{what} {failed}: {why}. Last complete checkpoint: {last}", own=own, to_folder=to_folder
        ) from error

    def _abandon(self, manager: Manager) -> None:
        """Abandon this worker's pending checkpoints; the tracker file still names the last complete checkpoint."""
        if number := self._forget_calls():
            manager.log("checkpoint abandoned", number=number)

    def went_back(self, iteration: int) -> None:
        """Forget checkpoints newer than ``iteration``, the rollback's target, so that no later rollback uses them."""
        self.complete = [one for one in self.complete if one[0] <= iteration]

    def forget(self) -> None:
        """Forget pending checkpoints and the model that they would save, because this worker has left the training."""
        self._forget_calls()
        self._again, self._lost = None, False

    def _forget_calls(self) -> int:
        """Wait, without communication, for this worker's pending writes, forget them, and return their number."""
        calls = _calls()
        number = max(calls, len(self._under_way))  # ``calls`` is smaller if the workers could not finalize together
        self._under_way.clear()
        pending = _queue().async_calls if calls else None
        while pending:
            checkpoint_writers.wait(pending.popleft().async_caller)
        _forget_results()
        return number


def _reason(error: BaseException, save: str) -> tuple[str, bool]:
    """Return (why a checkpoint could not be written to ``save``, True if only this worker has failed)."""
    if isinstance(error, PartFailed):
        why, own = str(error), error.own
    else:
        why, own = signature(error), is_own(error) and not is_of_folder(error, save)
    if is_full(error, save):
        return (why if DISK_QUOTA in why else "No space left on device"), False
    return why, own


def _counters() -> dict[str, Any]:
    args = get_args()
    return {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}


def _with_counters(counters: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Call ``run`` while Megatron's arguments contain the saved ``counters``."""
    with monkeypatch.replaced(get_args(), **counters):
        return run()


def _queue() -> Any:
    """Return Megatron's queue of asynchronous saves; newer versions create it at the first call."""
    make = getattr(async_utils, "_get_async_calls_queue", None)
    return async_utils._async_calls_queue if make is None else make()


def _calls() -> int:
    """Return the number of this worker's asynchronous checkpoints that are not finalized."""
    return 0 if async_utils.is_empty_async_queue() else len(_queue().async_calls)


def _forget_results() -> None:
    """Drop the writers' results of abandoned checkpoints, which would otherwise count for the next checkpoint."""
    checkpoint_writers.without_a_lost_manager()
    for name in _WRITERS:
        results = getattr(sys.modules.get(name), "_results_queue", None)
        while results is not None and not results.empty():
            results.get_nowait()
