"""What this host's kernel tells of connections, and what is asked of it for a process of a run.

Silence (``Watch``): nothing is acknowledged any more, and nobody is told.  A death closes connections, which is noticed
at once.  A broken cable, a wrong route or a filter between two hosts that are well closes nothing: TCP alone would try
for a quarter of an hour.  So one thread of the process looks at the connections that it was given:

    something is under way, and for ``SECONDS`` the other kernel has acknowledged nothing --> shut: who waits is woken
    nothing is under way: the kernel asks (keepalive), and ends the connection itself

The other kernel answers whatever its process does: one that is stopped, or that reads nothing, is not silent.

Forks (``close_in_children``): a forked process, such as a data loader, closes what its parent holds open. Else a
worker's connections would stay open after its death, and nobody would see an end. Sockets are closed, never shut down:
that would reach the parent's connection.  And it collects no garbage of its parent's: the destructor of a process group
of gloo waits for threads that a forked process has not, for ever.

What is not everywhere (``lacking``, ``memory_file``): a Python that was built for an older system lacks what is newer
(uv's and conda's until 2026: os.memfd_create, os.pidfd_open), and a filter of system calls answers ENOSYS or EPERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import glob
import multiprocessing.process
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol

from recover_megatron.variables import LAUNCH_ID_VARIABLE

_PROBES, _UNACKED, _LAST_ACK = 3, 24, 56  # in ``struct tcp_info`` of linux/tcp.h, whose layout is stable


def unacknowledged(sock: socket.socket) -> float:
    """Seconds for which the other host's kernel has acknowledged nothing, while there is something to acknowledge.

    Packets under way, or more than one question for room that nobody answered: where this host has no route any more
    nothing is under way, and a host whose process reads nothing answers each.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (unacked,) = struct.unpack_from("I", info, _UNACKED)
    (last_ack,) = struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked or info[_PROBES] > 1 else 0.0


def all_delivered(sock: socket.socket) -> bool:
    """Whether the other host's kernel has all that was written, and no word that it sent before that is unread here."""
    if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        return False
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it has failed, which reading tells
    return False


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as this process may: strangers' connections count against it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@cache
def lacking(name: str) -> str:
    """Why there is no ``os.pidfd_open``, ``os.memfd_create`` or ``signal.pidfd_send_signal`` (which a filter of system
    calls may forbid alone), in words for people; empty: there is one."""
    try:
        descriptor = os.memfd_create("look") if name == "memfd_create" else os.pidfd_open(os.getpid())
        try:
            if name == "pidfd_send_signal":
                signal.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
    except AttributeError:
        return f"this Python has no os.{name}: it was built for an older Linux"
    except OSError as error:  # else there is no descriptor at this time
        refused = error.errno in (errno.ENOSYS, errno.EPERM)
        return f"{name} is refused here ({error.strerror}): by the kernel, or by seccomp" if refused else ""
    return ""


def memory_file(name: str) -> int:
    """A descriptor of a file in memory that has no name in any folder, and is gone with its last user.

    Where there is no memfd_create: one under /dev/shm, or, where nobody may write there, in the folder for temporary
    files.  Raises OSError where there is none of these.
    """
    if not lacking("memfd_create"):
        return os.memfd_create(name)
    shared = "/dev/shm"
    with tempfile.TemporaryFile(dir=shared if os.access(shared, os.W_OK) else None) as file:
        return os.dup(file.fileno())


LONGEST_FOLDER = 89
"""Bytes: a socket's name behind it has 18, and the kernel takes 107."""


def keep_sockets(environ: Mapping[str, str]) -> None:
    """Have multiprocessing make the sockets of this process and its children where ``remove_sockets`` finds them.

    Python's own folders for them are removed by the process that made them, if it ends in order.  Where the path would
    be too long for a socket Python chooses another one.
    """
    launch_id = environ.get(LAUNCH_ID_VARIABLE, "")
    folder = f"{tempfile.gettempdir()}/pymp-{launch_id}-{os.getpid()}"
    config: dict[str, str] = getattr(multiprocessing.process.current_process(), "_config", {})
    if launch_id and config.get("tempdir") is None and len(os.fsencode(folder)) <= LONGEST_FOLDER:
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)
            config["tempdir"] = folder


