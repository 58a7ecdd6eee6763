"""Sending side of state transfers: a worker offers its state as text and tensors, which are sent in chunks.

    holder    tree --flatten--> text (JSON: the tree, tensors by number), tensors
    receiver  text --unflatten--> an equal tree, with tensors that `receiver` fills; nothing is unpickled

    receiver                                     holder: a thread for each connection (a stream named state/<key>)
       | <-- hello: sizes, layout --------------- |   sent when the state with this key is offered
       | --- TEXT ------------------------------> |
       | <-- text, trailer ---------------------- |
       | --- PAIR, NCCL's unique id; CONNECT ---> |   optional; then chunks go from device to device (`nccl.pairs`)
       | --- number of a chunk, in any order ---> |   without a pair, several chunks may be requested ahead
       | <-- the chunk's bytes, trailer --------- |   trailer: number, checksum, 1 if the offer is still valid
       | --- DONE ------------------------------> |   the receiver has the complete state

The holder withdraws its offer before the offered tensors change.  If the holder withdraws the offer while a chunk is
read, the chunk's trailer reports this, and the receiver discards the chunk.  The threads only read the tensors, so the
holder's training continues during a transfer.
"""

from __future__ import annotations

import hashlib
import json
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
from recover_megatron.network.event_loop import is_ready
from recover_megatron.network.peer_store import Streams
from recover_megatron.network.system import watch

log = get_logger(__name__)


MAX_TEXT = 256 << 20
"""Maximum size in bytes of the text, which contains a state's plain values and the shapes of its tensors."""


KIND = "state"
CHUNK = 8 << 20
"""Default size of a chunk in bytes; with chunks of 1 MiB, a transfer takes 50 % longer because of the requests."""
LARGE_CHUNK, MAX_CHUNK = 32 << 20, 1 << 30
"""Size in bytes of a chunk for transfers from GPU to GPU, and the maximum chunk size that a receiver accepts."""
HELLO, REQUEST, TRAILER = struct.Struct("<QQ32s"), struct.Struct("<q"), struct.Struct("<qQ?")
TEXT, DONE, PAIR, CONNECT = -1, -2, -3, -4
LOOK_SECONDS = 0.25
"""Interval in seconds between two checks whether a wait for an offer or for chunks must end."""

Chunk = Sequence[tuple[int, int, int]]
"""Pieces of a chunk, each (index of the tensor, first byte, last byte + 1)."""


class Offer:
    """State ``tree`` that other workers may fetch.  Its tensors are not copied: each request for a chunk reads them.

    ``shared``: number n; the first n tensors are equal on all holders of the state.  ``chunk``: size of a chunk in
    bytes; None: ``CHUNK``.
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
        self.valid = True
        self._lock = threading.Lock()
        self._connections = 0
        self._over = threading.Event()
        self._error: str | None = None

    def parts(self, number: int) -> list[torch.Tensor]:
        """Return the bytes of chunk ``number`` as views of the tensors.  Raises IndexError if the number is invalid."""
        if number < 0:
            raise IndexError(number)
        return [self._parts[tensor][start:stop] for tensor, start, stop in self.chunks[number]]

    def connected(self) -> None:
        """Record that a connection to the receiver was opened; one receiver may open several."""
        with self._lock:
            self._connections += 1

    def was_taken(self) -> None:
        """Record that the receiver has the complete state."""
        self._error = None
        self._over.set()

    def disconnected(self, error: Exception) -> None:
        """Record that a connection failed with ``error`` before the receiver sent DONE over it.

        The receiver counts as lost only when its last connection has ended: a receiver that has the complete state
        may close other connections without DONE.
        """
        with self._lock:
            self._connections -= 1
            if not self._connections and not self._over.is_set():
                self._error = str(error)  # only the text: the error's frames would keep connections and memory alive
                self._over.set()

    def wait(self, patience: Callable[[], None]) -> None:
        """Wait until the receiver has the complete state.  Raises ``PeerLost`` if the receiver is lost.

        ``patience``: called repeatedly; an error that it raises ends the wait.
        """
        while not self._over.wait(LOOK_SECONDS):
            patience()
        if self._error is not None:
            raise PeerLost(f"the worker that was receiving this state is lost: {self._error}")

    def withdraw(self) -> None:
        """Make the offer invalid, so that receivers discard chunks in flight; call this before the tensors change.

        Idempotent.
        """
        self.valid = False
        self._parts = []


def layout_of(tensors: Sequence[torch.Tensor], chunk: int) -> bytes:
    """Return the SHA-256 hash of the tensors' shapes and dtypes, and of the chunk size."""
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(json.dumps([chunk, shapes]).encode()).digest()


