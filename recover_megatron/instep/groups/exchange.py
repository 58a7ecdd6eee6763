"""Operations over replicas, outside of decisions: each is carried out once, whichever workers die.

Only the members of a group take part in the group's operations.  If an operation is interrupted, its members must
finish it without a meeting of all workers: a worker of another pipeline stage may be waiting for this worker inside
their replica, and would never come to the meeting.

    UNDER WAY(epoch) --the operation, then a barrier of the group--> OVER
        |
        '--revoked; rendezvous n is open, no member has joined it-----> ASKED(n) --over for some member------> OVER
                                                                         ^  |
                                     a death opens rendezvous n + 1      |  '--over for no member--> UNDER WAY(n)
                                                                         '-----------------------------'

If some member is past the barrier, all members have reached the barrier, and have the result.  A member that was
interrupted in the barrier then uses its own result.  If the operation is over for no live member, the live members
repeat it, each on its original input.  (It may have been over for a member that has died since; no worker needs to
know.)  The lowest live member is the leader: it asks all other members whether the operation is over for them, and
publishes the answer on its peer store (``Announcements``).

If the leader cannot reach the peer store of a live member, the operation continues without this member.  A member that
cannot reach the leader leaves, so its replica loses its place.  While the two workers cannot connect, no plan gives
places to both (`edges`).

Meanwhile the rendezvous stays open, since this worker joins it only when the operation is over.  This causes no cycle
of waits: the operation waits only for workers for which its members would wait even if no worker had died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.collectives.tree import TreeBackend
from recover_megatron.errors import Disagreement
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig, EpochGroups, name_of
from recover_megatron.instep.hooks import HERE, OVER, Announcements, Hooks, ProgressReports, key, left_key
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.edges import Edges
from recover_megatron.instep.meeting.orphan import Orphan
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.workload.grid import Slot

Perform = Callable[[TreeBackend, Sequence[Slot]], None]
"""Function that carries out an operation, and keeps the result.  Arguments: a backend, and the slots of its members."""

ALLOW_SECONDS = 600.0
"""Seconds, in addition to the hang timeout, for which a worker may wait in an interrupted operation.  A worker that
hangs has no such allowance, so it is evicted before the workers that wait for it."""
LOOK_SECONDS = 0.005
"""Seconds between two checks whether a peer store has answered."""

UNREACHED_SECONDS = 5.0
RETRY_SECONDS = 0.25
"""Seconds between two attempts to connect to a live member.  If all attempts fail for ``UNREACHED_SECONDS``, the member
counts as unreachable."""

GO, UNREACHED = "go", "unreached"


@dataclass(eq=False)
class Exchange:
    """Carries out one worker's operations over replicas outside of decisions; the main thread calls ``run``."""

    _hooks: Hooks
    _comm_config: CommunicationConfig
    _progress: ProgressReports
    _assignment: Assignment
    _planner: Planner
    _edges: Edges
    _orphan: Orphan
    _announcements: Announcements
    _at: int = field(default=-1, init=False)
    _counts: dict[str, int] = field(default_factory=dict, init=False)

    def run(self, label: str, workers: Sequence[Slot], members: Sequence[Slot], perform: Perform) -> None:
        """Carry out an operation once, with all ``members`` (slots, in rank order) or, after an interruption, with
        those that remain.

        ``label`` and ``workers`` (the slots of the launch) identify the group.  ``perform`` may be called more than
        once; the result is that of the last call that returned.  Raises ``Orphaned``, ``Fenced``, ``CoordinatorLost``,
        ``PeerLost`` if this worker and the leader cannot connect, and Disagreement if the operation is over, but this
        worker has no result.
        """
        group = name_of(label, workers)
        operation = self._next(group)
        performed = _Performed(perform)
        with self._progress.waiting(f"{label} operation"):
            try:
                self._together(self._assignment.epoch_groups, group, members, performed)
            except EpochRevoked:
                self._orphan.stay()
                self._resolve(group, operation, members, performed)
        self._announcements.over(group, operation)

    # ---- one operation

    def _next(self, group: str) -> str:
        """Return the next operation's name, equal on all members: "D.N" for the N-th operation of ``group`` since
        decision D has begun."""
        if self._at != self._progress.at:
            self._at = self._progress.at
            self._counts.clear()
        self._counts[group] = self._counts.get(group, 0) + 1
        return f"{self._at}.{self._counts[group]}"

    def _together(self, epoch_groups: EpochGroups, group: str, members: Sequence[Slot], performed: _Performed) -> None:
        with epoch_groups.lost_ends_it():
            epoch_groups.check()
            backend = epoch_groups.control(group, members)
            performed(backend, members)
            backend.call(lambda on: on.barrier(dist.BarrierOptions()))

    def _resolve(self, group: str, operation: str, members: Sequence[Slot], performed: _Performed) -> None:
        """Finish an operation that the end of the epoch has interrupted: repeat it unless it is over for some
        member."""
        assignment, orphan = self._assignment, self._orphan
        self._planner.ask()  # no effect if the epoch has ended
        tried = assignment.epoch_groups.number
        while True:
            rendezvous, workers = self._await_rendezvous(tried)
            tried = rendezvous
            orphan.stay()  # raises if this worker's replica is broken
            self._progress.mark(self._progress.phase, waiting=True, allow=ALLOW_SECONDS)
            here = [slot for slot in members if self._counted(slot, workers)]
            addresses = assignment.decision.peer_stores_by_slot(assignment.grid)
            with closing(_PeerStores(addresses, self._comm_config.secret)) as peer_stores:
                found = self._agreed(peer_stores, rendezvous, group, operation, here)
            if found == OVER:
                performed.check(group)
                return
            if found:
                self._hooks.log("again", what=self._progress.phase)
                present = [Slot(int(slot)) for slot in found.split()[1:]]
                if assignment.slot not in present:
                    raise PeerLost(
                        "other workers continue without this worker, since some could not reach it", unreachable=True
                    )
                try:
                    self._together(self._repeating(rendezvous), f"repeated {group}", present, performed)
                    return
                except EpochRevoked:
                    orphan.stay()

    def _await_rendezvous(self, after: int) -> tuple[int, frozenset[int]]:
        """Wait for a rendezvous newer than ``after``; return its number and its workers.  Raises as ``run`` does."""
        while True:
            self._orphan.stay()
            if (opened := self._announcements.await_rendezvous(after, 1.0)) is not None:
                return opened

    def _counted(self, slot: Slot, workers: frozenset[int]) -> bool:
        """Return whether no worker of the replica of ``slot`` is lost."""
        replica, _ = self._assignment.grid.place(slot)
        return workers.issuperset(self._assignment.decision.grid[replica])

    def _agreed(
        self, peer_stores: _PeerStores, rendezvous: int, group: str, operation: str, members: Sequence[Slot]
    ) -> str:
        """Return the members' agreement: ``OVER``, or ``GO`` and the slots that repeat the operation.

        If a member died or the rendezvous was closed, returns an empty string: a later rendezvous must decide.
        """
        me = self._assignment.slot
        name = key(rendezvous, group, operation)
        self._announcements.here(rendezvous, group, operation)
        for leader in members[: members.index(me)]:
            answer = self._ask(peer_stores, leader, f"{name}/found", rendezvous)
            if answer == UNREACHED:
                worker = self._assignment.occupants[leader]
                self._edges.suspect([worker])
                raise PeerLost(f"worker {worker} is alive but unreachable in an operation of {group}", unreachable=True)
            if answer != "left":
                return answer
        others = [slot for slot in members if slot > me]
        for slot in others:
            peer_stores.ask(slot, name)  # send all requests before waiting for an answer
        answers = {slot: self._ask(peer_stores, slot, name, rendezvous) for slot in others}
        if "" in answers.values():
            return ""
        present = [me, *(slot for slot in others if answers[slot] == HERE)]
        found = OVER if OVER in answers.values() else f"{GO} {' '.join(map(str, present))}"
        self._announcements.answer(rendezvous, group, operation, found)
        return found

    def _ask(self, peer_stores: _PeerStores, slot: Slot, name: str, rendezvous: int) -> str:
        """Return the value of key ``name`` on the peer store of the member at ``slot``.

        Returns "left" if the member has no place any more, an empty string if the member is lost or the rendezvous is
        closed, and ``UNREACHED`` if the peer store of a live member cannot be reached for ``UNREACHED_SECONDS``.
        """
        until, pause = time.monotonic() + UNREACHED_SECONDS, LOOK_SECONDS
        left = left_key(self._assignment.decision.epoch)
        while True:
            try:
                for wanted in (name, left):
                    if (value := peer_stores.look(slot, wanted)) is not None:
                        return value
            except PeerLost as lost:
                if not lost.unreachable:
                    return ""  # the member is lost, and the next rendezvous will be without it
                if time.monotonic() > until:
                    return UNREACHED
                peer_stores.disconnect(slot)
                pause = RETRY_SECONDS
            self._orphan.stay()
            if not self._announcements.wait(rendezvous, pause):
                return ""

    def _repeating(self, rendezvous: int) -> EpochGroups:
        """Return the groups in which operations are repeated while ``rendezvous`` is open; create them if necessary."""
        if (known := self._announcements.repeating(rendezvous)) is not None:
            return known
        self._announcements.close_repeats()
        assignment = self._assignment
        peer_stores = assignment.decision.peer_stores_by_slot(assignment.grid)
        repeats = EpochGroups(rendezvous, assignment.slot, self._comm_config, peer_stores)
        still_open = self._announcements.repeat(repeats)
        if not still_open or self._orphan.orphaned:
            repeats.end("the rendezvous is no longer open")
        return repeats


