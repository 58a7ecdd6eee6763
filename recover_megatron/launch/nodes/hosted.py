"""Processes next to the workers during the run: candidate coordinators of this launcher, the relay, and the exporter.

A candidate is a socket and a process, which is restarted::

    RUNNING --killed, or ended during the run--> DOWN --after a pause--> RUNNING (a new candidate)
       '--has led the run to its end--> OVER

While the candidate is DOWN, its socket stays open, so that a worker that connects waits in the backlog.  A new process
needs no state of the old one: see membership/coordinator.py.  If the processes end soon after each start, they are
restarted less and less often (``PAUSES``), as long as the run lasts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recover_megatron.arguments import metrics_address
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.workers.processes import Child, program, spawn
from recover_megatron.launch.workers.states import has_ended
from recover_megatron.membership.io.relay import listen
from recover_megatron.membership.io.testimony import Scope
from recover_megatron.membership.records import EXIT_NO_REPLICA, EXIT_STATE_LOST, Settings
from recover_megatron.membership.sides.node_agent import NoAgent, NodeAgent
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.system import memory_file
from recover_megatron.variables import COORDINATOR_VARIABLE, LAUNCH_ID_VARIABLE, RELAY_VARIABLE

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pause before the next restart of a candidate's process, in seconds.  The index is the number of earlier restarts,
including failed ones, since the last process that lived at least SOON seconds."""
SOON = 60.0
LAST_WORD_SECONDS = 0.5
"""Seconds after a candidate's exit in which the launcher's session usually learns whether the run has ended."""
_OF_RUNS = (0, EXIT_NO_REPLICA, EXIT_STATE_LOST)
"""Exit codes with which a candidate exits only if it has led the run to its end."""


@dataclass(frozen=True)
class Shared:
    """Parameters that all candidates of a run share, in addition to the run's settings."""

    lease: Path | None
    """Path of the lease; None: the run has none."""
    slack: int
    """Largest difference between the numbers of workers of two nodes; see ``leadership.permission``."""
    witness: Scope | None
    """Witness, which confirms to this candidate which nodes are off; None for candidates added during the run."""
    witnessed: bool
    """True if the run has a witness, so that every candidate follows the rules for runs with a witness."""


@dataclass(frozen=True)
class CandidateCommand:
    """Command that starts the process of one candidate."""

    number: int
    world_size: int
    events: Path
    """File of the candidate's event log."""
    settings: Settings
    environment: Mapping[str, str]
    """Environment, including the job's secret."""
    shared: Shared

    def start(self, listener: socket.socket) -> tuple[int, int]:
        """Start the candidate, which serves the socket ``listener``.  Return pid and pidfd; raises OSError."""
        command = [*program("recover_megatron.membership.__main__"), "--world", str(self.world_size)]
        command += ["--listen-fd", str(listener.fileno()), "--events", str(self.events)]
        numbers = ("heartbeat_interval", "heartbeat_timeout", "hang_timeout", "stall_timeout", "grace", "min_replicas")
        for name in numbers:
            command += [f"--{name.replace('_', '-')}", str(getattr(self.settings, name))]
        command += ["--start-needs-all"] * self.settings.start_needs_all
        if self.shared.lease is not None:
            command += ["--lease", str(self.shared.lease), "--slack", str(self.shared.slack)]
        command += ["--witnessed"] * self.shared.witnessed
        opened = [os.open(os.devnull, os.O_WRONLY)]
        try:
            if self.shared.witness is not None:  # the scope of many nodes is too long for a command line
                opened.append(memory_file("recover-witness"))
                with open(opened[1], "w", encoding="utf-8", closefd=False) as scope:
                    json.dump(self.shared.witness.to_json(), scope)
                os.lseek(opened[1], 0, os.SEEK_SET)
                command += ["--witness-fd", str(opened[1])]
            # The candidate shares the launcher's stderr, so that the user sees errors of the candidate.
            inherited = [listener.fileno(), *opened[1:]]
            return spawn(command, self.environment, opened[0], sys.stderr.fileno(), inherit=inherited, deaf=True)
        finally:
            for descriptor in opened:
                os.close(descriptor)


