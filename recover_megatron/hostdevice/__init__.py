"""Run Megatron-LM's own training loop on a machine without a GPU (docs/hostdevice.md).

``wanted(device)`` returns whether a run must use the host device.  After ``activate()``, ``torch.cuda`` describes one
simulated device whose memory is ordinary host memory.  The import of this package changes nothing, and does not import
torch or Megatron.
"""

from __future__ import annotations

import subprocess
import sys

from recover_megatron.hostdevice.flags import host_defaults as host_defaults
from recover_megatron.hostdevice.flags import never_summed as never_summed
from recover_megatron.hostdevice.flags import speaks as speaks
from recover_megatron.hostdevice.flags import unsupported as unsupported
from recover_megatron.hostdevice.flags import warn_of_what_is_never_summed as warn_of_what_is_never_summed
from recover_megatron.logger import get_logger

log = get_logger(__name__)

_active = False

DEADLINE_S = 60.0
"""Maximum time to initialize the CUDA driver, in seconds; a node with eight GPUs needs a few seconds."""

# A program that prints one line: "none" (no driver, or a driver without a device), "devices N", or "broken TEXT".
_PROBE = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("none")
    raise SystemExit
NO_DEVICE, STUB_LIBRARY = 100, 34
code, count = driver.cuInit(0), ctypes.c_int(0)
if code == 0:
    code = driver.cuDeviceGetCount(ctypes.byref(count))
if code in (NO_DEVICE, STUB_LIBRARY):
    print("none")
elif code:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    print("broken", "CUDA error", code, (text.value or b"").decode())
else:
    print("devices", count.value)
"""


class HostDeviceError(RuntimeError):
    """Error: the wanted device cannot be used or activated.  The message gives the reason and the remedy."""


class CudaBroken(RuntimeError):
    """Error: a CUDA driver is installed but does not work."""


def wanted(device: str) -> bool:
    """Return whether a run with ``--recover-device device`` must use the host device.

    "cpu": True.  "cuda": False.  "auto": True if there is no CUDA device that torch can use.  Initializes no driver, so
    this process can still fork.  Raises ``HostDeviceError`` for "cuda" if there is no such device.  Raises it for
    "auto" and "cuda" if a CUDA driver is installed but fails, since a worker without a GPU would slow down the run.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device must be auto, cuda or cpu, not {device!r}")
    if device == "cpu":
        return True
    try:
        count = usable_device_count()
    except CudaBroken as problem:
        raise HostDeviceError(
            f"a CUDA driver is installed on this machine but does not work: {problem}. "
            "Fix the driver (nvidia-smi shows its state), or run without a GPU with --recover-device cpu."
        ) from None
    if device == "auto":
        return count == 0
    if count == 0:
        raise HostDeviceError(
            "--recover-device cuda: this process has no usable CUDA device (no driver, no device in "
            "CUDA_VISIBLE_DEVICES, or a torch built without CUDA). "
            "Use --recover-device cpu, or auto, to run without a GPU."
        )
    return False


def driver_device_count() -> int:
    """Return the number of devices that the CUDA driver offers to this process; 0 if there is no driver.

    A child process queries the driver, since a process that has initialized the driver cannot fork.  The child does
    not use torch, so that the driver interprets ``CUDA_VISIBLE_DEVICES``, and a broken driver is distinguished from a
    missing driver.  Raises ``CudaBroken`` if a driver is installed and fails.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CudaBroken(f"the CUDA driver did not answer within {DEADLINE_S:.0f} s") from None
    kind, _, rest = done.stdout.strip().partition(" ")
    if kind == "none":
        return 0
    if kind == "devices":
        return int(rest)
    raise CudaBroken(rest or f"the query of the CUDA driver exited with {done.returncode}: {done.stderr.strip()}")


def usable_device_count() -> int:
    """Return the number of CUDA devices that torch can use: 0 if torch was built without CUDA.

    Raises ``CudaBroken`` if a driver is installed and fails.
    """
    count = driver_device_count()
    if count:
        import torch

        if not torch.backends.cuda.is_built():
            return 0
    return count


def is_active() -> bool:
    """Return whether ``activate`` has run in this process (or in the process from which it was forked)."""
    return _active


def activate(within: str | None = None) -> None:
    """Make torch and Megatron of this process run on the host.  Idempotent; it cannot be undone.

    Raises ``HostDeviceError`` if a Megatron module was imported before, because Megatron keeps references to functions
    that are replaced here.  ``within``: name of the package of a patched Megatron that calls this function; then
    only the modules of that package are checked.  A process with rank 0 or without a rank logs one line.
    """
    global _active
    if _active:
        return
    loaded = sorted(name for name in sys.modules if name.startswith(f"{within or 'megatron'}."))
    if loaded:
        raise HostDeviceError(
            f"the host device must be activated before Megatron is imported, but {loaded[0]} is imported already: "
            "call recover_megatron.hostdevice.activate() first, at the top of the training script."
        )
    from recover_megatron.hostdevice import apex_stub, megatron_fixes, replacements

    table = replacements.table()
    for entry in table:
        setattr(entry.owner, entry.name, entry.value)
    apex_stub.install()
    megatron_fixes.install()
    _active = True
    if speaks():
        log.info(
            "no CUDA device is used: Megatron runs on the CPU, with gloo instead of nccl; "
            f"{len(table)} entry points of torch are replaced (docs/hostdevice.md)"
        )
