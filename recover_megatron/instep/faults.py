"""Whose fault an exception is: this worker's own, or that of somebody it communicates with."""

from __future__ import annotations

import platform

import torch.distributed as dist

_SIGNS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)
"""Texts of torch's communication errors that have no type of their own (gloo raises RuntimeError)."""

_FROM_A_LOADER = "in DataLoader worker process"
"""In the text of an exception that a process of a torch DataLoader raised: its traceback follows, and its own text."""


def is_communication(error: BaseException) -> bool:
    """Whether ``error`` came from an operation on a group of processes, so that another worker may be its cause.

    Also when it was raised while such an error was handled (torch's own logging of it may fail).
    """
    if error.__context__ is not None and is_communication(error.__context__):
        return True
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def signature(error: BaseException) -> str:
    """An exception in one line: for the same fault on another worker equal but for its numbers (ranks, devices)."""
    text = " ".join(str(error).split()).replace(platform.node() or "\0", "this host")
    if _FROM_A_LOADER in text:  # one worker's loader process met what another meets on the spot
        text = text.rpartition(f" {type(error).__name__}: ")[2]
    return f"{type(error).__name__}: {text}"[:1000]
