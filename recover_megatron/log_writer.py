"""Log files, each written by a background thread, so that a slow or failing disk cannot delay a run.

    put --> queue (bounded) --> thread: open, write
                                  | OSError: logged once; retried every ``RETRY_SECONDS``, later jobs wait
                                  | a write that does not return (a frozen file system): logged after ``STALL_SECONDS``

``put`` takes microseconds and raises no error; lines that do not fit into the queue are dropped and counted.  When the
disk accepts data again, the file continues where it stopped, in complete lines.  If a process is killed, its last lines
may be lost.  A caller that must not lose lines waits with ``wait_done`` or ``flush``; both wait for a bounded time.

The kernel does not terminate a process while one of its threads is inside a write to a frozen file system
(``fsfreeze``).  The process exits when the file system thaws, and its parent sees the exit only then.
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
"""Seconds after which an unfinished job is logged, even if the queue still has room."""
LOOK_SECONDS = 10.0
"""Seconds between two checks whether an idle file with a ``LogWriter.head`` was truncated or moved."""
QUIET_SECONDS = 60.0
"""Minimum seconds between two warnings about a disk that fails and recovers repeatedly."""
PATIENCE_SECONDS = 0.1
"""Greatest number of seconds that ``wait_done`` waits."""
FLUSH_SECONDS = 3.0
MOST_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Say = Callable[[str], None]
Job = Callable[[], object]
"""Function that writes to a file; it is called again if it has raised OSError."""


class BackgroundWriter:
    """Queue of jobs that write to a file, and a thread that runs the jobs in their order.

    The first job starts the thread.  ``what``: name of the file for messages; ``say``: function that logs a message, in
    any thread; ``most_bytes``: size of the queue in bytes.
    """

    def __init__(self, what: str, say: Say = log.warning, most_bytes: int = MOST_BYTES) -> None:
        self._what = what
        self._say = say
        self._most_bytes = most_bytes
        self._jobs: deque[tuple[int, Job]] = deque()  # the thread runs the first job
        self.left = 0
        """Number of bytes in the queue, which are not in the file yet."""
        self._done = 0
        self._failures = 0
        self._hurry = False
        """True if a caller waits, so that a failed job must be retried without delay."""
        self._dropped = 0
        self._reported_at = -QUIET_SECONDS
        self._reported = False
        self._since = 0.0
        self._behind = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def submit(self, job: Job, size: int) -> bool:
        """Add ``job``, which needs ``size`` bytes of memory, to the queue.  Return False if the job was dropped."""
        with self._changed:
            full = self.left > 0 and self.left + size > self._most_bytes
            taken = not full and not self._closed
            if not taken:
                self._dropped += 1
            else:
                if not self._jobs:
                    self._since = time.monotonic()  # the thread sets this only when it begins the job
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

    def wait_done(self) -> None:
        """Wait at most ``PATIENCE_SECONDS`` until all jobs are done.

        After a timeout or a failed job, further calls return immediately until the queue has been empty.
        """
        if not self._behind:
            self._behind = not self._wait(PATIENCE_SECONDS, in_all=PATIENCE_SECONDS)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all jobs are done; return whether they are.

        Returns False if a job fails, if no job finishes for ``seconds``, or after ten times ``seconds``.
        """
        return self._wait(seconds, in_all=10 * seconds)

    def discard(self) -> None:
        """Drop all jobs except the running one."""
        with self._changed:
            while len(self._jobs) > 1:
                self.left -= self._jobs.pop()[0]

    def close(self) -> None:
        """Refuse further jobs; do not wait.  The thread ends when the queue is empty, or when a job fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _look(self) -> None:
        """Check whether the file was truncated or moved; the thread calls this after ``LOOK_SECONDS`` without a job."""

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
        """Start the thread if it does not run.  If no thread can be started, the next call tries again."""
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
        """Log that a job has failed with ``error``, wait until its next attempt is due, and return True.

        If the writer is closed, drop all jobs and return False.
        """
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
    """Create the folder of ``path``, open the file for appending lines, and return its descriptor.

    If the last line is incomplete, ends it with a newline, or removes it if ``drop_cut`` is true.  Raises OSError.
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
    """Background writer that appends lines to one file; the first line opens the file.

    ``opening``: function that opens the file, in the thread, and returns its descriptor.  It is called again if the
    file was removed or was moved by a log rotation, and after an error other than a full disk.  ``gap(n)``: the text to
    write in place of n dropped lines.
    """

    head = b""
    """Lines that readers need in every file; written again if the file was truncated or replaced by a new one."""

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
        """Queue ``line``, which ends with a newline; ``wait_done`` or ``flush`` waits until it is in the file.

        ``wanted``: called in the thread when the file is open; if it returns False, the line is dropped.
        """
        if self._missing and self._gap is not None:
            line = self._gap(self._missing) + line
        written = 0

        def append() -> None:
            """Write the bytes of the line that are not in the file yet; after an error the next call continues."""
            nonlocal written
            while written < len(line):
                written = self._add(line, written, wanted)

        self._missing = 0 if self.submit(append, len(line)) else self._missing + 1

    def close(self) -> None:
        """Refuse further lines; do not wait.  Lines in the queue are still written."""
        self.submit(self._close, 0)
        super().close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _add(self, line: bytes, written: int, wanted: Callable[[], bool] | None) -> int:
        """Write the bytes of ``line`` after the first ``written`` bytes, which are in the file; runs in the thread.

        Returns the number of bytes of the line that are in the file now.  Raises OSError if no byte could be written.
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
        """Return whether the open file was removed or moved, so that the path must be opened again.

        After ``close``, returns False for a moved file, so that the last lines are written to the moved file: a new
        file at the path may belong to another writer.
        """
        info = os.fstat(descriptor)
        try:
            return info.st_nlink == 0 or not (self._closed or os.path.samestat(info, os.stat(self._path)))
        except OSError as error:  # even if the path cannot be read, the open file may accept lines
            return isinstance(error, FileNotFoundError)

    def _look(self) -> None:
        if self.head:
            self._add(b"", 0, None)


def flush_all(files: Iterable[BackgroundWriter], seconds: float = FLUSH_SECONDS) -> None:
    """Flush all files, each with ``seconds`` (see ``BackgroundWriter.flush``).

    After a failure, flushes later files with only ``PATIENCE_SECONDS``, since they may be on the same disk.
    """
    for file in files:
        if not file.flush(seconds):
            seconds = PATIENCE_SECONDS


def why_not_used(folder: Path) -> str:
    """Create ``folder``; return why files cannot be created there, or an empty text if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
