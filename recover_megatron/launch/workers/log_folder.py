"""Files of a launch in its log folder, and the lock against other runs.

    launch.lock         held until the launch ends                    FolderLock
    worker-<id>.log     the output of each worker                     output.LogFile
    workers.json        the state and end of each worker              WorkersFile
    secret              the secret that the launch generated          SecretFile

The folders of ``--save`` and ``--recover-log-dir`` have such a lock, too; without ``--log-dir``, the locks are the only
files.  A failing disk neither blocks nor terminates the launcher (log_writer.py).
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

from recover_megatron.launch.workers.output import LogFile
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.log_writer import PATIENCE_SECONDS, BackgroundWriter, flush_all
from recover_megatron.membership.wire import SECRET_FILE
from recover_megatron.network.event_loop import EventLoop

LOCK_FILE = "launch.lock"
ORDER_FILE = LOCK_FILE + ".order"
ENDING_SECONDS = 8.0
"""Seconds to wait for the folder of a run that has ended, because launchers of other nodes may still hold it."""
LONGEST_REASON = 1000
_LOOK_SECONDS = 0.25
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Claim:
    """Content of the lock file: the run that uses the folder or, if no run uses it, the last run that did."""

    pid: int
    host: str
    started: float
    """Time at which the run's first launcher was started, in seconds since the epoch."""
    run_id: str
    nnodes: int
    master_addr: str
    master_port: int
    world_size: int
    ended: bool = False
    code: int | None = None
    """Exit code of the run's first launcher; None: the run has not ended, or is about to start again."""
    reason: str = ""
    """Reason of the run's end, as the first launcher of the run has recorded it."""

    @property
    def job(self) -> tuple[str, int, int]:
        """Return the address and size of the run, by which a joining launcher identifies it."""
        return self.master_addr, self.master_port, self.world_size

    def is_by(self, other: Claim) -> bool:
        return (self.pid, self.host) == (other.pid, other.host)

    def in_words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"recover-run with pid {self.pid} on host {self.host}, started {since}"


NOBODY = Claim(0, "", 0.0, "", 0, "", 0, 0)  # claim of a process that only checks a lock


