"""Sending side of state transfers: a worker offers its state as text and tensors, which are sent in chunks.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors
    receiver  text --unflatten--> an equal tree, with tensors that `receiver` fills; nothing is unpickled

    receiver                                     holder: a thread for each connection (a stream named state/<key>)
       | <-- sizes of text and chunk, layout ---- |   as soon as the state of that key is offered
       | --- TEXT ------------------------------> |
       | <-- text, trailer ---------------------- |
       | --- PAIR, NCCL's unique id; CONNECT ---> |   optional; then chunks go from device to device (`nccl.pairs`)
       | --- number of a chunk, in any order ---> |   without NCCL, several chunks may be requested ahead
       | <-- the chunk's bytes, trailer --------- |   trailer: number, checksum, 1 if the offer is still valid
       | --- DONE ------------------------------> |   everything has arrived

An offer is withdrawn before its tensors change.  If the offer was withdrawn while a chunk was read, the chunk's trailer
says so, and the receiver discards the chunk.  The holder's training continues meanwhile, since these threads only read
the tensors.
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
"""Maximum size in bytes of the text, which has the plain values of a state and the shapes of its tensors."""


KIND = "state"
CHUNK = 8 << 20
"""Default size of a chunk in bytes, so large that requests cost little (with 1 MiB a transfer took 50 % longer)."""
LARGE_CHUNK, MAX_CHUNK = 32 << 20, 1 << 30
"""Sizes in bytes: of a chunk for transfers from device to device, which are faster; maximum that a receiver accepts."""
HELLO, REQUEST, TRAILER = struct.Struct("<QQ32s"), struct.Struct("<q"), struct.Struct("<qQ?")
TEXT, DONE, PAIR, CONNECT = -1, -2, -3, -4
LOOK_SECONDS = 0.25
"""Interval in seconds at which a wait for an offer or for chunks checks whether it must end."""

Chunk = Sequence[tuple[int, int, int]]
"""Pieces of a chunk, each (number of the tensor, first byte, byte behind the last)."""


class Offer:
    """State ``tree`` that other workers may fetch.  Its tensors are not copied, but read when a chunk is requested.

    ``shared``: number of tensors, from the first on, that are equal on all holders of the state; see ``chunks_of``.
    ``chunk``: size of a chunk in bytes; None: ``CHUNK``.
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
        """Return the bytes of chunk ``number``, as pieces of tensors.  Raises IndexError if there is no such chunk."""
        if number < 0:
            raise IndexError(number)
        return [self._parts[tensor][start:stop] for tensor, start, stop in self.chunks[number]]

    def connected(self) -> None:
        """Count one more connection over which the receiver fetches this state; a receiver may open several."""
        with self._lock:
            self._connections += 1

    def was_taken(self) -> None:
        """Record that the receiver has the complete state."""
        self._error = None
        self._over.set()

    def disconnected(self, error: Exception) -> None:
        """Record that a connection ended, with ``error``, before the receiver had sent DONE over this connection.

        The receiver counts as dead only when its last connection has ended, because a receiver that has the complete
        state also closes connections on which requests are still unanswered.
        """
        with self._lock:
            self._connections -= 1
            if not self._connections and not self._over.is_set():
                self._error = str(error)  # not the error, whose frames would keep connections and memory alive
                self._over.set()

    def wait(self, patience: Callable[[], None]) -> None:
        """Wait until the receiver has the state.  Raises ``PeerLost`` if it is lost; ``patience`` may raise, too."""
        while not self._over.wait(LOOK_SECONDS):
            patience()
        if self._error is not None:
            raise PeerLost(f"the worker that was receiving this state is lost: {self._error}")

    def withdraw(self) -> None:
        """Make the offer invalid before its tensors change, so that receivers discard chunks in flight.  Idempotent."""
        self.stands = False
        self._parts = []


def layout_of(tensors: Sequence[torch.Tensor], chunk: int) -> bytes:
    """Return a hash of 32 bytes of the tensors' shapes and dtypes, and of the chunk size."""
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(json.dumps([chunk, shapes]).encode()).digest()


def chunks_of(sizes: Sequence[int], shared: int, limit: int | None = None) -> tuple[list[Chunk], int]:
    """Cut tensors of ``sizes`` bytes into chunks; return the chunks, and how many of them contain shared tensors.

    The chunks of the first ``shared`` tensors come first, and contain no other tensor.  ``limit``: size of a chunk in
    bytes; None: ``CHUNK``.
    """
    limit = limit or CHUNK
    common = list(cut(sizes[:shared], limit))
    own = [[(shared + n, a, b) for n, a, b in chunk] for chunk in cut(sizes[shared:], limit)]
    return [*common, *own], len(common)


class Offers:
    """All offers of one worker, served to every worker that connects through the ``streams`` of its peer store.

    ``pairs``: for receivers that request a transfer from device to device; None: such requests are refused.
    """

    def __init__(self, streams: Streams, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._changed = threading.Condition()
        self._offers: dict[str, Offer] = {}
        streams.serve(KIND, self._accept)

    def put(self, key: str, offer: Offer) -> Offer:
        """Publish ``offer`` under ``key``, which must not have been used before; return ``offer``."""
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
        with sock, suppress(OSError):  # the receiver closed the connection before the state was offered
            watch(sock)
            offer = self._await(key, sock)
            offer.connected()
            try:
                with beside(offer.gpu, offer.made, within()):
                    serve(sock, SocketTransport(sock), offer, self._pairs)
            except (OSError, PeerLost, IndexError) as error:  # a fault of this connection; the others continue
                log.info(f"one connection over which a state was being sent has ended: {error}")
                offer.disconnected(error)

    def _await(self, key: str, sock: socket.socket) -> Offer:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: key in self._offers, LOOK_SECONDS):
                    if not self._offers[key].stands:
                        raise ConnectionResetError("the offer of that state was withdrawn")
                    return self._offers[key]
            if select.select([sock], [], [], 0)[0]:  # no request comes before the hello, so the receiver has hung up
                raise ConnectionResetError("the worker that requested a state closed the connection")


def serve(sock: socket.socket, transport: StateTransport, offer: Offer, pairs: Pairs | None = None) -> None:
    """Answer the requests that arrive on ``sock`` until DONE; send chunks by ``transport``, or by a pair if requested.

    Raises OSError or ``PeerLost`` if the receiver is lost or a pair has failed, IndexError if a requested chunk does
    not exist.
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
    """Return the CUDA device of the first tensor that is on one; None if no tensor is."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
