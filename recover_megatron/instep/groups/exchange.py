"""Operations of some workers over their replicas, outside of decisions: each once, whoever dies in the middle.

Only the members of a group make an operation on it, and each group counts its own.  So an operation that is interrupted
must not need a meeting of all: a worker of another stage may wait for this one inside their replica, and would never
come.

    UNDER WAY(epoch) --the operation, then a barrier of the group--> OVER
        |
        '--revoked; rendezvous n is open, nobody of us has joined it--> ASKED(n) --it is over for one of us--> OVER
                                                                         ^  |
                                     a death opens rendezvous n + 1      |  '--all of us are here--> UNDER WAY(n)
                                                                         '-----------------------------'

A member past the barrier knows that all have come to it, and so have the result: who was interrupted in it takes
over its own.  If it is over for nobody, those who are there repeat it, on the input that each had.  (It may have been
over for one who has died since: nobody knows, and nobody needs to.)  The lowest member that lives is asked: it asks all
others and tells them the answer, by way of the peer stores (``Announcements``).

Where two members live and cannot reach each other's peer stores, the one that is asked counts as one that has left, and
the one that asks in vain leaves: its replica is out, and is not put together again over that road (`edges`).

The rendezvous that is open meanwhile waits for this worker, and this worker does not join it before its operation is
over.  No wait can become a circle by it: the operation waits for what its members would wait for without any death.
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
"""Carries the operation out on a backend of these slots, and keeps the result to itself."""

ALLOW_SECONDS = 600.0
"""How long a worker that waits in an interrupted operation may wait beyond the hang timeout, while others wait for it
at a rendezvous: if somebody hangs, it is the one that it waits for, whose mark allows nothing."""
LOOK_SECONDS = 0.005
"""How often it looks at what has come from a peer store."""

UNREACHED_SECONDS = 5.0
RETRY_SECONDS = 0.25
"""How long somebody who lives is tried, and how often."""

GO, UNREACHED = "go", "unreached"


@dataclass(eq=False)
class Exchange:
    """Of one worker, whose main thread calls ``run``."""

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
        """Have an operation carried out, once, by ``members`` (slots, in rank order) or those of them that live.

        ``label`` and ``workers`` (the slots of the launch) say which group it is.  ``perform`` may be called more than
        once; the result is that of its last call that returned.  Raises ``Orphaned``, ``Fenced``, ``CoordinatorLost``.
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
        """Its name, the same at all members: the last decision begun, and the how-manieth on this group since then."""
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
        """The epoch has ended in the middle: find out whether the operation is over, or repeat it until it is."""
        mine, orphan = self._assignment, self._orphan
        self._planner.ask()  # nothing, if the end is known
        tried = mine.epoch_groups.number
        while True:
            rendezvous, workers = self._await_rendezvous(tried)
            tried = rendezvous
            orphan.stay()  # its own replica may be the one that is broken
            self._progress.mark(self._progress.phase, waiting=True, allow=ALLOW_SECONDS)
            here = [slot for slot in members if self._counted(slot, workers)]
            addresses = mine.decision.peer_stores_by_slot(mine.grid)
            with closing(_PeerStores(addresses, self._comm_config.secret)) as peer_stores:
                found = self._agreed(peer_stores, rendezvous, group, operation, here)
            if found == OVER:
                performed.check(group)
                return
            if found:
                self._hooks.log("again", what=self._progress.phase)
                present = [Slot(int(slot)) for slot in found.split()[1:]]
                if mine.slot not in present:
                    raise PeerLost(
                        "the others go on without this worker, which some of them could not reach", road=True
                    )
                try:
                    self._together(self._repeating(rendezvous), f"repeated {group}", present, performed)
                    return
                except EpochRevoked:
                    orphan.stay()

    def _await_rendezvous(self, after: int) -> tuple[int, frozenset[int]]:
        """The rendezvous that is open, when there is one beyond ``after``; raises as ``run`` does."""
        while True:
            self._orphan.stay()
            if (opened := self._announcements.await_rendezvous(after, 1.0)) is not None:
                return opened

    def _counted(self, slot: Slot, workers: frozenset[int]) -> bool:
        """Whether nobody of the replica in which ``slot`` is has gone."""
        replica, _ = self._assignment.grid.place(slot)
        return workers.issuperset(self._assignment.decision.grid[replica])

    def _agreed(
        self, peer_stores: _PeerStores, rendezvous: int, group: str, operation: str, members: Sequence[Slot]
    ) -> str:
        """``OVER``; ``GO`` and who repeats it; or empty, when another rendezvous must say."""
        me = self._assignment.slot
        name = key(rendezvous, group, operation)
        self._announcements.here(rendezvous, group, operation)
        for leader in members[: members.index(me)]:
            answer = self._ask(peer_stores, leader, f"{name}/found", rendezvous)
            if answer == UNREACHED:
                worker = self._assignment.standing[leader]
                self._edges.suspect([worker])
                raise PeerLost(f"worker {worker}, which lives, cannot be reached in an operation of {group}", road=True)
            if answer != "left":
                return answer
        others = [slot for slot in members if slot > me]
        for slot in others:
            peer_stores.ask(slot, name)  # all at once
        answers = {slot: self._ask(peer_stores, slot, name, rendezvous) for slot in others}
        if "" in answers.values():
            return ""
        present = [me, *(slot for slot in others if answers[slot] == HERE)]
        found = OVER if OVER in answers.values() else f"{GO} {' '.join(map(str, present))}"
        self._announcements.answer(rendezvous, group, operation, found)
        return found

    def _ask(self, peer_stores: _PeerStores, slot: Slot, name: str, rendezvous: int) -> str:
        """What a member's peer store says: the value of ``name``, "left", or empty when that rendezvous is open no
        more.

        ``UNREACHED``: it lives, and its peer store was not reached for ``UNREACHED_SECONDS``.
        """
        until, pause = time.monotonic() + UNREACHED_SECONDS, LOOK_SECONDS
        left = left_key(self._assignment.decision.epoch)
        while True:
            try:
                for wanted in (name, left):
                    if (said := peer_stores.look(slot, wanted)) is not None:
                        return said
            except PeerLost as lost:
                if not lost.road:
                    return ""  # it is gone: the next rendezvous will say so
                if time.monotonic() > until:
                    return UNREACHED
                peer_stores.hang_up(slot)
                pause = RETRY_SECONDS
            self._orphan.stay()
            if not self._announcements.wait(rendezvous, pause):
                return ""

    def _repeating(self, rendezvous: int) -> EpochGroups:
        """The groups in which operations are repeated while this rendezvous is open."""
        if (known := self._announcements.repeating(rendezvous)) is not None:
            return known
        self._announcements.settled()
        mine = self._assignment
        peer_stores = mine.decision.peer_stores_by_slot(mine.grid)
        repeats = EpochGroups(rendezvous, mine.slot, self._comm_config, peer_stores)
        still_open = self._announcements.repeat(repeats)
        if not still_open or self._orphan.orphaned:
            repeats.end("the rendezvous is open no more")
        return repeats


