"""Shared memory for neighbours on one host: the payload of a message lies in a slot, only its header travels.

The receiver makes the memory (anonymous, sealed against shrinking, gone with its last user) and the sender maps it.  A
slot belongs to the sender while it is free and to the receiver from the header that names it until the byte that gives
it back.  A sender that dies while it writes never sends the header, so half a segment is never seen.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import torch


def machine() -> str:
    """Equal on two processes if one may see the other's descriptors under /proc: same boot, same namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.stat('/proc/self/ns/user').st_ino}"


class SharedMemory:
    """``count`` slots of ``size`` bytes."""

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