def share_by_lasting_socket() -> None:
    """Have this process, which has shared nothing yet, hand over descriptors by a socket whose file is gone at once.

    A data loader hands over each tensor so.  Its parent reaches the socket by a descriptor of the file, under /proc, so
    no cleaner of TMPDIR cuts it off.  Where /proc does not allow that, Python's own way is left.
    """
    from multiprocessing.connection import Listener
    from multiprocessing.resource_sharer import _resource_sharer as sharer  # type: ignore[attr-defined]

    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="pymp-") as folder:
        os.stat(f"/proc/{os.getppid()}/fd/0")  # which is allowed where the parent is allowed the same of this process
        within = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        file = f"/proc/self/fd/{within}/listener"  # short, whatever TMPDIR is: a socket's path has 107 bytes
        listener = Listener(file, authkey=multiprocessing.process.current_process().authkey, backlog=128)
        address = f"/proc/{os.getpid()}/fd/{os.open(file, os.O_PATH | os.O_CLOEXEC)}"
        listener._listener._unlink()  # type: ignore[attr-defined]
        os.close(within)
        with socket.socket(socket.AF_UNIX) as tried:
            tried.connect(address)
        listener._listener.accept().close()  # type: ignore[attr-defined]
        sharer._listener, sharer._address = listener, address
        sharer._thread = threading.Thread(target=sharer._serve, daemon=True)
        sharer._thread.start()


def remove_sockets(launch_id: str, pid: int | None = None) -> None:
    """Remove the folder that process ``pid`` of a launch has left (None: that all of its processes have left)."""
    for folder in Path(tempfile.gettempdir()).glob(f"pymp-{glob.escape(launch_id)}-{'*' if pid is None else pid}"):
        shutil.rmtree(folder, ignore_errors=True)


CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, told: Path, root: Path) -> Iterator[Path]:
    """Folders of the control groups that a process is in, and of those around them, each of which may have a limit.

    ``told``: the process's own ``cgroup`` under /proc; ``root``: where they are mounted.  A container has its own group
    at ``root``, whatever ``told`` calls it; a batch job has one far below.
    """
    lines = told.read_text().splitlines() if told.exists() else ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, group = root / controller if controllers else root, PurePosixPath(name)
        yield from (mount / str(its).lstrip("/") for its in (group, *group.parents) if ".." not in its.parts)


def memory_kills(table: Path = CGROUP, mounted: Path = CGROUPS) -> int:
    """How many processes in this one's cgroup, where its workers are, too, the kernel has killed for want of memory.

    0 where that is not told.  ``table``: this process's cgroups; ``mounted``: where cgroups are.
    """
    for folder in control_groups("memory", table, mounted):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                counts = dict(row.split() for row in (folder / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0))
    return 0


_XID = re.compile(rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \((?:PCI:)?([^)\s]{1,20})\): (\d+)(?:, pid=(\d+))?", re.MULTILINE)
_XID_SECONDS = 60.0
_MOST_RECORDS = 100_000
"""Of the kernel's log, at one time (some 0.1 s): hosts with many cores keep that many, and workers end seldom."""


class KernelLog:
    """What NVIDIA's driver writes of errors into the kernel's log from now on: Xids, each with a number.

    Where that log cannot be read (most containers, kernel.dmesg_restrict) none is known.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._log = -1
        self._xids: deque[tuple[int | None, float, str]] = deque(maxlen=1000)  # process, seconds, what is told
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def xid(self, pid: int) -> str:
        """The newest Xid that names process ``pid``, else one that names none (a GPU that is off the bus) and is less
        than a minute old: "Xid 79 of GPU 0000:c1:00"; empty: there is none."""
        self._read()
        since = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - _XID_SECONDS
        own = [told for named, _, told in self._xids if named == pid]
        others = [told for named, at, told in self._xids if named is None and at > since]
        return (own or others or [""])[-1]

    def _read(self) -> None:
        for _ in range(_MOST_RECORDS if self._log >= 0 else 0):
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:  # the oldest were overwritten before they were read
                continue
            except OSError:  # no more at this time, or ever
                return
            if not record:
                return
            for micros, gpu, number, pid in _XID.findall(record):
                told = f"Xid {number.decode()} of GPU {gpu.decode()}"
                self._xids.append((int(pid) if pid else None, int(micros) / 1e6, told))


def refused() -> list[str]:
    """Why nothing can be launched on this host, one line each; empty where the system has what a launch rests on."""
    reasons = []
    if not os.path.exists("/proc/self/stat"):
        reasons.append("/proc is not mounted: the processes of a launch, and a worker's connections, are found there")
    libc, told = ctypes.CDLL(None, use_errno=True), ctypes.byref(ctypes.c_int())
    for name, number in (("PR_GET_CHILD_SUBREAPER", 37), ("PR_GET_PDEATHSIG", 2)):
        if libc.prctl(number, told, 0, 0, 0) != 0:
            why = os.strerror(ctypes.get_errno())
            reasons.append(f"prctl({name}) is refused ({why}), and with it what ends a launch's processes: allow prctl")
    return reasons


def open_files() -> int:
    """How many one process may have; see ``use_all_descriptors``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def longest_file() -> int | None:
    """Bytes; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return soft if soft != resource.RLIM_INFINITY else None


def shared_memory() -> int:
    """Bytes of /dev/shm that are left; 0: nobody may write there."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize if os.access("/dev/shm", os.W_OK) else 0


