"""Early notice of a worker's death, by robust mutexes, which the kernel releases before it frees the worker's memory.

The kernel closes the sockets of a killed process, and makes its pidfd readable, only after it has written any core and
freed the process's memory. To free it takes 0.1 s per gigabyte on an idle machine, several times longer on a busy one.
Before the kernel frees the memory, it releases the robust mutexes (``pthread_mutexattr_setrobust``) of a dying thread,
whatever the process holds: another thread that waits for such a mutex gets EOWNERDEAD within a few milliseconds. So
worker and launcher share a page with a robust mutex::

    launcher                                    worker
    DeathWatch.make(): creates the page     --> hold(): a thread locks the mutex, then posts the semaphore, and sleeps
    begin(): a thread waits for the semaphore,
             then for the mutex             <-- the thread ends by a fatal signal, exit, exec or a return
    on_dying()

docs/membership.md describes the meaning and the limits of EOWNERDEAD. If robust mutexes are missing, or the worker
cannot open the page, only the pidfd reports the death.
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
"""Offsets of the fields in the page, and the size of the page.

``pthread_mutex_t`` and ``sem_t`` are at most 48 bytes long in glibc and musl.
"""
_ATTRIBUTE_BYTES = 64
_PROCESS_SHARED = _ROBUST = 1
_PROBE_SECONDS = 2
FATAL = b"Fatal Python error: "
"""Beginning of the line that Python's faulthandler prints on a fatal signal."""


def _tag(name: str) -> bytes:
    """Return the tag that identifies the page ``name``.

    It contains the version of the C library, because the layout of a mutex depends on that version.
    """
    return f"{name} {' '.join(platform.libc_ver())}".encode()[: _SIZE - _TAG - 1]


