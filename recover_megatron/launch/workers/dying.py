"""Early notice of a worker's death, before the kernel has freed the process, and the rule for reporting the death.

::

    RUNNING --its robust mutex is released (network/death_notice.py)-----------> DYING --pidfd--> ended (worker_table)
       '--its stderr reports a fatal signal---------> POLLED --it writes a core---------> DYING
                                                             '--the mutex is released--> DYING

A worker is DYING once the kernel has sent SIGKILL to each of its threads; otherwise (``Ending.must_kill``) the launcher
sends SIGKILL before it reports the death.  docs/membership.md explains why a DYING worker counts as dead, and
which actions must still wait for the pidfd.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from recover_megatron.launch.workers.states import describe_end, signal_name
from recover_megatron.network.death_notice import FATAL, DeathWatch
from recover_megatron.network.event_loop import EventLoop

Callback = Callable[[], object]
_PF_EXITING = 0x4  # include/linux/sched.h; in field 9 of /proc/PID/stat
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, LOOKS_SECONDS = 0.0005, 0.05, 60.0
"""Polling of a process that handles a fatal signal: first pause, longest pause and total time, in seconds."""
_LONGEST = 300
WRITES_CORE = "writing a core"
UNKNOWN = "killed or exited: the kernel has not reported yet which"


@dataclass(frozen=True)
class Ending:
    """End of a process that is dying, but that the kernel has not freed yet."""

    code: int | None
    """Exit code, or minus the signal number; None if the kernel does not report it yet.  Before Linux 5.17 it is
    reported only when the process has ended."""
    writes_core: bool = False
    """True if the kernel first writes the process's memory to a core, which may take minutes, and then frees it."""
    must_kill: bool = False
    """True if the process is not dying, and must be killed: it has executed another program, or a bug has ended its
    death-notice thread."""

    @property
    def how(self) -> str:
        """Return the description of this end for the coordinator, in the format of ``WorkerProcess.how``."""
        if self.code is None:
            return UNKNOWN
        how = signal_name(-self.code) if self.code < 0 else describe_end(self.code, None)
        return f"{how}, {WRITES_CORE}" if self.writes_core else how


def ending(pid: int) -> Ending:
    """Return the end of the process ``pid``, whose robust mutex was released."""
    for _ in range(3):  # the thread with the mutex may end before other threads begin to exit
        try:
            state, flags, status = _stat(pid)
            exiting = flags & _PF_EXITING or _has_sigkill(pid)
        except OSError:
            return Ending(None)  # the process has been reaped by its parent, a wrapper
        if status or state == "Z":
            return Ending(os.waitstatus_to_exitcode(status))
        if exiting:
            return Ending(None)
    return Ending(-signal.SIGKILL, must_kill=True)


def writes_core(pid: int) -> Ending | None:
    """Return the end of ``pid`` if the kernel is writing its core (no thread runs user code any more); else None."""
    with suppress(OSError):
        if "CoreDumping:\t1\n" in _status(pid):
            return Ending(os.waitstatus_to_exitcode(_stat(pid)[2]) or None, writes_core=True)
    return None


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, flags and wait status (0 until the kernel reports it) of process ``pid``.  Raises OSError."""
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
    """Finds the report of Python's faulthandler about a fatal signal in an output stream of a worker."""

    on_first_line: Callback = bool
    _text: bytes = b""
    _frame_is_next: bool = False

    @property
    def text(self) -> str:
        """Return the first line of the faulthandler's report and the innermost Python frame; empty without a report."""
        return self._text.decode(errors="replace")

    def take(self, lines: Iterable[bytes]) -> None:
        """Read the next lines of the stream."""
        for line in lines:
            if line.startswith(FATAL):
                self._text = line[:_LONGEST].strip()
                self.on_first_line()
            elif self._frame_is_next:
                self._text = (self._text + b": " + line.strip())[:_LONGEST]
            self._frame_is_next = bool(self._text) and line.startswith(b"Current thread ")


@dataclass(eq=False)
class ProcessWatch:
    """Watches one worker's process until it has been reaped.

    Calls ``on_dying`` at most once, in the main thread, as soon as the worker is known to be dying; never for a worker
    that has left the run normally.
    """

    _loop: EventLoop
    _on_dying: Callable[[Ending], None]
    _watch: DeathWatch | None
    _pid: int = 0
    _over: bool = False
    """True after the death was reported or the watch was closed: no further event is reported."""

    def begin(self, pid: int) -> None:
        """Start to watch the worker's process ``pid``; call it after the process was started."""
        self._pid = pid
        if self._watch is not None:
            self._watch.begin(partial(self._loop.call_from_thread, self._released))

    def fatal(self) -> None:
        """Start to poll the worker's process: its output reports a fatal signal, so the kernel may write a core."""
        if self._pid:
            self._look(FIRST_LOOK_SECONDS, LOOKS_SECONDS)

    def fence(self, end: Ending) -> None:
        """Send SIGKILL to the worker's process group, or only to the worker if it has a wrapper, which must survive.

        While a core is written, send nothing, because SIGKILL would truncate the core.  Raises OSError if SIGKILL
        cannot be sent.
        """
        if end.writes_core:
            return
        if self._holder == self._pid:
            os.killpg(self._pid, signal.SIGKILL)  # the pid of an unreaped process is not reused
        elif self._watch is not None:
            self._watch.kill_holder()

    def close(self) -> None:
        """Stop watching: the process has been reaped, or was not started."""
        self._over = True
        if self._watch is not None:
            self._watch.close()

    @property
    def _holder(self) -> int:
        return (self._watch and self._watch.holder) or self._pid

    @property
    def _in_order(self) -> bool:
        return self._watch is not None and self._watch.left

    def _report(self, end: Ending) -> None:
        if not self._over and not self._in_order:
            self._over = True
            self._on_dying(end)

    def _released(self) -> None:
        if not self._over:
            self._report(ending(self._holder))

    def _look(self, pause: float, left: float) -> None:
        if self._over:
            return
        if end := writes_core(self._holder):
            self._report(end)
        elif left > 0:
            longer = min(1.5 * pause, LONGEST_LOOK_SECONDS)
            self._loop.call_later(pause, self._look, longer, left - pause)