@dataclass(eq=False)
class FolderLock:
    """Lock that lets one run at a time use ``folder``, which exists: all launchers of the run hold FOLDER/launch.lock.

    ::

        free --take, or the first launcher's share--> held by one launcher --share--> held by several launchers
          ^------------------------- the last of these launchers ends (in any way) ---------------------'

    The launchers hold a shared ``flock`` of the file.  The kernel (of the file server, if hosts share the folder)
    releases it when the process ends, so a killed launch leaves nothing to clean up.  The file names the launcher that
    created the run, and the run's id, by which launchers of other nodes and joining launchers recognize their run.

    A launcher can only test the lock by taking it for a moment.  So launchers test it one at a time, while they hold
    FOLDER/launch.lock.order, so that no test is mistaken for a run, and no launcher reads a half-written claim.

    ``take``, ``check``, ``share`` and ``join`` return None, or the reason why the folder cannot be used.
    """

    folder: Path
    own: Claim  # describes this launcher and its run
    say: Callable[[str], None]  # logs warnings
    option: str = "--log-dir"
    """Flag of the command line that names the folder."""
    needed: bool = True
    """If False and the lock file cannot be opened (folder read-only or missing), warn and continue without it."""
    held: bool = field(default=False, init=False)
    run_id: str = field(default="", init=False)
    """Id of the run for which the folder is held."""
    continued: bool = field(default=False, init=False)
    """True if this launcher of node 0 was started again while other nodes continue its run and hold the folder."""
    _found_free: bool = field(default=False, init=False)
    _without: bool = field(default=False, init=False)
    _has_locks: bool = field(default=True, init=False)
    _descriptor: int = field(default=-1, init=False)

    def take(self) -> str | None:
        """Take the folder for a new run."""
        return self._opened(self._take)

    def check(self) -> str | None:
        """Check that the folder is free, or held by a run that may be this launcher's: as many nodes, the same port."""
        return self._opened(self._check)

    def share(self, run_id: str) -> str | None:
        """Hold the folder for the run ``run_id``, if the folder is free or another launcher of that run holds it."""
        return None if self.held else self._opened(lambda: self._share(self.run_id or run_id))

    def join(self, own_id: str) -> str | None:
        """Choose the run for which ``share`` will hold the folder: the run that uses it, or else ``own_id``."""
        return self._opened(lambda: self._join(own_id))

    def end(self, code: int | None, reason: str) -> None:
        """Record the end of the run that this launcher created; ``code``: None before a new start.  Raises OSError."""
        if self.held and (claim := self._read()) and claim.is_by(self.own):
            self._write(replace(claim, ended=True, code=code, reason=reason[:LONGEST_REASON]))

    def look(self) -> str | None:
        """Return the reason if a run uses the folder, else None; create no file in an unused folder."""
        return self._opened(lambda: self._join("")) if (self.folder / LOCK_FILE).exists() else None

    # --- implementation ---

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
                self.say(f"{where}: another run that writes to this folder would not be noticed")
                return None
            return f"{self.option} {self.folder}: {LOCK_FILE} cannot be used ({error.strerror}): choose another folder"

    def _take(self) -> str | None:
        begun, announced = time.monotonic(), False
        while True:
            with self._look() as (free, claim):
                # A repeated start ignores the lock, because a node lost in the previous start may hold it for long.
                repeated_start = claim is not None and claim.ended and claim.code is None and claim.is_by(self.own)
                if free or repeated_start:
                    self._claim(self.own, claim)
                    self.continued = False
                    return None
            # If node 0's launcher was started again, other launchers of the earlier run end soon, or continue that run.
            self.continued = bool(claim and not claim.ended and claim.job == self.own.job and self.own.nnodes > 1)
            patience = 2 * ENDING_SECONDS if self.continued else ENDING_SECONDS if claim and claim.ended else 0.0
            if time.monotonic() >= begun + patience:
                return self._in_use(claim)
            if self.continued and not announced:
                announced = True
                self.say(f"{self._in_use(claim)}: waiting up to {patience:g} s for the run to end")
            time.sleep(_LOOK_SECONDS)

    def _check(self) -> str | None:
        with self._look() as (free, claim):
            fits = claim and (claim.nnodes, claim.master_port) == (self.own.nnodes, self.own.master_port)
        return None if free or fits else self._in_use(claim)

    def _join(self, own_id: str) -> str | None:
        with self._look() as (free, claim):
            joined = claim if claim and not claim.ended and claim.job == self.own.job else None
            self._found_free = joined is None
            self.run_id = joined.run_id if joined else own_id
        return None if free or joined else self._in_use(claim)

    def _share(self, run_id: str) -> str | None:
        with self._look() as (free, claim):
            if self._found_free and claim and not claim.ended and claim.job == self.own.job:
                run_id = claim.run_id  # another joining launcher has claimed the folder since ``join``
            if claim and claim.run_id == run_id:
                self.held, self.run_id = True, run_id
            elif free:
                self._claim(replace(self.own, run_id=run_id), claim)
        return None if self.held else self._in_use(claim)

    @contextlib.contextmanager
    def _look(self) -> Iterator[tuple[bool, Claim | None]]:
        """Yield whether the folder is free, and its claim.  Until the exit, no other launcher tests or takes the lock.

        On exit, this launcher keeps the lock if ``held`` is set, else releases it.
        """
        with open(self._open(ORDER_FILE), "rb") as order:
            self._flock(order.fileno(), fcntl.LOCK_EX)
            try:
                free = self._flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not free:
                    self._flock(self._descriptor, fcntl.LOCK_SH)  # a lock makes NFS read the file from the server
                yield free, self._read()
            finally:
                self._flock(self._descriptor, fcntl.LOCK_SH if self.held else fcntl.LOCK_UN)

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def _flock(self, descriptor: int, kind: int) -> bool:
        """Change the lock to ``kind``; return False only if another lock prevents that.  If the disk has no locks, warn
        once and return True."""
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
        """Write ``claim`` and set ``held``, while no other launcher holds the lock; ``last``: the file's old claim."""
        if last is not None and not last.ended and last.host != claim.host:
            last_used = f"{self.folder} was used by {last.in_words()}, which has not reported its end"
            self.say(f"{last_used}: if this file system has no locks between hosts, that run may still be live")
        self._write(claim)
        self.held, self.run_id = True, claim.run_id

    def _in_use(self, claim: Claim | None) -> str:
        user = claim.in_words() if claim else "another launch"
        if self.continued:
            return f"{self.option} {self.folder} is in use by the other nodes of this run, which was started by {user}"
        fix = "choose another folder, or wait until that run has ended"
        return f"{self.option} {self.folder} is in use by another run ({user}): {fix}"

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
    """DIR/secret: the secret that a launch generated, stored for recover-status of the same user.

    A secret that the user chose is never written.  The file has mode 0600 from its first byte on and gets its name when
    it is complete; a link of that name is replaced, not followed.  The file is removed at the end of the launch or, if
    the launcher was killed, by the next launch.  A leftover file is useless: its secret was valid for one launch only.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write nothing yet; ``say``, called in any thread, logs errors of the disk."""
        self._path = folder / SECRET_FILE
        self.writing = BackgroundWriter(str(self._path), say)

    def write(self, secret: str) -> None:
        """Write the file.  It exists when this method returns, unless the disk fails or is too slow."""
        self.writing.submit(lambda: _write_secret(self._path, secret), 1)
        self.writing.wait_done()

    def remove(self) -> None:
        """Remove the secret file of this launch or of an earlier launch."""
        self.writing.submit(lambda: _remove_secret(self._path), 1)


