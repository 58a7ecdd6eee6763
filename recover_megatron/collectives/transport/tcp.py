"""Transport of a ring over two TCP connections: one to the successor, one from the predecessor.

One thread drives the transport: ``send`` sends only what the kernel accepts at once, and ``wait`` transfers the rest.
A wait for one message also transfers bytes of the other connection, so a ring in which all members send before they
receive does not deadlock.

                  +---------------------------------------------------------------------------+
    member r      |-- mode (1 byte), then messages: header (tag, slot, length) [ payload ] -->|   member r + 1
                  |<-- single bytes: number of a slot that is free again, or GOODBYE ---------|
                  +---------------------------------------------------------------------------+

    mode INLINE: the payload follows the header; it is sent from, and received into, the tensor's memory
    mode SHARED: the payload is in a slot of shared memory, for neighbours on one host (``SharedMemory``)
    GOODBYE:     the successor closes the connection, but is not dead

The header is checked before its payload is used.  If a neighbour dies, its connection closes, and ``wait`` raises
``PeerLost`` at once, even if it is waiting for the other neighbour.  (It notices the death of the predecessor only
while a receive is posted.)
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from recover_megatron.collectives.epoch import CancelToken, CollectiveMismatch, KeyValue, PeerLost, await_key
from recover_megatron.collectives.state.transport import memory_of
from recover_megatron.collectives.transport.handshake import Handshake, RingListener, SharedMemory, machine
from recover_megatron.collectives.transport.interface import Arrival, Pending, Scratch, Transport
from recover_megatron.network.connection import family_of, is_path_error
from recover_megatron.network.system import SECONDS, close_in_children, forget, is_silent, watch

_INLINE, _SHARED = b"i", b"s"
_GOODBYE = 255
_FROM_SUCCESSOR = select.POLLIN | select.POLLRDHUP
_FROM_SUCCESSOR_OR_END = _FROM_SUCCESSOR | select.POLLHUP | select.POLLERR | select.POLLNVAL
_WORTH_WAKING = 128 << 10
"""Maximum number of payload bytes that accumulate in the kernel before it wakes the thread that waits for them."""
IN_LINE = -1
"""Slot number in the header of a message whose payload follows the header."""
_HEADER = struct.Struct("<IiQ")
_NOTHING = torch.empty(0)


class Message:
    """Message in flight; ``parts``: pieces of memory whose bytes must still be sent or received."""

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
        return self.numel * self.dtype.itemsize

    def write_header(self, slot: int) -> None:
        """Write the message's header; ``slot``: slot of the payload, ``IN_LINE`` if the payload follows the header."""
        _HEADER.pack_into(self.header, 0, self.tag, slot, self.nbytes)

    def read_header(self) -> int:
        """Return the slot number in the received header.

        Raises ``CollectiveMismatch`` if the tag or the length in the header is not the expected one.
        """
        tag, slot, length = _HEADER.unpack(self.header)
        if (tag, length) != (self.tag, self.nbytes):
            raise CollectiveMismatch(
                f"the predecessor in the ring sent message {tag:08x} of {length} bytes, this worker expects message "
                f"{self.tag:08x} of {self.nbytes} bytes: the members did not issue the same collectives"
            )
        return int(slot)

    def add_payload(self, tensor: torch.Tensor) -> None:
        """Append the memory of ``tensor`` (on the CPU, contiguous) as payload.

        The caller must keep the tensor alive until ``done`` is True.
        """
        self.parts.append(memory_of(tensor))

    def advance(self, count: int) -> None:
        parts = self.parts
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]

    def forget(self) -> None:
        """Drop the reference to the tensor of a finished message."""
        self.tensor = _NOTHING


