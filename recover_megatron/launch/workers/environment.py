"""Environment of the workers: torchrun's variables, and the variables by which recover-run describes the launch.

Variables of the user that recovery cannot work with are removed or replaced (``variables.overrule``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recover_megatron import variables
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.addresses import local_address, loopback, variables_for
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.variables import (
    HOST_VARIABLE,
    JOIN_VARIABLE,
    LAUNCH_ID_VARIABLE,
    LOG_DIR_VARIABLE,
    NCCL2_VARIABLE,
    NODE_NAME_VARIABLE,
    REPLACED_VARIABLE,
    SPARE_VARIABLE,
    WORKER_ID_VARIABLE,
)


def sets_omp_threads(spec: LaunchSpec) -> bool:
    """Return True if the node has several workers and the user has not set OMP_NUM_THREADS, so 1 must be set."""
    return spec.local_world_size > 1 and "OMP_NUM_THREADS" not in spec.environ


def launch_environment(spec: LaunchSpec) -> dict[str, str]:
    """Return the environment that all workers of this node share: the launcher's, and torchrun's and our variables."""
    environment = {
        **spec.environ,
        NODE_NAME_VARIABLE: spec.node_name,
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "PYTHONUNBUFFERED": "1",
        LAUNCH_ID_VARIABLE: spec.launch_id,
    }
    if spec.log_dir:
        environment[LOG_DIR_VARIABLE] = str(spec.log_dir)
    if sets_omp_threads(spec):
        environment["OMP_NUM_THREADS"] = "1"
    if spec.control_plane:  # set here: a script may create process groups before it calls this package
        environment[NCCL2_VARIABLE] = environment.get(NCCL2_VARIABLE) or "0"
    return environment


def worker_variables(spec: LaunchSpec, worker: WorkerProcess, run_id: str) -> dict[str, str]:
    """Return the environment variables that differ between workers, or are not known when the launch starts."""
    rank, worker_id = str(worker.rank or 0), str(worker.worker_id)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": str(worker.local_rank),
        "ROLE_RANK": rank,
        "TORCHELASTIC_RUN_ID": run_id,
        WORKER_ID_VARIABLE: worker_id,
    }
    if spec.max_restarts or spec.spares:
        variables[REPLACED_VARIABLE] = "1"
    if worker.worker_id >= spec.world_size:
        variables |= {JOIN_VARIABLE: "1"}
        if worker.rank is None and not spec.coordinators:
            variables[SPARE_VARIABLE] = "1"
    return variables


@dataclass(eq=False)
class WorkerEnvironment:
    """Environment of the workers, created once per launch; call ``of`` when the control plane is open."""

    _spec: LaunchSpec
    _say: Callable[[str], None]
    """Function that logs the chosen interface, and the user's variables that are removed or replaced."""
    _control: Callable[[], Mapping[str, str]]
    """Function that returns the control plane's variables; candidates may be added during the run."""
    _run_id: Callable[[], str]
    """Function that returns the id of the run, the same on all nodes."""

    def __post_init__(self) -> None:
        self.shared = launch_environment(self._spec)
        """Variables that are the same for all workers of this node, and are known when the launch starts."""
        self._overruled = variables.overrule(self.shared) if self._spec.control_plane else []
        self._network: dict[str, str] | None = None

    def of(self, worker: WorkerProcess) -> dict[str, str]:
        """Return the complete environment of ``worker``."""
        if self._network is None:
            for line in self._overruled:
                self._say(line)
            self._network = self._choose_interface()
        own = worker_variables(self._spec, worker, self._run_id())
        found = {**self.shared, **self._control(), **own, **self._network}
        if self._spec.elastic and JOIN_VARIABLE in own:  # init_process_group() must fail instead of waiting for ever
            del found["MASTER_ADDR"], found["MASTER_PORT"]
        return found

    def _choose_interface(self) -> dict[str, str]:
        """Return the variables that select the interface by which this host reaches the other hosts of the run."""
        spec = self._spec
        if spec.nnodes == 1 and not spec.coordinators:
            return variables_for(loopback(), spec.environ)[0]
        host = self._control().get(HOST_VARIABLE) or spec.node_address
        if host is None:
            host = spec.master_addr
            if spec.node_rank > 0:
                with contextlib.suppress(OSError):  # no route: the log line below reports the address
                    host = local_address((spec.master_addr, spec.master_port))
        variables, about = variables_for(host, spec.environ)
        if about:
            self._say(about)
        return variables
