"""What a worker of in-step recovery says: to its training framework, to the coordinator, and to the other workers.

``Hooks``            what is asked of the framework at turning points
``ProgressReports``  tells the coordinator where the worker is in the training: so it is known which worker hangs
``Announcements``    tells the others which operations between decisions are over for this worker (`exchange`)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from recover_megatron.instep.decision import Checkpoint, Decision
from recover_megatron.instep.groups.epoch_groups import EpochGroups
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EXIT_SAME_FAULT, CoordinatorLost, Fenced
from recover_megatron.network.peer_store import PeerStoreServer


class Hooks(Protocol):
    """The training framework's side: actions at turning points, and facts about itself.

    Called in the main thread where that is said; else in the session's or the spare's thread, too, and then it must be
    quick, wait for no other worker, and meet nobody by the manager.

        a worker of this replica is lost, or this worker is out     abort_replica
        this worker joins an epoch                                  version, state_of, last_step, checkpoints,
                                                                    last_checkpoint, iteration
        ... at a boundary where states are compared                 digest
        a plan with a place for this worker is taken up             planned, then describe and log
        a plan has it keep the state of another worker              mirror
        a phase is reached in which a fault may be injected         inject
        something is to be written down                             log
    """

    # ---- what it does

    def abort_replica(self, all_heard: Callable[[], None]) -> None:
        """End all communication inside this worker's replica: what waits in it, here, gets an error.

        ``all_heard``: returns when anything may be aborted that a mate could believe (``collectives.epoch``).
        """

    def planned(self, decision: Decision) -> None:
        """A new epoch, in which this worker has a place: ranks and roles may have moved.  In the main thread."""

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """This worker, a spare, keeps the state of the one that ``decision`` names until the epoch ends.

        Returns what of its ``JoinStatus`` has changed by it.  In the main thread.
        """

    def inject(self, phase: str, iteration: int | None) -> None:
        """Inject a fault if one is due: a phase was reached, of ``iteration``; None: of that under way."""

    def log(self, event: str, **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker is the one that does; ``fields``: JSON values."""

    # ---- what it tells

    def iteration(self) -> int:
        """The training iteration under way, from 1; 0: the training has not begun."""

    def version(self) -> int | None:
        """How many iterations the parameters and the optimizer's state have seen; None: they are of no use."""

    def state_of(self) -> int:
        """The epoch of the timeline that this is the state of (``decision.Timeline``)."""

    def digest(self) -> str:
        """A digest of that state: equal strings in a column mean equal states; empty: none.  In the main thread."""

    def last_step(self) -> tuple[int, int]:
        """Of the last training step that this worker has begun since it has its state: the iteration, and the number of
        its decision; (0, 0): none."""

    def checkpoints(self) -> tuple[Sequence[Checkpoint], Collection[int]]:
        """The complete checkpoints that the run could go back to, as far as this worker knows, and the iterations of
        those that it has failed to load."""

    def last_checkpoint(self) -> str:
        """The last checkpoint that this worker knows of, in words for people."""

    def describe(self, decision: Decision) -> dict[str, Any]:
        """Further fields for the event of a new plan, by name; JSON values."""


FIRST_SECONDS = 600.0
"""What a worker's first decision may take beyond the hang timeout between two marks: kernels are compiled in it."""

STORAGE_SECONDS = 3600.0
"""How long a checkpoint may take to be written or read, beyond the hang timeout, while not a byte is moved."""
LOOK_SECONDS = 1.0
LEAST_BYTES = 1 << 16
"""Fewer from one look to the next may be those of messages, and of the looks themselves."""

T = TypeVar("T")


