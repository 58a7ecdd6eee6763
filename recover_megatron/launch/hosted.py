"""A candidate coordinator that this launcher hosts: its socket, and its process, which is started again.

    RUNNING --killed, or ended while the run goes on--> DOWN --after a pause--> RUNNING (a fresh candidate)

The socket stays open in between, so that whoever turns to the address waits in its backlog. A fresh candidate knows
nothing, and need not: see membership/coordinator.py. A candidate that ends soon after each start is started ever less
often (``PAUSES``), for as long as the run lasts.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.launch.loop import EventLoop, Timer
from recover_megatron.launch.processes import spawn
from recover_megatron.launch.states import signal_name
from recover_megatron.membership.node_agent import NoAgent, NodeAgent
from recover_megatron.membership.records import Settings
from recover_megatron.membership.testimony import Scope

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before the next start, by how many candidates have ended soon one after the other."""
SOON = 60.0
LAST_WORD_SECONDS = 0.5
"""One that ends by itself has usually ended the run: so long after it the launcher's session knows that."""


def program(module: str) -> list[str]:
    """The command that runs ``main`` of a module of ours, in a process that no folder or variable can change."""
    boot = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", boot, str(Path(__file__).resolve().parents[2])]


def has_ended(status: int) -> str:
    """What people read of a process that has ended; ``status``: the exit code, or minus the signal that killed it."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"has ended with exit code {status}"


def wait_for(pidfd: int, seconds: float) -> None:
    """Wait until the process has ended; so long at most."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(1000 * seconds)


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
    lease: Path | None = None
    slack: int = 0
    """See ``leadership.standing``."""
    witness: Scope | None = None
    """The witness, which may tell it which nodes are off."""
    witnessed: bool = False
    """Whether the run has such a witness, so that this candidate keeps to what follows from that."""

    def start(self, listener: socket.socket) -> tuple[int, int]:
        """Start a candidate that serves ``listener``.  Returns pid and pidfd; raises OSError if it cannot."""
        command = [*program("recover_megatron.membership.__main__"), "--world", str(self.world_size)]
        command += ["--listen-fd", str(listener.fileno()), "--events", str(self.events)]
        numbers = ("heartbeat_interval", "heartbeat_timeout", "hang_timeout", "stall_timeout", "grace", "min_replicas")
        for name in numbers:
            command += [f"--{name.replace('_', '-')}", str(getattr(self.settings, name))]
        command += ["--start-needs-all"] * self.settings.start_needs_all
        if self.lease is not None:
            command += ["--lease", str(self.lease), "--slack", str(self.slack)]
        command += ["--witnessed"] * self.witnessed
        opened = [os.open(os.devnull, os.O_WRONLY)]
        try:
            if self.witness is not None:  # of many nodes more than a command line takes
                opened.append(os.memfd_create("recover-witness"))
                with open(opened[1], "w", encoding="utf-8", closefd=False) as scope:
                    json.dump(self.witness.to_json(), scope)
                os.lseek(opened[1], 0, os.SEEK_SET)
                command += ["--witness-fd", str(opened[1])]
            # What it has to say on stderr (a disk that fails it, a fault of its own) is for the launcher's user.
            inherited = [listener.fileno(), *opened[1:]]
            return spawn(command, self.environment, opened[0], sys.stderr.fileno(), inherit=inherited, deaf=True)
        finally:
            for descriptor in opened:
                os.close(descriptor)


class HostedCandidate:
    """Made and used in the main thread, whose loop tells of the process's end."""

    def __init__(
        self,
        loop: EventLoop,
        command: CandidateCommand,
        listener: socket.socket,
        agent: NodeAgent | NoAgent,
        say: Callable[[str], None],
    ) -> None:
        """Starts the first process.  Raises OSError where it cannot be started.

        ``agent``: the launcher's own session, which knows whether the run has ended, so that nobody needs another
        candidate.
        """
        self._loop = loop
        self._command = command
        self._listener = listener
        self._agent = agent
        self._say = say
        self._timer: Timer | None = None
        self._soon = 0
        self.pid: int | None = None
        self._run()

    def close(self) -> None:
        """Start no more; the process that runs is left to the end of the launch."""
        if self._timer is not None:
            self._timer.cancel()
        if self.pid is not None:
            self._forget()
        self._listener.close()

    def wait(self, seconds: float) -> None:
        """Wait until the process that runs, if one does, has ended; so long at most."""
        if self.pid is not None:
            wait_for(self._pidfd, seconds)

    def _run(self) -> None:
        self.pid, self._pidfd = self._command.start(self._listener)
        self._started = time.monotonic()
        self._loop.watch(self._pidfd, self._ended)

    def _forget(self) -> None:
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self.pid = None

    def _ended(self) -> None:
        assert self.pid is not None
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        what = f"candidate coordinator {self._command.number} (pid {self.pid}) {has_ended(status)}"
        self._forget()
        if status == 0:
            return  # it led the run to its end
        if time.monotonic() - self._started >= SOON:
            self._soon = 0
        self._again(what, LAST_WORD_SECONDS if status > 0 else 0.0)

    def _again(self, what: str, at_least: float) -> None:
        pause = max(at_least, PAUSES[min(self._soon, len(PAUSES) - 1)])
        self._soon += 1
        self._timer = self._loop.call_later(pause, lambda: self._replace(what))
        if pause > LAST_WORD_SECONDS:
            self._say(f"{what}; the run goes on with the others, and with another one in {pause:g} s")

    def _replace(self, what: str) -> None:
        self._timer = None
        if self._agent.out is not None:
            return
        try:
            self._run()
        except OSError as error:
            self._again(f"{what}, and another one cannot be started ({error})", 1.0)
        else:
            self._say(f"{what}; another one (pid {self.pid}) has its place")
