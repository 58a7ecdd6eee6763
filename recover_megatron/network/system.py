"""Kernel interfaces of this host: unreachable hosts, forks, and resource limits of the processes of a run.

Silence (``Watch``): if a process dies, the kernel closes its connections, so the peers notice immediately. But a
broken cable, a wrong route or a packet filter between healthy hosts closes no connection; TCP alone would resend for
15 minutes. A connection is *silent* if the kernel of the other host acknowledges nothing. One thread of the process
checks all connections passed to ``watch``:

    data is in flight   the thread shuts down a connection that is silent for ``SECONDS``, which wakes waiting threads
    otherwise           the kernel sends keepalive probes, and ends the connection if none is answered

A kernel acknowledges data even if the receiving process is stopped or does not read: the connection is then not silent.

Forks (``close_in_children``): a forked process, such as a data loader, closes its copies of its parent's connections.
Otherwise a dead worker's connections would stay open, and its peers would not notice the death. The child only closes
these sockets, because ``shutdown`` would affect the parent's connection. It does not collect its parent's garbage,
because the destructor of a gloo process group waits forever for threads that a forked process does not have.

Optional features (``lacking``, ``memory_file``): a Python built for an older system, such as uv's and conda's before
2026, lacks os.memfd_create and os.pidfd_open; a seccomp filter may refuse one or all of them with ENOSYS or EPERM.
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

_PROBES, _UNACKED, _LAST_ACK = 3, 24, 56  # offsets in ``struct tcp_info`` of linux/tcp.h, which are stable


def unacknowledged(sock: socket.socket) -> float:
    """Return for how many seconds the other host's kernel has not acknowledged waiting data; 0 if no data is waiting.

    Data is waiting if packets are in flight, or more than one window probe is unanswered. (If this host has no route,
    no packets are in flight.) A host whose process does not read still answers each probe.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (unacked,) = struct.unpack_from("I", info, _UNACKED)
    (last_ack,) = struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked or info[_PROBES] > 1 else 0.0


def all_delivered(sock: socket.socket) -> bool:
    """Return whether the other host has acknowledged all data and all received data was read; False after an error."""
    if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        return False
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # the connection has failed; the next read reports the error
    return False


def use_all_descriptors() -> None:
    """Raise this process's limit of open files to the hard limit: unauthenticated connections need descriptors, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@cache
def lacking(name: str) -> str:
    """Return why pidfd_open, memfd_create or pidfd_send_signal (``name``) is missing or refused; empty if it works."""
    try:
        descriptor = os.memfd_create("look") if name == "memfd_create" else os.pidfd_open(os.getpid())
        try:
            if name == "pidfd_send_signal":
                signal.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
    except AttributeError:
        return f"this Python has no {name}: it was built for an older Linux"
    except OSError as error:  # any other error means that no descriptor is free now
        refused = error.errno in (errno.ENOSYS, errno.EPERM)
        return f"{name} is refused here ({error.strerror}) by the kernel or by seccomp" if refused else ""
    return ""


def memory_file(name: str) -> int:
    """Return the descriptor of a new unnamed file in memory, which is freed when its last user closes it.

    Without memfd_create, the file is in /dev/shm or, if that is not writable, in the folder for temporary files.
    Raises OSError if no file can be created.
    """
    if not lacking("memfd_create"):
        return os.memfd_create(name)
    shared = "/dev/shm"
    with tempfile.TemporaryFile(dir=shared if os.access(shared, os.W_OK) else None) as file:
        return os.dup(file.fileno())


LONGEST_FOLDER = 89
"""Greatest number of bytes in the path of a folder for sockets: the kernel accepts 107, and a socket's name adds 18."""


def keep_sockets(environ: Mapping[str, str]) -> None:
    """Make multiprocessing create this process's and its children's sockets in a folder that ``remove_sockets`` finds.

    Python's default folder is removed only if the process that created it exits normally. Does nothing if the path of
    the new folder would be too long for a socket; Python then uses its default folder.
    """
    launch_id = environ.get(LAUNCH_ID_VARIABLE, "")
    folder = f"{tempfile.gettempdir()}/pymp-{launch_id}-{os.getpid()}"
    config: dict[str, str] = getattr(multiprocessing.process.current_process(), "_config", {})
    if launch_id and config.get("tempdir") is None and len(os.fsencode(folder)) <= LONGEST_FOLDER:
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)
            config["tempdir"] = folder


