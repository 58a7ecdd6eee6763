"""One event loop on the main thread: descriptors, signals, timers, and calls from other threads.

Nothing is polled: ``run_once`` sleeps until a descriptor is ready, a signal comes in, a timer is due or another thread
calls.  Signals and calls from threads arrive as bytes in pipes, so they are events like all others, handled between two
callbacks and never in the middle of one.  ``LaunchSignals`` knows what a signal to recover-run means.
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
    """A call that is due later; ``cancel`` it while it is not."""

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Make it in the main thread; ``close`` it there, too."""

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
        """Forget ``descriptor``; do it before it is closed.  Raises KeyError if it is not watched."""
        self._selector.unregister(descriptor)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def call_from_thread(self, callback: Callback) -> None:
        """From any thread: have the loop call ``callback``; it does not once it is closed."""
        if self._closed:
            return
        self._calls.put(callback)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def from_thread(self, callback: Callable[..., None]) -> Callable[..., None]:
        """``callback`` for other threads: what is returned has the loop call ``callback`` with the same arguments."""

        def call(*args: object, **kwargs: object) -> None:
            self.call_from_thread(partial(callback, *args, **kwargs))

        return call

    def handle_signals(self, signals: Iterable[int], callback: Callable[[int], None]) -> None:
        """From now on call ``callback`` with the number of each of ``signals`` that arrives."""
        numbers = list(signals)
        self._signal_callback = callback
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        for number in numbers:
            # A handler in Python must exist for the wake-up descriptor to be written.
            self._handlers_before[number] = signal.signal(number, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def give_back_signals(self) -> None:
        """Give signals back to the handlers of before, and call what is due for those that have come until then.

        In this order none is lost, whichever thread of the process gets it.
        """
        self._restore_handlers()
        with suppress(BlockingIOError):
            self._on_signals()

    def run_once(self) -> None:
        """Sleep until something happens, then call what is due.

        A callback that raises keeps no other from being called, now or in the next round: the first error is raised
        when all have been.
        """
        errors: list[Exception] = []
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            # An earlier callback of this round may have unwatched it, and its number may mean another one by now.
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
        """Give signals back to the handlers of before, and close the loop's descriptors."""
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
"""A closed terminal sends SIGHUP twice, by the kernel and by the shell: that is one wish, not two."""


class SignalEvents(Protocol):
    """What is done about signals.  Called in the main thread, between two other callbacks."""

    def child_ended(self) -> None: ...
    def pass_on(self, number: int) -> None: ...  # to all workers
    def stop_asked(self, number: int) -> None: ...  # nothing to do if the end of the launch is on its way already
    def kill_asked(self) -> None: ...


class LaunchSignals:
    """What a signal to recover-run means, from the making of this object on until the loop is closed.

    ::

        SIGCHLD                     a child has ended, perhaps one that the launcher has inherited
        SIGUSR1, SIGUSR2            for the workers: batch systems send these ahead of a time limit
        SIGINT, SIGTERM, SIGHUP     the first: stop the launch; another one: kill it at once

    SIGINT and SIGHUP are left alone where they were ignored at the start: by nohup, by a script's shell for what it
    starts in the background.  They are meant for others then.
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
        """Whether a signal has asked for the end, since ``forget`` if that was called."""
        return self._asked_at is not None

    def forget(self) -> None:
        """The next signal is the first."""
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
