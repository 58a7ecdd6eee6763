"""A worker's process that is being ended: how that is known before the process has gone, and when it may be told.

::

    RUNNING --its robust mutex is given up (network/death_notice.py)------------> DYING --pidfd--> ended (worker_table)
       '--its stderr begins to tell of a fatal signal--> LOOKED AT --it writes a core--> DYING
                                                             '--the mutex is given up--> DYING

The kernel has sent SIGKILL to each of its threads in both cases, or (``Ending.goes_on``) the launcher does before it
tells anybody: docs/membership.md says why that is a death, and what has to wait for the pidfd all the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from recover_megatron.launch.workers.loop import Callback, EventLoop
from recover_megatron.launch.workers.states import describe_end, signal_name
from recover_megatron.network.death_notice import FATAL, DeathWatch

_PF_EXITING = 0x4  # include/linux/sched.h; in field 9 of /proc/PID/stat
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, LOOKS_SECONDS = 0.0005, 0.05, 60.0
"""The first pause, the longest one and the time in all, while a process that handles a fatal signal is looked at."""
_LONGEST = 300
WRITES_CORE = "writing a core"
UNKNOWN = "killed, or ended: the kernel has not said how yet"


@dataclass(frozen=True)
class Ending:
    """The end of a process that has not gone yet."""

    code: int | None
    """The exit code, or minus the number of the signal; None: this kernel (before Linux 5.17) does not tell yet."""
    writes_core: bool = False
    """The memory is written to a core before it is given back, which may take minutes."""
    goes_on: bool = False
    """The process is not being ended: it has executed another program, or a bug has ended the one thread."""

    @property
    def how(self) -> str:
        """The end in the words of ``WorkerProcess.how``, for the coordinator."""
        if self.code is None:
            return UNKNOWN
        how = signal_name(-self.code) if self.code < 0 else describe_end(self.code, None)
        return f"{how}, {WRITES_CORE}" if self.writes_core else how


def ending(pid: int) -> Ending:
    """Return how the process ``pid``, whose robust mutex was given up, is being ended."""
    for _ in range(3):  # the first of its threads may have ended before the others have begun to
        try:
            state, flags, status = _stat(pid)
            exiting = flags & _PF_EXITING or _has_sigkill(pid)
        except OSError:
            return Ending(None)  # its parent, a wrapper, has reaped it
        if status or state == "Z":
            return Ending(os.waitstatus_to_exitcode(status))
        if exiting:
            return Ending(None)
    return Ending(-signal.SIGKILL, goes_on=True)


def writes_core(pid: int) -> Ending | None:
    """Return the end of the process ``pid`` if the kernel writes its core: no thread of it runs user code any more."""
    with suppress(OSError):
        if "CoreDumping:\t1\n" in _status(pid):
            return Ending(os.waitstatus_to_exitcode(_stat(pid)[2]) or None, writes_core=True)
    return None


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, flags and wait status, which is 0 as long as the kernel does not tell.  Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[6]), int(fields[49])


def _status(pid: int) -> str:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return file.read()


def _has_sigkill(pid: int) -> bool:
    pending = [line.split()[1] for line in _status(pid).splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


@dataclass
class FatalError:
    """Reads, on one of a worker's streams, the text of Python's faulthandler about a fatal signal."""

    _on_first_line: Callback
    _text: bytes = b""
    _frame_is_next: bool = False

    @property
    def text(self) -> str:
        """The first line of that text, and the innermost Python frame; empty: there was none."""
        return self._text.decode(errors="replace")

    def take(self, lines: Iterable[bytes]) -> None:
        """Read the next lines of the stream."""
        for line in lines:
            if line.startswith(FATAL):
                self._text = line[:_LONGEST].strip()
                self._on_first_line()
            elif self._frame_is_next:
                self._text = (self._text + b": " + line.strip())[:_LONGEST]
            self._frame_is_next = bool(self._text) and line.startswith(b"Current thread ")


@dataclass(eq=False)
class ProcessWatch:
    """Watches one worker's process; ``on_dying`` is called at most once, in the main thread, before the process has
    gone."""

    _loop: EventLoop
    _on_dying: Callable[[Ending], None]
    _watch: DeathWatch | None
    _pid: int = 0
    _over: bool = False
    """Nothing is told from now on."""

    def begin(self, pid: int) -> None:
        """The worker's process was started."""
        self._pid = pid
        if self._watch is not None:
            self._watch.begin(partial(self._loop.call_from_thread, self._given_up))

    def fatal(self) -> None:
        """A fatal signal is being handled in the worker, as its output says."""
        if self._pid:
            self._look(FIRST_LOOK_SECONDS, LOOKS_SECONDS)

    def fence(self, end: Ending) -> None:
        """Send SIGKILL to the worker's process group; under a wrapper, which has more to do, to the worker alone.

        Nothing is sent while a core is written, which that would cut short.  Raises OSError where it cannot be sent.
        """
        if end.writes_core:
            return
        if self._holder == self._pid:
            os.killpg(self._pid, signal.SIGKILL)  # not reaped yet: nobody else can have its pid
        elif self._watch is not None:
            self._watch.kill_holder()

    def close(self) -> None:
        """The process has been reaped, or was not started."""
        self._over = True
        if self._watch is not None:
            self._watch.close()

    @property
    def _holder(self) -> int:
        return (self._watch and self._watch.holder) or self._pid

    @property
    def _in_order(self) -> bool:
        return self._watch is not None and self._watch.left

    def _tell(self, end: Ending) -> None:
        if not self._over and not self._in_order:
            self._over = True
            self._on_dying(end)

    def _given_up(self) -> None:
        if not self._over:
            self._tell(ending(self._holder))

    def _look(self, pause: float, left: float) -> None:
        if self._over:
            return
        if end := writes_core(self._holder):
            self._tell(end)
        elif left > 0:
            longer = min(1.5 * pause, LONGEST_LOOK_SECONDS)
            self._loop.call_later(pause, partial(self._look, longer, left - pause))
