"""Coordination with the launchers of other nodes: admission to the launch, failures, and the wait at the end.

The launchers of a launch exchange messages through the store, under ``recover/launch/``::

    key                      written by     meaning
    job                      node 0         {"nnodes", "nproc_per_node", "control_plane", "candidates", "run_id",
                                            "attempt", "without", "flags"}; "refused" in place of "flags" if node 0
                                            has refused its command line
    node/R                   node R > 0     all messages of node R so far: its identity, the addresses of its door (a
                                            listening socket) and its candidate, its refusal, its failure, the ends of
                                            its workers; and a count that grows every BEAT_SECONDS while node R is live
    bell                     nodes R > 0    queue of ranks R, which wakes node 0 to read node/R; not trusted
    welcome/R                node 0         {"nonce"}: nonce of the first launcher that joined as node R
    coordinators             node 0         {"addresses", "lease", "witness"}: the candidates' addresses in order,
                                            whether they have a lease, and their witness; empty if the launch was
                                            ended before the addresses were known
    everybody                node 0         set when all nodes take part
    end                      node 0         {"reason", "code", "without"}: the launch cannot be completed; all nodes
                                            stop with that code, or start again without the nodes ``without``
    end/seen/R               node R > 0     node R has read ``end``

Every value except the bell and ``end/seen`` is sealed (``store.Seal``).  A value that cannot be opened is ignored, with
one log line.  The launcher that wrote the true value writes it again every BEAT_SECONDS, so a stranger that writes into
the store can only delay a launch.

A node that disagrees with ``job`` is refused before it starts a worker.  If node 0 still waits for that node, the
launch can never be complete, so node 0 ends it.  A launcher that has refused its command line also notifies the others
(``tell_refusal``): node 0 by ``refused`` in ``job``, another node by its refusal in node/R.  Each node of
``candidates`` reports the address of its coordinator (addresses.py); no worker starts before all nodes know these
addresses.  Node 0 keeps the store up until every node has reported the ends of its workers, or its count has not grown
for LOST_SECONDS.

At the start, which needs all nodes, a loss must be noticed sooner.  So launchers also hold connections (``Line``):
node 0 to the door (a listening socket) of each other node, and each other node to the store of node 0.

Store operations block, so guest.py and host.py run in threads and call back through the event loop; failure reports use
a separate connection.  ``Peers`` decides, in the main thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.addresses import Address, Candidates
from recover_megatron.launch.nodes.guest import Guest
from recover_megatron.launch.nodes.host import LOST_SECONDS, WAITING_SECONDS, Host
from recover_megatron.launch.nodes.store import Seal, Store, join_store, one_line, serve_store
from recover_megatron.launch.workers.states import LAUNCH_FAILED, ExitOutcome
from recover_megatron.membership.records import EXIT_NO_REPLICA, Settings, ranges
from recover_megatron.membership.wire import Secret
from recover_megatron.network.event_loop import EventLoop

REPORT_SECONDS = 10.0
"""Longest time, in seconds, that a node other than 0 waits, before it exits, until its report is in the store."""
LAST_WORD_SECONDS = 0.5
"""Seconds to wait after the end of another launcher for the last message of that launcher, which may name the cause."""
FAILURE_SECONDS = 5.0
"""Longest time, in seconds, for notifying the other launchers that this launcher ends the launch."""


REACHED_SECONDS, REFUSAL_SECONDS = 5.0, 30.0
"""Time limits, in seconds, for a launcher that has refused its command line: until it reaches the other launchers, and
for the complete notification."""


def tell_refusal(spec: LaunchSpec, secret: Secret | None, listener: socket.socket | None, reason: str) -> None:
    """Notify the other launchers that this launcher does not join; else they would wait until the rendezvous timeout.

    ``listener``: the store's socket, on node 0; None on another node, which notifies node 0, so that node 0 ends the
    launch.  The wait is short, because usually all launchers refuse for the same reason.
    """
    no_events: Any = SimpleNamespace(note=None)

    def run() -> None:
        with contextlib.suppress(OSError, RuntimeError, ImportError, ValueError, KeyError, TypeError):
            if listener is None:
                Guest(spec, Seal(secret), no_events, lambda *_: None).refuse(reason, REACHED_SECONDS)
            else:
                store = serve_store(spec.master_addr, listener)
                Host(spec, store, Seal(secret), no_events, lambda *_: None, lambda *_: None).refuse(
                    reason, REACHED_SECONDS
                )

    Peers._run(run).join(REFUSAL_SECONDS)


class Line:
    """Idle connection to another launcher: the kernel reports the end of that launcher or the silence of its host.

    ``lost`` is called once, in the main thread: with True if the other launcher's process has ended, with False if its
    host has not answered keepalive probes for ``seconds`` (the host of a stopped process still answers).  If no
    connection can be made, ``lost`` is never called.
    """

    def __init__(self, loop: EventLoop, address: Address, seconds: float, lost: Callable[[bool], object]) -> None:
        self._loop = loop
        self._lost = lost
        self._seconds = seconds
        self._address = address
        threading.Thread(target=self._connect, daemon=True, name="recover-launch-line").start()

    def _connect(self) -> None:
        with contextlib.suppress(OSError):
            line = socket.create_connection(self._address, self._seconds)
            options = {
                socket.TCP_KEEPIDLE: 1,
                socket.TCP_KEEPINTVL: 1,
                socket.TCP_KEEPCNT: min(max(1, round(self._seconds - 1)), 127),  # Linux's maximum
            }
            for option, value in options.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._loop.call_from_thread(self._loop.add_reader, line, self._look, line)

    def _look(self, line: socket.socket) -> None:
        try:
            if line.recv(4096):
                return
            ended = True
        except OSError as error:
            ended = isinstance(error, ConnectionResetError)
        self._loop.remove_reader(line)
        line.close()
        self._lost(ended)


class PeerEvents(Protocol):
    """Reactions of this launcher to events of other launchers, called in the main thread unless stated otherwise."""

    def start_workers_if_ready(self) -> None:
        """Start the workers if all else is ready; called when node 0 has admitted this node, with ``run_id`` set."""

    def start_control_plane(self, candidates: Candidates) -> None:
        """Start the control plane of several nodes; called when all candidate coordinators are known."""

    def stop_with_peers(self, reason: str, code: int, without: tuple[int, ...] = ()) -> None:
        """Stop this node's workers and exit with ``code``; ``without``: for START_AGAIN, the nodes to leave out."""

    def run_continues(self) -> bool:
        """Return whether the run is under way with workers of this node; may be called in any thread."""

    def store_failed(self, reason: str) -> None:
        """Stop the launch, unless the training has begun: this node cannot serve the store."""

    def peers_ended(self) -> None:
        """Finish, because no other node needs this launcher; called only if ``own_workers_ended`` returned True."""


