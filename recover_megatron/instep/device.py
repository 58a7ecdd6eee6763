"""A device that has failed is a dead worker: it is noticed, and the process ends soon, whatever hangs in it.

CUDA error in the main thread, or told by a ring's handle  --> faults.is_of_device --> ends_soon, exit code 1
an orphan comes out of the training --> check_device       --> the same, before it offers its state to anybody
"""

from __future__ import annotations

import os
import threading

import torch

from recover_megatron.logger import get_logger

log = get_logger(__name__)

EXIT_BROKEN_DEVICE = 1
"""That of any fault of a worker's own: its launcher may start another one in its place."""
END_SECONDS = 4.0


def check_device(device: torch.device) -> None:
    """Return if ``device`` still computes.  Raises what CUDA raises if an earlier kernel has broken this process.

    Aborted kernels may have left indices that later ones followed; the error comes with the first call that looks.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).item()


def break_device(device: torch.device) -> None:
    """Index beyond a tensor on ``device``: the kernel's assertion is an error that lasts until the process ends."""
    torch.zeros(4, device=device)[torch.tensor([1 << 30], device=device)]


def ends_soon(seconds: float = END_SECONDS) -> None:
    """See to it that this process ends within ``seconds``: with a broken device anything may hang from here on."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    log.info("the device of this worker has failed, and its last words take too long: it ends")
    os._exit(EXIT_BROKEN_DEVICE)
