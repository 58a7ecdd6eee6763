"""The peers' key-value store: a server in a thread of each worker, so that no node is special.

    server -> client   {"nonce": s}
    client -> server   {"nonce": c, "mac": proof}         then  {"set": key, "value": v, "epoch": n}
    server -> client   {"mac": proof}                     and   {"want": key}
    server -> client   {"key": key, "value": v}           as soon as somebody sets it
    client -> server   {"fetch": [numbers]}
    server -> client   {"bytes": n} and n bytes           what its own worker gives for them; n = -1: nothing
    client -> server   {"stream": name}                   the connection is not the store's any more: `streams`

Asked once, it answers when it can: nobody polls it over the network.
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
from recover_megatron.network import frames, proof
from recover_megatron.network.addresses import listen
from recover_megatron.network.client import HANDSHAKE_SECONDS, LONGEST_MESSAGE
from recover_megatron.network.forks import close_in_children
from recover_megatron.network.streams import Streams

log = get_logger(__name__)

PURPOSE = "peer-store"
_BACKLOG = 4096
LONGEST_BEFORE_PROOF = 1 << 10
MOST_UNPROVED = 256
QUIET_SECONDS = 60.0
"""Between two lines about a store that can let nobody in."""
MOST_BYTES = 16 << 20
"""Limit of what is given for one request (``fetch``)."""
Source = Callable[[Sequence[int]], bytes | None]
"""What this worker gives for some numbers; called in the server's thread.  None: it does not have that."""
KEPT_EPOCHS = 4
"""What belongs to epochs before the newest so many that were heard of is forgotten: their groups are gone."""


class PeerStoreServer:
    """Serves until the process ends.  ``host``: the address of this machine that the others can reach.

    Who has not proved to know the secret may say ``LONGEST_BEFORE_PROOF`` bytes, within ``HANDSHAKE_SECONDS``; of
    ``MOST_UNPROVED`` such connections the oldest makes room for a newer one, and where no descriptor is left all do.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener, self.address = listen(host, _BACKLOG)
        self.source: Source = lambda what: None
        self.streams = Streams()
        self._challenge = proof.Challenge(secret, PURPOSE)
        self._values: dict[str, str] = {}
        self._wanted: defaultdict[str, list[asyncio.StreamWriter]] = defaultdict(list)
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        self._quiet_until = 0.0
        self._epochs: defaultdict[int, set[str]] = defaultdict(set)  # what each has set
        close_in_children(self)
        # Not epoll, which a forked process would share with this one.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        threading.Thread(target=self._serve, name="recover-peer-store", daemon=True).start()

    def put(self, key: str, value: str, epoch: int | None = None) -> None:
        """Set a value from this process, from any thread: whoever wants it is told.

        ``epoch``: the value is forgotten some epochs later; None: it is kept.
        """
        self._loop.call_soon_threadsafe(self._set, key, value, epoch)

    def close_in_child(self) -> None:
        """A process forked from a worker must not keep the store of a dead worker open."""
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
        """What asyncio cannot tell to anybody: that nobody can be let in.  (It tries again after a second.)"""
        error = context.get("exception")
        if isinstance(error, OSError):
            for writer in list(self._unproved):
                self._drop(writer)
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            log.info(f"the peer store of this worker: {context['message']}: {error}")

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._unproved.pop(writer, None)
        writer.transport.abort()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes over one connection costs at most that connection."""
        self._unproved[writer] = None
        if len(self._unproved) > MOST_UNPROVED:
            self._drop(next(iter(self._unproved)))
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError, frames.WireError):
                # Else an answer waits 40 ms for an acknowledgement: asyncio sees to it only for sockets that tell
                # their protocol, which accepted ones do not.
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if await asyncio.wait_for(self._knows(reader, writer), HANDSHAKE_SECONDS):
                    self._unproved.pop(writer, None)
                    await self._converse(reader, writer)
        finally:
            self._unproved.pop(writer, None)
            for key in [key for key, waiting in self._wanted.items() if writer in waiting]:
                self._wanted[key].remove(writer)
                if not self._wanted[key]:
                    del self._wanted[key]
            writer.close()

    async def _knows(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        mine = proof.nonce()
        _tell(writer, nonce=mine)
        told = await frames.read(reader, LONGEST_BEFORE_PROOF)
        if told is None or not proof.proves(told["mac"], self._challenge.of_client(mine, str(told["nonce"]))):
            return False
        _tell(writer, mac=self._challenge.of_server(mine, str(told["nonce"])))
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (message := await frames.read(reader, LONGEST_MESSAGE)) is not None:
            if "fetch" in message:
                await self._give([int(number) for number in message["fetch"]], writer)
            elif "stream" in message:
                self._hand_over(str(message["stream"]), writer)
                return
            elif "want" not in message:
                epoch = message.get("epoch")
                self._set(message["set"], message["value"], None if epoch is None else int(epoch))
            elif (key := message["want"]) in self._values:
                _tell(writer, key=key, value=self._values[key])
            else:
                self._wanted[key].append(writer)

    async def _give(self, what: Sequence[int], writer: asyncio.StreamWriter) -> None:
        found = self.source(what)
        _tell(writer, bytes=-1 if found is None else len(found))
        if found is not None:
            writer.write(found)
        await writer.drain()

    def _hand_over(self, name: str, writer: asyncio.StreamWriter) -> None:
        """The client says nothing more before it is answered, so all that it will say is still to be read."""
        answer = frames.encode({"stream": name}, LONGEST_MESSAGE)
        taken = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        writer.transport.abort()  # its own descriptor, that is: the connection stays
        taken.setblocking(True)
        try:
            taken.sendall(answer)  # a few bytes, in an empty buffer
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
            _tell(waiting, key=key, value=value)


def _tell(writer: asyncio.StreamWriter, **message: str | int) -> None:
    writer.write(frames.encode(message, LONGEST_MESSAGE))
