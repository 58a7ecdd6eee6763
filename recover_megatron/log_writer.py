"""Files that are written for people: by a thread of their own, so that no disk ends, stops or slows a run.

    put --> queue (bounded) --> thread: open, write
                                  | OSError: said once; tried again every ``RETRY_SECONDS``, the others wait
                                  | a write that does not return (a frozen file system): said after ``STALL_SECONDS``

``put`` takes microseconds and raises nothing; what does not fit into the queue is dropped and counted.  When the disk
takes data again the file goes on where it stopped, whole line after whole line.  The last lines of a process that is
killed may be lost: a caller that must not lose them waits with ``settle`` or ``flush``, both for a bounded time.

A kernel does not end a process while one of its threads is inside a write to a file system that was frozen
(``fsfreeze``): such a process ends when it thaws, and whoever waits for it sees that end then.
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
"""A job that takes so long is told of: nothing else would, while the queue has room."""
LOOK_SECONDS = 10.0
"""A file with a ``head`` that gets no lines is looked after so often."""
QUIET_SECONDS = 60.0
"""A disk that fails and recovers in turn is told of once in this time."""
PATIENCE_SECONDS = 0.1
"""``settle`` waits no longer; and not at all while the thread is behind."""
FLUSH_SECONDS = 3.0
MOST_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Say = Callable[[str], None]
Job = Callable[[], object]
"""May be called several times: again after an OSError."""


class Aside:
    """Carries out jobs in their order, in a thread that starts with the first one.

    ``what`` names them in messages, ``say`` (called in any thread) tells of trouble; ``most_bytes`` bounds the queue.
    """

    def __init__(self, what: str, say: Say = log.warning, most_bytes: int = MOST_BYTES) -> None:
        self._what = what
        self._say = say
        self._most_bytes = most_bytes
        self._jobs: deque[tuple[int, Job]] = deque()  # the first one is being carried out
        self.left = 0
        """Bytes that are not written yet."""
        self._done = 0
        self._failures = 0
        self._hurry = False
        """Somebody waits: try again at once."""
        self._dropped = 0
        self._told_at = -QUIET_SECONDS
        self._told = False
        self._since = 0.0
        self._behind = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def submit(self, job: Job, size: int) -> bool:
        """Have ``job`` carried out; it keeps ``size`` bytes of memory until then.  False: it was dropped."""
        with self._changed:
            full = self.left > 0 and self.left + size > self._most_bytes
            taken = not full and not self._closed
            if not taken:
                self._dropped += 1
            else:
                if not self._jobs:
                    self._since = time.monotonic()  # the thread may not have begun with it when the next one comes
                self._jobs.append((size, job))
                self.left += size
                self._run_thread()
                self._changed.notify_all()
            waits_for_thread = self._thread is None and bool(self._jobs)
            waits = time.monotonic() - self._since if len(self._jobs) > 1 else 0.0
        if waits_for_thread:
            self._tell("waits in memory, since no thread can be started (ulimit -u, a limit of pids)")
        elif waits > STALL_SECONDS:
            self._tell(f"has not been taken by the disk for {waits:.0f} s")
        elif full:
            self._tell("grows faster than the disk takes it")
        return taken

    def settle(self) -> None:
        """Wait until all is done, for a moment at most; not at all while the thread is behind."""
        if not self._behind:
            self._behind = not self._wait(PATIENCE_SECONDS, in_all=PATIENCE_SECONDS)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all is done.

        Give up (False) when the disk refuses, nothing gets done for ``seconds``, or after ten times that.
        """
        return self._wait(seconds, in_all=10 * seconds)

    def discard(self) -> None:
        """Forget all jobs but the one that is being carried out."""
        with self._changed:
            while len(self._jobs) > 1:
                self.left -= self._jobs.pop()[0]

    def close(self) -> None:
        """No more jobs; returns at once.  The thread ends when the queue is empty, or at the next error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _look(self) -> None:
        """Called in the thread after ``LOOK_SECONDS`` without a job."""

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
        """Where none can be started the next job tries again."""
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
        """Wait until it is time for the next attempt; False: there will be none."""
        with self._changed:
            self._failures += 1
            self._hurry = False
            self._changed.notify_all()
        self._tell(f"cannot be written ({error.strerror or error})")
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
            recovered, self._told = self._told, False
            dropped = self._dropped
            if recovered:
                self._dropped = 0
            self._changed.notify_all()
        if recovered:
            lost = f"; {dropped} lines were dropped" if dropped else "; nothing was lost"
            self._say(f"{self._what} is written again{lost}")

    def _tell(self, trouble: str) -> None:
        now = time.monotonic()
        with self._changed:
            if self._told or now - self._told_at < QUIET_SECONDS:
                return
            self._told, self._told_at = True, now
        self._say(f"{self._what} {trouble}; the run goes on without it")


def open_to_append(path: Path, *, drop_cut: bool = False) -> int:
    """A descriptor for adding lines to ``path``, whose folder is made; a last line that was cut gets its end.

    ``drop_cut``: it is removed.  Raises OSError.
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


