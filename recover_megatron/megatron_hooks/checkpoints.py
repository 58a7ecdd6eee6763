"""Checkpoints while workers come and go: a section each, written again from the start by whoever is left.

save_checkpoint()              a section; one that is saved asynchronously is under way when it returns
maybe_finalize_async_save()    a section where something is under way; given up where one of its writers is gone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import async_utils, training

from recover_megatron.instep.process_group import Mode
from recover_megatron.instep.recovery import Recovery
from recover_megatron.megatron_hooks import seams
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.records import Records

CHECKPOINT_SECONDS = 3600.0
"""How long a checkpoint may take, beyond the hang timeout, before a worker that makes no mark counts as hung."""


class Checkpoints:
    """See the module's text.  ``recovery``: None as long as the training has not begun.

    ``before``: called before a checkpoint is begun, outside of its section.
    """

    def __init__(
        self,
        recovery: Callable[[], Recovery | None],
        groups: Groups,
        records: Records,
        before: Callable[[], None],
    ) -> None:
        self._before = before
        self._recovery = recovery
        self._groups = groups
        self._records = records
        self._writers: list[int] = []

    def install(self) -> None:
        """Wrap the seams; raises UserError if this Megatron's are not the ones we know."""
        seams.wrap(training, "save_checkpoint", ("iteration", "model", "optimizer"), self._save)
        seams.wrap(training, "maybe_finalize_async_save", ("blocking", "terminate"), self._finalize)

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
            recovery = self._recovery()
            if recovery is None:
                return original(iteration, *args, **kwargs)

            def run() -> Any:
                recovery.mark("checkpoint", allow=CHECKPOINT_SECONDS)
                recovery.strike("checkpoint")
                with self._groups.traffic.during(Mode.SECTION):
                    return original(iteration, *args, **kwargs)

            self._before()
            result = recovery.section("checkpoint", run)
            self._writers = recovery.decision.workers
            self._records.saved(iteration)
            return result

        return save_checkpoint

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
            recovery = self._recovery()
            if recovery is None or async_utils.is_empty_async_queue():
                return original(*args, **kwargs)

            def run() -> Any:
                recovery.mark("checkpoint", allow=CHECKPOINT_SECONDS)
                if recovery.decision.workers != self._writers:
                    self._abandon(recovery)
                with self._groups.traffic.during(Mode.SECTION):
                    return original(*args, **kwargs)

            return recovery.section("asynchronous checkpoint", run)

        return maybe_finalize_async_save

    def _abandon(self, recovery: Recovery) -> None:
        """Forget checkpoints under way when one of their writers is gone: its part may be incomplete.

        Everybody left does so, also who had finished one already: the tracker file names the checkpoint before.
        """
        if number := self.forget():
            recovery.hooks.log("checkpoint abandoned", number=number)

    def forget(self) -> int:
        """Wait for what this worker itself writes, ask nobody, and know nothing of it; how many there were."""
        if async_utils.is_empty_async_queue():
            return 0
        pending = async_utils._async_calls_queue.async_calls
        number = len(pending)
        while pending:
            call = pending.popleft()
            call.async_caller.is_current_async_call_done(True, True)
        return number
