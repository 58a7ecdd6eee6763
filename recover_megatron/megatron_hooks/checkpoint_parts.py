"""Parts of a checkpoint, one of each worker: whose cannot be written, and why.

Megatron tells all that somebody's part is missing, whose it is the worker that plans, and the reason nobody.  Here all
are told both.  Where others have written theirs, those who could not end, and the others write again without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from recover_megatron.instep.faults import signature
from recover_megatron.instep.recovery import Recovery
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoint_writers import watch

_WORKER_FAILURE = "Worker failure: "
"""Before what a writer told, in the text of Megatron's error."""


class PartFailed(Exception):
    """A part cannot be written.  ``own``: this worker's alone, while others have written theirs."""

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


class Parts:
    """Those of one worker."""

    def __init__(self) -> None:
        self._idle = False
        """Whether the last part was empty: then nothing is known of whether this worker could write one."""

    def install(self) -> None:
        """Wrap Megatron-Core's writer; raises UserError if it is not the one we know."""
        monkeypatch.wrap(FileSystemWriterAsync, "get_save_function_and_args", ("self",), _telling)
        monkeypatch.wrap(FileSystemWriterAsync, "retrieve_write_results", ("self",), self._results)

    def _results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def retrieve_write_results(self_: Any) -> Any:
            watch.wait()
            results = original(self_)
            self._idle = not results
            return results

        return retrieve_write_results

    @contextmanager
    def told(self, recovery: Recovery) -> Iterator[None]:
        """Where a part fails in the block: raises ``PartFailed`` in the workers that end, ``EpochRevoked`` in others.

        All workers of the epoch enter it.
        """
        self._idle = False
        try:
            yield
        except CheckpointException as error:
            mine = recovery.assignment
            told: list[Any] = [None] * dist.get_world_size()
            known = {rank: signature(each).rpartition(_WORKER_FAILURE)[2] for rank, (each, _) in error.failures.items()}
            dist.all_gather_object(told, (known, self._idle))
            failed = {rank: text for of_one, _ in told for rank, text in of_one.items()}
            me = dist.get_rank()
            others_can = any(rank not in failed and not idle for rank, (_, idle) in enumerate(told))
            if others_can and me not in failed:
                mine.epoch_groups.any(False, tuple(sorted(mine.live)))  # until those who cannot are gone
            whose = me if me in failed else min(failed, default=me)
            text = failed.get(whose, signature(error))
            raise PartFailed(f"worker {mine.decision.workers[whose]}: {text}", own=others_can) from error


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_save_function_and_args(self: Any) -> Any:
        save, preload, args = original(self)
        return None if save is None else partial(write, save), preload, args

    return get_save_function_and_args


def write(save: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
    """Write as ``save`` does, but tell of an error as it is: Megatron tells of its type, or ends the process by it.

    Maybe in a process of its own.
    """
    write_one, met = FileSystemWriterAsync.write_preloaded_data, list[str]()

    def look(written: Any, file: str) -> None:
        if isinstance(error := written[1], Exception):
            while before := error.__cause__ or error.__context__:  # torch's archive fails once more when it is closed
                error = before
            met.append(f"{signature(error)} (in {file})")

    def write_and_look(*args: Any, results_queue: Any, **kwargs: Any) -> Any:
        file = kwargs["write_bucket"][0]
        if results_queue is not None:  # in a thread: to be known before the other one goes on
            return write_one(*args, results_queue=_Looking(results_queue, partial(look, file=file)), **kwargs)
        written = write_one(*args, results_queue=None, **kwargs)
        look(written, file)
        return written

    own: SimpleQueue[Any] = SimpleQueue()
    with monkeypatch.replaced(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_and_look)):
        try:
            save(rank, buckets, own)
        except AssertionError:
            if not met:
                raise
    watch.wait()
    results.put(RuntimeError(met[0]) if met else own.get())


class _Looking:
    """A queue of which is seen what is put there."""

    def __init__(self, queue: Any, look: Callable[[Any], None]) -> None:
        self._queue, self._look = queue, look

    def put(self, item: Any) -> None:
        self._look(item)
        self._queue.put(item)
