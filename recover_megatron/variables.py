"""Environment variables of this package, and variables of torch, gloo, NCCL and Python that would affect recovery.

``TABLE`` defines what happens to a user's value of a variable of torch, gloo, NCCL or Python (docs/operations.md shows
it).  The launcher applies the table to the environment of its workers, and a worker with --recover applies it to its
own environment, whichever launcher started it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum

LOG_DIR_VARIABLE = "RECOVER_LOG_DIR"
"""Default of ``--recover-log-dir``: recover-run's ``--log-dir``."""
COORDINATOR_VARIABLE = "RECOVER_COORDINATOR"
"""Default of ``--recover-coordinator``: recover-run's candidates."""
SECRET_VARIABLE = "RECOVER_SECRET"
SECRET_FILE_VARIABLE = "RECOVER_SECRET_FILE"
NODE_VARIABLE = "RECOVER_NODE_AGENT"
"""Name of the node agent (launcher) of this worker's node; not set: there is no node agent."""
NODE_NAME_VARIABLE = "RECOVER_NODE_NAME"
"""Name of this worker's node: workers with the same name are on the same host."""
HOST_VARIABLE = "RECOVER_HOST"
"""Address at which other nodes reach this worker's node; not set: there are no other nodes."""
WORKER_ID_VARIABLE = "RECOVER_WORKER_ID"
"""Worker id; not set: the worker id is the rank."""
JOIN_VARIABLE = "RECOVER_JOIN"
"""1: this worker is a newcomer, not a worker of the launch."""
SPARE_VARIABLE = "RECOVER_SPARE"
"""1: this newcomer was started with the run as a spare."""
REPLACED_VARIABLE = "RECOVER_REPLACED"
"""Set if lost workers may be replaced."""
LAUNCH_ID_VARIABLE = "RECOVER_LAUNCH_ID"
"""Mark that all processes started by a launcher have in their environment."""
LINES_VARIABLE = "RECOVER_LOG_LINES"
"""Line format (``logger.LineFormat``) and node of a process that inherited its launcher's stderr."""
DEATH_NOTICE_VARIABLE = "RECOVER_DEATH_NOTICE"
"""Name and path of the page that shows a worker's death to its launcher at once (``network/death_notice.py``)."""
ATTEMPT_VARIABLE = "RECOVER_START_ATTEMPT"
"""Number of earlier attempts to start the run; only the launcher reads it."""
WITHOUT_VARIABLE = "RECOVER_START_WITHOUT"
"""Nodes that this attempt to start leaves out; only the launcher reads it."""
FIRST_START_VARIABLE = "RECOVER_FIRST_START"
"""Unix time, in seconds, at which the launcher started its first worker; set only if the start was repeated."""
NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
"""Variable of torch; 0: the backend "nccl" is ProcessGroupNCCL; else, from torch 2.15 on, ProcessGroupNCCL2."""


class Rule(Enum):
    """Treatment of a value in the environment of a run."""

    OVERRULED = "overruled"
    """The value is replaced or removed, with a log line."""
    REFUSED = "refused"
    """The run is refused: no worker is started."""
    DEFAULT = "kept; else set"
    """A user's value is kept; if there is none, a value is set."""
    KEPT = "kept"


@dataclass(frozen=True)
class Variable:
    """Variables with the same treatment."""

    names: tuple[str, ...]
    rule: Rule
    why: str
    """Reason for the user: what recovery needs, or what the value would do."""
    value: str | None = None
    """Value that is set; None: the variable is removed or, with ``DEFAULT``, the value depends on the run."""
    fine: tuple[str, ...] = ("", "0")
    """Values, in capitals, to which the rule does not apply."""


TABLE = (
    Variable(
        ("TORCH_GLOO_LAZY_INIT",),
        Rule.OVERRULED,
        "gloo would connect in a group's first operation, but recovery must find the connections when the group is "
        "created, to be able to abort it",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",),
        Rule.OVERRULED,
        "with DETAIL all members first compare each operation over another group, which cannot be aborted",
        "INFO",
        ("", "OFF", "INFO"),
    ),
    Variable(
        ("GLOO_DEVICE_TRANSPORT",),
        Rule.REFUSED,
        "only gloo's connections over plain TCP can be aborted: unset it, or train without --recover",
        fine=("", "TCP"),
    ),
    Variable(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        Rule.REFUSED,
        "the first groups would use torchcomms, but --recover aborts and creates ProcessGroups of torch: unset it, or "
        "train without --recover",
    ),
    Variable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
        Rule.OVERRULED,
        "the host would block in torch in each collective inside a replica and could receive no plan; the last two are "
        "old names, which torch reads as well",
        fine=("",),
    ),
    Variable(
        ("NCCL_COMM_BLOCKING", "NCCL_COMM_ID"),
        Rule.OVERRULED,
        "a communicator whose calls block cannot be aborted during its initialization; with one address for all "
        "communicators only one can be created",
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
        "torch's watchdog would terminate or block a worker that recovery brings back; the worker sets these on GPUs "
        "only, and warns about a contrary value",
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
        "Python would replace a worker's exit code, by which recovery knows how the worker ended",
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
        "gpu.md says what to try with them",
    ),
)


def overrule(environ: MutableMapping[str, str]) -> list[str]:
    """Replace the values in ``environ`` that recovery cannot work with; return one log line for each."""
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
    """Return the reasons why no worker can be started in ``environ``."""
    return [f"{name}={value}: {variable.why}" for variable, name, value in _against(environ, Rule.REFUSED)]


def _against(environ: Mapping[str, str], rule: Rule) -> list[tuple[Variable, str, str]]:
    return [
        (variable, name, environ[name])
        for variable in TABLE
        if variable.rule is rule
        for name in variable.names
        if name in environ and environ[name].upper() not in variable.fine
    ]
