"""What SLURM tells a task by its environment: which nodes there are, which one this is, and ports that all agree on.

::

    SLURM_JOB_ID, SLURM_STEP_ID                 which step: the ports follow from them
    SLURM_STEP_NODELIST  n[1-3,7],gpu-a[01-04]  its nodes, in the order in which SLURM numbers them
    SLURM_NODEID                                this node's place among them
    SLURM_STEP_NUM_TASKS, SLURM_LOCALID         one task a node: a recover-run; more: each is a worker itself

Everything here is a pure function of that environment: every node comes to the same answer without asking another one.
slurm_launch.py finds out by which address a node is reached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
        """Where node 0 serves the store."""
        return ports(self.job, self.number)[0]


def step_of(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step in whose environment this process is; None: it was not started by srun.

    Raises ValueError for values that SLURM does not set.
    """
    if JOB not in environ or STEP not in environ or "SLURM_NODEID" not in environ:
        return None  # the batch script itself, and a shell of salloc, have no step
    text = next((environ[name] for name in NODE_LISTS if environ.get(name)), "")
    nodes = tuple(expand(text))
    node = _number(environ, "SLURM_NODEID", None)
    if node >= len(nodes):
        raise ValueError(f"SLURM_NODEID is {node}, but the step's node list {text!r} has {len(nodes)} nodes")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", len(nodes)))
    return SlurmStep(
        _number(environ, JOB, None),
        _number(environ, STEP, None),
        nodes,
        node,
        _number(environ, "SLURM_LOCALID", 0),
        tasks,
        _number(environ, "SLURM_GPUS_ON_NODE", 0),
    )


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
    for item in _items(text):
        found = [""]
        for literal, bracket in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            ends = [literal] if literal else _numbers(bracket, text)
            if len(names) + len(found) * len(ends) > MAX_NODES:
                raise ValueError(f"node list {text!r} has more than {MAX_NODES} nodes")
            found = [start + end for start in found for end in ends]
        names += found
    return names


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items = re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise ValueError(f"node list {text!r} is not one of SLURM's, such as n[1-3,7]")
    return items


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
