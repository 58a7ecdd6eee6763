"""Prepared processes: a process imports the modules of a worker in advance, and becomes a worker when one is needed.

A launcher starts the process with the environment of the next replacement worker, as far as it is known, and with one
end of a pipe.  The rest of the environment follows when the process must take a worker's place::

    launcher                                      prepared process
    Handover(environment): creates the pipe   --> imports the modules
    give(environment): writes the changes     --> wait(): reads them, changes os.environ, and returns
    close(), or the launcher ends             --> wait(): finds nothing to read, and exits with code 0

Only changes are sent, so that variables that a module has set during its import are kept.  While the process is
prepared, the signals that the launcher blocks in it have no effect: SLURM sends a signal to every process of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from recover_megatron.variables import PREPARED_VARIABLE, ROOM_VARIABLE, WORKER_ID_VARIABLE

LARGEST = 32 * 1024
"""Largest number of bytes of the changes; a new pipe accepts more without blocking."""
ROOM = " " * 200
"""Value of ROOM_VARIABLE while the process waits."""
SHOWN = (WORKER_ID_VARIABLE, "RANK", "LOCAL_RANK")
"""Variables that /proc/PID/environ shows in the place of ROOM_VARIABLE, as it does for a new process."""


class Handover:
    """Launcher's end of the pipe to one prepared process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Create the pipe.  ``environment``: environment at the start of the process.  Raises OSError."""
        self.descriptor, self._pipe = os.pipe()
        """Reading end, which the process must inherit; the caller closes it after the start."""
        os.set_blocking(self._pipe, False)
        self.environment = {**environment, PREPARED_VARIABLE: str(self.descriptor)}

    def give(self, environment: Mapping[str, str]) -> bool:
        """Send the environment of the worker that the process becomes.  Return False if it cannot be sent."""
        changes: dict[str, str | None] = dict.fromkeys(self.environment.keys() - environment.keys())
        changes |= {name: value for name, value in environment.items() if self.environment.get(name) != value}
        data = json.dumps(changes).encode()
        try:
            return len(data) <= LARGEST and os.write(self._pipe, data) == len(data)
        except OSError:  # the process has ended
            return False
        finally:
            self.close()

    def close(self) -> None:
        """Make the process end if it waits, unless ``give`` has sent the environment.  Idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def is_prepared() -> bool:
    """Return whether this process has been started in advance, and has not become a worker yet."""
    return PREPARED_VARIABLE in os.environ


def is_given(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this prepared process need not ``wait``: the launcher has sent the environment, or has ended."""
    poll = select.poll()  # select() refuses large descriptors, which a launcher with many workers has
    poll.register(int(environ[PREPARED_VARIABLE]), select.POLLIN)
    return bool(poll.poll(0))


def wait(environ: MutableMapping[str, str] = os.environ) -> None:
    """Wait until this prepared process becomes a worker, and make ``environ`` the environment of that worker.

    Exits with code 0 if the process is not needed any more.  Raises ValueError for a message that is not valid.
    """
    descriptor, data, waited = int(environ[PREPARED_VARIABLE]), b"", not is_given(environ)
    while part := os.read(descriptor, LARGEST + 1 - len(data)):
        data += part
    os.close(descriptor)
    if not data:
        os._exit(0)
    changes = json.loads(data)
    if not isinstance(changes, dict) or not all(isinstance(value, str | None) for value in changes.values()):
        raise ValueError("the launcher has sent no environment to this prepared process")
    for name, value in changes.items():
        if value is not None:
            environ[name] = value
        else:
            environ.pop(name, None)
    _show({name: value for name, value in changes.items() if name in SHOWN})
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    sent = {}
    while waited and (info := signal.sigtimedwait(blocked, 0)) is not None:
        sent[info.si_signo] = info.si_pid  # a signal that came during the imports may concern the worker: it is kept
    for number, sender in sent.items():
        if sender == os.getppid():  # the launcher signals workers only, so it has sent this one after the environment
            os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _show(variables: Mapping[str, str]) -> None:
    """Write ``variables`` into the memory that /proc/PID/environ shows, over ROOM_VARIABLE, if the kernel permits it.

    The launcher looks there for processes that a worker left behind, and users look for a worker's rank.
    """
    room = f"{ROOM_VARIABLE}={ROOM}".encode()
    with contextlib.suppress(OSError, ValueError):
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
        at = ctypes.string_at(start, end - start).find(room) if 0 < start < end else -1
        text = b"\0".join(f"{name}={value}".encode() for name, value in variables.items())
        if at >= 0 and len(text) <= len(room):
            ctypes.memmove(start + at, text.ljust(len(room), b"\0"), len(room))
