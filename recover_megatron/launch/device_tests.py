"""Self-tests of devices, before a worker is started in place of another: each a short process of this launch.

    begin --exit code 0--> passed
      |----any other end--> failed: the last line that it printed
      '----time is over---> killed, failed

No device, no test: workers on the host device, and launches that restart nobody, never come here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from recover_megatron.launch.loop import EventLoop, Timer
from recover_megatron.launch.processes import kill_group, spawn
from recover_megatron.launch.states import describe_end

DEFAULT = (sys.executable, "-m", "recover_megatron.launch.device_test")
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is a CUDA driver one of these is; on WSL the second."""
_LAST_BYTES = 4096


def command_of(given: tuple[str, ...], device: str, drivers: tuple[str, ...] = DRIVERS) -> tuple[str, ...]:
    """The test before a worker is started: the one ``given``, else ours where the workers use CUDA devices, else none.

    ``device``: --recover-device, which says where they run.
    """
    if given:
        return given
    cuda = device == "cuda" or (device == "auto" and any(map(os.path.exists, drivers)))
    return DEFAULT if cuda else ()


@dataclass
class _Test:
    pid: int
    pidfd: int
    output: IO[bytes]
    timer: Timer
    then: Callable[[str], None]
    late: bool = False


class DeviceTests:
    """The tests under way.  ``seconds``: how long one may take."""

    def __init__(self, loop: EventLoop, command: tuple[str, ...], seconds: float) -> None:
        self._loop = loop
        self._command = command
        self._seconds = seconds
        self._under_way: dict[int, _Test] = {}

    @property
    def pids(self) -> set[int]:
        """Of the processes that are not reaped yet."""
        return set(self._under_way)

    def begin(self, environment: Mapping[str, str], then: Callable[[str], None]) -> None:
        """Test the device of the worker with this environment; ``then`` gets why it failed, empty: it has passed.

        Raises OSError where the test cannot be started.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the test has ended
        pid, pidfd = spawn(self._command, environment, output.fileno(), output.fileno(), deaf=True)
        test = _Test(pid, pidfd, output, self._loop.call_later(self._seconds, partial(self._late, pid)), then)
        self._under_way[pid] = test
        self._loop.watch(test.pidfd, partial(self._ended, test))

    def _late(self, pid: int) -> None:
        if (test := self._under_way.get(pid)) is not None:
            test.late = True
            kill_group(pid)

    def _ended(self, test: _Test) -> None:
        self._loop.unwatch(test.pidfd)
        test.timer.cancel()
        kill_group(test.pid)
        del self._under_way[test.pid]
        status = os.waitstatus_to_exitcode(os.waitpid(test.pid, 0)[1])
        os.close(test.pidfd)
        said = _last_line(test.output)
        test.output.close()
        if test.late:
            test.then(f"its test did not end within {self._seconds:g} s")
        elif status:
            test.then(said or describe_end(*((None, -status) if status < 0 else (status, None))))
        else:
            test.then("")


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
