"""Child processes that a worker starts by multiprocessing: loaders, checkpoint writers, their managers, fork servers.

A batch system sends a signal for the job to every process of a step.  A worker that handles the signal writes a
checkpoint, for which it needs its children, and exits.  So the signals that a worker handles when it starts a child are
blocked in the child and in the child's children.  Python terminates children with SIGTERM and waits for their exit, so
children that block SIGTERM are killed instead.
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
"""Signals of a process's own children and timers; they are not sent to a job."""

KNOWN = "Python 3.12 and 3.13"


def install() -> None:
    """Make each child that this process starts from now on block the signals that the process handles at that time."""
    wrap(process.BaseProcess, "start", ("self",), _start, KNOWN)
    wrap(popen_fork.Popen, "terminate", ("self",), _terminate, KNOWN)
    # Python starts the resource tracker when it is first needed, not always when a child starts.
    wrap(resource_tracker.ResourceTracker, "ensure_running", ("self",), _ensure_running, KNOWN)
    resource_tracker.ensure_running = resource_tracker._resource_tracker.ensure_running  # as fork servers call it


def handled() -> set[int]:
    """Return the signals for which this process has installed a Python handler."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OF_EACH}
    return {number for number, one in handlers.items() if callable(one) and one is not signal.default_int_handler}


def moved() -> int:
    """Return the bytes that this process and its live descendants have read and written, by the kernel's counters."""
    total, left = 0, [os.getpid()]
    while left:
        place = f"/proc/{left.pop()}"
        with suppress(OSError):  # the process has ended, or this kernel has no counters
            with open(f"{place}/io", encoding="ascii") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
            for task in os.listdir(f"{place}/task"):
                with open(f"{place}/task/{task}/children", encoding="ascii") as file:
                    left += map(int, file.read().split())
    return total


@contextmanager
def _blocked(numbers: set[int]) -> Iterator[None]:
    """Block ``numbers`` in the calling thread and in processes that it starts; pending signals arrive afterwards."""
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
        # The tracker removes what a killed worker left in /dev/shm; its warning would look like the worker's last line.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
        try:
            with _blocked(handled()):  # the tracker itself unblocks some signals
                original(self)
        finally:
            sys.warnoptions.pop()

    return ensure_running
