"""The interface between the ring and whatever carries its messages.

A transport joins one member to its two neighbours of one epoch: it sends to the successor and receives from the
predecessor, each in order.  It is made for one epoch and cancelled away with it; nothing of it is used again.

    open  --close()-->  closed
      '---abort(), from any thread-->  aborted --close()--> closed

Only the group's progress thread calls ``send``, ``recv``, ``release``, ``wait`` and ``settle``; ``abort`` may come from
any thread at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from recover_megatron.collectives.transport.streams import Order


class Pending(Protocol):
    """A message under way; the tensor given belongs to the transport until ``done``."""

    @property
    def done(self) -> bool:
        """Whether the tensor may be used again (sent: reused; received: read)."""


class Arrival(Pending, Protocol):
    """A message being received."""

    @property
    def tensor(self) -> torch.Tensor:
        """What arrived, once ``done``; the ring may write to it, until it gives it back with ``release``."""


class Transport(Order, ABC):
    lookahead: int = 1
    """How many receives are worth posting ahead of the one that is waited for."""

    @property
    @abstractmethod
    def scratch_peak(self) -> int:
        """The most bytes of memory that arriving segments ever took."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Begin to send a contiguous tensor to the successor.  ``tag`` (31 bits) must be what the receiver names."""

    @abstractmethod
    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        """Begin to receive ``numel`` elements from the predecessor, into memory of the transport's own."""

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """Nothing reads ``arrival.tensor`` any more."""

    @abstractmethod
    def wait(self, pending: Pending) -> None:
        """Block until ``pending`` is done.

        Raises ``PeerLost`` when a neighbour is gone (a transport may also just hang then), ``EpochRevoked`` after
        ``abort``, ``CollectiveMismatch`` when what arrives is not what was asked for.
        """

    @abstractmethod
    def abort(self) -> None:
        """Wake whoever is in ``wait``.  When ``settle`` has returned after it, not one more byte is sent."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; after this the neighbours may be gone too."""

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from within ``wait`` whenever sends may have finished.

        A transport whose receive memory is limited must: a partial sum that has been sent gives its memory back there,
        and without that the predecessor could not send what ``wait`` is waiting for.
        """

    def settle(self) -> None:
        """Called after an error: block until nothing of this transport reads, writes or sends a tensor any more."""
        return None
