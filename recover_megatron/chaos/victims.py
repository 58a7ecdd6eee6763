"""The workers of a run on this host, held so that a signal can hit no other process.

workers.json (docs/launcher.md) gives pids, and a pid may mean another process once the worker has ended.  So a worker
is taken only if its process is the one that the launcher started: the kernel says it started at the time that
workers.json says, and it leads a session of its own, as all workers do.  From then on it is held by a pidfd, which
means this process and none after it; signals go through the pidfd.

When, whom and how: the random draws of a chaos run, which the seed alone decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WORKERS_FILE = "workers.json"

_START_TOLERANCE = 2.0
"""Seconds between the start that the kernel and that the launcher gives; a wall clock may have been adjusted since."""
_LIVE = ("starting", "running")


class NoWorkers(Exception):
    """workers.json is not what recover-run writes, in words for the user."""


@dataclass(frozen=True)
class Held:
    """A live worker."""

    worker: int
    pid: int
    pidfd: int

    def alive(self) -> bool:
        """Whether the process has not ended; a stopped one has not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> bool:
        """Send the signal; False if the process has ended before."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False


@dataclass
class Victims:
    """The workers of the run in ``log_dir`` that live on this host."""

    log_dir: Path
    host: str = field(default_factory=socket.gethostname)
    _held: dict[int, Held] = field(default_factory=dict)
    _starting: bool = False

    def live(self) -> dict[int, Held]:
        """Worker id -> worker, of all that live now.  Raises NoWorkers for a file that cannot be read as one."""
        entries = self._entries()
        self._starting = any(entry.get("state") == "starting" for entry in entries)
        for worker in [worker for worker, held in self._held.items() if not held.alive()]:
            os.close(self._held.pop(worker).pidfd)
        for entry in entries:
            worker, pid, started = entry["worker_id"], entry.get("pid"), entry.get("started")
            if worker not in self._held and entry.get("state") in _LIVE and pid and started:
                pidfd = hold(pid, started)
                if pidfd is not None:
                    self._held[worker] = Held(worker, pid, pidfd)
        return dict(self._held)

    @property
    def expected(self) -> bool:
        """Whether a worker was still to be started, as of the last ``live``."""
        return self._starting

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until one of the held workers ends."""
        poll = select.poll()
        for held in self._held.values():
            poll.register(held.pidfd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
        """Let go of all."""
        for held in self._held.values():
            os.close(held.pidfd)
        self._held.clear()

    def _entries(self) -> list[dict[str, Any]]:
        path = self.log_dir / WORKERS_FILE
        try:
            entries = json.loads(path.read_bytes())
            return [entry for entry in entries if entry["host"] == self.host and isinstance(entry["worker_id"], int)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise NoWorkers(f"{path} cannot be read as the workers of a run: {error}") from error


def hold(pid: int, started: float) -> int | None:
    """A pidfd of the worker that was ``pid`` at the time ``started`` (unix seconds); None if it is not there any more.

    The pidfd is opened first and the process looked at afterwards: if it is the right one then, the pidfd means it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    process = _session_and_start(pid)
    if process is not None:
        session, start = process
        if session == pid and abs(start - started) <= _START_TOLERANCE:
            return pidfd
    os.close(pidfd)
    return None


def _session_and_start(pid: int) -> tuple[int, float] | None:
    """Its session and the time it started (unix seconds); None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name, in parentheses, may contain anything
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    uptime_at_start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return int(fields[3]), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + uptime_at_start


class Draw(NamedTuple):
    """One strike, before it is known who lives then."""

    after: float
    """Seconds since the strike before (since the start, for the first)."""
    lot: float
    """In [0, 1): which of those who live then."""
    kind: str

    def victim(self, candidates: Sequence[int]) -> int:
        """The one of ``candidates`` (not empty) that the lot falls on; their order does not matter."""
        return sorted(candidates)[int(self.lot * len(candidates))]


def draws(seed: int, mtbf: float, kinds: Sequence[str]) -> Iterator[Draw]:
    """The endless sequence for a seed; the times between strikes are exponentially distributed with mean ``mtbf``.

    Each draw takes the same random numbers whatever became of those before, so the n-th is always the same.
    """
    source = random.Random(seed)
    while True:
        after, lot, kind = source.expovariate(1 / mtbf), source.random(), source.random()
        yield Draw(after, lot, kinds[int(kind * len(kinds))])
