"""The exporter beside this launcher (``status/exporter.py``): metrics and events of the run, where flags ask for them.

It is no part of the run: where it cannot be started, or ends, a line says so and the run goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping

from recover_megatron.arguments import config_or_defaults, metrics_address
from recover_megatron.launch.hosted import has_ended, program, wait_for
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.processes import spawn
from recover_megatron.variables import COORDINATOR_VARIABLE, LAUNCH_ID_VARIABLE

END_SECONDS = 5.0
"""How long it may take to tell of the end of the run."""


class ExporterProcess:
    """Of one launch, in the main thread.  Nothing on a node whose candidate does not lead at first."""

    def __init__(
        self, plan: LaunchPlan, inherited: Mapping[str, str], loop: EventLoop, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._inherited = inherited
        self._loop = loop
        self._say = say
        self._pid: int | None = None

    @property
    def pids(self) -> set[int]:
        """Of the process that runs."""
        return {self._pid} - {None}  # type: ignore[return-value]

    def start(self, variables: Mapping[str, str]) -> None:
        """``variables``: the addresses of the coordinators and the secret, as workers get them."""
        plan = self._plan
        here = plan.node_rank == plan.first_candidate and not plan.joins
        if not here or not (flags := _flags(plan)):
            return
        if plan.log_dir is None:
            self._say("no metrics and events of this run: they are read from its files, so give recover-run --log-dir")
            return
        command = [*program("recover_megatron.status.exporter"), "--log-dir", str(plan.log_dir), *flags]
        command += ["--coordinators", variables[COORDINATOR_VARIABLE]]
        environment = {**self._inherited, **variables, **plan.lines, LAUNCH_ID_VARIABLE: plan.launch_id}
        try:
            self._pid, self._pidfd = spawn(command, environment, sys.stderr.fileno(), sys.stderr.fileno())
        except OSError as error:
            self._say(f"no metrics and events of this run: their process cannot be started ({error})")
            return
        self._loop.watch(self._pidfd, self._ended)

    def end(self) -> None:
        """The run is over: let it tell so, for a while."""
        if self._pid is None:
            return
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        wait_for(self._pidfd, END_SECONDS)
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pid = None  # what is left of it ends with the launch

    def _ended(self) -> None:
        assert self._pid is not None
        how = has_ended(os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]))
        self._say(f"the process for metrics and events (pid {self._pid}) {how}; the run goes on without it")
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pid = None


def _flags(plan: LaunchPlan) -> list[str]:
    """What it is asked for; empty: nothing."""
    config = config_or_defaults(plan.script_args)
    flags = []
    if config.metrics:
        host, port = metrics_address(config.metrics)
        flags += ["--host", host, "--port", str(port)]
    if config.metrics_file:
        flags += ["--textfile", os.path.abspath(config.metrics_file)]
    if config.on_event:
        flags += ["--on-event", config.on_event]
    return flags