class LogWriter(Aside):
    """Adds lines to one file, which is opened with the first one.

    ``opening`` gives the descriptor, in the thread, and again when the file has to be opened anew (its folder was
    removed, a log rotation has moved it, the server has forgotten it).  ``gap(n)`` is written where n lines were
    dropped.
    """

    head = b""
    """Lines that readers need: they are written again, soon, into a file that was emptied or made anew."""

    def __init__(
        self,
        path: Path,
        say: Say = log.warning,
        opening: Callable[[Path], int] = open_to_append,
        gap: Callable[[int], bytes] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        super().__init__(str(path), say, most_bytes)
        self._path = Path(os.path.abspath(path))  # the program may go to another folder
        self._opening = opening
        self._gap = gap
        self._missing = 0
        self._descriptor: int | None = None
        self._size = 0
        """The file had so many bytes after the last write."""

    def make(self) -> None:
        """Open the file now, so that it is there before the first line."""
        self.submit(lambda: self._add(b"", 0, None), 0)

    def put(self, line: bytes, wanted: Callable[[], bool] | None = None) -> None:
        """Add ``line``, with its end, as soon as the disk takes it: it is there after ``settle`` if the disk is well.

        ``wanted`` is asked in the thread, when the file is open: whether it is still to be written.
        """
        if self._missing and self._gap is not None:
            line = self._gap(self._missing) + line
        written = 0

        def append() -> None:
            """Called again after an error it goes on where the disk was full."""
            nonlocal written
            while written < len(line):
                written = self._add(line, written, wanted)

        self._missing = 0 if self.submit(append, len(line)) else self._missing + 1

    def close(self) -> None:
        """No more lines; returns at once, what was put is still written."""
        self.submit(self._close, 0)
        super().close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _add(self, line: bytes, written: int, wanted: Callable[[], bool] | None) -> int:
        """In the thread: write ``line``, of which ``written`` bytes are in the file.

        Returns how many are now, fewer than all where the disk is full; raises OSError where not one more was written.
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
        """Tell if the open file is no longer the one at its path, since it was removed or moved.

        After ``close`` a moved file still gets the lines that are left: the new file may be another writer's.
        """
        info = os.fstat(descriptor)
        try:
            return info.st_nlink == 0 or not (self._closed or os.path.samestat(info, os.stat(self._path)))
        except OSError as error:  # the path cannot be looked at: the open file may take lines all the same
            return isinstance(error, FileNotFoundError)

    def _look(self) -> None:
        if self.head:
            self._add(b"", 0, None)


def flush_all(files: Iterable[Aside], seconds: float = FLUSH_SECONDS) -> None:
    """Flush all of them; when one gives up, the others, on the same disk perhaps, have no such time more."""
    for file in files:
        if not file.flush(seconds):
            seconds = PATIENCE_SECONDS


def why_not_used(folder: Path) -> str:
    """Why ``folder`` cannot be made, or no file in it, tried with one that is gone at once; empty: both can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
