"""What a launch is: how many workers, their ranks, the store's address; where the candidate coordinators of several
nodes listen; and the environment that tells a worker all this.

CANDIDATES nodes host a candidate each: the first ones, or, under SLURM, those from the second on.  A node listens on
the address from which it reaches the others: node 0 that from which it reaches another one with a candidate, another
node that from which it reaches node 0.  The user may choose it (RECOVER_HOST).  The socket is bound before its address
is told: a member that turns to it early waits in its backlog.

What the user has set that recovery cannot live with the workers do not find (``variables.overrule``).

torch's gloo takes the address that the host's own name resolves to, and the loopback where it resolves to none: in a
bare container the workers of two hosts then never find each other.  NCCL takes every interface, a container bridge's
too.  The launcher knows better: by which interface this host and node 0 reach each other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from recover_megatron import script_flags, variables
from recover_megatron.arguments import config_from_argv, config_or_defaults, own_domains
from recover_megatron.launch.command_line.readers import imports_pretrain
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.membership.io.testimony import Scope
from recover_megatron.network.connection import family_of
from recover_megatron.variables import (
    HOST_VARIABLE,
    JOIN_VARIABLE,
    LAUNCH_ID_VARIABLE,
    LINES_VARIABLE,
    LOG_DIR_VARIABLE,
    NCCL2_VARIABLE,
    NODE_NAME_VARIABLE,
    REPLACED_VARIABLE,
    SPARE_VARIABLE,
    WORKER_ID_VARIABLE,
)
from recover_megatron.workload.domains import names

Domains = Sequence[Sequence[str]]
"""Of each node in order: what it may be lost with besides itself, by names of ``workload.domains.names``."""

TRAINING = "pretrain_gpt_recover"
"""The script that comes with this package, as a file or a module."""


def is_megatrons(script: str) -> bool:
    """Whether a script, by its file or module, takes Megatron's flags: ours, one of a checkout, or one that says so."""
    return (Path(script).stem.startswith("pretrain_") and not script.endswith(".sh")) or imports_pretrain(script)


def is_known(script: str, script_args: Sequence[str]) -> bool:
    """Whether it is one of Megatron's for certain, and no other script that has flags of the same names."""
    return is_megatrons(script) and ("--recover" in script_args or Path(script).stem == TRAINING)


def saves_checkpoints(script: str, script_args: Sequence[str]) -> bool:
    """Whether the script's --save is Megatron's: a folder of checkpoints."""
    return is_megatrons(script) or "--recover" in script_args


