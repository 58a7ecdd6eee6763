"""Launch parameters from SLURM's environment: nodes, their addresses, the index of this node, and common ports.

::

    SLURM_JOB_ID, SLURM_STEP_ID                 the step, which determines the ports
    SLURM_STEP_NODELIST  n[1-3,7],gpu-a[01-04]  the step's nodes, in SLURM's order
    SLURM_NODEID                                this node's index among the step's nodes
    SLURM_STEP_NUM_TASKS, SLURM_LOCALID         if a node has one task, it is recover-run; if several, each is a worker

``step_of`` is a pure function of these variables, so all nodes agree on the result without communication.  A node's
address is its name, if the network can resolve it, else the NodeAddr that SLURM uses.

``shape_of`` returns recover-run's options with ``--slurm``.  A batch script whose srun starts the workers directly runs
``python -m recover_megatron.launch.slurm``, which prints the placement of the job (``JobPlacement``).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recover_megatron.launch.nodes.addresses import CANDIDATES, join_addresses

JOB, STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
MAX_NODES = 1 << 20
FIRST_PORT, PORTS = 15000, 15000
"""First port, and number of ports, of a range below Linux's ephemeral ports (32768 and above)."""
PORTS_OF_A_STEP = 8
"""Number of ports of one step: first the store's port, then the ports of separately started coordinators."""


@dataclass(frozen=True)
class SlurmStep:
    """SLURM step of which this process is a task."""

    job: int
    number: int
    nodes: tuple[str, ...]
    node: int
    """Index of this node in ``nodes``."""
    local_task: int = 0
    tasks: int = 1
    gpus: int = 0
    """Number of this node's GPUs that SLURM gave to the job; 0 if SLURM does not report it."""

    @property
    def one_task_a_node(self) -> bool:
        return self.tasks == len(self.nodes) and self.local_task == 0

    @property
    def store_port(self) -> int:
        return ports(self.job, self.number)[0]


def step_of(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of this process; None if srun did not start it.  Raises ValueError for a wrong variable."""
    if JOB not in environ or STEP not in environ or "SLURM_NODEID" not in environ:
        return None  # the batch script itself, and a shell of salloc, are not in a step
    nodes = tuple(nodes_of(environ))
    node = _number(environ, "SLURM_NODEID", None)
    if node >= len(nodes):
        raise ValueError(f"SLURM_NODEID is {node}, but the step's node list {','.join(nodes)!r} has {len(nodes)} nodes")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", len(nodes)))
    job, number = _number(environ, JOB, None), _number(environ, STEP, None)
    local_task, gpus = _number(environ, "SLURM_LOCALID", 0), _number(environ, "SLURM_GPUS_ON_NODE", 0)
    return SlurmStep(job, number, nodes, node, local_task, tasks, gpus)


def nodes_of(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the step's nodes; outside a step, the job's nodes; outside SLURM, an empty list."""
    text = next((environ[name] for name in NODE_LISTS if environ.get(name)), "")
    return expand(text) if text else []


def ports(job: int, step: int) -> tuple[int, ...]:
    """Return the ports of a step, chosen so that jobs with close ids, and the steps of one job, get different ports."""
    blocks = PORTS // PORTS_OF_A_STEP
    first = FIRST_PORT + (job + 37 * step) % blocks * PORTS_OF_A_STEP
    return tuple(range(first, first + PORTS_OF_A_STEP))


def expand(text: str) -> list[str]:
    """Return the names of a SLURM node list, such as ``n[1-3,7],gpu-a[01-04]``, in the order of the list.

    If one name has several brackets, the last bracket varies fastest.  Raises ValueError if the list is not valid.
    """
    names: list[str] = []
    items = re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", text)  # split at the commas outside of brackets
    if not items or ",".join(items) != text:
        raise ValueError(f"{text!r} is not a SLURM node list, such as n[1-3,7]")
    for item in items:
        found = [""]
        for literal, bracket in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            ends = [literal] if literal else _numbers(bracket, text)
            if len(names) + len(found) * len(ends) > MAX_NODES:
                raise ValueError(f"node list {text!r} has more than {MAX_NODES} nodes")
            found = [start + end for start in found for end in ends]
        names += found
    return names


def _numbers(bracket: str, text: str) -> list[str]:
    """Expand ``01-03,7`` into 01, 02, 03, 7."""
    found: list[str] = []
    for part in bracket.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise ValueError(f"node list {text!r}: [{bracket}] must consist of numbers and ranges")
        low, high = int(first), int(last)
        if not low <= high < low + MAX_NODES:
            raise ValueError(f"node list {text!r}: {part} is not a valid range")
        found += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return found


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    value = environ.get(name, "")
    if not value and default is not None:
        return default
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name} is {value!r}: not a number")
    return int(value)


