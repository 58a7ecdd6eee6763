"""Checkpoints while workers come and go: a section each, written again from the start by whoever is left.

save_checkpoint()              a section; one that is saved asynchronously is under way when it returns
maybe_finalize_async_save()    a section where something is under way; given up where one of its writers is gone

Each run of the section writes into a folder of its own (``instep.attempts``), by way of what Megatron asks for:

get_checkpoint_name()               the attempt's folder instead of ``iter_``
get_checkpoint_tracker_filename()   asked for by rank 0 when all have written: the folder is renamed first
schedule_async_save()               the same as a finalization of the asynchronous call, before that of the tracker file
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import async_utils, checkpointing, get_args, training

from recover_megatron.instep.attempts import Attempt, clean, discard, publish
from recover_megatron.instep.errors import CheckpointFailed, InStepError
from recover_megatron.instep.faults import is_communication, is_full, signature
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.traffic import Mode
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.records import Records
from recover_megatron.membership.errors import MembershipError

CHECKPOINT_SECONDS = 3600.0
"""How long a checkpoint may take, beyond the hang timeout, before a worker that makes no mark counts as hung."""


_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Modules that keep a queue of what was written."""


class Checkpoints:
    """The checkpoints of one worker.  ``before``: called before a checkpoint is begun, outside of its section."""

    def __init__(
        self,
        groups: Groups,
        records: Records,
        before: Callable[[], None],
    ) -> None:
        self._before = before
        self.recovery: Recovery | None = None
        """None as long as the training has not begun: then checkpoints are Megatron's own."""
        self._groups = groups
        self._records = records
        self._writers: list[int] = []
        self._attempt: Attempt | None = None
        self._folders: dict[str, str] = {}
        """Of the attempt that is being begun: its folders, and what they are to be."""
        self._under_way: list[tuple[Attempt, dict[str, str]]] = []
        """Those of the asynchronous calls that are not finalized, oldest first."""
        self._told: list[Callable[[], Any]] = []
        """What is to be done when the section is over: a folder is told of to others when it has its name."""

    def install(self) -> None:
        """Wrap the seams; raises UserError if this Megatron's are not the ones we know."""
        monkeypatch.wrap(training, "save_checkpoint", ("iteration", "model", "optimizer"), self._save)
        monkeypatch.wrap(training, "maybe_finalize_async_save", ("blocking", "terminate"), self._finalize)
        monkeypatch.wrap(checkpointing, "get_checkpoint_name", ("checkpoints_path", "iteration", "release"), self._name)
        monkeypatch.wrap(checkpointing, "get_checkpoint_tracker_filename", ("checkpoints_path",), self._tracker)
        monkeypatch.wrap(checkpointing, "schedule_async_save", ("async_request",), self._schedule)
        told = ("checkpoint_path", "tracker_filename", "save_dir", "iteration")
        monkeypatch.wrap(checkpointing.wandb_utils, "on_save_checkpoint_success", told, self._tell)

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
            recovery = self.recovery
            if recovery is None:
                return original(iteration, *args, **kwargs)

            begun = False

            def run() -> Any:
                nonlocal begun
                recovery.progress.mark("checkpoint", allow=CHECKPOINT_SECONDS)
                recovery.progress.inject("checkpoint")
                if begun:  # what the last attempt has left here is not to be taken for a part of this one
                    self._abandon(recovery)
                begun = True
                self._begin(recovery, iteration)
                try:
                    # Who writes what changes when workers are lost: it is planned anew each time.
                    anew = monkeypatch.replaced(get_args(), "ckpt_assume_constant_structure", False)
                    with self._groups.traffic.during(Mode.SECTION), anew:
                        result = original(iteration, *args, **kwargs)
                    if not get_args().async_save:
                        self._publish(recovery, self._folders)
                    return result
                except BaseException as error:  # torch's CheckpointException is none of Exception
                    self._explain(error, f"the checkpoint of iteration {iteration}")
                    raise
                finally:
                    self._attempt = None

            self._before()
            result = recovery.sections.run("checkpoint", run)
            self._writers = recovery.assignment.decision.workers
            self._records.saved(iteration)
            self._tell_now()
            return result

        return save_checkpoint

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
            recovery = self.recovery
            if recovery is None or async_utils.is_empty_async_queue():
                return original(*args, **kwargs)
            begun = False

            def run() -> Any:
                nonlocal begun
                recovery.progress.mark("checkpoint", allow=CHECKPOINT_SECONDS)
                # Who runs this again may have finalized a call that others have not, and could not do it with them.
                if begun or recovery.assignment.decision.workers != self._writers:
                    self._abandon(recovery)
                begun = True
                try:
                    with self._groups.traffic.during(Mode.SECTION):
                        result = original(*args, **kwargs)
                    while len(self._under_way) > _calls():
                        self._publish(recovery, self._under_way.pop(0)[1])
                    return result
                except BaseException as error:  # torch's CheckpointException is none of Exception
                    self._explain(error, "the checkpoint under way")
                    raise

            result = recovery.sections.run("asynchronous checkpoint", run)
            self._tell_now()
            return result

        return maybe_finalize_async_save

    # ---- attempts

    def _begin(self, recovery: Recovery, iteration: int) -> None:
        self._attempt = Attempt(
            iteration, recovery.session.term, recovery.assignment.decision.epoch, recovery.progress.at
        )
        self._folders = {}
        self._told.clear()

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
                    self._in_touch()
                    clean(checkpoints_path, attempt, [other for other, _ in self._under_way])
            return folder + name[len(final) :]

        return get_checkpoint_name

    def _tracker(self, original: Callable[..., str]) -> Callable[..., str]:
        def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
            recovery = self.recovery
            complete = self._attempt is not None and dist.get_rank() == 0 and not get_args().async_save
            if complete and recovery is not None:
                self._publish(recovery, self._folders)
            return original(checkpoints_path)

        return get_checkpoint_tracker_filename

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_async_save(async_request: Any) -> Any:
            attempt, folders, recovery = self._attempt, self._folders, self.recovery
            if attempt is not None and recovery is not None and (attempt, folders) not in self._under_way:
                self._under_way.append((attempt, folders))
                # Megatron counts the calls, and compares the numbers: a worker that came late, or that an attempt was
                # over for before it came so far, has counted fewer.
                _queue().call_idx = 2 * recovery.progress.at
            for at, function in enumerate(async_request.finalize_fns):
                if recovery is not None and getattr(function, "__name__", "") == "iter_finalize_fn":
                    async_request.finalize_fns.insert(at, lambda: self._publish(recovery, folders))
                    break
            return original(async_request)

        return schedule_async_save

    def _publish(self, recovery: Recovery, folders: dict[str, str]) -> None:
        """All have written: give the folders their names.  Rank 0 does it first; who comes later finds it done, unless
        its host has a disk of its own.

        Not if this worker was put out and does not know yet, because it was stopped: what follows is the tracker file.
        """
        recovery.session.be_in_touch()
        for folder, final in folders.items():
            if dist.get_rank() == 0:
                publish(folder, final)
            elif os.path.isdir(folder):
                with suppress(FileNotFoundError):  # a shared file system may show for a while what is gone
                    publish(folder, final)

    def _in_touch(self) -> None:
        if (recovery := self.recovery) is not None:
            recovery.session.be_in_touch()

    def _tell(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_save_checkpoint_success(checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
            for folders in (self._folders, *(others for _, others in self._under_way)):
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
        full = is_full(error, save)
        if self._attempt is not None:
            for folder in self._folders:
                discard(folder)  # nobody will complete it without this worker, and the others need the space
        why = "No space left on device" if full else signature(error)
        last = self._records.last_checkpoint()
        raise CheckpointFailed(
            f"{what} cannot be written to {save}: {why}. The last checkpoint: {last}", full
        ) from error

    def _abandon(self, recovery: Recovery) -> None:
        """Forget checkpoints under way when one of their writers is gone: its part may be incomplete.

        Everybody left does so, also who had finished one already: the tracker file names the checkpoint before.
        """
        if number := self.forget():
            recovery.hooks.log("checkpoint abandoned", number=number)

    def forget(self) -> int:
        """Wait for what this worker itself writes, ask nobody, and know nothing of it; how many there were."""
        self._under_way.clear()
        number = _calls()
        pending = _queue().async_calls if number else None
        while pending:
            pending.popleft().async_caller.is_current_async_call_done(True, True)
        _forget_results()
        return number


def _queue() -> Any:
    """Megatron's queue of asynchronous calls, made where there is none."""
    make = getattr(async_utils, "_get_async_calls_queue", None)
    return async_utils._async_calls_queue if make is None else make()


def _calls() -> int:
    """How many asynchronous checkpoints of this worker are not finalized."""
    return 0 if async_utils.is_empty_async_queue() else len(_queue().async_calls)


def _forget_results() -> None:
    """What writers have told of files that are not wanted any more: the next checkpoint would take it for its own."""
    for name in _WRITERS:
        results = getattr(sys.modules.get(name), "_results_queue", None)
        while results is not None and not results.empty():
            results.get_nowait()
