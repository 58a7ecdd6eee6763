"""Interface between a group and the membership: epoch, cancel token, errors, key-value stores of a rendezvous.

When a collective raises ``EpochRevoked``, the epoch in which the collective was started is over: the group of that
epoch no longer touches a bucket or a ledger, and sends nothing more.  Every segment of a bucket is either the untouched
local gradient or the finished sum; the bucket's ledger states which.
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
    """The connection to another member broke.  Only this package and layer 2 see it; users see ``EpochRevoked``.

    ``peer``: worker id of the other member, if it is known.  ``unreachable``: True if the network path to the peer
    fails in one direction or both; False if the peer closed the connection.
    """

    def __init__(self, text: str, peer: int | None = None, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.peer = peer
        self.unreachable = unreachable

    def bare(self) -> PeerLost:
        """Return a copy without traceback, whose frames would keep connections and memory of the epoch alive."""
        return PeerLost(str(self), self.peer, unreachable=self.unreachable)


class CollectiveMismatch(RuntimeError):
    """The members of an epoch did not issue the same collectives in the same order: a fault of the calling program.

    It is detected before parts of different collectives are summed.
    """


class LedgerError(ValueError):
    """A ledger is invalid, or contradicts another member's: a fault of the calling program, or a damaged message."""


class Epoch(Protocol):
    """Epoch of the membership, as seen by one member."""

    @property
    def number(self) -> int:
        """Number of the epoch, larger than the number of every earlier epoch."""

    @property
    def members(self) -> Sequence[int]:
        """Worker ids of this column in ring order, equal on all members."""

    @property
    def me(self) -> int:
        """Worker id of this member."""

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` once, from any thread, when the epoch ends; at once if it has ended already."""


class SessionEpoch:
    """Epoch of a worker's membership session, from the plan that ``Session.join`` returned.

    ``column``: members of the plan that form the group, in ring order.
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
        # Register first, check second, so that a concurrent revocation is not missed.
        if self._session.epoch != self.number or self._session.revoked:
            revoked(self.number, "the epoch was over before its group was opened")


class CancelToken:
    """Token that is cancelled once; from then on every operation of the group raises ``EpochRevoked``.

    ``cancel`` may be called from any thread, also while other threads wait: it calls the wakers, which end the waits.
    ``all_heard``: makes all live members cancel their tokens of this epoch, and returns when all have done so; raises a
    ``MembershipError`` if this member is out of the run, and so cannot learn that.  The session's thread must not
    call it.  ``in_touch``: returns when the coordinator has confirmed that this member was live at the time of the call
    or later; it may raise ``EpochRevoked``.
    """

    def __init__(
        self, epoch: int, all_heard: Callable[[], None] = lambda: None, in_touch: Callable[[], None] = lambda: None
    ) -> None:
        self.epoch = epoch
        self.all_heard = all_heard
        self.in_touch = in_touch
        self.reason = ""
        self.lost: PeerLost | None = None
        """Failed connection that cancelled the token; None if another reason, such as the coordinator, cancelled it."""
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self, reason: str | PeerLost) -> None:
        """Cancel the token and call the wakers.  Later calls have no effect: the first reason is kept."""
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
        """Call ``waker`` when the token is cancelled, or now if it is.  ``waker`` must be quick and must not raise."""
        with self._lock:
            if not self._cancelled.is_set():
                self._wakers.append(waker)
                return
        waker()

    def error(self) -> EpochRevoked:
        """Return the error that the operations of the cancelled group raise."""
        return EpochRevoked(self.epoch, self.reason)

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the token is cancelled."""
        if self._cancelled.is_set():
            raise self.error()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the token is cancelled, and return True; return False if ``seconds`` pass first."""
        return self._cancelled.wait(seconds)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


class KeyValue(Protocol):
    """Subset of ``torch.distributed.Store`` that a rendezvous needs; any shared key-value service can provide it."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set; must not block."""


class Known:
    """Key-value store for values that all members know already, so that nothing is published and nothing blocks."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def set(self, key: str, value: str) -> None:
        """Do nothing: the other members know the value."""

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def await_key(store: KeyValue, key: str, cancel_token: CancelToken, timeout: float) -> str:
    """Wait until a member has set ``key``; return the value.

    Raises ``EpochRevoked`` when the token is cancelled and ``TimeoutError`` after ``timeout`` seconds.  The store is
    polled with growing pauses, since a wait inside a store cannot be interrupted.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while not store.check([key]):
        if cancel_token.wait(pause):
            raise cancel_token.error()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no member published {key} within {timeout:g} s")
        pause = min(2 * pause, _LONGEST_PAUSE)
    return store.get(key).decode("utf-8", errors="replace")
