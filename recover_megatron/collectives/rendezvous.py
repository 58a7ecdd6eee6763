"""How the members of a new epoch find each other: a key-value exchange, waited for without losing the revocation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from recover_megatron.collectives.epoch import CancelToken

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
