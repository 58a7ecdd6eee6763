"""Plan of a launch: number and ranks of the workers, the store's address, the addresses of the candidate coordinators
of several nodes, and the environment that passes all this to a worker.

Usually the first CANDIDATES nodes (under SLURM: from the second node on) host one candidate coordinator each.  A node
uses its address on the route to node 0; node 0 uses its address on the route to another node with a candidate.  The
user may choose another address (RECOVER_HOST).  The socket of a candidate is bound before its address is sent, so a
member that connects early waits in the backlog.

Variables of the user that recovery cannot work with are removed or replaced (``variables.overrule``).

torch's gloo uses the address to which the host's name resolves, and loopback if it does not resolve: in a bare
container, the workers of two hosts then never find each other.  NCCL uses every interface, even a container bridge.
So the launcher sets the interface for both: the one by which this host and node 0 reach each other.
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
"""Failure domains of each node, in order of node ranks; for the names see ``workload.domains.names``."""

TRAINING = "pretrain_gpt_recover"
"""Name, without .py, of the training script that ships with this package; also the name of its module."""


def is_megatrons(script: str) -> bool:
    """Return whether a script takes Megatron's flags: it is named pretrain_* (not *.sh), or imports ``pretrain``."""
    return (Path(script).stem.startswith("pretrain_") and not script.endswith(".sh")) or imports_pretrain(script)


def is_known(script: str, script_args: Sequence[str]) -> bool:
    """Return whether a script certainly takes Megatron's flags: the shipped one, or ``is_megatrons`` and --recover."""
    return is_megatrons(script) and ("--recover" in script_args or Path(script).stem == TRAINING)


