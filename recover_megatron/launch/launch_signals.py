"""What a signal to recover-run means.

::

    SIGCHLD                     a child has ended, perhaps one that the launcher has inherited
    SIGUSR1, SIGUSR2            for the workers: batch systems send these ahead of a time limit
    SIGINT, SIGTERM, SIGHUP     the first: stop the launch; another one: kill it at once

SIGHUP is left alone under nohup.
"""

from __future__ import annotations

import signal
import time
from typing import Protocol

from recover_megatron.launch.loop import EventLoop

_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_TWICE_SECONDS = 1.0
"""A closed terminal sends SIGHUP twice, by the kernel and by the shell: that is one wish, not two."""


class SignalEvents(Protocol):
    """What is done about signals.  Called in the main thread, between two other callbacks."""

    def child_ended(self) -> None:
        """Some child of the launcher has ended."""

    def pass_on(self, number: int) -> None:
        """Send the signal ``number`` to all workers."""

    def stop_asked(self, number: int) -> None:
        """The signal ``number`` asks for the end of the launch; nothing to do if it is on its way already."""

    def kill_asked(self) -> None:
        """It was asked before: the launch is to end at once."""


class LaunchSignals:
    """Handles signals from its making on until the loop is closed."""

    def __init__(self, loop: EventLoop, events: SignalEvents) -> None:
        self._events = events
        self._asked_at: float | None = None
        signals: list[int] = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, *_PASSED_ON]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
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