class _Page:
    """Page of memory that a launcher shares with one worker; stays mapped while a thread of this process may use it."""

    def __init__(self, descriptor: int) -> None:
        """Map the page from the file with this descriptor. Raises OSError."""
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # forked children must not use the mutex
        self._bytes = (ctypes.c_char * _SIZE).from_buffer(self._memory)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mutex, self._semaphore = (ctypes.byref(self._bytes, offset) for offset in (_MUTEX, _SEMAPHORE))

    def prepare(self, name: str) -> None:
        """Initialize the mutex and the semaphore, and write the tag; the launcher calls this once. Raises OSError."""
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
        """Return whether this is the page ``name``, created with the C library version of this process."""
        return self._memory[_TAG:_SIZE].rstrip(b"\0") == _tag(name)

    @property
    def left(self) -> bool:
        """True if the worker has left the run normally, so that the end of its process is no death."""
        return self._memory[_LEFT] != 0

    @left.setter
    def left(self, left: bool) -> None:
        self._memory[_LEFT] = left

    @property
    def holder(self) -> int:
        """Pid of the process whose thread locked the mutex, even if the process has died; 0 if no thread locked it."""
        return int.from_bytes(self._memory[_PID : _PID + 8], "little")

    @holder.setter
    def holder(self, pid: int) -> None:
        self._memory[_PID : _PID + 8] = pid.to_bytes(8, "little")

    def hold(self, tried: threading.Event) -> None:
        """Lock the mutex, write this process's pid, post the semaphore, and sleep until the process ends.

        Returns only if another thread has the mutex. Sets ``tried`` after the attempt to lock, successful or not.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        locked = self._libc.pthread_mutex_trylock(self._mutex) == 0
        if locked:
            self.holder = int(os.readlink("/proc/self"))  # in the launcher's pid namespace, as /proc belongs to it
            self.post()
        tried.set()
        if locked:
            while True:
                self._libc.pause()

    def post(self) -> None:
        self._libc.sem_post(self._semaphore)

    def wait_held(self) -> None:
        """Wait until ``post`` has been called."""
        while self._libc.sem_wait(self._semaphore) and ctypes.get_errno() == errno.EINTR:
            pass

    def wait_given_up(self) -> bool:
        """Wait until the thread that has the mutex ends. Return False if the wait ended for another reason."""
        return bool(self._libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD)

    def is_given_up(self, seconds: int) -> bool:
        """Wait at most ``seconds`` until the thread that has the mutex ends. Return True if it has ended."""
        until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
        return bool(self._libc.pthread_mutex_timedlock(self._mutex, until) == errno.EOWNERDEAD)


def _new_page(name: str) -> tuple[_Page, int]:
    """Create a page; return it and the descriptor of its file. Raises OSError if a robust mutex cannot be created."""
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
    """Return the reason why robust mutexes do not report deaths on this host; an empty text if they do.

    Tests a real mutex whose thread ends, since a kernel such as gVisor accepts the calls without any effect.
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
    """Launcher's part of the death notice for one worker."""

    def __init__(self) -> None:
        """Create the page. Raises OSError if robust mutexes are missing."""
        name = secrets.token_hex(8)
        self._page, self._descriptor = _new_page(name)
        self._closed = False
        self._process: int | None = None
        self.holder = 0
        """Pid of the worker's process that has the mutex; 0 until it is known.

        If the launcher started a wrapper script, this is a child of the script.
        """
        self.variables = {DEATH_NOTICE_VARIABLE: f"{name} /proc/{os.getpid()}/fd/{self._descriptor}"}
        """Environment variables that the worker's process needs to open the page: name -> value."""

    @classmethod
    def make(cls) -> DeathWatch | None:
        """Return a watch for a worker that is about to be started; None if robust mutexes do not work on this host."""
        if lacking():
            return None
        try:
            return cls()
        except OSError:
            return None

    @property
    def left(self) -> bool:
        """True if the worker has left the run normally, so that the end of its process is no death."""
        return self._page.left

    def begin(self, on_dying: Callable[[], object]) -> None:
        """Start a thread that calls ``on_dying`` once, as soon as the kernel ends the worker's threads.

        It never calls ``on_dying`` if the worker has not locked the mutex. If no thread can be started, ``on_dying`` is
        not called either.
        """

        def wait() -> None:
            self._page.wait_held()
            if self._closed:
                return
            with suppress(OSError, AttributeError):  # the process has ended, or Python has no pidfd_open
                self._process = os.pidfd_open(self._page.holder)
            self.holder = self._page.holder
            if self._page.wait_given_up() and not self._closed:
                on_dying()

        with suppress(RuntimeError):
            threading.Thread(target=wait, name="recover-death-watch", daemon=True).start()

    def kill_holder(self) -> None:
        """Send SIGKILL to the process ``holder``; a later process with the same pid is safe.

        Raises OSError if no pidfd of the process is open, or the signal is refused.
        """
        if self._process is None:
            raise ProcessLookupError(errno.ESRCH, f"no pidfd of process {self.holder} is open")
        with suppress(ProcessLookupError):  # the process has ended
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching; call this after the worker's process was reaped, or could not be started."""
        if not self._closed:
            self._closed = True
            self._page.post()
            for descriptor in (self._descriptor, self._process):
                if descriptor is not None:
                    os.close(descriptor)


_held: _Page | None = None
"""Page that this worker shares with its launcher; None if there is no such page."""


def hold(environ: Mapping[str, str]) -> bool:
    """Lock the mutex that this worker shares with its launcher. Return whether the launcher gets an early notice.

    Starts a thread that sleeps until the process ends. Enables Python's faulthandler unless the script has done so,
    because its output on stderr reports a fatal signal to the launcher before a core is written.
    """
    global _held
    name, _, path = environ.get(DEATH_NOTICE_VARIABLE, "").partition(" ")
    if _held is not None or not path:
        return _held is not None
    if not faulthandler.is_enabled():
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(file=2)
    try:
        with open(path, "r+b", buffering=0) as file:
            page = _Page(file.fileno())
        if not page.is_named(name):  # for example: this process runs in another container, or its launcher has ended
            return False
        tried = threading.Event()
        threading.Thread(target=page.hold, args=(tried,), name="recover-death-notice", daemon=True).start()
    except (OSError, ValueError, RuntimeError):
        return False  # only the worker's pidfd will report its death
    _held = page
    tried.wait()
    return page.holder == int(os.readlink("/proc/self"))


def leaving() -> None:
    """Report to the launcher that this worker leaves the run normally, so that the end of its process is no death."""
    if _held is not None:
        _held.left = True


def _forget() -> None:
    global _held
    _held = None


os.register_at_fork(after_in_child=_forget)
