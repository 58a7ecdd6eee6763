"""Log files, each written by a background thread, so that no disk can stop or slow a run.

    put --> queue (bounded) --> thread: open, write
                                  | OSError: logged once; retried every ``RETRY_SECONDS``, later jobs wait
                                  | a write that does not return (a frozen file system): logged after ``STALL_SECONDS``

``put`` takes microseconds and raises nothing; lines that do not fit into the queue are dropped and counted.  When the
disk accepts data again, the file continues where it stopped, in complete lines.  If a process is killed, its last lines
may be lost: a caller that must not lose them waits with ``settle`` or ``flush``, both for a bounded time.

The kernel does not terminate a process while one of its threads is inside a write to a frozen file system
(``fsfreeze``): the process exits when the file system thaws, and its parent sees the exit only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from recover_megatron.logger import get_logger

log = get_logger(__name__)

RETRY_SECONDS = 2.0
STALL_SECONDS = 10.0
"""Seconds after which an unfinished job is logged; otherwise it would stay unnoticed while the queue has room."""
LOOK_SECONDS = 10.0
"""Seconds between two checks of an idle file that has a ``head``."""
QUIET_SECONDS = 60.0
"""Minimum seconds between two warnings about a disk that fails and recovers repeatedly."""
PATIENCE_SECONDS = 0.1
"""Longest wait of ``settle``, in seconds."""
FLUSH_SECONDS = 3.0
MOST_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Say = Callable[[str], None]
Job = Callable[[], object]
"""Callable that writes; it is called again after an OSError."""


class BackgroundWriter:
    """Background writer: runs jobs in their order, in a thread that starts with the first job.

    ``what`` names the file in messages, ``say`` (called in any thread) logs trouble; ``most_bytes`` bounds the queue.
    """

    def __init__(self, what: str, say: Say = log.warning, most_bytes: int = MOST_BYTES) -> None:
        self._what = what
        self._say = say
        self._most_bytes = most_bytes
        self._jobs: deque[tuple[int, Job]] = deque()  # the first job is running
        self.left = 0
        """Bytes not yet written."""
        self._done = 0
        self._failures = 0
        self._hurry = False
        """True if a caller waits, so that a failed job must be retried at once."""
        self._dropped = 0
        self._reported_at = -QUIET_SECONDS
        self._reported = False
        self._since = 0.0
        self._behind = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def submit(self, job: Job, size: int) -> bool:
        """Queue ``job``, which keeps ``size`` bytes of memory until it has run.  Return False if it was dropped."""
        with self._changed:
            full = self.left > 0 and self.left + size > self._most_bytes
            taken = not full and not self._closed
            if not taken:
                self._dropped += 1
            else:
                if not self._jobs:
                    self._since = time.monotonic()  # the thread may not have begun this job when the next one is queued
                self._jobs.append((size, job))
                self.left += size
                self._run_thread()
                self._changed.notify_all()
            waits_for_thread = self._thread is None and bool(self._jobs)
            waits = time.monotonic() - self._since if len(self._jobs) > 1 else 0.0
        if waits_for_thread:
            self._report("waits in memory, because no thread can be started (check ulimit -u and the pid limit)")
        elif waits > STALL_SECONDS:
            self._report(f"could not be written for {waits:.0f} s: the disk does not respond")
        elif full:
            self._report("grows faster than the disk can write it")
        return taken

    def settle(self) -> None:
        """Wait at most ``PATIENCE_SECONDS`` until all jobs are done; after a timeout, do not wait while any is left."""
        if not self._behind:
            self._behind = not self._wait(PATIENCE_SECONDS, in_all=PATIENCE_SECONDS)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all jobs are done.

        Give up and return False if a write fails, if no job finishes for ``seconds``, or after ten times ``seconds``.
        """
        return self._wait(seconds, in_all=10 * seconds)

    def discard(self) -> None:
        """Drop all jobs except the running one."""
        with self._changed:
            while len(self._jobs) > 1:
                self.left -= self._jobs.pop()[0]

    def close(self) -> None:
        """Refuse further jobs; return at once.  The thread ends when the queue is empty, or at the next error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _look(self) -> None:
        """Check the file; called in the thread after ``LOOK_SECONDS`` without a job."""

    @property
    def finished(self) -> bool:
        return self._closed and not self._jobs

    def _wait(self, seconds: float, in_all: float) -> bool:
        end = time.monotonic() + in_all
        with self._changed:
            failures = self._failures
            self._hurry = True
            if self._jobs:
                self._run_thread()
            self._changed.notify_all()
            while self._jobs and self._failures == failures:
                done, until = self._done, min(time.monotonic() + seconds, end)
                while self._jobs and self._done == done and self._failures == failures:
                    if (left := until - time.monotonic()) <= 0:
                        return False
                    self._changed.wait(left)
            return not self._jobs

    def _run_thread(self) -> None:
        """Start the thread if it does not run; if no thread can be started, the next job tries again."""
        if self._thread is None:
            self._since = time.monotonic()
            thread = threading.Thread(target=self._run, name=f"recover-write-{self._what}", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    self._behind = False
                    if self._closed:
                        return
                    if not (self._changed.wait(LOOK_SECONDS) or self._jobs or self._closed):
                        self._jobs.append((0, self._look))
                job = self._jobs[0][1]
                self._since = time.monotonic()
            try:
                job()
            except OSError as error:
                if not self._failed(error):
                    return
            else:
                self._succeeded()

    def _failed(self, error: OSError) -> bool:
        """Wait until the next attempt is due; if the writer is closed, drop all jobs and return False."""
        with self._changed:
            self._failures += 1
            self._hurry = False
            self._changed.notify_all()
        self._report(f"cannot be written ({error.strerror or error})")
        with self._changed:
            if not self._closed:
                self._changed.wait_for(lambda: self._closed or self._hurry, RETRY_SECONDS)
                return True
            self._jobs.clear()
            self.left = 0
            self._changed.notify_all()
            return False

    def _succeeded(self) -> None:
        with self._changed:
            size, _ = self._jobs.popleft()
            self.left -= size
            self._done += 1
            works_again, self._reported = self._reported, False
            dropped = self._dropped
            if works_again:
                self._dropped = 0
            self._changed.notify_all()
        if works_again:
            lost = f"; {dropped} lines were dropped" if dropped else "; nothing was lost"
            self._say(f"{self._what} is written again{lost}")

    def _report(self, trouble: str) -> None:
        now = time.monotonic()
        with self._changed:
            if self._reported or now - self._reported_at < QUIET_SECONDS:
                return
            self._reported, self._reported_at = True, now
        self._say(f"{self._what} {trouble}; the run continues without this file")


def open_to_append(path: Path, *, drop_cut: bool = False) -> int:
    """Open ``path`` for appending lines, create its folder, and return the descriptor; end a truncated last line.

    ``drop_cut``: remove a truncated last line.  Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_size and os.pread(descriptor, 1, info.st_size - 1) != b"\n":
            if drop_cut:
                os.ftruncate(descriptor, os.pread(descriptor, info.st_size, 0).rfind(b"\n") + 1)
            else:
                os.write(descriptor, b"\n")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LogWriter(BackgroundWriter):
    """Background writer that appends lines to one file, which it opens with the first line.

    ``opening`` opens the file in the thread and returns the descriptor; it is called again when the file must be
    reopened (its folder was removed, a log rotation has moved it, the file server has lost it).  ``gap(n)`` is written
    in place of n dropped lines.
    """

    head = b""
    """Lines that readers need in every file: soon written again if the file was truncated or created again."""

    def __init__(
        self,
        path: Path,
        say: Say = log.warning,
        opening: Callable[[Path], int] = open_to_append,
        gap: Callable[[int], bytes] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        super().__init__(str(path), say, most_bytes)
        self._path = Path(os.path.abspath(path))  # the program may change its working directory
        self._opening = opening
        self._gap = gap
        self._missing = 0
        self._descriptor: int | None = None
        self._size = 0
        """Size of the file in bytes after the last write."""

    def make(self) -> None:
        """Open the file now, so that it exists before the first line."""
        self.submit(lambda: self._add(b"", 0, None), 0)

    def put(self, line: bytes, wanted: Callable[[], bool] | None = None) -> None:
        """Append ``line``, which ends in a line end, as soon as the disk accepts it; ``settle`` waits for that.

        ``wanted`` is called in the thread, when the file is open; the line is written only if it returns True.
        """
        if self._missing and self._gap is not None:
            line = self._gap(self._missing) + line
        written = 0

        def append() -> None:
            """Append the rest of the line; a call after an error continues where the disk was full."""
            nonlocal written
            while written < len(line):
                written = self._add(line, written, wanted)

        self._missing = 0 if self.submit(append, len(line)) else self._missing + 1

    def close(self) -> None:
        """Refuse further lines; return at once.  Lines that were put before are still written."""
        self.submit(self._close, 0)
        super().close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _add(self, line: bytes, written: int, wanted: Callable[[], bool] | None) -> int:
        """Write ``line``, of which ``written`` bytes are in the file already; runs in the thread.

        Returns how many bytes of the line are in the file now: not all if the disk is full.  OSError if none was added.
        """
        try:
            if self._descriptor is not None and self._is_elsewhere(self._descriptor):
                self._close()
            if self._descriptor is None:
                self._descriptor, written = self._opening(self._path), 0
            info = os.fstat(self._descriptor)
            size = info.st_size
            if self.head and not written and size < self._size and stat.S_ISREG(info.st_mode):
                size += os.write(self._descriptor, self.head)
            if not written and wanted is not None and not wanted():
                return len(line)
            count = os.write(self._descriptor, memoryview(line)[written:])
            self._size = size + count
            return written + count
        except OSError as error:
            if error.errno not in _FULL:
                with contextlib.suppress(OSError):
                    self._close()
            raise

    def _is_elsewhere(self, descriptor: int) -> bool:
        """Return whether the open file is no longer at its path, because it was removed or moved.

        After ``close``, False for a moved file, which gets the last lines: a new file may belong to another writer.
        """
        info = os.fstat(descriptor)
        try:
            return info.st_nlink == 0 or not (self._closed or os.path.samestat(info, os.stat(self._path)))
        except OSError as error:  # the path cannot be read: the open file may accept lines nevertheless
            return isinstance(error, FileNotFoundError)

    def _look(self) -> None:
        if self.head:
            self._add(b"", 0, None)


def flush_all(files: Iterable[BackgroundWriter], seconds: float = FLUSH_SECONDS) -> None:
    """Flush all files; after a failure, flush later files, perhaps on the same disk, for only ``PATIENCE_SECONDS``."""
    for file in files:
        if not file.flush(seconds):
            seconds = PATIENCE_SECONDS


def why_not_used(folder: Path) -> str:
    """Return why ``folder``, or a temporary file in it, cannot be created; empty if both can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