def chunks_of(sizes: Sequence[int], shared: int, limit: int | None = None) -> tuple[list[Chunk], int]:
    """Cut tensors of ``sizes`` bytes into chunks; return all chunks, and the number of shared chunks.

    A shared chunk contains only bytes of the first ``shared`` tensors; these chunks come first.  The other chunks
    contain only other tensors.  ``limit``: size of a chunk in bytes; None: ``CHUNK``.
    """
    limit = limit or CHUNK
    common = list(cut(sizes[:shared], limit))
    own = [[(shared + n, a, b) for n, a, b in chunk] for chunk in cut(sizes[shared:], limit)]
    return [*common, *own], len(common)


class Offers:
    """All offers of one worker.  ``streams``: streams of its peer store, over which other workers fetch the states.

    ``pairs``: factory of pairs for receivers that request a transfer from GPU to GPU; None: such requests are refused.
    """

    def __init__(self, streams: Streams, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._changed = threading.Condition()
        self._offers: dict[str, Offer] = {}
        streams.serve(KIND, self._accept)

    def put(self, key: str, offer: Offer) -> Offer:
        """Publish ``offer`` under ``key``, which must not have been used before; return ``offer``."""
        with self._changed:
            self._offers = {known: old for known, old in self._offers.items() if old.valid}
            self._offers[key] = offer
            self._changed.notify_all()
        return offer

    def _accept(self, name: str, sock: socket.socket) -> None:
        threading.Thread(
            target=self._serve, args=(name.partition("/")[2], sock), name="sending a state", daemon=True
        ).start()

    def _serve(self, key: str, sock: socket.socket) -> None:
        with sock, suppress(OSError):  # raised if the receiver closes the connection before the state is offered
            watch(sock)
            offer = self._await(key, sock)
            offer.connected()
            try:
                with beside(offer.gpu, offer.made, within()):
                    serve(sock, SocketTransport(sock), offer, self._pairs)
            except (OSError, PeerLost, IndexError) as error:  # only this connection fails; other connections continue
                log.info(f"a connection over which this worker was sending its state has failed: {error}")
                offer.disconnected(error)

    def _await(self, key: str, sock: socket.socket) -> Offer:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: key in self._offers, LOOK_SECONDS):
                    if not self._offers[key].valid:
                        raise ConnectionResetError("the offer of the requested state was withdrawn")
                    return self._offers[key]
            if is_ready(sock.fileno()):  # before the hello, only a closed connection becomes readable
                raise ConnectionResetError("the worker that requested a state closed the connection")


def serve(sock: socket.socket, transport: StateTransport, offer: Offer, pairs: Pairs | None = None) -> None:
    """Answer the receiver's requests that arrive on ``sock`` until the request DONE.

    Chunks are sent over ``transport``, or over a pair if the receiver has requested one.  Raises OSError or
    ``PeerLost`` if the receiver is lost or a pair fails, IndexError if a requested chunk does not exist.
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
                    raise PeerLost("the receiver requested a transfer over NCCL, but this worker does not use NCCL")
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
            sock.sendall(TRAILER.pack(number, found, offer.valid))


def gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the CUDA device of the first tensor that is on a GPU; None if all tensors are on the host."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