def saves_checkpoints(script: str, script_args: Sequence[str]) -> bool:
    """Return whether the script's --save is Megatron's flag, which names a folder of checkpoints."""
    return is_megatrons(script) or "--recover" in script_args


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of a launch as one node sees it.

    ``launch_id`` is random and marks the processes of this launcher; ``run_id`` identifies the run on all nodes: it is
    the ``launch_id`` of node 0.
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
    """Complete command of a worker: wrapper programs, interpreter, script (or ``-m`` and module), arguments."""
    fault_tolerant: bool
    elastic: bool = False
    """True if the script trains with the library (``--elastic``); then newcomers must not receive ``MASTER_ADDR``."""
    script_args: tuple[str, ...] = ()
    """Arguments of the script: the last words of ``command``."""
    control_plane: bool = True
    """True if the launchers host the run's coordinator; False for several nodes without a shared secret."""
    node_address: str | None = None
    """Address, chosen by the user, by which other nodes reach this node; None: address on the route to other nodes."""
    log_dir: Path | None = None
    """Absolute path of the log folder; None: the launch has no log folder."""
    rendezvous_timeout: float = 300.0
    grace_seconds: float = 15.0
    log_format: str = "plain"
    """Line format; see ``logger.LineFormat``."""
    max_restarts: int = 0
    """Largest number of replacement workers that this launcher may start."""
    device_test: tuple[str, ...] = ()
    """Command that tests the device of a replacement before its start; no test if empty (no restarts, or a CPU)."""
    device_test_timeout: float = 60.0
    """Time limit of a device test in seconds."""
    first_candidate: int = 0
    """Node whose candidate coordinator leads first; node 0's value applies to all nodes."""
    lease: str = "off"
    """Lease of the candidates of several nodes: auto, off, or an absolute path (leasing.py)."""
    domains: Domains = ()
    """Domains of each node, if ``--recover-domain @FILE`` lists them (``workload.domains.names``)."""
    witness: str = "off"
    """Kind of the witness (auto, slurm, kubernetes), which confirms that nodes are off; or off: no witness."""
    spares: int = 0
    """Additional workers that the last node starts."""
    joins: tuple[tuple[str, int], ...] = ()
    """Coordinators of the run that this launcher joins; empty if it launches a new run."""
    joined_world_size: int = 0
    """World size at launch of the run that this launcher joins."""

    attempt: int = 0
    """Number of earlier attempts to start this launch."""
    without: tuple[int, ...] = ()
    """Nodes lost in earlier attempts, in order of loss.  This start leaves them out; spares replace their workers."""

    @property
    def starts(self) -> int:
        """Return the largest number of attempts to start the launch (processes.py)."""
        return 1 + max(self.max_restarts, self.spares) if self.fault_tolerant and not self.joins else 1

    def spared(self, lost: Collection[int]) -> bool:
        """Return whether the launch can start without the nodes ``lost``: there must be a spare for each lost worker,
        and neither node 0, which serves the store, nor the last node, which has the spares, may be lost."""
        kept = {0, self.nnodes - 1}
        return kept.isdisjoint(lost) and len(lost) * self.nproc_per_node <= self.spares

    @property
    def local_world_size(self) -> int:
        """Return the number of workers on this node; spares count only if they replace workers of left-out nodes."""
        more = len(self.without) if self.node_rank == self.nnodes - 1 else 0
        return (1 + more) * self.nproc_per_node

    @property
    def world_size(self) -> int:
        """Return the number of workers of all nodes at launch."""
        return self.joined_world_size if self.joins else self.nnodes * self.nproc_per_node

    @property
    def needs_all(self) -> bool:
        """Return whether the loss of a worker before the first plan ends the launch; see ``StartUp``.

        True with --recover or --elastic, and for the shipped script.  Other scripts decide which workers they need.
        """
        return not self.joins and (self.fault_tolerant or Path(self.target).stem == TRAINING)

    @property
    def is_megatrons(self) -> bool:
        """Return whether newcomers run Megatron with --recover, and so print the line that ``ConsoleFilter`` awaits."""
        return self.fault_tolerant and is_megatrons(self.target)

    @property
    def saves(self) -> bool:
        """Return whether the script's --save is Megatron's flag, which names a folder of checkpoints."""
        return saves_checkpoints(self.target, self.script_args)

    @property
    def target(self) -> str:
        """Return the script or module, as it was given."""
        return self.command[-len(self.script_args) - 1] if self.command else ""

    @property
    def flags(self) -> dict[str, str]:
        """Return the flags of the script that must be the same on all nodes; empty without ``--recover``."""
        if not self.fault_tolerant:
            return {}
        return script_flags.flags_of(self.script_args, config_from_argv(self.script_args).may_differ.split(","))

    @property
    def lines(self) -> dict[str, str]:
        """Return the variables that set the line format in processes that inherit the launcher's stderr."""
        return {} if self.log_format == "plain" else {LINES_VARIABLE: f"{self.log_format} {self.node_name}"}

    @property
    def node_name(self) -> str:
        """Return the name of this node in the run, which is also its launcher's name as a node agent."""
        return f"{self.host}-joined-{self.launch_id}" if self.joins else f"{self.host}-{self.node_rank}"

    @property
    def own_domains(self) -> tuple[str, ...]:
        """Return the failure domains of this node."""
        return names("", own_domains(config_or_defaults(self.script_args).domain), os.environ)

    @property
    def has_newcomers(self) -> bool:
        """Return whether this launcher may start newcomers: replacements, spares or workers that join."""
        return bool(self.max_restarts or self.spares or self.joins)

    def worker_id(self, local_rank: int) -> int:
        """Return the id (the rank at launch) of the worker with ``local_rank`` on this node."""
        return self.node_rank * self.nproc_per_node + local_rank

    def log_file(self, worker_id: int) -> Path | None:
        """Return the log file of ``worker_id``; None without a log folder."""
        return self.log_dir / f"worker-{worker_id}.log" if self.log_dir else None


def sets_omp_threads(plan: LaunchPlan, inherited: Mapping[str, str]) -> bool:
    """Return True if the node has several workers and the user has not set OMP_NUM_THREADS, so 1 must be set."""
    return plan.local_world_size > 1 and "OMP_NUM_THREADS" not in inherited


