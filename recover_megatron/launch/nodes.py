"""What the launchers of a launch tell each other, through the store, under ``recover/launch/``.

::

    key                      written by     meaning
    job                      node 0         {"nnodes", "nproc_per_node", "control_plane", "candidates", "run_id"}
    coordinators             node 0         the candidates' addresses, in order; empty when the launch is ended before
    node/R/claims            each node R    counter: the first to add 1 is node R, a later one is refused
    node/R/beats             each node R>0  counter: changes every BEAT_SECONDS while the launcher lives
    mail                     nodes R>0      queue read by node 0: "joined", "refused" and "report" messages
    end                      node 0         the reason for which the launch cannot be completed; all stop

A node that disagrees with ``job`` is refused before it starts a worker; if it was still missing, the launch can never
be complete, and node 0 ends it.  Each node of ``candidates`` tells in ``joined`` where its coordinator listens
(candidates.py); no worker starts before all know all of them.  A ``report`` carries the ends of all workers of a node
and is its launcher's last message; node 0 keeps the store up until it has one from every node, or the node's beats have
stopped for LOST_SECONDS.

Store operations block, so each side runs in a thread of its own and calls back through the event loop.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from recover_megatron.launch.candidates import Address, Candidates, OwnPlace, address_from, hosting
from recover_megatron.launch.exit_codes import Outcome
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.messages import SHARE_A_SECRET
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.store import Store, join_store, serve_store, timed_out

PREFIX = "recover/launch/"
BEAT_SECONDS = 2.0
LOST_SECONDS = 20.0
_LONGEST_MESSAGE = 1024 * 1024
_FOREVER = timedelta(days=365)


@dataclass
class NodeEvents:
    """What the supervisor is told, in its own thread."""

    joined: Callable[[str], None]
    """This node takes part; the argument is the run id (other nodes)."""
    coordinators: Callable[[Candidates], None]
    """All candidate coordinators are known."""
    all_joined: Callable[[], None]
    """Every node takes part (node 0)."""
    refused: Callable[[str], None]
    """This node may not take part."""
    note: Callable[[str], None]
    """Something the user should read."""
    failed: Callable[[str], None]
    """The launch cannot go on here."""
    store_lost: Callable[[str], None]
    """The store of node 0 is gone."""
    report: Callable[[int, list[Outcome]], None]
    """Node R's workers have ended so (node 0)."""
    node_lost: Callable[[int], None]
    """Node R's launcher is gone without a report (node 0)."""
    delivered: Callable[[], None]
    """Our report is in the store, or the store is gone (other nodes)."""


@dataclass
class _Member:
    host: str
    beats: int
    seen: float