def node_address(output: str) -> str | None:
    """Return the NodeAddr in the output of ``scontrol show node NAME``."""
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", output)
    return found.group(1) if found and found.group(1) != "(null)" else None


SCONTROL_SECONDS = 60.0


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _ask_scontrol(name: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # scontrol is missing (in a container), or its controller is unreachable: the caller raises an error
    return done.stdout


def address_of(
    name: str, resolves: Callable[[str], bool] = _resolves, ask: Callable[[str], str] = _ask_scontrol
) -> str:
    """Return the address of node ``name``: a host name or an IP address.

    Raises ValueError, with advice for the user, if no address is known.
    """
    if resolves(name):
        return name
    address = node_address(ask(name))
    if address is None:
        raise ValueError(
            f"the node {name} of the SLURM step has no known address: its name cannot be resolved, and "
            f"'scontrol show node {name}' shows none; give it with --master-addr"
        )
    return address


def shape_of(environ: Mapping[str, str], master_addr: str | None) -> dict[str, str]:
    """Return name -> value of the options of recover-run for this step; ``nproc_per_node`` only if SLURM reports GPUs.

    Raises ValueError, with advice for the user, if this process cannot be the launcher of a node.
    """
    step = step_of(environ)
    if step is None:
        raise ValueError(
            "--slurm: this process is not a task of a SLURM step: start one recover-run per node with srun "
            "(srun --ntasks-per-node=1), or remove --slurm"
        )
    if not step.one_task_a_node:
        raise ValueError(
            f"--slurm: the step has {step.tasks} tasks on {len(step.nodes)} nodes, but each node needs exactly one "
            "recover-run: srun --ntasks-per-node=1"
        )
    alone = len(step.nodes) == 1
    return {
        "nnodes": str(len(step.nodes)),
        "node_rank": str(step.node),
        "master_addr": master_addr or ("127.0.0.1" if alone else address_of(step.nodes[0])),
        "master_port": "0" if alone else str(step.store_port),
        **({"nproc_per_node": str(step.gpus)} if step.gpus else {}),
    }


def left_alone(environ: Mapping[str, str]) -> str:
    """Return a hint for a single-node launch that runs in a SLURM step on several nodes; else an empty text."""
    try:
        step = step_of(environ)
    except ValueError:
        return ""
    if step is None or len(step.nodes) == 1 or not step.one_task_a_node:
        return ""
    return (
        f"this is node {step.node} of {len(step.nodes)} of a SLURM step, but the launch has only this node: "
        "use --slurm for one launch on all nodes of the step"
    )


@dataclass(frozen=True)
class JobPlacement:
    """Placement of a job whose srun starts every worker: worker 0 serves the store, another step runs coordinators."""

    master_addr: str
    master_port: int
    relative: int
    """Index of the first node with a coordinator (``srun --relative``)."""
    listen: tuple[str, ...]
    """HOST:PORT of each coordinator, in the order of the nodes of the coordinators' step."""

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Return the coordinators' addresses in the order in which members try them.

        A coordinator on the first node, which also runs the batch script, is the last.
        """
        return self.listen if self.relative else self.listen[1:] + self.listen[:1]


def places_of(environ: Mapping[str, str], resolve: Callable[[str], str] = address_of) -> JobPlacement:
    """Return the placement of this job, the same in every process.

    Raises ValueError outside a SLURM job, or if a node has no known address.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        raise ValueError("this process is not in a SLURM job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set")
    nodes = expand(environ["SLURM_JOB_NODELIST"])
    store, *free = ports(int(environ["SLURM_JOB_ID"]), 0)
    relative = 1 if len(nodes) > CANDIDATES else 0
    hosts = [resolve(name) for name in nodes[relative : relative + CANDIDATES]]
    return JobPlacement(
        resolve(nodes[0]),
        store,
        relative,
        tuple(join_addresses([(host, port)]) for host, port in zip(hosts, free, strict=False)),
    )


def main() -> int:
    """Print the job's placement in one line: MASTER_ADDR MASTER_PORT RELATIVE LISTEN,.. COORDINATORS,.."""
    try:
        places = places_of(os.environ)
    except ValueError as error:
        print(f"slurm_launch: {error}", file=sys.stderr)
        return 2
    numbers = places.master_addr, places.master_port, places.relative
    print(*numbers, ",".join(places.listen), ",".join(places.coordinators))
    return 0


if __name__ == "__main__":
    sys.exit(main())
