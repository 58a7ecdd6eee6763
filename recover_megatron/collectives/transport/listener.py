"""Where the predecessor in a ring finds a member: a listening socket and, for one on the same host, shared memory.

A ring listener can be made before the ring is known.  A worker that tells its address with the status with which it
joins an epoch needs no store: with the plan everybody has been told all addresses, and nobody waits for anybody's word.
"""

from __future__ import annotations

import os

from recover_megatron.collectives.transport.shared_memory import SharedMemory, machine
from recover_megatron.network.addresses import listen
from recover_megatron.network.forks import close_in_children, forget

_BACKLOG = 128


class RingListener:
    """``host``: the address of this machine that the others can reach.  ``slots``: their number and bytes, if any."""

    def __init__(self, host: str, slots: tuple[int, int] | None) -> None:
        self.listener, address = listen(host, _BACKLOG)
        self._slots = SharedMemory.make(*slots) if slots else None
        offer = f"{machine()}:{os.getpid()}:{self._slots.descriptor}" if self._slots else "-"
        self.address = f"{address} {offer}"
        """For the predecessor: one line of text."""
        close_in_children(self)

    def take_slots(self) -> SharedMemory | None:
        """The shared memory, which is the caller's from now on."""
        slots, self._slots = self._slots, None
        return slots

    def close_in_child(self) -> None:
        """A process forked from a worker (a loader of data) must not keep the ring listener of a dead worker open."""
        self.close()

    def close(self) -> None:
        """Idempotent."""
        forget(self)
        self.listener.close()
        if (slots := self.take_slots()) is not None:
            slots.close()
