"""Candidate coordinators that this launcher hosts, and the launcher's session with the run's coordinator.

On one node, the launcher starts two candidate coordinators on loopback: if one is killed, the workers connect to the
other.  On several nodes, three launchers start one candidate each (``LaunchSpec.candidate_nodes``).  A launcher that
joins a run also starts a candidate, because all candidates of the launch may be lost later; the coordinator announces
the new candidate (membership/admission.py).  A launcher passes the addresses and the job's secret to its workers, and
is the node agent of its node: it reports how its workers end, and kills workers that the coordinator evicts.  Scripts
that never open a session with the coordinator are not affected by it.

    RECOVER_COORDINATOR   host:port,host:port   the candidates known when a worker is started, in order of preference
    RECOVER_SECRET        the job's secret: the user's, or a random one for this launch
    RECOVER_NODE_AGENT    the name of this launcher as a node agent
    RECOVER_RELAY         large runs: the name of the socket of this node's relay
    RECOVER_HOST          several nodes: the address at which other nodes reach this node
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.addresses import (
    LOOPBACK,
    Address,
    Candidates,
    join_addresses,
    listen,
    local_address,
    loopback,
)
from recover_megatron.launch.nodes.hosted import CandidateCommand, HostedCandidate, RelayProcess, Shared
from recover_megatron.launch.nodes.leasing import lease_is_here, slack_of
from recover_megatron.membership.records import (
    EXIT_LOST_MAJORITY,
    EXIT_NO_REPLICA,
    FIRST_JOINED,
    CoordinatorLost,
    Settings,
)
from recover_megatron.membership.sides.node_agent import NoAgent, NodeAgent, Orders
from recover_megatron.membership.wire import find_secret
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.variables import (
    COORDINATOR_VARIABLE,
    HOST_VARIABLE,
    LAUNCH_ID_VARIABLE,
    NODE_VARIABLE,
    SECRET_VARIABLE,
)

HERE = 2
"""Number of candidate coordinators of a launch on one node."""
STOPPING_SECONDS = 1.0
"""Longest wait, in seconds, for the coordinator's answer to the report that a signal stops this launcher."""
LAST_WORD_SECONDS = 5.0
AGAIN_SECONDS = 1.0
NOBODY_SECONDS = 10.0
"""If the hosts of all candidates refuse connections for this many seconds (or ``Settings.lost_timeout``, if that is
longer), a run that had a coordinator counts as ended."""
LOOK_SECONDS = 1.0


def recorded(folder: Path, coordinators: Sequence[Address]) -> tuple[bool, tuple[int, str] | None]:
    """Read the event logs of ``coordinators`` in ``folder``.

    Return whether one of the coordinators has ever listened, and the exit code and reason of the run's end (None if no
    end is logged).

    An end for lack of a majority is ignored: one side of a partition has ended, and the other side may continue.
    """
    addresses, listened = {join_addresses([address]) for address in coordinators}, False
    for path in folder.glob("events-*.jsonl"):
        ours, end = False, None
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # skip a line that is incomplete or damaged
                record = json.loads(line)
                if record["event"] == "listening":  # a new launch: earlier lines belong to other launches
                    ours, end = record["address"] in addresses, None
                    listened |= ours
                elif record["event"] == "stop" and ours and record["code"] != EXIT_LOST_MAJORITY:
                    end = int(record["code"]), str(record["reason"])
        if end is not None:
            return True, end
    return listened, None


def _own_address(others: Sequence[Address]) -> str:
    """Return this host's address on the route to the first of ``others`` that has a route.  Raises OSError if none."""
    for other in others[:-1]:
        with suppress(OSError):
            return local_address(other)
    return local_address(others[-1])


class _InMainThread:
    """Callbacks of the session that pass each event from the session's thread to the event loop."""

    def __init__(
        self, loop: EventLoop, orders: Orders, say: Callable[[str], None], may_host: Callable[..., None]
    ) -> None:
        self.may_host = partial(loop.call_from_thread, may_host)
        self.evict = partial(loop.call_from_thread, orders.evict)
        self.epoch_wanted = partial(loop.call_from_thread, orders.epoch_wanted)
        self.epoch_formed = partial(loop.call_from_thread, orders.epoch_formed)
        self.noted = partial(loop.call_from_thread, orders.noted)
        self.draining = partial(loop.call_from_thread, orders.draining)
        self.said = partial(loop.call_from_thread, say)


