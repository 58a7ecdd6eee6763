"""Environment variables: names of ours, and those of torch, gloo, NCCL and Python that change what recovery rests on.

What becomes of a user's value of the others is one table (``TABLE``), of which docs/operations.md has its own.  The
launcher applies it to what its workers inherit, and a worker with --recover to what it finds, in any launch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum

LOG_DIR_VARIABLE = "RECOVER_LOG_DIR"
"""The default of ``--recover-log-dir``: recover-run's ``--log-dir``."""
COORDINATOR_VARIABLE = "RECOVER_COORDINATOR"
"""The default of ``--recover-coordinator``: recover-run's candidates."""
SECRET_VARIABLE = "RECOVER_SECRET"
SECRET_FILE_VARIABLE = "RECOVER_SECRET_FILE"
NODE_VARIABLE = "RECOVER_NODE_AGENT"
"""The name under which the launcher of this worker's node is a node agent; not set: there is none."""
NODE_NAME_VARIABLE = "RECOVER_NODE_NAME"
"""The name of this worker's node: workers with the same one are on the same host."""
HOST_VARIABLE = "RECOVER_HOST"
"""The address of this worker's node by which the other nodes reach it; not set: there are no others."""
WORKER_ID_VARIABLE = "RECOVER_WORKER_ID"
"""The worker id; not set: it is the rank."""
JOIN_VARIABLE = "RECOVER_JOIN"
"""1: this worker is a newcomer, not one of the launch."""
SPARE_VARIABLE = "RECOVER_SPARE"
"""1: this newcomer was started with the run, to take the place of one that dies."""
REPLACED_VARIABLE = "RECOVER_REPLACED"
"""There: workers may come in place of those that are lost."""
LAUNCH_ID_VARIABLE = "RECOVER_LAUNCH_ID"
"""The mark of all processes that a launcher has started."""
LINES_VARIABLE = "RECOVER_LOG_LINES"
"""Of a process whose stderr is its launcher's: the form of lines (``logger.LineFormat``), and the node."""
DEATH_NOTICE_VARIABLE = "RECOVER_DEATH_NOTICE"
"""Name and path of the page by which a worker's launcher knows of its death at once (``network/death_notice.py``)."""
ATTEMPT_VARIABLE = "RECOVER_START_ATTEMPT"
"""How often the start has been made before, for the launcher itself."""
WITHOUT_VARIABLE = "RECOVER_START_WITHOUT"
"""The nodes without which it is made again, the same."""
FIRST_START_VARIABLE = "RECOVER_FIRST_START"
"""Set where the start was made again: when the launcher started its first worker, in seconds since the epoch."""
NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
"""torch's own: 0: its "nccl" is ProcessGroupNCCL; otherwise, from torch 2.15 on, ProcessGroupNCCL2."""


class Rule(Enum):
    """What becomes of a value in the environment of a run."""

    OVERRULED = "overruled"
    """It is replaced, or taken away, and a line says so."""
    REFUSED = "refused"
    """Nothing is started."""
    DEFAULT = "kept; else set"
    """It stands; where there is none one is set."""
    KEPT = "kept"


@dataclass(frozen=True)
class Variable:
    """One, or several that are alike."""

    names: tuple[str, ...]
    rule: Rule
    why: str
    """For people: what recovery needs, or what the value would do."""
    value: str | None = None
    """What is set; None: nothing, or (``DEFAULT``) it depends."""
    fine: tuple[str, ...] = ("", "0")
    """Values, in capitals, for which the rule has nothing to do."""


TABLE = (
    Variable(
        ("TORCH_GLOO_LAZY_INIT",),
        Rule.OVERRULED,
        "gloo would connect in a group's first operation, and the connections by which a group is aborted are looked "
        "for when it is made",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",),
        Rule.OVERRULED,
        "with DETAIL torch has all members of a group compare each operation first, over another group, which nobody "
        "can abort",
        "INFO",
        ("", "OFF", "INFO"),
    ),
    Variable(
        ("GLOO_DEVICE_TRANSPORT",),
        Rule.REFUSED,
        "only gloo's connections over plain TCP can be aborted: unset it, or leave --recover out",
        fine=("", "TCP"),
    ),
    Variable(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        Rule.REFUSED,
        "groups of the start would be torchcomms', and --recover aborts and makes groups of torch's own: unset it, or "
        "leave --recover out",
    ),
    Variable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
        Rule.OVERRULED,
        "the host would wait in torch for each collective inside a replica, where no plan reaches it; the last two are "
        "old names, which torch reads as well",
        fine=("",),
    ),
    Variable(
        ("NCCL_COMM_BLOCKING", "NCCL_COMM_ID"),
        Rule.OVERRULED,
        "a communicator whose calls block cannot be aborted while it is made; with one address for all of them only "
        "one can be made",
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
        "torch's watchdog would end or block a worker that recovery brings back; on GPUs only, by the worker, which "
        "warns of a value that stands against it",
    ),
    Variable(
        (NCCL2_VARIABLE,),
        Rule.DEFAULT,
        "groups made after a death are torch's ProcessGroupNCCL, and those of the start must be of the same kind; on "
        "GPUs, where torch has ProcessGroupNCCL2, another value is refused",
        "0",
    ),
    Variable(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        Rule.DEFAULT,
        "the interface by which this host and the others reach each other",
    ),
    Variable(("OMP_NUM_THREADS",), Rule.DEFAULT, "several workers share the cores of a host", "1"),
    Variable(("PYTHONUNBUFFERED",), Rule.OVERRULED, "what a worker says before it dies is not lost", "1", ("", "1")),
    Variable(
        ("PYTHONINSPECT",),
        Rule.OVERRULED,
        "Python would replace a worker's exit code, by which its end is known",
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
        "nothing rests on them",
    ),
    Variable(
        ("NCCL_DEBUG", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "TORCH_NCCL_USE_COMM_NONBLOCKING"),
        Rule.KEPT,
        "what to try with them is in gpu.md",
    ),
)


def overrule(environ: MutableMapping[str, str]) -> list[str]:
    """Take from ``environ`` what recovery cannot live with; a line for people about each value of a user's."""
    said = []
    for variable, name, value in _against(environ, Rule.OVERRULED):
        if variable.value is None:
            del environ[name]
        else:
            environ[name] = variable.value
        instead = "not passed on" if variable.value is None else f"{variable.value} instead"
        said.append(f"{name}={value} of your environment is overruled ({instead}): {variable.why} (docs/operations.md)")
    return said


def refusals(environ: Mapping[str, str]) -> list[str]:
    """Why nothing can be started in ``environ``."""
    return [f"{name}={value}: {variable.why}" for variable, name, value in _against(environ, Rule.REFUSED)]


def _against(environ: Mapping[str, str], rule: Rule) -> list[tuple[Variable, str, str]]:
    return [
        (variable, name, environ[name])
        for variable in TABLE
        if variable.rule is rule
        for name in variable.names
        if name in environ and environ[name].upper() not in variable.fine
    ]
