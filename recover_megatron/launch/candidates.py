"""Where the candidate coordinators of a launch over several nodes listen.

CANDIDATES nodes host one each: the first ones, or, under SLURM, those from the second on.  A node listens on the
address from which it reaches the others: node 0 that from which it reaches another one with a candidate, another node
that from which it reaches node 0.  The user may choose it (RECOVER_HOST).

The socket is bound before its address is told, so whoever turns to it early waits in its backlog.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.membership.testimony import Scope

CANDIDATES = 3
BACKLOG = 4096

Address = tuple[str, int]


@dataclass
class Candidates:
    """What a launcher knows when all have told."""

    host: str
    """This node's address."""
    addresses: Sequence[Address]
    """In the order in which all members turn to them."""
    listener: socket.socket | None
    """This node's own; None: it hosts none."""
    lease: Path | None = None
    """What they share as a lease; None: they have none."""
    witness: Scope | None = None
    """The witness, which may tell them which nodes are off; None: there is none."""


class OwnPlace:
    """This node's address and, if it hosts a candidate, its socket.  Raises OSError where there can be none."""

    def __init__(self, plan: LaunchPlan, other: Address, hosts: bool) -> None:
        """``other``: where another node listens, for choosing the interface; nothing is sent there.

        ``hosts``: whether this node has a candidate.
        """
        self.host = plan.node_address or local_address(other)
        self.listener: socket.socket | None = None
        if hosts:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self.listener = socket.create_server((self.host, 0), family=family, backlog=BACKLOG)

    @property
    def address(self) -> Address | None:
        """Of the candidate here."""
        return (self.host, self.listener.getsockname()[1]) if self.listener else None


def hosting(plan: LaunchPlan) -> tuple[int, ...]:
    """The nodes that host a candidate, in the order in which the members turn to them."""
    count = min(plan.nnodes, CANDIDATES)
    return tuple((plan.first_candidate + number) % plan.nnodes for number in range(count))


def local_address(other: Address) -> str:
    """The address of this host from which ``other`` is reached.  Raises OSError if it is not."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*other, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(resolved)
        return str(probe.getsockname()[0])


def join_addresses(addresses: Sequence[Address]) -> str:
    """``HOST:PORT,[HOST]:PORT``: what ``arguments.parse_addresses`` reads."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def address_from(value: Any) -> Address:
    """An address that another launcher sent.  Raises ValueError for anything else."""
    match value:
        case [str(host), int(port)] if host and 0 < port < 65536:
            return host, port
    raise ValueError(f"not an address: {value!r}")
