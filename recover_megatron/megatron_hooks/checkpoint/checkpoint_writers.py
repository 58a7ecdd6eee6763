"""Failures of checkpoint writers: no worker waits forever, and all workers learn which part is missing, and why.

Each worker has a writer process for asynchronous checkpoints.  In three cases Megatron would wait forever for this
process:

dead            The OOM killer or an exception has ended the writer.  The waiting worker gets ``WriterDied``.  In stock
                Megatron the writer also exits if one of its threads cannot write a file (threads write all files of a
                part except the last).  ``write`` catches this error and reports it
stopped         A debugger or a SIGSTOP has stopped the writer or its manager process, which keeps the results until
                the worker fetches them.  After the hang timeout the worker gets ``WriterStopped``
without work    If a worker has nothing to write in a checkpoint, Megatron gives its writer no work, but waits for the
                writer if that has written an earlier checkpoint.  With --recover a worker may have nothing to write,
                because the set of workers that write depends on the number of replicas.  The writer then gets a request
                to do nothing

The results of every checkpoint pass through the manager process.  A manager that is dead or has lost its socket file is
replaced.
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
    """Exit of this worker's writer process.  If an exception ended the process, the process has logged it."""


class WriterKilled(WriterDied):
    """Death of this worker's writer process or manager process by a signal, which counts as a fault of the host."""


class WriterStopped(WriterKilled):
    """Stop, by a signal or a debugger, of this worker's writer or manager process for longer than the hang timeout."""


class Watch:
    """Detects processes of this worker that a signal or a debugger has stopped for more than ``seconds``."""

    def __init__(self) -> None:
        self.seconds = math.inf
        self._since: dict[int, float] = {}

    def running(self, *processes: Any) -> bool:
        """Return False if the manager or one of ``processes`` is stopped.

        Raises ``WriterStopped`` if such a process has been stopped for more than ``seconds``.
        """
        now = time.monotonic()
        stopped = [each.pid for each in (*processes, manager()) if each is not None and is_stopped(each.pid)]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since > self.seconds:
                raise WriterStopped(
                    f"process {pid}, which writes checkpoints for this worker, has been stopped for {now - since:.0f} s"
                )
        return not stopped

    def wait(self) -> None:
        """Wait while the manager process is stopped.  Raises ``WriterStopped`` after ``seconds``."""
        while not self.running():
            time.sleep(POLL_SECONDS)


watch = Watch()


def manager() -> Any:
    """Return the manager process, which keeps a writer's results until the worker fetches them; None if not started."""
    queue = filesystem_async._results_queue
    return None if queue is None else queue._manager._process


