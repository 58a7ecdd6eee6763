"""Event loop of the launcher and of the coordinator: asyncio's loop, run one round at a time.

A round is one sleep, and the callbacks that are due after it. Between two rounds, when no callback runs, the launcher
writes workers.json, and the coordinator completes its decisions.

    add_reader, add_writer    call a function whenever a descriptor is ready (a pidfd: when the process has ended)
    call_later                call a function after some seconds, unless ``cancel`` of the returned timer is called
    call_from_thread          call a function on behalf of another thread

Callbacks run one after the other, in the thread that calls ``run_once``. In a round, the callbacks of descriptors run
before those of timers: if the process was stopped (SIGSTOP), data that arrived meanwhile is read before a timer
expires, and may cancel the timer. A removed reader or writer and a cancelled timer are not called, even if they were
due in the same round.

Do not use it in a process that forks: if a forked child deletes the loop, that removes descriptors from the parent's
epoll object, too, and the parent's loop is woken by no other thread any more.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from collections.abc import Callable
from contextlib import suppress


def is_ready(descriptor: int, seconds: float | None = 0.0, events: int = select.POLLIN) -> bool:
    """Return whether a descriptor is ready, or its other side closed, within ``seconds`` (None: without limit).

    ``select.select`` refuses descriptors above 1,023, which a process with many connections has.
    """
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class _Selector(selectors.EpollSelector):
    """Selector that ends ``run_forever`` after one round, and sleeps at most ``longest`` seconds (None: no limit)."""

    stop: Callable[[], None]
    longest: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.stop()  # the callbacks that are due after this sleep still run
        limits = [seconds for seconds in (timeout, self.longest) if seconds is not None]
        return super().select(min(limits, default=None))


class EventLoop(asyncio.SelectorEventLoop):
    """Event loop whose owner calls ``run_once`` in place of ``run_forever``."""

    def __init__(self) -> None:
        self.selector = _Selector()
        self.selector.stop = self.stop
        self.errors: list[BaseException] = []
        """Errors that callbacks of this round have raised."""
        super().__init__(self.selector)
        self.set_exception_handler(
            lambda _, context: self.errors.append(context.get("exception") or RuntimeError(context["message"]))
        )

    def run_once(self, seconds: float | None = None) -> None:
        """Sleep until an event occurs, at most ``seconds``; then call all callbacks that are due.

        If a callback raises, the other callbacks are still called; the first error is raised after all calls.
        """
        self.selector.longest = seconds
        self.run_forever()
        if errors := self.errors:
            self.errors = []
            raise errors[0]

    def call_from_thread(self, callback: Callable[..., object], *arguments: object) -> None:
        """Make the loop call ``callback``, unless the loop is closed. May be called in any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(callback, *arguments)
