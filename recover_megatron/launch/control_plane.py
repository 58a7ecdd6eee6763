"""The job's coordinator, hosted by the launcher, and the launcher's own session with it.

The launcher of a single-node launch starts two candidate coordinators (processes of their own; when one is killed the
workers turn to the other), gives the workers their addresses and the job's secret, and is the witness: it says how its
workers end, and kills those that the coordinator puts out.  A script that never opens a session is not affected.

    RECOVER_COORDINATOR   host:port,host:port   the candidates, in the order in which the members turn to them
    RECOVER_SECRET        the job's secret: the user's own, or a random one for this launch
    RECOVER_NODE          the name under which this launcher is a witness
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from recover_megatron.arguments import times_from_argv
from recover_megatron.launch.plan import LAUNCH_ID_VARIABLE, LaunchPlan
from recover_megatron.launch.processes import spawn
from recover_megatron.membership.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from recover_megatron.membership.errors import CoordinatorLost
from recover_megatron.membership.records import Settings
from recover_megatron.membership.witness import Witness
from recover_megatron.membership.worker import COORDINATOR_VARIABLE, NODE_VARIABLE

CANDIDATES = 2
LAST_WORD_SECONDS = 5.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from recover_megatron.membership.__main__ import main; sys.exit(main())"
)


class ControlPlane:
    """Candidates and witness of one launch.  ``on_kill(worker, reason)`` is called in another thread.

    Their times are those of the script's ``--recover-*`` flags: all processes of a run must use the same.

    Raises SecretError for a secret of the user's that cannot be used, OSError where no process or socket can be had.
    """

    def __init__(self, plan: LaunchPlan, inherited: Mapping[str, str], on_kill: Callable[[int, str], None]) -> None:
        chosen = SECRET_VARIABLE in inherited or SECRET_FILE_VARIABLE in inherited
        self._variables = {} if chosen else {SECRET_VARIABLE: secrets.token_hex(32)}
        environment = {**inherited, **self._variables, LAUNCH_ID_VARIABLE: plan.launch_id}
        secret = find_secret(environment)
        times = times_from_argv(plan.script_args)
        settings = Settings(
            heartbeat_interval=times.heartbeat_interval,
            heartbeat_timeout=times.heartbeat_timeout,
            hang_timeout=times.hang_timeout,
        )
        addresses = []
        for number in range(CANDIDATES):
            with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
                addresses.append(listener.getsockname()[:2])
                self._start_candidate(plan, number, listener, environment, settings)
        self._variables[COORDINATOR_VARIABLE] = ",".join(f"{host}:{port}" for host, port in addresses)
        self._variables[NODE_VARIABLE] = f"{plan.host}-{plan.node_rank}"
        self._witness = Witness(addresses, self._variables[NODE_VARIABLE], secret, on_kill, settings)

    @staticmethod
    def _start_candidate(
        plan: LaunchPlan, number: int, listener: socket.socket, environment: Mapping[str, str], settings: Settings
    ) -> None:
        events = plan.log_dir / f"events-{number}.jsonl" if plan.log_dir else Path(os.devnull)
        command = [sys.executable, "-I", "-c", _BOOT, _PACKAGE_ROOT, "--world", str(plan.world_size)]
        command += ["--listen-fd", str(listener.fileno()), "--events", str(events)]
        command += ["--heartbeat-interval", str(settings.heartbeat_interval)]
        command += ["--heartbeat-timeout", str(settings.heartbeat_timeout)]
        command += ["--hang-timeout", str(settings.hang_timeout)]
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            spawn(command, environment, sink, sink, inherit=[listener.fileno()])
        finally:
            os.close(sink)

    @property
    def variables(self) -> dict[str, str]:
        """What the workers' environment needs."""
        return dict(self._variables)

    def spawned(self, worker: int, pid: int) -> None:
        """A worker of this node has been started."""
        self._witness.spawned(worker, pid)

    def ended(self, worker: int, how: str) -> None:
        """A worker of this node has been reaped."""
        self._witness.ended(worker, how)

    def verdict(self) -> int | None:
        """The run's exit code as the coordinator decided it: 0 when the last members left in order.

        Asked when all workers have ended.  None: it decided nothing, since no worker opened a session, or the run did
        not get as far as its first epoch; unless a worker said that the run must end.
        """
        self._witness.catch_up(LAST_WORD_SECONDS)  # the last worker may have been told first
        if not self._witness.led and self._witness.out is None:
            return None
        out = self._witness.wait_out(LAST_WORD_SECONDS)
        if not isinstance(out, CoordinatorLost) or (self._witness.epoch == 0 and out.by is None):
            return None
        return out.code

    def close(self) -> None:
        """End the witness's session; the candidates end with the launch."""
        self._witness.close()
