"""What SLURM's environment says of a launch: its nodes, this one's place, ports that all agree on; and their addresses.

::

    SLURM_JOB_ID, SLURM_STEP_ID                 which step: the ports follow from them
    SLURM_STEP_NODELIST  n[1-3,7],gpu-a[01-04]  its nodes, in the order in which SLURM numbers them
    SLURM_NODEID                                this node's place among them
    SLURM_STEP_NUM_TASKS, SLURM_LOCALID         one task a node: a recover-run; more: each is a worker itself

``step_of`` is a pure function of that environment: every node comes to the same answer without asking another one.  A
node's address is its name, where the network knows it, else the NodeAddr that SLURM itself uses.

``shape_of`` is the launch of ``--slurm``.  ``python -m recover_megatron.launch.slurm``, in a batch script whose srun
starts the workers itself, prints where everything is to be: see ``JobPlacement``.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recover_megatron.launch.command_line.plan import CANDIDATES, join_addresses

JOB, STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
MAX_NODES = 1 << 20
FIRST_PORT, PORTS = 15000, 15000
"""Below the range from which Linux gives ports away by itself (32768 and above)."""
PORTS_OF_A_STEP = 8
"""The store's, then those of coordinators that are started apart."""


@dataclass(frozen=True)
class SlurmStep:
    """The step of which this process is a task."""

    job: int
    number: int
    nodes: tuple[str, ...]
    node: int
    """This node's index among ``nodes``."""
    local_task: int = 0
    tasks: int = 1
    gpus: int = 0
    """Of this node, for this job; 0: SLURM does not say."""

    @property
    def one_task_a_node(self) -> bool:
        return self.tasks == len(self.nodes) and self.local_task == 0

    @property
    def store_port(self) -> int:
        return ports(self.job, self.number)[0]


def step_of(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of which this process is a task; None: srun started none.  ValueError for what SLURM does not set."""
    if JOB not in environ or STEP not in environ or "SLURM_NODEID" not in environ:
        return None  # the batch script itself, and a shell of salloc, have no step
    nodes = tuple(nodes_of(environ))
    node = _number(environ, "SLURM_NODEID", None)
    if node >= len(nodes):
        raise ValueError(f"SLURM_NODEID is {node}, but the step's node list {','.join(nodes)!r} has {len(nodes)} nodes")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", len(nodes)))
    job, number = _number(environ, JOB, None), _number(environ, STEP, None)
    local_task, gpus = _number(environ, "SLURM_LOCALID", 0), _number(environ, "SLURM_GPUS_ON_NODE", 0)
    return SlurmStep(job, number, nodes, node, local_task, tasks, gpus)


def nodes_of(environ: Mapping[str, str]) -> list[str]:
    """The names of the nodes of this step, or before ``srun`` of this job; none outside of SLURM."""
    text = next((environ[name] for name in NODE_LISTS if environ.get(name)), "")
    return expand(text) if text else []


def ports(job: int, step: int) -> tuple[int, ...]:
    """The ports of a step: neighbouring jobs, and the steps of one job, get different ones."""
    blocks = PORTS // PORTS_OF_A_STEP
    first = FIRST_PORT + (job + 37 * step) % blocks * PORTS_OF_A_STEP
    return tuple(range(first, first + PORTS_OF_A_STEP))


def expand(text: str) -> list[str]:
    """The names of a SLURM node list, in its order: ``n[1-3,7],gpu-a[01-04]``.

    Several brackets in one name are as many loops, the last one the innermost.  Raises ValueError.
    """
    names: list[str] = []
    items = re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", text)  # split at the commas outside of brackets
    if not items or ",".join(items) != text:
        raise ValueError(f"node list {text!r} is not one of SLURM's, such as n[1-3,7]")
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
    """``01-03,7``: 01, 02, 03, 7."""
    found: list[str] = []
    for part in bracket.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise ValueError(f"node list {text!r}: [{bracket}] is not made of numbers and ranges")
        low, high = int(first), int(last)
        if not low <= high < low + MAX_NODES:
            raise ValueError(f"node list {text!r}: {part} is not a range")
        found += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return found


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    value = environ.get(name, "")
    if not value and default is not None:
        return default
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name} is {value!r}: not a number")
    return int(value)


def node_address(said: str) -> str | None:
    """The NodeAddr in what ``scontrol show node NAME`` says."""
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
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
        return ""  # not in the container, or the controller is away: the caller says what else there is
    return done.stdout


def address_of(
    name: str, resolves: Callable[[str], bool] = _resolves, ask: Callable[[str], str] = _ask_scontrol
) -> str:
    """The address of node ``name``: a name or a number.  Raises ValueError with what to do."""
    if resolves(name):
        return name
    address = node_address(ask(name))
    if address is None:
        raise ValueError(
            f"the node {name} of the SLURM step has no address: the network does not know its name, and "
            f"'scontrol show node {name}' told none; name it with --master-addr"
        )
    return address


def shape_of(environ: Mapping[str, str], master_addr: str | None) -> dict[str, str]:
    """recover-run's options for this step, as text; GPUs where SLURM tells them.  Raises ValueError: what to change."""
    step = step_of(environ)
    if step is None:
        raise ValueError(
            "--slurm: this is no task of a SLURM step: start recover-run with srun, one on each node "
            "(srun --ntasks-per-node=1), or leave --slurm out"
        )
    if not step.one_task_a_node:
        raise ValueError(
            f"--slurm: the step has {step.tasks} tasks on {len(step.nodes)} nodes, but one recover-run is started on "
            "each node: srun --ntasks-per-node=1"
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
    """What to say when a launcher of one node is a task on one of several; empty: it is not."""
    try:
        step = step_of(environ)
    except ValueError:
        return ""
    if step is None or len(step.nodes) == 1 or not step.one_task_a_node:
        return ""
    return (
        f"this is node {step.node} of the {len(step.nodes)} of a SLURM step, but a launch of its own: "
        "--slurm makes the nodes of the step one launch"
    )


@dataclass(frozen=True)
class JobPlacement:
    """Of a job whose srun starts every worker: the store, in worker 0, and coordinators in a step of their own."""

    master_addr: str
    master_port: int
    relative: int
    """The first node with a coordinator (``srun --relative``)."""
    listen: tuple[str, ...]
    """HOST:PORT of each node with a coordinator, in the order of that step's nodes."""

    @property
    def coordinators(self) -> tuple[str, ...]:
        """In the order in which the members turn to them: where it can be, the batch script's node is the last."""
        return self.listen if self.relative else self.listen[1:] + self.listen[:1]


def places_of(environ: Mapping[str, str], resolve: Callable[[str], str] = address_of) -> JobPlacement:
    """Where all of this job is, whichever process asks.  Raises ValueError outside of a job, for an unknown node."""
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        raise ValueError("this is no SLURM job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set")
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
    """Print MASTER_ADDR MASTER_PORT RELATIVE LISTEN,.. COORDINATORS,.. in one line."""
    try:
        places = places_of(os.environ)
    except ValueError as error:
        print(f"slurm_launch: {error}", file=sys.stderr)
        return 2
    told = places.master_addr, places.master_port, places.relative
    print(*told, ",".join(places.listen), ",".join(places.coordinators))
    return 0


if __name__ == "__main__":
    sys.exit(main())
