"""Environment variables of this package, and variables of torch, gloo, NCCL and Python that affect recovery.

``TABLE`` defines how recovery treats the variables of torch, gloo, NCCL and Python that a user has set
(docs/operations.md).  The launcher applies the table to the environment of its workers.  A worker with --recover
applies the table to its environment again, since another launcher may have started it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum

LOG_DIR_VARIABLE = "RECOVER_LOG_DIR"
"""Default of ``--recover-log-dir``; recover-run sets it to its ``--log-dir``."""
COORDINATOR_VARIABLE = "RECOVER_COORDINATOR"
"""Default of ``--recover-coordinator``; recover-run sets it to the addresses of the candidates."""
SECRET_VARIABLE = "RECOVER_SECRET"
SECRET_FILE_VARIABLE = "RECOVER_SECRET_FILE"
NODE_VARIABLE = "RECOVER_NODE_AGENT"
"""Name of the node agent (the launcher) of this worker's node; not set if the node has no node agent."""
RELAY_VARIABLE = "RECOVER_RELAY"
"""Abstract name of the Unix socket of the node's relay (``membership/io/relay.py``); not set if there is none."""
NODE_NAME_VARIABLE = "RECOVER_NODE_NAME"
"""Name of this worker's node; workers with the same name are on the same host."""
HOST_VARIABLE = "RECOVER_HOST"
"""Address at which other nodes reach this worker's node; the launcher does not set it if the run has one node."""
WORKER_ID_VARIABLE = "RECOVER_WORKER_ID"
"""Id of this worker; if not set, the rank is the worker id."""
JOIN_VARIABLE = "RECOVER_JOIN"
"""Set to 1 if this worker is a newcomer, not a worker of the launch."""
SPARE_VARIABLE = "RECOVER_SPARE"
"""Set to 1 if this newcomer is a spare that was started at launch."""
REPLACED_VARIABLE = "RECOVER_REPLACED"
"""Set to any value if lost workers may be replaced, by spares or by workers that the launcher starts."""
LAUNCH_ID_VARIABLE = "RECOVER_LAUNCH_ID"
"""Id of the launch; identifies all processes that a launcher and its workers have started."""
LINES_VARIABLE = "RECOVER_LOG_LINES"
"""Format of log lines (``logger.LineFormat``) and the node's name, for a process with the same stderr as its launcher.
"""
DEATH_NOTICE_VARIABLE = "RECOVER_DEATH_NOTICE"
"""Name and path of the memory page that shows a worker's death to its launcher at once (``network/death_notice.py``).
"""
PREPARED_VARIABLE = "RECOVER_PREPARED"
"""Descriptor of the pipe by which a prepared process gets its environment (``network/handover.py``), or of the socket
by which a fork server gets requests (``network/fork_server.py``)."""
ROOM_VARIABLE = "RECOVER_ROOM"
"""Room for variables that /proc/PID/environ shows when a prepared process has become a worker."""
OF_A_WORKER = (
    WORKER_ID_VARIABLE, LOG_DIR_VARIABLE, JOIN_VARIABLE, PREPARED_VARIABLE, RELAY_VARIABLE, REPLACED_VARIABLE,
    ROOM_VARIABLE, SPARE_VARIABLE,
)  # fmt: skip
"""Variables that a launcher ignores in its own environment: it was started by a worker of another launch."""
ATTEMPT_VARIABLE = "RECOVER_START_ATTEMPT"
"""Number of earlier attempts to start the run; only the launcher reads it."""
WITHOUT_VARIABLE = "RECOVER_START_WITHOUT"
"""Nodes that the launcher leaves out in this attempt to start the run; only the launcher reads it."""
FIRST_START_VARIABLE = "RECOVER_FIRST_START"
"""Unix time, in seconds, at which the launcher first started a worker; set only in later attempts to start the run."""
NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
"""Variable of torch.  With 0 the backend "nccl" is ProcessGroupNCCL; otherwise, since torch 2.15, ProcessGroupNCCL2."""


class Rule(Enum):
    """Treatment of an environment variable that a user has set."""

    OVERRULED = "overruled"
    """The user's value is replaced or removed, and a log line reports that."""
    REFUSED = "refused"
    """The run does not start, and the user gets an error."""
    DEFAULT = "kept; else set"
    """The user's value is kept.  If the user has set none, recovery sets a value."""
    KEPT = "kept"