class NodeThreads:
    """The threads that talk to the store, and how the supervisor uses them."""

    def __init__(self, loop: EventLoop, plan: LaunchPlan, events: NodeEvents) -> None:
        self._loop = loop
        self._plan = plan
        self._events = events
        self._store: Store | None = None  # keeps the server alive

    def serve(self, listener: socket.socket) -> None:
        """Node 0: serve the store, and follow the other nodes."""
        self._run(lambda: self._serve(listener))

    def join(self) -> None:
        """Another node: take part in the launch of node 0."""
        self._run(self._join)

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Another node: send the report."""
        self._run(lambda: self._deliver(outcomes))

    def _run(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True, name="recover-launch-store").start()

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_from_thread(lambda: callback(*arguments))

    def _serve(self, listener: socket.socket) -> None:
        plan = self._plan
        try:
            self._store = store = serve_store(plan.master_addr, listener)
            if plan.nnodes > 1:
                _Host(plan, store, self._events, self._tell).run()
        except (RuntimeError, ImportError, OSError) as error:
            self._tell(self._events.failed, f"the store cannot be served: {_one_line(error)}")

    def _join(self) -> None:
        plan = self._plan
        try:
            store = join_store(plan.master_addr, plan.master_port)
            job = _decode(store.get(PREFIX + "job"))
            reason, duplicate = _disagreement(plan, job), False
            if reason is None and store.add(f"{PREFIX}node/{plan.node_rank}/claims", 1) != 1:
                duplicate = True
                reason = (
                    f"node rank {plan.node_rank} has been taken by another launcher of this launch: give each node its "
                    "own --node-rank"
                )
            me: dict[str, Any] = {"node_rank": plan.node_rank, "host": plan.host}
            if reason is not None:
                _mail(store, {"kind": "refused", **me, "reason": reason, "duplicate": duplicate})
                self._tell(self._events.refused, reason)
                return
            own = None
            if plan.control_plane:
                own = OwnPlace(plan, (plan.master_addr, plan.master_port), plan.node_rank in job["candidates"])
            _mail(store, {"kind": "joined", **me, "coordinator": own.address if own else None})
            self._tell(self._events.joined, str(job["run_id"]))
        except (RuntimeError, ImportError, ValueError, KeyError) as error:
            self._tell(self._events.failed, f"the store of node 0 cannot be used: {_one_line(error)}")
            return
        except OSError as error:
            self._tell(self._events.failed, f"no coordinator can listen here: {_one_line(error)}")
            return
        try:
            if own:
                self._learn_candidates(own, self._await(store, "coordinators"))
        except (RuntimeError, ValueError) as error:
            reason = f"node 0 is gone before all nodes had told where their coordinators are: {_one_line(error)}"
            self._tell(self._events.failed, reason)
            return
        try:
            self._tell(self._events.failed, self._await(store, "end").decode(errors="replace"))
        except RuntimeError as error:
            self._tell(self._events.store_lost, _one_line(error))

    def _learn_candidates(self, own: OwnPlace, told: bytes) -> None:
        if told:
            addresses = [address_from(value) for value in json.loads(told)]
            self._tell(self._events.coordinators, Candidates(own.host, addresses, own.listener))

    def _await(self, store: Store, key: str) -> bytes:
        """The value of ``key`` when node 0 sets it; beats meanwhile.  Raises RuntimeError when the store is gone."""
        while True:
            try:
                store.add(f"{PREFIX}node/{self._plan.node_rank}/beats", 1)
                store.wait([PREFIX + key], timedelta(seconds=BEAT_SECONDS))
                return store.get(PREFIX + key)
            except RuntimeError as error:
                if not timed_out(error):
                    raise

    def _deliver(self, outcomes: list[Outcome]) -> None:
        # A connection of its own: the other one is blocked in wait.
        try:
            store = join_store(self._plan.master_addr, self._plan.master_port)
            _mail(store, {"kind": "report", "node_rank": self._plan.node_rank, "outcomes": outcomes})
        except RuntimeError as error:
            self._tell(self._events.store_lost, _one_line(error))
        self._tell(self._events.delivered)


class _Host:
    """Node 0's side; lives in its thread."""

    def __init__(self, plan: LaunchPlan, store: Store, events: NodeEvents, tell: Callable[..., None]) -> None:
        self._plan = plan
        self._store = store
        self._events = events
        self._tell = tell
        self._members: dict[int, _Member] = {}
        self._candidates: dict[int, Address] = {}
        """Those of other nodes, until all are known."""
        self._missing = set(range(1, plan.nnodes))
        self._deadline = time.monotonic() + plan.rendezvous_timeout

    def run(self) -> None:
        """Until every node has reported or is lost, or the launch cannot be completed."""
        plan = self._plan
        job = {
            "nnodes": plan.nnodes,
            "nproc_per_node": plan.nproc_per_node,
            "control_plane": plan.control_plane,
            "candidates": hosting(plan),
            "run_id": plan.run_id,
        }
        self._store.set(PREFIX + "job", json.dumps(job))
        self._store.set_timeout(timedelta(seconds=BEAT_SECONDS))
        checked = time.monotonic()
        while self._missing or self._members:
            try:
                if not self._handle(_decode(self._store.queue_pop(PREFIX + "mail"))):
                    return
            except RuntimeError as error:
                if not timed_out(error):
                    raise
            except (ValueError, TypeError, KeyError) as error:
                self._tell(self._events.note, f"an unreadable message in the store was ignored: {_one_line(error)}")
            if time.monotonic() - checked >= BEAT_SECONDS:
                checked = time.monotonic()
                if not self._check_members():
                    return

    def _handle(self, message: dict[str, Any]) -> bool:
        """False: the launch cannot be completed."""
        kind, rank, host = message.get("kind"), message.get("node_rank"), message.get("host")
        if kind == "joined" and rank in self._missing:
            hosts = self._plan.control_plane and rank in hosting(self._plan)
            if hosts:
                self._candidates[rank] = address_from(message.get("coordinator"))
            self._missing.remove(rank)
            self._members[rank] = _Member(str(host), -1, time.monotonic())
            if hosts and self._candidates.keys() == {*hosting(self._plan)} - {0} and not self._tell_candidates():
                return False
            if not self._missing:
                self._tell(self._events.all_joined)
        elif kind == "report" and rank in self._members:
            outcomes = [_outcome(*fields) for fields in message["outcomes"]]
            del self._members[rank]
            self._tell(self._events.report, rank, outcomes)
        elif kind == "refused":
            text = f"the launcher of node {rank} on host {host} was refused: {message.get('reason')}"
            if self._missing and rank not in self._members and not message.get("duplicate"):
                return self._end(text + "; the launch cannot be complete")
            self._tell(self._events.note, text)
        return True

    def _tell_candidates(self) -> bool:
        """False: there can be none here."""
        try:
            own = OwnPlace(self._plan, next(iter(self._candidates.values())), 0 in hosting(self._plan))
        except OSError as error:
            return self._end(f"no coordinator can listen on node 0: {_one_line(error)}")
        if own.address is not None:
            self._candidates[0] = own.address
        addresses = [self._candidates[rank] for rank in hosting(self._plan)]
        self._store.set(PREFIX + "coordinators", json.dumps(addresses))
        self._tell(self._events.coordinators, Candidates(own.host, addresses, own.listener))
        return True

    def _check_members(self) -> bool:
        now = time.monotonic()
        for rank, member in list(self._members.items()):
            beats = self._store.add(f"{PREFIX}node/{rank}/beats", 0)
            if beats != member.beats:
                member.beats, member.seen = beats, now
            elif now - member.seen > LOST_SECONDS:
                del self._members[rank]
                self._tell(self._events.node_lost, rank)
        if self._missing and now > self._deadline:
            nodes = ", ".join(str(rank) for rank in sorted(self._missing))
            return self._end(
                f"node {nodes} of {self._plan.nnodes} did not appear within {self._plan.rendezvous_timeout:g} s "
                "(--rendezvous-timeout): start recover-run on every node, with the same --master-addr and --master-port"
            )
        return True

    def _end(self, reason: str) -> bool:
        self._store.set(PREFIX + "end", f"node 0 ended the launch: {reason}")
        self._store.set(PREFIX + "coordinators", "")  # whoever waits for them looks at the end next
        self._tell(self._events.failed, reason)
        return False


