"""A tree of connections among the members of a group: one to the parent, at most ``FAN`` to children.

                     0                n members have n - 1 connections, nobody more than FAN + 1
        .--------.---'---.--------.   and nobody is farther from another than twice log n;
        1        2       3        4   gloo's groups have n (n - 1) / 2
     .--'--.    ...
     5 6 7 8

    open   a member connects to its parent's peer store (`network.peer_store`) and takes its children's connections from
           its own: the addresses come with the plan, so nothing is asked of a store
    up     every member tells its parent what it and all below it have
    down   the first member's word goes to all

A member's death closes its connections: its parent and its children raise ``PeerLost``, and all others are woken by the
revocation that follows.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from recover_megatron.collectives.epoch import CancelToken, CollectiveMismatch, PeerLost
from recover_megatron.network.connection import Unreachable, is_of_the_road
from recover_megatron.network.system import close_in_children, forget, watch

FAN = 8
"""Children of a member: a hop costs more than a connection."""
_HEADER = struct.Struct("<IQ")


class Network(Protocol):
    """How members reach each other."""

    def connect(self, member: int, name: str, patience: Callable[[], None]) -> socket.socket:
        """A connection of this name to the member of this rank.  Raises ``Unreachable``."""

    def take(self, name: str, patience: Callable[[], None]) -> socket.socket:
        """The connection of this name that somebody has made to this worker."""

    def forget(self, name: str) -> None:
        """It will not be taken any more."""


def parents(size: int) -> list[int]:
    """By rank: that of the parent; -1 for the first."""
    return [-1, *((rank - 1) // FAN for rank in range(1, size))]


class Tree:
    """This worker's place in a tree; ``rank``: its own; ``members``: by rank, as the epoch names them."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        network: Network,
        cancel_token: CancelToken,
        *,
        name: str,
        timeout: float = 60.0,
    ) -> None:
        """``name``: of this group and epoch, the same on all members.

        Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``.
        """
        self.rank, self.size = rank, len(members)
        self._cancel_token = cancel_token
        self._members, self._network, self._name = members, network, name
        self._sockets: dict[int, socket.socket] = {}
        self._closing = threading.Lock()
        self._number = 0
        above = parents(self.size)
        self.parent = above[rank] if rank else None
        self.children = [member for member in range(self.size) if above[member] == rank]
        self._deadline = time.monotonic() + timeout
        close_in_children(self)
        cancel_token.on_cancel(self.abort)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if self.parent is not None:
            try:
                sock = self._network.connect(self.parent, f"{self._name}/{self.rank}", self._patience)
            except Unreachable as error:
                self._cancel_token.check()
                raise PeerLost(str(error), self._members[self.parent], road=error.road) from error
            self._keep(self.parent, sock)
        for child in self.children:
            self._keep(child, self._network.take(f"{self._name}/{child}", self._patience))
        self._cancel_token.check()

    def _patience(self) -> None:
        self._cancel_token.check()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not all members of {self._name} came in time")

    def _keep(self, member: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch(sock)
        with self._closing:
            self._sockets[member] = sock
        if self._cancel_token.cancelled:  # it may have been aborted before it was kept
            self.abort()

    # ---- messages

    def begin(self, what: str) -> None:
        """The next operation: all members must begin the same ones in the same order."""
        self._number += 1
        self._what, self._tag = what, zlib.crc32(f"{what} {self._number}".encode())

    def send(self, member: int, data: bytes | bytearray | memoryview) -> None:
        """To the parent or a child.  Raises ``EpochRevoked``, ``PeerLost``."""
        try:
            self._sockets[member].sendall(_HEADER.pack(self._tag, len(data)))
            self._sockets[member].sendall(data)
        except OSError as error:
            raise self._lost(member, error) from error

    def receive(self, member: int) -> bytearray:
        """From the parent or a child; as ``send``, and ``CollectiveMismatch``."""
        tag, length = _HEADER.unpack(self._exactly(member, _HEADER.size))
        if tag != self._tag:
            raise CollectiveMismatch(
                f"member {member} of {self._name} is in another operation than {self._what}, number {self._number}: "
                "the members did not issue the same ones"
            )
        return self._exactly(member, length)

    def _exactly(self, member: int, size: int) -> bytearray:
        found, got = bytearray(size), 0
        view = memoryview(found)
        while got < size:
            try:
                came = self._sockets[member].recv_into(view[got:])
            except OSError as error:
                raise self._lost(member, error) from error
            if not came:
                raise self._lost(member, None)
            got += came
        return found

    def _lost(self, member: int, error: OSError | None) -> PeerLost:
        self._cancel_token.check()
        what = str(error or "it closed the connection")
        return PeerLost(f"member {member} of {self._name}: {what}", self._members[member], road=is_of_the_road(error))

    # ---- the end

    def abort(self) -> None:
        """Wake whoever waits in ``send`` and ``receive``, here and at the other ends; from any thread."""
        with self._closing:
            for sock in self._sockets.values():
                with contextlib.suppress(OSError):  # the other end was faster
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent.  What was sent arrives."""
        forget(self)
        with self._closing:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()
        for child in self.children:
            self._network.forget(f"{self._name}/{child}")

    def close_in_child(self) -> None:
        """A forked process must not keep the connections of a worker open."""
        for sock in self._sockets.values():
            sock.close()
