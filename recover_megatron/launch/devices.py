"""How many GPUs this host has, without torch: importing it takes seconds, and may open the devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder here for each GPU."""


def gpus(environ: Mapping[str, str], proc: Path = PROC) -> int:
    """Those that processes here may use: CUDA_VISIBLE_DEVICES if set, else all that the driver has."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [word.strip() for word in visible.split(",")]
        # As CUDA reads it: what comes behind an entry that means no device is not seen.
        end = next((n for n, word in enumerate(listed) if word in ("", "-1", "NoDevFiles")), len(listed))
        return end
    try:
        return sum(1 for _ in proc.iterdir())
    except OSError:
        return 0


def processes(text: str, environ: Mapping[str, str], proc: Path = PROC) -> int | None:
    """What torchrun's words for ``--nproc-per-node`` mean here; None: ``text`` is none of them.  Raises ValueError."""
    count = gpus(environ, proc)
    if text == "gpu" and count == 0:
        raise ValueError("this host has no GPU (CUDA_VISIBLE_DEVICES, NVIDIA's driver): give a number, or cpu")
    words = {"gpu": count, "cpu": len(os.sched_getaffinity(0)), "auto": count or len(os.sched_getaffinity(0))}
    return words.get(text)
