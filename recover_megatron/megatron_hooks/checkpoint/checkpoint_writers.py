"""Failures of those who write a checkpoint: nobody waits for ever, and all are told whose part is missing, and why.

A process of each worker writes its asynchronous checkpoints.  Three things would make Megatron wait for it for ever:

it has died     of too little memory, or by a part that could not be written (in a thread of its own: Megatron tells of
                an error in the other part alone). Here the worker that waits for it is told: ``WriterDied``
is stopped      by a debugger, by somebody's SIGSTOP; or the process is that keeps what it has told until it is asked
                for.  After the hang timeout that is as if it had died: ``WriterStopped``
nothing to do   Megatron gives it nothing where this worker has no part in a checkpoint, but asks it whether that is
                done if it was given a part of another one.  With --recover that happens: who writes what changes with
                the number of replicas.  Here it is given something that is done at once

What was written is told through a process, too (a manager), of any checkpoint: one that is gone, or whose socket is,
is made anew.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_sharer
from multiprocessing.util import get_temp_dir
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from recover_megatron.instep.faults import signature
from recover_megatron.instep.manager import Manager
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch

log = get_logger(__name__)

POLL_SECONDS = 0.05


class WriterDied(Exception):
    """The process that writes this worker's checkpoints has ended by an exception, which it told in the log."""


class WriterKilled(WriterDied):
    """It was killed by a signal: a matter of this worker's host."""


class WriterStopped(WriterKilled):
    """It, or the manager, has not run for as long as the hang timeout."""


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
        """Wait until the manager can be asked for what was written.  Raises ``WriterStopped``."""
        while not self.running():
            time.sleep(POLL_SECONDS)


watch = Watch()


def manager() -> Any:
    """The process that keeps what was written until it is asked for; None where there is none."""
    queue = filesystem_async._results_queue
    return None if queue is None else queue._manager._process


def without_a_lost_manager() -> None:
    """Forget a manager that does not answer any more: the next checkpoint gets another one."""
    process = manager()
    try:
        watch.wait()
    except WriterStopped:
        process.kill()
        process.join()
    _forget_dead_manager()


def _forget_dead_manager() -> None:
    if (process := manager()) is not None and not process.is_alive():
        filesystem_async._results_queue = None


def without_lost_sockets() -> None:
    """Make anew what listens on a socket whose file a cleaner of TMPDIR has removed, while no checkpoint is under way.

    Python does not notice: a process of each worker would end as it connects.  Where that is not possible a line says
    so, and the checkpoint tells what it lacks.
    """
    sharer, keeper = resource_sharer._resource_sharer, manager()  # type: ignore[attr-defined]
    of_keeper = None if keeper is None else filesystem_async._results_queue._manager.address
    if not (lost := [path for path in (sharer._address, of_keeper) if path and not os.path.exists(path)]):
        return
    log.warning(
        f"no longer there: {', '.join(lost)}. Somebody has cleaned TMPDIR; what listened on them is made anew for the "
        "next checkpoint. Have the cleaner leave pymp-* alone"
    )
    try:
        os.makedirs(folder := get_temp_dir(), mode=0o700, exist_ok=True)
        if os.stat(folder).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "another user has made it since", folder)
        if sharer._address in lost:
            # Python removes it at its end.
            os.close(os.open(sharer._address, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        log.warning(f"nothing can be made anew in TMPDIR ({error})")
        return
    if sharer._address in lost:
        # Its thread keeps the old listener, for good: it cannot be reached to be ended.
        sharer._listener = sharer._address = sharer._thread = None
    if of_keeper in lost:
        keeper.kill()
        keeper.join()
        _forget_dead_manager()


def is_stopped(pid: int) -> bool:
    """Whether process ``pid`` does not run until it is told to go on (SIGCONT)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def install(parts: Parts) -> None:
    """Wrap Megatron-Core's writer and the caller of its process; raises UserError if they are not the ones we know."""
    monkeypatch.wrap("FileSystemWriterAsync.get_save_function_and_args", _telling)
    monkeypatch.wrap("FileSystemWriterAsync.retrieve_write_results", parts.noting_results)
    monkeypatch.wrap("PersistentAsyncCaller.schedule_async_call", _schedule)
    monkeypatch.wrap("PersistentAsyncCaller.is_current_async_call_done", _is_done)
    monkeypatch.wrap("PersistentAsyncCaller.close", _close)
    monkeypatch.wrap("get_write_results_queue", _results_queue)


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
        _forget_dead_manager()
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
        """Wait until the process has its copy.  Raises ``WriterDied``."""
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


_WORKER_FAILURE = "Worker failure: "
"""Before what a writer told, in the text of Megatron's error."""


class PartFailed(Exception):
    """A part cannot be written.  ``own``: this worker's alone, while others have written theirs."""

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


class Parts:
    """What is told of the parts of checkpoints, as one worker knows it.

    Where a part cannot be written Megatron tells all that somebody's is missing, whose it is the worker that plans, and
    the reason nobody.  Here all are told both.  Where others have written theirs, those who could not end, and the
    others write again without them.
    """

    def __init__(self) -> None:
        self._idle = False
        """Whether the last part was empty: then nothing is known of whether this worker could write one."""

    def noting_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def retrieve_write_results(self_: Any) -> Any:
            watch.wait()
            results = original(self_)
            self._idle = not results
            return results

        return retrieve_write_results

    @contextmanager
    def told(self, manager: Manager) -> Iterator[None]:
        """Where a part fails in the block: raises ``PartFailed`` in the workers that end, ``EpochRevoked`` in others.

        All workers of the epoch enter it.
        """
        self._idle = False
        try:
            yield
        except CheckpointException as error:
            forget_variables(error)
            view = manager.view
            told: list[Any] = [None] * dist.get_world_size()
            known = {rank: signature(each).rpartition(_WORKER_FAILURE)[2] for rank, (each, _) in error.failures.items()}
            dist.all_gather_object(told, (known, self._idle))
            failed = {rank: text for of_one, _ in told for rank, text in of_one.items()}
            me = dist.get_rank()
            others_can = any(rank not in failed and not idle for rank, (_, idle) in enumerate(told))
            if others_can and me not in failed:
                view.groups.any(False, tuple(sorted(view.live)))  # until those who cannot are gone
            whose = me if me in failed else min(failed, default=me)
            text = failed.get(whose, signature(error))
            raise PartFailed(f"worker {view.decision.workers[whose]}: {text}", own=others_can) from error


def forget_variables(error: BaseException) -> None:
    """Clear the variables of the functions that ``error``, or what it came of, has ended.

    Where a part could not be written one of them views a BytesIO (``data.getbuffer()`` in ``_write_item`` of torch's
    distributed/checkpoint/filesystem.py) and is in a cycle with the error.  CPython 3.12.1 collects such a cycle with a
    SIGSEGV (``bytesiobuf_releasebuffer`` in Modules/_io/bytesio.c, gh-111049; 3.13.0 does not), in Megatron and in
    torch's own checkpoints alone, too.
    """
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


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
            forget_variables(error)
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
    with monkeypatch.replaced(FileSystemWriterAsync, write_preloaded_data=staticmethod(write_and_look)):
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
