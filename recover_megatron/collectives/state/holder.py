"""The states that this worker gives to others, each as text and tensors that are cut in chunks.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors
    receiver  text --unflatten--> the same tree, with tensors of its own (`receiver` fills them); nothing is unpickled

    receiver                                     holder: a thread for each connection (a stream named state/<key>)
       | <-- text's length, chunk's, layout ----- |   as soon as the state of that key is offered
       | --- TEXT ------------------------------> |
       | <-- text, trailer ---------------------- |
       | --- PAIR, an id of NCCL's; CONNECT ----> |   chunks go from device to device from now on: see `nccl.pairs`
       | --- number of a chunk, any, in any order |   over the connection several may be asked for ahead
       | <-- the chunk's bytes, trailer --------- |   trailer: number, check sum, whether the offer still stands
       | --- DONE ------------------------------> |   everything has arrived

An offer is withdrawn before its tensors change.  A chunk whose bytes were read while that happened says so in its
trailer, so nobody believes it.  The holder's training goes on meanwhile: its threads only read.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import torch

from recover_megatron.collectives.device import beside, made_so_far, within
from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.nccl.pairs import ID_BYTES, Pair, Pairs
from recover_megatron.collectives.state.transport import SocketTransport, StateTransport, bytes_of, cut, receive_into
from recover_megatron.collectives.state.trees import flatten
from recover_megatron.logger import get_logger
from recover_megatron.network.peer_store import Streams
from recover_megatron.network.system import watch

log = get_logger(__name__)


MAX_TEXT = 256 << 20
"""Bytes of the text: the plain values of a state, and the shapes of its tensors."""


KIND = "state"
CHUNK = 8 << 20
"""Bytes of a chunk: enough that asking for one costs nothing beside it (with 1 MiB it took half as long again)."""
LARGE_CHUNK, MAX_CHUNK = 32 << 20, 1 << 30
"""Where it goes from device to device, so much faster; and the most that is believed."""
HELLO, REQUEST, TRAILER = struct.Struct("<QQ32s"), struct.Struct("<q"), struct.Struct("<qQ?")
TEXT, DONE, PAIR, CONNECT = -1, -2, -3, -4
LOOK_SECONDS = 0.25
"""How often whoever waits for an offer, or for chunks, asks whether the wait is to end."""

Chunk = Sequence[tuple[int, int, int]]
"""Pieces: (number of a tensor, first byte, byte behind the last)."""


class Offer:
    """A tree that others may have.  The tensors are read in place, whenever they are asked for.

    ``shared``: so many of its tensors, the first ones, are equal in all holders of the state; see ``chunks_of``.
    ``chunk``: bytes; default: ``CHUNK``.
    """

    def __init__(self, tree: Any, shared: int = 0, chunk: int | None = None) -> None:
        text, tensors = flatten(tree)
        self.text = text.encode()
        self.gpu = gpu_of(tensors)
        self.made = made_so_far(self.gpu)
        self._parts = [bytes_of(tensor) for tensor in tensors]
        self.chunk = chunk or CHUNK
        self.layout = layout_of(tensors[:shared], self.chunk)
        self.chunks = chunks_of([part.numel() for part in self._parts], shared, self.chunk)[0]
        self.stands = True
        self._lock = threading.Lock()
        self._connections = 0
        self._over = threading.Event()
        self._error: str | None = None

    def parts(self, number: int) -> list[torch.Tensor]:
        """The bytes of a chunk.  Raises IndexError."""
        if number < 0:
            raise IndexError(number)
        return [self._parts[tensor][start:stop] for tensor, start, stop in self.chunks[number]]

    def connected(self) -> None:
        """Count one more connection by which a receiver fetches this; a receiver may have several."""
        with self._lock:
            self._connections += 1

    def was_taken(self) -> None:
        """Note that a receiver has all of it."""
        self._error = None
        self._over.set()

    def disconnected(self, error: Exception) -> None:
        """Note that a connection ended before the receiver had said over it that it has all.

        The receiver counts as gone when its last connection has ended: once it has everything, it closes those of its
        connections that have not been answered yet.
        """
        with self._lock:
            self._connections -= 1
            if not self._connections and not self._over.is_set():
                self._error = str(error)  # not its frames, which keep connections and memory alive
                self._over.set()

    def wait(self, patience: Callable[[], None]) -> None:
        """Until the only one who is to have it has it; ``PeerLost`` if it is gone.  ``patience``: raises to give up."""
        while not self._over.wait(LOOK_SECONDS):
            patience()
        if self._error is not None:
            raise PeerLost(f"who was getting it is gone: {self._error}")

    def withdraw(self) -> None:
        """Its tensors are about to change: what is being sent is believed no more, and nothing else is.  Idempotent."""
        self.stands = False
        self._parts = []


def layout_of(tensors: Sequence[torch.Tensor], chunk: int) -> bytes:
    """32 bytes that are equal where shapes, types and the limit of a chunk are."""
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(json.dumps([chunk, shapes]).encode()).digest()


def chunks_of(sizes: Sequence[int], shared: int, limit: int | None = None) -> tuple[list[Chunk], int]:
    """The chunks of tensors of these sizes in bytes, and how many, the first ones, hold the shared tensors alone.

    ``limit``: bytes of a chunk; default: ``CHUNK``.
    """
    limit = limit or CHUNK
    common = list(cut(sizes[:shared], limit))
    own = [[(shared + n, a, b) for n, a, b in chunk] for chunk in cut(sizes[shared:], limit)]
    return [*common, *own], len(common)


class Offers:
    """All offers of one worker, served to whoever connects to its peer store's ``streams``.

    ``pairs``: by which they go from device to device where the receiver asks for it; None: they never do.
    """

    def __init__(self, streams: Streams, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._changed = threading.Condition()
        self._offers: dict[str, Offer] = {}
        streams.serve(KIND, self._came)

    def put(self, key: str, offer: Offer) -> Offer:
        """Offer it under a key that was not used before."""
        with self._changed:
            self._offers = {known: its for known, its in self._offers.items() if its.stands}
            self._offers[key] = offer
            self._changed.notify_all()
        return offer

    def _came(self, name: str, sock: socket.socket) -> None:
        threading.Thread(
            target=self._serve, args=(name.partition("/")[2], sock), name="giving a state", daemon=True
        ).start()

    def _serve(self, key: str, sock: socket.socket) -> None:
        with sock, suppress(OSError):  # whoever hangs up before anything is offered
            watch(sock)
            offer = self._await(key, sock)
            offer.connected()
            try:
                with beside(offer.gpu, offer.made, within()):
                    serve(sock, SocketTransport(sock), offer, self._pairs)
            except (OSError, PeerLost, IndexError) as error:  # whatever it is costs this connection, no more
                log.info(f"a state is not given any further over one connection: {error}")
                offer.disconnected(error)

    def _await(self, key: str, sock: socket.socket) -> Offer:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: key in self._offers, LOOK_SECONDS):
                    if not self._offers[key].stands:
                        raise ConnectionResetError("that state is given to nobody any more")
                    return self._offers[key]
            if select.select([sock], [], [], 0)[0]:  # nothing is asked before the hello: it has hung up
                raise ConnectionResetError("whoever wanted a state is gone")


def serve(sock: socket.socket, transport: StateTransport, offer: Offer, pairs: Pairs | None = None) -> None:
    """Give what is asked for on ``sock``, by ``transport`` or by a pair, until all has arrived.

    Raises OSError and ``PeerLost`` where the receiver is gone or a pair is of no use any more, IndexError for a chunk
    that there is not.
    """
    sock.sendall(HELLO.pack(len(offer.text), offer.chunk, offer.layout))
    request, unique_id = bytearray(REQUEST.size), bytearray(ID_BYTES)
    pair: Pair | None = None
    with ExitStack() as ends:
        while True:
            receive_into(sock, [memoryview(request)])
            (number,) = REQUEST.unpack(request)
            if number == DONE:
                offer.was_taken()
                return
            if number == PAIR:
                receive_into(sock, [memoryview(unique_id)])
                if pairs is None:
                    raise PeerLost("a state is asked for from device to device, and gradients do not travel over NCCL")
                transport = pair = ends.enter_context(closing(pairs.open(sock, bytes(unique_id), receives=False)))
                continue
            if number == CONNECT and pair is not None:
                pair.connect(offer.chunk)
                continue
            if number == TEXT:
                sock.sendall(offer.text)
                found = zlib.crc32(offer.text)
            else:
                found = transport.send(offer.parts(number))
            sock.sendall(TRAILER.pack(number, found, offer.stands))


def gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """That on which some of them are."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
