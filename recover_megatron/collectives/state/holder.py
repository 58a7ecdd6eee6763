"""States that this worker sends to others, each as text and tensors that are cut in chunks.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors
    receiver  text --unflatten--> the same tree, with new tensors (`receiver` fills them); nothing is unpickled

    receiver                                     holder: a thread for each connection (a stream named state/<key>)
       | <-- text's length, chunk's, layout ----- |   as soon as the state of that key is offered
       | --- TEXT ------------------------------> |
       | <-- text, trailer ---------------------- |
       | --- PAIR, NCCL's unique id; CONNECT ---> |   from now on chunks go from device to device: see `nccl.pairs`
       | --- number of a chunk, in any order ---> |   over the connection several may be requested ahead
       | <-- the chunk's bytes, trailer --------- |   trailer: number, checksum, flag: the offer is still valid
       | --- DONE ------------------------------> |   everything has arrived

An offer is withdrawn before its tensors change.  If the bytes of a chunk were read during the withdrawal, its trailer
says so, and the receiver discards it.  The holder's training continues meanwhile: these threads only read.
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
"""Maximum bytes of the text: the plain values of a state, and the shapes of its tensors."""


KIND = "state"
CHUNK = 8 << 20
"""Bytes of a chunk: large enough that the request is negligible (with 1 MiB a transfer took 50 % longer)."""
LARGE_CHUNK, MAX_CHUNK = 32 << 20, 1 << 30
"""Bytes of a chunk from device to device, which is much faster; and the maximum that a receiver accepts."""
HELLO, REQUEST, TRAILER = struct.Struct("<QQ32s"), struct.Struct("<q"), struct.Struct("<qQ?")
TEXT, DONE, PAIR, CONNECT = -1, -2, -3, -4
LOOK_SECONDS = 0.25
"""Interval at which a wait for an offer or for chunks checks whether it must end."""

Chunk = Sequence[tuple[int, int, int]]
"""Pieces of a chunk: (number of a tensor, first byte, end byte)."""


class Offer:
    """Tree that other workers may fetch.  The tensors are read in place, whenever a chunk is requested.

    ``shared``: number of its first tensors that are equal in all holders of the state; see ``chunks_of``.
    ``chunk``: bytes of a chunk; default: ``CHUNK``.
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
        """Return the bytes of a chunk.  Raises IndexError."""
        if number < 0:
            raise IndexError(number)
        return [self._parts[tensor][start:stop] for tensor, start, stop in self.chunks[number]]

    def connected(self) -> None:
        """Count one more connection over which a receiver fetches this; a receiver may have several."""
        with self._lock:
            self._connections += 1

    def was_taken(self) -> None:
        """Record that a receiver has all of it."""
        self._error = None
        self._over.set()

    def disconnected(self, error: Exception) -> None:
        """Record that a connection ended before the receiver had sent DONE over it.

        The receiver counts as dead when its last connection has ended: a receiver that has everything also closes
        connections whose requests have not been answered yet.
        """
        with self._lock:
            self._connections -= 1
            if not self._connections and not self._over.is_set():
                self._error = str(error)  # not its frames, which keep connections and memory alive
                self._over.set()

    def wait(self, patience: Callable[[], None]) -> None:
        """Wait until the only receiver has it; ``PeerLost`` if that receiver is lost.  ``patience``: raises to stop."""
        while not self._over.wait(LOOK_SECONDS):
            patience()
        if self._error is not None:
            raise PeerLost(f"the worker that was receiving this state is lost: {self._error}")

    def withdraw(self) -> None:
        """Invalidate the offer before its tensors change: receivers discard chunks in flight.  Idempotent."""
        self.stands = False
        self._parts = []


def layout_of(tensors: Sequence[torch.Tensor], chunk: int) -> bytes:
    """Return 32 bytes that are equal if the shapes, dtypes and the chunk limit are equal."""
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(json.dumps([chunk, shapes]).encode()).digest()


def chunks_of(sizes: Sequence[int], shared: int, limit: int | None = None) -> tuple[list[Chunk], int]:
    """Return the chunks of tensors of these sizes in bytes, and the number of first chunks with only shared tensors.

    ``limit``: bytes of a chunk; default: ``CHUNK``.
    """
    limit = limit or CHUNK
    common = list(cut(sizes[:shared], limit))
    own = [[(shared + n, a, b) for n, a, b in chunk] for chunk in cut(sizes[shared:], limit)]
    return [*common, *own], len(common)


class Offers:
    """All offers of one worker, served to every worker that connects to its peer store's ``streams``.

    ``pairs``: transfers from device to device if the receiver requests them; None: refused.
    """

    def __init__(self, streams: Streams, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._changed = threading.Condition()
        self._offers: dict[str, Offer] = {}
        streams.serve(KIND, self._accept)

    def put(self, key: str, offer: Offer) -> Offer:
        """Publish ``offer`` under a key that was not used before."""
        with self._changed:
            self._offers = {known: old for known, old in self._offers.items() if old.stands}
            self._offers[key] = offer
            self._changed.notify_all()
        return offer

    def _accept(self, name: str, sock: socket.socket) -> None:
        threading.Thread(
            target=self._serve, args=(name.partition("/")[2], sock), name="sending a state", daemon=True
        ).start()

    def _serve(self, key: str, sock: socket.socket) -> None:
        with sock, suppress(OSError):  # the receiver closed the connection before the offer
            watch(sock)
            offer = self._await(key, sock)
            offer.connected()
            try:
                with beside(offer.gpu, offer.made, within()):
                    serve(sock, SocketTransport(sock), offer, self._pairs)
            except (OSError, PeerLost, IndexError) as error:  # a fault ends this connection only
                log.info(f"one connection over which a state was being sent has ended: {error}")
                offer.disconnected(error)

    def _await(self, key: str, sock: socket.socket) -> Offer:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: key in self._offers, LOOK_SECONDS):
                    if not self._offers[key].stands:
                        raise ConnectionResetError("the offer of that state was withdrawn")
                    return self._offers[key]
            if select.select([sock], [], [], 0)[0]:  # no request precedes the hello: the peer hung up
                raise ConnectionResetError("the worker that requested a state closed the connection")


def serve(sock: socket.socket, transport: StateTransport, offer: Offer, pairs: Pairs | None = None) -> None:
    """Send the chunks that are requested on ``sock``, by ``transport`` or by a pair, until DONE.

    Raises OSError and ``PeerLost`` if the receiver is lost or a pair has failed, IndexError for a chunk that does not
    exist.
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
                    raise PeerLost("a state was requested from device to device, but this worker does not use NCCL")
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
    """Return the first CUDA device of ``tensors``, if any."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