@dataclass(eq=False)
class ProgressReports:
    """The decision that this worker works on (`rendezvous`), and what it does in it.

    Written by the main thread, but for marks that are made again (``moving``).
    """

    _session: Session
    _hooks: Hooks
    at: int = field(default=0, init=False)
    """The number of the decision under way, or of the last one; 0: there was none."""
    microbatch: int | None = field(default=None, init=False)
    """The one that this worker has begun last."""
    tried: set[int] = field(default_factory=set, init=False)
    """Those of the step under way that its replica has begun, as far as it knows, until the step is committed."""
    phase: str = field(default="", init=False)
    """What it was doing when it last said so."""
    _warm: bool = field(default=False, init=False)
    """Whether this worker has done all that is done for the first time only."""
    _allow: float = field(default=0.0, init=False)
    _waits: bool = field(default=False, init=False)
    _marking: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self) -> int:
        """The number of the next decision, which begins."""
        self.at += 1
        self.tried.clear()
        return self.at

    def agree(self, number: int) -> None:
        """Report the decision done and wait for all; raises as ``Session.agree`` does."""
        self.inject("agree")
        self.mark("agree", waiting=True)
        self._session.agree(number)
        self._warm = True

    def end_run(self, what: str, error: Exception) -> None:
        """End the run for all workers, with exit code 1, before the iteration under way is committed.

        Returns when this worker is out of the run: while it lives no epoch begins without it, so nothing is committed,
        and it tells the next coordinator where this one is lost.  ``what``: the beginning of the reason, as in
        "worker 3 has found wrong gradients".
        """
        reason = f"{what} in iteration {self._hooks.iteration()}, which no worker applies: {error}"
        then = "start again from the last checkpoint; if this comes back, it is a fault of the code and of no device"
        self._session.give_up(EXIT_SAME_FAULT, f"{reason}; {then}")
        self.mark(self.phase, waiting=True)
        with suppress(CoordinatorLost, Fenced):
            self._session.wait_lost((), threading.TIMEOUT_MAX)

    def begin_anew(self) -> None:
        """Until the next decision is done this worker may take as long as in its first one.

        A worker that joined the run late compiles its kernels then, and those of its replica wait for it within theirs.
        """
        self._warm = False

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress: see ``Session.mark``.  ``allow``: seconds beyond the hang timeout until the next mark."""
        with self._marking:
            self.microbatch, self.phase, self._allow, self._waits = microbatch, phase, allow, waiting
            if microbatch is not None:
                self.tried.add(microbatch)
            self._session.mark(self._hooks.iteration(), phase, microbatch, waiting, self.allowed)

    @property
    def allowed(self) -> float:
        """The seconds beyond the hang timeout that what this worker does now may take until its next mark."""
        return self._allow + (0.0 if self._warm else FIRST_SECONDS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark as waiting for others, within a phase: a hang is then blamed on whom this worker waits for."""
        phase, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(what, microbatch=microbatch, waiting=True)
        try:
            yield
        finally:
            self.mark(phase, microbatch=microbatch, allow=allow)

    @contextmanager
    def storage(self, phase: str) -> Iterator[None]:
        """Mark as waiting for storage, in ``phase``: the stall timeout is allowed on top of the hang timeout."""
        before, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(phase, microbatch=microbatch, allow=self._session.settings.stall_timeout)
        self.inject(phase)
        yield
        self.mark(before, microbatch=microbatch, allow=allow)

    def moving(self, phase: str, work: Callable[[], T], moved: Callable[[], int]) -> Callable[[], T]:
        """Do ``work`` in ``phase``, in which files are written or read; as long as ``moved`` changes that is progress.

        ``moved()``: how many bytes were read and written by now.  Without progress an hour is allowed.
        """

        def look(over: threading.Event) -> None:
            last = moved()
            while not over.wait(LOOK_SECONDS):
                before, last = last, moved()
                if abs(last - before) >= LEAST_BYTES:
                    with self._marking:
                        if self.phase == phase and not self._waits:
                            self._session.mark(self._hooks.iteration(), phase, self.microbatch, False, self.allowed)

        def do() -> T:
            self.mark(phase, allow=STORAGE_SECONDS)
            over = threading.Event()
            with suppress(RuntimeError):  # no thread can be started: then an hour is all that it may take
                threading.Thread(target=look, args=(over,), name="recover-moving", daemon=True).start()
            try:
                return work()
            finally:
                over.set()

        return do

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject a fault if one is due in this phase of ``iteration``; None: of that under way."""
        self._hooks.inject(phase, iteration)


OVER, HERE = "over", "here"


@dataclass(eq=False)
class Announcements:
    """What one worker tells on its ``peer_store``, which answers whatever the main thread does.

    opened(n)   a rendezvous was opened: which operations are over for this worker goes on its peer store, for those who
                were interrupted in them; whoever waits here looks at what has changed
    over()      an operation is over for this worker: on the peer store, too, if a rendezvous is open
    leave()     this worker has no place any more, and makes none of the operations that others wait for
    """

    _assignment: Assignment
    _peer_store: PeerStoreServer
    _news: threading.Condition = field(default_factory=threading.Condition, init=False)
    _opened: int = field(default=0, init=False)
    _counted_on: frozenset[int] = field(default=frozenset(), init=False)
    _over: dict[str, str] = field(default_factory=dict, init=False)
    """Group -> the last operation on it that is over for this worker."""
    _repeats: EpochGroups | None = field(default=None, init=False)
    """The groups in which operations are repeated while the present rendezvous is open."""

    # ---- the session's thread

    def opened(self, rendezvous: int, workers: frozenset[int]) -> None:
        """A rendezvous was opened, which counts on these; quick."""
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
