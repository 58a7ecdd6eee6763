"""Operations of some workers over their replicas, outside of decisions: each once, whoever dies in the middle.

Only the members of a group make an operation on it, and each group counts its own: Megatron logs things that some
pipeline stages have and others have not.  So an operation that is interrupted must not need a meeting of all: a worker
of another stage may wait for this one inside their replica, and would never come.

    UNDER WAY(epoch) --the operation, then a barrier of the group--> OVER
        |
        '--revoked; rendezvous n is open, nobody of us has joined it--> ASKED(n) --it is over for one of us--> OVER
                                                                         ^  |
                                     a death opens rendezvous n + 1      |  '--all of us are here--> UNDER WAY(n)
                                                                         '-----------------------------'

Whoever is past the barrier knows that all have come to it, and so have the result: who was interrupted in it takes
over its own.  If it is over for nobody, those who are there repeat it, on the input that each had.  (It may have been
over for one who has died since: nobody knows, and nobody needs to.)

Who is asked is the lowest member that lives: it asks all others and tells them the answer.  Answers are on the boards,
so the main thread of whoever is past the operation may be anywhere: when a rendezvous is opened, a worker puts on its
board which operations are over for it.

Where two members live and cannot reach each other's boards, the one that is asked counts as one that has left, and the
one that asks in vain leaves: its replica is out, and is not put together again over that road (`edges`).

The rendezvous that is open meanwhile waits for this worker, and this worker does not join it before its operation is
over.  No wait can become a circle by it: the operation waits for what its members would wait for without any death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch.distributed as dist

from recover_megatron.collectives.board import Pinned
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.gloo import GlooBackend
from recover_megatron.collectives.round import RoundBackend
from recover_megatron.instep.edges import roads_of
from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.generation import Failure, Generation, name_of

if TYPE_CHECKING:
    from recover_megatron.instep.recovery import Recovery

AnyBackend = GlooBackend | RoundBackend
Perform = Callable[[AnyBackend, Sequence[int]], None]
"""Carries the operation out on a backend of these slots, and keeps the result to itself."""

ALLOW_SECONDS = 600.0
"""How long a worker that waits in an interrupted operation may wait beyond the hang timeout, while others wait for it
at a rendezvous: if somebody hangs, it is the one that it waits for, whose mark allows nothing."""
LOOK_SECONDS = 0.005
"""How often it looks at what has come from a board."""

UNREACHED_SECONDS = 5.0
RETRY_SECONDS = 0.25
"""How long somebody who lives is tried, and how often."""

OVER, HERE, GO, UNREACHED = "over", "here", "go", "unreached"


class Exchange:
    """See the module's text.  ``recovery``: whose operations these are; its main thread calls ``run``."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._news = threading.Condition()
        self._opened, self._counted_on = 0, frozenset[int]()
        self._over: dict[str, str] = {}
        """Group -> the last operation on it that is over for this worker."""
        self._at = -1
        self._counts: dict[str, int] = {}
        self._repeats: Generation | None = None
        """The groups in which operations are repeated while the present rendezvous is open."""

    def run(self, label: str, workers: Sequence[int], members: Sequence[int], perform: Perform) -> None:
        """Have an operation carried out, once, by ``members`` (slots, in rank order) or those of them that live.

        ``label`` and ``workers`` (the slots of the launch) say which group it is.  ``perform`` may be called more than
        once; the result is that of its last call that returned.  Raises ``Orphaned``, ``Fenced``, ``CoordinatorLost``.
        """
        recovery, group = self._recovery, name_of(label, workers)
        operation = self._next(group)
        performed = _Performed(perform)
        with recovery.waiting(f"{label} operation"):
            try:
                self._together(recovery.generation, group, members, performed)
            except EpochRevoked:
                recovery.stay()
                self._settle(group, operation, members, performed)
        with self._news:
            self._over[group] = operation
            if self._opened > recovery.decision.epoch:
                self._tell(group, operation, OVER)

    # ---- what others tell this worker, in other threads

    def opened(self, rendezvous: int, workers: frozenset[int]) -> None:
        """A rendezvous was opened, which counts on these; quick, for the session's thread."""
        with self._news:
            self._opened, self._counted_on = rendezvous, workers
            repeats = self._repeats
            for group, operation in self._over.items():
                self._tell(group, operation, OVER)
            self._news.notify_all()
        if repeats is not None and repeats.number < rendezvous:
            repeats.end(f"rendezvous {rendezvous} was opened")

    def wake(self) -> None:
        """This worker has become an orphan, or is out: whoever waits here looks at that."""
        with self._news:
            repeats = self._repeats
            self._news.notify_all()
        if repeats is not None:
            repeats.end("this worker has no place any more")

    def leave(self) -> None:
        """This worker has no place any more, and makes none of the operations that others of its column make."""
        if self._recovery.started:
            self._recovery.fabric.board.put(_left(self._recovery.decision.epoch), "left")
        self.wake()

    def settled(self) -> None:
        """A new epoch: nobody repeats anything any more."""
        with self._news:
            repeats, self._repeats = self._repeats, None
        if repeats is not None:
            repeats.close()

    # ---- one operation

    def _next(self, group: str) -> str:
        """The operation's name: the last decision begun, and the how-manieth it is on this group since then.

        All members pass the same decisions, and a worker that gets a place begins with a decision.
        """
        if self._at != self._recovery.at:
            self._at = self._recovery.at
            self._counts.clear()
        self._counts[group] = self._counts.get(group, 0) + 1
        return f"{self._at}.{self._counts[group]}"

    def _together(self, generation: Generation, group: str, members: Sequence[int], performed: _Performed) -> None:
        try:
            generation.check()
            backend = generation.control(group, members)
            performed(backend, members)
            backend.wait(backend.call(lambda on: on.barrier(dist.BarrierOptions())))
        except PeerLost as lost:
            generation.fail(Failure(str(lost), lost.peer, lost.road))
            raise EpochRevoked(generation.number, str(lost)) from lost

    def _settle(self, group: str, operation: str, members: Sequence[int], performed: _Performed) -> None:
        """The epoch has ended in the middle: find out whether the operation is over, or repeat it until it is."""
        recovery = self._recovery
        recovery.session.ask(*recovery.failure())  # nothing, if the end is known
        tried = recovery.generation.number
        while True:
            rendezvous, workers = self._await_rendezvous(tried)
            tried = rendezvous
            recovery.stay()  # its own replica may be the one that is broken
            recovery.mark(recovery.phase, waiting=True, allow=ALLOW_SECONDS)
            here = [slot for slot in members if self._counted(slot, workers)]
            with self._boards() as boards:
                found = self._agreed(boards, rendezvous, group, operation, here)
            if found == OVER:
                performed.check(group)
                return
            if found:
                recovery.hooks.log("again", what=recovery.phase)
                present = [int(slot) for slot in found.split()[1:]]
                if recovery.slot not in present:
                    raise PeerLost(
                        "the others go on without this worker, which some of them could not reach", road=True
                    )
                try:
                    self._together(self._repeating(rendezvous), f"repeated {group}", present, performed)
                    return
                except EpochRevoked:
                    recovery.stay()

    def _await_rendezvous(self, after: int) -> tuple[int, frozenset[int]]:
        """The rendezvous that is open, when there is one beyond ``after``; raises as ``run`` does."""
        recovery = self._recovery
        while True:
            recovery.stay()
            with self._news:
                if self._news.wait_for(lambda: self._opened > after, 1.0):
                    return self._opened, self._counted_on

    def _counted(self, slot: int, workers: frozenset[int]) -> bool:
        """Whether nobody of the replica in which ``slot`` is has gone."""
        recovery = self._recovery
        replica, _ = recovery.grid.place(slot)
        return workers.issuperset(recovery.decision.grid[replica])

    def _agreed(self, boards: _Boards, rendezvous: int, group: str, operation: str, members: Sequence[int]) -> str:
        """``OVER``; ``GO`` and who repeats it; or empty, when another rendezvous must say."""
        me = self._recovery.slot
        key = _key(rendezvous, group, operation)
        with self._news:
            if self._opened == rendezvous:
                self._tell(group, operation, HERE)
        for leader in members[: members.index(me)]:
            answer = self._ask(boards, leader, f"{key}/found", rendezvous)
            if answer == UNREACHED:
                worker = self._recovery.standing[leader]
                self._recovery.edges.suspect([worker])
                raise PeerLost(f"worker {worker}, which lives, cannot be reached in an operation of {group}", road=True)
            if answer != "left":
                return answer
        others = [slot for slot in members if slot > me]
        for slot in others:
            boards.ask(slot, key)  # all at once
        answers = {slot: self._ask(boards, slot, key, rendezvous) for slot in others}
        if "" in answers.values():
            return ""
        present = [me, *(slot for slot in others if answers[slot] == HERE)]
        found = OVER if OVER in answers.values() else f"{GO} {' '.join(map(str, present))}"
        self._recovery.fabric.board.put(f"{key}/found", found, rendezvous)
        return found

    def _ask(self, boards: _Boards, slot: int, key: str, rendezvous: int) -> str:
        """What a member's board says: the value of ``key``, "left", or empty when that rendezvous is open no more.

        ``UNREACHED``: it lives, and its board was not reached for ``UNREACHED_SECONDS``.
        """
        until, pause = time.monotonic() + UNREACHED_SECONDS, LOOK_SECONDS
        left = _left(self._recovery.decision.epoch)
        while True:
            try:
                for wanted in (key, left):
                    if (said := boards.look(slot, wanted)) is not None:
                        return said
            except PeerLost as lost:
                if not lost.road:
                    return ""  # it is gone: the next rendezvous will say so
                if time.monotonic() > until:
                    return UNREACHED
                boards.hang_up(slot)
                pause = RETRY_SECONDS
            self._recovery.stay()
            with self._news:
                if self._opened != rendezvous:
                    return ""
                self._news.wait(pause)

    def _tell(self, group: str, operation: str, what: str) -> None:
        """Put on my board how far I am with an operation, for those who are interrupted in it."""
        key = _key(self._opened, group, operation)
        board = self._recovery.fabric.board
        board.put(key, what, self._opened)
        if what == OVER:
            board.put(f"{key}/found", OVER, self._opened)

    def _repeating(self, rendezvous: int) -> Generation:
        recovery = self._recovery
        if self._repeats is not None and self._repeats.number == rendezvous:
            return self._repeats
        self.settled()
        boards = recovery.decision.boards_by_slot(recovery.grid)
        repeats = Generation(
            rendezvous, recovery.slot, recovery.fabric, boards, roads_of(recovery.decision, recovery.grid)
        )
        with self._news:
            self._repeats = repeats
            over = self._opened != rendezvous
        if over or recovery.orphaned:
            repeats.end("the rendezvous is open no more")
        return repeats

    @contextmanager
    def _boards(self) -> Iterator[_Boards]:
        recovery = self._recovery
        boards = _Boards(recovery.decision.boards_by_slot(recovery.grid), recovery.fabric.secret)
        try:
            yield boards
        finally:
            boards.close()


