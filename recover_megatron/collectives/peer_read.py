"""Ask another worker for bytes that it holds, in no epoch and without meeting it: its store's thread answers.

For whoever cannot go on without something that others have and cannot meet them now: see ``instep.overlap``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recover_megatron.collectives.errors import PeerLost
from recover_megatron.network.client import Connection, Unreachable
from recover_megatron.network.peer_store import MOST_BYTES, PURPOSE
from recover_megatron.network.proof import Challenge


class Fetcher:
    """A connection to the peer store at ``address``.

    ``patience``: as that of ``network.client.Connection``.  Raises ``PeerLost`` if the other side cannot be reached,
    hangs up, or does not know the run's secret.
    """

    def __init__(self, address: str, secret: bytes, patience: Callable[[], None]) -> None:
        self._address = address
        try:
            self._connection = Connection(address, Challenge(secret, PURPOSE), patience)
        except Unreachable as error:
            raise self._lost(error, road=error.road) from error

    def fetch(self, what: Sequence[int]) -> bytes | None:
        """What the other side's ``source`` gives for these numbers: at most ``MOST_BYTES``; None: nothing."""
        try:
            self._connection.send({"fetch": list(what)})
            size = int(self._connection.receive()["bytes"])
            if size > MOST_BYTES:
                raise self._lost(f"it announces {size} bytes, the limit is {MOST_BYTES}")
            return None if size < 0 else self._connection.receive_bytes(size)
        except Unreachable as error:
            raise self._lost(error, road=error.road) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _lost(self, why: object, *, road: bool = False) -> PeerLost:
        return PeerLost(f"the peer store at {self._address} does not answer: {why}", road=road)
