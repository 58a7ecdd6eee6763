"""Key-value store: each worker runs a server in a thread, so the run has no central store that can be lost.

    both sides prove that they know the secret            ``network.connection``
    client -> server   Value(key, value, epoch)           sets the value
    client -> server   Want(key)
    server -> client   Value                              answer to ``Want``, as soon as the value is set
    client -> server   Fetch(update, parts)
    server -> client   Fetched(size) and size bytes       data from the server's ``source``; no size if it returns None
    client -> server   Stream(name)                       makes the connection a stream, see below

The server answers a ``Want`` when the value is set, so no client polls over the network.

A stream is a connection that the server hands over to another part of the worker:

    client                                                   server: the peer store's thread
    open_stream   <-- both sides prove that they know the secret -->
                  -- Stream("tree/5/...") --------------------->   Streams.arrived
                  <-- Opened -----------------------------------   from here on the connection is a plain socket
                                                                     |- if its kind has a handler, the handler gets it
                                                                     '- else it waits until ``take`` asks for it

The kind of a stream is the part of its name before the first slash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from msgspec import Meta

from recover_megatron.logger import get_logger
from recover_megatron.network import messages
from recover_megatron.network.connection import HANDSHAKE_SECONDS, PEER_STORE, Connection, accept, listen, nonce
from recover_megatron.network.messages import MAX_HANDSHAKE, Decoder, Message, Number, Schema, WireError, encode
from recover_megatron.network.system import close_in_children

LONGEST_MESSAGE = 3 << 19
"""Maximum bytes of one message after the proof of the secret."""
MOST_BYTES = 16 << 20
"""Maximum bytes of the answer to one ``Fetch``."""
MOST_PARTS = 4096
"""Maximum number of parts in one ``Fetch``."""

_Name = Annotated[str, Meta(max_length=1 << 16)]
"""A name may contain the positions of all members of a group."""


class Value(Message, frozen=True):
    """Value of a key, in base64. ``epoch``: as in ``PeerStoreServer.put``."""

    key: _Name
    value: Annotated[bytes, Meta(max_length=LONGEST_MESSAGE // 4 * 3)]
    epoch: Number | None = None


class Want(Message, frozen=True):
    """Request for the value of a key."""

    key: _Name


Range = tuple[Number, Number, Number]
"""Part of an update's data: number of a bucket; first element, and last element + 1, of a range of its elements."""


class Fetch(Message, frozen=True):
    """Request for data that belongs to ``update``."""

    update: Number
    parts: Annotated[list[Range], Meta(min_length=1, max_length=MOST_PARTS)]


class Fetched(Message, frozen=True):
    """Answer to ``Fetch``. ``size``: number of the bytes of data that follow; None: this worker lacks some of them."""

    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)] | None = None


class Stream(Message, frozen=True):
    """Request to make this connection the stream ``name``."""

    name: _Name


class Opened(Message, frozen=True):
    """Answer to ``Stream``."""


Request = Value | Want | Fetch | Stream
REQUEST: Schema[Request] = Schema(Request, LONGEST_MESSAGE)
VALUE: Schema[Value] = Schema(Value, LONGEST_MESSAGE)
FETCHED: Schema[Fetched] = Schema(Fetched, MAX_HANDSHAKE)

MOST_WAITING = 4096
"""Maximum number of streams that wait for ``take``; if another stream arrives, the oldest is closed."""
LOOK_SECONDS = 0.25
"""Seconds between two calls of ``patience`` by a thread that waits for a stream."""

Handler = Callable[[str, socket.socket], None]
"""Function that receives the name and the connection of a stream, and must close the connection.

It runs in the server's thread, so it must not block.
"""


def open_stream(address: str, secret: bytes, name: str, patience: Callable[[], None] = lambda: None) -> socket.socket:
    """Open the stream ``name`` to the worker whose peer store is at ``address``; return the blocking connection.

    ``patience``: as in ``Connection``. Raises ``Unreachable``.
    """
    connection = Connection(address, secret, patience)
    try:
        return connection.detach(Stream(name), Opened())
    except BaseException:
        connection.close()
        raise


