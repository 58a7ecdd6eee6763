"""Operations of gloo's inside a replica, waited for in a way that can be left.

A worker of a broken replica is woken by shutting the replica's connections. gloo does not always pass that on, and
then its wait never returns (why: ``collectives.gloo.abort``).

    collective   the wait is cut in pieces: it begins again as long as the replica is whole
    message      can't be waited for in pieces (a time that runs out shuts gloo's connections): a thread waits, and is
                 left behind

What is left behind holds its tensors, and its connections are shut.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.collectives.gloo.abort import Waiter

POLL = timedelta(seconds=0.25)
"""How long a worker of a broken replica may go on waiting for a collective."""

_MESSAGES = ("send", "recv", "recv_anysource")


class AbortableWorks:
    """For the groups of one replica: ``cancel_token`` is cancelled when it is broken, and its connections have been
    shut.
    """

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self._waiter = Waiter(cancel_token)

    def method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, a method of a gloo group, with a work that can be left."""
        wait = self._wait_for_message if name in _MESSAGES else self._wait_for_collective

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            return AbortableWork(result, wait) if isinstance(result, dist.Work) else result

        return guarded

    def _wait_for_message(self, work: Any) -> bool:
        try:
            self._waiter.wait(work)
        except EpochRevoked as over:
            raise _left() from over
        return True

    def _wait_for_collective(self, work: Any) -> bool:
        while True:
            try:
                return bool(work.wait(POLL))
            except RuntimeError:
                if work.is_completed():
                    return bool(work.wait())  # or raises gloo's own error
                if self.cancel_token.cancelled:
                    raise _left() from None


def _left() -> dist.DistBackendError:
    return dist.DistBackendError("an operation of a broken replica, of whose end gloo has not told, was left")


class AbortableWork(dist.Work):
    """A work of gloo's with another way to wait for it."""

    def __init__(self, work: Any, wait: Callable[[Any], bool]) -> None:
        super().__init__()
        self._work = work
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; raises ``RuntimeError`` as gloo does, and ``DistBackendError`` when it is left.

        ``timeout``: for a caller's own; then gloo's own way is taken.
        """
        return self._wait(self._work) if timeout is None else bool(self._work.wait(timeout))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()
