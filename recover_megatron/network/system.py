"""Kernel interfaces of this host: dead connections, forks, and resource limits of the processes of a run.

Silence (``Watch``): the other host acknowledges nothing any more. A death closes connections, which peers notice at
once. A broken cable, a wrong route or a filter between two healthy hosts closes nothing: TCP alone would try
for a quarter of an hour. So one thread of the process checks the connections passed to ``watch``:

    data is in flight, and for ``SECONDS`` the other kernel has acknowledged nothing --> shut: waiting threads are woken
    no data is in flight: the kernel asks (keepalive), and ends the connection itself

The other kernel answers whatever its process does: a process that is stopped, or reads nothing, is not silent.

Forks (``close_in_children``): a forked process, such as a data loader, closes connections that its parent holds open.
Otherwise a worker's connections would stay open after its death, unnoticed by all peers. Sockets are closed, never shut
down: that would affect the parent's connection. The child does not collect its parent's garbage: the destructor of a
gloo process group waits forever for threads that a forked process does not have.

Optional features (``lacking``, ``memory_file``): a Python that was built for an older system lacks newer functions
(uv's and conda's until 2026: os.memfd_create, os.pidfd_open), and a seccomp filter answers ENOSYS or EPERM.
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
    """Return for how many seconds the other host's kernel has acknowledged nothing, while data waits for it.

    Data waits if packets are in flight, or more than one window probe is unanswered: without a route on this host
    nothing is in flight. A host whose process reads nothing answers each probe.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (unacked,) = struct.unpack_from("I", info, _UNACKED)
    (last_ack,) = struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked or info[_PROBES] > 1 else 0.0


def all_delivered(sock: socket.socket) -> bool:
    """Return whether the other kernel has received all written data, and all data that it sent was read here."""
    if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        return False
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it has failed, which the next read reports
    return False


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as possible: connections of unauthenticated peers count against it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@cache
def lacking(name: str) -> str:
    """Return why ``os.pidfd_open``, ``os.memfd_create`` or ``signal.pidfd_send_signal`` (which a seccomp filter may
    forbid alone) is missing, as text; empty: available."""
    try:
        descriptor = os.memfd_create("look") if name == "memfd_create" else os.pidfd_open(os.getpid())
        try:
            if name == "pidfd_send_signal":
                signal.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
    except AttributeError:
        return f"this Python has no os.{name}: it was built for an older Linux"
    except OSError as error:  # other errors: no descriptor is free at this time
        refused = error.errno in (errno.ENOSYS, errno.EPERM)
        return f"{name} is refused here ({error.strerror}) by the kernel or by seccomp" if refused else ""
    return ""


def memory_file(name: str) -> int:
    """Return the descriptor of a file in memory without a name, which disappears with its last user.

    Without memfd_create it is created under /dev/shm, or, if that is not writable, in the folder for temporary files.
    Raises OSError if none of these works.
    """
    if not lacking("memfd_create"):
        return os.memfd_create(name)
    shared = "/dev/shm"
    with tempfile.TemporaryFile(dir=shared if os.access(shared, os.W_OK) else None) as file:
        return os.dup(file.fileno())


LONGEST_FOLDER = 89
"""Maximum bytes of a folder for sockets: a socket's name adds 18, and the kernel accepts 107."""


def keep_sockets(environ: Mapping[str, str]) -> None:
    """Make multiprocessing create the sockets of this process and its children where ``remove_sockets`` finds them.

    Python's own folders for them are removed only by the process that created them, if it ends in order. If the path
    would be too long for a socket, Python chooses another one.
    """
    launch_id = environ.get(LAUNCH_ID_VARIABLE, "")
    folder = f"{tempfile.gettempdir()}/pymp-{launch_id}-{os.getpid()}"
    config: dict[str, str] = getattr(multiprocessing.process.current_process(), "_config", {})
    if launch_id and config.get("tempdir") is None and len(os.fsencode(folder)) <= LONGEST_FOLDER:
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)
            config["tempdir"] = folder


def share_by_lasting_socket() -> None:
    """Make this process, which has shared nothing yet, pass descriptors by a socket whose file is removed at once.

    A data loader passes each tensor in this way. Its parent reaches the socket by a descriptor of the file, under
    /proc, so no cleaner of TMPDIR disconnects it. If /proc does not allow that, Python's own way remains.
    """
    from multiprocessing.connection import Listener
    from multiprocessing.resource_sharer import _resource_sharer as sharer  # type: ignore[attr-defined]

    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="pymp-") as folder:
        # A test: if this process may look into its parent's /proc entry, the parent may look into this one's.
        os.stat(f"/proc/{os.getppid()}/fd/0")
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
    """Remove the folder that process ``pid`` of a launch has left (None: the folders of all of its processes)."""
    for folder in Path(tempfile.gettempdir()).glob(f"pymp-{glob.escape(launch_id)}-{'*' if pid is None else pid}"):
        shutil.rmtree(folder, ignore_errors=True)


CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, table: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of a process's control groups, and of their parents, each of which may have a limit.

    ``table``: the process's own ``cgroup`` under /proc; ``root``: where control groups are mounted. A container has its
    own group at ``root``, whatever ``table`` calls it; a batch job has one far below.
    """
    lines = table.read_text().splitlines() if table.exists() else ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, group = root / controller if controllers else root, PurePosixPath(name)
        yield from (mount / str(folder).lstrip("/") for folder in (group, *group.parents) if ".." not in folder.parts)


def memory_kills(table: Path = CGROUP, mounted: Path = CGROUPS) -> int:
    """Return how many processes in this process's cgroup, workers included, the kernel's OOM killer has killed.

    0 if that is unknown. ``table``: this process's cgroups; ``mounted``: where cgroups are.
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
"""Maximum records of the kernel's log per read (some 0.1 s); the logs of hosts with many cores are that long."""


