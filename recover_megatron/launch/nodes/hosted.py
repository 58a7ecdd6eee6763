"""What runs beside the workers for the whole run: candidate coordinators that this launcher hosts, and the exporter.

A candidate is its socket, and its process, which is started again::

    RUNNING --killed, or ended while the run goes on--> DOWN --after a pause--> RUNNING (a fresh candidate)
       '--has led the run to its end--> OVER

The socket stays open while it is DOWN, so that a worker that turns to the address waits in its backlog. A fresh
candidate knows nothing, and need not: see membership/coordinator.py. A candidate that ends soon after each start is
started ever less often (``PAUSES``), for as long as the run lasts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.arguments import config_or_defaults, metrics_address
from recover_megatron.launch.command_line.plan import LaunchPlan, hosting
from recover_megatron.launch.workers.loop import EventLoop, Timer
from recover_megatron.launch.workers.processes import Child, program, spawn
from recover_megatron.launch.workers.states import has_ended
from recover_megatron.membership.io.testimony import Scope
from recover_megatron.membership.records import EXIT_NO_REPLICA, EXIT_STATE_LOST, Settings
from recover_megatron.membership.sides.node_agent import NoAgent, NodeAgent
from recover_megatron.network.system import memory_file
from recover_megatron.variables import COORDINATOR_VARIABLE, LAUNCH_ID_VARIABLE

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before the next start, by how many candidates have ended soon one after the other."""
SOON = 60.0
LAST_WORD_SECONDS = 0.5
"""One that ends by itself has usually ended the run: so long after it the launcher's session knows that, unless the
launcher was stopped meanwhile and its connection given up."""
_OF_RUNS = (0, EXIT_NO_REPLICA, EXIT_STATE_LOST)
"""The exit codes of one that has led the run to its end, and of no other."""


@dataclass(frozen=True)
class Shared:
    """What the candidates of a run have in common, beside its settings."""

    lease: Path | None
    slack: int
    """See ``leadership.standing``."""
    witness: Scope | None
    """The witness, which may tell the candidates which nodes are off; one that is added later is not told of it."""
    witnessed: bool
    """Whether the run has such a witness, so that a candidate keeps to what follows from that."""


@dataclass(frozen=True)
class CandidateCommand:
    """How the process of one candidate is started."""

    number: int
    world_size: int
    events: Path
    """The file of its event log."""
    settings: Settings
    environment: Mapping[str, str]
    """The job's secret included."""
    shared: Shared

    def start(self, listener: socket.socket) -> tuple[int, int]:
        """Start a candidate that serves ``listener``.  Returns pid and pidfd; raises OSError if it cannot."""
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
            if self.shared.witness is not None:  # of many nodes more than a command line takes
                opened.append(memory_file("recover-witness"))
                with open(opened[1], "w", encoding="utf-8", closefd=False) as scope:
                    json.dump(self.shared.witness.to_json(), scope)
                os.lseek(opened[1], 0, os.SEEK_SET)
                command += ["--witness-fd", str(opened[1])]
            # What it has to say on stderr (a disk that fails it, a fault of its own) is for the launcher's user.
            inherited = [listener.fileno(), *opened[1:]]
            return spawn(command, self.environment, opened[0], sys.stderr.fileno(), inherit=inherited, deaf=True)
        finally:
            for descriptor in opened:
                os.close(descriptor)