def _disagreement(plan: LaunchPlan, job: dict[str, Any]) -> str | None:
    found = []
    for key, own in (("nnodes", plan.nnodes), ("nproc_per_node", plan.nproc_per_node)):
        if job.get(key) != own:
            flag = "--" + key.replace("_", "-")
            found.append(f"{flag} is {own} here (node {plan.node_rank}) but {job.get(key)} on node 0")
    if found:
        return "; ".join(found) + ": give the same on every node"
    if job.get("control_plane") != plan.control_plane:
        here, there = ("a", "none") if plan.control_plane else ("no", "one")
        return f"there is {here} secret here (node {plan.node_rank}) but {there} on node 0: {SHARE_A_SECRET}"
    return None


def _mail(store: Store, message: dict[str, Any]) -> None:
    store.queue_push(PREFIX + "mail", json.dumps(message))


def _decode(data: bytes) -> dict[str, Any]:
    if len(data) > _LONGEST_MESSAGE:
        raise ValueError(f"message of {len(data)} bytes")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("message is not an object")
    return message


def _outcome(worker_id: int, exit_code: int | None, signal_number: int | None, ended: float) -> Outcome:
    return Outcome(
        int(worker_id),
        None if exit_code is None else int(exit_code),
        None if signal_number is None else int(signal_number),
        float(ended),
    )


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
