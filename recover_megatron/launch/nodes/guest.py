"""Launcher of a node other than 0: joins the launch, reports to node 0, and stops when node 0 ends the launch.

See peers.py for the keys of the store.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.messages import SHARE_A_SECRET, continues_without
from recover_megatron.launch.nodes import leasing
from recover_megatron.launch.nodes.addresses import Candidates, OwnPlace, address_from, join_addresses, listen
from recover_megatron.launch.nodes.host import LOST_SECONDS
from recover_megatron.launch.nodes.leasing import lease_path, try_lease
from recover_megatron.launch.nodes.store import (
    BEAT_SECONDS,
    PREFIX,
    NodeEvents,
    Seal,
    Store,
    join_store,
    one_line,
    timed_out,
)
from recover_megatron.launch.workers.processes import START_AGAIN, keep_attempt
from recover_megatron.launch.workers.states import LAUNCH_FAILED, LEFT_OUT, REFUSED
from recover_megatron.membership.io.testimony import Scope
from recover_megatron.membership.records import EXIT_NO_REPLICA
from recover_megatron.script_flags import codes, differences, listed

_AGAIN_SECONDS = 0.25
UNPROVED_SECONDS = 10.0
"""Seconds to wait for an authenticated value of ``job``.  After that, an unauthenticated value is read, but only to
explain why this node is refused."""


@dataclass(eq=False)
class Guest:
    """Store protocol on a node other than 0.  Call ``run`` in a separate thread; ``say`` is thread-safe."""

    _spec: LaunchSpec
    _seal: Seal
    _events: NodeEvents
    _tell: Callable[..., None]

    def __post_init__(self) -> None:
        self._run_id = ""
        self._lock = threading.Lock()
        self._count = 0
        self._message: dict[str, Any] = {"host": self._spec.host, "nonce": secrets.token_hex(16)}
        self._ignored: set[str] = set()
        self._coordinators = ""
        self._door: socket.socket | None = None
        self.heard = time.monotonic()
        """Monotonic time of the store's last answer; until the first answer, the time of this object's creation."""
        self.reached = False
        """True after this launcher has connected to the store of node 0."""

    def run(self) -> None:
        """Join the launch; then, until node 0 ends the launch, report regularly that this launcher is live.

        If the store is lost, reconnect when it is reachable again.
        """
        try:
            store, own = self._join()
            if own is None:
                return
            self._tell(self._events.accepted, self._run_id)
        except (RuntimeError, ImportError, ValueError, KeyError, TypeError) as error:
            code = EXIT_NO_REPLICA if self._spec.attempt else LAUNCH_FAILED
            self._tell(self._events.failed, f"the store of node 0 cannot be used: {one_line(error)}", code)
            return
        except OSError as error:
            self._tell(self._events.failed, f"no coordinator can listen on this host: {one_line(error)}", LAUNCH_FAILED)
            return
        try:
            ended = self._spec.control_plane and not self._learn_candidates(store, own)
        except RuntimeError as error:
            reason = f"node 0 was lost before all nodes had reported their coordinators: {one_line(error)}"
            self._tell(self._events.failed, reason, EXIT_NO_REPLICA if self._spec.fault_tolerant else LAUNCH_FAILED)
            return
        while not ended:
            try:
                ended = self._obey(store, self._next(store, "end"))
            except RuntimeError as error:
                self._tell(self._events.store_lost, one_line(error))
                while (again := self._find_again()) is None:
                    time.sleep(BEAT_SECONDS)  # another host's port gives no event to wait for
                store = again
                self._tell(self._events.store_back)

    def say(self, store: Store, message: dict[str, Any], ring: bool = True) -> None:
        """Add the fields of ``message`` to this node's message in the store; ``ring``: True to wake node 0, too."""
        key = f"node/{self._spec.node_rank}"
        with self._lock:
            self._message |= message
            self._count += 1
            store.set(PREFIX + key, self._seal.wrap(key, self._run_id, {**self._message, "count": self._count}))
        if ring:
            store.queue_push(PREFIX + "bell", str(self._spec.node_rank))

    def refuse(self, reason: str, seconds: float) -> None:
        """Report to node 0 that this node does not join the launch; called instead of ``run``.

        Raises OSError if node 0's host is unreachable, or its store does not listen within ``seconds``.
        """
        address, until = (self._spec.master_addr, self._spec.master_port), time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(address, timeout=seconds).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_SECONDS)  # another host's port gives no event to wait for
        store = join_store(*address)
        self._run_id = str(self._job(store)["run_id"])
        self.say(store, {"refusal": reason})
        store.check([PREFIX + "job"])  # the answer proves that the refusal has arrived

    # -- joining ------------------------------------------------------------------------------------------------------

    def _join(self) -> tuple[Store, OwnPlace | None]:
        """Connect to the store of this start, and call ``_take_part``.

        Wait while only the store of an earlier start exists.  Return the store and the result of ``_take_part``.
        """
        until = time.monotonic() + self._spec.rendezvous_timeout
        while True:
            try:
                store = join_store(self._spec.master_addr, self._spec.master_port)
                self.reached = True
                if not self._spec.attempt or self._attempt_of(store) >= self._spec.attempt:
                    return store, self._take_part(store)
            except RuntimeError:
                if not self._spec.attempt or time.monotonic() > until:
                    raise
            if time.monotonic() > until:
                raise RuntimeError(f"node 0 has not started again within {self._spec.rendezvous_timeout:g} s")
            time.sleep(_AGAIN_SECONDS)  # no event announces the new store of node 0

    def _attempt_of(self, store: Store) -> int:
        job = self._look(store, "job", "")
        return int(job["attempt"]) if job is not None else -1

    def _take_part(self, store: Store) -> OwnPlace | None:
        """Join the launch; return None if this node was refused or left out.

        Node 0 answers with this launcher's nonce, which proves that ``job`` is not from an earlier run.
        """
        spec = self._spec
        job = self._job(store)
        own = OwnPlace(spec.node_address, (spec.master_addr, spec.master_port), spec.node_rank in job["candidates"])
        if spec.fault_tolerant:
            with contextlib.suppress(OSError):  # no such address here (NAT): then node 0 notices a loss later
                self._door = listen(own.host)
        while True:
            if self._elsewhere(store, job):
                return None
            if reason := _disagreement(spec, job):
                self._run_id = str(job["run_id"])
                self.say(store, {"refusal": reason})
                self._refused(reason)
                return None
            if self._run_id != job["run_id"]:
                self._run_id = str(job["run_id"])
                candidate = self._candidate(own) if spec.control_plane else {"coordinator": None}
                door = self._door.getsockname()[:2] if self._door else None
                self.say(store, {"door": door, **candidate})
            welcome = self._next(store, f"welcome/{spec.node_rank}")
            if welcome is not None and welcome["nonce"] == self._message["nonce"]:
                return own
            if welcome is not None:
                self._come_second(store)
                return None
            job = self._job(store)

    def _elsewhere(self, store: Store, job: dict[str, Any]) -> bool:
        """Return whether this launcher takes no part in this start, because of the nodes that the start leaves out.

        Either this node is left out, or this launcher has another list of nodes to leave out and must start again.
        """
        spec, without = self._spec, tuple(map(int, job.get("without", ())))
        if spec.node_rank in without:
            self._run_id = str(job["run_id"])
            reply = self._look(store, "coordinators", self._run_id)
            addresses = [address_from(value) for value in reply["addresses"]] if reply else []
            self._left_out(join_addresses(addresses))
        elif without != spec.without:
            keep_attempt(int(job["attempt"]))
            self._tell(self._events.failed, "node 0 has started the launch again", START_AGAIN, without)
        return spec.node_rank in without or without != spec.without

    def _left_out(self, coordinators: str = "") -> None:
        """Stop this launcher, because the launch started again without this node."""
        why = f"node {self._spec.node_rank} was lost at the start of the run, which started again without it"
        self._tell(self._events.failed, continues_without(self._spec, why, coordinators), LEFT_OUT)

    def _come_second(self, store: Store) -> None:
        """Stop this launcher, because node 0 has already admitted another launcher as this node.

        If the first launcher still writes messages, this launcher is refused.  If the first launcher was lost, the run
        continues without this node.  To tell the two cases apart, this launcher stops writing: the next message of a
        live first launcher then replaces the message of this launcher within BEAT_SECONDS.
        """
        spec, patience = self._spec, LOST_SECONDS + 2 * BEAT_SECONDS
        until = time.monotonic() + patience
        first = f"the first launcher of node {spec.node_rank}"
        self._tell(self._events.note, f"{first} has already joined: waiting {patience:g} s for its next message")
        while time.monotonic() < until:
            if self._obey(store, self._look(store, "end", self._run_id)):
                return
            message = self._look(store, f"node/{spec.node_rank}", self._run_id)
            if message is not None and message["nonce"] != self._message["nonce"]:
                self._refused(
                    f"node rank {spec.node_rank} has been taken by another launcher of this launch, on host "
                    f"{message['host']}: give each node a different --node-rank"
                )
                return
        reply = self._look(store, "coordinators", self._run_id) if spec.control_plane else None
        addresses = [address_from(value) for value in reply["addresses"]] if reply else []
        reason = continues_without(spec, f"{first} is lost", join_addresses(addresses))
        self._tell(self._events.failed, reason, LEFT_OUT)

    def _refused(self, reason: str) -> None:
        self._tell(self._events.failed, f"refused by node 0: {reason}", REFUSED)

    def _candidate(self, own: OwnPlace) -> dict[str, Any]:
        witness = {"witness": leasing.look_for_witness(self._spec), "domains": self._spec.own_domains}
        if own.address is None:
            return {"coordinator": None, **witness}
        return {"coordinator": own.address, "lease": try_lease(self._spec, self._run_id), **witness}

    def _job(self, store: Store) -> dict[str, Any]:
        """Return node 0's description of the launch.  Raises KeyError or TypeError if it is not valid.

        Raises ValueError if node 0 does not prove that it has the job's secret.
        """
        until = time.monotonic() + UNPROVED_SECONDS
        while True:
            job = self._look(store, "job", "")
            if job is None and time.monotonic() > until and store.check([PREFIX + "job"]):
                job = self._seal.peek(store.get(PREFIX + "job"))  # used only to explain a refusal
                if _disagreement(self._spec, job) is None:
                    raise ValueError(f"node 0 does not prove that it has the job's secret: {SHARE_A_SECRET}")
            if job is not None:
                return {"run_id": job["run_id"], "candidates": list(job["candidates"]), **job}

    def _learn_candidates(self, store: Store, own: OwnPlace) -> bool:
        """Wait for the addresses of the candidates; return False if node 0 ends the launch instead."""
        while True:
            reply = self._next(store, "coordinators")
            if reply:
                addresses = [address_from(value) for value in reply["addresses"]]
                lease = lease_path(self._spec, self._run_id) if reply["lease"] else None
                witness = Scope.from_json(reply["witness"]) if reply.get("witness") else None
                self._coordinators = join_addresses(addresses)
                self._tell(self._events.coordinators, Candidates(own.host, addresses, own.listener, lease, witness))
                return True
            if store.check([PREFIX + "end"]) and self._obey(store, self._look(store, "end", self._run_id)):
                return False

    # -- following ----------------------------------------------------------------------------------------------------

    def _obey(self, store: Store, end: Any) -> bool:
        """Stop this launcher if ``end`` is a trusted message of node 0; return whether the launch has ended."""
        if end is None:
            return False
        if not self._seal.proves and store.check([PREFIX + "everybody"]):
            self._ignore("end", "without a shared secret, it is trusted only until all nodes have joined")
            time.sleep(BEAT_SECONDS)  # the key exists, so ``wait`` would return without waiting
            return False
        without = tuple(map(int, end.get("without", ())))
        if self._spec.node_rank in without:
            self._left_out()
        else:
            self._tell(self._events.failed, str(end["reason"]), int(end["code"]), without)
        store.set(f"{PREFIX}end/seen/{self._spec.node_rank}", "1")
        return True

    def _next(self, store: Store, key: str) -> Any:
        """Report that this node is live, then wait up to BEAT_SECONDS for the key ``key`` and return its value.

        Return None if the key has no trusted value.  Raises RuntimeError if the store is lost.
        """
        self.say(store, {}, ring=False)
        store.check([PREFIX + "job"])  # ``set`` does not wait for an answer, ``check`` does
        self.heard = time.monotonic()
        return self._look(store, key, self._run_id)

    def _look(self, store: Store, key: str, run_id: str) -> Any:
        try:
            store.wait([PREFIX + key], timedelta(seconds=BEAT_SECONDS))
            return self._seal.open(key, run_id, store.get(PREFIX + key))
        except RuntimeError as error:
            if not timed_out(error):
                raise
        except ValueError as error:
            self._ignore(key, str(error))
            time.sleep(BEAT_SECONDS / 4)  # node 0 corrects the value, but the store reports no change of a key
        return None

    def _ignore(self, key: str, why: str) -> None:
        if key not in self._ignored:
            self._ignored.add(key)
            self._tell(self._events.note, f"{PREFIX}{key} in the store is ignored: {why}")

    def _find_again(self) -> Store | None:
        """Reconnect to the store of this launch; return None if it is not reachable now.

        If a new launcher of node 0 serves another store at this address, report in that store that the run continues.
        """
        try:
            store = join_store(self._spec.master_addr, self._spec.master_port, refused=False)
            job = self._look(store, "job", "")
            if job is None or job["run_id"] == self._run_id:
                return store if job is not None else None
            run_continues = self._events.run_continues()
            if run_continues and _disagreement(self._spec, job) is not None:
                return None  # another training uses the port of the lost node 0
            if int(job["attempt"]) > self._spec.attempt:
                without = tuple(map(int, job.get("without", ())))
                self._tell(self._events.failed, "node 0 starts the launch again", START_AGAIN, without)
            elif self._spec.control_plane and run_continues:
                self._report_the_run(store, str(job["run_id"]))
        except (ConnectionRefusedError, RuntimeError):
            return None
        return None

    def _report_the_run(self, store: Store, run_id: str) -> None:
        """Report in the store of a new launch, which cannot start without this node, that the earlier run continues."""
        key = f"node/{self._spec.node_rank}"
        with self._lock:
            self._count += 1
            message = {"host": self._message["host"], "nonce": self._message["nonce"], "count": self._count}
            notice = {**message, "run_continues": self._coordinators}
            store.set(PREFIX + key, self._seal.wrap(key, run_id, notice))
        store.queue_push(PREFIX + "bell", str(self._spec.node_rank))


def _disagreement(spec: LaunchSpec, job: dict[str, Any]) -> str | None:
    if job.get("refused"):
        return f"node 0 cannot start: {job['refused']}"
    found = []
    for key, own in (("nnodes", spec.nnodes), ("nproc_per_node", spec.nproc_per_node)):
        if job.get(key) != own:
            flag = "--" + key.replace("_", "-")
            found.append(f"{flag} is {own} here (node {spec.node_rank}) but {job.get(key)} on node 0")
    if found:
        return "; ".join(found) + ": use the same value on every node"
    if job.get("control_plane") != spec.control_plane:
        here, there = ("a", "none") if spec.control_plane else ("no", "one")
        return f"there is {here} secret here (node {spec.node_rank}) but {there} on node 0: {SHARE_A_SECRET}"
    if differ := differences(codes(spec.flags), dict(job.get("flags", {})), shown=False):
        return (
            f"the script's flags here (node {spec.node_rank}) differ from those of node 0: {listed(differ)}. Use the "
            "same flags on every node, or list flags that may differ with --recover-may-differ"
        )
    return None
