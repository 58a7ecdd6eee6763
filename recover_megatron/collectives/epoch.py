"""What a group needs to know of the membership: its epoch, the switch that ends it, its errors, how its members meet.

When a collective raises ``EpochRevoked`` the epoch in which it was started is over: nothing of that epoch's group
touches a bucket or a ledger any more, and no byte of it leaves this worker.  Every segment is either the untouched
local gradient or the finished sum, as its ledger says.
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
    """The connection to another member broke.  Inside this package and the next only: callers see ``EpochRevoked``.

    ``peer``: the other member, as the epoch names its members, where it is known.  ``road``: not that it hung up:
    nothing gets there, or nothing comes back.
    """

    def __init__(self, text: str, peer: int | None = None, *, road: bool = False) -> None:
        super().__init__(text)
        self.peer = peer
        self.road = road

    def bare(self) -> PeerLost:
        """The same without its frames, which keep connections and memory of the epoch alive."""
        return PeerLost(str(self), self.peer, road=self.road)


class CollectiveMismatch(RuntimeError):
    """The members of an epoch did not issue the same collectives in the same order: a fault of the calling program.

    No sum was formed of what does not belong together.
    """


class LedgerError(ValueError):
    """Ledgers contradict each other or themselves: a fault of the calling program, or a damaged message."""


class Epoch(Protocol):
    """One generation of the membership, as seen by one of its members."""

    @property
    def number(self) -> int:
        """Larger than that of every earlier epoch."""

    @property
    def members(self) -> Sequence[int]:
        """Worker ids of this column, in ring order: the same on every member."""

    @property
    def me(self) -> int:
        """My worker id."""

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` once, from any thread, as soon as the epoch is over; at once if it is already."""


class SessionEpoch:
    """The epoch of a worker's membership session, from the plan that ``Session.join`` returned.

    ``column``: those of the plan's members that are in the group, in ring order.
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
        # Registered first, looked at second: whichever way a revoke races this, it is seen.
        if self._session.epoch != self.number or self._session.revoked:
            revoked(self.number, "the epoch was over before its group was opened")


class CancelToken:
    """A switch cancelled once: from then on every operation of the group raises ``EpochRevoked``.

    ``cancel`` may be called from any thread, also while others wait: it calls the wakers, which end their waits.
    ``all_heard``: returns when the switches of all members that live are cancelled, and has them be; it raises a
    ``MembershipError`` where this member is out of the run, and will never know.  Not for the session's thread.
    ``in_touch``: returns when the run counts on this member, or did when it was called; raises ``EpochRevoked``, too.
    """

    def __init__(
        self, epoch: int, all_heard: Callable[[], None] = lambda: None, in_touch: Callable[[], None] = lambda: None
    ) -> None:
        self.epoch = epoch
        self.all_heard = all_heard
        self.in_touch = in_touch
        self.reason = ""
        self.lost: PeerLost | None = None
        """With whom it failed, where this member noticed that itself and first."""
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self, reason: str | PeerLost) -> None:
        """End the group; the first reason stands."""
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
        """``waker`` must be quick and must not raise; it is called at once if the switch is already cancelled."""
        with self._lock:
            if not self._cancelled.is_set():
                self._wakers.append(waker)
                return
        waker()

    def error(self) -> EpochRevoked:
        """What the operations of the cancelled group raise."""
        return EpochRevoked(self.epoch, self.reason)

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the token is cancelled."""
        if self._cancelled.is_set():
            raise self.error()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the token is cancelled; False when ``seconds`` passed first."""
        return self._cancelled.wait(seconds)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


class KeyValue(Protocol):
    """The part of ``torch.distributed.Store`` that is needed; any shared key-value service will do."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set; must not block."""


class Known:
    """What everybody was told already: nothing has to be published, nothing is waited for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def set(self, key: str, value: str) -> None:
        """The others know it."""

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def await_key(store: KeyValue, key: str, cancel_token: CancelToken, timeout: float) -> str:
    """The value of ``key`` as soon as somebody sets it.

    Raises ``EpochRevoked`` when the token is cancelled and ``TimeoutError`` after ``timeout`` seconds.  The store is
    asked again and again with growing pauses: a wait inside a store can't be ended from outside.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while not store.check([key]):
        if cancel_token.wait(pause):
            raise cancel_token.error()
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody published {key} within {timeout:g} s")
        pause = min(2 * pause, _LONGEST_PAUSE)
    return store.get(key).decode("utf-8", errors="replace")
