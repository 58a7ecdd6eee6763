"""What can end a collective other than its result.

``EpochRevoked`` is that of the membership: the epoch in which the collective was started is over.  When a collective
raises it, nothing of that epoch's group touches a bucket or a ledger any more, and no byte of it leaves this worker:
every segment is either the untouched local gradient or the finished sum, as its ledger says.
"""

from __future__ import annotations

from recover_megatron.membership.errors import EpochRevoked
from recover_megatron.network.client import is_of_the_road

__all__ = ["CollectiveMismatch", "EpochRevoked", "LedgerError", "PeerLost", "is_of_the_road"]


class PeerLost(ConnectionError):
    """The connection to another member broke.  Inside this package and the next only: callers see ``EpochRevoked``.

    ``peer``: the other member, as the epoch names its members, where it is known.  ``road``: not that it hung up:
    nothing gets there, or nothing comes back.
    """

    def __init__(self, text: str, peer: int | None = None, *, road: bool = False) -> None:
        super().__init__(text)
        self.peer = peer
        self.road = road


class CollectiveMismatch(RuntimeError):
    """The members of an epoch did not issue the same collectives in the same order: a fault of the calling program.

    No sum was formed of what does not belong together.
    """


class LedgerError(ValueError):
    """Ledgers contradict each other or themselves: a fault of the calling program, or a damaged message."""
