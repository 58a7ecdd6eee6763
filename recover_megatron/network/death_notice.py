"""Early notice of a worker's death, by robust mutexes, which the kernel releases before anything else.

The kernel closes the sockets of a killed process, and makes its pidfd readable, only after it has freed the process's
memory: 0.1 s per gigabyte on a quiet machine, several times that on a busy one, and after any core is written. It
releases a thread's robust mutexes (``pthread_mutexattr_setrobust``) before that, whatever the process holds: a waiting
thread gets EOWNERDEAD within a few milliseconds. So worker and launcher share a page with such a mutex::

    launcher                                    worker
    DeathWatch.make(): the page, a variable --> hold(): a thread locks the mutex, then posts the semaphore, and sleeps
    begin(): a thread waits for the semaphore,
             then for the mutex             <-- the thread ends: a fatal signal, exit, exec, or a return
    on_dying()

docs/membership.md has the meaning and the limits of EOWNERDEAD. Without a robust mutex, or if the worker cannot reach
the page, only the pidfd reports the end.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import mmap
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from recover_megatron.network.system import memory_file
from recover_megatron.variables import DEATH_NOTICE_VARIABLE

_MUTEX, _SEMAPHORE, _LEFT, _PID, _TAG, _SIZE = 0, 64, 128, 136, 192, 4096
"""Offsets in the page, and its size: ``pthread_mutex_t`` and ``sem_t`` take at most 48 bytes in glibc and musl."""
_ATTRIBUTE_BYTES = 64
_PROCESS_SHARED = _ROBUST = 1
_PROBE_SECONDS = 2
FATAL = b"Fatal Python error: "
"""Beginning of the line by which faulthandler reports a fatal signal."""


def _tag(name: str) -> bytes:
    """Return the mark of the page ``name``, with the C library's version: each has its own layout of a mutex."""
    return f"{name} {' '.join(platform.libc_ver())}".encode()[: _SIZE - _TAG - 1]


