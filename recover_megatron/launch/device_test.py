"""Test of a CUDA device, run by the launcher before it starts a replacement worker on that device.

    begin --exit code 0--> passed
      |----any other end--> failed; the error is the last line that the test printed
      '----time is over---> killed, failed

Without ``--max-restarts``, no test is run; on the host device (CPU), only a test that the user names
(``--device-test``).  The default test program is ``main`` of this module, which needs torch.  ``DeviceTests`` starts
the test program from the launcher and needs no torch::

    python -m recover_megatron.launch.device_test      tests the device of local rank LOCAL_RANK

The default test also reads the device's error counters from NVML if the module ``pynvml`` (nvidia-ml-py) is installed.
NVML does not count Xids, but reports whether the device needs a reset because of an Xid (the recovery action).

This code was written from the documentation of CUDA and NVML, and was run on a healthy GPU, never on a broken one.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from recover_megatron.launch.workers.processes import Child, kill_group, spawn
from recover_megatron.launch.workers.states import describe_end
from recover_megatron.network.event_loop import EventLoop

if TYPE_CHECKING:
    import torch

PATTERN = 0xA5
BYTES = 256 << 20
SIDE = 1024
ROUNDS = 8
_RECOVERY = {
    1: "a reset",
    2: "a reboot of the host",
    3: "a drain of P2P traffic",
    4: "a drain and a reset",
}


def computes(device: torch.device, size: int = BYTES, side: int = SIDE) -> str:
    """Return the error found on ``device``: memory that loses data, or a wrong product of matrices; empty if none."""
    import torch

    memory = torch.full((size,), PATTERN, dtype=torch.uint8, device=device)
    if int(memory.min()) != PATTERN or int(memory.max()) != PATTERN:
        return f"{size >> 20} MiB of the device's memory do not keep the values that were written"
    del memory
    # The factors are small integers, so that all products and sums are exact in float32 and TF32, in any order.
    numbers = torch.arange(side * side, dtype=torch.int64).view(side, side)
    left, right = ((numbers * 7 + numbers // side) % 8).float(), ((numbers * 5 + 3) % 8).float()
    known = left @ right
    left, right = left.to(device), right.to(device)
    for _ in range(ROUNDS):
        if not torch.equal((left @ right).cpu(), known):
            return "the product of two matrices is wrong"
    return ""


def nvml_error(nvml: Any, uuid: str) -> str:
    """Return the error that NVML (the module ``pynvml``) reports for the device of this UUID; empty if none."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if failed := _asked(nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                        nvml.NVML_VOLATILE_ECC):  # fmt: skip
        return f"{failed} uncorrectable ECC errors since the driver was loaded"
    _, _, pending, failure = _asked(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    if pending or failure:
        return "memory rows need a reset to be remapped" if pending else "memory rows cannot be remapped: no spare rows"
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = _asked(nvml, "nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    action = values[0].value.uiVal if values and values[0].nvmlReturn == 0 else 0
    return (
        f"its driver needs {_RECOVERY.get(action, f'recovery action {action}')} (an Xid: see dmesg)" if action else ""
    )


def _asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """Return the result of the NVML function ``name``, or None if the device or its driver does not support it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def examine(local_rank: int) -> str:
    """Return the error found on the device of this local rank; empty if none."""
    import torch

    if local_rank >= torch.cuda.device_count():
        return f"this host has only {torch.cuda.device_count()} CUDA devices"
    device = torch.device("cuda", local_rank)
    try:
        if wrong := computes(device):
            return wrong
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except RuntimeError as error:
        return " ".join(str(error).split())[:300]
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        return nvml_error(nvml, uuid)
    except nvml.NVMLError as error:
        print(f"NVML cannot be queried: {error}")
        return ""


DEFAULT = (sys.executable, "-m", "recover_megatron.launch.device_test")
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of the CUDA driver: /dev/dxg on WSL, /dev/nvidiactl elsewhere."""
_LAST_BYTES = 4096


def command_of(given: tuple[str, ...], device: str, drivers: tuple[str, ...] = DRIVERS) -> tuple[str, ...]:
    """Return the command of the test: ``given``, else DEFAULT if ``device`` (--recover-device) is CUDA, else empty."""
    if given:
        return given
    cuda = device == "cuda" or (device == "auto" and any(map(os.path.exists, drivers)))
    return DEFAULT if cuda else ()


@dataclass
class _Test:
    output: IO[bytes]
    timer: TimerHandle
    then: Callable[[str], None]
    late: bool = False


@dataclass(eq=False)
class DeviceTests:
    """Starts device tests and reports their results."""

    _loop: EventLoop
    _command: tuple[str, ...]
    _seconds: float
    """Time limit of one test, in seconds."""

    def begin(self, environment: Mapping[str, str], then: Callable[[str], None]) -> None:
        """Start the test of a worker's device; when it ends, call ``then`` with the error (empty: the test has passed).

        Raises OSError if the test cannot be started.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the test has ended
        pid, pidfd = spawn(self._command, environment, output.fileno(), output.fileno(), deaf=True)
        test: _Test = _Test(output, self._loop.call_later(self._seconds, lambda: self._late(test, pid)), then)
        Child(self._loop, (pid, pidfd), partial(self._ended, test), with_group=True)

    @staticmethod
    def _late(test: _Test, pid: int) -> None:
        test.late = True
        kill_group(pid)

    def _ended(self, test: _Test, status: int) -> None:
        test.timer.cancel()
        last_line = _last_line(test.output)
        test.output.close()
        if test.late:
            test.then(f"the device test did not end within {self._seconds:g} s")
        elif status:
            test.then(last_line or describe_end(*((None, -status) if status < 0 else (status, None))))
        else:
            test.then("")


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def main() -> int:
    """Test the device of LOCAL_RANK and print the error, if any.  Return the exit code: 0 if no error was found."""
    if wrong := examine(int(os.environ.get("LOCAL_RANK", "0"))):
        print(wrong, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
