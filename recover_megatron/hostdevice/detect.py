"""Is there a CUDA device?  Asked in a child process, so that the asking process can still fork.

``torch.cuda.is_available()`` may initialise the CUDA driver or mark the process as unfit to fork; the launcher asks
before it forks its workers.  The child asks the driver itself (``cuInit``, ``cuDeviceGetCount``), so that
``CUDA_VISIBLE_DEVICES`` means what it means to CUDA, and a driver that is there but broken is told from no driver.
"""

from __future__ import annotations

import subprocess
import sys

DEADLINE_S = 60.0
"""Longest wait for the driver's answer; initialising a node's eight GPUs takes some seconds at worst."""

# Prints one line: "none" (no driver, or a driver without a device), "devices N", or "broken TEXT".
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


class CudaBroken(RuntimeError):
    """A CUDA driver is installed but does not work."""


def driver_device_count() -> int:
    """How many devices the CUDA driver offers to this process; 0 where there is no driver.

    Raises ``CudaBroken`` where a driver is installed and fails: whether to go on without it is the user's decision.
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
    word, _, rest = done.stdout.strip().partition(" ")
    if word == "none":
        return 0
    if word == "devices":
        return int(rest)
    raise CudaBroken(rest or f"asking the CUDA driver ended with status {done.returncode}: {done.stderr.strip()}")


def usable_device_count() -> int:
    """As ``driver_device_count``, but 0 too where the installed torch was built without CUDA."""
    count = driver_device_count()
    if count:
        import torch

        if not torch.backends.cuda.is_built():
            return 0
    return count
