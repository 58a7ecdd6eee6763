"""The interface between a backend group and the library whose algorithms it uses.

    reduce_scatter / all_gather / transfer      enqueue, in one order on all members, without waiting for anything
          |
          '-> Operation --wait--> over and believed: what it wrote may be read
                          '-----> EpochRevoked or PeerLost: it wrote garbage, and so did all later ones

Operations of one member take effect in the order in which they were enqueued: a later one may read what an earlier one
writes before that was waited for.  Only the group's progress thread calls the methods of a backend (``submitted`` is
the exception, see ``Order``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from recover_megatron.collectives.transport.streams import Order

Message = tuple[torch.Tensor, int]
"""A contiguous tensor, and the rank in the group that it goes to or comes from."""


class Operation(Protocol):
    """What was enqueued.  Its tensors belong to the backend until it was waited for, or ``settle`` returned."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise without blocking for long; says nothing of success."""


class NativeBackend(Order, ABC):
    """Enqueued operations of equal parts.  An enqueueing call may raise what ``wait`` raises.

    The tensors of ``reduce_scatter`` and ``all_gather`` are contiguous and of one type.  They do not overlap, or the
    smaller one is exactly the part of the larger one that has this member's number (NCCL's rule for "in place").
    """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """``output``: this member's part of the sum of all ``source``, which have as many equal parts as members."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Operation:
        """``output``: the ``source`` of every member, by rank."""

    @abstractmethod
    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Messages to and from single members, all under way together; at most one each way per pair and transfer.

        Every receive must have its send of the same size and type at the other member, in the same transfer of the
        sequence of operations.  A member without messages hands in an empty transfer, or leaves it out.
        """

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Block the host until ``operation`` is over and believed; called once for each, in their order.

        Raises ``EpochRevoked`` after a revocation, ``PeerLost`` when a member is gone (a backend may also just block
        until the revocation).
        """

    @abstractmethod
    def settle(self) -> None:
        """After an error: return when no operation reads or writes a tensor of the caller's any more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
