"""An arbiter on shared storage: a lease file that one coordinator holds at a time.

The file says who holds it and how often it was renewed. A holder renews it; another may take it only after it has
watched the same content for ``seconds``, by its own clock, so clocks need not agree. A holder counts itself as
holding for half of that after a renewal it knows to have succeeded: it lets go before anybody else may take over. All
changes are made under an ``fcntl`` lock of the file, which the storage must honour between hosts (NFSv4, Lustre with
``flock``, GPFS do).
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from recover_megatron.membership.events import Verdict


class Lease:
    """Tries for the lease once ``ask`` was called, then renews it until ``close``, in a thread of its own.

    ``report`` gets a ``Verdict`` after each attempt that could look at the file. One that could not (another candidate
    has it locked just then, the storage fails or hangs) is no news: it is soon made again, and a holder that hears of
    no renewal lets go by itself.
    """

    def __init__(self, path: Path, owner: str, seconds: float, report: Callable[[Verdict], None]) -> None:
        self._path = path
        self._owner = owner
        self._seconds = seconds
        self._report = report
        self._seen: str | None = None
        self._seen_at = 0.0
        self._renewals = 0
        self._asked = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-lease", daemon=True)
        self._thread.start()

    def ask(self, term: int) -> None:
        """Begin to try; returns at once."""
        self._asked.set()

    def release(self) -> None:
        """Stop renewing until asked again; returns at once. Others may take it when it has run out."""
        self._asked.clear()

    def close(self) -> None:
        """Stop renewing; the lease runs out."""
        self._closed.set()
        self._asked.set()
        self._thread.join(timeout=self._seconds)

    def _run(self) -> None:
        while self._asked.wait() and not self._closed.is_set():
            started = time.monotonic()
            held = self.attempt(started)
            if held is not None:
                self._report(Verdict(started + self._seconds / 2 if held else 0.0))
            self._closed.wait(self._seconds / (64 if held is None else 8))

    def attempt(self, now: float) -> bool | None:
        """Take or renew the lease; whether it is held. None: there is no telling, since the file could not be had."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = os.pread(descriptor, 4096, 0).decode(errors="replace")
            if not self._may_take(content, now):
                return False
            self._renewals += 1
            content = json.dumps({"owner": self._owner, "renewals": self._renewals})
            os.pwrite(descriptor, content.encode().ljust(256), 0)
            os.fsync(descriptor)
            return True
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _may_take(self, content: str, now: float) -> bool:
        if not content.strip():
            return True
        try:
            if json.loads(content)["owner"] == self._owner:
                return True
        except (ValueError, KeyError, TypeError):
            content = f"unreadable: {content}"  # somebody's half-written renewal: waits like any other
        if content != self._seen:
            self._seen, self._seen_at = content, now
        return now - self._seen_at >= self._seconds