class TcpTransport(Transport):
    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        store: KeyValue,
        cancel_token: CancelToken,
        *,
        secret: bytes,
        ring: str,
        slots: tuple[int, int] | None,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        ring_listener: RingListener | None = None,
    ) -> None:
        """Connect to both neighbours.  ``rank``: rank of this worker.  ``members``: worker ids by rank.

        ``ring``: name of the ring, unique in the job; prefix of its keys in ``store``.  ``host``, ``slots``: as for
        ``RingListener``; ``slots`` must be equal on all members.  ``ring_listener``: listener with this ``host`` and
        ``slots``, closed when both neighbours are connected; None: a new one is opened.  ``timeout``: time
        limit in seconds.

        Raises ``EpochRevoked``, ``TimeoutError``, ``PeerLost``.
        """
        self._cancel_token = cancel_token
        self._sent: Callable[[], None] = lambda: None
        self._scratch = Scratch(torch.device("cpu"))
        self._sending: deque[Message] = deque()
        self._receiving: deque[Message] = deque()
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._remote: SharedMemory | None = None
        self._free: list[int] = []
        self._local: SharedMemory | None = None
        self._mode = b""
        self._longest_shared = 0
        self._successor_left = False
        self._low_water = 1
        self._watched_in = self._watched_out = 0
        size = len(members)
        self._neighbours = {"successor": members[(rank + 1) % size], "predecessor": members[(rank - 1) % size]}
        self._descriptors = threading.Lock()  # because ``abort`` must not use descriptors that ``close`` has closed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        close_in_children(self)
        cancel_token.on_cancel(self.abort)
        if size > 1:
            try:
                self._meet(rank, size, store, secret, ring, slots, ring_listener or RingListener(host, slots), timeout)
            except BaseException:
                self.close()
                raise

    def _meet(
        self,
        rank: int,
        size: int,
        store: KeyValue,
        secret: bytes,
        ring: str,
        slots: tuple[int, int] | None,
        ring_listener: RingListener,
        timeout: float,
    ) -> None:
        after, before = (rank + 1) % size, (rank - 1) % size
        here = machine() if slots else ""
        with contextlib.closing(ring_listener):
            self._local = ring_listener.take_slots()
            store.set(f"{ring}/{rank}", ring_listener.address)
            address, port, offer = await_key(store, f"{ring}/{after}", self._cancel_token, timeout).split(" ")
            self._out = socket.socket(family_of(address), socket.SOCK_STREAM)
            self._out.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    self._out.connect((address, int(port)))
                except BlockingIOError:
                    raise
                except OSError as error:  # the kernel knows that the host is down or unreachable
                    raise self._lost("successor", error, connecting=True) from error
            meeting = Handshake(ring_listener.listener, self._cancel_token, self._wake, secret)
            try:
                self._in = meeting.hold(
                    self._out, f"{ring} {rank} {after}".encode(), f"{ring} {before} {rank}".encode(), timeout
                )
            except PeerLost as lost:
                lost.peer = self._neighbours["successor"]
                raise
        for sock in (self._out, self._in):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch(sock)
        if slots and offer.startswith(here + ":"):
            pid, descriptor = offer.rsplit(":", 2)[1:]
            self._remote = SharedMemory.open(int(pid), int(descriptor), *slots)
            self._free = list(range(slots[0])) if self._remote else []
        try:
            self._out.send(_SHARED if self._remote else _INLINE)
        except OSError as error:  # this member has aborted, or the successor has closed the connection
            raise self._lost("successor", error) from error

    @property
    def scratch_peak(self) -> int:
        shared = self._local.count * self._longest_shared if self._local else 0
        return self._scratch.peak + shared

    # ---- messages

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        message = Message(tag, tensor.numel(), tensor.dtype)
        message.tensor = tensor
        if self._remote is None:
            message.write_header(IN_LINE)
            message.add_payload(tensor)
        self._sending.append(message)
        self._push()
        return message

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        message = Message(tag, numel, dtype)
        self._receiving.append(message)
        return message

    def on_sent(self, callback: Callable[[], None]) -> None:
        self._sent = callback

    def release(self, arrival: Arrival) -> None:
        assert isinstance(arrival, Message)
        if arrival.own is not None:
            self._scratch.give(arrival.own)
        else:
            assert self._in is not None
            with contextlib.suppress(OSError):  # a dead predecessor needs no slot; the next receive raises the error
                self._in.send(bytes((arrival.slot,)))
        arrival.forget()

    def wait(self, pending: Pending) -> None:
        while True:
            self._cancel_token.check()
            moved = self._push()
            if moved:
                self._sent()
            moved = self._pull() or moved
            if pending.done:
                return
            if not moved:
                self._poll()

    def _push(self) -> bool:
        """Send as many bytes as the kernel accepts without blocking; return whether the kernel accepted any byte."""
        moved = False
        while self._sending:
            message = self._sending[0]
            if self._remote is not None and message.slot == IN_LINE and not self._place(message):
                return moved
            parts = message.parts
            assert self._out is not None
            try:
                count = self._out.send(parts[0]) if len(parts) == 1 else self._out.sendmsg(parts)
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self._lost("successor", error) from error
            moved = True
            message.advance(count)
            if not parts:
                message.done = True
                self._sending.popleft()
        return moved

    def _place(self, message: Message) -> bool:
        """Copy the payload to a free slot of shared memory and write the header; return False if no slot is free."""
        assert self._remote is not None
        if not self._free:
            self._read_successor()
            if not self._free:
                return False
        message.slot = self._free.pop()
        self._remote.view(message.slot, message.numel, message.dtype).copy_(message.tensor)
        message.write_header(message.slot)
        return True

    def _pull(self) -> bool:
        """Receive the available bytes of the oldest unfinished message; return whether any bytes were available."""
        if not self._receiving:
            return False
        message = self._receiving[0]
        assert self._in is not None
        try:
            if not self._mode:
                return self._learn_mode()
            parts = message.parts
            if message.own is None and self._mode == _INLINE:
                message.own = message.tensor = self._scratch.take(message.numel, message.dtype)
                message.add_payload(message.own)
            count = self._in.recv_into(parts[0]) if len(parts) == 1 else self._in.recvmsg_into(parts)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost("predecessor", error) from error
        if count == 0:
            raise self._lost("predecessor", None)
        at_once = len(parts) == 2 or self._mode == _SHARED
        message.advance(count)
        if at_once and len(parts) < (1 if self._mode == _SHARED else 2):
            self._check(message)
        if not parts:
            message.done = True
            self._receiving.popleft()
        return True

    def _learn_mode(self) -> bool:
        assert self._in is not None
        self._mode = self._in.recv(1)
        if not self._mode:
            raise self._lost("predecessor", None)
        if self._mode not in (_INLINE, _SHARED) or (self._mode == _SHARED and self._local is None):
            raise CollectiveMismatch(f"the predecessor in the ring uses unknown mode {self._mode!r}")
        return True

    def _check(self, message: Message) -> None:
        """Check the received header; in mode SHARED, set the message's tensor to the slot that the header names.

        Raises ``CollectiveMismatch`` if the header is not the expected one.
        """
        slot = message.read_header()
        if self._mode == _SHARED:
            assert self._local is not None
            if not 0 <= slot < self._local.count:
                raise CollectiveMismatch(f"the predecessor in the ring sent invalid slot number {slot}")
            message.slot = slot
            message.tensor = self._local.view(slot, message.numel, message.dtype)
            self._longest_shared = max(self._longest_shared, message.nbytes)

    def _poll(self) -> None:
        assert self._out is not None
        assert self._in is not None
        full = self._remote is not None and not self._free  # if True, a send must wait until the successor frees a slot
        watched = select.POLLOUT if self._sending and not full else 0
        if not self._successor_left:
            watched |= _FROM_SUCCESSOR
        if watched != self._watched_out:
            self._poller.register(self._out, watched) if watched else self._poller.unregister(self._out)
            self._watched_out = watched
        watched = select.POLLIN if self._receiving else 0
        if watched != self._watched_in:
            self._poller.register(self._in, watched) if watched else self._poller.unregister(self._in)
            self._watched_in = watched
        if self._receiving and self._mode == _INLINE:
            self._wake_for(min(len(self._receiving[0].parts[-1]), _WORTH_WAKING))
        out = self._out.fileno()
        for fd, events in self._poller.poll():
            if fd == out and events & _FROM_SUCCESSOR_OR_END:
                self._read_successor()

    def _wake_for(self, count: int) -> None:
        """Make the kernel wake this thread only when ``count`` bytes from the predecessor are available."""
        assert self._in is not None
        if count != self._low_water:
            self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    def _read_successor(self) -> None:
        """Read the bytes that the successor has sent: numbers of slots that are free again, or GOODBYE.

        Raises ``PeerLost`` if the successor is lost.
        """
        if self._successor_left:
            raise self._lost("successor", None)
        assert self._out is not None
        try:
            data = self._out.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost("successor", error) from error
        if not data:
            raise self._lost("successor", None)
        for number in data:
            if number == _GOODBYE:
                self._successor_left = True
            elif self._remote is not None and number < self._remote.count and number not in self._free:
                self._free.append(number)
            else:
                raise CollectiveMismatch(f"the successor in the ring freed slot {number}, which is not in use")

    def _lost(self, who: str, error: OSError | None, *, connecting: bool = False) -> Exception:
        if self._cancel_token.cancelled:
            return self._cancel_token.error()
        sock = self._out if who == "successor" else self._in
        silent = sock is not None and is_silent(sock)
        why = f": {error}" if error else ""
        if silent:
            why = f": its host has acknowledged nothing for {SECONDS:g} s"
        return PeerLost(
            f"the connection to the {who} in the ring broke{why}",
            self._neighbours[who],
            unreachable=connecting or silent or is_path_error(error),
        )

    # ---- the end

    def abort(self) -> None:
        with self._descriptors:
            if self._wake < 0:
                return
            os.eventfd_write(self._wake, 1)
            for sock in (self._out, self._in):
                if sock is not None:
                    with contextlib.suppress(OSError):  # the socket is not connected
                        sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._in is not None and not self._cancel_token.cancelled:
            with contextlib.suppress(OSError):  # the predecessor has closed the connection first
                self._in.send(bytes((_GOODBYE,)))
        with self._descriptors:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Close sockets and shared memory without a message to the neighbours; also called in a forked process.

        A process forked from the worker must not keep the worker's connections open after the worker's death.
        """
        forget(self)
        for sock in (self._out, self._in):
            if sock is not None:
                sock.close()
        for slots in (self._local, self._remote):
            if slots is not None:
                slots.close()
        self._local = self._remote = None
        self._sent = lambda: None  # breaks a cycle: the callback's owner refers to this transport
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