@dataclass(eq=False)
class _Performed:
    """Wrapper of an operation that records whether the operation has produced a result."""

    _perform: Perform
    _done: bool = False

    def __call__(self, backend: TreeBackend, members: Sequence[Slot]) -> None:
        self._perform(backend, members)
        self._done = True

    def check(self, group: str) -> None:
        """Raise Disagreement unless this worker has the result, as all members must when the operation is over."""
        if not self._done:
            raise Disagreement(f"other workers finished an operation of {group} in which this worker took no part")


@dataclass(eq=False)
class _PeerStores:
    """Connections to the peer stores of the members of an epoch, by slot."""

    _addresses: dict[Slot, str]
    _secret: bytes
    _clients: dict[Slot, PeerStoreClient] = field(default_factory=dict, init=False)

    def look(self, slot: Slot, key: str) -> str | None:
        """Request the value of ``key`` from the peer store at ``slot``; None: no answer yet.  Raises ``PeerLost``."""
        if slot not in self._clients:
            self._clients[slot] = PeerStoreClient(self._addresses[slot], self._secret)
        client = self._clients[slot]
        return client.get(key).decode() if client.check([key]) else None

    def ask(self, slot: Slot, key: str) -> None:
        """Request the value of ``key``, without waiting for it."""
        with suppress(PeerLost):  # a later ``look`` raises it again
            self.look(slot, key)

    def disconnect(self, slot: Slot) -> None:
        """Close the connection to the peer store at ``slot``; the next ``look`` opens another."""
        if client := self._clients.pop(slot, None):
            client.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
