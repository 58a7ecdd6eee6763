"""Checkpoints while workers come and go: a section each, written again from the start by whoever is left.

save_checkpoint()              a section; one that is saved asynchronously is under way when it returns
maybe_finalize_async_save()    a section where something is under way.  All give that up where one of its writers is
                               gone, or not all have the same of it; then it is saved again if no step was made since

Each run of the section writes into a folder of its own (`attempts`), by way of what Megatron asks for:

get_checkpoint_name()               the attempt's folder instead of ``iter_``
get_checkpoint_tracker_filename()   asked for by rank 0 when all have written: the folder is renamed first
schedule_async_save()               the same as a finalization of the asynchronous call, before that of the tracker file
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
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.logging.records import Records
from recover_megatron.megatron_hooks.loop.training_parts import TrainingParts
from recover_megatron.membership.records import MembershipError

_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Modules that keep a queue of what was written."""
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""What Megatron saves among its arguments and counts in an iteration that is left out, or in an evaluation."""
_LOST = object()
"""What is under way was given up, and the state is the one that was saved."""


@dataclass(frozen=True)
class UnderWay:
    """A checkpoint whose asynchronous call is not finalized."""

    attempt: Attempt
    folders: dict[str, str]
    """Where it is written, and what they are to be."""
    writers: list[int]
    """The workers that write it."""
    source: str
    """What names its folder (``instep.decision.Checkpoint``)."""


class Checkpoints:
    """The checkpoints of one worker.

    ``trained``: the parts of the model that is trained; None: there is none.  ``manager``: None as long as the training
    has not begun; a checkpoint is then Megatron's own.
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
        """Of the attempt that is being begun: its folders, and what they are to be."""
        self._under_way: list[UnderWay] = []
        """Oldest first."""
        self._settled = 0
        """The last epoch in which all had the same under way."""
        self._lost = False
        """Whether the last one that was saved was given up."""
        self._again: tuple[int, Callable[[], Any]] | None = None
        """The last iteration that was saved asynchronously, and how to save it again."""
        self._source = "save"
        """What names the folder of the attempt that is being begun."""
        self.complete: Sequence[Checkpoint] = ()
        """The newest of those that this run has written and that are complete."""
        self.unreadable: set[int] = set()
        """Iterations of those that this worker could not load."""
        self._told: list[Callable[[], Any]] = []
        """What is to be done when the section is over: a folder is told of to others when it has its name."""

    def install(self, loop: Loop) -> None:
        """Wrap the seams; raises UserError if the loop's are not the ones we know."""
        loop.wrap("save", self._save)
        loop.wrap("finalize_saves", self._finalize)
        loop.wrap("checkpoint_folder", self._name)
        loop.wrap("written", self._written)
        loop.wrap("schedule_save", self._schedule)
        loop.wrap("saved", self._tell)
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
                if begun:  # what the last attempt has left here is not to be taken for a part of this one
                    self._abandon(manager)
                self._settle(manager)
                if not self._under_way:
                    checkpoint_writers.without_lost_sockets()
                begun = True
                view = manager.view
                self._attempt = Attempt(iteration, view.term, view.epoch, view.number)
                self._folders = {}
                self._told.clear()
                try:
                    # When workers are lost, others write what they wrote: it is planned anew each time.
                    anew = monkeypatch.replaced(get_args(), ckpt_assume_constant_structure=False)
                    with self._groups.in_section(), anew, self._parts.told(manager):
                        result = original(iteration, *args, **kwargs)
                    if not get_args().async_save:
                        self._publish(manager, self._folders)
                    return result
                except BaseException as error:  # torch's CheckpointException is none of Exception
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
            self._tell_now()
            return result

        return save_checkpoint

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
            manager = self._manager()
            # The same answer on all workers: who ran the last section together has the same under way, and at the
            # boundary where others come in nothing is.
            if manager is None or async_utils.is_empty_async_queue():
                return original(*args, **kwargs)
            written: list[Checkpoint] = []

            def run() -> Any:
                written.clear()
                self._settle(manager)
                if self._lost and self._again is not None and self._again[0] == manager.view.iteration:
                    return _LOST
                finalized: UnderWay | None = None
                try:
                    with self._groups.in_section(), self._parts.told(manager):
                        result = original(*args, **kwargs)
                    while len(self._under_way) > _calls():
                        finalized = self._under_way.pop(0)
                        self._publish(manager, finalized.folders)
                        written.append((finalized.attempt.iteration, finalized.source))
                    return result
                except BaseException as error:  # torch's CheckpointException is none of Exception
                    # Megatron forgets one when it is written, and finalizes it then.
                    at = len(self._under_way) - _calls() - (not isinstance(error, checkpoint_writers.WriterDied))
                    failed = [finalized] if finalized else self._under_way[max(at, 0) :]
                    which = f"of iteration {failed[0].attempt.iteration}" if failed else "under way"
                    self._explain(error, f"the checkpoint {which}")
                    raise

            section = partial(manager.section, "asynchronous checkpoint", run, phase="checkpoint", moved=moved)
            while (result := section()) is _LOST:
                assert self._again is not None
                self._again[1]()
            for iteration, source in written:
                self._completed(manager, iteration, source)
            self._tell_now()
            return result

        return maybe_finalize_async_save

    def _settle(self, manager: Manager) -> None:
        """First of all in a section, by all workers: where not all have the same under way, all give it up.

        Within an epoch they have.  With its end, in the middle of a section, some may have finalized what others have
        not, or given it up to begin again, and others may not have begun; and the part of one that is gone may be
        incomplete.  Raises ``EpochRevoked``.
        """
        view = manager.view
        if view.epoch == self._settled:
            return
        same, lost = self._fingerprint(view.decision.workers), float(self._lost)
        highest, lowest, lost = view.groups.most([same, -same, lost], tuple(sorted(view.live)))
        same_for_all = highest == -lowest and highest >= 0
        self._settled, self._lost = view.epoch, bool(lost) or not same_for_all
        if not same_for_all:
            self._abandon(manager)
            # Beginning another one removes the folders of this one: not while others' writers are writing there.
            view.groups.any(False, tuple(sorted(view.live)))

    def _fingerprint(self, workers: list[int]) -> float:
        """Of what is under way: the same for all that have the same; 0: nothing is; -1: it cannot be completed."""
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
                return name  # an object store has no folders to rename, nor files that are half written
            final = original(checkpoints_path, iteration, release, return_base_dir=True)
            folder = attempt.folder(final)
            if folder not in self._folders:
                self._folders[folder] = final
                if dist.get_rank() == 0 or os.environ.get("LOCAL_RANK") == "0":  # disks may be each host's own
                    if (manager := self._manager()) is not None:
                        manager.be_in_touch()
                    clean(checkpoints_path, attempt, [other.attempt for other in self._under_way])
            return folder + name[len(final) :]

        return get_checkpoint_name

    def _written(self, original: Callable[..., str]) -> Callable[..., str]:
        def written(path: str, *args: Any, **kwargs: Any) -> str:
            manager = self._manager()
            complete = self._attempt is not None and dist.get_rank() == 0 and not get_args().async_save
            if complete and manager is not None:
                self._publish(manager, self._folders)
                self._attempt = None  # what is written from here on (main: the tokenizer) belongs to the checkpoint
            return original(self._folders.get(path, path), *args, **kwargs)

        return written

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_async_save(async_request: Any) -> Any:
            attempt, folders, manager = self._attempt, self._folders, self._manager()
            if attempt is not None and manager is not None and attempt not in (o.attempt for o in self._under_way):
                self._under_way.append(UnderWay(attempt, folders, manager.view.decision.workers, self._source))
                # Megatron counts the calls, and compares the numbers: a worker that came late, or that an attempt was
                # over for before it came so far, has counted fewer.
                _queue().call_idx = 2 * manager.view.number
            for at, function in enumerate(async_request.finalize_fns):
                if manager is not None and getattr(function, "__name__", "") == "iter_finalize_fn":
                    async_request.finalize_fns.insert(at, lambda: self._publish(manager, folders))
                    break
            return original(async_request)

        return schedule_async_save

    def _publish(self, manager: Manager, folders: dict[str, str]) -> None:
        """All have written: give the folders their names.  Rank 0 does it first; who comes later finds it done, unless
        its host has a disk of its own.

        Not if this worker was put out and does not know yet, because it was stopped: what follows is the tracker file.
        """
        manager.be_in_touch()
        for folder, final in folders.items():
            if dist.get_rank() == 0:
                publish(folder, final)
            elif os.path.isdir(folder):
                with suppress(FileNotFoundError):  # a shared file system may show for a while what is gone
                    publish(folder, final)

    def _tell(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_save_checkpoint_success(checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
            for folders in (self._folders, *(each.folders for each in self._under_way)):
                for folder, final in folders.items():
                    if checkpoint_path.startswith(folder):
                        path = final + checkpoint_path[len(folder) :]
                        self._told.append(partial(original, path, *args, **kwargs))
                        return None
            return original(checkpoint_path, *args, **kwargs)

        return on_save_checkpoint_success

    def _tell_now(self) -> None:
        while self._told:
            self._told.pop(0)()

    # ---- what goes wrong

    def _explain(self, error: BaseException, what: str) -> None:
        """Raise what ends this worker, in words that help; return where ``error`` is another worker's end."""
        if isinstance(error, (MembershipError, InStepError, SystemExit, KeyboardInterrupt)) or is_communication(error):
            return
        save = get_args().save
        for folder in [*self._folders, *(folder for each in self._under_way for folder in each.folders)]:
            discard(folder)  # nobody will complete it without this worker, and the others need the space
        why, own = _reason(error, save)
        last, to_folder = self._records.last_checkpoint(), is_write(error, save)
        failed = f"cannot be written to {save}" if to_folder else "has failed"
        raise CheckpointFailed(
            f"{what} {failed}: {why}. The last checkpoint: {last}", own=own, to_folder=to_folder
        ) from error

    def _abandon(self, manager: Manager) -> None:
        """Give up checkpoints under way.  The tracker file names the one before."""
        if number := self._forget_calls():
            manager.log("checkpoint abandoned", number=number)

    def went_back(self, iteration: int) -> None:
        """The run goes on after ``iteration``: what could not be loaded then is not to be gone forward to later."""
        self.complete = [one for one in self.complete if one[0] <= iteration]

    def forget(self) -> None:
        """This worker has left the training: know nothing of what was under way, nor of the model that was saved."""
        self._forget_calls()
        self._again, self._lost = None, False

    def _forget_calls(self) -> int:
        """Wait for what this worker itself writes, ask nobody, and know nothing of it; how many there were."""
        calls = _calls()
        number = max(calls, len(self._under_way))  # fewer calls: what others could not finalize with this worker
        self._under_way.clear()
        pending = _queue().async_calls if calls else None
        while pending:
            checkpoint_writers.wait(pending.popleft().async_caller)
        _forget_results()
        return number


def _reason(error: BaseException, save: str) -> tuple[str, bool]:
    """Why there is no checkpoint in ``save``, and whether that is a matter of this worker alone."""
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
    """Run it with Megatron's arguments as they were."""
    with monkeypatch.replaced(get_args(), **counters):
        return run()


def _queue() -> Any:
    """Megatron's queue of asynchronous calls, made where there is none."""
    make = getattr(async_utils, "_get_async_calls_queue", None)
    return async_utils._async_calls_queue if make is None else make()


def _calls() -> int:
    """How many asynchronous checkpoints of this worker are not finalized."""
    return 0 if async_utils.is_empty_async_queue() else len(_queue().async_calls)


def _forget_results() -> None:
    """What writers have told of files that are not wanted any more: the next checkpoint would take it for its own."""
    checkpoint_writers.without_a_lost_manager()
    for name in _WRITERS:
        results = getattr(sys.modules.get(name), "_results_queue", None)
        while results is not None and not results.empty():
            results.get_nowait()
