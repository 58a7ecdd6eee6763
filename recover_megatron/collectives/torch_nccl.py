"""torch's groups over NCCL: their kind, the environment that they need, and how one is made.

Written to NCCL's and torch's documented behaviour; run on one GPU, over sockets (docs/reference/gpu_results.md).

Every value of ``environment`` answers something that torch does by itself (``ProcessGroupNCCL``, ``NCCLUtils``):

- its watchdog ends the process when it sees an error, and its monitor when the watchdog makes no heartbeat;
- a call that is in the middle of a group launch while its communicator is aborted never learns it: it spins until
  TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes, and the coordinator takes the worker for one that hangs;
- for a failed operation the watchdog sleeps TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 60 s, while it holds the lock that
  every new operation of the group needs;
- the flight recorder keeps Python's stack of every operation.
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
"""Seconds in which a group of thousands has been made ready, and no worker is taken for hung."""
_LONGEST_DUMP_MS = 1000
_NONBLOCKING, _DUMP = "TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def environment(hang_timeout: float) -> dict[str, str]:
    """torch's variables with what recovery needs, where a worker counts as hung after ``hang_timeout`` seconds."""
    return dict.fromkeys(_OFF, "0") | {
        _NONBLOCKING: str(max(1, min(_LONGEST_LAUNCH, int(hang_timeout / 2)))),
        _DUMP: "1",
        "TORCH_FR_BUFFER_SIZE": "0",
    }


def set_environment(hang_timeout: float = 60.0, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Give torch's variables the values that recovery needs, before the first group is made; a user's own stand.

    Returns a user's that stand against it, as "NAME=VALUE instead of VALUE".  (A flight recorder only costs time.)
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
    """Have torch's "nccl" be ProcessGroupNCCL, of which ``make_backend`` makes groups; why it cannot be, if so.

    torch 2.14 and later have ProcessGroupNCCL2, too, an option of 2.14 and the default of 2.15.  What the name means is
    settled by TORCH_DIST_USE_NCCL2 when it is first used: if not before, then here.
    """
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return []
    value = environ[NCCL2_VARIABLE] = environ.get(NCCL2_VARIABLE) or "0"
    if value != "0":
        return [
            f"{NCCL2_VARIABLE}={value}: --recover makes groups of torch's ProcessGroupNCCL after a death, and those of "
            "the start would be of another kind: unset it, or leave --recover out"
        ]
    dist.BackendConfig(dist.Backend("nccl"))
    if dist.Backend._plugins["NCCL"].creator_fn is c10d._create_nccl_process_group:
        if environ.get("RANK", "0") == "0":
            log.info(
                f"torch {torch.__version__}: groups over NCCL are ProcessGroupNCCL, not ProcessGroupNCCL2 "
                f"({NCCL2_VARIABLE}=0): of their kind are those that --recover makes after a death"
            )
        return []
    return [
        f"--recover needs {NCCL2_VARIABLE}=0 before torch's first group over NCCL is made, and this process has used "
        "the name already (torch has made it ProcessGroupNCCL2): set it where the workers are started, as recover-run "
        "does, or take a torch before 2.15"
    ]


def _below(text: str, limit: float) -> bool:
    """Whether torch reads ``text`` as a number below ``limit``; it takes a text that is none for its default."""
    try:
        return int(text) < limit
    except ValueError:
        return False


def abortable_options(given: Any = None) -> Any:
    """``ProcessGroupNCCL.Options`` of a group that may be aborted at any time, otherwise like those ``given``."""
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
    """A group of NCCL's whose communicators may be aborted at any time; none is opened yet."""
    set_environment()
    options = abortable_options(given)
    if name:
        options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, size, options)


def make_group(
    store: dist.Store, name: str, rank: int, size: int, device: torch.device, given: Any = None
) -> dist.ProcessGroup:
    """A process group of torch's with such a backend for ``device``; ``given``: the options of the group before it."""
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
    backend = make_backend(dist.PrefixStore(f"{name}/nccl", store), rank, size, name, given)
    register(group, device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    return group


def connect(group: Any, device: torch.device) -> None:
    """Open the communicator of a group that ``make_group`` made, for ``device``; all members, who have met, call it.

    One that is opened by its first operation waits for members that compile or compute before they come to it, and
    gives up after TORCH_NCCL_NONBLOCKING_TIMEOUT.  Raises ``DistBackendError``, also when it is aborted meanwhile.
    """
    group._get_backend(device).eager_connect_single_device(device)


def register(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Have ``group`` use ``backend`` for tensors of ``device``."""
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