def share_by_lasting_socket() -> None:
    """Make multiprocessing share file descriptors through a socket that no cleaner of TMPDIR can remove.

    A data loader sends each tensor in this way. The socket's file is removed immediately; the parent process connects
    through this process's entry in /proc. Changes nothing if that is not allowed. Call this before sending any tensor.
    """
    from multiprocessing.connection import Listener
    from multiprocessing.resource_sharer import _resource_sharer as sharer  # type: ignore[attr-defined]

    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="pymp-") as folder:
        # Test the permission: if this process may read its parent's entry in /proc, the parent may read this one's.
        os.stat(f"/proc/{os.getppid()}/fd/0")
        within = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        file = f"/proc/self/fd/{within}/listener"  # short even if TMPDIR is long: 107 bytes are allowed
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
    """Remove the ``keep_sockets`` folder of process ``pid`` of a launch, or of all its processes if ``pid`` is None."""
    for folder in Path(tempfile.gettempdir()).glob(f"pymp-{glob.escape(launch_id)}-{'*' if pid is None else pid}"):
        shutil.rmtree(folder, ignore_errors=True)


CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, table: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of a process's control groups and their parents; each of these groups may have a limit.

    ``controller``: "memory" or "pids"; ``table``: a file /proc/PID/cgroup; ``root``: where control groups are mounted.
    Some folders may not exist: a container's group is at ``root`` itself, even if ``table`` names another path.
    """
    lines = table.read_text().splitlines() if table.exists() else ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, group = root / controller if controllers else root, PurePosixPath(name)
        yield from (mount / str(folder).lstrip("/") for folder in (group, *group.parents) if ".." not in folder.parts)


def memory_kills(table: Path = CGROUP, mounted: Path = CGROUPS) -> int:
    """Return the number of processes that the OOM killer has killed in this process's cgroup, workers included.

    Returns 0 if the number is unknown. ``table``, ``mounted``: as ``table`` and ``root`` of ``control_groups``.
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
"""Greatest number of records of the kernel's log per call, in some 0.1 s; hosts with many cores have such long logs."""


class KernelLog:
    """Xid errors in the kernel's log since creation; none if it is unreadable (most containers, dmesg_restrict)."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._log = -1
        self._xids: deque[tuple[int | None, float, str]] = deque(maxlen=1000)  # (pid, seconds since boot, text)
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def xid(self, pid: int) -> str:
        """Return the newest Xid error of process ``pid``, such as "Xid 79 of GPU 0000:c1:00"; empty if none is known.
        If no error names ``pid``, returns the last minute's newest error without pid (a GPU that fell off the bus)."""
        self._read()
        since = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - _XID_SECONDS
        own = [text for named, _, text in self._xids if named == pid]
        others = [text for named, at, text in self._xids if named is None and at > since]
        return (own or others or [""])[-1]

    def _read(self) -> None:
        for _ in range(_MOST_RECORDS if self._log >= 0 else 0):
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:  # the kernel overwrote records before they were read
                continue
            except OSError:  # the log has no more records now, or has become unreadable
                return
            if not record:
                return
            for micros, gpu, number, pid in _XID.findall(record):
                text = f"Xid {number.decode()} of GPU {gpu.decode()}"
                self._xids.append((int(pid) if pid else None, int(micros) / 1e6, text))


def refused() -> list[str]:
    """Return a message for each required system feature that this host lacks."""
    reasons = []
    if not os.path.exists("/proc/self/stat"):
        reasons.append("/proc is not mounted: it is needed to find a launch's processes and a worker's connections")
    libc, result = ctypes.CDLL(None, use_errno=True), ctypes.byref(ctypes.c_int())
    for name, number in (("PR_GET_CHILD_SUBREAPER", 37), ("PR_GET_PDEATHSIG", 2)):
        if libc.prctl(number, result, 0, 0, 0) != 0:
            why = os.strerror(ctypes.get_errno())
            reasons.append(f"prctl({name}) is refused ({why}), but recover-run needs it to end processes: allow prctl")
    return reasons