@dataclass(frozen=True)
class LaunchPlan:
    """One node's part of a launch.

    ``launch_id`` is random and names what this launcher started; ``run_id`` names the whole launch: that of node 0
    holds on all nodes.
    """

    nproc_per_node: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    launch_id: str
    run_id: str
    host: str
    command: tuple[str, ...]
    """The interpreter (with the programs before it), the script (or ``-m``, module) and its arguments."""
    fault_tolerant: bool
    elastic: bool = False
    """True where the script trains with the library: its newcomers must not have the ``MASTER_ADDR`` of Megatron's."""
    script_args: tuple[str, ...] = ()
    """The script's own arguments: the last of ``command``."""
    control_plane: bool = True
    """Whether the launchers host the run's coordinator.  False: several nodes without a secret that they share."""
    node_address: str | None = None
    """This node's address for the others, as the user chose it; None: that of the way to them."""
    log_dir: Path | None = None
    """Absolute."""
    rendezvous_timeout: float = 300.0
    grace_seconds: float = 15.0
    log_format: str = "plain"
    """See ``logger.LineFormat``."""
    max_restarts: int = 0
    """How many workers this launcher may start in place of others."""
    device_test: tuple[str, ...] = ()
    """The command that tests the device of such a worker before it is started; empty: none (the host device)."""
    device_test_timeout: float = 60.0
    """Seconds that it may take."""
    first_candidate: int = 0
    """The node whose candidate coordinator leads at first; its word on node 0 holds for all."""
    lease: str = "off"
    """How the candidates of several nodes get their lease: auto, off, or an absolute path (leasing.py)."""
    domains: Domains = ()
    """Of each node of the launch, where ``--recover-domain @FILE`` lists them (``workload.domains.names``)."""
    witness: str = "off"
    """The witness, which may tell the candidates which nodes are off: auto, slurm, kubernetes, off (leasing.py)."""
    spares: int = 0
    """Workers that the last node starts beyond those of the launch."""
    joins: tuple[tuple[str, int], ...] = ()
    """The coordinators of the running job that this launcher joins; empty: it launches one."""
    joined_world_size: int = 0
    """The world size of that job."""

    attempt: int = 0
    """How often the start was made before."""
    without: tuple[int, ...] = ()
    """Nodes that were lost in it, in order: they take no part, and spares have the places of their workers."""

    @property
    def starts(self) -> int:
        """How often the start may be made, in all (processes.py)."""
        return 1 + max(self.max_restarts, self.spares) if self.fault_tolerant and not self.joins else 1

    def spared(self, lost: Collection[int]) -> bool:
        """Whether the start may be made without the nodes ``lost``: node 0 keeps the store, and the last one has the
        spares, which must be as many as their workers."""
        kept = {0, self.nnodes - 1}
        return kept.isdisjoint(lost) and len(lost) * self.nproc_per_node <= self.spares

    @property
    def local_world_size(self) -> int:
        """Workers of the launch on this node."""
        more = len(self.without) if self.node_rank == self.nnodes - 1 else 0
        return (1 + more) * self.nproc_per_node

    @property
    def world_size(self) -> int:
        """Workers of all nodes together, as launched."""
        return self.joined_world_size if self.joins else self.nnodes * self.nproc_per_node

    @property
    def needs_all(self) -> bool:
        """Whether the loss of a worker of the launch ends the run until it has had a plan; see ``StartUp``.

        Megatron's training does. Other scripts know for themselves what they can do without.
        """
        return not self.joins and (self.fault_tolerant or Path(self.target).stem == TRAINING)

    @property
    def is_megatrons(self) -> bool:
        """Whether the script trains as Megatron's do, and so says what ``output.Voice`` waits for."""
        return self.fault_tolerant and is_megatrons(self.target)

    @property
    def saves(self) -> bool:
        """Whether the script's --save is Megatron's: a folder of checkpoints."""
        return saves_checkpoints(self.target, self.script_args)

    @property
    def target(self) -> str:
        """The script or module, as it was given."""
        return self.command[-len(self.script_args) - 1] if self.command else ""

    @property
    def flags(self) -> dict[str, str]:
        """The flags of the script that must be the same on all nodes; none without ``--recover``."""
        if not self.fault_tolerant:
            return {}
        return script_flags.flags_of(self.script_args, config_from_argv(self.script_args).may_differ.split(","))

    @property
    def lines(self) -> dict[str, str]:
        """For the environment of processes that write to the launcher's own stderr: the form of their lines."""
        return {} if self.log_format == "plain" else {LINES_VARIABLE: f"{self.log_format} {self.node_name}"}

    @property
    def node_name(self) -> str:
        """The name of this node in the run, and of its launcher as a node agent."""
        return f"{self.host}-joined-{self.launch_id}" if self.joins else f"{self.host}-{self.node_rank}"

    @property
    def own_domains(self) -> tuple[str, ...]:
        """What this node may be lost with besides itself."""
        return names("", own_domains(config_or_defaults(self.script_args).domain), os.environ)

    @property
    def has_newcomers(self) -> bool:
        """Whether this launcher may start workers that are not of the launch."""
        return bool(self.max_restarts or self.spares or self.joins)

    def worker_id(self, local_rank: int) -> int:
        """The global rank at launch of this node's ``local_rank``-th worker."""
        return self.node_rank * self.nproc_per_node + local_rank

    def log_file(self, worker_id: int) -> Path | None:
        """Where the output of ``worker_id`` is kept; None without a log folder."""
        return self.log_dir / f"worker-{worker_id}.log" if self.log_dir else None


def sets_omp_threads(plan: LaunchPlan, inherited: Mapping[str, str]) -> bool:
    """Whether the launcher limits OpenMP to one thread: several workers on the node and the user has not chosen."""
    return plan.local_world_size > 1 and "OMP_NUM_THREADS" not in inherited


def launch_environment(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that all workers of this node share: the inherited ones, torchrun's and ours."""
    environment = dict(inherited)
    for name in (LOG_DIR_VARIABLE, JOIN_VARIABLE, REPLACED_VARIABLE, SPARE_VARIABLE):
        environment.pop(name, None)
    environment |= {
        NODE_NAME_VARIABLE: plan.node_name,
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_world_size),
        "GROUP_RANK": str(plan.node_rank),
        "GROUP_WORLD_SIZE": str(plan.nnodes),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "PYTHONUNBUFFERED": "1",
        LAUNCH_ID_VARIABLE: plan.launch_id,
    }
    if plan.log_dir:
        environment[LOG_DIR_VARIABLE] = str(plan.log_dir)
    if sets_omp_threads(plan, inherited):
        environment["OMP_NUM_THREADS"] = "1"
    if plan.control_plane:  # here, too, and not by the worker alone: its script may make groups before it asks us
        environment[NCCL2_VARIABLE] = environment.get(NCCL2_VARIABLE) or "0"
    return environment