@dataclass(frozen=True)
class Variable:
    """Environment variables that recovery treats in the same way."""

    names: tuple[str, ...]
    rule: Rule
    why: str
    """Reason for the treatment, as text for the user."""
    value: str | None = None
    """Value that recovery sets; if None, it removes the variable or, with ``DEFAULT``, computes a value for the run."""
    fine: tuple[str, ...] = ("", "0")
    """Values, in upper case, that recovery leaves unchanged."""


TABLE = (
    Variable(
        ("TORCH_GLOO_LAZY_INIT",),
        Rule.OVERRULED,
        "gloo would open a group's connections only in its first operation; recovery can only "
        "abort a group if it has found the connections when the group was created",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",),
        Rule.OVERRULED,
        "with DETAIL torch checks each operation over another group, which recovery cannot abort",
        "INFO",
        ("", "OFF", "INFO"),
    ),
    Variable(
        ("GLOO_DEVICE_TRANSPORT",),
        Rule.REFUSED,
        "recovery can abort only plain TCP connections of gloo: unset the variable, or train without --recover",
        fine=("", "TCP"),
    ),
    Variable(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        Rule.REFUSED,
        "the first groups would use torchcomms, but --recover can abort and create only torch's ProcessGroups: unset "
        "the variable, or train without --recover",
    ),
    Variable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
        Rule.OVERRULED,
        "the worker would block in each collective inside a replica, and could not receive a plan; the last two are "
        "old names, which torch still reads",
        fine=("",),
    ),
    Variable(
        ("NCCL_COMM_BLOCKING", "NCCL_COMM_ID"),
        Rule.OVERRULED,
        "a communicator with blocking calls cannot be aborted during its initialization; with a fixed NCCL_COMM_ID "
        "only one communicator can be created",
        fine=("",),
    ),
    Variable(
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_ENABLE_MONITORING",
            "TORCH_NCCL_NONBLOCKING_TIMEOUT",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
            "TORCH_FR_BUFFER_SIZE",
        ),
        Rule.DEFAULT,
        "torch's watchdog would terminate or block a worker during recovery; a worker sets these variables on GPUs "
        "only, and warns about another value",
    ),
    Variable(
        (NCCL2_VARIABLE,),
        Rule.DEFAULT,
        "groups that are rebuilt after a death use ProcessGroupNCCL, and the first groups must be of the same kind; on "
        "GPUs, if torch has ProcessGroupNCCL2, another value is refused",
        "0",
    ),
    Variable(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        Rule.DEFAULT,
        "the network interface by which this host and the other hosts reach each other",
    ),
    Variable(("OMP_NUM_THREADS",), Rule.DEFAULT, "several workers share the cores of a host", "1"),
    Variable(("PYTHONUNBUFFERED",), Rule.OVERRULED, "the last output of a worker must not be lost", "1", ("", "1")),
    Variable(
        ("PYTHONINSPECT",),
        Rule.OVERRULED,
        "Python would replace a worker's exit code, but recovery needs the code to know how the worker ended",
        fine=("",),
    ),
    Variable(
        (
            "TORCH_DIST_INIT_BARRIER",
            "TORCH_SHOW_CPP_STACKTRACES",
            "GLOO_DISABLE_CONNECTION_RETRIES",
            "PYTHONOPTIMIZE",
        ),
        Rule.KEPT,
        "recovery does not depend on them",
    ),
    Variable(
        ("NCCL_DEBUG", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "TORCH_NCCL_USE_COMM_NONBLOCKING"),
        Rule.KEPT,
        "recovery does not depend on them; docs/gpu.md lists problems in which they help",
    ),
)


def overrule(environ: MutableMapping[str, str]) -> list[str]:
    """Replace or remove the values in ``environ`` with which recovery cannot work; return a log line for each."""
    lines = []
    for variable, name, value in _against(environ, Rule.OVERRULED):
        if variable.value is None:
            del environ[name]
        else:
            environ[name] = variable.value
        instead = "removed" if variable.value is None else f"{variable.value} instead"
        lines.append(f"{name}={value} in the environment is overruled ({instead}): {variable.why} (docs/operations.md)")
    return lines


def refusals(environ: Mapping[str, str]) -> list[str]:
    """Return the reasons why no worker can be started with the variables in ``environ``; empty if workers can."""
    return [f"{name}={value}: {variable.why}" for variable, name, value in _against(environ, Rule.REFUSED)]


def _against(environ: Mapping[str, str], rule: Rule) -> list[tuple[Variable, str, str]]:
    return [
        (variable, name, environ[name])
        for variable in TABLE
        if variable.rule is rule
        for name in variable.names
        if name in environ and environ[name].upper() not in variable.fine
    ]