@dataclass(frozen=True)
class TaskLimit:
    """Of processes and threads.  ``remedy``: what to do, with {} for how many there are to be."""

    name: str
    most: int
    used: int
    how: str

    def remedy(self, wanted: int) -> str:
        return self.how.format(1 << wanted.bit_length())


def task_limits(proc: Path = Path("/proc"), mounted: Path = CGROUPS) -> list[TaskLimit]:
    """Those that hold for this process: of its user (not for root, or with its rights), and of its control groups."""
    found = []
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and not _unbounded(proc):
        found.append(TaskLimit("ulimit -u", most, _tasks_of(os.getuid(), proc), "run ulimit -u {} before recover-run"))
    for folder in control_groups("pids", proc / "self" / "cgroup", mounted):
        with contextlib.suppress(OSError, ValueError):  # none here, or "max"
            limit, used = (int((folder / name).read_text()) for name in ("pids.max", "pids.current"))
            how = "raise it to {0} (docker --pids-limit {0}, podPidsLimit in Kubernetes, TasksMax={0} of systemd)"
            found.append(TaskLimit(f"{folder}/pids.max", limit, used, how))
    return found


def _unbounded(proc: Path) -> bool:
    """Whether RLIMIT_NPROC does not hold for this process: root, CAP_SYS_ADMIN or CAP_SYS_RESOURCE."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith("CapEff:") and int(line.split()[1], 16) & (1 << 21 | 1 << 24):
                return True
    return os.getuid() == 0


def _tasks_of(user: int, proc: Path) -> int:
    """Processes and threads of a user, as far as they are seen here."""
    count = 0
    for entry in proc.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
    return count


class Forked(Protocol):
    """What holds connections or threads that a forked process does not have or must not keep."""

    def close_in_child(self) -> None:
        """Called in a forked process, by its only thread. Closes descriptors; must not wait for a lock."""


_known: weakref.WeakKeyDictionary[Forked, threading.Condition | None] = weakref.WeakKeyDictionary()
_held: list[threading.Condition] = []
_collects: list[bool] = []
"""For each fork under way, whether this process collects garbage by itself."""


def close_in_children(owner: Forked, lock: threading.Condition | None = None) -> None:
    """Call ``owner.close_in_child`` in every process forked from now on, as long as ``owner`` lives.

    ``lock``: held while this process forks, so that ``owner`` is whole in the child. (It is the child's to replace.)
    """
    _known[owner] = lock


def forget(owner: Forked) -> None:
    """It is closed already. Harmless for one that is not known."""
    _known.pop(owner, None)


def _before_fork() -> None:
    _collects.append(gc.isenabled())
    gc.disable()
    for lock in list(_known.values()):
        if lock is not None:
            lock.acquire()
            _held.append(lock)


def _after_fork_in_parent() -> None:
    if _collects.pop():
        gc.enable()
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    gc.freeze()
    if any(_collects):
        gc.enable()
    _collects.clear()
    _held.clear()
    owners = list(_known)
    _known.clear()  # a child of this process closes what this one opens; who is reset, not closed, says so again
    for owner in owners:
        with contextlib.suppress(OSError):  # it was closed already: the others must be closed all the same
            owner.close_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


SECONDS = 5.0
INTERVAL = 1.0
"""Between two looks."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, int(SECONDS) - 2))


class Watch:
    """Looks at connections, and shuts the silent ones; there is one for all of the process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._since: weakref.WeakKeyDictionary[socket.socket, float | None] = weakref.WeakKeyDictionary()
        """By connection: since when it is silent, for all that was seen."""
        self._silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, sock: socket.socket) -> None:
        """Look at this connection from now on, until it is closed."""
        with contextlib.suppress(OSError):  # it has ended already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._since[sock] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recover-silence", daemon=True)
                self._thread.start()

    def close_in_child(self) -> None:
        """A forked process has no such thread, and its parent's connections are none of its own."""
        self._begin()
        close_in_children(self)

    def is_silent(self, sock: socket.socket) -> bool:
        """Whether it was shut because nothing was acknowledged."""
        with self._lock:
            return sock in self._silent

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(INTERVAL)
            now = time.monotonic()
            self.look(now, late=now - last > 3 * INTERVAL)
            last = now

    def look(self, now: float, *, late: bool) -> None:
        """``late``: this process, or its host, did not run for a while: what was seen before says nothing."""
        with self._lock:
            for sock, since in list(self._since.items()):
                try:
                    silent = unacknowledged(sock) > INTERVAL
                except OSError:  # it has been closed
                    del self._since[sock]
                    continue
                self._since[sock] = (since if since is not None and not late else now) if silent else None
                if silent and now - (self._since[sock] or now) >= SECONDS:
                    del self._since[sock]
                    self._silent.add(sock)
                    with contextlib.suppress(OSError):  # the other end was faster
                        sock.shutdown(socket.SHUT_RDWR)


_watch = Watch()
close_in_children(_watch)
watch, is_silent = _watch.watch, _watch.is_silent
