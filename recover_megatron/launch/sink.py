"""The launcher's own two streams, which may be read slowly, later, or never.

A thread writes, so that no terminal (Ctrl-S), pipe (``| less``), or file on a file system that does not answer ever
holds up the launcher.  What waits is bounded::

    TAKING --more than MOST_PENDING waits--> FULL --half of it is written--> TAKING
                                              | PAUSE_SECONDS of it (the console asks)
                                              v
                                           DROPPING --half of it is written--> TAKING, and says how much was dropped

While it is FULL the workers are not read, as if they wrote to it themselves: a reader that is only slow loses nothing.
For no longer than PAUSE_SECONDS: a worker that blocks in ``print`` is one that hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST_PENDING = 1024 * 1024
"""Bytes."""
PAUSE_SECONDS = 2.0
_MOST_AT_ONCE = 64 * 1024


class Sink:
    """One stream; ``put`` never blocks.

    ``on_room`` is called, in another thread, when what was too much, or everything, has been written; ``told`` makes
    the line that says how many lines were dropped.
    """

    def __init__(self, descriptor: int, on_room: Callable[[], None], told: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._on_room = on_room
        self._told = told
        self._news = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._size = 0
        self._full = self._dropping = self._broken = False
        self._dropped = self._written = 0
        self._thread: threading.Thread | None = None
        self.colour = os.isatty(descriptor) and "NO_COLOR" not in os.environ

    @property
    def empty(self) -> bool:
        """Whether everything has been written that ever will be."""
        with self._news:
            return self._broken or not self._pending

    @property
    def full(self) -> bool:
        """Whether it wants no more for now."""
        with self._news:
            return self._full and not self._dropping

    def put(self, data: bytes) -> None:
        """Write ``data``, whole lines, as soon as that is possible, or drop it."""
        with self._news:
            if self._broken or not data:
                return
            if self._dropping or self._size > 2 * MOST_PENDING:
                self._dropping = self._full = True
                self._dropped += data.count(b"\n")
                return
            self._append(data)
            self._full |= self._size > MOST_PENDING
            if self._thread is None:
                thread = threading.Thread(target=self._write, name="recover-launch-console", daemon=True)
                with contextlib.suppress(RuntimeError):  # the next line tries again
                    thread.start()
                    self._thread = thread
            self._news.notify_all()

    def drop(self) -> None:
        """Take no more until half of what waits has been written."""
        with self._news:
            self._dropping = self._full

    @property
    def written(self) -> int:
        """Bytes, so far."""
        with self._news:
            return self._written

    def _append(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)

    def _write(self) -> None:
        while True:
            with self._news:
                while not self._pending:
                    self._news.wait()
                data = self._pending[0]
            try:
                written = os.write(self._descriptor, data[:_MOST_AT_ONCE])
            except BlockingIOError:  # somebody else has made the terminal so
                select.select([], [self._descriptor], [])
                continue
            except OSError:
                # Nobody reads any more (closed pipe, lost terminal, full disk).  The run goes on, and so do the logs.
                self._break()
                return
            self._took(written)

    def _took(self, written: int) -> None:
        with self._news:
            first = self._pending.popleft()
            if first[written:]:
                self._pending.appendleft(first[written:])
            self._size -= written
            room = self._full and self._size <= MOST_PENDING // 2
            if room:
                self._full = self._dropping = False
                if self._dropped:
                    self._append(self._told(self._dropped))
                    self._dropped = 0
            self._written += written
            room |= not self._pending
            self._news.notify_all()
        if room:
            self._on_room()

    def _break(self) -> None:
        with self._news:
            self._broken = True
            self._full = self._dropping = False
            self._pending.clear()
            self._size = 0
            self._news.notify_all()
        self._on_room()
