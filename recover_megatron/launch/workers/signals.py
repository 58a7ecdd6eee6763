"""Signals of recover-run: how they are received, and what it does on each of them.

Whichever thread of the process receives a signal, Python writes its number into a pipe, which the event loop reads: so
a signal is handled between two callbacks, and never interrupts a callback.  asyncio's ``add_signal_handler`` is not
used, because it receives the numbers in the socket that also wakes the loop for calls from other threads: 278 such
calls fill that socket while a callback is slow, and then a SIGTERM is lost.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Protocol

from recover_megatron.network.event_loop import EventLoop

_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_TWICE_SECONDS = 1.0
"""Seconds within which a second SIGHUP is ignored: when a terminal is closed, the kernel and the shell each send
one."""


class SignalEvents(Protocol):
    """Reactions of the launch to signals, called by the event loop in the main thread."""

    def pass_on(self, number: int) -> None: ...  # forward the signal to all workers
    def stop_asked(self, number: int) -> None: ...  # stop the launch, if it is not stopping yet
    def kill_asked(self) -> None: ...


class LaunchSignals:
    """Translates signals that recover-run receives into ``SignalEvents``, from its creation until ``give_back``.

    ::

        SIGCHLD                     ends the sleep of the loop: the supervisor reaps inherited children after each round
        SIGUSR1, SIGUSR2            passed on to the workers: batch systems send them before a time limit
        SIGINT, SIGTERM, SIGHUP     the first: stop the launch; a second: kill all workers at once

    SIGINT and SIGHUP stay ignored if they were ignored at the start: by nohup, or by a shell for background jobs.
    """

    def __init__(self, loop: EventLoop, events: SignalEvents) -> None:
        self._events = events
        self._asked_at: float | None = None
        signals: list[int] = [signal.SIGTERM, signal.SIGCHLD, *_PASSED_ON]
        of_terminals = (signal.SIGINT, signal.SIGHUP)
        signals += [number for number in of_terminals if signal.getsignal(number) is not signal.SIG_IGN]
        self._loop = loop
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self._read, self.handle_pending)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Python writes to the wake-up descriptor only for signals that have a handler in Python.
        self._before = {number: signal.signal(number, lambda _number, _frame: None) for number in signals}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def give_back(self) -> None:
        """Restore the previous signal handlers, then handle the signals that arrived before that.  Call it once.

        In this order no signal is lost, whichever thread of the process receives it.
        """
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.handle_pending()
        self._loop.remove_reader(self._read)
        os.close(self._read)
        os.close(self._write)

    @property
    def stop_asked(self) -> bool:
        """Return whether SIGINT, SIGTERM or SIGHUP has arrived since the last ``forget``."""
        return self._asked_at is not None

    def forget(self) -> None:
        """Treat the next SIGINT, SIGTERM or SIGHUP as the first one."""
        self._asked_at = None

    def handle_pending(self) -> None:
        """Handle the signals that have arrived, if there are any; the event loop calls this for each signal."""
        numbers = b""
        with suppress(BlockingIOError):
            numbers = os.read(self._read, 4096)
        for number in numbers:
            self._arrived(number)

    def _arrived(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGCHLD:
            return  # it has ended the loop's sleep: the supervisor reaps children after each round
        if number in _PASSED_ON:
            self._events.pass_on(number)
        elif self._asked_at is None:
            self._asked_at = now
            self._events.stop_asked(number)
        elif number != signal.SIGHUP or now - self._asked_at > _TWICE_SECONDS:
            self._events.kill_asked()
