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
    """Interface that the training framework implements: actions at turning points, and facts about the training.

    Methods whose docstring says so are called in the main thread only.  All other methods may also be called in the
    session's or the spare's thread.  They must be quick.  They must not wait for other workers, nor call a method of
    the manager that meets other workers.

        this worker loses its place, or is out of the run           abort_replica
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

        ``all_heard``: function that waits until all workers know that the epoch is over; the session's thread must not
        call it.  Abort NCCL operations only after this function has returned, since an abort may look like a success to
        other members (``collectives.epoch``).
        """

    def planned(self, decision: Decision) -> None:
        """Adapt to a new epoch, in which this worker's rank and role may have changed.  Called in the main thread."""

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        """Mirror on this spare, until the epoch ends, the state of the worker that ``decision.mirrors`` names.

        Returns the changed fields of the spare's ``JoinStatus``.  Called in the main thread.
        """

    def inject(self, phase: str, iteration: int | None) -> None:
        """Inject a fault if one is due in ``phase`` of ``iteration`` (None: the iteration under way)."""

    def log(self, event: str, **fields: Any) -> None:
        """Write a line of events.jsonl, if this worker writes this file; ``fields``: JSON values."""

    # ---- facts

    def iteration(self) -> int:
        """Return the training iteration under way, from 1; 0: the training has not begun."""

    def version(self) -> int | None:
        """Return how many iterations have updated the parameters and optimizer state; None: these are unusable."""

    def state_of(self) -> int:
        """Return the epoch of the timeline to which this worker's state belongs (``decision.Timeline``)."""

    def digest(self) -> str:
        """Return a digest of the state; empty if it was not computed.

        Two workers of a column have equal digests if and only if their states are equal.  Called in the main thread.
        """

    def last_step(self) -> tuple[int, int]:
        """Return (iteration, decision number) of the last training step begun with the present state; (0, 0): none."""

    def checkpoints(self) -> tuple[Sequence[Checkpoint], Collection[int]]:
        """Return the complete checkpoints known to this worker to which the run can go back, and the iterations of the
        checkpoints that this worker failed to load."""

    def last_checkpoint(self) -> str:
        """Return the last checkpoint that this worker knows, as text for messages."""

    def describe(self, decision: Decision) -> dict[str, Any]:
        """Return additional fields for the event ``plan``: name -> JSON value."""


FIRST_SECONDS = 600.0
"""Seconds, in addition to the hang timeout, that a worker may take between marks in its first decision, in which it
compiles kernels."""

STORAGE_SECONDS = 3600.0
"""Seconds, in addition to the hang timeout, for which reading or writing a checkpoint may move no byte."""
LOOK_SECONDS = 1.0
LEAST_BYTES = 1 << 16
"""Least number of bytes, read or written between two checks, that count as progress.  The checks themselves, and a
worker's messages, cause fewer bytes."""

T = TypeVar("T")


