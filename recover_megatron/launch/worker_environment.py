"""What the workers of this node find in their environment: plan.py's variables, and over which network they talk.

What the user has set that recovery cannot live with they do not find (``variables.overrule``).

torch's gloo takes the address that the host's own name resolves to, and the loopback where it resolves to none: in a
bare container the workers of two hosts then never find each other.  NCCL takes every interface, a container bridge's
too.  The launcher knows better: by which interface this host and node 0 reach each other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Mapping

import psutil

from recover_megatron import variables
from recover_megatron.launch.plan import LaunchPlan, launch_environment, local_address, worker_variables
from recover_megatron.launch.states import WorkerProcess
from recover_megatron.variables import HOST_VARIABLE

VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""For NCCL a bare name is the beginning of one."""
LOOPBACK = "127.0.0.1"


def interfaces() -> dict[str, str]:
    """The name of the interface of each IP address of this host.  Raises OSError where the system does not tell."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(each.address.partition("%")[0], name)
    return found


def interface_of(host: str, found: Mapping[str, str]) -> str | None:
    """The interface in ``found`` that has ``host``, a name or an address of this host; None: no single one has."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = {str(name[0]).partition("%")[0] for _, _, _, _, name in resolved}
    names = {found[address] for address in addresses if address in found}
    return names.pop() if len(names) == 1 else None


def variables_for(host: str, inherited: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What the workers' environment needs so that they talk over the interface of ``host``, this host's own address;
    and a line about it.  What the user has set stands.
    """
    wanted = [name for name in VARIABLES if name not in inherited]
    if not wanted:
        return {}, ""
    try:
        found = interfaces()
        name = interface_of(host, found)
    except OSError:
        name = None
    if name is not None and name == found.get(LOOPBACK) and not _is_loopback(host):
        name = None  # an address that is kept there: gloo would take 127.0.0.1
    names = " and ".join(wanted)
    if name is None:
        return {}, f"no interface of this host has the address {host}: torch and NCCL choose one ({names} say which)"
    return {
        variable: VARIABLES[variable].format(name) for variable in wanted
    }, f"workers talk over the interface {name} ({host}): it is set in {names}"


def _is_loopback(host: str) -> bool:
    return all(
        ipaddress.ip_address(str(name[0]).partition("%")[0]).is_loopback
        for _, _, _, _, name in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )


class WorkerEnvironment:
    """Made once per launch; ``add`` the control plane's variables before a worker asks."""

    def __init__(self, plan: LaunchPlan, inherited: Mapping[str, str], say: Callable[[str], None]) -> None:
        """``inherited``: the launcher's own environment; ``say`` tells people which interface was chosen, and what of
        theirs is overruled.
        """
        self._plan = plan
        self._inherited = inherited
        self._say = say
        self._shared = launch_environment(plan, inherited)
        self._overruled = variables.overrule(self._shared) if plan.control_plane else []
        self._added: dict[str, str] = {}
        self._network: dict[str, str] | None = None

    def add(self, variables: Mapping[str, str]) -> None:
        """All workers get these, too."""
        self._added |= variables

    def of(self, worker: WorkerProcess, run_id: str) -> dict[str, str]:
        """The whole environment of ``worker``; ``run_id``: that of the launch of all nodes."""
        if self._network is None:
            for line in self._overruled:
                self._say(line)
            self._network = self._choose_interface()
        return {**self._shared, **self._added, **worker_variables(self._plan, worker, run_id), **self._network}

    def _choose_interface(self) -> dict[str, str]:
        """The variables that have the workers talk over the interface by which this host and the others reach."""
        plan = self._plan
        if plan.nnodes == 1 and not plan.joins:
            return variables_for(LOOPBACK, self._inherited)[0]
        host = self._added.get(HOST_VARIABLE) or plan.node_address
        if host is None:
            host = plan.master_addr
            if plan.node_rank > 0:
                with contextlib.suppress(OSError):  # then no interface has the address, which is said
                    host = local_address((plan.master_addr, plan.master_port))
        variables, about = variables_for(host, self._inherited)
        if about:
            self._say(about)
        return variables
