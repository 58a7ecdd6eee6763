"""One message of the tcp transport: its header, its payload, and what of them is still to be moved.

header (16 bytes): tag | slot (IN_LINE: the payload follows) | bytes of the payload
"""

from __future__ import annotations

import ctypes
import struct

import torch

from recover_megatron.collectives.errors import CollectiveMismatch

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
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        self.parts.append(memoryview(memory).cast("B"))

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
