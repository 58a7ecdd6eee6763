"""Operations of some workers across replicas, outside of decisions: each done once, whichever workers die.

Only the members of a group take part in its operations, and each group counts its operations.  So an interrupted
operation must not need a meeting of all workers: a worker of another pipeline stage may be waiting for this worker
inside their replica, and would never come to the meeting.

    UNDER WAY(epoch) --the operation, then a barrier of the group--> OVER
        |
        '--revoked; rendezvous n is open, no member has joined it-----> ASKED(n) --it is over for a member---> OVER
                                                                         ^  |
                                     a death opens rendezvous n + 1      |  '--over for none-------> UNDER WAY(n)
                                                                         '-----------------------------'

If a member is past the barrier, all members have reached the barrier, and so have the result: then a member that was
interrupted in the barrier uses its own result.  If the operation is over for no member, the present members repeat it,
each on its original input.  (It may have been over for a member that has died since; no worker needs to know.)  The
lowest live member is the leader: it asks all other members, and publishes the answer on its peer store
(``Announcements``).

If two live members cannot reach each other's peer stores, the unreachable member counts as one that has left, and a
member that cannot reach its leader leaves: its replica loses its place, and is not formed again over that connection
(`edges`).

Meanwhile the open rendezvous waits for this worker, which joins it only when the operation is over.  This causes no
cycle of waits: the operation waits only for what its members would wait for without any death.
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
"""Function that carries out an operation on a backend whose members have these slots, and keeps the result."""

ALLOW_SECONDS = 600.0
"""Seconds beyond the hang timeout that a worker may wait in an interrupted operation, while others wait for it at a
rendezvous.  A worker that hangs, and for which it waits, has no such allowance, so it is evicted first."""
LOOK_SECONDS = 0.005
"""Seconds between two checks for answers of peer stores."""

UNREACHED_SECONDS = 5.0
RETRY_SECONDS = 0.25
"""Seconds between two attempts to reach a live member, which counts as unreachable after ``UNREACHED_SECONDS``."""

GO, UNREACHED = "go", "unreached"


@dataclass(eq=False)
class Exchange:
    """Carries out one worker's operations outside of decisions; the main thread calls ``run``."""

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
        """Carry out an operation once, with all ``members`` (slots, in rank order), or with those that remain.

        ``label`` and ``workers`` (the slots of the launch) identify the group.  ``perform`` may be called more than
        once; its last call that returns gives the result.  Raises ``Orphaned``, ``Fenced``, ``CoordinatorLost``.
        """
        group = name_of(label, workers)
        operation = self._next(group)
        performed = _Performed(perform)
        with self._progress.waiting(f"{label} operation"):
            try:
                self._together(self._assignment.epoch_groups, group, members, performed)
            except EpochRevoked:
                self._orphan.stay()
                self._settle(group, operation, members, performed)
        self._announcements.over(group, operation)

    # ---- one operation

    def _next(self, group: str) -> str:
        """Return the operation's name, equal at all members: the number of the last decision begun, and the number of
        this group's operations since then."""
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

    def _settle(self, group: str, operation: str, members: Sequence[Slot], performed: _Performed) -> None:
        """Find out, after the epoch ended in the middle of the operation, whether it is over; repeat it until it is."""
        assignment, orphan = self._assignment, self._orphan
        self._planner.ask()  # does nothing if the end is known
        tried = assignment.epoch_groups.number
        while True:
            rendezvous, workers = self._await_rendezvous(tried)
            tried = rendezvous
            orphan.stay()  # this worker's replica may be the broken one
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
                        "the others continue without this worker, which some of them could not reach", unreachable=True
                    )
                try:
                    self._together(self._repeating(rendezvous), f"repeated {group}", present, performed)
                    return
                except EpochRevoked:
                    orphan.stay()

    def _await_rendezvous(self, after: int) -> tuple[int, frozenset[int]]:
        """Wait for a rendezvous after ``after``; return it and its workers; raises as ``run`` does."""
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
        """Return ``OVER``; or ``GO`` and the slots that repeat the operation; or "": a later rendezvous must decide."""
        me = self._assignment.slot
        name = key(rendezvous, group, operation)
        self._announcements.here(rendezvous, group, operation)
        for leader in members[: members.index(me)]:
            answer = self._ask(peer_stores, leader, f"{name}/found", rendezvous)
            if answer == UNREACHED:
                worker = self._assignment.standing[leader]
                self._edges.suspect([worker])
                raise PeerLost(f"worker {worker} is alive but unreachable in an operation of {group}", unreachable=True)
            if answer != "left":
                return answer
        others = [slot for slot in members if slot > me]
        for slot in others:
            peer_stores.ask(slot, name)  # requests to all, before any answer
        answers = {slot: self._ask(peer_stores, slot, name, rendezvous) for slot in others}
        if "" in answers.values():
            return ""
        present = [me, *(slot for slot in others if answers[slot] == HERE)]
        found = OVER if OVER in answers.values() else f"{GO} {' '.join(map(str, present))}"
        self._announcements.answer(rendezvous, group, operation, found)
        return found

    def _ask(self, peer_stores: _PeerStores, slot: Slot, name: str, rendezvous: int) -> str:
        """Return the answer of a member's peer store: the value of ``name``, or "left" if the member has no place.

        An empty string: the member is lost, or the rendezvous is closed.  ``UNREACHED``: the member lives, but its peer
        store was not reached for ``UNREACHED_SECONDS``.
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
                    return ""  # the member is lost: the next rendezvous will show that
                if time.monotonic() > until:
                    return UNREACHED
                peer_stores.disconnect(slot)
                pause = RETRY_SECONDS
            self._orphan.stay()
            if not self._announcements.wait(rendezvous, pause):
                return ""

    def _repeating(self, rendezvous: int) -> EpochGroups:
        """Return the groups in which operations are repeated while ``rendezvous`` is open."""
        if (known := self._announcements.repeating(rendezvous)) is not None:
            return known
        self._announcements.settled()
        assignment = self._assignment
        peer_stores = assignment.decision.peer_stores_by_slot(assignment.grid)
        repeats = EpochGroups(rendezvous, assignment.slot, self._comm_config, peer_stores)
        still_open = self._announcements.repeat(repeats)
        if not still_open or self._orphan.orphaned:
            repeats.end("the rendezvous is no longer open")
        return repeats


@dataclass(eq=False)
class _Performed:
    """An operation, which remembers whether it has produced a result."""

    _perform: Perform
    _done: bool = False

    def __call__(self, backend: TreeBackend, members: Sequence[Slot]) -> None:
        self._perform(backend, members)
        self._done = True

    def check(self, group: str) -> None:
        """Raise Disagreement unless this worker has the result: if the operation is over, all members must have it."""
        if not self._done:
            raise Disagreement(f"an operation of {group} is over for others, but this worker did not take part in it")


@dataclass(eq=False)
class _PeerStores:
    """Peer stores of the members of an epoch, by slot."""

    _addresses: dict[Slot, str]
    _secret: bytes
    _clients: dict[Slot, PeerStoreClient] = field(default_factory=dict, init=False)

    def look(self, slot: Slot, key: str) -> str | None:
        """Request the value of ``key``; return it if it has arrived, else None.  Raises ``PeerLost``."""
        if slot not in self._clients:
            self._clients[slot] = PeerStoreClient(self._addresses[slot], self._secret)
        client = self._clients[slot]
        return client.get(key).decode() if client.check([key]) else None

    def ask(self, slot: Slot, key: str) -> None:
        """Request the value of ``key``, without waiting for it."""
        with suppress(PeerLost):  # raised by ``look``
            self.look(slot, key)

    def disconnect(self, slot: Slot) -> None:
        """Close the connection; the next ``look`` opens another."""
        if client := self._clients.pop(slot, None):
            client.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
