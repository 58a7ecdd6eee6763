"""What a worker tells the others of its operations between decisions (`exchange`), and what it hears of rendezvous.

    opened(n)   a rendezvous was opened: which operations are over for this worker goes on its peer store, for those who
                were interrupted in them; whoever waits here looks at what has changed
    over()      an operation is over for this worker: on the peer store, too, if a rendezvous is open
    leave()     this worker has no place any more, and makes none of the operations that others wait for

The peer store answers whatever the main thread does (`collectives.peers`).  Called by the main thread and
the session's.
"""

from __future__ import annotations

import threading

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.epoch_groups import EpochGroups
from recover_megatron.network.peer_store import PeerStoreServer

OVER, HERE = "over", "here"


class Announcements:
    """Of one worker, on its ``peer_store``."""

    def __init__(self, assignment: Assignment, peer_store: PeerStoreServer) -> None:
        self._assignment = assignment
        self._peer_store = peer_store
        self._news = threading.Condition()
        self._opened, self._counted_on = 0, frozenset[int]()
        self._over: dict[str, str] = {}
        """Group -> the last operation on it that is over for this worker."""
        self._repeats: EpochGroups | None = None
        """The groups in which operations are repeated while the present rendezvous is open."""

    # ---- the session's thread

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
        if self._assignment.started:
            self._peer_store.put(left_key(self._assignment.decision.epoch), "left")
        self.wake()

    # ---- the main thread

    def settled(self) -> None:
        """A new epoch: nobody repeats anything any more."""
        with self._news:
            repeats, self._repeats = self._repeats, None
        if repeats is not None:
            repeats.close()

    def over(self, group: str, operation: str) -> None:
        """An operation is over for this worker."""
        with self._news:
            self._over[group] = operation
            if self._opened > self._assignment.decision.epoch:
                self._tell(group, operation, OVER)

    def here(self, rendezvous: int, group: str, operation: str) -> None:
        """It is not over for this worker, which waits for what the others say, while ``rendezvous`` is open."""
        with self._news:
            if self._opened == rendezvous:
                self._tell(group, operation, HERE)

    def answer(self, rendezvous: int, group: str, operation: str, found: str) -> None:
        """This worker was the one to ask all others, and has found this."""
        self._peer_store.put(f"{key(rendezvous, group, operation)}/found", found, rendezvous)

    def await_rendezvous(self, after: int, seconds: float) -> tuple[int, frozenset[int]] | None:
        """The rendezvous that is open, if there is one beyond ``after`` within ``seconds``, and whom it counts on."""
        with self._news:
            if self._news.wait_for(lambda: self._opened > after, seconds):
                return self._opened, self._counted_on
        return None

    def wait(self, rendezvous: int, seconds: float) -> bool:
        """Wait for news, ``seconds`` at most; False, and at once, where ``rendezvous`` is open no more."""
        with self._news:
            if self._opened != rendezvous:
                return False
            self._news.wait(seconds)
            return True

    def repeating(self, rendezvous: int) -> EpochGroups | None:
        """The groups in which operations are repeated while ``rendezvous`` is open, if there are any."""
        return self._repeats if self._repeats is not None and self._repeats.number == rendezvous else None

    def repeat(self, repeats: EpochGroups) -> bool:
        """Have these be the groups, which end with their rendezvous; whether that is open."""
        with self._news:
            self._repeats = repeats
            return self._opened == repeats.number

    def _tell(self, group: str, operation: str, what: str) -> None:
        """Put on my peer store how far I am with an operation, for those who are interrupted in it."""
        name = key(self._opened, group, operation)
        self._peer_store.put(name, what, self._opened)
        if what == OVER:
            self._peer_store.put(f"{name}/found", OVER, self._opened)


def key(rendezvous: int, group: str, operation: str) -> str:
    """Under which a peer store has how far its worker is with an operation; with ``/found``: what was found of it."""
    return f"open/{rendezvous}/{group}/{operation}"


def left_key(epoch: int) -> str:
    """Under which the peer store of a worker that lost its place in an epoch says so."""
    return f"open/{epoch}/left"