@dataclass(eq=False)
class _Performed:
    """An operation, and whether its result is there."""

    _perform: Perform
    _done: bool = False

    def __call__(self, backend: TreeBackend, members: Sequence[Slot]) -> None:
        self._perform(backend, members)
        self._done = True

    def check(self, group: str) -> None:
        """Raise Disagreement unless this worker has come to the barrier, as all must have for whom it is over."""
        if not self._done:
            raise Disagreement(f"an operation of {group} is over for others, and this worker did not take part in it")


@dataclass(eq=False)
class _PeerStores:
    """The peer stores of the members of an epoch, by slot."""

    _addresses: dict[Slot, str]
    _secret: bytes
    _clients: dict[Slot, PeerStoreClient] = field(default_factory=dict, init=False)

    def look(self, slot: Slot, key: str) -> str | None:
        """What is known of the value of ``key`` by now; asks for it.  Raises ``PeerLost``."""
        if slot not in self._clients:
            self._clients[slot] = PeerStoreClient(self._addresses[slot], self._secret)
        client = self._clients[slot]
        return client.get(key).decode() if client.check([key]) else None

    def ask(self, slot: Slot, key: str) -> None:
        """Have it looked for."""
        with suppress(PeerLost):  # told by ``look``
            self.look(slot, key)

    def hang_up(self, slot: Slot) -> None:
        """Try to reach it anew with the next look."""
        if client := self._clients.pop(slot, None):
            client.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
