"""The processes that a worker starts by multiprocessing: loaders, checkpoint writers and their managers, fork servers.

A batch system sends a signal that is meant for the job to every process of a step.  A worker that handles it writes a
checkpoint and ends; for that it needs its children.  So what it handles when it starts one is blocked in that, and in
what that starts: it is the child's worker who hears it.  Python ends children by SIGTERM, and waits for them: those to
which that does not get through are killed instead.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import popen_fork, process, resource_tracker
from typing import Any

from recover_megatron.integrate import wrap

_OF_EACH = {signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
"""Of a process's own children and timers; nobody sends them to a job."""

KNOWN = "Python 3.12 and 3.13"


def install() -> None:
    """Have all that this process starts from now on begin deaf to what it handles then."""
    wrap(process.BaseProcess, "start", ("self",), _start, KNOWN)
    wrap(popen_fork.Popen, "terminate", ("self",), _terminate, KNOWN)
    # It is started where it is needed first, which need not be with a process.
    wrap(resource_tracker.ResourceTracker, "ensure_running", ("self",), _ensure_running, KNOWN)
    resource_tracker.ensure_running = resource_tracker._resource_tracker.ensure_running  # as fork servers call it


def handled() -> set[int]:
    """The signals for which this process has a handler of Python's, of its own."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OF_EACH}
    return {number for number, it in handlers.items() if callable(it) and it is not signal.default_int_handler}


def moved() -> int:
    """How many bytes this process and all that live of what it has started have read and written, by the kernel."""
    total, left = 0, [os.getpid()]
    while left:
        place = f"/proc/{left.pop()}"
        with suppress(OSError):  # it has ended; or this kernel counts nothing
            with open(f"{place}/io", encoding="ascii") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
            for task in os.listdir(f"{place}/task"):
                with open(f"{place}/task/{task}/children", encoding="ascii") as file:
                    left += map(int, file.read().split())
    return total


@contextmanager
def _blocked(numbers: set[int]) -> Iterator[None]:
    """What the calling thread starts meanwhile has ``numbers`` blocked; what comes meanwhile comes after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def start(self: Any) -> None:
        deaf_to = handled()
        with _blocked(deaf_to):
            original(self)
        self._popen.deaf = signal.SIGTERM in deaf_to

    return start


def _terminate(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def terminate(self: Any) -> None:
        if getattr(self, "deaf", False):
            self.kill()
        else:
            original(self)

    return terminate


def _ensure_running(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def ensure_running(self: Any) -> None:
        # What a killed worker has left in /dev/shm it removes; a line about that would be taken for the worker's last.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
        try:
            with _blocked(handled()):  # it unblocks some itself
                original(self)
        finally:
            sys.warnoptions.pop()

    return ensure_running