@dataclass(eq=False)
class ControlPlane:
    """Candidates and node agent of one launcher; before ``open`` it has neither.

    All callbacks are called by the event loop, in the main thread.
    """

    _spec: LaunchSpec
    _loop: EventLoop
    _say: Callable[[str], None]
    _orders: Orders
    """Handler of the coordinator's orders, called in the main thread."""

    def __post_init__(self) -> None:
        spec = self._spec
        # All processes of a run must use the same timeouts, so they are read from the script's flags.
        self._settings = Settings.of(spec.script.times, start_needs_all=spec.needs_all)
        self._variables: dict[str, str] = {}
        self._environment: dict[str, str] = {}
        self._host_address = loopback()
        self._candidates: dict[Address, HostedCandidate] = {}
        self._relay = RelayProcess(spec, self._loop, self._say)
        self._joins_as_candidate = bool(spec.coordinators)
        """True while a launcher that joins a run may still start its candidate."""
        self.agent: NodeAgent | NoAgent = NoAgent()
        """Session of this launcher with the coordinator; ``NoAgent`` before ``open``."""
        self.found_ended: tuple[int, str] | None = None
        """Exit code and reason of the end of the run that this launcher should join; None: no end is known."""

    def open(self, candidates: Candidates | None) -> None:
        """Start the candidates of this launcher and open the session with the coordinator; call it once.

        ``candidates``: None for a launch on one node; else this object takes over their listener.  Raises SecretError
        if the user's secret is not valid, OSError if a process or socket cannot be created.
        """
        spec = self._spec
        generated = {} if spec.has_secret else {SECRET_VARIABLE: secrets.token_hex(32)}
        self._environment = environment = {**spec.environ, **generated, LAUNCH_ID_VARIABLE: spec.launch_id}
        secret = find_secret(environment)
        addresses, listeners, host = self._places(candidates)
        self._host_address = host or self._host_address
        self.agent = NodeAgent(
            addresses,
            spec.node_name,
            secret,
            _InMainThread(self._loop, self._orders, self._say, self._may_host),
            self._settings,
            late=bool(spec.coordinators),
        )
        witness, lease = (candidates.witness, candidates.lease) if candidates else (None, None)
        try:
            for number, listener in listeners:
                self._host(number, listener, Shared(lease, slack_of(spec), witness, witness is not None))
        except OSError:
            self.end_candidates()
            self.close()
            self.agent = NoAgent()
            raise
        own = {HOST_VARIABLE: host} if host is not None else {}
        self._variables = {**generated, NODE_VARIABLE: spec.node_name, **own}
        self._relay.start(environment)

    def _places(
        self, candidates: Candidates | None
    ) -> tuple[Sequence[Address], list[tuple[int, socket.socket]], str | None]:
        """Return the addresses of all candidates; the number and socket of each candidate of this launcher; and this
        host's address for other nodes (None: workers use the default)."""
        spec = self._spec
        if spec.coordinators:
            return spec.coordinators, [], spec.node_address or _own_address(spec.coordinators)
        if candidates is None:
            host = self._host_address
            listeners = [(number, listen(host)) for number in range(HERE)]
            # The workers use LOOPBACK by default.
            for_workers = None if spec.node_address or host == LOOPBACK else host
            return [listener.getsockname()[:2] for _, listener in listeners], listeners, for_workers
        own = [(spec.node_rank, candidates.listener)] if candidates.listener else []
        return candidates.addresses, own, candidates.host

    def _host(self, number: int, listener: socket.socket, shared: Shared) -> Address:
        """Start candidate ``number`` on the socket ``listener``; return its address."""
        spec, address = self._spec, listener.getsockname()[:2]
        events = spec.log_dir / f"events-{number}.jsonl" if spec.log_dir else Path(os.devnull)
        environment = {**self._environment, **spec.lines}
        command = CandidateCommand(number, spec.world_size, events, self._settings, environment, shared)
        self._candidates[address] = HostedCandidate(self._loop, command, listener, self.agent, self._say)
        return address

    def _may_host(self, world: int, lease: str | None, slack: int, witnessed: bool) -> None:
        """Start the candidate of a launcher that joins a run, with the parameters that the coordinator has sent.

        If that is not possible, log the reason only: the run continues as long as another candidate is left.
        """
        if not self._joins_as_candidate or self.agent.out is not None:
            return
        self._joins_as_candidate = False
        if world != self._spec.world_size:
            self._say(f"no candidate coordinator on this node: the run was launched with {world} workers, but "
                      f"--world-size is {self._spec.world_size}")  # fmt: skip
            return
        if lease is not None and (why_not := lease_is_here(Path(lease))):
            self._say(f"no candidate coordinator on this node: it cannot access the run's lease: {why_not}")
            return
        try:
            listener = listen(self._host_address)
            number = FIRST_JOINED + secrets.randbelow(1 << 30)  # differs from other nodes' numbers
            place = Path(lease) if lease is not None else None
            address = self._host(number, listener, Shared(place, slack, None, witnessed))
        except OSError as error:
            self._say(f"no candidate coordinator on this node: {error.strerror or error}")
            return
        self.agent.hosts(address)
        self._say(f"this node also hosts a candidate coordinator: {join_addresses([address])}")

    def end_candidates(self) -> None:
        """Start no more candidates.  Running candidates are killed with the other processes of the launch."""
        for candidate in self._candidates.values():
            candidate.close()
        self._candidates.clear()
        self._relay.close()

    def close(self) -> None:
        """Close the node agent's session; the candidates end with the launch."""
        self.agent.close()

    def stopping(self, number: int) -> None:
        """Report signal ``number`` to the coordinator, so that the ends of local workers do not count as losses."""
        self.agent.stopping(number, STOPPING_SECONDS)

    # --- queries of the launcher ---

    @property
    def is_open(self) -> bool:
        return bool(self._variables)

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for the workers' environment; empty before ``open``."""
        if not self._variables:
            return {}
        return {**self._variables, **self._relay.variables, COORDINATOR_VARIABLE: join_addresses(self.agent.addresses)}

    @property
    def undecided(self) -> bool:
        """Return whether a coordinator has led and this launcher knows of no end of the run."""
        return self.agent.led and self.agent.out is None

    @property
    def under_way(self) -> bool:
        """Return whether the training has begun (there was a plan) and this launcher knows of no end of the run."""
        return self.agent.epoch > 0 and self.agent.out is None

    @property
    def end_reported(self) -> bool:
        """Return whether a coordinator has reported the end of the run.

        If False, an exit code from ``verdict`` only means that no coordinator was reached.
        """
        out = self.agent.out
        return isinstance(out, CoordinatorLost) and out.reported

    @property
    def reason(self) -> str:
        """Return the coordinator's reason for the end of the run; empty if it has reported none."""
        out = self.agent.out
        return str(out) if isinstance(out, CoordinatorLost) else ""

    @property
    def missed(self) -> bool:
        """Return whether the coordinator has ended the run because workers are missing."""
        out = self.agent.out
        return isinstance(out, CoordinatorLost) and out.reported and out.by is None and out.code == EXIT_NO_REPLICA

    # --- waiting ---

    def when_decided(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the run has ended or all coordinators have become unreachable."""
        self._after(self.agent.wait_out, callback)

    def when_led(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a coordinator leads, when ``found_ended`` is set, or after ``seconds``."""
        self._after(partial(self._wait_led, time.monotonic() + seconds), callback)

    def _wait_led(self, until: float) -> None:
        agent, folder, say = self.agent, self._spec.log_dir, partial(self._loop.call_from_thread, self._say)
        patience = max(NOBODY_SECONDS, self._settings.lost_timeout)  # workers wait as long for a coordinator
        listened = announced = False
        while not agent.wait_led(min(LOOK_SECONDS, until - time.monotonic())) and agent.out is None:
            with suppress(OSError):  # the log folder cannot be read
                listened, self.found_ended = recorded(folder, self._spec.coordinators) if folder else (False, None)
            refused, begun = agent.refused_seconds, listened or agent.attached
            if self.found_ended is None and begun and refused >= patience:
                gone = f"no process has listened at the coordinators' addresses for {patience:g} s; if the run uses "
                self.found_ended = (
                    EXIT_NO_REPLICA,
                    f"{gone}other addresses, recover-status DIR --coordinators lists them",
                )
            if self.found_ended or time.monotonic() >= until:
                return
            if refused and not begun and not announced:
                announced = True
                say(messages.no_coordinator_yet(self._spec))

    def when_up_to_date(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` when this session has the coordinator's current state, or after ``seconds``."""
        if self.is_open:
            self._after(partial(self.agent.catch_up, seconds), callback)
        else:
            callback()

    def _after(self, wait: Callable[[], object], callback: Callable[[], None]) -> None:
        def run() -> None:
            wait()
            self._loop.call_from_thread(callback)

        try:
            threading.Thread(target=run, daemon=True, name="recover-launch-verdict").start()
        except RuntimeError:  # no thread can be started now: try again later
            self._loop.call_later(AGAIN_SECONDS, self._after, wait, callback)

    def verdict(self) -> int | None:
        """Return the exit code that the coordinator decided for the run: 0 if the last members left normally.

        Call it after all workers have ended; it waits up to LAST_WORD_SECONDS for the coordinator's report.  Return
        None if the coordinator has decided nothing: either no worker opened a session, or the run ended before its
        first epoch and no worker had requested the end.
        """
        self.agent.catch_up(LAST_WORD_SECONDS)  # a worker may have received the decision before this launcher
        if not self.agent.led and self.agent.out is None:
            return None
        self.agent.wait_out(LAST_WORD_SECONDS)
        out = self.agent.out
        if not isinstance(out, CoordinatorLost) or (self.agent.epoch == 0 and out.by is None):
            return None
        return out.code

    def linger(self) -> None:
        """Wait, for a bounded time, until the coordinator that has ended the run exits, if this launcher hosts it.

        Otherwise the coordinator would be killed with the launch, before it has logged the end of the run and, on
        several nodes, before it has reported the end to nodes that are reconnecting.
        """
        connected_to = self.agent.connected_to
        candidate = self._candidates.get(connected_to) if connected_to is not None else None
        if self.end_reported and candidate is not None:
            candidate.wait(2 * self._settings.heartbeat_timeout + 1)

    def stopped(self) -> None:
        """After a launch was stopped, call ``linger`` if all workers of the last plan belonged to this launcher."""
        if self.agent.had_all:
            self.agent.wait_out(LAST_WORD_SECONDS)
            self.linger()
