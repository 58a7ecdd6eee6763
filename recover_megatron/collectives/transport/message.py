"""One message of the tcp transport: its header, its payload, what of them is still to be moved; and its shared memory.

header (16 bytes): tag | slot (IN_LINE: the payload follows) | bytes of the payload

Between neighbours on one host the payload lies in a slot of shared memory, and only the header travels.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

import torch

from recover_megatron.collectives.epoch import CollectiveMismatch
from recover_megatron.collectives.state_transport import memory_of

IN_LINE = -1
"""Slot number of a message whose payload follows."""
_HEADER = struct.Struct("<IiQ")
_NOTHING = torch.empty(0)


class Message:
    """A message under way; ``parts`` is what is left of it to be moved through the connection."""

    __slots__ = ("done", "dtype", "header", "numel", "own", "parts", "slot", "tag", "tensor")

    def __init__(self, tag: int, numel: int, dtype: torch.dtype) -> None:
        self.tag = tag
        self.numel = numel
        self.dtype = dtype
        self.header = bytearray(_HEADER.size)
        self.tensor = _NOTHING
        self.own: torch.Tensor | None = None
        self.slot = IN_LINE
        self.parts = [memoryview(self.header)]
        self.done = False

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return self.numel * self.dtype.itemsize

    def write_header(self, slot: int) -> None:
        """For the receiver: the payload lies in its slot ``slot``, or follows (``IN_LINE``)."""
        _HEADER.pack_into(self.header, 0, self.tag, slot, self.nbytes)

    def read_header(self) -> int:
        """The slot that a header which has arrived names.

        Raises ``CollectiveMismatch`` if it is the header of another message than the one that is waited for.
        """
        tag, slot, length = _HEADER.unpack(self.header)
        if (tag, length) != (self.tag, self.nbytes):
            raise CollectiveMismatch(
                f"the predecessor in the ring sent message {tag:08x} of {length} bytes, this worker waits for message "
                f"{self.tag:08x} of {self.nbytes} bytes: the members did not issue the same collectives"
            )
        return int(slot)

    def add_payload(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor``, contiguous on the CPU, goes through the connection, too; it must live as long."""
        self.parts.append(memory_of(tensor))

    def advance(self, count: int) -> None:
        """So many bytes of it were moved."""
        parts = self.parts
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]

    def forget(self) -> None:
        """Nobody reads the tensor any more."""
        self.tensor = _NOTHING


def machine() -> str:
    """Equal on two processes if one may see the other's descriptors under /proc: same boot, same namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.stat('/proc/self/ns/user').st_ino}"


class SharedMemory:
    """``count`` slots of ``size`` bytes, shared by two neighbours on one host.

    The receiver makes the memory (anonymous, sealed against shrinking, gone with its last user) and the sender maps it.
    A slot belongs to the sender while it is free and to the receiver from the header that names it until the byte that
    gives it back.  A sender that dies while it writes never sends the header, so half a segment is never seen.
    """

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.descriptor = descriptor
        self.count = count
        self._size = size
        self._memory = torch.frombuffer(mmap.mmap(descriptor, count * size), dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @classmethod
    def make(cls, count: int, size: int) -> SharedMemory:
        """New memory."""
        descriptor = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, count * size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor, count, size)

    @classmethod
    def open(cls, pid: int, descriptor: int, count: int, size: int) -> SharedMemory | None:
        """The memory that process ``pid`` of this machine made; None if the system does not let us."""
        try:
            mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        try:
            if fcntl.fcntl(mine, fcntl.F_GET_SEALS) & seals != seals or os.fstat(mine).st_size != count * size:
                raise OSError("not the memory of a ring")
        except OSError:
            os.close(mine)
            return None
        return cls(mine, count, size)

    def view(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``numel`` elements of a slot."""
        key = slot, numel, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 256:
                self._views.clear()
            start = slot * self._size
            view = self._views[key] = self._memory[start : start + numel * dtype.itemsize].view(dtype)
        return view

    def close(self) -> None:
        """Give back; the memory itself goes when the last tensor on it does."""
        os.close(self.descriptor)
        self._views.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