class Streams:
    """Streams that other workers have opened to this worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, socket.socket] = {}
        self._handlers: dict[str, Handler] = {}
        close_in_children(self)

    def serve(self, kind: str, handler: Handler) -> None:
        """Call ``handler`` for all streams of this kind, including streams that have arrived before this call."""
        with self._changed:
            self._handlers[kind] = handler
            names = [name for name in self._waiting if name.partition("/")[0] == kind]
            came = [(name, self._waiting.pop(name)) for name in names]
        for name, sock in came:
            handler(name, sock)

    def arrived(self, name: str, sock: socket.socket) -> None:
        with self._changed:
            handler = self._handlers.get(name.partition("/")[0])
            if handler is None:
                if (before := self._waiting.pop(name, None)) is not None:
                    before.close()  # the client has opened this stream again
                self._waiting[name] = sock
                if len(self._waiting) > MOST_WAITING:
                    self._waiting.pop(next(iter(self._waiting))).close()
                self._changed.notify_all()
        if handler is not None:
            handler(name, sock)

    def take(self, name: str, patience: Callable[[], None]) -> socket.socket:
        """Wait for the stream ``name``; return its connection.

        ``patience``: called every ``LOOK_SECONDS`` during the wait; it raises an exception to end the wait.
        """
        while True:
            patience()
            with self._changed:
                if self._changed.wait_for(lambda: name in self._waiting, LOOK_SECONDS):
                    return self._waiting.pop(name)

    def forget(self, prefix: str) -> None:
        """Close the waiting streams whose names begin with ``prefix``, because no thread will take them."""
        with self._changed:
            for name in [name for name in self._waiting if name.startswith(prefix)]:
                self._waiting.pop(name).close()

    def close_in_child(self) -> None:
        for sock in self._waiting.values():
            sock.close()


log = get_logger(__name__)

_BACKLOG = 4096
MOST_UNPROVED = 256
QUIET_SECONDS = 60.0
"""Least number of seconds between two log lines about a store that cannot accept connections."""
Source = Callable[[int, Sequence[Range]], bytes | None]
"""Function that returns the data that a ``Fetch`` (its ``update`` and ``parts``) requests, concatenated.

