"""Non-blocking connection in an event loop: receives frames, and queues the frames that it cannot send at once."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice

from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.messages import Decoder

_MOST_BUFFERS = 256  # of one system call; the kernel's limit is 1,024
LATER = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}
"""Errors of a call that sends data after which the same call may succeed: no room, or no memory for the kernel."""


class Line:
    """Connection over ``sock``, which must not block. The owner closes it."""

    def __init__(self, loop: EventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self.descriptor = sock.fileno()  # given a socket, ``selectors`` formats it in vain at each look-up that fails
        self.decoder = Decoder()
        """Decoder of the received data."""
        self.queued = 0
        """Bytes that wait to be sent."""
        self.when_sent: Callable[[], None] | None = None
        """Called when no more data waits to be sent."""
        self._loop = loop
        self._out = deque[memoryview]()
        self._flushes = False
        self._error: OSError | None = None

    def on_data(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call ``callback`` whenever data has arrived or the connection has ended."""
        self._loop.add_reader(self.descriptor, callback, *arguments)

    @property
    def is_open(self) -> bool:
        return self.descriptor >= 0

    def receive(self, most: int = 1 << 16) -> bool:
        """Pass up to ``most`` received bytes to the decoder. Return False if the other side has closed the connection.

        Raises OSError if the connection has failed, also if a call that sent data has found the failure.
        """
        try:
            data = self.sock.recv(most)
        except BlockingIOError:
            return True
        if not data and self._error is not None:
            raise self._error
        self.decoder.feed(data)
        return bool(data)

    def send(self, frame: bytes) -> None:
        """Send a frame now; queue what the kernel does not take."""
        view = memoryview(frame)
        if not self._out:
            try:
                view = view[self.sock.send(view) :]
            except OSError as error:
                if self._is_fatal(error):
                    return
        if view:
            self._queue(view)
            if len(self._out) == 1:
                self._loop.add_writer(self.descriptor, self._flush)

    def gather(self, *frames: bytes) -> None:
        """Queue frames, and send them together at the end of this round of the event loop."""
        for frame in frames:
            self._queue(memoryview(frame))
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection at once. Idempotent; what is sent later is lost."""
        if not self.is_open:
            return
        self._loop.remove_reader(self.descriptor)
        self._loop.remove_writer(self.descriptor)
        self.descriptor = -1
        self._out.clear()
        self.queued = 0
        self.sock.close()

    def _is_fatal(self, error: OSError) -> bool:
        """Return False if the data can be sent later. Otherwise keep the first error, which ``receive`` raises."""
        if error.errno in LATER:
            return False
        self._error = self._error or error  # after ETIMEDOUT, each further call fails with EPIPE
        return True

    def _queue(self, view: memoryview) -> None:
        self._out.append(view)
        self.queued += len(view)

    def _flush(self) -> None:
        self._flushes = False
        if not self.is_open:
            return  # closed since this call was scheduled
        while self._out:
            try:
                sent = self.sock.sendmsg(list(islice(self._out, _MOST_BUFFERS)))
            except OSError as error:
                if not self._is_fatal(error):
                    self._loop.add_writer(self.descriptor, self._flush)
                    return
                self._out.clear()
                self.queued = 0
                break
            self.queued -= sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        self._loop.remove_writer(self.descriptor)
        if self.when_sent is not None:
            self.when_sent()