@dataclass(eq=False)
class Peers:
    """Coordination with the launchers of the other nodes; created once per launch.

    Threads exchange messages through the store and report ``NodeEvents``, to which this object reacts in the main
    thread.
    """

    _loop: EventLoop
    _spec: LaunchSpec
    secret: InitVar[Secret | None]
    """Secret of the job; None if the launchers share none."""
    _listener: socket.socket | None
    """On node 0: listening socket of the store, until the store is served; else None."""
    _launcher_lost: Callable[..., None]
    """Callback for a lost node; arguments: description of the node, log line if the training has begun, rank."""
    _say: Callable[[str], None]
    _events: PeerEvents

    def __post_init__(self, secret: Secret | None) -> None:
        spec = self._spec
        self.joined = spec.node_rank == 0
        self.run_id = spec.run_id
        self.outcomes: list[ExitOutcome] = []
        """Reported ends of the workers of other nodes (known to node 0 only)."""
        self._lost: set[int] = set()
        self._gone: set[int] = set()
        """Nodes whose connections (``Line``) have ended, so that no message reaches them."""
        self._silence = Settings.of(spec.script.times).heartbeat_timeout
        self._unreported = set(range(1, spec.nnodes)) - {*spec.without} if spec.node_rank == 0 else set()
        self._store_lost = self._silent = self._waiting = False
        self._timer: TimerHandle | None = None
        # These callbacks of NodeEvents are implemented by other methods or other objects.
        self.note, self.delivered = self._say, self._stop_waiting
        self.coordinators, self.failed = self._events.start_control_plane, self._events.stop_with_peers
        self.store_failed, self.run_continues = self._events.store_failed, self._events.run_continues
        self._tell = self._loop.call_from_thread
        self._seal = Seal(secret)
        self._store: Store | None = None  # this reference keeps the server alive
        self._guest = Guest(spec, self._seal, self, self._tell)
        self._host: Host | None = None
        self._telling: list[threading.Thread] = []

    @property
    def any_lost(self) -> bool:
        """Return whether a node's launcher was lost and has not returned (known to node 0 only)."""
        return bool(self._lost)

    def join(self) -> None:
        """Ask node 0 to admit this node to the launch, unless this is node 0."""
        if not self.joined:
            self._run(self._guest.run)
            self._timer = self._loop.call_later(self._spec.rendezvous_timeout, self._on_timeout)
            self._loop.call_later(WAITING_SECONDS, self._on_waiting)

    def serve_store(self) -> None:
        """On node 0, start to serve the store, at the first call only.

        Call it after the workers were started, so that they import torch at the same time as this launcher.
        """
        if self._listener is not None:
            self._run(partial(self._serve, self._listener))
            self._listener = None

    def own_workers_ended(self, outcomes: list[ExitOutcome]) -> bool:
        """Report the ends of this node's workers; return True if this launcher must stay until ``peers_ended``.

        Node 0 must stay while other nodes have workers; another node must stay until its report is delivered.
        """
        if self._spec.node_rank > 0 and not self._store_lost:
            self._run(partial(self._deliver, {"report": outcomes}))
            self._loop.call_later(REPORT_SECONDS, self._stop_waiting)
            self._waiting = True
        elif self._unreported:
            nodes = ranges(sorted(self._unreported))
            self._say(f"the workers of this node have ended; the store stays up until node {nodes} has ended, too")
            self._waiting = True
        return self._waiting

    def fail(self, reason: str, code: int, without: Sequence[int] = ()) -> None:
        """End the launch on the other nodes; the caller stops this node.  ``without``: see ``Host.announce_end``."""
        if self.joined and not self._store_lost and 0 not in self._gone:
            self._tell_failure(reason, code, without)

    def wait_until_notified(self) -> None:
        """Wait up to FAILURE_SECONDS until the other nodes have been notified of ``fail``; call it before the exit."""
        until = time.monotonic() + FAILURE_SECONDS
        for thread in self._telling:
            thread.join(max(0.0, until - time.monotonic()))

    # --- events from the threads (NodeEvents) ---

    def accepted(self, run_id: str) -> None:
        if self._timer:
            self._timer.cancel()
        self.joined, self.run_id = True, run_id
        self._loop.call_later(LOST_SECONDS, self._watch_store)
        if self._spec.fault_tolerant:
            Line(self._loop, (self._spec.master_addr, self._spec.master_port), self._silence, self._node_0_silent)
        self._events.start_workers_if_ready()

    def _node_0_silent(self, ended: bool) -> None:
        if not ended:  # if the launcher of node 0 has ended, ``store_lost`` reports that
            self._gone.add(0)
            self._launcher_lost(f"node 0 (its host has not answered for {self._silence:g} s)")

    def welcomed(self, node_rank: int, door: Address) -> None:
        if not self._spec.fault_tolerant:
            return  # without --recover or --elastic, a few seconds of silence must not end the run
        lost = partial(self._line_ended, node_rank)
        Line(
            self._loop,
            door,
            self._silence,
            partial(self._loop.call_later, LAST_WORD_SECONDS, lost),
        )

    def _line_ended(self, node_rank: int, ended: bool) -> None:
        if node_rank in self._unreported:
            self._gone.add(node_rank)
            why = "its launcher has ended" if ended else f"its host has not answered for {self._silence:g} s"
            self._launcher_lost(f"node {node_rank} ({why})", node=node_rank)

    def store_lost(self, reason: str) -> None:
        if self._store_lost:
            return
        self._store_lost = True
        spec = self._spec
        notice = (
            f"the store of node 0 ({spec.master_addr}:{spec.master_port}) is lost: its launcher ended or its host "
            f"is lost ({reason}); the workers here continue, but cannot use the store any more"
        )
        self._launcher_lost(
            f"node 0 (its launcher ended or its host is lost: {reason})", "" if self._waiting else notice
        )

    def store_back(self) -> None:
        if self._store_lost:
            self._store_lost = False
            self._say("the store of node 0 is reachable again")

    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None:
        self.outcomes += outcomes
        self._node_ended(node_rank)

    def node_lost(self, node_rank: int) -> None:
        silent = "its launcher has been silent for too long"
        self._lost.add(node_rank)
        notice = f"node {node_rank} is lost: {silent}; this launcher does not wait for it"
        self._launcher_lost(f"node {node_rank} ({silent})", notice, node=node_rank)
        self._node_ended(node_rank)

    def node_back(self, node_rank: int) -> None:
        self._say(f"the launcher of node {node_rank} is reachable again")
        self._lost.discard(node_rank)
        self._unreported.add(node_rank)

    # --- watching and waiting ---

    def _watch_store(self) -> None:
        """Report the store as lost after a long silence: if node 0's host loses power, store operations only hang."""
        silence = time.monotonic() - self._guest.heard
        if silence > LOST_SECONDS and not self._store_lost:
            self._silent = True
            self.store_lost(f"no answer for {silence:.0f} s")
        elif silence < LOST_SECONDS and self._silent:
            self._silent = False
            self.store_back()
        self._loop.call_later(LOST_SECONDS / 4, self._watch_store)

    def _on_waiting(self) -> None:
        if not self.joined and not self._guest.reached:
            spec = self._spec
            where = f"{spec.master_addr}:{spec.master_port}"
            self._say(f"waiting for node 0 at {where}, at most {spec.rendezvous_timeout:g} s (--rendezvous-timeout)")

    def _on_timeout(self) -> None:
        spec = self._spec
        self._events.stop_with_peers(
            f"node 0 did not answer at {spec.master_addr}:{spec.master_port} within {spec.rendezvous_timeout:g} s "
            "(--rendezvous-timeout): is its recover-run started, with the same --master-addr and --master-port?",
            EXIT_NO_REPLICA if spec.attempt else LAUNCH_FAILED,
        )

    def _node_ended(self, node_rank: int) -> None:
        self._unreported.discard(node_rank)
        if not self._unreported:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._events.peers_ended()

    # --- the threads ---

    @staticmethod
    def _run(target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True, name="recover-launch-store")
        thread.start()
        return thread

    def _tell_failure(self, reason: str, code: int, without: Sequence[int] = ()) -> None:
        """Make all nodes end the launch with ``code``; may be called in any thread."""
        if self._spec.nnodes > 1:
            self._telling.append(self._run(partial(self._deliver_failure, reason, code, without)))

    def _serve(self, listener: socket.socket) -> None:
        spec = self._spec
        try:
            self._store = store = serve_store(spec.master_addr, listener)
            if spec.nnodes > 1:
                self._host = Host(spec, store, self._seal, self, self._tell, self._tell_failure)
                self._host.run()
        except (RuntimeError, ImportError, OSError) as error:
            self._tell(self.store_failed, f"the store cannot be served: {one_line(error)}")

    def _deliver(self, words: dict[str, Any]) -> None:
        # Use a separate connection, because ``Guest.run`` blocks its own connection in a wait.
        try:
            self._guest.say(join_store(self._spec.master_addr, self._spec.master_port), words)
        except RuntimeError as error:
            self._tell(self.store_lost, one_line(error))
        self._tell(self.delivered)

    def _deliver_failure(self, reason: str, code: int, without: Sequence[int]) -> None:
        if self._spec.node_rank > 0:
            self._deliver({"failure": [reason, code]})
        elif self._host is not None:
            try:
                store = join_store(self._spec.master_addr, self._spec.master_port)
                self._host.announce_end(store, reason, code, without, self._gone)
            except RuntimeError as error:
                self._tell(self.note, f"the other nodes could not be notified: {one_line(error)}")
