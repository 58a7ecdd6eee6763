"""Interfaces through which a worker of in-step recovery talks to its framework, the coordinator and other workers.

``Hooks``            calls to the framework at turning points
``ProgressReports``  reports the worker's progress to the coordinator, which then knows which worker hangs
``Announcements``    reports to other workers which operations between decisions are over for this worker (`exchange`)
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

    Methods are called in the main thread where their docstring says so.  All others may also be called in the session's
    or the spare's thread; they must be quick, wait for no other worker, and call no method of the manager that meets
    others.

        a mate is lost, or this worker is out of the run            abort_replica
        this worker joins an epoch                                  version, state_of, last_step, checkpoints,
                                                                    last_checkpoint, iteration
        ... at a boundary where states are compared                 digest
        a plan with a place for this worker is taken up             planned, then describe and log
        a plan makes this spare keep another worker's state         mirror
        a phase is reached in which a fault may be injected         inject
        an event must be logged                                     log
    """

    # ---- actions

    def abort_replica(self, all_heard: Callable[[], None]) -> None:
        """Abort all communication inside this worker's replica: pending operations on this worker raise an error.

        ``all_heard``: function that returns when it is safe to abort operations whose failure another worker of the
        replica could misread (``collectives.epoch``).
        """

    def planned(self, decision: Decision) -> None:
        """Take up a new epoch with a place for this worker: its rank and role may have changed.  In the main thread."""

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """Keep, on this spare, the state of the worker that ``decision`` names, until the epoch ends.

        Returns the changed fields of the spare's ``JoinStatus``.  In the main thread.
        """

    def inject(self, phase: str, iteration: int | None) -> None:
        """Inject a fault if one is due in ``phase`` of ``iteration`` (None: the iteration under way)."""

    def log(self, event: str, **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker is the one that writes them; ``fields``: JSON values."""

    # ---- facts

    def iteration(self) -> int:
        """The training iteration under way, from 1; 0: the training has not begun."""

    def version(self) -> int | None:
        """Number of iterations that have updated the parameters and the optimizer state; None: they are unusable."""

    def state_of(self) -> int:
        """The epoch of the timeline to which this worker's state belongs (``decision.Timeline``)."""

    def digest(self) -> str:
        """Digest of the state: equal strings in a column mean equal states; empty: none.  In the main thread."""

    def last_step(self) -> tuple[int, int]:
        """The last training step that this worker has begun since it got its state: the iteration, and the number of
        the decision; (0, 0): none."""

    def checkpoints(self) -> tuple[Sequence[Checkpoint], Collection[int]]:
        """The complete checkpoints that the run could go back to, as far as this worker knows, and the iterations of
        the checkpoints that it has failed to load."""

    def last_checkpoint(self) -> str:
        """The last checkpoint that this worker knows, as text for messages."""

    def describe(self, decision: Decision) -> dict[str, Any]:
        """Further fields for the event of a new plan, by name; JSON values."""


FIRST_SECONDS = 600.0
"""Seconds beyond the hang timeout that may pass between marks in a worker's first decision, which compiles kernels."""

STORAGE_SECONDS = 3600.0
"""Seconds beyond the hang timeout that reading or writing a checkpoint may take while no byte is moved."""
LOOK_SECONDS = 1.0
LEAST_BYTES = 1 << 16
"""Least number of bytes between two checks that counts as progress; messages and the checks cause fewer."""

T = TypeVar("T")


@dataclass(eq=False)
class ProgressReports:
    """The decision that this worker works on (`rendezvous`), and its progress in it.

    Written by the main thread; only ``moving`` repeats marks in another thread.
    """

    _session: Session
    _hooks: Hooks
    at: int = field(default=0, init=False)
    """The number of the decision under way, or of the last one; 0: there was none."""
    microbatch: int | None = field(default=None, init=False)
    """The microbatch that this worker has begun last."""
    tried: set[int] = field(default_factory=set, init=False)
    """Microbatches of the present step that, as far as this worker knows, its replica has begun; empty once it is
    committed."""
    phase: str = field(default="", init=False)
    """The phase of this worker's last mark."""
    _warm: bool = field(default=False, init=False)
    """True if this worker has done everything that takes longer the first time."""
    _allow: float = field(default=0.0, init=False)
    _waits: bool = field(default=False, init=False)
    _marking: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self) -> int:
        """Begin the next decision; return its number."""
        self.at += 1
        self.tried.clear()
        return self.at

    def agree(self, number: int) -> None:
        """Report the decision done, and wait until all workers have; raises as ``Session.agree`` does."""
        self.inject("agree")
        self.mark("agree", waiting=True)
        self._session.agree(number)
        self._warm = True

    def end_run(self, what: str, error: Exception) -> None:
        """Terminate the run for all workers, with exit code 1, before the iteration under way is committed.

        Returns when this worker is out of the run.  Until then no epoch begins without this worker, so nothing is
        committed; if the coordinator is lost, this worker reports the error to the next coordinator.  ``what``: the
        beginning of the reason, as in "worker 3 has found wrong gradients".
        """
        reason = f"{what} in iteration {self._hooks.iteration()}, which no worker applies: {error}"
        then = "start again from the last checkpoint; if the error comes back, the code is at fault, not a device"
        self._session.give_up(EXIT_SAME_FAULT, f"{reason}; {then}")
        self.mark(self.phase, waiting=True)
        with suppress(CoordinatorLost, Fenced):
            self._session.wait_lost((), threading.TIMEOUT_MAX)

    def allow_first_decision(self) -> None:
        """Until its next decision ends, allow this worker the additional time of a first decision.

        A worker that joined the run late compiles its kernels in that decision, while its model-parallel peers wait.
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
        """Seconds beyond the hang timeout that the present work may take until the next mark."""
        return self._allow + (0.0 if self._warm else FIRST_SECONDS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark this worker as waiting for other workers inside the context: they are then blamed for a hang."""
        phase, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(what, microbatch=microbatch, waiting=True)
        try:
            yield
        finally:
            self.mark(phase, microbatch=microbatch, allow=allow)

    @contextmanager
    def storage(self, phase: str) -> Iterator[None]:
        """Mark this worker as waiting for storage inside the context: its hang timeout grows by the stall timeout."""
        before, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(phase, microbatch=microbatch, allow=self._session.settings.stall_timeout)
        self.inject(phase)
        yield
        self.mark(before, microbatch=microbatch, allow=allow)

    def moving(self, phase: str, work: Callable[[], T], moved: Callable[[], int]) -> Callable[[], T]:
        """Return a function that does ``work``, which reads or writes files, in ``phase``.

        ``moved()``: the number of bytes read and written so far; a worker with a growing number makes progress.  If it
        does not grow, ``work`` may take one hour.
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
            with suppress(RuntimeError):  # no thread can be started: then ``work`` may take one hour
                threading.Thread(target=look, args=(over,), name="recover-moving", daemon=True).start()
            try:
                return work()
            finally:
                over.set()

        return do

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject a fault if one is due in ``phase`` of ``iteration`` (None: the iteration under way)."""
        self._hooks.inject(phase, iteration)


