"""One run at a time in a log folder, and in a folder of checkpoints: DIR/launch.lock, held by every launcher of the run
for as long as it lives.

    free ----take, or share by the first of several nodes----> held by one ----share----> held by several
                                                                 '--- the last launcher ends, however --> free

The kernel (of the file server, where hosts share the folder) keeps the lock and frees it with its process, so a killed
launch leaves nothing to clean up.  The file says who holds it: the launcher that made the run, and the run's id, by
which launchers of other nodes and those that join know that they belong to it.

Not every file system has such locks, or keeps them between hosts.  So holders touch the file every ``BEAT_SECONDS``;
where it was last held on another host (without locks: anywhere) by a launch that has not said that it ended, it is
free only after it was watched for ``WATCH_SECONDS`` without a touch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

NAME = "launch.lock"
BEAT_SECONDS = 3.0
WATCH_SECONDS = 8.0
LONGEST_REASON = 1000
_LOOK_SECONDS = 0.25
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len (0: to the end), l_pid (0 for these locks)."""


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
        """Who it is."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"recover-run with pid {self.pid} on host {self.host}, started {since}"


class FolderLock:
    """The lock of ``folder``, which exists, for the launcher that ``mine`` describes.

    ``take``, ``check`` and ``share`` return None, or why the folder cannot be used.
    """

    def __init__(
        self, folder: Path, mine: Claim, say: Callable[[str], None], option: str = "--log-dir", *, needed: bool = True
    ) -> None:
        """``say`` tells of what takes long; ``option`` named the folder.

        Not ``needed``: where the file cannot be had (a folder that is read-only, or is not there) nothing is held, and
        a line says so.
        """
        self._option = option
        self._needed = needed
        self._without = False
        self._folder = folder
        self._mine = mine
        self._say = say
        self._descriptor = -1
        self._has_locks = True
        self.held = False

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
        return self._opened(lambda: self._share(self._running() or own_id))

    @property
    def run_id(self) -> str:
        """Of the run for which the folder is held."""
        claim = self._read()
        return claim.run_id if claim else self._mine.run_id

    def beat(self) -> None:
        """Touch the file.  Raises OSError."""
        if self.held:
            os.utime(self._descriptor)

    def end(self, code: int | None, reason: str) -> None:
        """The run is over, with this exit code (None: it is about to start again), and why.  Raises OSError."""
        if self.held and (claim := self._read()) and (claim.pid, claim.host) == (self._mine.pid, self._mine.host):
            self._write(replace(claim, ended=True, code=code, reason=reason[:LONGEST_REASON]))

    # ---- inside

    def _opened(self, attempt: Callable[[], str | None]) -> str | None:
        if self._without:
            return None
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._folder / NAME, flags, 0o666)
            return attempt()
        except OSError as error:
            if not self._needed:
                self._without = True
                where = f"{NAME} in {self._option} {self._folder} cannot be used ({error.strerror})"
                self._say(f"{where}: another run that saves there would not be noticed")
                return None
            return f"{self._option} {self._folder}: {NAME} cannot be used ({error.strerror}): choose another folder"

    def _take(self) -> str | None:
        if not self._lock(fcntl.F_WRLCK) and not self._take_when_left():
            return self._in_use()
        if reason := self._claim(self._mine):
            return reason
        self._lock(fcntl.F_RDLCK)
        self.held = True
        return None

    def _take_when_left(self) -> bool:
        """Whether the lock is this launcher's alone: where the run in the folder has ended, its last launchers (of
        other nodes) are about to, too, and are waited for."""
        end = time.monotonic() + WATCH_SECONDS
        while (claim := self._holders()) and claim.ended and time.monotonic() < end:
            if self._lock(fcntl.F_WRLCK):
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _claim(self, claim: Claim) -> str | None:
        """This launcher alone holds the lock: let the file say so."""
        last = self._read()
        if last is not None and not last.ended and self._lives(last):
            self._lock(fcntl.F_UNLCK)
            return self._in_use()
        self._write(claim)
        return None

    def _check(self) -> str | None:
        if not self._others():
            return None
        claim = self._holders()
        mine = self._mine.nnodes, self._mine.master_port
        return None if claim and (claim.nnodes, claim.master_port) == mine else self._in_use()

    def _share(self, run_id: str) -> str | None:
        if (
            not self._is(run_id)
            and self._lock(fcntl.F_WRLCK)
            and (reason := self._claim(replace(self._mine, run_id=run_id)))
        ):
            return reason
        self._lock(fcntl.F_RDLCK, wait=True)  # whoever makes the claim holds the lock alone only while it does so
        if self._is(run_id):
            self.held = True
            return None
        self._lock(fcntl.F_UNLCK)
        return self._in_use()

    def _is(self, run_id: str) -> bool:
        claim = self._read()
        return claim is not None and claim.run_id == run_id

    def _running(self) -> str | None:
        """The id of the run in the folder if it is that which this launcher joins; None: it is not."""
        claim = self._read()
        return claim.run_id if claim and self._others() and claim.job == self._mine.job else None

    def _holders(self) -> Claim | None:
        """What the holders say of themselves: whoever makes the claim holds the lock alone until it is written."""
        self._lock(fcntl.F_RDLCK, wait=True)
        claim = self._read()
        self._lock(fcntl.F_UNLCK)
        return claim

    def _in_use(self) -> str:
        claim = self._holders()
        who = claim.in_words() if claim else "another launch"
        return (
            f"{self._option} {self._folder} is in use by another run ({who}): choose another folder, or wait until "
            "that run has ended"
        )

    def _lives(self, last: Claim) -> bool:
        """Whether the launch that held the folder last lives, where the lock cannot tell."""
        if self._has_locks and last.host == self._mine.host:
            return False
        self._say(
            f"{self._folder} was used by {last.in_words()}, which has not said that it ended: looking for "
            f"{WATCH_SECONDS:g} s whether it lives"
        )
        before, end = self._touched(), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            if self._touched() != before:
                return True
        return False

    def _touched(self) -> int:
        descriptor = os.open(
            self._folder / NAME, os.O_RDONLY | os.O_CLOEXEC
        )  # for a file opened anew NFS asks its server
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def _lock(self, kind: int, wait: bool = False) -> bool:
        """Whether the lock is of this ``kind`` now."""
        try:
            self._control(fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, kind)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self._has_locks = False
        return True

    def _others(self) -> bool:
        """Whether another launcher holds the lock."""
        try:
            return self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            last = self._read()
            self._has_locks = False
            return last is not None and not last.ended and self._lives(last)

    def _control(self, command: int, kind: int) -> int:
        request = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
        return int(struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, command, request))[0])

    def _read(self) -> Claim | None:
        try:
            return Claim(**json.loads(os.pread(self._descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return None

    def _write(self, claim: Claim) -> None:
        text = json.dumps(asdict(claim)).encode() + b"\n"
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