@dataclass(eq=False)
class HostedCandidate:
    """Candidate hosted by this launcher; its creation starts the first process.  Raises OSError if that fails.

    Use it in the main thread only.
    """

    _loop: EventLoop
    _command: CandidateCommand
    _listener: socket.socket
    _agent: NodeAgent | NoAgent
    """Session of the launcher with the coordinator.  Once it knows the end of the run, no process is started again."""
    _say: Callable[[str], None]
    _timer: TimerHandle | None = None
    _soon: int = 0
    _process: Child | None = None
    """Running process; None: the candidate is DOWN or OVER."""

    def __post_init__(self) -> None:
        self._run()

    def close(self) -> None:
        """Start no more processes of this candidate; a running process is killed at the end of the launch."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.forget()
            self._process = None
        self._listener.close()

    def wait(self, seconds: float) -> None:
        """If a process of the candidate is running, wait at most ``seconds`` until it has ended."""
        if self._process is not None:
            self._process.wait(seconds)

    def _run(self) -> Child:
        self._process = Child(self._loop, self._command.start(self._listener), self._ended)
        self._started = time.monotonic()
        return self._process

    def _ended(self, status: int) -> None:
        assert self._process is not None
        what = f"candidate coordinator {self._command.number} (pid {self._process.pid}) {has_ended(status)}"
        self._process = None
        if status in _OF_RUNS:
            self._listener.close()  # otherwise clients would wait in the backlog
            self._timer = self._loop.call_later(LAST_WORD_SECONDS, lambda: self._agent.run_over(status, what))
            return
        if time.monotonic() - self._started >= SOON:
            self._soon = 0
        self._again(what, LAST_WORD_SECONDS if status > 0 else 0.0)

    def _again(self, what: str, at_least: float, why_not: str = "") -> None:
        """Schedule the start of the next process of this candidate.

        ``what``: how the last process ended; ``at_least``: shortest pause in seconds; ``why_not``: suffix of the log
        line with the reason why the last start failed.
        """
        pause = max(at_least, PAUSES[min(self._soon, len(PAUSES) - 1)])
        self._soon += 1
        self._timer = self._loop.call_later(pause, lambda: self._replace(what))
        if pause > LAST_WORD_SECONDS:
            self._say(f"{what}{why_not}; the run continues with the other candidates; restart in {pause:g} s")

    def _replace(self, what: str) -> None:
        self._timer = None
        if self._agent.out is not None:
            self._listener.close()  # otherwise clients would wait in the backlog
            return
        try:
            process = self._run()
        except OSError as error:
            self._again(what, 1.0, f", and a new one cannot be started ({error})")
        else:
            self._say(f"{what}; a new one (pid {process.pid}) has taken its place")


_DIRECTLY = "this node's workers connect to the coordinator directly"


@dataclass(eq=False)
class RelayProcess:
    """Relay of this node's workers (``membership/io/relay.py``), in a large run.

    It is not restarted: without it the workers connect to the coordinator directly.
    """

    _spec: LaunchSpec
    _loop: EventLoop
    _say: Callable[[str], None]
    _process: Child | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables by which workers find the relay; empty: there is none."""

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the relay if the run is large enough.  ``environment`` has the job's secret."""
        spec, name = self._spec, f"recover-{secrets.token_hex(16)}"
        if not 0 < spec.relay_from <= spec.world_size or spec.local_world_size < 2:
            return
        command = program("recover_megatron.membership.io.relay")
        errors = sys.stderr.fileno()
        try:
            with listen(name) as listener:
                command += ["--listen-fd", str(listener.fileno())]
                started = spawn(command, environment, errors, errors, inherit=[listener.fileno()], deaf=True)
        except OSError as error:
            self._say(f"the relay cannot be started ({error}): {_DIRECTLY}")
            return
        self._process = Child(self._loop, started, self._ended)
        self.variables = {RELAY_VARIABLE: name}

    def close(self) -> None:
        """Do not report the relay's end any more; it is killed at the end of the launch."""
        if self._process is not None:
            self._process.forget()
            self._process = None

    def _ended(self, status: int) -> None:
        assert self._process is not None
        self._say(f"the relay (pid {self._process.pid}) {has_ended(status)}: {_DIRECTLY}")
        self._process, self.variables = None, {}


