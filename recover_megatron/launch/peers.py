"""This launcher among those of the other nodes: whether it takes part, and whom it waits for at the end.

Runs in the main thread; nodes.py does the talking in threads of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from recover_megatron.launch.candidates import Candidates
from recover_megatron.launch.exit_codes import LAUNCH_FAILED, REFUSED, ExitOutcome
from recover_megatron.launch.host import LOST_SECONDS
from recover_megatron.launch.loop import EventLoop, Timer
from recover_megatron.launch.nodes import NodeThreads
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.start_up import StartUp
from recover_megatron.membership.auth import Secret
from recover_megatron.membership.errors import EXIT_NO_REPLICA
from recover_megatron.membership.records import ranges

REPORT_SECONDS = 10.0
"""How long another node tries to deliver its report to node 0."""
FAILURE_SECONDS = 5.0
"""How long a launcher that ends the launch for all tries to tell the others."""


class PeerEvents(Protocol):
    """What this launcher does about the others.  Called in the main thread."""

    def start_workers_if_ready(self) -> None:
        """This node takes part: ``Peers.joined`` and ``Peers.run_id`` are set."""

    def start_control_plane(self, candidates: Candidates) -> None:
        """All candidate coordinators are known (several nodes with a control plane).  Never before that."""

    def stop_with_peers(self, reason: str, code: int) -> None:
        """The launch cannot go on here: the reason, and the exit code."""

    def store_failed(self, reason: str) -> None:
        """The store here is not served."""

    def peers_ended(self) -> None:
        """Nobody needs this launcher any more; called only after ``own_workers_ended`` returned True."""


class Peers:
    """Made once per launch, also for one node.  Its threads tell it what the others say (``NodeEvents``)."""

    def __init__(
        self,
        loop: EventLoop,
        plan: LaunchPlan,
        secret: Secret | None,
        listener: socket.socket | None,
        start_up: StartUp,
        say: Callable[[str], None],
        events: PeerEvents,
    ) -> None:
        """``secret``: that of the job; None where the launchers share none."""
        self._loop = loop
        self._plan = plan
        self._listener = listener
        self._start_up = start_up
        self._say = say
        self._events = events
        self.joined = plan.node_rank == 0
        self.run_id = plan.run_id
        self.outcomes: list[ExitOutcome] = []
        """Of the workers of other nodes (known to node 0 only)."""
        self._lost: set[int] = set()
        self._unreported = set(range(1, plan.nnodes)) if plan.node_rank == 0 else set()
        self._store_lost = self._silent = False
        self._waiting = False
        self._timer: Timer | None = None
        # Of NodeEvents: what is passed on as it comes.
        self.note, self.delivered = say, self._stop_waiting
        self.coordinators, self.failed = events.start_control_plane, events.stop_with_peers
        self.store_failed = events.store_failed
        self._threads = NodeThreads(loop, plan, secret, self)

    @property
    def any_lost(self) -> bool:
        """Whether a node's launcher was lost, and not heard of again (known to node 0 only)."""
        return bool(self._lost)

    def join(self) -> None:
        """Another node than 0: ask node 0 to take part."""
        if not self.joined:
            self._threads.join()
            self._timer = self._loop.call_later(self._plan.rendezvous_timeout, self._on_timeout)

    def serve_store(self) -> None:
        """Node 0: have the store served, once; call it only after what imports for long was started beside it."""
        if self._listener is not None:
            self._threads.serve(self._listener)
            self._listener = None

    def own_workers_ended(self, outcomes: list[ExitOutcome]) -> bool:
        """Report them.  Whether the launcher must stay until ``peers_ended`` is called."""
        if self._plan.node_rank > 0 and not self._store_lost:
            self._threads.deliver(outcomes)
            self._loop.call_later(REPORT_SECONDS, self._stop_waiting)
            self._waiting = True
        elif self._unreported:
            nodes = ranges(sorted(self._unreported))
            self._say(f"the workers of this node have ended; the store stays up until node {nodes} has ended, too")
            self._waiting = True
        return self._waiting

    def fail(self, reason: str, code: int) -> None:
        """End the launch on the other nodes; this one ends by itself."""
        if self.joined and not self._store_lost:
            self._threads.fail(reason, code)

    def settle(self) -> None:
        """Before the process ends: wait until the others have been told of ``fail``."""
        self._threads.settle(FAILURE_SECONDS)

    # --- what its threads tell (NodeEvents) ---

    def accepted(self, run_id: str) -> None:
        """Node 0 has this node take part."""
        if self._timer:
            self._timer.cancel()
        self.joined, self.run_id = True, run_id
        self._loop.call_later(LOST_SECONDS, self._watch_store)
        self._events.start_workers_if_ready()

    def all_joined(self) -> None:
        """Every node takes part."""
        self._say(f"all {self._plan.nnodes} nodes take part")

    def refused(self, reason: str) -> None:
        """Node 0 does not have this node take part."""
        self._events.stop_with_peers(f"refused by node 0: {reason}", REFUSED)

    def store_lost(self, reason: str) -> None:
        """The store of node 0 is gone, or not reached."""
        if self._store_lost:
            return
        self._store_lost = True
        self._start_up.launcher_lost(f"the launcher of node 0 ({reason})")
        if not self._waiting:
            plan = self._plan
            self._say(
                f"the store of node 0 ({plan.master_addr}:{plan.master_port}) is gone: its launcher ended or its host "
                f"is lost ({reason}); the workers here go on, but cannot use the store any more"
            )

    def store_back(self) -> None:
        """It is reached again."""
        if self._store_lost:
            self._store_lost = False
            self._say("the store of node 0 is reached again")

    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None:
        """The workers of another node have ended so."""
        self.outcomes += outcomes
        self._node_ended(node_rank)

    def node_lost(self, node_rank: int) -> None:
        """The launcher of a node is not heard of any more."""
        self._say(f"node {node_rank} is lost: its launcher has not been heard of for a while; not waiting for it")
        self._lost.add(node_rank)
        self._start_up.launcher_lost(f"the launcher of node {node_rank}")
        self._node_ended(node_rank)

    def node_back(self, node_rank: int) -> None:
        """It is heard of again."""
        self._say(f"the launcher of node {node_rank} is heard of again")
        self._lost.discard(node_rank)
        self._unreported.add(node_rank)

    # --- watching and waiting ---

    def _watch_store(self) -> None:
        """A host that lost its power answers nothing, and no operation of the store says so."""
        silence = self._threads.silence
        if silence > LOST_SECONDS and not self._store_lost:
            self._silent = True
            self.store_lost(f"no answer for {silence:.0f} s")
        elif silence < LOST_SECONDS and self._silent:
            self._silent = False
            self.store_back()
        self._loop.call_later(LOST_SECONDS / 4, self._watch_store)

    def _on_timeout(self) -> None:
        plan = self._plan
        self._events.stop_with_peers(
            f"node 0 did not answer at {plan.master_addr}:{plan.master_port} within {plan.rendezvous_timeout:g} s "
            "(--rendezvous-timeout): is its recover-run started, with the same --master-addr and --master-port?",
            EXIT_NO_REPLICA if plan.attempt else LAUNCH_FAILED,
        )

    def _node_ended(self, node_rank: int) -> None:
        self._unreported.discard(node_rank)
        if not self._unreported:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._events.peers_ended()
