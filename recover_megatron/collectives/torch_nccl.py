"""torch's groups over NCCL: the environment that they need, how one is made, and how they are aborted.

NOT RUN: written to NCCL's and torch's documented behaviour, never executed on a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NO_TIMEOUT = timedelta(days=7)
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watchdog would end the process: faults are this package's to handle."""


def set_environment(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Give torch's variables the values that recovery needs, before the first group is made; a user's own stand.

    Returns those that stand against it, as NAME=VALUE.
    """
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)
    return [f"{name}={environ[name]}" for name, value in ENVIRONMENT.items() if environ[name] != value]


def make_backend(store: dist.Store, rank: int, size: int, name: str = "") -> Any:
    """A group of NCCL's whose communicators may be aborted at any time; none is opened yet."""
    set_environment()
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = _NO_TIMEOUT
    if name:
        options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, size, options)


def abort_beside(backends: Sequence[Any]) -> None:
    """Abort each (a backend, or a process group of torch's) in a thread of its own, and do not wait for it."""
    for backend in backends:
        threading.Thread(target=backend.abort, name="aborting a communicator of NCCL's", daemon=True).start()