END_SECONDS = 5.0
"""Time, in seconds, in which the exporter must report the end of the run."""
MOST_REASON = 2000
"""Largest number of characters of a reason, so that one write to a pipe never blocks."""


@dataclass(eq=False)
class ExporterProcess:
    """Exporter process of this launcher (``status/exporter.py``), which exports metrics and events if requested.

    The run does not depend on the exporter: if it cannot be started, or ends, a line is logged and the run continues.
    The exporter runs only on the node whose candidate leads first.
    """

    _spec: LaunchSpec
    _loop: EventLoop
    _say: Callable[[str], None]
    _process: Child | None = None
    _to: int = -1
    """Pipe through which the exporter learns the end of the launch.  A signal would not do, because SLURM signals every
    process of a step."""

    def start(self, variables: Mapping[str, str]) -> None:
        """Start the exporter, if the script's flags request it and this node must run it.

        ``variables``: the workers' variables with the coordinators' addresses and the secret.
        """
        spec = self._spec
        here = not spec.coordinators and spec.node_rank == spec.candidate_nodes[0]
        if not here or not (flags := _flags(spec)):
            return
        if spec.log_dir is None:
            self._say("metrics and events are not exported: this needs log files; start recover-run with --log-dir")
            return
        command = [*program("recover_megatron.status.exporter"), "--log-dir", str(spec.log_dir), *flags]
        end, self._to = os.pipe()
        command += ["--coordinators", variables[COORDINATOR_VARIABLE], "--end-fd", str(end)]
        environment = {**spec.environ, **variables, **spec.lines, LAUNCH_ID_VARIABLE: spec.launch_id}
        try:
            errors = sys.stderr.fileno()
            started = spawn(command, environment, errors, errors, inherit=[end], deaf=True)
        except OSError as error:
            self._say(f"metrics and events are not exported: the exporter cannot be started ({error})")
            return
        finally:
            os.close(end)
        self._process = Child(self._loop, started, self._ended)

    def end(self, how: tuple[int | None, str] | None) -> None:
        """Notify the exporter of the end of the run, and wait up to END_SECONDS until the exporter has reported it.

        ``how``: exit code and reason; None if this launcher does not know them.  The exporter prefers the report of a
        coordinator, but there may be none if the training has not begun.
        """
        if self._process is not None:
            message = None if how is None else {"code": how[0], "reason": how[1][:MOST_REASON]}
            with suppress(BrokenPipeError):  # the exporter has ended meanwhile
                os.write(self._to, json.dumps(message).encode())
            self._process.wait(END_SECONDS)
            self._process.forget()
            self._process = None  # a running exporter is killed at the end of the launch

    def _ended(self, status: int) -> None:
        assert self._process is not None
        which = f"the process for metrics and events (pid {self._process.pid})"
        self._say(f"{which} {has_ended(status)}; the run continues without it")
        self._process = None


def _flags(spec: LaunchSpec) -> list[str]:
    """Return the exporter's flags; empty if no metrics or events are requested."""
    config = spec.script.recover
    flags = []
    if config.metrics:
        host, port = metrics_address(config.metrics)
        flags += ["--host", host, "--port", str(port)]
    if config.metrics_file:
        flags += ["--textfile", os.path.abspath(config.metrics_file)]
    if config.on_event:
        flags += ["--on-event", config.on_event]
    return flags
