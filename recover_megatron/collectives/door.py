"""Where the predecessor in a ring finds a member: a listening socket and, for one on the same host, shared memory.

A door can be made before the ring is known.  A worker that tells its address with the status with which it joins an
epoch needs no store: with the plan everybody has been told all addresses, and nobody waits for anybody's word.
"""

from __future__ import annotations

import os
import socket
import weakref

from recover_megatron.collectives.slots import Slots, machine

_BACKLOG = 128

_open: weakref.WeakSet[Door] = weakref.WeakSet()


def _close_in_child() -> None:
    """A process forked from a worker (a loader of data) must not keep the door of a dead worker open."""
    for door in list(_open):
        door.close()


os.register_at_fork(after_in_child=_close_in_child)


class Door:
    """``host``: the address of this machine that the others can reach.  ``slots``: their number and bytes, if any."""

    def __init__(self, host: str, slots: tuple[int, int] | None) -> None:
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._slots = Slots.make(*slots) if slots else None
        offer = f"{machine()}:{os.getpid()}:{self._slots.descriptor}" if self._slots else "-"
        self.address = f"{host} {self.listener.getsockname()[1]} {offer}"
        """For the predecessor: one line of text."""
        _open.add(self)

    def take_slots(self) -> Slots | None:
        """The shared memory, which is the caller's from now on."""
        slots, self._slots = self._slots, None
        return slots

    def close(self) -> None:
        """Idempotent."""
        _open.discard(self)
        self.listener.close()
        if (slots := self.take_slots()) is not None:
            slots.close()


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