def worker_variables(plan: LaunchPlan, worker: WorkerProcess, run_id: str) -> dict[str, str]:
    """The environment variables that differ from worker to worker, or are not known when the launch starts."""
    rank, worker_id = str(worker.rank or 0), str(worker.worker_id)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": str(worker.local_rank),
        "ROLE_RANK": rank,
        "TORCHELASTIC_RUN_ID": run_id,
        WORKER_ID_VARIABLE: worker_id,
    }
    if plan.max_restarts or plan.spares:
        variables[REPLACED_VARIABLE] = "1"
    if worker.worker_id >= plan.world_size:
        variables |= {JOIN_VARIABLE: "1"}
        if worker.rank is None and not plan.joins:
            variables[SPARE_VARIABLE] = "1"
    return variables


CANDIDATES = 3
BACKLOG = 4096
"""So many may connect before a socket's server accepts.  The kernel lowers it to net.core.somaxconn."""

Address = tuple[str, int]


@dataclass
class Candidates:
    """What a launcher knows of the candidate coordinators when all nodes have told where theirs listens."""

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
        """``other``: where another node listens, to choose the interface; ``hosts``: this node has a candidate."""
        self.host = plan.node_address or local_address(other)
        self.listener = listen(self.host) if hosts else None

    @property
    def address(self) -> Address | None:
        return (self.host, self.listener.getsockname()[1]) if self.listener else None


def hosting(plan: LaunchPlan) -> tuple[int, ...]:
    """The nodes that host a candidate, in the order in which the members turn to them: of different domains, where
    the list of all nodes tells these."""
    nodes = ((plan.first_candidate + number) % plan.nnodes for number in range(plan.nnodes))
    found, left = list[int](), [node for node in nodes if node not in plan.without]
    known = plan.domains if len(plan.domains) >= plan.nnodes else [()] * plan.nnodes
    while left and len(found) < CANDIDATES:
        found.append(min(left, key=lambda node: sum(len({*known[node]} & {*known[other]}) for other in found)))
        left.remove(found[-1])
    return tuple(found)


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of ``host``, an address of this host.  Raises OSError."""
    return socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)


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


VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""For NCCL a bare name is the beginning of one."""
LOOPBACK = "127.0.0.1"
LOOPBACK_6 = "::1"


def loopback() -> str:
    """The address by which processes of this host reach each other: that of IPv6 where it has no other."""
    for address in (LOOPBACK, LOOPBACK_6):
        with contextlib.suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return address
    return LOOPBACK  # whoever uses it meets the error


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
        addresses = addresses_of(host)
    except (OSError, UnicodeError):
        return None
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
    if (
        name
        and name == found.get(LOOPBACK)
        and not all(ipaddress.ip_address(ip).is_loopback for ip in addresses_of(host))
    ):
        name = None  # an address that is kept there: gloo would take 127.0.0.1
    names = " and ".join(wanted)
    if name is None:
        return {}, f"no interface of this host has the address {host}: torch and NCCL choose one ({names} say which)"
    chosen = {variable: VARIABLES[variable].format(name) for variable in wanted}
    return chosen, f"workers talk over the interface {name} ({host}): it is set in {names}"


def addresses_of(host: str) -> set[str]:
    """What the name or address ``host`` resolves to.  Raises OSError or UnicodeError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(name[0]).partition("%")[0] for _, _, _, _, name in found}


@dataclass(eq=False)
class WorkerEnvironment:
    """Made once per launch; ``add`` the control plane's variables before a worker asks."""

    _plan: LaunchPlan
    _inherited: Mapping[str, str]
    """The launcher's own environment."""
    _say: Callable[[str], None]
    """Tells people which interface was chosen, and what of theirs is overruled."""

    def __post_init__(self) -> None:
        self._shared = launch_environment(self._plan, self._inherited)
        self._overruled = variables.overrule(self._shared) if self._plan.control_plane else []
        self._added: dict[str, str] = {}
        self._network: dict[str, str] | None = None

    def add(self, variables: Mapping[str, str]) -> None:
        self._added |= variables

    def of(self, worker: WorkerProcess, run_id: str) -> dict[str, str]:
        """The whole environment of ``worker``; ``run_id``: that of the launch of all nodes."""
        if self._network is None:
            for line in self._overruled:
                self._say(line)
            self._network = self._choose_interface()
        own = worker_variables(self._plan, worker, run_id)
        found = {**self._shared, **self._added, **own, **self._network}
        if self._plan.elastic and JOIN_VARIABLE in own:  # init_process_group() is to fail, not to wait for ever
            del found["MASTER_ADDR"], found["MASTER_PORT"]
        return found

    def _choose_interface(self) -> dict[str, str]:
        """The variables that have the workers talk over the interface by which this host and the others reach."""
        plan = self._plan
        if plan.nnodes == 1 and not plan.joins:
            return variables_for(loopback(), self._inherited)[0]
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