@dataclass(eq=False)
class HostedCandidate:
    """Made and used in the main thread; starts the first process.  Raises OSError where that cannot be started."""

    _loop: EventLoop
    _command: CandidateCommand
    _listener: socket.socket
    _agent: NodeAgent | NoAgent
    """The launcher's own session, which knows whether the run has ended, so that nobody needs another candidate."""
    _say: Callable[[str], None]
    _timer: Timer | None = None
    _soon: int = 0
    _process: Child | None = None
    """None: it is down."""

    def __post_init__(self) -> None:
        self._run()

    def close(self) -> None:
        """Start no more; the process that runs is left to the end of the launch."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.forget()
            self._process = None
        self._listener.close()

    def wait(self, seconds: float) -> None:
        """Wait until the process that runs, if one does, has ended; so long at most."""
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
            self._listener.close()  # or whoever dials it would wait for an answer
            self._timer = self._loop.call_later(LAST_WORD_SECONDS, lambda: self._agent.run_over(status, what))
            return
        if time.monotonic() - self._started >= SOON:
            self._soon = 0
        self._again(what, LAST_WORD_SECONDS if status > 0 else 0.0)

    def _again(self, what: str, at_least: float, why_not: str = "") -> None:
        """``why_not``: what kept another one from being started in place of ``what``, which is told anew each time."""
        pause = max(at_least, PAUSES[min(self._soon, len(PAUSES) - 1)])
        self._soon += 1
        self._timer = self._loop.call_later(pause, lambda: self._replace(what))
        if pause > LAST_WORD_SECONDS:
            self._say(f"{what}{why_not}; the run goes on with the others, and with another one in {pause:g} s")

    def _replace(self, what: str) -> None:
        self._timer = None
        if self._agent.out is not None:
            return
        try:
            process = self._run()
        except OSError as error:
            self._again(what, 1.0, f", and another one cannot be started ({error})")
        else:
            self._say(f"{what}; another one (pid {process.pid}) has its place")


END_SECONDS = 5.0
"""How long it may take to tell of the end of the run."""
MOST_REASON = 2000
"""Characters: so that a pipe takes them at once."""


@dataclass(eq=False)
class ExporterProcess:
    """The exporter beside this launcher (``status/exporter.py``): metrics and events, where flags ask for them.

    It is no part of the run: where it cannot be started, or ends, a line says so and the run goes on.  Nothing on a
    node whose candidate does not lead at first.
    """

    _plan: LaunchPlan
    _inherited: Mapping[str, str]
    """The launcher's environment."""
    _loop: EventLoop
    _say: Callable[[str], None]
    _process: Child | None = None
    _to: int = -1
    """The pipe by which it is told that the launch has ended: signals are sent to every process of a SLURM step."""

    def start(self, variables: Mapping[str, str]) -> None:
        """``variables``: the addresses of the coordinators and the secret, as workers get them."""
        plan = self._plan
        here = not plan.joins and plan.node_rank == hosting(plan)[0]
        if not here or not (flags := _flags(plan)):
            return
        if plan.log_dir is None:
            self._say("no metrics and events of this run: they are read from its files, so give recover-run --log-dir")
            return
        command = [*program("recover_megatron.status.exporter"), "--log-dir", str(plan.log_dir), *flags]
        end, self._to = os.pipe()
        command += ["--coordinators", variables[COORDINATOR_VARIABLE], "--end-fd", str(end)]
        environment = {**self._inherited, **variables, **plan.lines, LAUNCH_ID_VARIABLE: plan.launch_id}
        try:
            errors = sys.stderr.fileno()
            started = spawn(command, environment, errors, errors, inherit=[end], deaf=True)
        except OSError as error:
            self._say(f"no metrics and events of this run: their process cannot be started ({error})")
            return
        finally:
            os.close(end)
        self._process = Child(self._loop, started, self._ended)

    def end(self, how: tuple[int | None, str] | None) -> None:
        """The run is over: let it tell so, for a while.  ``how``: the exit code and why, where this launcher knows;
        a coordinator that has told it as well is believed more, but before the training begins none leads."""
        if self._process is not None:
            told = None if how is None else {"code": how[0], "reason": how[1][:MOST_REASON]}
            with suppress(BrokenPipeError):  # it has ended meanwhile
                os.write(self._to, json.dumps(told).encode())
            self._process.wait(END_SECONDS)
            self._process.forget()
            self._process = None  # what is left of it ends with the launch

    def _ended(self, status: int) -> None:
        assert self._process is not None
        which = f"the process for metrics and events (pid {self._process.pid})"
        self._say(f"{which} {has_ended(status)}; the run goes on without it")
        self._process = None


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