def without_a_lost_manager() -> None:
    """Forget a dead manager process, or kill one that stays stopped, so that the next checkpoint starts a new one."""
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
    """Replace multiprocessing's listeners whose socket files are gone from TMPDIR.

    Call it only while no checkpoint is pending.  Python does not notice the removal, so the writer process would fail
    to connect in the next checkpoint.  If a listener cannot be replaced, a warning is logged, and the next checkpoint
    reports the error.
    """
    sharer, keeper = resource_sharer._resource_sharer, manager()  # type: ignore[attr-defined]
    of_keeper = None if keeper is None else filesystem_async._results_queue._manager.address
    if not (lost := [path for path in (sharer._address, of_keeper) if path and not os.path.exists(path)]):
        return
    log.warning(
        f"socket files were removed from TMPDIR: {', '.join(lost)}; they are replaced for the next checkpoint. Exclude "
        "pymp-* from the cleaner of TMPDIR"
    )
    try:
        os.makedirs(folder := get_temp_dir(), mode=0o700, exist_ok=True)
        if os.stat(folder).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", folder)
        if sharer._address in lost:
            # Create an empty file in place of the socket, because Python will remove this path at exit.
            os.close(os.open(sharer._address, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        log.warning(f"cannot replace socket files in TMPDIR, so the next checkpoint may fail: {error}")
        return
    if sharer._address in lost:
        # The thread of the old listener stays, because only a connection to the lost socket file could stop it.
        sharer._listener = sharer._address = sharer._thread = None
    if of_keeper in lost:
        keeper.kill()
        keeper.join()
        _forget_dead_manager()


def is_stopped(pid: int) -> bool:
    """Return whether process ``pid`` is stopped by a signal or a debugger; False if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def install(parts: Parts) -> None:
    """Wrap Megatron-Core's checkpoint writer and its process; raises UserError if a wrapped signature is unknown."""
    monkeypatch.wrap("FileSystemWriterAsync.get_save_function_and_args", _reporting)
    monkeypatch.wrap("FileSystemWriterAsync.retrieve_write_results", parts.noting_results)
    monkeypatch.wrap("PersistentAsyncCaller.schedule_async_call", _schedule)
    monkeypatch.wrap("PersistentAsyncCaller.is_current_async_call_done", _is_done)
    monkeypatch.wrap("PersistentAsyncCaller.close", _close)
    monkeypatch.wrap("get_write_results_queue", _results_queue)


def nothing() -> None:
    """Do nothing: the task of a writer process whose worker has nothing to write in a checkpoint."""


def _schedule(original: Callable[..., None]) -> Callable[..., None]:
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.async_fn is None:
            async_req = async_req._replace(async_fn=nothing, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        if self.process is None:
            self.process = self._get_process(dist.get_rank())
        if not self.process.is_alive():
            raise _died(self.process)
        # The original waits in join() of a class attribute, forever if the writer dies: a queue that notices hides it
        self._persistent_preload_q = _Preloading(self._persistent_preload_q, self.process)
        try:
            original(self, async_req)
        finally:
            del self._persistent_preload_q

    return schedule_async_call


def _is_done(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_current_async_call_done(self: Any, blocking: bool = False, no_dist: bool = False) -> bool:
        # The original would wait forever for a dead process.  It does not wait if ``cur_item`` is set already.
        while self.process and self.cur_item is None:
            watch.running(self.process)
            alive = self.process.is_alive()  # read before the queue: the process may report its result and then exit
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
        return WriterKilled(f"{what} lost its manager process, which was killed by signal {-keeper.exitcode}")
    return WriterDied(f"{what} ended with exit code {code}")


class _Preloading:
    """Stand-in for the queue through which the writer process reports that it has copied a checkpoint's tensors."""

    def __init__(self, queue: Any, process: Any) -> None:
        self._queue, self._process = queue, process

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def join(self) -> None:
        """Wait until the writer process has copied the tensors.  Raises ``WriterDied`` if the process exits first."""
        thread = threading.Thread(target=self._queue.join, daemon=True)
        thread.start()
        while thread.is_alive():
            watch.running(self._process)
            alive = self._process.is_alive()
            thread.join(POLL_SECONDS)
            if not alive and thread.is_alive():
                raise _died(self._process)


def wait(caller: Any) -> None:
    """Wait, without communication, until the writer process of ``caller`` has finished its oldest request.

    ``caller``: Megatron's ``PersistentAsyncCaller``.  It is closed if the process is dead or stays stopped.
    """
    try:
        caller.is_current_async_call_done(True, True)
    except WriterDied as error:
        log.warning(f"{error}; the checkpoint being written is abandoned")
        caller.close(abort=True)  # the next checkpoint gets another process


_WORKER_FAILURE = "Worker failure: "
"""Text that precedes a writer's error in the message of Megatron's error."""


class PartFailed(Exception):
    """A part of a checkpoint cannot be written.

    ``own``: True if the fault is this worker's, because other workers could write their parts.
    """

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


class Parts:
    """Exchange of the errors that workers meet when they write their parts of a checkpoint.

    If a part cannot be written, Megatron reports to all workers only that some part is missing.  Only the rank
    that plans the save learns which worker failed, and no worker learns the error.  With ``share_failures`` all workers
    learn both.  If some workers have written their parts, the failed workers exit, and the others write the checkpoint
    again.
    """

    def __init__(self) -> None:
        self._idle = False
        """True if this worker had nothing to write in the last checkpoint, so its ability to write is unknown."""

    def noting_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def retrieve_write_results(self_: Any) -> Any:
            watch.wait()
            results = original(self_)
            self._idle = not results
            return results

        return retrieve_write_results

    @contextmanager
    def share_failures(self, manager: Manager) -> Iterator[None]:
        """Context in which a failed part raises ``PartFailed`` on the workers that failed, and makes them exit.

        The other workers wait for these exits, which raise ``EpochRevoked`` on them.  If no worker could write, all
        workers raise ``PartFailed``.  All workers of the epoch must enter the context.
        """
        self._idle = False
        try:
            yield
        except CheckpointException as error:
            forget_variables(error)
            view = manager.view
            reports: list[Any] = [None] * dist.get_world_size()
            known = {rank: signature(each).rpartition(_WORKER_FAILURE)[2] for rank, (each, _) in error.failures.items()}
            dist.all_gather_object(reports, (known, self._idle))
            failed = {rank: text for of_one, _ in reports for rank, text in of_one.items()}
            me = dist.get_rank()
            others_can = any(rank not in failed and not idle for rank, (_, idle) in enumerate(reports))
            if others_can and me not in failed:
                view.groups.any(False, tuple(sorted(view.live)))  # wait until the failed workers have exited
            rank_failed = me if me in failed else min(failed, default=me)
            text = failed.get(rank_failed, signature(error))
            raise PartFailed(f"worker {view.decision.workers[rank_failed]}: {text}", own=others_can) from error


def forget_variables(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of ``error`` and of its causes, to avoid a crash of CPython.

    If a part could not be written, one variable is a view of a BytesIO (``data.getbuffer()`` in ``_write_item`` of
    torch's distributed/checkpoint/filesystem.py) in a reference cycle with the error.  CPython 3.12.1 crashes with
    SIGSEGV when it collects this cycle (gh-111049 in ``bytesiobuf_releasebuffer``; fixed in 3.13.0).  Stock Megatron
    and torch's own checkpoints crash, too.
    """
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def _reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_save_function_and_args(self: Any) -> Any:
        save, preload, args = original(self)
        return None if save is None else partial(write, save), preload, args

    return get_save_function_and_args


def write(save: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
    """Run ``save``, and put its result or, if a write failed, the text of the first error into ``results``.

    Megatron itself would report only the error's type or, if a thread wrote the file, let the process exit.  The
    writer process may call this function.
    """
    write_one, met = FileSystemWriterAsync.write_preloaded_data, list[str]()

    def look(written: Any, file: str) -> None:
        if isinstance(error := written[1], Exception):
            forget_variables(error)
            while before := error.__cause__ or error.__context__:  # find the first error of the chain
                error = before
            met.append(f"{signature(error)} (in {file})")

    def write_and_look(*args: Any, results_queue: Any, **kwargs: Any) -> Any:
        file = kwargs["write_bucket"][0]
        if results_queue is not None:  # in a thread: record the error before the reader of results continues
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
    """Queue that calls ``look`` with each item before it puts the item into ``queue``."""

    def __init__(self, queue: Any, look: Callable[[Any], None]) -> None:
        self._queue, self._look = queue, look

    def put(self, item: Any) -> None:
        self._look(item)
        self._queue.put(item)
