"""What others have put into the environment about the shape of a launch: torchrun's defaults, and what looks like one.

::

    PET_NNODES, PET_NODE_RANK, ...        the defaults of the options, as for torchrun: taken
    RANK and WORLD_SIZE, OMPI_*, PMI_*    this process is one of several: a launch of one node is refused then, unless
                                          --nnodes or --slurm says what is meant; each would train alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "PET_"
HERE = ("nproc_per_node",)
SHAPE = ("nnodes", "node_rank", "master_addr", "master_port", *HERE)
OTHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)


def take(namespace: Any, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Fill in what ``PET_*`` say and the command line does not; what was taken, by variable, and the reasons against.

    A launch under ``--slurm``, or one that joins a run, has its shape from elsewhere.
    """
    elsewhere = namespace.slurm or namespace.join
    taken = {}
    for name in HERE if elsewhere else SHAPE:
        variable = PREFIX + name.upper()
        if getattr(namespace, name) is None and environ.get(variable):
            taken[variable] = environ[variable]
            setattr(namespace, name, environ[variable])
    if PREFIX + "NNODES" in taken and namespace.nnodes.split(":")[-1] != "1" and namespace.node_rank is None:
        return taken, [
            f"{PREFIX}NNODES is {namespace.nnodes}, and nothing says which node this is: give --node-rank R (or set "
            f"{PREFIX}NODE_RANK), from 0"
        ]
    if namespace.nnodes is not None or elsewhere:
        return taken, []
    return taken, [_one_of_several(environ, size, rank) for size, rank in OTHERS if _tells(environ, size, rank)][:1]


def _tells(environ: Mapping[str, str], size: str, rank: str) -> bool:
    """Whether by these variables this process is one of several."""
    value = environ.get(size, "")
    return rank in environ and value.isdecimal() and int(value) > 1


def _one_of_several(environ: Mapping[str, str], size: str, rank: str) -> str:
    flags = f"--nnodes {environ[size]} --node-rank {environ[rank]}"
    flags += f" --master-addr {environ.get('MASTER_ADDR') or 'A'} --master-port {environ.get('MASTER_PORT') or 'P'}"
    if "SLURM_STEP_ID" in environ:
        flags = "--slurm"
    return (
        f"{rank} {environ[rank]} and {size} {environ[size]} are in the environment: this is one of several, each of "
        f"which would train alone. Start one recover-run on each node, with {flags} where these are nodes; or give "
        "--nnodes 1 for a launch of its own"
    )
