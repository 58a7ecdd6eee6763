"""Addresses of a launch on several nodes: of this host, and of the candidate coordinators.

A node uses its address on the route to node 0; node 0 uses its address on the route to another node with a candidate.
The user may choose another address (RECOVER_HOST).  The socket of a candidate is bound before its address is sent, so a
member that connects early waits in the backlog.

torch's gloo uses the address to which the host's name resolves, and loopback if it does not resolve: in a bare
container, the workers of two hosts then never find each other.  NCCL uses every interface, even a container bridge.
So the launcher sets the interface for both: the one by which this host and node 0 reach each other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from recover_megatron.membership.io.testimony import Scope
from recover_megatron.network.connection import family_of

CANDIDATES = 3
BACKLOG = 4096
"""Largest number of connections that wait for accept(); the kernel lowers the number to net.core.somaxconn."""

Address = tuple[str, int]


@dataclass
class Candidates:
    """Candidate coordinators of a launch on several nodes, once all nodes have reported their addresses."""

    host: str
    """Address of this node for other nodes."""
    addresses: Sequence[Address]
    """Addresses of all candidates, in the order in which members try them."""
    listener: socket.socket | None
    """Listening socket of this node's candidate; None: this node hosts no candidate."""
    lease: Path | None = None
    """Path of the candidates' common lease; None: there is no lease."""
    witness: Scope | None = None
    """Witness, which confirms to the candidates that nodes are off; None: there is no witness."""


class OwnPlace:
    """Address of this node and, if it hosts a candidate, the candidate's socket.  The constructor may raise OSError."""

    def __init__(self, chosen: str | None, other: Address, hosts: bool) -> None:
        """Use the address ``chosen`` by the user, else the one on the route to ``other``, another node.

        ``hosts``: True if this node has a candidate.
        """
        self.host = chosen or local_address(other)
        self.listener = listen(self.host) if hosts else None

    @property
    def address(self) -> Address | None:
        return (self.host, self.listener.getsockname()[1]) if self.listener else None


def listen(host: str) -> socket.socket:
    """Listen on a free port of ``host``, an address of this host; return the socket.  Raises OSError."""
    return socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)


def local_address(other: Address) -> str:
    """Return the address of this host on the route to ``other``.  Raises OSError if there is no route."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*other, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(resolved)
        return str(probe.getsockname()[0])


def own_address(host: str) -> str:
    """Return the address that the name ``host`` has on this host's interfaces, except loopback.

    Return ``host`` itself unless the name has several addresses, exactly one of which is such an address.
    """
    try:
        addresses, found = addresses_of(host), interfaces()
    except (OSError, UnicodeError):
        return host
    own = [address for address in addresses if found.get(address, found.get(LOOPBACK)) != found.get(LOOPBACK)]
    return own[0] if len(own) == 1 < len(addresses) else host


def join_addresses(addresses: Sequence[Address]) -> str:
    """Return ``HOST:PORT,[HOST]:PORT``, which ``arguments.parse_addresses`` reads."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def address_from(value: Any) -> Address:
    """Parse an address that another launcher sent.  Raises ValueError if ``value`` is no address."""
    match value:
        case [str(host), int(port)] if host and 0 < port < 65536:
            return host, port
    raise ValueError(f"not an address: {value!r}")


VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Environment variable -> format of its value.  NCCL takes an interface name without "=" as a prefix."""
LOOPBACK = "127.0.0.1"
LOOPBACK_6 = "::1"


def loopback() -> str:
    """Return the IPv4 loopback address, or the IPv6 loopback address if this host has no IPv4."""
    for address in (LOOPBACK, LOOPBACK_6):
        with contextlib.suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return address
    return LOOPBACK  # neither address can be bound: a later attempt to listen raises the error


def interfaces() -> dict[str, str]:
    """Return the interface name of each IP address of this host.  Raises OSError if the system call fails."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(each.address.partition("%")[0], name)
    return found


def interface_of(host: str, found: Mapping[str, str]) -> str | None:
    """Return the interface in ``found`` that has ``host``, a name or address; None if there is not exactly one."""
    try:
        addresses = addresses_of(host)
    except (OSError, UnicodeError):
        return None
    names = {found[address] for address in addresses if address in found}
    return names.pop() if len(names) == 1 else None


def variables_for(host: str, inherited: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the variables that select the interface of ``host``, an address of this host; and a log line.

    Variables that the user has set are left out.
    """
    wanted = [name for name in VARIABLES if name not in inherited]
    if not wanted:
        return {}, ""
    try:
        found = interfaces()
        name = interface_of(host, found)
    except OSError:
        name = None
    if (
        name
        and name == found.get(LOOPBACK)
        and not all(ipaddress.ip_address(ip).is_loopback for ip in addresses_of(host))
    ):
        name = None  # on the loopback interface, gloo would use 127.0.0.1 instead of this address
    names = " and ".join(wanted)
    if name is None:
        return {}, f"no interface of this host has the address {host}: torch and NCCL choose one unless you set {names}"
    chosen = {variable: VARIABLES[variable].format(name) for variable in wanted}
    return chosen, f"workers communicate over the interface {name} ({host}), which is set in {names}"


def addresses_of(host: str) -> set[str]:
    """Resolve the name or address ``host``.  Raises OSError or UnicodeError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(name[0]).partition("%")[0] for _, _, _, _, name in found}