OVER, HERE = "over", "here"


@dataclass(eq=False)
class Announcements:
    """Announcements of one worker on its peer store, which answers other workers even if the main thread is busy.

    opened(n)   rendezvous n was opened: the peer store shows which operations are over for this worker, so that workers
                interrupted in these operations learn of it; threads waiting for this object check again
    over()      an operation is over for this worker: the peer store shows this, too, if a rendezvous is open
    leave()     this worker has no place any more, so it will not perform operations that other workers wait for
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
        """Record that a rendezvous was opened that counts on ``workers``; returns at once."""
        with self._news:
            self._opened, self._counted_on = rendezvous, workers
            repeats = self._repeats
            for group, operation in self._over.items():
                self._publish(group, operation, OVER)
            self._news.notify_all()
        if repeats is not None and repeats.number < rendezvous:
            repeats.end(f"rendezvous {rendezvous} was opened")

    def wake(self) -> None:
        """Wake waiting threads: this worker has become an orphan, or is out of the run."""
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
        """Close the repeated groups: in the new epoch no worker repeats operations."""
        with self._news:
            repeats, self._repeats = self._repeats, None
        if repeats is not None:
            repeats.close()

    def over(self, group: str, operation: str) -> None:
        with self._news:
            self._over[group] = operation
            if self._opened > self._assignment.decision.epoch:
                self._publish(group, operation, OVER)

    def here(self, rendezvous: int, group: str, operation: str) -> None:
        """Announce that an operation is not over for this worker, which waits while ``rendezvous`` is open."""
        with self._news:
            if self._opened == rendezvous:
                self._publish(group, operation, HERE)

    def answer(self, rendezvous: int, group: str, operation: str, found: str) -> None:
        """Publish the result ``found``; called by the leader, which has asked all other members."""
        self._peer_store.put(f"{key(rendezvous, group, operation)}/found", found, rendezvous)

    def await_rendezvous(self, after: int, seconds: float) -> tuple[int, frozenset[int]] | None:
        """Wait up to ``seconds`` for a rendezvous after ``after``; return it and its workers, or None if none opens."""
        with self._news:
            if self._news.wait_for(lambda: self._opened > after, seconds):
                return self._opened, self._counted_on
        return None

    def wait(self, rendezvous: int, seconds: float) -> bool:
        """Wait for news, ``seconds`` at most; return False at once if ``rendezvous`` is no longer open."""
        with self._news:
            if self._opened != rendezvous:
                return False
            self._news.wait(seconds)
            return True

    def repeating(self, rendezvous: int) -> EpochGroups | None:
        """The groups in which operations are repeated while ``rendezvous`` is open; None: there are none."""
        return self._repeats if self._repeats is not None and self._repeats.number == rendezvous else None

    def repeat(self, repeats: EpochGroups) -> bool:
        """Use these groups to repeat operations until their rendezvous ends; return whether it is still open."""
        with self._news:
            self._repeats = repeats
            return self._opened == repeats.number

    def _publish(self, group: str, operation: str, what: str) -> None:
        """Put this worker's progress with an operation on its peer store, for workers that are interrupted in it."""
        name = key(self._opened, group, operation)
        self._peer_store.put(name, what, self._opened)
        if what == OVER:
            self._peer_store.put(f"{name}/found", OVER, self._opened)


def key(rendezvous: int, group: str, operation: str) -> str:
    """Return the key under which a peer store has its worker's progress with an operation.

    Followed by ``/found`` it is the key of the operation's result for all workers.
    """
    return f"open/{rendezvous}/{group}/{operation}"


def left_key(epoch: int) -> str:
    """Return the key that the peer store of a worker has once the worker has lost its place in ``epoch``."""
    return f"open/{epoch}/left"
