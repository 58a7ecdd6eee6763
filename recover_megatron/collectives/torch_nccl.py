"""Creation of torch's process groups over NCCL (``ProcessGroupNCCL``), and the environment variables that they need.

The code follows the documentation of NCCL and torch.  It was tested on one GPU, where NCCL used sockets
(docs/reference/gpu_results.md).

``environment`` replaces these defaults of torch (``ProcessGroupNCCL``, ``NCCLUtils``), which prevent a recovery or cost
time:

- A watchdog terminates the process when it sees an error.  A monitor terminates the process if the watchdog hangs.
- If a communicator is aborted during a call inside a group launch, the call does not notice the abort.  It spins until
  TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes, so the coordinator considers the worker hung.
- After a failed operation the watchdog sleeps TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 60 s, and holds a lock that every
  new operation of the group needs.
- The flight recorder stores the Python stack of every operation.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from recover_megatron.logger import get_logger
from recover_megatron.variables import NCCL2_VARIABLE

log = get_logger(__name__)

_NO_TIMEOUT = timedelta(days=7)
_LONGEST_LAUNCH = 25
"""Maximum of TORCH_NCCL_NONBLOCKING_TIMEOUT in seconds.

It is enough to initialize a group of thousands of workers, but too short for a worker to count as hung.
"""
_LONGEST_DUMP_MS = 1000
_NONBLOCKING, _DUMP = "TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def environment(hang_timeout: float) -> dict[str, str]:
    """Return the values that recovery needs for torch's environment variables, by name.

    ``hang_timeout``: seconds without progress after which the coordinator considers a worker hung.
    """
    return dict.fromkeys(_OFF, "0") | {
        _NONBLOCKING: str(max(1, min(_LONGEST_LAUNCH, int(hang_timeout / 2)))),
        _DUMP: "1",
        "TORCH_FR_BUFFER_SIZE": "0",
    }


def set_environment(hang_timeout: float = 60.0, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set torch's environment variables to the values that recovery needs; keep values that the user has set.

    Call this before the first group is created.  Returns the user's values that prevent a recovery, each as "NAME=VALUE
    instead of VALUE".  The variable of the flight recorder is never in the result, because the recorder only costs
    time.
    """
    wanted = environment(hang_timeout)
    for name, value in wanted.items():
        environ.setdefault(name, value)
    against = [name for name in _OFF if environ[name] != "0"]
    if not _below(environ[_NONBLOCKING], hang_timeout):
        against.append(_NONBLOCKING)
    if not _below(environ[_DUMP], _LONGEST_DUMP_MS + 1):
        against.append(_DUMP)
    return [f"{name}={environ[name]} instead of {wanted[name]}" for name in against]


def keep_one_kind(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Make torch use ProcessGroupNCCL, as ``make_backend`` does, for the backend name "nccl".

    Returns the reasons why this is impossible; [] on success.  torch 2.14 and later also have ProcessGroupNCCL2, which
    is optional in 2.14 and the default in 2.15.  torch reads TORCH_DIST_USE_NCCL2 only at the first use of the name
    "nccl"; so this function sets the variable and uses the name.
    """
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return []
    value = environ[NCCL2_VARIABLE] = environ.get(NCCL2_VARIABLE) or "0"
    if value != "0":
        return [
            f"{NCCL2_VARIABLE}={value} selects ProcessGroupNCCL2, but after a failure --recover creates groups of "
            "ProcessGroupNCCL, and the two cannot be mixed: unset the variable, or leave out --recover"
        ]
    dist.BackendConfig(dist.Backend("nccl"))
    if dist.Backend._plugins["NCCL"].creator_fn is c10d._create_nccl_process_group:
        if environ.get("RANK", "0") == "0":
            log.info(
                f"torch {torch.__version__}: all NCCL groups use ProcessGroupNCCL, not ProcessGroupNCCL2 "
                f"({NCCL2_VARIABLE}=0), because --recover creates such groups after a failure"
            )
        return []
    return [
        f"--recover needs {NCCL2_VARIABLE}=0 when torch first uses the backend nccl, but this process has already used "
        "it without the variable, so torch has selected ProcessGroupNCCL2: set the variable before the workers start, "
        "as recover-run does, or use a torch version before 2.15"
    ]


def _below(text: str, limit: float) -> bool:
    """Return whether ``text`` is an integer below ``limit``; False if it is no integer: torch then uses its default."""
    try:
        return int(text) < limit
    except ValueError:
        return False


def abortable_options(given: Any = None) -> Any:
    """Return NCCL options that allow an abort at any time; stream priority and config are copied from ``given``."""
    options = dist.ProcessGroupNCCL.Options()
    if given is not None:
        options.is_high_priority_stream = given.is_high_priority_stream
        for name in vars(type(given.config)):
            if not name.startswith("_") and name != "unsafe_get_ptr" and getattr(given.config, name) is not None:
                setattr(options.config, name, getattr(given.config, name))
    options.config.blocking = 0
    options._timeout = _NO_TIMEOUT
    return options


def make_backend(store: dist.Store, rank: int, size: int, name: str = "", given: Any = None) -> Any:
    """Create an NCCL backend whose communicators can be aborted at any time; the first operation opens one.

    ``name``: name of the group.  ``given``: NCCL options to copy.
    """
    set_environment()
    options = abortable_options(given)
    if name:
        options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, size, options)


def make_group(
    store: dist.Store, name: str, rank: int, size: int, device: torch.device, given: Any = None
) -> dist.ProcessGroup:
    """Create a process group of torch with an NCCL backend for ``device``; arguments as in ``make_backend``."""
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
    backend = make_backend(dist.PrefixStore(f"{name}/nccl", store), rank, size, name, given)
    register(group, device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    return group


def connect(group: Any, device: torch.device) -> None:
    """Open the NCCL communicator of ``group`` (from ``make_group``) for ``device``.

    All members must call this at the same time.  Without this call, the group's first operation opens the communicator.
    If another member then compiles or computes for longer than TORCH_NCCL_NONBLOCKING_TIMEOUT, the operation fails.
    Raises ``DistBackendError``, also if another thread aborts the group.
    """
    group._get_backend(device).eager_connect_single_device(device)


def register(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Make ``group`` use ``backend`` for tensors of ``device``."""
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
