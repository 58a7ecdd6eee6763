"""Reads the workers' output while the launcher does not run: nobody waits in ``print`` for one that is stopped.

A pipe takes 64 KiB; a process that writes more waits until it is read. A launcher that is stopped (Ctrl-Z, a debugger)
or waits in the kernel reads nothing, so the reaper holds the reading ends, too::

    the launcher beats --no new beat in MISSED looks--> what is more than a quarter of a pipe is read, and dropped
        ^                                                              |
        '------------------- a beat: how many lines were dropped ------'
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator, Sequence

BEAT_SECONDS = 1.0
LOOK_SECONDS = 1.0
MISSED = 6
"""Looks of one's own count, and not seconds: both may have been kept from running."""
RELIEF_SECONDS = 0.05
_AT_ONCE = 4096


class Pulse:
    """By which the launcher says that it runs: a memory file, since no pipe may be full of beats that nobody reads."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("recover-pulse")

    def beat(self) -> None:
        """It runs now."""
        os.pwrite(self.descriptor, struct.pack("d", time.monotonic()), 0)


class StandIn:
    """The reaper's side. ``pulse``: the descriptor of a ``Pulse``."""

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse
        self._beat = b""
        self._missed = 0
        self._pipes: dict[int, Sequence[int]] = {}
        self._dropped: dict[int, int] = {}

    @property
    def sessions(self) -> set[int]:
        """Those that there are: each is a worker's."""
        return set(self._pipes)

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return RELIEF_SECONDS if self._missed >= MISSED else LOOK_SECONDS

    def add(self, session: int, pipes: Sequence[int]) -> None:
        """The leader of ``session`` writes into these pipes; to read them does not block."""
        self._pipes[session] = pipes

    def remove(self, session: int) -> None:
        """It has ended."""
        for pipe in self._pipes.pop(session, ()):
            os.close(pipe)

    def look(self) -> Iterator[tuple[int, int]]:
        """Read in the launcher's place if it does not run; once it does: the sessions of which lines were dropped."""
        beat = os.pread(self._pulse, 8, 0)
        self._missed, self._beat = self._missed + 1 if beat == self._beat else 0, beat
        if self._missed >= MISSED:
            for session, pipes in self._pipes.items():
                lines = sum(map(_relieve, pipes))
                self._dropped[session] = self._dropped.get(session, 0) + lines
        else:
            yield from ((session, lines) for session, lines in self._dropped.items() if lines)
            self._dropped = {}


def _relieve(pipe: int) -> int:
    """Read and drop what is oldest in ``pipe`` until three quarters are free; how many lines it was."""
    lines, most = 0, fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 4
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] > most:
        try:
            lines += os.read(pipe, _AT_ONCE).count(b"\n")
        except BlockingIOError:
            break  # the launcher has read it just now
    return lines
