"""An epoch without a membership, for groups that a test or a check opens."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PlainEpoch:
    """An epoch that its owner ends."""

    def __init__(self, number: int, members: list[int], me: int) -> None:
        self.number = number
        self.members = members
        self.me = me
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[str], None]] = []
        self._reason: str | None = None

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback(self._reason)

    def revoke(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason, callbacks = reason, self._callbacks
        for callback in callbacks:
            callback(reason)
