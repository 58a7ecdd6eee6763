"""What the ring needs to know of the membership, and the switch that ends a group.

``Epoch`` is the interface: anything that tells its number, its members and its end will do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.membership.records import Plan
from recover_megatron.membership.session import Session


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
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
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
            if isinstance(reason, PeerLost):  # without its frames, which keep connections and memory of the epoch alive
                self.lost = PeerLost(self.reason, reason.peer, road=reason.road)
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
        return EpochRevoked(self.epoch, self.reason)

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the token is cancelled."""
        if self._cancelled.is_set():
            raise self.error()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the token is cancelled; False when ``seconds`` passed first."""
        return self._cancelled.wait(seconds)