@dataclass(eq=False)
class ProgressReports:
    """Reports of one worker's progress, with the number of the worker's present decision (`rendezvous`).

    Changed by the main thread; only ``moving`` repeats marks in another thread.
    """

    _session: Session
    _hooks: Hooks
    at: int = field(default=0, init=False)
    """The number of the decision under way, or of the last one; 0: there was none."""
    microbatch: int | None = field(default=None, init=False)
    """The microbatch that this worker has begun last."""
    tried: set[int] = field(default_factory=set, init=False)
    """Microbatches of the present step that this replica has begun, as far as this worker knows; empty once the
    step is committed."""
    phase: str = field(default="", init=False)
    """The phase of this worker's last mark."""
    _warm: bool = field(default=False, init=False)
    """True if this worker has finished a decision: later decisions compile no kernels, so they need less time."""
    _allow: float = field(default=0.0, init=False)
    _waits: bool = field(default=False, init=False)
    _marking: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self) -> int:
        """Begin the next decision; return its number."""
        self.at += 1
        self.tried.clear()
        return self.at

    def agree(self, number: int) -> None:
        """Report decision ``number`` done, and wait until all workers have done so; raises as ``Session.agree``
        does."""
        self.inject("agree")
        self.mark("agree", waiting=True)
        self._session.agree(number)
        self._warm = True

    def end_run(self, what: str, error: Exception) -> None:
        """Terminate the run for all workers, with exit code 1, before the iteration under way is committed.

        Returns when this worker is out of the run.  Until then no epoch begins without this worker, so no worker
        commits the iteration.  If the coordinator is lost, this worker reports the error to the next coordinator.
        ``what``: beginning of the reason, as in "worker 3 has found wrong gradients".
        """
        reason = f"{what} in iteration {self._hooks.iteration()}, whose update no worker applies: {error}"
        then = "start again from the last checkpoint; if the error comes back, the code is at fault, not a device"
        self._session.give_up(EXIT_SAME_FAULT, f"{reason}; {then}")
        self.mark(self.phase, waiting=True)
        with suppress(CoordinatorLost, Fenced):
            self._session.wait_lost((), threading.TIMEOUT_MAX)

    def allow_first_decision(self) -> None:
        """Allow this worker ``FIRST_SECONDS`` more between marks, until its next decision ends.

        In this decision a worker that joined late compiles its kernels, while its model-parallel peers wait for it.
        """
        self._warm = False

    def mark(self, phase: str, *, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0) -> None:
        """Report progress (``Session.mark``); ``allow``: seconds added to the hang timeout until the next mark."""
        with self._marking:
            self.microbatch, self.phase, self._allow, self._waits = microbatch, phase, allow, waiting
            if microbatch is not None:
                self.tried.add(microbatch)
            self._session.mark(self._hooks.iteration(), phase, microbatch, waiting, self.allowed)

    @property
    def allowed(self) -> float:
        """Seconds, in addition to the hang timeout, that may pass until the next mark."""
        return self._allow + (0.0 if self._warm else FIRST_SECONDS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark this worker, until the context ends, as waiting for other workers, which are then blamed for a hang."""
        phase, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(what, microbatch=microbatch, waiting=True)
        try:
            yield
        finally:
            self.mark(phase, microbatch=microbatch, allow=allow)

    @contextmanager
    def storage(self, phase: str) -> Iterator[None]:
        """Mark this worker, until the context ends, as waiting for storage.

        The wait may last for the hang timeout plus the stall timeout.
        """
        before, microbatch, allow = self.phase, self.microbatch, self._allow
        self.mark(phase, microbatch=microbatch, allow=self._session.settings.stall_timeout)
        self.inject(phase)
        yield
        self.mark(before, microbatch=microbatch, allow=allow)

    def moving(self, phase: str, work: Callable[[], T], moved: Callable[[], int]) -> Callable[[], T]:
        """Return a function that calls ``work``, which reads or writes files, and marks ``phase`` while bytes move.

        ``moved()`` returns the number of bytes read and written so far.  While this number does not grow, ``work`` may
        take ``STORAGE_SECONDS``.
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
            with suppress(RuntimeError):  # without this thread, ``work`` may take ``STORAGE_SECONDS``
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

    opened(n)   rendezvous n was opened: publish which operations are over for this worker, since other workers may
                have been interrupted in these operations; wake the threads that wait for this object
    over()      an operation is over for this worker: publish this if a rendezvous is open
    leave()     this worker has lost its place: publish that other workers must not wait for this worker
    """

    _assignment: Assignment
    _peer_store: PeerStoreServer
    _news: threading.Condition = field(default_factory=threading.Condition, init=False)
    _opened: int = field(default=0, init=False)
    _counted_on: frozenset[int] = field(default=frozenset(), init=False)
    _over: dict[str, str] = field(default_factory=dict, init=False)
    """Group -> last operation on this group that is over for this worker."""
    _repeats: EpochGroups | None = field(default=None, init=False)
    """The groups in which operations are repeated while the present rendezvous is open."""

    # ---- the session's thread

    def opened(self, rendezvous: int, workers: frozenset[int]) -> None:
        """Record that ``rendezvous`` was opened among ``workers``, and publish operations that are over.

        Does not wait for other workers.
        """
        with self._news:
            self._opened, self._counted_on = rendezvous, workers
            repeats = self._repeats
            for group, operation in self._over.items():
                self._publish(group, operation, OVER)
            self._news.notify_all()
        if repeats is not None and repeats.number < rendezvous:
            repeats.end(f"rendezvous {rendezvous} was opened")

    def wake(self) -> None:
        """Wake waiting threads, because this worker has become an orphan, or is out of the run."""
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

    def close_repeats(self) -> None:
        """Close the groups in which operations were repeated, because their rendezvous is over."""
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
        """Publish that an operation is not over for this worker, which waits for the members' answers."""
        with self._news:
            if self._opened == rendezvous:
                self._publish(group, operation, HERE)

    def answer(self, rendezvous: int, group: str, operation: str, found: str) -> None:
        """Publish ``found``, the result for an interrupted operation.

        The leader of the operation (`exchange`) calls this method after it has asked all members."""
        self._peer_store.put(f"{key(rendezvous, group, operation)}/found", found, rendezvous)

    def await_rendezvous(self, after: int, seconds: float) -> tuple[int, frozenset[int]] | None:
        """Wait up to ``seconds`` for a rendezvous newer than ``after``; return (number, workers), or None if none
        opens."""
        with self._news:
            if self._news.wait_for(lambda: self._opened > after, seconds):
                return self._opened, self._counted_on
        return None

    def wait(self, rendezvous: int, seconds: float) -> bool:
        """Wait up to ``seconds`` for a change of this object; return False at once if ``rendezvous`` is closed."""
        with self._news:
            if self._opened != rendezvous:
                return False
            self._news.wait(seconds)
            return True

    def repeating(self, rendezvous: int) -> EpochGroups | None:
        """Return the groups in which operations are repeated while ``rendezvous`` is open; None: no groups exist."""
        return self._repeats if self._repeats is not None and self._repeats.number == rendezvous else None

    def repeat(self, repeats: EpochGroups) -> bool:
        """Record the groups in which operations are repeated; return whether their rendezvous is still open."""
        with self._news:
            self._repeats = repeats
            return self._opened == repeats.number

    def _publish(self, group: str, operation: str, what: str) -> None:
        """Publish whether ``operation`` is over for this worker: ``OVER`` or ``HERE``."""
        name = key(self._opened, group, operation)
        self._peer_store.put(name, what, self._opened)
        if what == OVER:
            self._peer_store.put(f"{name}/found", OVER, self._opened)


def key(rendezvous: int, group: str, operation: str) -> str:
    """Return the peer-store key under which a worker publishes whether an operation is over for it.

    The key with the suffix ``/found`` has the leader's result for all members.
    """
    return f"open/{rendezvous}/{group}/{operation}"


def left_key(epoch: int) -> str:
    """Return the peer-store key that a worker sets when it loses its place in ``epoch``."""
    return f"open/{epoch}/left"
