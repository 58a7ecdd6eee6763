"""Transport over two TCP connections: one to the successor, one from the predecessor.

Single-threaded and driven by ``wait``: whoever waits for one message moves the other direction too, so a ring in which
everybody sends before receiving does not lock up.  The payload goes between the tensor's memory and the kernel without
a copy in between; a 16-byte header (tag, length) goes with it and is checked before the payload is believed.

A neighbour's death closes its connections, which ``wait`` sees at once on either of them.  A neighbour that has
finished in order says so first (one byte against the direction of the data), so that its leaving is no death.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque

import torch

from recover_megatron.collectives.epoch import Revocation
from recover_megatron.collectives.errors import CollectiveMismatch, PeerLost
from recover_megatron.collectives.hello import Meeting
from recover_megatron.collectives.rendezvous import KeyValue, await_key
from recover_megatron.collectives.transport import Pending, Transport

_HEADER = struct.Struct("<QQ")
_GOODBYE = b"."
_HANG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP

_open: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


def _close_in_child() -> None:
    """A process forked from a worker (a loader of data) must not keep the worker's connections open after its death."""
    for transport in list(_open):
        transport.forget()


os.register_at_fork(after_in_child=_close_in_child)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor lives."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Message:
    """A message under way; ``parts`` is what is left of header and payload."""

    __slots__ = ("done", "header", "parts", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, tag: int, header: bytearray) -> None:
        self.tensor = tensor
        self.tag = tag
        self.header = header
        self.parts = [memoryview(header), _bytes_of(tensor)]
        self.done = False

    def advance(self, count: int) -> None:
        parts = self.parts
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


class TcpTransport(Transport):
    def __init__(
        self,
        rank: int,
        size: int,
        store: KeyValue,
        revocation: Revocation,
        *,
        secret: bytes,
        ring: str,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        """Meet both neighbours.

        ``host``: the address of this machine that the others can reach; loopback by default.  ``ring``: a name that no
        other ring of the job has (group, epoch).  ``secret``: the job's.  Raises ``EpochRevoked``, ``TimeoutError``,
        ``PeerLost``.
        """
        self._revocation = revocation
        self._sending: deque[_Message] = deque()
        self._receiving: deque[_Message] = deque()
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._successor_left = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._descriptors = threading.Lock()  # abort must not use a descriptor's number after it was closed
        _open.add(self)
        revocation.on_throw(self.abort)
        if size > 1:
            try:
                self._meet(rank, size, store, secret, ring, host, timeout)
            except BaseException:
                self.close()
                raise

    def _meet(
        self, rank: int, size: int, store: KeyValue, secret: bytes, ring: str, host: str, timeout: float
    ) -> None:
        after, before = (rank + 1) % size, (rank - 1) % size
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=128) as listener:
            store.set(f"{ring}/{rank}", f"{host} {listener.getsockname()[1]}")
            address, port = await_key(store, f"{ring}/{after}", self._revocation, timeout).rsplit(" ", 1)
            self._out = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            self._out.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._out.connect((address, int(port)))
            meeting = Meeting(listener, self._revocation, self._wake, secret)
            self._in = meeting.hold(
                self._out, f"{ring} {rank} {after}".encode(), f"{ring} {before} {rank}".encode(), timeout
            )
        for sock in (self._out, self._in):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ---- messages

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        message = _Message(tensor, tag, bytearray(_HEADER.pack(tag, tensor.nbytes)))
        self._sending.append(message)
        self._push()
        return message

    def recv(self, tensor: torch.Tensor, tag: int) -> Pending:
        message = _Message(tensor, tag, bytearray(_HEADER.size))
        self._receiving.append(message)
        return message

    def wait(self, pending: Pending) -> None:
        while True:
            self._revocation.check()
            moved = self._push()
            moved = self._pull() or moved
            if pending.done:
                return
            if not moved:
                self._poll()

    def _push(self) -> bool:
        """Give the kernel what it takes; whether it took anything."""
        moved = False
        while self._sending:
            message = self._sending[0]
            assert self._out is not None
            try:
                count = self._out.sendmsg(message.parts)
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self._lost("successor", error) from error
            moved = True
            message.advance(count)
            if not message.parts:
                message.done = True
                self._sending.popleft()
        return moved

    def _pull(self) -> bool:
        """Take what the kernel has for the first message that is waited for; whether there was anything."""
        if not self._receiving:
            return False
        message = self._receiving[0]
        assert self._in is not None
        try:
            count = self._in.recvmsg_into(message.parts)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost("predecessor", error) from error
        if count == 0:
            raise self._lost("predecessor", None)
        expected = len(message.parts)
        message.advance(count)
        if expected == 2 and len(message.parts) < 2:
            self._check(message)
        if not message.parts:
            message.done = True
            self._receiving.popleft()
        return True

    def _check(self, message: _Message) -> None:
        tag, length = _HEADER.unpack(message.header)
        if (tag, length) != (message.tag, message.tensor.nbytes):
            raise CollectiveMismatch(
                f"the predecessor in the ring sent message {tag:08x} of {length} bytes, this worker waits for message "
                f"{message.tag:08x} of {message.tensor.nbytes} bytes: the members did not issue the same collectives"
            )

    def _poll(self) -> None:
        """Block until something can move."""
        assert self._out is not None
        assert self._in is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._receiving:
            poll.register(self._in, select.POLLIN)
        watched = select.POLLOUT if self._sending else 0
        if not self._successor_left:
            watched |= select.POLLIN | select.POLLRDHUP
        if watched:
            poll.register(self._out, watched)
        for fd, events in poll.poll():
            if fd == self._out.fileno() and events & (select.POLLIN | _HANG_UP):
                self._hear_successor()

    def _hear_successor(self) -> None:
        assert self._out is not None
        try:
            word = self._out.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost("successor", error) from error
        if word != _GOODBYE or self._sending:
            raise self._lost("successor", None)
        self._successor_left = True

    def _lost(self, who: str, error: OSError | None) -> Exception:
        if self._revocation.thrown:
            return self._revocation.error()
        return PeerLost(f"the connection to the {who} in the ring broke" + (f": {error}" if error else ""))

    # ---- the end

    def abort(self) -> None:
        with self._descriptors:
            if self._wake < 0:
                return
            os.eventfd_write(self._wake, 1)
            for sock in (self._out, self._in):
                if sock is not None:
                    with contextlib.suppress(OSError):  # not connected (any more)
                        sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._in is not None and not self._revocation.thrown:
            with contextlib.suppress(OSError):  # the predecessor left first
                self._in.send(_GOODBYE)
        with self._descriptors:
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptors without a word to the neighbours."""
        _open.discard(self)
        for sock in (self._out, self._in):
            if sock is not None:
                sock.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
