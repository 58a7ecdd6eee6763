"""What a launch writes into its log folder, and that no other run does.

    launch.lock         held until the launch ends                    FolderLock
    worker-<id>.log     the output of each worker                     output.LogFile
    workers.json        what became of each worker                    WorkersFile
    secret              the secret that the launch made up            SecretFile

The folders of ``--save`` and ``--recover-log-dir`` have such a lock, too.  Without ``--log-dir`` nothing else is
written.  The disk neither stops nor ends the launcher (log_writer.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from recover_megatron.launch.workers.loop import EventLoop
from recover_megatron.launch.workers.output import LogFile
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.log_writer import PATIENCE_SECONDS, Aside, flush_all
from recover_megatron.membership.wire import SECRET_FILE

LOCK_FILE = "launch.lock"
ORDER_FILE = LOCK_FILE + ".order"
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

    def is_by(self, other: Claim) -> bool:
        return (self.pid, self.host) == (other.pid, other.host)

    def in_words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"recover-run with pid {self.pid} on host {self.host}, started {since}"


NOBODY = Claim(0, "", 0.0, "", 0, "", 0, 0)  # of a process that only looks


@dataclass(eq=False)
class FolderLock:
    """One run at a time in ``folder``, which exists: every launcher of the run holds FOLDER/launch.lock while it lives.

    ::

        free ----take, or share by the first of several nodes----> held by one ----share----> held by several
                                                                     '--- the last launcher ends, however --> free

    Its launchers hold a shared ``flock`` of the file, which the kernel (of the file server, where hosts share the
    folder) frees with its process: a killed launch leaves nothing to clean up.  The file says who holds it: the
    launcher that made the run, and the run's id, by which launchers of other nodes and those that join know that they
    belong to it.

    To see whether the file is held is to lock it for a moment.  So launchers look one at a time, in the order in which
    they get FOLDER/launch.lock.order: no look is taken for a run, and none meets a claim that is half made.

    ``take``, ``check``, ``share`` and ``join`` return None, or why the folder cannot be used.
    """

    folder: Path
    mine: Claim  # describes this launcher
    say: Callable[[str], None]  # tells of a run that would not be noticed
    option: str = "--log-dir"
    """Named the folder."""
    needed: bool = True
    """False: where the file cannot be had (a read-only folder, or none) nothing is held, and a line says so."""
    held: bool = field(default=False, init=False)
    run_id: str = field(default="", init=False)
    """Of the run for which the folder is held."""
    goes_on: bool = field(default=False, init=False)
    """Whether it is not to be had since the other nodes of this launcher's own run are in it."""
    _found_free: bool = field(default=False, init=False)
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
        return None if self.held else self._opened(lambda: self._share(self.run_id or run_id))

    def join(self, own_id: str) -> str | None:
        """Learn for which run ``share`` is to hold the folder: the one in it, or ``own_id``.  Nothing is held yet."""
        return self._opened(lambda: self._join(own_id))

    def end(self, code: int | None, reason: str) -> None:
        """The run is over, with this exit code (None: it is about to start again), and why.  Raises OSError."""
        if self.held and (claim := self._read()) and claim.is_by(self.mine):
            self._write(replace(claim, ended=True, code=code, reason=reason[:LONGEST_REASON]))

    def look(self) -> str | None:
        """Whether a run uses the folder, for who starts none: where none has used it, nothing is made."""
        return self._opened(lambda: self._join("")) if (self.folder / LOCK_FILE).exists() else None

    # ---- inside

    def _opened(self, attempt: Callable[[], str | None]) -> str | None:
        if self._without:
            return None
        try:
            if self._descriptor < 0:
                self._descriptor = self._open(LOCK_FILE)
            return attempt()
        except OSError as error:
            if not self.needed:
                self._without = True
                where = f"{LOCK_FILE} in {self.option} {self.folder} cannot be used ({error.strerror})"
                self.say(f"{where}: another run that writes there would not be noticed")
                return None
            return f"{self.option} {self.folder}: {LOCK_FILE} cannot be used ({error.strerror}): choose another folder"

    def _take(self) -> str | None:
        begun, told = time.monotonic(), False
        while True:
            with self._look() as (free, claim):
                # A node that was lost in the start before, which this launcher makes again, may hold it for long.
                again = claim is not None and claim.ended and claim.code is None and claim.is_by(self.mine)
                if free or again:
                    self._claim(self.mine, claim)
                    self.goes_on = False
                    return None
            # A launcher of node 0 that is started once more: those of the other nodes end now, or the run goes on.
            self.goes_on = bool(claim and not claim.ended and claim.job == self.mine.job and self.mine.nnodes > 1)
            patience = 2 * ENDING_SECONDS if self.goes_on else ENDING_SECONDS if claim and claim.ended else 0.0
            if time.monotonic() >= begun + patience:
                return self._in_use(claim)
            if self.goes_on and not told:
                told = True
                self.say(f"{self._in_use(claim)}: waiting {patience:g} s for its end")
            time.sleep(_LOOK_SECONDS)

    def _check(self) -> str | None:
        with self._look() as (free, claim):
            fits = claim and (claim.nnodes, claim.master_port) == (self.mine.nnodes, self.mine.master_port)
        return None if free or fits else self._in_use(claim)

    def _join(self, own_id: str) -> str | None:
        with self._look() as (free, claim):
            joined = claim if claim and not claim.ended and claim.job == self.mine.job else None
            self._found_free = joined is None
            self.run_id = joined.run_id if joined else own_id
        return None if free or joined else self._in_use(claim)

    def _share(self, run_id: str) -> str | None:
        with self._look() as (free, claim):
            if self._found_free and claim and not claim.ended and claim.job == self.mine.job:
                run_id = claim.run_id  # another launcher, which joins the run, too, has claimed it since
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
        order = self._open(ORDER_FILE)
        try:
            self._flock(order, fcntl.LOCK_EX)
            try:
                free = self._flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not free:
                    self._flock(self._descriptor, fcntl.LOCK_SH)  # with a lock NFS asks its server what is in the file
                yield free, self._read()
            finally:
                self._flock(self._descriptor, fcntl.LOCK_SH if self.held else fcntl.LOCK_UN)
        finally:
            os.close(order)

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

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
                none = f"the file system of {self.option} {self.folder} has no locks ({error.strerror})"
                self.say(f"{none}: another run there would not be noticed")
        return True

    def _claim(self, claim: Claim, last: Claim | None) -> None:
        """No other launcher holds the lock: let the file say that this one does."""
        if last is not None and not last.ended and last.host != claim.host:
            last_used = f"{self.folder} was used by {last.in_words()}, which has not said that it ended"
            self.say(f"{last_used}: where this file system keeps no locks between hosts it may live unnoticed")
        self._write(claim)
        self.held, self.run_id = True, claim.run_id

    def _in_use(self, claim: Claim | None) -> str:
        who = claim.in_words() if claim else "another launch"
        if self.goes_on:
            return f"{self.option} {self.folder} is in use by the other nodes of this run, which was started by {who}"
        fix = "choose another folder, or wait until that run has ended"
        return f"{self.option} {self.folder} is in use by another run ({who}): {fix}"

    def _read(self) -> Claim | None:
        try:
            return Claim(**json.loads(os.pread(self._descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return None

    def _write(self, claim: Claim) -> None:
        text = json.dumps(asdict(claim)).encode() + b"\n"
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))


_OURS = re.compile(rb"[0-9a-f]{64}\n")


class SecretFile:
    """DIR/secret: the secret that a launch made up, where its owner's recover-status finds it.

    Only a secret of the launch's own is written, never one that the user chose: that one is kept where the user keeps
    it.  The file has mode 0600 from its first byte on and takes its name when it is whole; a link of that name is
    replaced, not followed.  It is removed at the end of the launch.  What a killed launcher leaves opens nothing, since
    the secret was that launch's alone; the next launch removes it.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """``say``, called in any thread, tells of trouble with the disk."""
        self._path = folder / SECRET_FILE
        self.writing = Aside(str(self._path), say)

    def write(self, secret: str) -> None:
        """Make the file.  It is there when this returns, if the disk is well."""
        self.writing.submit(lambda: _write_secret(self._path, secret), 1)
        self.writing.settle()

    def remove(self) -> None:
        """Remove what a launch has left, this one or an earlier one."""
        self.writing.submit(lambda: _remove_secret(self._path), 1)


def _write_secret(path: Path, secret: str) -> None:
    if not _may_replace(path):
        raise FileExistsError(0, "there is a file of that name that no launch has made")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            if os.fstat(descriptor).st_mode & 0o077:
                raise PermissionError(0, "this file system does not keep it from others")
            os.write(descriptor, secret.encode() + b"\n")
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_secret(path: Path) -> None:
    if _may_replace(path):
        path.unlink(missing_ok=True)


def _may_replace(path: Path) -> bool:
    """Whether ``path`` is what a launch has written, or a link, or nothing."""
    if path.is_symlink():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _OURS.fullmatch(os.read(descriptor, 66)) is not None
    finally:
        os.close(descriptor)


WORKERS_FILE = "workers.json"

Entries = dict[int, dict[str, object]]
"""By worker id."""


class WorkersFile:
    """workers.json: what became of each worker, for people and tools, current at every change.

    A JSON list of objects (the fields of ``states.WorkerProcess``), sorted by worker id.  Launchers of several nodes
    that share the folder merge their entries: each replaces its own and keeps the others' of the same run.  The lock
    file ``workers.json.lock`` orders them and names the run; entries of another, earlier run are dropped.  The file is
    replaced by renaming, so no reader ever sees a partial one, and no killed launcher leaves one.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """``say``, called in any thread, tells of trouble with the disk."""
        self._folder = folder
        self._latest: tuple[str, Entries] = ("", {})
        self._begun = False
        self.writing = Aside(str(folder / WORKERS_FILE), say)

    def put(self, run_id: str, workers: Sequence[WorkerProcess]) -> None:
        """Merge ``workers``, all those of this launcher, into the file.  It has them then, if the disk is well."""
        self._latest = (run_id, {worker.worker_id: asdict(worker) for worker in workers})
        if self.writing.left < 2:  # one that is written now, and one that will write the latest
            self.writing.submit(self._write, 1)
        self.writing.settle()

    def _write(self) -> None:
        (run_id, own), path = self._latest, self._folder / WORKERS_FILE
        with open(self._folder / (WORKERS_FILE + ".lock"), "a+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            named = lock.read()
            same_run = named == run_id
            if self._begun and named and not same_run:
                return  # the start was made again without this node, or another run has the folder
            entries = (_read_entries(path) if same_run else {}) | own
            lines = ",\n".join("  " + json.dumps(entries[worker_id]) for worker_id in sorted(entries))
            temporary = path.with_name(path.name + ".tmp")  # one writer at a time: the lock is held
            temporary.write_text(f"[\n{lines}\n]\n" if entries else "[]\n", encoding="utf-8")
            os.replace(temporary, path)
            if not same_run:  # after the file itself: a launcher that finds the old name here drops the entries
                lock.seek(0)
                lock.truncate()
                print(run_id, end="", file=lock, flush=True)
            self._begun = True


def _read_entries(path: Path) -> Entries:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # missing or not ours: this launcher's own entries are complete without it


class LogFolder:
    """Made once per launch, in the main thread, where all of it is called."""

    def __init__(
        self, folder: Path | None, lock: FolderLock | None, loop: EventLoop, say: Callable[[str], None],
        other_locks: Sequence[FolderLock] = (),
    ) -> None:  # fmt: skip
        """``lock``: of ``folder``; ``other_locks``: of the script's; ``say`` tells people of trouble with the disk."""
        self._lock = lock
        self._say = loop.from_thread(say)
        self._locks = [held for held in (lock, *other_locks) if held]
        self._logs: list[Aside] = []
        self._workers_file = WorkersFile(folder, self._say) if folder else None
        self._secret_file = SecretFile(folder, self._say) if folder else None
        self._secret_is_ours = False

    def share(self, run_id: str) -> str | None:
        """Make sure that the folders are those of the run ``run_id``; the reason, if another run holds one."""
        return next((reason for lock in self._locks if (reason := lock.share(run_id))), None)

    def open_log(self, path: Path) -> LogFile:
        log = LogFile(path, self._say)
        self._logs = [file for file in self._logs if not file.finished] + [log]
        return log

    def write_workers(self, run_id: str, workers: Sequence[WorkerProcess]) -> bool:
        """Bring workers.json up to date.  False: the folder is not this run's yet; call it again."""
        if self._lock is not None and not self._lock.held:
            return False
        if self._workers_file is not None:
            self._workers_file.put(self._lock.run_id if self._lock else run_id, workers)
        return True

    def keep_secret(self, secret: str) -> None:
        """Leave the secret that this launch has made up to its owner's recover-status, until ``finish``."""
        if self._secret_file is not None:
            self._secret_file.write(secret)
            self._secret_is_ours = True

    def forget_secret(self) -> None:
        """Remove what a killed launch may have left."""
        if self._secret_file is not None:
            self._secret_file.remove()

    def finish(self, code: int | None, reason: str) -> None:
        """All that is left goes to the disk, as long as that takes it; the folder is another run's from now on.

        ``code``, ``reason``: how the launch has ended, for recover-status where no coordinator has led; code None:
        it starts again.
        """
        files = list(self._logs)
        if self._workers_file is not None:
            files.append(self._workers_file.writing)
        if self._secret_file is not None:
            if self._secret_is_ours:
                self._secret_file.remove()
            files.append(self._secret_file.writing)
        for lock in self._locks:
            ending = Aside("", lambda text: None)  # that it fails is of no interest; where it hangs it keeps no other
            ending.submit(partial(lock.end, code, reason), 1)
            files.append(ending)
        flush_all(files)

    def flush_logs(self) -> None:
        """After ``finish``: what has come for the logs since."""
        flush_all(self._logs, PATIENCE_SECONDS)
