"""Key-value store: each worker runs a server in a thread, so the run has no central store that can be lost.

    server -> client   {"nonce": s}
    client -> server   {"nonce": c, "mac": proof}
    server -> client   {"mac": proof}
    client -> server   {"set": key, "value": v, "epoch": n}
    client -> server   {"want": key}
    server -> client   {"key": key, "value": v}           answer to ``want``, as soon as the value is set
    client -> server   {"fetch": [numbers]}
    server -> client   {"bytes": n} and n bytes           data from the server's ``source``; n is -1 if it returns None
    client -> server   {"stream": name}                   makes the connection a stream, see below

The server answers a ``want`` when the value is set, so no client polls over the network.

A stream is a connection that the server hands over to another part of the worker:

    client                                                   server: the peer store's thread
    open_stream   <-- both sides prove that they know the secret -->
                  -- {"stream": "tree/5/..."} ----------------->   Streams.arrived
                  <-- {"stream": "tree/5/..."} -----------------   from here on the connection is a plain socket
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
from typing import Any

from recover_megatron.logger import get_logger
from recover_megatron.network import connection
from recover_megatron.network.connection import HANDSHAKE_SECONDS, LONGEST_MESSAGE, Challenge, Connection, listen
from recover_megatron.network.system import close_in_children

MOST_WAITING = 4096
"""Maximum number of streams that wait for ``take``; if another stream arrives, the oldest is closed."""
LOOK_SECONDS = 0.25
"""Seconds between two calls of ``patience`` by a thread that waits for a stream."""

Handler = Callable[[str, socket.socket], None]
"""Function that receives the name and the connection of a stream, and must close the connection.

It runs in the server's thread, so it must not block.
"""


def open_stream(
    address: str, challenge: Challenge, name: str, patience: Callable[[], None] = lambda: None
) -> socket.socket:
    """Open the stream ``name`` to the worker whose peer store is at ``address``; return the blocking connection.

    ``patience``: as in ``Connection``. Raises ``Unreachable``.
    """
    connection = Connection(address, challenge, patience)
    try:
        return connection.detach({"stream": name})
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
LONGEST_BEFORE_PROOF = 1 << 10
MOST_UNPROVED = 256
QUIET_SECONDS = 60.0
"""Least number of seconds between two log lines about a store that cannot accept connections."""
MOST_BYTES = 16 << 20
"""Maximum bytes of the answer to one ``fetch`` request."""
Source = Callable[[Sequence[int]], bytes | None]
"""Function that returns the data that the numbers of a ``fetch`` select; None if this worker lacks some of the data.

The server's thread calls it.
"""
KEPT_EPOCHS = 4
"""Number of newest epochs whose values are kept; the process groups of older epochs do not exist any more.
"""


class PeerStoreServer:
    """Peer store of a worker; serves until the process ends. ``host``: address that the other workers can reach.

    A client must prove within ``HANDSHAKE_SECONDS``, in ``LONGEST_BEFORE_PROOF`` bytes, that it knows the secret. If
    there are more than ``MOST_UNPROVED`` connections without this proof, the server closes the oldest of them. If the
    process has no free file descriptor, the server closes all connections without this proof.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener, self.address = listen(host, _BACKLOG)
        self.source: Source = lambda what: None
        self.streams = Streams()
        self._challenge = connection.Challenge(secret)
        self._values: dict[str, str] = {}
        self._wanted: defaultdict[str, list[asyncio.StreamWriter]] = defaultdict(list)
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
        an ``epoch`` is never dropped.
        """
        self._loop.call_soon_threadsafe(self._set, key, value, epoch)

    def close_in_child(self) -> None:
        self.listener.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._accept())

    async def _accept(self) -> None:
        self._loop.set_exception_handler(self._failed)
        server = await asyncio.start_server(
            self._guarded, sock=self.listener, limit=LONGEST_BEFORE_PROOF, backlog=_BACKLOG
        )
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
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError, connection.WireError):
                # Without TCP_NODELAY an answer waits 40 ms for an acknowledgement. asyncio sets the option only if the
                # socket's ``proto`` is TCP, but accepted sockets have ``proto`` 0.
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if await asyncio.wait_for(self._authenticate(reader, writer), HANDSHAKE_SECONDS):
                    self._unproved.pop(writer, None)
                    await self._converse(reader, writer)
        finally:
            self._unproved.pop(writer, None)
            for key in [key for key, waiting in self._wanted.items() if writer in waiting]:
                self._wanted[key].remove(writer)
                if not self._wanted[key]:
                    del self._wanted[key]
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = connection.nonce()
        _write(writer, nonce=own)
        answer = await connection.read(reader, LONGEST_BEFORE_PROOF)
        mac, nonce = (str(answer[name]) for name in ("mac", "nonce")) if answer is not None else ("", "")
        if not connection.proves(mac, self._challenge.of_client(own, nonce)):
            return False
        _write(writer, mac=self._challenge.of_server(own, nonce))
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (message := await connection.read(reader, LONGEST_MESSAGE)) is not None:
            if "fetch" in message:
                await self._send_fetched([int(number) for number in message["fetch"]], writer)
            elif "stream" in message:
                self._hand_over(str(message["stream"]), writer)
                return
            elif "want" not in message:
                epoch = message.get("epoch")
                self._set(message["set"], message["value"], None if epoch is None else int(epoch))
            elif (key := message["want"]) in self._values:
                _write(writer, key=key, value=self._values[key])
            else:
                self._wanted[key].append(writer)

    async def _send_fetched(self, what: Sequence[int], writer: asyncio.StreamWriter) -> None:
        found = self.source(what)
        _write(writer, bytes=-1 if found is None else len(found))
        if found is not None:
            writer.write(found)
        await writer.drain()

    def _hand_over(self, name: str, writer: asyncio.StreamWriter) -> None:
        """Hand the connection over as the stream ``name``, after an echo of the client's request.

        The client sends no data before the echo, so this server has read none of the stream's data.
        """
        answer = connection.encode({"stream": name}, LONGEST_MESSAGE)
        taken = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        writer.transport.abort()  # closes asyncio's descriptor; ``taken`` keeps the connection open
        taken.setblocking(True)
        try:
            taken.sendall(answer)  # cannot block, because the answer is short and the send buffer is empty
        except OSError:
            taken.close()
            return
        self.streams.arrived(name, taken)

    def _set(self, key: str, value: str, epoch: int | None) -> None:
        self._values[key] = value
        if epoch is not None:
            self._epochs[epoch].add(key)
            while len(self._epochs) > KEPT_EPOCHS:
                for old in self._epochs.pop(min(self._epochs)):
                    self._values.pop(old, None)
        for waiting in self._wanted.pop(key, []):
            _write(waiting, key=key, value=value)


def _write(writer: asyncio.StreamWriter, **message: str | int) -> None:
    writer.write(connection.encode(message, LONGEST_MESSAGE))