class _Page:
    """Shared memory. It stays mapped for as long as a thread of this process may use it."""

    def __init__(self, descriptor: int) -> None:
        """Map the page. Raises OSError."""
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a forked child does not use it
        self._bytes = (ctypes.c_char * _SIZE).from_buffer(self._memory)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mutex, self._semaphore = (ctypes.byref(self._bytes, offset) for offset in (_MUTEX, _SEMAPHORE))

    def prepare(self, name: str) -> None:
        """Create mutex and semaphore; by the launcher, once. Raises OSError."""
        attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        libc = self._libc
        for failed in (
            libc.pthread_mutexattr_init(attribute),
            libc.pthread_mutexattr_setpshared(attribute, _PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attribute, _ROBUST),
            libc.pthread_mutex_init(self._mutex, attribute),
            ctypes.get_errno() if libc.sem_init(self._semaphore, 1, 0) else 0,
        ):
            if failed:
                raise OSError(failed, os.strerror(failed))
        self._memory[_TAG : _TAG + len(_tag(name))] = _tag(name)

    def is_named(self, name: str) -> bool:
        """Return True for the page ``name``, if it was created with the C library of this process."""
        return self._memory[_TAG:_SIZE].rstrip(b"\0") == _tag(name)

    @property
    def left(self) -> bool:
        """True when the worker has left the run in order, so that its end is no death."""
        return self._memory[_LEFT] != 0

    @left.setter
    def left(self, left: bool) -> None:
        self._memory[_LEFT] = left

    @property
    def holder(self) -> int:
        """Pid of the process whose thread holds the mutex, or held it."""
        return int.from_bytes(self._memory[_PID : _PID + 8], "little")

    @holder.setter
    def holder(self, pid: int) -> None:
        self._memory[_PID : _PID + 8] = pid.to_bytes(8, "little")

    def hold(self, tried: threading.Event) -> None:
        """Lock the mutex, announce it, and sleep forever; return if another thread holds it already."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        locked = self._libc.pthread_mutex_trylock(self._mutex) == 0
        if locked:
            self.holder = int(os.readlink("/proc/self"))  # pid in the launcher's namespace, whose /proc is used
            self.post()
        tried.set()
        if locked:
            while True:
                self._libc.pause()

    def post(self) -> None:
        self._libc.sem_post(self._semaphore)

    def wait_held(self) -> None:
        """Wait until ``post`` was called."""
        while self._libc.sem_wait(self._semaphore) and ctypes.get_errno() == errno.EINTR:
            pass

    def wait_given_up(self) -> bool:
        """Wait until the thread that holds the mutex ends. Return False if the mutex cannot report that."""
        return bool(self._libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD)

    def is_given_up(self, seconds: int) -> bool:
        """Wait at most ``seconds`` for the end of the thread that holds the mutex. Return whether it was reported."""
        until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
        return bool(self._libc.pthread_mutex_timedlock(self._mutex, until) == errno.EOWNERDEAD)


def _new_page(name: str) -> tuple[_Page, int]:
    """Return a page that is ready, and the descriptor of its file. Raises OSError if none can be created."""
    descriptor = memory_file("recover-death-notice")
    try:
        os.ftruncate(descriptor, _SIZE)
        page = _Page(descriptor)
        page.prepare(name)
    except (OSError, AttributeError) as error:
        os.close(descriptor)
        raise OSError(errno.ENOSYS, f"cannot create a robust mutex ({error})") from error
    return page, descriptor


@cache
def lacking() -> str:
    """Return why deaths are known only by the pidfd on this host, as text; empty: robust mutexes report them.

    The test is a thread that ends while it holds a mutex: a kernel may accept the calls without any effect (gVisor).
    """
    try:
        page, descriptor = _new_page("try")
        os.close(descriptor)
        thread = threading.Thread(target=page._libc.pthread_mutex_lock, args=(page._mutex,))
        thread.start()
        thread.join()
    except (OSError, RuntimeError) as error:
        return f"robust mutexes are not available here ({error})"
    return "" if page.is_given_up(_PROBE_SECONDS) else "this kernel does not release the robust mutexes of dead threads"


class DeathWatch:
    """The launcher's side, for one worker: calls ``on_dying`` as soon as the kernel ends the worker's threads."""

    def __init__(self) -> None:
        """Create the page. Raises OSError without robust mutexes."""
        name = secrets.token_hex(8)
        self._page, self._descriptor = _new_page(name)
        self._closed = False
        self._process: int | None = None
        self.holder = 0
        """Pid of the process that holds the mutex, once it is known; under a wrapper a child of the wrapper."""
        self.variables = {DEATH_NOTICE_VARIABLE: f"{name} /proc/{os.getpid()}/fd/{self._descriptor}"}
        """Variables for the environment of the worker's process."""

    @classmethod
    def make(cls) -> DeathWatch | None:
        """Return a watch for a worker that is about to be started; None if none is available."""
        if lacking():
            return None
        try:
            return cls()
        except OSError:
            return None

    @property
    def left(self) -> bool:
        """True when the worker has left the run in order, so that its end is no death."""
        return self._page.left

    def begin(self, on_dying: Callable[[], object]) -> None:
        """Watch from now on. ``on_dying`` is called in a thread, once; never if the worker does not hold the mutex.

        If no thread can be started nothing is reported.
        """

        def wait() -> None:
            self._page.wait_held()
            if self._closed:
                return
            with suppress(OSError, AttributeError):  # the process has ended already, or pidfds are missing
                self._process = os.pidfd_open(self._page.holder)
            self.holder = self._page.holder
            if self._page.wait_given_up() and not self._closed:
                on_dying()

        with suppress(RuntimeError):
            threading.Thread(target=wait, name="recover-death-watch", daemon=True).start()

    def kill_holder(self) -> None:
        """Send SIGKILL to the process ``holder``, never to a later user of its pid. Raises OSError."""
        if self._process is None:
            raise ProcessLookupError(errno.ESRCH, f"no pidfd of process {self.holder} is open")
        with suppress(ProcessLookupError):  # it has gone
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Report nothing more: the worker's process was reaped, or not started."""
        if not self._closed:
            self._closed = True
            self._page.post()
            for descriptor in (self._descriptor, self._process):
                if descriptor is not None:
                    os.close(descriptor)


_held: _Page | None = None
"""Page that this process shares with its launcher; None: none."""


def hold(environ: Mapping[str, str]) -> bool:
    """Let the launcher detect the death of this process at once. Return whether the launcher will.

    A thread is started that sleeps until the process ends. Python's faulthandler is enabled if the script has not done
    so: its output on stderr reports a fatal signal to the launcher before a core is written.
    """
    global _held
    name, _, path = environ.get(DEATH_NOTICE_VARIABLE, "").partition(" ")
    if _held is not None or not path:
        return _held is not None
    if not faulthandler.is_enabled():
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(file=2)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            page = _Page(descriptor)
        finally:
            os.close(descriptor)
        if not page.is_named(name):  # for example, this process is in a separate container, or its launcher has ended
            return False
        tried = threading.Event()
        threading.Thread(target=page.hold, args=(tried,), name="recover-death-notice", daemon=True).start()
    except (OSError, ValueError, RuntimeError):
        return False  # the pidfd reports the end, later
    _held = page
    tried.wait()
    return page.holder == int(os.readlink("/proc/self"))


def leaving() -> None:
    """Note that this worker leaves the run in order: its end is no death from now on."""
    if _held is not None:
        _held.left = True


def _forget() -> None:
    global _held
    _held = None


os.register_at_fork(after_in_child=_forget)
