"""Everything that a launch is told: one record, made once from the command line, the environment, SLURM and the host.

``arguments.parse`` makes the record; ``launch.command`` checks it and passes it on.  No other module of the launcher
reads the command line.  A field with an ``option`` is an option of recover-run: ``scripts/reference.py`` writes the
table in docs/reference from these fields.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from recover_megatron.arguments import listed_domains, own_domains
from recover_megatron.launch.command_line import readers
from recover_megatron.launch.command_line.readers import lease, nodes, one_of, seconds, whole, workers_here
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.device_test import command_of
from recover_megatron.launch.nodes.addresses import CANDIDATES, Address, own_address
from recover_megatron.launch.slurm import nodes_of
from recover_megatron.membership.wire import Secret, find_secret
from recover_megatron.network import system
from recover_megatron.options import flags_of, option
from recover_megatron.variables import HOST_VARIABLE, LINES_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE
from recover_megatron.workload.domains import Training, names

DEFAULT_ADDR = "127.0.0.1"
DEFAULT_PORT_SEVERAL_NODES = 29500

Domains = Sequence[Sequence[str]]
"""Failure domains of each node, in order of node ranks; for the names see ``workload.domains.names``."""


@dataclass(frozen=True)
class HostLimits:
    """Limits of this host for its processes (``network.system``)."""

    files: int
    """Files that a process may open."""
    tasks: Sequence[system.TaskLimit]
    longest: int | None
    """Largest size of a file in bytes; None: no limit."""
    shared: int
    """Free bytes of /dev/shm."""

    @classmethod
    def read(cls) -> HostLimits:
        return cls(system.open_files(), system.task_limits(), system.longest_file(), system.shared_memory())


@dataclass(frozen=True)
class LaunchSpec:
    """A launch as one node sees it.

    The fields up to ``no_python`` are the options of recover-run.  ``launch_id`` is random and marks the processes of
    this launcher; ``run_id`` identifies the run on all nodes: it is the ``launch_id`` of node 0.
    """

    nproc_per_node: int = option(
        1,
        "workers on this node; gpu: one per GPU, cpu: one per core, auto: one per GPU, or per core without GPUs",
        metavar="N",
        check=workers_here,
        default_text="1; with --slurm: the number of the node's GPUs, if SLURM reports it",
    )
    nnodes: int = option(1, "nodes of the launch; start one recover-run on each", metavar="N", check=nodes)
    node_rank: int = option(0, "rank of this node, from 0; node 0 serves the store", metavar="R", check=whole(0))
    master_addr: str = option(DEFAULT_ADDR, "address of node 0", metavar="A")
    master_port: int = option(
        0,
        "port of the store on node 0",
        metavar="P",
        check=whole(0, 65535),
        default_text=f"a free port; {DEFAULT_PORT_SEVERAL_NODES} for several nodes",
    )
    """Port number; 0: a free port."""
    log_dir: Path | None = option(
        None,
        "folder for worker-<id>.log and workers.json; created if missing",
        metavar="DIR",
        docs="[files of a run](operations.md#files-of-a-run)",
    )
    log_format: str = option(
        "plain",
        "plain: lines unchanged; iso: each line with time (UTC), node and worker; json: each line as an object with "
        "these fields. Applies to the console and the logs",
        metavar="FORMAT",
        check=one_of("plain", "iso", "json"),
    )
    grace_seconds: float = option(
        15.0,
        "time between SIGTERM and SIGKILL when the launch is stopped",
        metavar="S",
        check=seconds,
        default_text="15",
    )
    rendezvous_timeout: float = option(
        300.0,
        "longest time that the launchers of several nodes wait for each other",
        metavar="S",
        check=seconds,
        default_text="300",
    )
    max_restarts: int = option(
        0,
        "with --recover or --elastic: largest total number of replacements that this launcher starts for workers "
        "that died during the run",
        metavar="N",
        check=whole(0),
        docs="[get workers back](operations.md#get-workers-back)",
    )
    prepared_workers: int = option(
        1,
        "with --max-restarts and pretrain_gpt_recover.py: 1 to start a process in advance, which has imported Megatron "
        "when a worker dies, so that the replacement trains sooner; 0: none",
        metavar="N",
        check=whole(0, 1),
        docs="[get workers back](operations.md#get-workers-back)",
    )
    fork_workers: bool = option(
        False,
        "with pretrain_gpt_recover.py: import Megatron once on this node, in a process from which all workers are "
        "forked, also replacements; they start sooner and share memory",
        docs="[start sooner](operations.md#start-sooner)",
    )
    relay_from: int = option(
        512,
        "smallest number of the run's workers at which one relay process on each node carries the connections of the "
        "node's workers to the coordinator; 0: never",
        metavar="N",
        check=whole(0),
        docs="[large runs](operations.md#large-runs)",
    )
    lease: str = option(
        "auto",
        "several nodes: a file on shared storage, by which one half of the workers may continue if the other half is "
        "unreachable; auto: in the log folder, if all nodes see the same folder; off: none",
        metavar="PATH",
        check=lease,
        docs="[lease](operations.md#survive-the-loss-of-half-of-the-nodes)",
    )
    witness: str = option(
        "auto",
        "several nodes with a lease: slurm or kubernetes, which confirms that lost nodes are off, so that fewer than "
        "half of the workers may continue; auto: the system that runs this job, if it answers; off: none",
        metavar="KIND",
        check=one_of("auto", "slurm", "kubernetes", "off"),
        docs="[witness](operations.md#survive-the-loss-of-most-nodes)",
    )
    device_test: str = option(
        "",
        "with --max-restarts: command that tests a device before a replacement worker is started on it; exit code 0: "
        "the device is healthy. Without this option, CUDA devices have a built-in test",
        metavar="COMMAND",
        docs="[get workers back](operations.md#get-workers-back)",
    )
    device_test_timeout: float = option(
        60.0,
        "time limit of the device test; a device whose test takes longer has failed",
        metavar="S",
        check=seconds,
        default_text="60",
    )
    recover_coordinator: str | None = option(
        None,
        "with --join: the coordinators of the run",
        metavar="HOST:PORT,...",
        docs="if not given: the script's flag of this name, or the environment",
    )
    joined_world_size: int = option(
        0,
        "with --join: the number of workers that the run was launched with",
        name="--world-size",
        metavar="W",
        check=whole(1),
        default_text="",
    )
    join: bool = option(
        False,
        "join a running run with --nproc-per-node additional workers",
        docs="[add a host](operations.md#add-a-host-to-a-running-job)",
    )
    slurm: bool = option(
        False,
        "under srun, one task per node: take the nodes, this node's rank, and the store's address from SLURM",
        docs="[SLURM](slurm.md#use-recover-run---slurm-in-a-script-of-your-own)",
    )
    elastic: bool = option(
        False,
        "SCRIPT trains with the library (ElasticDataParallel): the run survives deaths of workers, as with --recover",
        docs="[your own loop](integrate.md#write-your-own-loop-without-megatron)",
    )
    check: bool = option(
        False,
        "check launch, layout and batch without Megatron, print the cost of each node's loss, and start nothing",
        docs="[check a command](operations.md#check-a-command-before-you-start-it)",
    )
    module: bool = option(False, "SCRIPT is the name of a module, as with python -m", short="-m")
    no_python: bool = option(
        False,
        "SCRIPT is a program, which is executed directly",
        docs="[flags and variables](operations.md#flags-and-variables)",
    )
    script: Script = field(default_factory=Script)
    wrapper: tuple[str, ...] = ()
    """Words before the Python script in the command of ``no_python``; empty: no Python script was recognized."""
    device_test_command: tuple[str, ...] = ()
    """Program (its path) and arguments of ``device_test``; empty: the option was not given."""
    coordinators: tuple[Address, ...] = ()
    """Coordinators of the run that this launcher joins; empty if it launches a new run."""
    host: str = ""
    """Name of this host."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The launcher's environment, which its workers inherit.  It may hold the run's secret."""
    taken: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Name -> value of the variables of ``environ`` that were used in place of options."""
    limits: HostLimits | None = None
    """Limits of this host; None: they were not read."""
    launch_id: str = ""
    run_id: str = ""
    attempt: int = 0
    """Number of earlier attempts to start this launch."""
    without: tuple[int, ...] = ()
    """Nodes lost in earlier attempts, in order of loss.  This start leaves them out; spares replace their workers."""

    @property
    def command(self) -> tuple[str, ...]:
        """Complete command of a worker: wrapper programs, interpreter, script (or ``-m`` and module), arguments."""
        if self.no_python and not self.wrapper:
            return (self.script.target, *self.script.args)
        asked = not self.elastic and any(word.startswith("--recover") for word in self.script.args)
        runner = ["-m", readers.RUNNER] if asked and readers.takes_runner(self.script.target, self.module) else []
        runner += ["-m"] if self.module else []
        return (*(self.wrapper or [sys.executable]), *runner, self.script.target, *self.script.args)

    @property
    def fault_tolerant(self) -> bool:
        return self.elastic or self.script.recover.enabled

    @property
    def control_plane(self) -> bool:
        """True if the launchers host the run's coordinator; False for several nodes without a shared secret."""
        return self.nnodes == 1 or self.has_secret

    @property
    def has_secret(self) -> bool:
        """True if the user gives the run a secret; only then can the launchers of several nodes share one."""
        return SECRET_VARIABLE in self.environ or SECRET_FILE_VARIABLE in self.environ

    def secret(self) -> Secret | None:
        """Return the user's secret; None if there is none.  Raises SecretError if it is not valid."""
        return find_secret(self.environ) if self.has_secret else None

    @property
    def world_size(self) -> int:
        """Number of workers of all nodes at launch."""
        return self.joined_world_size if self.join else self.nnodes * self.nproc_per_node

    @property
    def local_world_size(self) -> int:
        """Number of workers on this node; spares count only if they replace workers of left-out nodes."""
        more = len(self.without) if self.node_rank == self.nnodes - 1 else 0
        return (1 + more) * self.nproc_per_node

    @property
    def spares(self) -> int:
        """Additional workers that the last node starts."""
        return 0 if self.join else self.script.spares

    @property
    def processes_here(self) -> int:
        """Number of workers that this node starts at first, including spares."""
        return self.nproc_per_node + (self.spares if self.node_rank == self.nnodes - 1 else 0)

    @property
    def has_newcomers(self) -> bool:
        """True if this launcher may start newcomers: replacements, spares or workers that join."""
        return bool(self.max_restarts or self.spares or self.join)

    @property
    def prepares(self) -> bool:
        """True if this launcher may start a process before a replacement is needed."""
        return bool(self.max_restarts and self.prepared_workers and self.waits)

    @property
    def waits(self) -> bool:
        """True if the script waits in ``load`` if it is started before a worker is needed.

        Not with ``--no-python``: a wrapper program may choose the worker's device or cores when it is started.
        """
        return not self.no_python and self.script.loads

    @property
    def starts(self) -> int:
        """Largest number of attempts to start the launch (processes.py)."""
        return 1 + max(self.max_restarts, self.spares) if self.fault_tolerant and not self.join else 1

    def spared(self, lost: Collection[int]) -> bool:
        """Return whether the launch can start without the nodes ``lost``: there must be a spare for each lost worker,
        and neither node 0, which serves the store, nor the last node, which has the spares, may be lost."""
        kept = {0, self.nnodes - 1}
        return kept.isdisjoint(lost) and len(lost) * self.nproc_per_node <= self.spares

    @property
    def needs_all(self) -> bool:
        """True if the loss of a worker before the first plan ends the launch; see ``StartUp``.

        True with --recover or --elastic, and for the shipped script.  Other scripts decide which workers they need.
        """
        return not self.join and (self.fault_tolerant or self.script.is_shipped)

    @property
    def flags(self) -> dict[str, str]:
        """Flags of the script that must be the same on all nodes; empty without ``--recover``."""
        return self.script.alike if self.fault_tolerant else {}

    @cached_property
    def training(self) -> Training | None:
        """Shape of the training; None if a file defines it or the flags are not valid (``Script.training``)."""
        return self.script.training(self.world_size)

    @cached_property
    def device_test_argv(self) -> tuple[str, ...]:
        """Command that tests the device of a replacement before its start; no test if empty (no restarts, or a CPU)."""
        return command_of(self.device_test_command, self.script.recover.device) if self.max_restarts else ()

    @cached_property
    def node_address(self) -> str | None:
        """Address, chosen by the user, by which other nodes reach this node; None: address on the route to them."""
        return own_address(self.environ.get(HOST_VARIABLE, "")) or None

    @property
    def lines(self) -> dict[str, str]:
        """Variables that set the line format in processes that inherit the launcher's stderr."""
        return {} if self.log_format == "plain" else {LINES_VARIABLE: f"{self.log_format} {self.node_name}"}

    @property
    def node_name(self) -> str:
        """Name of this node in the run, which is also its launcher's name as a node agent."""
        return f"{self.host}-joined-{self.launch_id}" if self.join else f"{self.host}-{self.node_rank}"

    @cached_property
    def own_domains(self) -> tuple[str, ...]:
        """Failure domains of this node.  Raises UserError if the file of ``--recover-domain`` lacks this host."""
        return names("", own_domains(self.script.recover.domain, self.environ), self.environ)

    @cached_property
    def domains(self) -> Domains:
        """Domains of each node that ``--recover-domain @FILE`` lists; empty without such a file.

        The nodes are in SLURM's order if the file lists all of SLURM's nodes, else in the file's order.
        """
        try:
            listed = listed_domains(self.script.recover.domain)
        except ValueError:
            return ()  # an earlier check has refused this value
        hosts = nodes_of(self.environ) if self.slurm else []
        hosts = hosts if hosts and all(host in listed for host in hosts) else [*listed]
        return tuple(names("", listed[host], {}) for host in hosts)

    @cached_property
    def candidate_nodes(self) -> tuple[int, ...]:
        """Nodes that host candidate coordinators, in the order in which members try them, of different domains first.

        The first leads; node 0's value applies to all nodes.  Under SLURM node 0 comes last: the batch script and the
        store run there, and its loss should not also cost the leading coordinator.
        """
        first = 1 if self.slurm and self.nnodes > 1 else 0
        order = ((first + number) % self.nnodes for number in range(self.nnodes))
        found, left = list[int](), [node for node in order if node not in self.without]
        known = self.domains if len(self.domains) >= self.nnodes else [()] * self.nnodes
        while left and len(found) < CANDIDATES:
            found.append(min(left, key=lambda node: sum(len({*known[node]} & {*known[other]}) for other in found)))
            left.remove(found[-1])
        return tuple(found)

    def worker_id(self, local_rank: int) -> int:
        """Return the id (the rank at launch) of the worker with ``local_rank`` on this node."""
        return self.node_rank * self.nproc_per_node + local_rank

    def log_file(self, worker_id: int) -> Path | None:
        """Return the log file of ``worker_id``; None without a log folder."""
        return self.log_dir / f"worker-{worker_id}.log" if self.log_dir else None


FLAGS = tuple(flags_of(LaunchSpec))