class KernelLog:
    """Xid errors that NVIDIA's driver writes into the kernel's log from now on.

    If that log cannot be read (most containers, kernel.dmesg_restrict) no Xid is known.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._log = -1
        self._xids: deque[tuple[int | None, float, str]] = deque(maxlen=1000)  # process, seconds, text
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def xid(self, pid: int) -> str:
        """Return the newest Xid for process ``pid``, else one without a process (a GPU that has fallen off the bus)
        that is less than a minute old: "Xid 79 of GPU 0000:c1:00"; empty: none."""
        self._read()
        since = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - _XID_SECONDS
        own = [text for named, _, text in self._xids if named == pid]
        others = [text for named, at, text in self._xids if named is None and at > since]
        return (own or others or [""])[-1]

    def _read(self) -> None:
        for _ in range(_MOST_RECORDS if self._log >= 0 else 0):
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:  # the oldest records were overwritten before they were read
                continue
            except OSError:  # no more at this time, or ever
                return
            if not record:
                return
            for micros, gpu, number, pid in _XID.findall(record):
                text = f"Xid {number.decode()} of GPU {gpu.decode()}"
                self._xids.append((int(pid) if pid else None, int(micros) / 1e6, text))


def refused() -> list[str]:
    """Return why nothing can be launched on this host, one line each; empty if the system has all required features."""
    reasons = []
    if not os.path.exists("/proc/self/stat"):
        reasons.append("/proc is not mounted: it is needed to find a launch's processes and a worker's connections")
    libc, result = ctypes.CDLL(None, use_errno=True), ctypes.byref(ctypes.c_int())
    for name, number in (("PR_GET_CHILD_SUBREAPER", 37), ("PR_GET_PDEATHSIG", 2)):
        if libc.prctl(number, result, 0, 0, 0) != 0:
            why = os.strerror(ctypes.get_errno())
            reasons.append(f"prctl({name}) is refused ({why}), but needed to end a launch's processes: allow prctl")
    return reasons


def open_files() -> int:
    """Return how many files one process may open; see ``use_all_descriptors``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def longest_file() -> int | None:
    """Return the limit of a file's size in bytes; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return soft if soft != resource.RLIM_INFINITY else None


def shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0: it is not writable."""
    try:
        usage = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize if os.access("/dev/shm", os.W_OK) else 0


@dataclass(frozen=True)
class TaskLimit:
    """Limit of processes and threads. ``how``: text on how to raise it, with {} for the required number."""

    name: str
    most: int
    used: int
    how: str

    def remedy(self, wanted: int) -> str:
        return self.how.format(1 << wanted.bit_length())


def task_limits(proc: Path = Path("/proc"), mounted: Path = CGROUPS) -> list[TaskLimit]:
    """Return the limits of this process: of its user (not for root, or with its rights), and of its control groups."""
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
    """Return whether RLIMIT_NPROC does not apply to this process: root, CAP_SYS_ADMIN or CAP_SYS_RESOURCE."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith("CapEff:") and int(line.split()[1], 16) & (1 << 21 | 1 << 24):
                return True
    return os.getuid() == 0


def _tasks_of(user: int, proc: Path) -> int:
    """Return the number of processes and threads of a user that are visible here."""
    count = 0
    for entry in proc.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
    return count


class Forked(Protocol):
    """Owner of connections or threads that a forked process does not have or must not keep."""

    def close_in_child(self) -> None:
        """Close descriptors in a forked process; called by its only thread. Must not wait for a lock."""


_known: weakref.WeakKeyDictionary[Forked, threading.Condition | None] = weakref.WeakKeyDictionary()
_held: list[threading.Condition] = []
_collects: list[bool] = []
"""Stack with an entry for each fork in progress: whether this process collects garbage automatically."""


def close_in_children(owner: Forked, lock: threading.Condition | None = None) -> None:
    """Call ``owner.close_in_child`` in every process forked from now on, as long as ``owner`` exists.

    ``lock``: held while this process forks, so that ``owner`` is consistent in the child. (The child must replace it.)
    """
    _known[owner] = lock


def forget(owner: Forked) -> None:
    """Forget an owner that is closed already. Harmless for an unknown one."""
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
    _known.clear()  # a child of this process closes only what this one opens; an owner that is reset registers again
    for owner in owners:
        with contextlib.suppress(OSError):  # it was closed already: the others must be closed all the same
            owner.close_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


SECONDS = 5.0
INTERVAL = 1.0
"""Seconds between two checks of the connections."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, int(SECONDS) - 2))


class Watch:
    """Monitors connections, and shuts silent ones down; there is one instance per process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._since: weakref.WeakKeyDictionary[socket.socket, float | None] = weakref.WeakKeyDictionary()
        """Connection -> time since which it seems silent; None: it does not."""
        self._silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, sock: socket.socket) -> None:
        """Watch this connection from now on, until it is closed."""
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
        """Reset, because a forked process lacks the thread, and does not watch its parent's connections."""
        self._begin()
        close_in_children(self)

    def is_silent(self, sock: socket.socket) -> bool:
        """Return whether ``sock`` was shut because its other host acknowledged nothing."""
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
        """Check all connections; ``late``: this process or its host did not run for a while: discard old results."""
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
                    with contextlib.suppress(OSError):  # the other side has closed it already
                        sock.shutdown(socket.SHUT_RDWR)


_watch = Watch()
close_in_children(_watch)
watch, is_silent = _watch.watch, _watch.is_silent
