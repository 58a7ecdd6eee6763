"""``python -m recover_megatron.chaos``: kill random workers of a running recover-run job, at random times.

A *strike* is a signal that kills or stops a worker.  The times between strikes are exponentially distributed; their
mean is ``--mtbf``.  The seed determines the time and the kind of each strike, and a random number that selects the
victim among the live workers.  So two runs with the same live workers at the same times receive the same strikes.  Only
workers of this host are struck.

workers.json (docs/operations.md) lists pids, but the kernel may reuse the pid of a worker that has ended.  So a process
is struck only if its start time matches the start time in workers.json, and if it is a session leader, as every worker
is.  Signals are sent through a pidfd, which never refers to another process.

Exit status: 0 if the run has ended; 1 if no worker was live; 2 if the command is wrong, or if workers.json cannot be
read or is not valid; 130 after SIGINT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from recover_megatron import __version__
from recover_megatron.run_log.events import CHAOS_FILE, EventsFile

WORKERS_FILE = "workers.json"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_LOOK_AGAIN = 0.5
"""Seconds between two reads of workers.json, if no worker ends; the end of a worker is noticed through its pidfd."""
_START_TOLERANCE = 2.0
"""Allowed difference, in seconds, between a worker's start time in the kernel and in workers.json.

The two times differ if the host's clock was adjusted.
"""
_LIVE = ("starting", "running")


class NoWorkers(Exception):
    """Error for a workers.json that cannot be read or is not a valid list of workers."""


@dataclass(frozen=True)
class Held:
    worker: int
    pid: int
    pidfd: int

    def alive(self) -> bool:
        """Return whether the process still exists; a stopped process (SIGSTOP) counts as existing."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> bool:
        """Send the signal; return False if the process has already ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False


@dataclass
class Victims:
    """Live workers of the run in ``log_dir`` on this host."""

    log_dir: Path
    host: str = field(default_factory=socket.gethostname)
    expected: bool = False
    """True if, at the last call of ``live``, workers.json listed a worker that was still starting."""
    _held: dict[int, Held] = field(default_factory=dict)

    def live(self) -> dict[int, Held]:
        """Return worker id -> live worker.  Raises NoWorkers if workers.json cannot be read or is not valid."""
        entries = self._entries()
        self.expected = any(entry.get("state") == "starting" for entry in entries)
        for worker in [worker for worker, held in self._held.items() if not held.alive()]:
            os.close(self._held.pop(worker).pidfd)
        for entry in entries:
            worker, pid, started = entry["worker_id"], entry.get("pid"), entry.get("started")
            if worker not in self._held and entry.get("state") in _LIVE and pid and started:
                pidfd = hold(pid, started)
                if pidfd is not None:
                    self._held[worker] = Held(worker, pid, pidfd)
        return dict(self._held)

    def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until one of the workers returned by the last call of ``live`` ends."""
        poll = select.poll()
        for held in self._held.values():
            poll.register(held.pidfd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
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
            raise NoWorkers(f"{path} is not a valid list of workers: {error}") from error


def hold(pid: int, started: float) -> int | None:
    """Return a pidfd of the worker that started at ``started`` (unix seconds) as process ``pid``; None if it has ended.

    Opens the pidfd before it checks the process, so the pidfd cannot refer to a later process with the same pid.
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
    """Return the session of a process and its start time (unix seconds); None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the program's name may contain spaces and ")"
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    uptime_at_start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return int(fields[3]), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + uptime_at_start


class Draw(NamedTuple):
    """Random values of one strike; they do not depend on the live workers."""

    after: float
    """Seconds from the previous strike to this strike; for the first strike, from the call of ``Chaos.run``."""
    lot: float
    """Random number in [0, 1) that selects one of the live workers."""
    kind: str

    def victim(self, candidates: Sequence[int]) -> int:
        """Return the worker that ``lot`` selects from ``candidates``, a non-empty list in any order."""
        return sorted(candidates)[int(self.lot * len(candidates))]


def draws(seed: int, mtbf: float, kinds: Sequence[str]) -> Iterator[Draw]:
    """Yield draws without end, as determined by ``seed``.

    ``mtbf``: mean of the exponentially distributed seconds between strikes.  Each draw consumes three random numbers,
    so the n-th draw depends only on the arguments.
    """
    source = random.Random(seed)
    while True:
        after, lot, kind = source.expovariate(1 / mtbf), source.random(), source.random()
        yield Draw(after, lot, kinds[int(kind * len(kinds))])


class Chaos:
    def __init__(self, log_dir: Path, max_kills: float, keep: int) -> None:
        self._victims = Victims(log_dir)
        self._file = EventsFile(log_dir / CHAOS_FILE)
        self._max_kills = max_kills
        self._keep = keep
        self._struck: set[int] = set()  # pids of struck workers: no worker is struck twice
        self.strikes = 0

    def wait_for_workers(self, seconds: float) -> bool:
        """Wait until a worker of the run is live on this host; return False if none is live after ``seconds``."""
        return not self._wait_while(lambda: not self._victims.live(), time.monotonic() + seconds)

    def run(self, kinds: Sequence[str], seed: int, mtbf: float) -> None:
        """Strike until the run has ended, that is, until no worker on this host is live or starting.

        Raises NoWorkers if workers.json cannot be read or is not valid.
        """
        due = time.monotonic()
        for number, draw in enumerate(draws(seed, mtbf, kinds), 1):
            due += draw.after
            if self.strikes >= self._max_kills:
                due = math.inf  # only wait for the end of the run
            if not self._wait_while(lambda: bool(self._victims.live()) or self._victims.expected, due):
                return
            self._inject(number, draw)

    def _wait_while(self, condition: Callable[[], bool], due: float) -> bool:
        """Wait until the monotonic time ``due`` and return True; but return False as soon as ``condition`` is false."""
        while condition():
            left = due - time.monotonic()
            if left <= 0:
                return True
            self._victims.wait(min(_LOOK_AGAIN, left))
        return False

    def _inject(self, number: int, draw: Draw) -> None:
        live = {worker: held for worker, held in self._victims.live().items() if held.pid not in self._struck}
        if len(live) <= self._keep:
            self._record("kept", draw, number=number, live=len(live), keep=self._keep)
            return
        held = live[draw.victim(list(live))]
        now = time.time()
        if not held.send(SIGNALS[draw.kind]):
            self._record("miss", draw, number=number, worker=held.worker, pid=held.pid)
            return
        self._struck.add(held.pid)
        self.strikes += 1
        self._record("strike", draw, number=number, worker=held.worker, pid=held.pid, time=now, host=self._victims.host)

    def _record(self, event: str, draw: Draw, **fields: object) -> None:
        fields |= {"kind": draw.kind, "after": round(draw.after, 3), "lot": round(draw.lot, 6)}
        self._file.append(event, **fields)
        print(f"chaos: {event} " + " ".join(f"{name}={value}" for name, value in fields.items()), flush=True)

    def close(self) -> None:
        self._victims.close()
        self._file.close()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recover_megatron.chaos",
        description="Kill random workers of a recover-run job on this host; each strike is written to chaos.jsonl.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--log-dir", type=Path, required=True, metavar="DIR", help="the run's --log-dir")
    parser.add_argument(
        "--mtbf", type=float, required=True, metavar="SECONDS", help="mean time between two strikes on this host"
    )
    parser.add_argument("--seed", type=int, required=True, metavar="S", help="seed of the sequence of strikes")
    parser.add_argument("--kinds", default="kill", metavar="LIST", help="kill, stop or kill,stop (default: kill)")
    parser.add_argument("--max-kills", type=int, metavar="N", help="strike no more than N times (default: no limit)")
    parser.add_argument("--keep", type=int, default=1, metavar="N", help="always keep N workers alive (default: 1)")
    parser.add_argument("--wait", type=float, default=60, metavar="SECONDS", help="wait for a worker (default: 60)")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    if not (args.mtbf > 0 and math.isfinite(args.mtbf)):
        parser.error("--mtbf must be a positive number of seconds")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        parser.error(f"this Python or kernel has no pidfds ({error}): without them another process might be struck")
    if bad := [kind for kind in args.kinds if kind not in SIGNALS]:
        parser.error(f"--kinds: unknown kind {bad[0]!r}; give {' or '.join(SIGNALS)}")
    if args.keep < 0 or (args.max_kills or 0) < 0:
        parser.error("--keep and --max-kills cannot be negative")
    if not args.log_dir.is_dir():
        parser.error(f"--log-dir: {args.log_dir} is not a folder")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    chaos = Chaos(args.log_dir, math.inf if args.max_kills is None else args.max_kills, args.keep)
    try:
        if not chaos.wait_for_workers(args.wait):
            print(f"chaos: error: this host has no live worker of a run in {args.log_dir}", file=sys.stderr)
            return 1
        chaos.run(args.kinds, args.seed, args.mtbf)
    except NoWorkers as error:
        print(f"chaos: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"chaos: stopped after {chaos.strikes} strikes; the run continues", flush=True)
        return 128 + signal.SIGINT
    finally:
        chaos.close()
    print(f"chaos: the run has ended after {chaos.strikes} strikes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
