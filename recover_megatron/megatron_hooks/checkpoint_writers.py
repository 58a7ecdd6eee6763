"""The process that writes a worker's asynchronous checkpoints in the background: Megatron waits for it, come what may.

Two things would make it wait for ever:

it has died     of too little memory, or by a part that could not be written (in a thread of its own: Megatron tells of
                an error in the other part alone). Here whoever waits for it is told: ``WriterDied``
nothing to do   Megatron gives it nothing where this worker has no part in a checkpoint, but asks it whether that is
                done if it was given a part of another one.  With --recover that happens: who writes what changes with
                the number of replicas.  Here it is given something that is done at once

What was written is told through a process, too (a manager), of any checkpoint: one that is gone is made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

from recover_megatron.megatron_hooks import monkeypatch

POLL_SECONDS = 0.05


class WriterDied(Exception):
    """The process that writes this worker's checkpoints has ended by an exception, which it told in the log."""


class WriterKilled(WriterDied):
    """It was killed by a signal: a matter of this worker's host."""


def install() -> None:
    """Wrap Megatron-Core's caller of that process; raises UserError if it is not the one we know."""
    monkeypatch.wrap(PersistentAsyncCaller, "schedule_async_call", ("self", "async_req"), _schedule)
    monkeypatch.wrap(PersistentAsyncCaller, "is_current_async_call_done", ("self", "blocking", "no_dist"), _is_done)
    monkeypatch.wrap(PersistentAsyncCaller, "close", ("self", "abort"), _close)
    monkeypatch.wrap(filesystem_async, "get_write_results_queue", ("mp_mode",), _results_queue)


def nothing() -> None:
    """What a writer does for a checkpoint in which its worker has no part."""


def _schedule(original: Callable[..., None]) -> Callable[..., None]:
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.async_fn is None:
            async_req = async_req._replace(async_fn=nothing, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        if self.process is None:
            self.process = self._get_process(dist.get_rank())
        if not self.process.is_alive():
            raise _died(self.process)
        # The instance's own hides that of the class while it is waited for.
        self._persistent_preload_q = _Preloading(self._persistent_preload_q, self.process)
        try:
            original(self, async_req)
        finally:
            del self._persistent_preload_q

    return schedule_async_call


def _is_done(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_current_async_call_done(self: Any, blocking: bool = False, no_dist: bool = False) -> bool:
        # As the original waits, which with ``cur_item`` does not any more.
        while self.process and self.cur_item is None:
            alive = self.process.is_alive()  # asked first: it may tell that it is done, and die
            try:
                self.cur_item = self._persistent_comp_q.get(timeout=POLL_SECONDS if blocking else 0)
            except Empty:
                if not alive:
                    raise _died(self.process) from None
                if not blocking:
                    break
        return original(self, blocking, no_dist)

    return is_current_async_call_done


def _close(original: Callable[..., None]) -> Callable[..., None]:
    def close(self: Any, abort: bool = False) -> None:
        original(self, abort or bool(self.process and not self.process.is_alive()))

    return close


def _results_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        known = filesystem_async._results_queue
        if known is not None and not known._manager._process.is_alive():
            filesystem_async._results_queue = None
        return original(*args, **kwargs)

    return get_write_results_queue


def _died(process: Any) -> WriterDied:
    code, what = process.exitcode, "the process that writes checkpoints for this worker"
    if code is not None and code < 0:
        return WriterKilled(f"{what} was killed by signal {-code}")
    return WriterDied(f"{what} ended with exit code {code}")


class _Preloading:
    """Stands in for the queue by which the process tells that it has its copy of the tensors."""

    def __init__(self, queue: Any, process: Any) -> None:
        self._queue, self._process = queue, process

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def join(self) -> None:
        """Raises ``WriterDied``."""
        thread = threading.Thread(target=self._queue.join, daemon=True)
        thread.start()
        while thread.is_alive():
            alive = self._process.is_alive()
            thread.join(POLL_SECONDS)
            if not alive and thread.is_alive():
                raise _died(self._process)


def wait(caller: Any) -> None:
    """Wait until ``caller`` has done what it was given first, without asking others; or its process is gone."""
    try:
        caller.is_current_async_call_done(True, True)
    except WriterDied:
        caller.close(abort=True)  # the next checkpoint gets another process