It returns None if this worker lacks some of the data, and raises ValueError if no worker can have them. The server's
thread calls it.
"""
KEPT_EPOCHS = 4
"""Number of newest epochs whose values are kept; the process groups of older epochs do not exist any more.
"""


class PeerStoreServer:
    """Peer store of a worker; serves until the process ends. ``host``: address that the other workers can reach.

    A client must prove within ``HANDSHAKE_SECONDS`` that it knows the secret. If there are more than
    ``MOST_UNPROVED`` connections without this proof, the server closes the oldest of them. If the process has no free
    file descriptor, the server closes all connections without this proof.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener, self.address = listen(host, _BACKLOG)
        self.source: Source = lambda update, parts: None
        self.streams = Streams()
        self._secret = secret
        self._values: dict[str, bytes] = {}  # key -> frame of the ``Value``
        self._wanted: dict[str, list[asyncio.StreamWriter]] = {}
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        self._quiet_until = 0.0
        self._epochs: defaultdict[int, set[str]] = defaultdict(set)  # epoch -> its keys
        close_in_children(self)
        # An epoll object would be shared with forked processes; poll is not.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        threading.Thread(target=self._serve, name="recover-peer-store", daemon=True).start()

    def put(self, key: str, value: str, epoch: int | None = None) -> None:
        """Set the value of ``key``, and send it to the clients that wait for it. Any thread may call this.

        A value with an ``epoch`` is dropped when values of ``KEPT_EPOCHS`` newer epochs exist. A value without
        an ``epoch`` is never dropped. Raises ValueError if the value is too long.
        """
        message = Value(key, value.encode(), epoch)
        self._loop.call_soon_threadsafe(self._set, message, encode(message, LONGEST_MESSAGE))

    def close_in_child(self) -> None:
        self.listener.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._accept())

    async def _accept(self) -> None:
        self._loop.set_exception_handler(self._failed)
        server = await asyncio.start_server(self._guarded, sock=self.listener, limit=MAX_HANDSHAKE, backlog=_BACKLOG)
        await server.serve_forever()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that the server cannot accept connections; asyncio tries again after a second.

        If the system refuses connections, for example because no file descriptor is free, first close all connections
        of clients that have not proved that they know the secret.
        """
        error = context.get("exception")
        if isinstance(error, OSError):
            for writer in list(self._unproved):
                self._drop(writer)
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            log.info(f"the peer store of this worker failed: {context['message']}: {error}")

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._unproved.pop(writer, None)
        writer.transport.abort()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; invalid data ends only this connection."""
        self._unproved[writer] = None
        if len(self._unproved) > MOST_UNPROVED:
            self._drop(next(iter(self._unproved)))
        try:
            with contextlib.suppress(OSError, WireError):
                # Without TCP_NODELAY an answer waits 40 ms for an acknowledgement. asyncio sets the option only if the
                # socket's ``proto`` is TCP, but accepted sockets have ``proto`` 0.
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                decoder = Decoder()
                if await asyncio.wait_for(self._authenticate(reader, decoder, writer), HANDSHAKE_SECONDS):
                    self._unproved.pop(writer, None)
                    await self._converse(reader, decoder, writer)
        finally:
            self._unproved.pop(writer, None)
            others = {key: [each for each in waiting if each is not writer] for key, waiting in self._wanted.items()}
            self._wanted = {key: waiting for key, waiting in others.items() if waiting}
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, decoder: Decoder, writer: asyncio.StreamWriter) -> bool:
        challenge = messages.Challenge(messages.PROTOCOL_VERSION, nonce())
        writer.write(encode(challenge))
        auth = await _receive(reader, decoder, messages.AUTH)
        proof = accept(self._secret, PEER_STORE, challenge.nonce, auth) if auth is not None else None
        if proof is None:
            return False
        writer.write(encode(proof))
        return True

    async def _converse(self, reader: asyncio.StreamReader, decoder: Decoder, writer: asyncio.StreamWriter) -> None:
        while (message := await _receive(reader, decoder, REQUEST)) is not None:
            match message:
                case Value():
                    self._set(message, encode(message, LONGEST_MESSAGE))
                case Want(key) if key in self._values:
                    writer.write(self._values[key])
                case Want(key):
                    self._wanted.setdefault(key, []).append(writer)
                case Fetch():
                    await self._send_fetched(message, writer)
                case Stream(name):
                    self._hand_over(name, writer)
                    return

    async def _send_fetched(self, message: Fetch, writer: asyncio.StreamWriter) -> None:
        try:
            found = self.source(message.update, message.parts)
        except ValueError as error:
            raise WireError(str(error)) from error
        writer.write(encode(Fetched(None if found is None else len(found))))
        writer.write(found or b"")
        await writer.drain()

    def _hand_over(self, name: str, writer: asyncio.StreamWriter) -> None:
        """Hand the connection over as the stream ``name``, after an answer to the client's request.

        The client sends no data before the answer, so this server has read none of the stream's data.
        """
        taken = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        writer.transport.abort()  # closes asyncio's descriptor; ``taken`` keeps the connection open
        taken.setblocking(True)
        try:
            taken.sendall(encode(Opened()))  # cannot block, because the answer is short and the send buffer is empty
        except OSError:
            taken.close()
            return
        self.streams.arrived(name, taken)

    def _set(self, value: Value, frame: bytes) -> None:
        self._values[value.key] = frame
        if value.epoch is not None:
            self._epochs[value.epoch].add(value.key)
            while len(self._epochs) > KEPT_EPOCHS:
                for old in self._epochs.pop(min(self._epochs)):
                    self._values.pop(old, None)
        for waiting in self._wanted.pop(value.key, []):
            waiting.write(frame)


async def _receive[T](reader: asyncio.StreamReader, decoder: Decoder, schema: Schema[T]) -> T | None:
    """Return the next message; None at the end of the stream. Raises ``WireError`` for invalid data."""
    while (message := decoder.message(schema)) is None:
        if not (data := await reader.read(1 << 16)):
            return None
        decoder.feed(data)
    return message
