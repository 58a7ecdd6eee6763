"""Event loop of the main thread: descriptors, signals, timers, and calls from other threads.

Nothing is polled: ``run_once`` sleeps until a descriptor is ready, a signal arrives, a timer is due or another thread
calls.  Signals and calls from threads arrive as bytes in pipes, so they are handled between two callbacks and never
interrupt a callback.  ``LaunchSignals`` defines what recover-run does on each signal.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

Callback = Callable[[], object]


class Timer:
    """Call scheduled by ``EventLoop.call_later``; ``cancel`` prevents the call if it has not happened yet."""

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Event loop of the launcher; create, run and close it in the main thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._closed = False
        self._signal_callback: Callable[[int], None] | None = None
        self._handlers_before: dict[int, object] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signal_read, self._signal_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch(self._wake_read, self._on_wake)
        self.watch(self._signal_read, self._on_signals)

    def watch(self, descriptor: int, on_readable: Callback) -> None:
        """Call ``on_readable`` whenever ``descriptor`` can be read (a pidfd: when the process has ended)."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching ``descriptor``; call it before the descriptor is closed.  Raises KeyError if not watched."""
        self._selector.unregister(descriptor)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def call_from_thread(self, callback: Callback) -> None:
        """Make the loop call ``callback``, unless the loop is closed.  May be called in any thread."""
        if self._closed:
            return
        self._calls.put(callback)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # a full pipe wakes the loop, too

    def from_thread(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a function for other threads: when called, it makes the loop call ``callback`` with its arguments."""

        def call(*args: object, **kwargs: object) -> None:
            self.call_from_thread(partial(callback, *args, **kwargs))

        return call

    def handle_signals(self, signals: Iterable[int], callback: Callable[[int], None]) -> None:
        """From now on, call ``callback`` with the signal number whenever one of ``signals`` arrives."""
        numbers = list(signals)
        self._signal_callback = callback
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        for number in numbers:
            # Python writes to the wake-up descriptor only for signals that have a handler in Python.
            self._handlers_before[number] = signal.signal(number, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def give_back_signals(self) -> None:
        """Restore the previous signal handlers, then call the callback for the signals that arrived before that.

        In this order no signal is lost, whichever thread of the process receives it.
        """
        self._restore_handlers()
        with suppress(BlockingIOError):
            self._on_signals()

    def run_once(self) -> None:
        """Sleep until an event occurs, then call all callbacks that are due.

        If a callback raises, the other callbacks are still called; the first error is raised after all calls.
        """
        errors: list[Exception] = []
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            # An earlier callback may have unwatched the descriptor, and its number may be reused by now.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.data is key.data:
                self._call(key.data, errors)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self._call(timer.callback, errors)
        if errors:
            raise errors[0]

    @staticmethod
    def _call(callback: Callback, errors: list[Exception]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - raised by run_once
            errors.append(error)

    def close(self) -> None:
        """Restore the previous signal handlers, and close the loop's descriptors."""
        self._closed = True
        self._restore_handlers()
        self._selector.close()
        for descriptor in (self._wake_read, self._wake_write, self._signal_read, self._signal_write):
            os.close(descriptor)

    def _restore_handlers(self) -> None:
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(-1)
            self._handlers_before = {}

    def _on_wake(self) -> None:
        os.read(self._wake_read, 4096)
        errors: list[Exception] = []
        while not self._calls.empty():
            self._call(self._calls.get(), errors)
        if errors:
            raise errors[0]

    def _on_signals(self) -> None:
        for number in os.read(self._signal_read, 4096):
            if self._signal_callback is not None:
                self._signal_callback(number)


_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_TWICE_SECONDS = 1.0
"""Seconds within which a second SIGHUP is ignored: when a terminal is closed, the kernel and the shell each send
one."""


class SignalEvents(Protocol):
    """Reactions of the launch to signals, called by the event loop in the main thread."""

    def child_ended(self) -> None: ...
    def pass_on(self, number: int) -> None: ...  # forward the signal to all workers
    def stop_asked(self, number: int) -> None: ...  # stop the launch, if it is not stopping yet
    def kill_asked(self) -> None: ...


class LaunchSignals:
    """Translates signals that recover-run receives into ``SignalEvents``, from its creation until the loop is closed.

    ::

        SIGCHLD                     a child process has ended, perhaps a descendant that lost its own parent
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
        loop.handle_signals(signals, self._arrived)

    @property
    def stop_asked(self) -> bool:
        """Return whether SIGINT, SIGTERM or SIGHUP has arrived since the last ``forget``."""
        return self._asked_at is not None

    def forget(self) -> None:
        """Treat the next SIGINT, SIGTERM or SIGHUP as the first one."""
        self._asked_at = None

    def _arrived(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGCHLD:
            self._events.child_ended()
        elif number in _PASSED_ON:
            self._events.pass_on(number)
        elif self._asked_at is None:
            self._asked_at = now
            self._events.stop_asked(number)
        elif number != signal.SIGHUP or now - self._asked_at > _TWICE_SECONDS:
            self._events.kill_asked()
