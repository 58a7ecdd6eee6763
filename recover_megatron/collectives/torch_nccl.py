"""torch's process groups over NCCL (``ProcessGroupNCCL``): creation, and the environment variables that they need.

Written to NCCL's and torch's documented behaviour; tested on one GPU, over sockets (docs/reference/gpu_results.md).

``environment`` switches off these defaults of torch (``ProcessGroupNCCL``, ``NCCLUtils``), which prevent a recovery:

- a watchdog terminates the process when it sees an error, and a monitor does so if the watchdog has no heartbeat;
- a call inside a group launch does not notice that its communicator was aborted: it spins until
  TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes, and the coordinator considers the worker hung;
- for a failed operation the watchdog sleeps TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 60 s, while it holds the lock that
  every new operation of the group needs;
- the flight recorder keeps the Python stack of every operation.
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
"""Seconds: enough to initialize a group of thousands of workers, too short for a worker to count as hung."""
_LONGEST_DUMP_MS = 1000
_NONBLOCKING, _DUMP = "TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def environment(hang_timeout: float) -> dict[str, str]:
    """Return torch's environment variables as recovery needs them; ``hang_timeout``: seconds until a worker is hung."""
    return dict.fromkeys(_OFF, "0") | {
        _NONBLOCKING: str(max(1, min(_LONGEST_LAUNCH, int(hang_timeout / 2)))),
        _DUMP: "1",
        "TORCH_FR_BUFFER_SIZE": "0",
    }


def set_environment(hang_timeout: float = 60.0, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set torch's environment variables as recovery needs them, except for those that the user has set.

    Call it before the first group is created.  Returns the user's values that prevent a recovery, as "NAME=VALUE
    instead of VALUE".  (A flight recorder prevents none, and only costs time.)
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
    """Make the backend name "nccl" mean ProcessGroupNCCL, as in ``make_backend``; return the reasons if it cannot.

    torch 2.14 and later also have ProcessGroupNCCL2, which is optional in 2.14 and the default in 2.15.  torch reads
    TORCH_DIST_USE_NCCL2 at the first use of the name, which happens in this function at the latest.
    """
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return []
    value = environ[NCCL2_VARIABLE] = environ.get(NCCL2_VARIABLE) or "0"
    if value != "0":
        return [
            f"{NCCL2_VARIABLE}={value}: after a failure --recover creates groups of torch's ProcessGroupNCCL, which "
            "cannot be mixed with ProcessGroupNCCL2: unset the variable, or leave out --recover"
        ]
    dist.BackendConfig(dist.Backend("nccl"))
    if dist.Backend._plugins["NCCL"].creator_fn is c10d._create_nccl_process_group:
        if environ.get("RANK", "0") == "0":
            log.info(
                f"torch {torch.__version__}: NCCL groups use ProcessGroupNCCL, not ProcessGroupNCCL2 "
                f"({NCCL2_VARIABLE}=0); groups that --recover creates after a failure do, too"
            )
        return []
    return [
        f"--recover needs {NCCL2_VARIABLE}=0 before torch creates its first NCCL group, but this process has already "
        "used the name nccl, which means ProcessGroupNCCL2 now: set the variable where the workers are started, as "
        "recover-run does, or use a torch before 2.15"
    ]


def _below(text: str, limit: float) -> bool:
    """Return whether ``text`` is an integer below ``limit``; for any other text torch uses its default: False."""
    try:
        return int(text) < limit
    except ValueError:
        return False


def abortable_options(given: Any = None) -> Any:
    """Return options for a group that can be aborted at any time; all other options are those of ``given``."""
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
    """Create an NCCL backend whose communicators can be aborted at any time; it opens no communicator yet."""
    set_environment()
    options = abortable_options(given)
    if name:
        options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, size, options)


def make_group(
    store: dist.Store, name: str, rank: int, size: int, device: torch.device, given: Any = None
) -> dist.ProcessGroup:
    """Create a torch process group with a backend of ``make_backend`` for ``device``; ``given``: options to copy."""
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
    backend = make_backend(dist.PrefixStore(f"{name}/nccl", store), rank, size, name, given)
    register(group, device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    return group


def connect(group: Any, device: torch.device) -> None:
    """Open the communicator of a group from ``make_group``, for ``device``; all members call this at the same time.

    Otherwise the group's first operation would open the communicator, wait there for members that still compile or
    compute, and fail after TORCH_NCCL_NONBLOCKING_TIMEOUT.  Raises ``DistBackendError``, also if the group is aborted
    meanwhile.
    """
    group._get_backend(device).eager_connect_single_device(device)


def register(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Make ``group`` use ``backend`` for tensors of ``device``."""
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
