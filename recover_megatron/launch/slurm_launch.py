"""A launch whose shape SLURM gives (``--slurm``), and by which address a node is reached.

A node's address is its name, where the network knows it, else the NodeAddr that SLURM itself uses.

``python -m recover_megatron.launch.slurm_launch``, in a batch script whose srun starts the workers itself, prints where
everything is to be: see ``JobPlacement``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recover_megatron.launch.candidates import CANDIDATES, join_addresses
from recover_megatron.launch.slurm import expand, node_address, ports, step_of

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


@dataclass(frozen=True)
class Shape:
    """Of the launch, and this node's place in it."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    gpus: int
    """Of this node; 0: SLURM does not say."""


def shape_of(environ: Mapping[str, str], master_addr: str | None) -> Shape:
    """The launch of the step in which this launcher is a task.  Raises ValueError with what to change."""
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
    if len(step.nodes) == 1:
        return Shape(1, 0, master_addr or "127.0.0.1", 0, step.gpus)
    return Shape(len(step.nodes), step.node, master_addr or address_of(step.nodes[0]), step.store_port, step.gpus)


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
    """The same for the same job, whoever asks.  Raises ValueError outside of a job and for an unknown node."""
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
    print(
        places.master_addr,
        places.master_port,
        places.relative,
        ",".join(places.listen),
        ",".join(places.coordinators),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
