"""Launcher of node 0: admits the other nodes, notices lost nodes, and ends the launch.

See peers.py for the keys of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from recover_megatron.launch.command_line.forecast import LOSSES, of_launch
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.messages import SHARE_A_SECRET, continues_without, spared
from recover_megatron.launch.nodes import leasing
from recover_megatron.launch.nodes.addresses import Address, Candidates, OwnPlace, address_from
from recover_megatron.launch.nodes.leasing import AUTO, OFF, LeaseTrial, lease_path
from recover_megatron.launch.nodes.store import (
    BEAT_SECONDS,
    PREFIX,
    NodeEvents,
    Seal,
    Store,
    Unproved,
    one_line,
    timed_out,
)
from recover_megatron.launch.workers.processes import START_AGAIN
from recover_megatron.launch.workers.states import LAUNCH_FAILED, LEFT_OUT, REFUSED, ExitOutcome
from recover_megatron.membership.records import EXIT_NO_REPLICA
from recover_megatron.script_flags import codes

LOST_SECONDS = 20.0
WAITING_SECONDS = 10.0
"""Seconds after which a launcher logs that it waits for other launchers."""
SEEN_SECONDS = 3.0
"""Longest time, in seconds, that node 0 waits, when it ends the launch, until all nodes have read ``end``."""


@dataclass
class _Member:
    nonce: str
    count: int
    seen: float
    lost: bool = False


@dataclass(eq=False)
class Host:
    """Store protocol on node 0; call ``run`` in a separate thread."""

    _spec: LaunchSpec
    _store: Store
    _seal: Seal
    _events: NodeEvents
    _tell: Callable[..., None]
    _fail: Callable[[str, int, Sequence[int]], None]
    """Callback that calls ``announce_end`` in another thread."""

    def __post_init__(self) -> None:
        self._values: dict[str, str] = {}
        self._members: dict[int, _Member] = {}
        """Rank -> state, for each node that has joined the launch and has not reported the ends of its workers."""
        self._candidates: dict[int, Address] = {}
        """Rank -> address of the node's candidate, for each node that has reported it."""
        self._trial: LeaseTrial | None = None
        self._looks: dict[int, Any] = {}
        """Rank -> report about the lease, for each node other than 0 that hosts a candidate."""
        self._places: dict[int, Any] = {}
        """Rank -> report about the witness, for each node."""
        self._domains: dict[int, tuple[str, ...]] = {}
        """Rank -> failure domains that the node has reported."""
        self._given = (False, False)
        """Two flags: whether the candidates have a lease, and whether they have a witness."""
        self._announced = False
        """True if the candidates have been announced."""
        self._missing = set(range(1, self._spec.nnodes)) - {*self._spec.without}
        self._ignored: set[tuple[int, str]] = set()
        self._deadline = time.monotonic() + self._spec.rendezvous_timeout

    def run(self) -> None:
        """Exchange messages until every node has reported the ends of its workers, or the launch cannot be completed.

        A lost node that writes again counts as live again.
        """
        spec = self._spec
        if spec.control_plane:
            self._trial = LeaseTrial(spec)  # writes the file before other nodes look for it
            self._places[0] = leasing.look_for_witness(spec)
            self._domains[0] = spec.own_domains
        self._open({"flags": codes(spec.flags)})
        swept = time.monotonic()
        while self._missing or self._members:
            ranks = self._rung()
            if sweep := time.monotonic() - swept >= BEAT_SECONDS:
                for key, value in self._values.items():
                    self._store.set(PREFIX + key, value)  # any host may have overwritten the value
                ranks = [*self._missing, *self._members]
            for rank in ranks:
                if (message := self._message_of(rank)) is not None and not self._heard(rank, message):
                    return
            # First read all messages: otherwise live nodes would count as lost after this process was stopped or busy.
            if sweep:
                swept = time.monotonic()
                if not self._check_members():
                    return

    def refuse(self, reason: str, seconds: float) -> None:
        """Notify launchers that connect within ``seconds`` that node 0 refused its command line; replaces ``run``."""
        self._open({"refused": reason})
        until = time.monotonic() + seconds
        while self._missing and time.monotonic() < until:
            self._missing.difference_update(self._rung())

    def _open(self, more: dict[str, Any]) -> None:
        """Write the description of the launch to the key ``job``; ``more``: additional fields."""
        spec = self._spec
        job = {
            "nnodes": spec.nnodes,
            "nproc_per_node": spec.nproc_per_node,
            "control_plane": spec.control_plane,
            "candidates": self._spec.candidate_nodes,
            "run_id": spec.run_id,
            "attempt": spec.attempt,
            "without": spec.without,
        }
        self._put("job", {**job, **more}, run_id="")
        self._store.set_timeout(timedelta(seconds=BEAT_SECONDS))

    def announce_end(
        self, store: Store, reason: str, code: int, without: Sequence[int] = (), gone: Collection[int] = ()
    ) -> None:
        """Write the key ``end`` through the connection ``store``: all other nodes then stop with ``code``.

        Wait up to SEEN_SECONDS until all live nodes have read the key.

        ``without``: nodes that the next start leaves out; ``gone``: nodes that are lost.
        """
        value = {"reason": f"node 0 ended the launch: {reason}", "code": code, "without": list(without)}
        # A launcher that waits for the coordinators gets an empty value and reads ``end`` next.
        for key, content in {"end": value, "coordinators": {}}.items():
            if key not in self._values:
                self._values[key] = self._seal.wrap(key, self._spec.run_id, content)
                store.set(PREFIX + key, self._values[key])
        seen = [f"{PREFIX}end/seen/{rank}" for rank, m in list(self._members.items()) if not (m.lost or rank in gone)]
        try:
            store.wait(seen, timedelta(seconds=SEEN_SECONDS))
        except RuntimeError as error:
            if not timed_out(error):
                raise

    # -- reading ------------------------------------------------------------------------------------------------------

    def _rung(self) -> list[int]:
        """Wait up to BEAT_SECONDS for a rank in the queue ``bell``; return a list that contains it.

        The list is empty if no rank came, or a rank that is not in ``_missing`` or ``_members``.  The rank is not
        authenticated.
        """
        try:
            rank = int(self._store.queue_pop(PREFIX + "bell"))
        except RuntimeError as error:
            if not timed_out(error):
                raise
            return []
        except ValueError:
            return []
        return [rank] if rank in self._missing or rank in self._members else []

    def _message_of(self, rank: int) -> dict[str, Any] | None:
        """Return the message of node ``rank`` if it is new and trusted, else None."""
        key = f"node/{rank}"
        if not self._store.check([PREFIX + key]):
            return None
        try:
            message: dict[str, Any] = self._seal.open(key, self._spec.run_id, self._store.get(PREFIX + key))
            member = self._members.get(rank)
            if member is not None and message["nonce"] != member.nonce:
                self._note(rank, "another", f"a second launcher, on host {message['host']}, claims to be node {rank}")
                return None
            if member is not None and message["count"] <= member.count:
                return None
            return message
        except Unproved as error:
            why = f"{error}; if your launcher wrote it, {SHARE_A_SECRET}"
            self._note(rank, "proof", f"a message for node {rank} is ignored: {why}")
        except (ValueError, TypeError, KeyError) as error:
            self._note(rank, "form", f"a message for node {rank} is ignored: {one_line(error)}")
        return None

    def _note(self, rank: int, kind: str, text: str) -> None:
        if (rank, kind) not in self._ignored:
            self._ignored.add((rank, kind))
            self._tell(self._events.note, text)

    def _heard(self, rank: int, message: dict[str, Any]) -> bool:
        """Process a new message of node ``rank``; return False if the launch cannot be completed."""
        try:
            if rank in self._missing:
                return self._newcomer(rank, message)
            member = self._members[rank]
            member.count, member.seen = int(message["count"]), time.monotonic()
            if member.lost:
                member.lost = False
                self._tell(self._events.node_back, rank)
            if failure := message.get("failure"):
                reason, code = failure
                return self._end(f"node {rank}: {reason}", int(code))
            if "report" in message:
                outcomes = [_outcome(*fields) for fields in message["report"]]
                del self._members[rank]
                self._tell(self._events.report, rank, outcomes)
        except (ValueError, TypeError, KeyError) as error:
            self._note(rank, "form", f"a message for node {rank} is ignored: {one_line(error)}")
        return True

    def _newcomer(self, rank: int, message: dict[str, Any]) -> bool:
        spec = self._spec
        if (coordinators := message.get("run_continues")) is not None and self._seal.proves:
            why = f"node {rank} on host {message['host']} has workers in the run of an earlier launcher of node 0"
            return self._end(continues_without(spec, why, str(coordinators)), LEFT_OUT)
        if reason := message.get("refusal"):
            text = f"the launcher of node {rank} on host {message['host']} was refused: {reason}"
            return self._end(text + "; the launch cannot be complete", LAUNCH_FAILED)
        if spec.control_plane and rank in self._spec.candidate_nodes:
            self._candidates[rank] = address_from(message["coordinator"])
            self._looks[rank] = message.get("lease")
        self._places[rank] = message.get("witness")
        self._domains[rank] = tuple(str(name)[:100] for name in message.get("domains") or ())
        self._members[rank] = _Member(str(message["nonce"]), int(message["count"]), time.monotonic())
        self._missing.remove(rank)
        if (door := message.get("door")) is not None:
            self._tell(self._events.welcomed, rank, address_from(door))
        self._put(f"welcome/{rank}", {"nonce": message["nonce"]})
        # A witness must know all nodes: if there may be one, wait for all nodes, else only for nodes with candidates.
        awaited = (
            self._missing if self._places.get(0, {}).get("kind") else {*self._spec.candidate_nodes} & self._missing
        )
        if spec.control_plane and not awaited and not self._announced and not self._announce_candidates():
            return False
        if not self._missing:
            self._put("everybody", True)
            self._tell(self._events.note, f"all {spec.nnodes - len(spec.without)} nodes take part")
            for line in self._losses():
                self._tell(self._events.note, line)
        return True

    def _losses(self) -> list[str]:
        named = [self._domains.get(rank, ()) for rank in range(self._spec.nnodes)]
        found = None if self._spec.attempt else of_launch(self._spec, named, *self._given)
        return [f"{LOSSES}:", *(f"  {line}" for line in found.table())] if found else []

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _announce_candidates(self) -> bool:
        """Announce the candidates, the lease and the witness; return False if that fails and the launch ends."""
        try:
            own = OwnPlace(
                self._spec.node_address, next(iter(self._candidates.values())), 0 in self._spec.candidate_nodes
            )
        except OSError as error:
            return self._end(f"no coordinator can listen on node 0: {one_line(error)}", LAUNCH_FAILED)
        if own.address is not None:
            self._candidates[0] = own.address
        addresses = [self._candidates[rank] for rank in self._spec.candidate_nodes]
        assert self._trial is not None
        why_not = self._trial.end(self._looks)
        if why_not and self._spec.lease not in (AUTO, OFF):
            return self._end(f"--lease {self._spec.lease} cannot be used: {why_not}", REFUSED)
        if self._spec.lease != OFF:
            self._tell(self._events.note, self._trial.in_words(why_not))
        lease = None if why_not else lease_path(self._spec, self._spec.run_id)
        witness, line = leasing.agree_on_witness(self._spec, self._places, lease is not None)
        if witness is None and self._spec.witness not in (AUTO, OFF):
            return self._end(f"--witness {self._spec.witness} cannot be used: {line}", REFUSED)
        if line:
            self._tell(self._events.note, line)
        self._given = lease is not None, witness is not None
        shared = witness.to_json() if witness else None
        self._put("coordinators", {"addresses": addresses, "lease": lease is not None, "witness": shared})
        self._announced = True
        self._tell(self._events.coordinators, Candidates(own.host, addresses, own.listener, lease, witness))
        return True

    def _check_members(self) -> bool:
        now = time.monotonic()
        for rank, member in self._members.items():
            if not member.lost and now - member.seen > LOST_SECONDS:
                member.lost = True
                self._tell(self._events.node_lost, rank)
        nodes = ", ".join(str(rank) for rank in sorted(self._missing))
        patience = self._spec.rendezvous_timeout
        if self._missing and now > self._deadline - patience + WAITING_SECONDS:
            self._note(0, "waiting", f"waiting for node {nodes}, at most {patience:g} s (--rendezvous-timeout)")
        if self._missing and now > self._deadline:
            without = (*self._spec.without, *sorted(self._missing))
            if self._spec.attempt and self._spec.attempt + 1 < self._spec.starts and self._spec.spared(without):
                # The missing node was lost while the other nodes started again because of an earlier loss.
                again = f"the launch starts again{spared(self._spec, without)}"
                return self._end(f"node {nodes} has not joined this start: {again}", START_AGAIN, without)
            return self._end(
                f"node {nodes} of {self._spec.nnodes} did not appear within {self._spec.rendezvous_timeout:g} s "
                "(--rendezvous-timeout): start recover-run on every node, with the same --master-addr and "
                "--master-port",
                EXIT_NO_REPLICA if self._spec.attempt else LAUNCH_FAILED,
            )
        return True

    def _end(self, reason: str, code: int, without: tuple[int, ...] = ()) -> bool:
        """End the launch; return False.  ``without``: nodes that the next start leaves out; if empty, this start's."""
        self._tell(self._events.failed, reason, code, without or self._spec.without)
        self._fail(reason, code, without or self._spec.without)
        return False

    def _put(self, key: str, value: Any, run_id: str | None = None) -> None:
        self._values[key] = self._seal.wrap(key, self._spec.run_id if run_id is None else run_id, value)
        self._store.set(PREFIX + key, self._values[key])


def _outcome(worker_id: int, exit_code: int | None, signal_number: int | None, ended: float) -> ExitOutcome:
    return ExitOutcome(
        int(worker_id),
        None if exit_code is None else int(exit_code),
        None if signal_number is None else int(signal_number),
        float(ended),
    )
