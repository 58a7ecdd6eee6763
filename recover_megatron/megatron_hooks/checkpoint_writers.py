"""The process that writes a worker's asynchronous checkpoints in the background: Megatron waits for it, come what may.

Three things would make it wait for ever:

it has died     of too little memory, or by a part that could not be written (in a thread of its own: Megatron tells of
                an error in the other part alone). Here whoever waits for it is told: ``WriterDied``
is stopped      by a debugger, by somebody's SIGSTOP; or the process is that keeps what it has told until it is asked
                for.  After the hang timeout that is as if it had died: ``WriterStopped``
nothing to do   Megatron gives it nothing where this worker has no part in a checkpoint, but asks it whether that is
                done if it was given a part of another one.  With --recover that happens: who writes what changes with
                the number of replicas.  Here it is given something that is done at once

What was written is told through a process, too (a manager), of any checkpoint: one that is gone is made anew.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch

log = get_logger(__name__)

POLL_SECONDS = 0.05


class WriterDied(Exception):
    """The process that writes this worker's checkpoints has ended by an exception, which it told in the log."""


class WriterKilled(WriterDied):
    """It was killed by a signal: a matter of this worker's host."""


class WriterStopped(WriterKilled):
    """It has not run for as long as the hang timeout."""


class Watch:
    """Since when processes of this worker are stopped, and how long (``seconds``) that is borne."""

    def __init__(self) -> None:
        self.seconds = math.inf
        self._since: dict[int, float] = {}

    def running(self, *processes: Any) -> bool:
        """Whether none of these, nor the one that keeps what was written, is stopped.  Raises ``WriterStopped``."""
        now = time.monotonic()
        stopped = [each.pid for each in (*processes, manager()) if each is not None and is_stopped(each.pid)]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since > self.seconds:
                raise WriterStopped(
                    f"process {pid}, by which this worker writes checkpoints, has been stopped for {now - since:.0f} s"
                )
        return not stopped

    def wait(self) -> None:
        """Until what was written can be asked for.  Raises ``WriterStopped``."""
        while not self.running():
            time.sleep(POLL_SECONDS)


watch = Watch()


def manager() -> Any:
    """The process that keeps what was written until it is asked for; None where there is none."""
    queue = filesystem_async._results_queue
    return None if queue is None else queue._manager._process


def without_a_lost_manager() -> None:
    """Forget the one that does not answer any more: the next checkpoint gets another one."""
    process = manager()
    try:
        watch.wait()
    except WriterStopped:
        process.kill()
        process.join()
    if process is not None and not process.is_alive():
        filesystem_async._results_queue = None


def is_stopped(pid: int) -> bool:
    """Whether it does not run until it is told to go on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


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
            watch.running(self.process)
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
        process = self.process
        original(self, abort or bool(process and (not process.is_alive() or is_stopped(process.pid))))

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
    if (keeper := manager()) is not None and (keeper.exitcode or 0) < 0:
        return WriterKilled(f"{what} could not tell what it has written: that process was killed by {-keeper.exitcode}")
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
            watch.running(self._process)
            alive = self._process.is_alive()
            thread.join(POLL_SECONDS)
            if not alive and thread.is_alive():
                raise _died(self._process)


def wait(caller: Any) -> None:
    """Wait until ``caller`` has done what it was given first, without asking others; or its process is gone."""
    try:
        caller.is_current_async_call_done(True, True)
    except WriterDied as error:
        log.warning(f"{error}; the checkpoint under way is given up")
        caller.close(abort=True)  # the next checkpoint gets another process
