"""The groups inside a replica: torch's own, untouched, but for one thing: they can be ended from another thread.

A worker whose replica broke may wait in one of them for somebody who waits for somebody who is dead.  NCCL has an
abort; gloo has none, but wakes when the connections of a group are shut, so the connections are noted when it is made.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist


def _connections() -> dict[int, tuple[int, ...]]:
    """The TCP sockets of this process: descriptor -> identity (device, inode)."""
    found: dict[int, tuple[int, ...]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                status = os.stat(int(name))
                found[int(name)] = (status.st_dev, status.st_ino)
    return found


class InsideGroups:
    """Notes the groups of one worker's replica as they are made, and ends them all.

    ``store_port``: connections from or to it are the store's, which other workers need, and are left alone.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._nccl: list[dist.ProcessGroup] = []
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._ended = False

    def make(self, create: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
        """Make a group with ``create`` and note it.

        Called at start-up, while no other thread opens connections that last (those to the coordinator and to the
        store are open before).
        """
        before = set(_connections().values())
        group = create()
        if group is None:  # the default one
            group = dist.distributed_c10d._get_default_group()
        if dist.get_backend(group) == "nccl":
            self._nccl.append(group)
            return group
        for descriptor, identity in _connections().items():
            if identity not in before:
                self._note(descriptor)
        return group

    def _note(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            sock = socket.socket(fileno=os.dup(descriptor))
            try:
                # A listener must not be shut: gloo ends the process when its listener fails.
                listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ports = {sock.getsockname()[1], sock.getpeername()[1]}
            except (OSError, IndexError, TypeError):  # not connected, or not TCP
                listening, ports = 1, set()
            if listening or self._store_port in ports or sock.family not in (socket.AF_INET, socket.AF_INET6):
                sock.close()
            else:
                self._sockets.append(sock)

    def end(self) -> None:
        """Make every operation of these groups fail, here and, for gloo, at the other ends; from any thread, once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # the other end was faster
                sock.shutdown(socket.SHUT_RDWR)
        for group in self._nccl:
            threading.Thread(target=group.abort, name="ending a group of a broken replica", daemon=True).start()
