"""One run at a time in a log folder, and in a folder of checkpoints: DIR/launch.lock, held by every launcher of the run
for as long as it lives.

    free ----take, or share by the first of several nodes----> held by one ----share----> held by several
                                                                 '--- the last launcher ends, however --> free

Its launchers hold a shared ``flock`` of the file, which the kernel (of the file server, where hosts share the folder)
frees with its process: a killed launch leaves nothing to clean up.  The file says who holds it: the launcher that made
the run, and the run's id, by which launchers of other nodes and those that join know that they belong to it.

To see whether the file is held is to lock it for a moment.  So launchers look one at a time, in the order in which they
get DIR/launch.lock.order: no look is taken for a run, and none meets a claim that is half made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

NAME = "launch.lock"
ORDER = NAME + ".order"
ENDING_SECONDS = 8.0
"""A run that has ended keeps its folder no longer than until its last launchers, on other nodes, have ended too."""
LONGEST_REASON = 1000
_LOOK_SECONDS = 0.25
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Claim:
    """What the lock file says of the run in its folder."""

    pid: int
    host: str
    started: float
    """Of its first launcher; seconds since 1970."""
    run_id: str
    nnodes: int
    master_addr: str
    master_port: int
    world_size: int
    ended: bool = False
    code: int | None = None
    """Of a run that has ended: the exit code of its first launcher."""
    reason: str = ""
    """Of a run that has ended: why, as that launcher knows it."""

    @property
    def job(self) -> tuple[str, int, int]:
        """What a launcher that joins is told, as it was printed."""
        return self.master_addr, self.master_port, self.world_size

    def in_words(self) -> str:
        """The launcher, for people."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"recover-run with pid {self.pid} on host {self.host}, started {since}"


@dataclass(eq=False)
class FolderLock:
    """The lock of ``folder``, which exists, for the launcher that ``mine`` describes.

    ``take``, ``check``, ``share`` and ``join`` return None, or why the folder cannot be used.
    """

    folder: Path
    mine: Claim
    say: Callable[[str], None]
    """Tells of a run that would not be noticed."""
    option: str = "--log-dir"
    """Named the folder."""
    needed: bool = True
    """False: where the file cannot be had (a read-only folder, or none) nothing is held, and a line says so."""
    held: bool = field(default=False, init=False)
    run_id: str = field(default="", init=False)
    """Of the run for which the folder is held."""
    _without: bool = field(default=False, init=False)
    _has_locks: bool = field(default=True, init=False)
    _descriptor: int = field(default=-1, init=False)

    def take(self) -> str | None:
        """Take the folder for a new run."""
        return self._opened(self._take)

    def check(self) -> str | None:
        """Whether the folder is free, or held by what may be the launch that this launcher of several belongs to."""
        return self._opened(self._check)

    def share(self, run_id: str) -> str | None:
        """Hold the folder for the run ``run_id``, whether one of its launchers holds it or none."""
        return None if self.held else self._opened(lambda: self._share(run_id))

    def join(self, own_id: str) -> str | None:
        """Hold the folder for the run that this launcher joins, if it is the one in it; else as ``own_id``."""
        return self._opened(lambda: self._share(own_id, joins=True))

    def end(self, code: int | None, reason: str) -> None:
        """The run is over, with this exit code (None: it is about to start again), and why.  Raises OSError."""
        if self.held and (claim := self._read()) and (claim.pid, claim.host) == (self.mine.pid, self.mine.host):
            self._write(replace(claim, ended=True, code=code, reason=reason[:LONGEST_REASON]))

    # ---- inside

    def _opened(self, attempt: Callable[[], str | None]) -> str | None:
        if self._without:
            return None
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self.folder / NAME, flags, 0o666)
            return attempt()
        except OSError as error:
            if not self.needed:
                self._without = True
                where = f"{NAME} in {self.option} {self.folder} cannot be used ({error.strerror})"
                self.say(f"{where}: another run that saves there would not be noticed")
                return None
            return f"{self.option} {self.folder}: {NAME} cannot be used ({error.strerror}): choose another folder"

    def _take(self) -> str | None:
        end = time.monotonic() + ENDING_SECONDS
        while True:
            with self._look() as (free, claim):
                if free:
                    self._claim(self.mine, claim)
                    return None
            if not (claim and claim.ended) or time.monotonic() >= end:
                return self._in_use(claim)
            time.sleep(_LOOK_SECONDS)

    def _check(self) -> str | None:
        with self._look() as (free, claim):
            mine = self.mine.nnodes, self.mine.master_port
            fits = claim is not None and (claim.nnodes, claim.master_port) == mine
        return None if free or fits else self._in_use(claim)

    def _share(self, run_id: str, *, joins: bool = False) -> str | None:
        with self._look() as (free, claim):
            if joins and claim and not claim.ended and claim.job == self.mine.job:
                run_id = claim.run_id
            if claim and claim.run_id == run_id:
                self.held, self.run_id = True, run_id
            elif free:
                self._claim(replace(self.mine, run_id=run_id), claim)
        return None if self.held else self._in_use(claim)

    @contextlib.contextmanager
    def _look(self) -> Iterator[tuple[bool, Claim | None]]:
        """Whether no other launcher holds the folder, and what the file says; nobody else looks or claims meanwhile.

        At its end this launcher keeps the lock if ``held`` is set.
        """
        with open(self.folder / ORDER, "a", encoding="utf-8") as order:
            self._flock(order.fileno(), fcntl.LOCK_EX)
            try:
                free = self._flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not free:
                    self._flock(self._descriptor, fcntl.LOCK_SH)  # with a lock NFS asks its server what is in the file
                yield free, self._read()
            finally:
                self._flock(self._descriptor, fcntl.LOCK_SH if self.held else fcntl.LOCK_UN)

    def _flock(self, descriptor: int, kind: int) -> bool:
        """Whether the lock is of this ``kind`` now; True where the file system has none, which is said once."""
        try:
            fcntl.flock(descriptor, kind)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if self._has_locks:
                self._has_locks = False
                self.say(
                    f"the file system of {self.option} {self.folder} has no locks ({error.strerror}): another run "
                    "there would not be noticed"
                )
        return True

    def _claim(self, claim: Claim, last: Claim | None) -> None:
        """No other launcher holds the lock: let the file say that this one does."""
        if last is not None and not last.ended and last.host != claim.host:
            self.say(
                f"{self.folder} was used by {last.in_words()}, which has not said that it ended: where this file "
                "system keeps no locks between hosts it may live unnoticed"
            )
        self._write(claim)
        self.held, self.run_id = True, claim.run_id

    def _in_use(self, claim: Claim | None) -> str:
        who = claim.in_words() if claim else "another launch"
        return (
            f"{self.option} {self.folder} is in use by another run ({who}): choose another folder, or wait until "
            "that run has ended"
        )

    def _read(self) -> Claim | None:
        try:
            return Claim(**json.loads(os.pread(self._descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return None

    def _write(self, claim: Claim) -> None:
        text = json.dumps(asdict(claim)).encode() + b"\n"
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