def open_files() -> int:
    """Return how many files this process may open after ``use_all_descriptors``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def longest_file() -> int | None:
    """Return this process's limit for the size of a file, in bytes; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return soft if soft != resource.RLIM_INFINITY else None


def shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 if it is not writable."""
    try:
        usage = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize if os.access("/dev/shm", os.W_OK) else 0


@dataclass(frozen=True)
class TaskLimit:
    """Limit for the number of processes and threads.  ``how``: advice to raise it to ``{}``, the required limit."""

    name: str
    most: int
    used: int
    how: str

    def remedy(self, wanted: int) -> str:
        return self.how.format(1 << wanted.bit_length())


def task_limits(proc: Path = Path("/proc"), mounted: Path = CGROUPS) -> list[TaskLimit]:
    """Return the limits for processes and threads of this user (unless privileged) and of this process's cgroups."""
    found = []
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and not _unbounded(proc):
        found.append(TaskLimit("ulimit -u", most, _tasks_of(os.getuid(), proc), "run ulimit -u {} before recover-run"))
    for folder in control_groups("pids", proc / "self" / "cgroup", mounted):
        with contextlib.suppress(OSError, ValueError):  # the group has no limit ("max"), or lacks the file
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
    """Return the number of threads, over all processes in ``proc``, of the user with uid ``user``."""
    count = 0
    for entry in proc.iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
    return count


class Forked(Protocol):
    """Owner of connections that a forked process must close, or of threads that a forked process lacks."""

    def close_in_child(self) -> None:
        """Close this owner's descriptors in a forked process, in its only thread. Must not wait for a lock."""


_known: weakref.WeakKeyDictionary[Forked, threading.Condition | None] = weakref.WeakKeyDictionary()
_held: list[threading.Condition] = []
_collects: list[bool] = []
"""Stack with an entry for each fork in progress: True if automatic garbage collection was on before the fork."""


def close_in_children(owner: Forked, lock: threading.Condition | None = None) -> None:
    """Register ``owner``: every process forked later calls ``owner.close_in_child``, as long as ``owner`` exists.

    ``lock``: held during each fork, to give the child a consistent ``owner``; ``close_in_child`` must replace the lock.
    """
    _known[owner] = lock


def forget(owner: Forked) -> None:
    """Remove the registration of ``owner`` after it was closed; does nothing if ``owner`` is not registered."""
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
    _known.clear()  # all owners are closed below; an owner that the child still uses registers again
    for owner in owners:
        with contextlib.suppress(OSError):  # this owner was closed before the fork; close the other owners
            owner.close_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


SECONDS = 5.0
INTERVAL = 1.0
"""Seconds between two checks of the connections."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, int(SECONDS) - 2))


class Watch:
    """Monitor that shuts down connections to hosts that acknowledge no data; a process has one instance."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._since: weakref.WeakKeyDictionary[socket.socket, float | None] = weakref.WeakKeyDictionary()
        """Connection -> monotonic time, in seconds, since which it has been silent; None if it is not silent."""
        self._silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, sock: socket.socket) -> None:
        """Monitor this connection until it is closed."""
        with contextlib.suppress(OSError):  # the connection has ended
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._since[sock] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recover-silence", daemon=True)
                self._thread.start()

    def close_in_child(self) -> None:
        """Reset this monitor: a forked process lacks the thread, and must not check the parent's connections."""
        self._begin()
        close_in_children(self)

    def is_silent(self, sock: socket.socket) -> bool:
        """Return whether this monitor has shut ``sock`` down because the other host acknowledged no data."""
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
        """Shut down the connections that have been silent for ``SECONDS`` at the monotonic time ``now``.

        ``late``: True if this process did not run for a while; silence is then counted from ``now``.
        """
        with self._lock:
            for sock, since in list(self._since.items()):
                try:
                    silent = unacknowledged(sock) > INTERVAL
                except OSError:  # the connection has been closed
                    del self._since[sock]
                    continue
                self._since[sock] = (since if since is not None and not late else now) if silent else None
                if silent and now - (self._since[sock] or now) >= SECONDS:
                    del self._since[sock]
                    self._silent.add(sock)
                    with contextlib.suppress(OSError):  # the connection has ended
                        sock.shutdown(socket.SHUT_RDWR)


_watch = Watch()
close_in_children(_watch)
watch, is_silent = _watch.watch, _watch.is_silent
