"""Does a CUDA device still compute?  The test that a launcher runs before it starts a worker in place of another.

    begin --exit code 0--> passed
      |----any other end--> failed: the last line that it printed
      '----time is over---> killed, failed

No device, no test: workers on the host device, and launches that restart nobody, never come here.  The program, unless
the user names another one, is this module (``main``), with torch; the launcher's side is ``DeviceTests``, without::

    python -m recover_megatron.launch.device_test      the device: that of the worker, LOCAL_RANK

The counters are asked only where Python's ``pynvml`` (nvidia-ml-py) is installed; NVML counts no Xids, but says which
of them want the device reset (the recovery action).

Written to the documentation of CUDA and NVML; a GPU that is whole has passed it, a broken one was not there.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from recover_megatron.launch.workers.loop import EventLoop, Timer
from recover_megatron.launch.workers.processes import Child, kill_group, spawn
from recover_megatron.launch.workers.states import describe_end

if TYPE_CHECKING:
    import torch

PATTERN = 0xA5
BYTES = 256 << 20
SIDE = 1024
ROUNDS = 8
_RECOVERY = {
    1: "a reset",
    2: "a reboot of the host",
    3: "to be drained of P2P traffic",
    4: "to be drained, and a reset",
}


def computes(device: torch.device, size: int = BYTES, side: int = SIDE) -> str:
    """What ``device`` gets wrong: memory that does not keep what is written, sums that are known.  Empty: nothing."""
    import torch

    memory = torch.full((size,), PATTERN, dtype=torch.uint8, device=device)
    if int(memory.min()) != PATTERN or int(memory.max()) != PATTERN:
        return f"{size >> 20} MiB of its memory do not hold what was written to them"
    del memory
    # Small whole numbers: every product and every sum is exact in float32 (and in TF32), in whatever order.
    numbers = torch.arange(side * side, dtype=torch.int64).view(side, side)
    left, right = ((numbers * 7 + numbers // side) % 8).float(), ((numbers * 5 + 3) % 8).float()
    known = left @ right
    left, right = left.to(device), right.to(device)
    for _ in range(ROUNDS):
        if not torch.equal((left @ right).cpu(), known):
            return "a product of two matrices is not the one that is known"
    return ""


def complains(nvml: Any, uuid: str) -> str:
    """What NVML (the module ``pynvml``) says against the device of this UUID; empty: nothing."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if failed := _asked(nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                        nvml.NVML_VOLATILE_ECC):  # fmt: skip
        return f"{failed} uncorrectable ECC errors since the driver was loaded"
    _, _, pending, failure = _asked(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    if pending or failure:
        return "rows of its memory wait for a reset to be replaced" if pending else "rows of its memory have no spare"
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = _asked(nvml, "nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    action = values[0].value.uiVal if values and values[0].nvmlReturn == 0 else 0
    return (
        f"its driver wants {_RECOVERY.get(action, f'recovery action {action}')} (an Xid: see dmesg)" if action else ""
    )


def _asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """What NVML says; None where this device or driver does not know."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def examine(local_rank: int) -> str:
    """What is wrong with the device of this local rank; empty: nothing was found."""
    import torch

    if local_rank >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices here"
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
        return complains(nvml, uuid)
    except nvml.NVMLError as error:
        print(f"NVML was not asked: {error}")
        return ""


DEFAULT = (sys.executable, "-m", "recover_megatron.launch.device_test")
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is a CUDA driver one of these is; on WSL the second."""
_LAST_BYTES = 4096


def command_of(given: tuple[str, ...], device: str, drivers: tuple[str, ...] = DRIVERS) -> tuple[str, ...]:
    """The test of a worker's device: ``given``, else ours where ``device`` (--recover-device) is CUDA, else none."""
    if given:
        return given
    cuda = device == "cuda" or (device == "auto" and any(map(os.path.exists, drivers)))
    return DEFAULT if cuda else ()


@dataclass
class _Test:
    output: IO[bytes]
    timer: Timer
    then: Callable[[str], None]
    late: bool = False


@dataclass(eq=False)
class DeviceTests:
    """The tests under way."""

    _loop: EventLoop
    _command: tuple[str, ...]
    _seconds: float
    """How long one may take."""

    def begin(self, environment: Mapping[str, str], then: Callable[[str], None]) -> None:
        """Test a worker's device; ``then`` gets why it failed, empty: it has passed.  Raises OSError."""
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the test has ended
        pid, pidfd = spawn(self._command, environment, output.fileno(), output.fileno(), deaf=True)
        test = _Test(output, self._loop.call_later(self._seconds, lambda: self._late(test, pid)), then)
        Child(self._loop, (pid, pidfd), partial(self._ended, test), with_group=True)

    @staticmethod
    def _late(test: _Test, pid: int) -> None:
        test.late = True
        kill_group(pid)

    def _ended(self, test: _Test, status: int) -> None:
        test.timer.cancel()
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


def main() -> int:
    """The exit code: 0 where nothing was found."""
    if wrong := examine(int(os.environ.get("LOCAL_RANK", "0"))):
        print(wrong, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