def _write_secret(path: Path, secret: str) -> None:
    if not _may_replace(path):
        raise FileExistsError(0, "a file of that name, which no launch has written, exists")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            if os.fstat(descriptor).st_mode & 0o077:
                raise PermissionError(0, "this file system does not protect the file from other users")
            file.write(secret.encode() + b"\n")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_secret(path: Path) -> None:
    if _may_replace(path):
        path.unlink(missing_ok=True)


def _may_replace(path: Path) -> bool:
    """Return whether ``path`` was written by a launch, is a link, or does not exist."""
    if path.is_symlink():
        return True
    try:
        with open(path, "rb", 0, opener=lambda _, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            return _OURS.fullmatch(os.read(file.fileno(), 66)) is not None
    except FileNotFoundError:
        return True


WORKERS_FILE = "workers.json"

Entries = dict[int, dict[str, object]]
"""Entries of workers.json by worker id."""


class WorkersFile:
    """workers.json: the state and end of each worker, for users and tools, updated at every change.

    A JSON list of objects (the fields of ``states.WorkerProcess``), sorted by worker id.  If launchers of several nodes
    share the folder, each replaces its own workers' entries and keeps the other entries of the same run.  The lock file
    ``workers.json.lock`` orders the writers and names the run; entries of an earlier run are dropped.  The file is
    replaced by renaming, so no reader ever sees a partial file, and a killed launcher never leaves a partial file.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write nothing yet; ``say``, called in any thread, logs errors of the disk."""
        self._folder = folder
        self._latest: tuple[str, Entries] = ("", {})
        self._begun = False
        self.writing = BackgroundWriter(str(folder / WORKERS_FILE), say)

    def put(self, run_id: str, workers: Sequence[WorkerProcess]) -> None:
        """Merge all ``workers`` of this launcher into the file; wait for the write unless the disk is slow or fails."""
        self._latest = (run_id, {worker.worker_id: asdict(worker) for worker in workers})
        if self.writing.left < 2:  # one job may write now; a second job will write the latest state
            self.writing.submit(self._write, 1)
        self.writing.wait_done()

    def _write(self) -> None:
        (run_id, own), path = self._latest, self._folder / WORKERS_FILE
        with open(self._folder / (WORKERS_FILE + ".lock"), "a+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            named = lock.read()
            same_run = named == run_id
            if self._begun and named and not same_run:
                return  # the launch started again without this node, or another run uses the folder now
            entries = (_read_entries(path) if same_run else {}) | own
            lines = ",\n".join("  " + json.dumps(entries[worker_id]) for worker_id in sorted(entries))
            temporary = path.with_name(path.name + ".tmp")  # one writer at a time: the lock is held
            temporary.write_text(f"[\n{lines}\n]\n" if entries else "[]\n", encoding="utf-8")
            os.replace(temporary, path)
            if not same_run:  # written last: until then, the entries are ignored
                lock.seek(0)
                lock.truncate()
                print(run_id, end="", file=lock, flush=True)
            self._begun = True


def _read_entries(path: Path) -> Entries:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # the file is missing or has another format: only this launcher's entries are written


class LogFolder:
    """Log folder of a launch, created once; all methods are called in the main thread."""

    def __init__(
        self, folder: Path | None, lock: FolderLock | None, loop: EventLoop, say: Callable[[str], None],
        other_locks: Sequence[FolderLock] = (),
    ) -> None:  # fmt: skip
        """Write nothing yet.  ``lock``: of ``folder``; ``other_locks``: of other folders; ``say`` logs disk errors."""
        self._lock = lock
        self._say = partial(loop.call_from_thread, say)
        self._locks = [held for held in (lock, *other_locks) if held]
        self._logs: list[BackgroundWriter] = []
        self._opened = set[Path]()  # logs that this launch has opened: a prepared process may have ended
        self._workers_file = WorkersFile(folder, self._say) if folder else None
        self._secret_file = SecretFile(folder, self._say) if folder else None
        self._secret_is_ours = False

    def share(self, run_id: str) -> str | None:
        """Hold all folders for the run ``run_id``; return the reason if one of them cannot be held, else None."""
        return next((reason for lock in self._locks if (reason := lock.share(run_id))), None)

    def open_log(self, path: Path) -> LogFile:
        log = LogFile(path, self._say, again=path in self._opened)
        self._opened.add(path)
        self._logs = [file for file in self._logs if not file.finished] + [log]
        return log

    def write_workers(self, run_id: str, workers: Sequence[WorkerProcess]) -> bool:
        """Update workers.json.  Return False, without writing, if the folder is not held yet: call it again later."""
        if self._lock is not None and not self._lock.held:
            return False
        if self._workers_file is not None:
            self._workers_file.put(self._lock.run_id if self._lock else run_id, workers)
        return True

    def keep_secret(self, secret: str) -> None:
        """Store the secret that this launch generated, for recover-status of the same user; ``finish`` removes it."""
        if self._secret_file is not None:
            self._secret_file.write(secret)
            self._secret_is_ours = True

    def forget_secret(self) -> None:
        """Remove the secret file that an earlier launch has left because its launcher was killed."""
        if self._secret_file is not None:
            self._secret_file.remove()

    def finish(self, code: int | None, reason: str) -> None:
        """Write all pending data, unless the disk fails or hangs, and record the launch's end in the lock files.

        ``code``, ``reason``: exit code (None: the launch starts again) and reason of the end, which recover-status
        shows if no coordinator has led.
        """
        files = list(self._logs)
        if self._workers_file is not None:
            files.append(self._workers_file.writing)
        if self._secret_file is not None:
            if self._secret_is_ours:
                self._secret_file.remove()
            files.append(self._secret_file.writing)
        for lock in self._locks:
            end_job = BackgroundWriter("", lambda text: None)  # one per lock: then a hanging disk blocks no other lock
            end_job.submit(partial(lock.end, code, reason), 1)
            files.append(end_job)
        flush_all(files)

    def flush_logs(self) -> None:
        """Write the output that arrived after ``finish``."""
        flush_all(self._logs, PATIENCE_SECONDS)
