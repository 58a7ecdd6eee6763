"""What the launchers of a launch tell each other, through the store, under ``recover/launch/``.

::

    key                      written by     meaning
    job                      node 0         {"nnodes", "nproc_per_node", "control_plane", "candidates", "run_id"}
    node/R                   node R > 0     all that it has said so far: who it is, where its candidate listens, why it
                                            was refused, that it cannot go on, how its workers ended; and a count that
                                            grows every BEAT_SECONDS while the launcher lives
    bell                     nodes R > 0    queue: wakes node 0, which looks at node/R; nothing in it is believed
    welcome/R                node 0         {"nonce"}: of the launcher that is node R, the first that came
    coordinators             node 0         {"addresses", "lease", "witness"}: of the candidates, in order, whether
                                            they have a lease, and who may tell which nodes are off; empty when the
                                            launch is ended before
    everybody                node 0         all nodes take part
    end                      node 0         {"reason", "code"}: the launch cannot be completed; all stop with that code
    end/seen/R               node R > 0     node R has read ``end``

Every value but the bell and ``end/seen`` is sealed (seal.py).  What does not open is passed over, with one line, and
whoever wrote the true one writes it again every BEAT_SECONDS, so a stranger that writes into the store delays a launch
at most.

A node that disagrees with ``job`` is refused before it starts a worker; if it was still missing, the launch can never
be complete, and node 0 ends it.  Each node of ``candidates`` tells where its coordinator listens (candidates.py); no
worker starts before all know all of them.  Node 0 keeps the store up until it knows from every node how its workers
ended, or the node's count has stopped for LOST_SECONDS.

Store operations block, so each side (guest.py, host.py) runs in a thread of its own and calls back through the event
loop; failure reports go over a connection of their own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from recover_megatron.launch.exit_codes import ExitOutcome
from recover_megatron.launch.guest import Guest
from recover_megatron.launch.host import Host
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.node_events import NodeEvents
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.seal import Seal
from recover_megatron.launch.store import Store, join_store, one_line, serve_store
from recover_megatron.membership.auth import Secret


class NodeThreads:
    """The threads that talk to the store, and how the supervisor uses them.

    ``secret``: that of the job; None where the launchers share none.
    """

    def __init__(self, loop: EventLoop, plan: LaunchPlan, secret: Secret | None, events: NodeEvents) -> None:
        self._loop = loop
        self._plan = plan
        self._events = events
        self._seal = Seal(secret)
        self._store: Store | None = None  # keeps the server alive
        self._guest = Guest(plan, self._seal, events, self._tell)
        self._host: Host | None = None
        self._telling: list[threading.Thread] = []

    def serve(self, listener: socket.socket) -> None:
        """Node 0: serve the store, and follow the other nodes."""
        self._run(lambda: self._serve(listener))

    def join(self) -> None:
        """Another node: take part in the launch of node 0."""
        self._run(self._guest.run)

    def deliver(self, outcomes: list[ExitOutcome]) -> None:
        """Another node: tell how its workers ended."""
        self._run(lambda: self._deliver({"report": outcomes}))

    def fail(self, reason: str, code: int) -> None:
        """Have all nodes end the launch with ``code``; this node ends by itself."""
        if self._plan.nnodes > 1:
            self._telling.append(self._run(lambda: self._fail(reason, code)))

    def settle(self, seconds: float) -> None:
        """Wait until the others know of ``fail``, at most so long."""
        until = time.monotonic() + seconds
        for thread in self._telling:
            thread.join(max(0.0, until - time.monotonic()))

    @property
    def silence(self) -> float:
        """Another node: seconds since the store last answered."""
        return time.monotonic() - self._guest.heard

    @staticmethod
    def _run(target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True, name="recover-launch-store")
        thread.start()
        return thread

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_from_thread(lambda: callback(*arguments))

    def _serve(self, listener: socket.socket) -> None:
        plan = self._plan
        try:
            self._store = store = serve_store(plan.master_addr, listener)
            if plan.nnodes > 1:
                self._host = Host(plan, store, self._seal, self._events, self._tell, self.fail)
                self._host.run()
        except (RuntimeError, ImportError, OSError) as error:
            self._tell(self._events.store_failed, f"the store cannot be served: {one_line(error)}")

    def _deliver(self, words: dict[str, Any]) -> None:
        # A connection of its own: the other one is blocked in wait.
        try:
            self._guest.say(join_store(self._plan.master_addr, self._plan.master_port), words)
        except RuntimeError as error:
            self._tell(self._events.store_lost, one_line(error))
        self._tell(self._events.delivered)

    def _fail(self, reason: str, code: int) -> None:
        if self._plan.node_rank > 0:
            self._deliver({"failure": [reason, code]})
        elif self._host is not None:
            try:
                self._host.announce_end(join_store(self._plan.master_addr, self._plan.master_port), reason, code)
            except RuntimeError as error:
                self._tell(self._events.note, f"the other nodes could not be told: {one_line(error)}")