def launch_environment(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all workers of this node share: inherited, torchrun's and recover-run's variables."""
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
    if plan.control_plane:  # set here: a script may create process groups before it calls this package
        environment[NCCL2_VARIABLE] = environment.get(NCCL2_VARIABLE) or "0"
    return environment


def worker_variables(plan: LaunchPlan, worker: WorkerProcess, run_id: str) -> dict[str, str]:
    """Return the environment variables that differ between workers, or are not known when the launch starts."""
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

    def __init__(self, plan: LaunchPlan, other: Address, hosts: bool) -> None:
        """Choose the address on the route to ``other``, another node; ``hosts``: True if this node has a candidate."""
        self.host = plan.node_address or local_address(other)
        self.listener = listen(self.host) if hosts else None

    @property
    def address(self) -> Address | None:
        return (self.host, self.listener.getsockname()[1]) if self.listener else None


def hosting(plan: LaunchPlan) -> tuple[int, ...]:
    """Return the nodes that host candidates, in the order in which members try them; prefer different domains."""
    nodes = ((plan.first_candidate + number) % plan.nnodes for number in range(plan.nnodes))
    found, left = list[int](), [node for node in nodes if node not in plan.without]
    known = plan.domains if len(plan.domains) >= plan.nnodes else [()] * plan.nnodes
    while left and len(found) < CANDIDATES:
        found.append(min(left, key=lambda node: sum(len({*known[node]} & {*known[other]}) for other in found)))
        left.remove(found[-1])
    return tuple(found)


def listen(host: str) -> socket.socket:
    """Listen on a free port of ``host``, an address of this host; return the socket.  Raises OSError."""
    return socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)


def local_address(other: Address) -> str:
    """Return the address of this host on the route to ``other``.  Raises OSError if there is no route."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*other, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(resolved)
        return str(probe.getsockname()[0])


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


@dataclass(eq=False)
class WorkerEnvironment:
    """Environment of the workers, created once per launch; call ``add`` with the control plane's variables first."""

    _plan: LaunchPlan
    _inherited: Mapping[str, str]
    """The launcher's environment."""
    _say: Callable[[str], None]
    """Function that logs the chosen interface, and the user's variables that are removed or replaced."""

    def __post_init__(self) -> None:
        self._shared = launch_environment(self._plan, self._inherited)
        self._overruled = variables.overrule(self._shared) if self._plan.control_plane else []
        self._added: dict[str, str] = {}
        self._network: dict[str, str] | None = None

    def add(self, variables: Mapping[str, str]) -> None:
        self._added |= variables

    def of(self, worker: WorkerProcess, run_id: str) -> dict[str, str]:
        """Return the complete environment of ``worker``; ``run_id``: id of the run, the same on all nodes."""
        if self._network is None:
            for line in self._overruled:
                self._say(line)
            self._network = self._choose_interface()
        own = worker_variables(self._plan, worker, run_id)
        found = {**self._shared, **self._added, **own, **self._network}
        if self._plan.elastic and JOIN_VARIABLE in own:  # init_process_group() must fail instead of waiting for ever
            del found["MASTER_ADDR"], found["MASTER_PORT"]
        return found

    def _choose_interface(self) -> dict[str, str]:
        """Return the variables that select the interface by which this host reaches the other hosts of the run."""
        plan = self._plan
        if plan.nnodes == 1 and not plan.joins:
            return variables_for(loopback(), self._inherited)[0]
        host = self._added.get(HOST_VARIABLE) or plan.node_address
        if host is None:
            host = plan.master_addr
            if plan.node_rank > 0:
                with contextlib.suppress(OSError):  # no route: the log line below reports the address
                    host = local_address((plan.master_addr, plan.master_port))
        variables, about = variables_for(host, self._inherited)
        if about:
            self._say(about)
        return variables