class _Performed:
    """An operation, and whether its result is there."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._done = False

    def __call__(self, backend: AnyBackend, members: Sequence[int]) -> None:
        self._perform(backend, members)
        self._done = True

    def check(self, group: str) -> None:
        """Raise Disagreement unless this worker has come to the barrier, as all must have for whom it is over."""
        if not self._done:
            raise Disagreement(f"an operation of {group} is over for others, and this worker did not take part in it")


class _Boards:
    """The boards of the members of an epoch, by slot."""

    def __init__(self, addresses: dict[int, str], secret: bytes) -> None:
        self._addresses = addresses
        self._secret = secret
        self._clients: dict[int, Pinned] = {}

    def look(self, slot: int, key: str) -> str | None:
        """What is known of the value of ``key`` by now; asks for it.  Raises ``PeerLost``."""
        if slot not in self._clients:
            self._clients[slot] = Pinned(self._addresses[slot], self._secret)
        client = self._clients[slot]
        return client.get(key).decode() if client.check([key]) else None

    def ask(self, slot: int, key: str) -> None:
        """Have it looked for."""
        with suppress(PeerLost):  # told by ``look``
            self.look(slot, key)

    def hang_up(self, slot: int) -> None:
        """Try to reach it anew with the next look."""
        if client := self._clients.pop(slot, None):
            client.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _key(rendezvous: int, group: str, operation: str) -> str:
    return f"open/{rendezvous}/{group}/{operation}"


def _left(epoch: int) -> str:
    return f"open/{epoch}/left"
