"""Interface between a group and the membership: epoch, cancel token, errors, key-value stores for the rendezvous.

When a collective raises ``EpochRevoked``, the collective's epoch is over.  From then on the group of that epoch does
not access a bucket or a ledger, and sends nothing.  Every segment of a bucket is either this worker's own gradient,
untouched, or the finished sum; the bucket's ledger records which of the two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import EpochRevoked, Plan

__all__ = ["CollectiveMismatch", "EpochRevoked", "LedgerError", "PeerLost"]


class PeerLost(ConnectionError):
    """The connection to another member broke.  Users of a group get ``EpochRevoked`` instead of this error.

    ``peer``: worker id of that member; None if unknown.  ``unreachable``: True if the network path to that member
    fails in one direction or both; False if the connection was closed at the other end.
    """

    def __init__(self, text: str, peer: int | None = None, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.peer = peer
        self.unreachable = unreachable

    def bare(self) -> PeerLost:
        """Return a copy without a traceback, whose frames would keep the epoch's connections and memory alive."""
        return PeerLost(str(self), self.peer, unreachable=self.unreachable)


class CollectiveMismatch(RuntimeError):
    """The members of an epoch did not issue the same collectives in the same order: a fault of the calling program.

    This error is raised before parts of different collectives are summed.
    """


class LedgerError(ValueError):
    """A ledger is invalid, or contradicts the ledger of another member.

    The cause is a fault of the calling program, or a damaged message.
    """


class Epoch(Protocol):
    """Epoch of the membership, as seen by one member."""

    @property
    def number(self) -> int:
        """Number of the epoch, larger than the number of every earlier epoch."""

    @property
    def members(self) -> Sequence[int]:
        """Worker ids of the column's members in ring order; the same list on all members."""

    @property
    def me(self) -> int:
        """Worker id of this member."""

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` once, in any thread, when the epoch ends, or now if the epoch has ended already."""


class SessionEpoch:
    """``Epoch`` for a group whose plan came from ``Session.join``.

    ``plan``: the result of ``Session.join``.  ``column``: worker ids of the group's members, in ring order.
    """

    def __init__(self, session: Session, plan: Plan, me: int, column: Sequence[int]) -> None:
        self.number = plan.epoch
        self.members = list(column)
        self.me = me
        self._session = session

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        once = threading.Lock()

        def revoked(epoch: int, reason: str) -> None:
            if once.acquire(blocking=False):
                callback(reason)

        self._session.on_revoke(revoked)
        # Check only after the registration: in the other order a revocation between the two would be missed.
        if self._session.epoch != self.number or self._session.revoked:
            revoked(self.number, "the epoch ended before its group was opened")


class CancelToken:
    """Token of one epoch.  When it is cancelled, every operation of the epoch's groups raises ``EpochRevoked``.

    Any thread may call ``cancel``, which calls the wakers (``on_cancel``) to end the waits of other threads.

    ``all_heard``: function that makes all live members cancel their tokens of this epoch, and returns when all have
    done so.  It raises ``MembershipError`` if this member is out of the run.  The session's thread must not call it.

    ``in_touch``: function that returns when the coordinator has confirmed that this member was live at the time of the
    call or later; it may raise ``EpochRevoked``.
    """

    def __init__(
        self, epoch: int, all_heard: Callable[[], None] = lambda: None, in_touch: Callable[[], None] = lambda: None
    ) -> None:
        self.epoch = epoch
        self.all_heard = all_heard
        self.in_touch = in_touch
        self.reason = ""
        self.lost: PeerLost | None = None
        """Connection failure that cancelled the token; None if the token is live, or was cancelled otherwise."""
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self, reason: str | PeerLost) -> None:
        """Cancel the token for ``reason`` and call the wakers.  If the token is cancelled already, do nothing."""
        with self._lock:
            if self._cancelled.is_set():
                return
            self.reason = str(reason)
            if isinstance(reason, PeerLost):
                self.lost = reason.bare()
            self._cancelled.set()
            wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def on_cancel(self, waker: Callable[[], None]) -> None:
        """Call ``waker`` when the token is cancelled; if it is cancelled already, call ``waker`` now.

        ``waker`` must return quickly and must not raise.
        """
        with self._lock:
            if not self._cancelled.is_set():
                self._wakers.append(waker)
                return
        waker()

    def error(self) -> EpochRevoked:
        """Return the error that operations of the groups raise after the cancellation."""
        return EpochRevoked(self.epoch, self.reason)

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the token is cancelled."""
        if self._cancelled.is_set():
            raise self.error()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the token is cancelled; return True.  If ``seconds`` (None: no limit) pass first, return False."""
        return self._cancelled.wait(seconds)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


class KeyValue(Protocol):
    """Methods of ``torch.distributed.Store`` that the members of a group use to find each other."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set, without blocking."""


class Known:
    """Key-value store for values that all members know in advance; it never communicates and never blocks."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def set(self, key: str, value: str) -> None:
        """Do nothing: the other members know the value."""

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def await_key(store: KeyValue, key: str, cancel_token: CancelToken, timeout: float) -> str:
    """Wait until a member has set ``key`` in ``store``; return the value.

    Raises ``EpochRevoked`` when the token is cancelled, and ``TimeoutError`` after ``timeout`` seconds.  The function
    polls the store with growing pauses, since a cancellation could not interrupt a blocking wait of the store.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while not store.check([key]):
        if cancel_token.wait(pause):
            raise cancel_token.error()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no member published {key} within {timeout:g} s")
        pause = min(2 * pause, _LONGEST_PAUSE)
    return store.get(key).decode("utf-8", errors="replace")
