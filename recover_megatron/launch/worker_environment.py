"""What the workers of this node find in their environment: plan.py's variables, and over which network they talk.

What the user has set that recovery cannot live with they do not find (`variables`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from recover_megatron import variables
from recover_megatron.launch.candidates import local_address
from recover_megatron.launch.interfaces import LOOPBACK, variables_for
from recover_megatron.launch.plan import LaunchPlan, launch_environment, worker_variables
from recover_megatron.launch.states import WorkerProcess
from recover_megatron.variables import HOST_VARIABLE


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
