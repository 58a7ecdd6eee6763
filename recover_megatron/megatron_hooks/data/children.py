"""Child processes of a worker (loaders, checkpoint writers, their managers, fork servers) that survive a job's signals.

A batch system such as SLURM sends a signal to every process of a job step.  A worker that handles the signal writes a
checkpoint and exits.  For the checkpoint it needs its children, so they block all signals that the worker handled when
it started them; children of these children inherit the blocked signals.  Python terminates children with SIGTERM and
waits for their exit; children that block SIGTERM are killed instead.
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
"""Signals from a process's own children and timers, which a batch system does not send to a job."""

KNOWN = "Python 3.12 and 3.13"


def install() -> None:
    """Make each later child of this process block the signals that this process handles when it starts the child."""
    wrap(process.BaseProcess, "start", ("self",), _start, KNOWN)
    wrap(popen_fork.Popen, "terminate", ("self",), _terminate, KNOWN)
    # Python may start its resource tracker, also a child, without ``BaseProcess.start``.
    wrap(resource_tracker.ResourceTracker, "ensure_running", ("self",), _ensure_running, KNOWN)
    resource_tracker.ensure_running = resource_tracker._resource_tracker.ensure_running  # fork servers call this name


def handled() -> set[int]:
    """Return the signals for which this process has installed a Python handler."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OF_EACH}
    return {number for number, one in handlers.items() if callable(one) and one is not signal.default_int_handler}


def moved() -> int:
    """Return the bytes that this process and its live descendants have read and written (the kernel's counters)."""
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
    """Context that blocks the signals ``numbers`` in the calling thread and in processes started in the context.

    A signal that is still pending at the end of the context is delivered then.
    """
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
        # The tracker removes files of a killed worker from /dev/shm; its warning would be the last line of the log.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
        try:
            with _blocked(handled()):  # the tracker itself unblocks some signals
                original(self)
        finally:
            sys.warnoptions.pop()

    return ensure_running
