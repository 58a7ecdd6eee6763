"""Receiving side of state transfers: a worker receives a state from several holders concurrently.

    LEAD    The first holder that offers the state is the leader.  It sends the text (the tree as JSON), and the
            chunks that are not equal on all holders.
    PULL    All holders with the leader's layout (shapes, dtypes, chunk size) send the *shared* chunks,
            which are equal on all holders.  The next chunk is requested from the holder that is free first.
              a holder is lost           --> its missing chunks are requested from the other holders
              a GPU-to-GPU transfer fails --> the chunks are requested through host memory, also from this holder
              a checksum differs         --> the chunk is discarded, and its holder gets no more requests
    all chunks have arrived --> send DONE to all holders
    no holder is left       --> raise PeerLost; Disagreement if a checksum differed

The function ``place`` returns the memory for each tensor, mostly memory that the model and the optimizer use already.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.nccl.pairs import Pair, Pairs
from recover_megatron.collectives.state import holder as state_holder
from recover_megatron.collectives.state.holder import Chunk
from recover_megatron.collectives.state.transport import SocketTransport, bytes_of, lost, receive_into
from recover_megatron.collectives.state.trees import Place, unflatten
from recover_megatron.errors import Disagreement
from recover_megatron.logger import get_logger
from recover_megatron.network.connection import Unreachable
from recover_megatron.network.system import watch

log = get_logger(__name__)

STREAMS = 4  # with only one connection, the computation of checksums in its thread limits the speed
"""Number of connections to holders, or one per holder if there are more; with pairs, the maximum number of pairs."""
AHEAD = 2
"""Number of chunks that one connection requests before the first of these chunks has arrived."""

Shared = Callable[[Any], int]
"""Function: tree -> number n such that the first n tensors of the tree are equal on all holders."""


@dataclass(frozen=True)
class Source:
    """Holder of the state, the worker with id ``worker``.

    ``connect``: opens a connection to the holder's offer; raises ``Unreachable``.  ``pairs``: the receiver's factory of
    pairs if the holder must send chunks from GPU to GPU; None: chunks go through host memory.
    """

    worker: int
    connect: Callable[[], socket.socket]
    pairs: Pairs | None = None


class _Link:
    """Connection to one holder, which has offered the state and sent its hello (``holder.HELLO``)."""

    def __init__(
        self, source: Source, awaited: Callable[[], None], opened: Callable[[int, socket.socket], None]
    ) -> None:
        """Connect to the holder and wait for its hello.  Raises ``PeerLost`` and ``Disagreement``.

        ``awaited``: called repeatedly until the hello arrives; may raise an error, which ends the wait.  ``opened``:
        called with the holder's worker id and the new connection.
        """
        try:
            self._socket = source.connect()
        except Unreachable as error:
            raise PeerLost(f"worker {source.worker} is unreachable: {error}", unreachable=error.unreachable) from error
        opened(source.worker, self._socket)
        watch(self._socket)
        self.source, self.worker = source, source.worker
        self._transport = SocketTransport(self._socket)
        self._pair: Pair | None = None
        try:
            self._socket.settimeout(state_holder.LOOK_SECONDS)
            self.length, self.chunk_bytes, self.layout = state_holder.HELLO.unpack(self._hello(awaited))
            self._socket.settimeout(None)
        except OSError as error:
            raise lost(error) from error
        if not 0 < self.chunk_bytes <= state_holder.MAX_CHUNK:
            raise Disagreement(f"worker {self.worker} announced an invalid chunk size of {self.chunk_bytes} bytes")

    def _hello(self, awaited: Callable[[], None]) -> bytes:
        data = b""
        while len(data) < state_holder.HELLO.size:
            awaited()
            with suppress(TimeoutError):
                if not (part := self._socket.recv(state_holder.HELLO.size - len(data))):
                    raise ConnectionResetError("the peer closed the connection")
                data += part
        return data

    @property
    def ahead(self) -> int:
        """Maximum number of chunks that are requested before the first of these chunks has arrived."""
        return 1 if self._pair is not None else AHEAD

    def open_pair(self) -> None:
        """If ``source.pairs`` is set, open a pair; later chunks go from GPU to GPU.  Raises ``PeerLost`` on failure."""
        pairs = self.source.pairs
        if pairs is None or self._pair is not None:
            return
        unique_id = pairs.unique_id()
        self._send(state_holder.REQUEST.pack(state_holder.PAIR) + unique_id)
        self._pair = pairs.open(self._socket, unique_id, receives=True)
        self._pair.connect(self.chunk_bytes, lambda: self._send(state_holder.REQUEST.pack(state_holder.CONNECT)))
        log.info(f"the state of worker {self.worker} is transferred from device to device")

    def ask(self, number: int) -> None:
        """Request chunk ``number``; with a pair, ``chunk`` does this instead, when it has launched the receive."""
        if self._pair is None or number < 0:
            self._send(state_holder.REQUEST.pack(number))

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise lost(error) from error

    def text(self) -> str:
        if not 0 < self.length <= state_holder.MAX_TEXT:
            raise Disagreement(f"worker {self.worker} announced an invalid text size of {self.length} bytes")
        self.ask(state_holder.TEXT)
        body = bytearray(self.length)
        self._fill(body)
        self._check(state_holder.TEXT, zlib.crc32(body))
        return body.decode()

    def chunk(self, number: int, parts: Sequence[torch.Tensor]) -> None:
        """Receive chunk ``number``, the oldest requested chunk, into ``parts``, and check its checksum."""
        transport = self._transport if self._pair is None else self._pair
        self._check(number, transport.receive(parts, lambda: self._send(state_holder.REQUEST.pack(number))))

    def _check(self, number: int, found: int) -> None:
        trailer = bytearray(state_holder.TRAILER.size)
        self._fill(trailer)
        sent, check_sum, valid = state_holder.TRAILER.unpack(trailer)
        if sent == number and not valid:  # the bytes may have changed after the holder computed the checksum
            raise PeerLost(f"worker {self.worker} has withdrawn its offer of the state")
        if (sent, check_sum) != (number, found):
            raise Disagreement(f"a chunk of the state of worker {self.worker} arrived damaged: its checksum differs")

    def _fill(self, buffer: bytearray) -> None:
        try:
            receive_into(self._socket, [memoryview(buffer)])
        except OSError as error:
            raise lost(error) from error

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None  # frees the pair's memory even if other objects refer to this link
        self._socket.close()


class _Missing:
    """Queue of the chunks that have not arrived yet, from which the receiving threads take chunks to request."""

    def __init__(self, numbers: range) -> None:
        self.changed = threading.Condition()
        self._todo = deque(numbers)
        self._wanted, self.arrived = len(numbers), 0
        self._given_up = False

    @property
    def over(self) -> bool:
        """True if no chunk must be requested: all chunks have arrived, or the receipt of the state was given up."""
        return self._given_up or self.complete

    @property
    def complete(self) -> bool:
        return self.arrived == self._wanted

    def take(self, *, wait: bool) -> int | None:
        """Return a chunk to request, or None.  ``wait``: if the queue is empty, wait for a chunk or until ``over``."""
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: self._todo or self.over)
            return self._todo.popleft() if self._todo else None

    def mark_arrived(self) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def give_back(self, numbers: Sequence[int]) -> None:
        with self.changed:
            if not self._given_up:
                self._todo.extendleft(reversed(numbers))
            self.changed.notify_all()

    def give_up(self) -> None:
        """Empty the queue for good, so that all threads stop requesting chunks."""
        with self.changed:
            self._todo.clear()
            self._given_up = True
            self.changed.notify_all()


class Receiver:
    """Receiver of one state.  The caller calls ``fetch`` once.

    ``sources``: the holders, in the order in which they are tried as leader.  ``place``: returns the memory for each
    tensor.  ``stay``: called repeatedly; an error that it raises aborts the receipt.  ``awaited``: called repeatedly
    while a holder has not offered the state; an error that it raises ends this wait.  ``progress``: called when chunks
    have arrived.  ``lost``: called repeatedly; returns the holders that are known to be dead.  The receiver shuts the
    connections to dead holders, because the kernel closes them only after it has freed the process's memory.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        place: Place,
        *,
        stay: Callable[[], None],
        awaited: Callable[[], None],
        progress: Callable[[], None] = lambda: None,
        lost: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._sources = list(sources)
        self._place = place
        self._stay, self._awaited, self._progress, self._lost = stay, awaited, progress, lost
        self._sockets: list[tuple[int, socket.socket]] = []
        """(holder, socket) of each connection that was opened."""
        self._lock = threading.Lock()
        self._given_up = False
        self._tensors: list[torch.Tensor] = []
        self._chunks: list[Chunk] = []
        self._parts: list[torch.Tensor] = []
        self._errors: list[Exception] = []
        self._changed = threading.Condition()
        self._running = self._away = 0
        """Number of running threads, and number of these that are opening a connection or a pair to a holder."""
        self._refused: set[int] = set()
        """Ids of the workers from which a damaged chunk arrived."""
        self._missing = _Missing(range(0))

    def fetch(self, shared: Shared) -> tuple[Any, int]:
        """Receive the state; return its tree, and the size of its tensors in bytes.  ``shared``: see ``Shared``.

        Raises ``PeerLost`` if no holder is left, ``Disagreement`` if a holder sent a damaged or invalid state, and the
        errors of ``stay`` and ``awaited``.
        """
        led: list[tuple[Any, _Link, int]] = []
        try:
            self._run([lambda: led.append(self._lead(shared))], lambda: not self._running)
            if not led:
                raise self._failure()
            tree, link, common = led.pop()  # from now on the thread that runs ``_pull`` must close ``link``
            self._missing = _Missing(range(common))
            layout = link.layout
            works: list[Callable[[], None]] = [lambda: self._pull(link)]
            if common > AHEAD:
                works += [lambda s=source: self._join(s, layout) for source in self._further(link.worker)]  # type: ignore[misc]
            self._run(works, self._at_rest)
            if not self._missing.complete:
                raise self._failure()
        finally:
            self._end()
            for _, link, _ in led:
                link.close()
        return tree, sum(tensor.nbytes for tensor in self._tensors)

    def _further(self, leader: int) -> list[Source]:
        """Return the holder of each connection that must still be opened; a holder may occur repeatedly."""
        known = [source for source in self._sources if source.worker != leader]
        lead = [source for source in self._sources if source.worker == leader]
        if lead[0].pairs is not None:  # no second pair to a holder: one pair saturates both devices and needs memory
            return [*known[: STREAMS - 1], *(replace(source, pairs=None) for source in known[STREAMS - 1 :])]
        turns = [*known, *lead]
        return [turns[n % len(turns)] for n in range(max(STREAMS - 1, len(known)))]

    # ---- in threads

    def _lead(self, shared: Shared) -> tuple[Any, _Link, int]:
        while True:
            source = self._sources[0]
            try:
                link = _Link(source, self._awaited, self._opened)
                return self._begin(link, shared)
            except (PeerLost, Disagreement) as error:
                self._errors.append(error.bare() if isinstance(error, PeerLost) else error)
                self._sources.pop(0)
                if not self._sources or self._given_up:
                    raise

    def _begin(self, link: _Link, shared: Shared) -> tuple[Any, _Link, int]:
        """Receive the text and all chunks that are not shared; return tree, link used last, number of shared chunks."""
        tree, tensors = unflatten(link.text(), self._place)
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("a state can only be received into contiguous tensors")
        number = shared(tree)
        if state_holder.layout_of(tensors[:number], link.chunk_bytes) != link.layout:
            raise Disagreement(f"the layout that worker {link.worker} announced does not match the text of its state")
        self._tensors, self._parts = tensors, [bytes_of(tensor) for tensor in tensors]
        sizes = [part.numel() for part in self._parts]
        self._chunks, common = state_holder.chunks_of(sizes, number, link.chunk_bytes)
        own = _Missing(range(common, len(self._chunks)))
        return tree, self._give_and_take(link, own), common

    def _join(self, source: Source, layout: bytes) -> None:
        with self._on_the_way():
            link = _Link(source, lambda: self._awaited_for(self._missing), self._opened)
        if link.layout != layout:
            raise PeerLost(f"worker {source.worker} holds a state with other shapes, dtypes or chunk size")
        self._pull(link)

    def _awaited_for(self, missing: _Missing) -> None:
        self._wanted(missing)
        self._awaited()

    def _wanted(self, missing: _Missing) -> None:
        if missing.over:
            raise PeerLost("this connection is not needed, because no chunk is missing")

    def _pull(self, link: _Link) -> None:
        link = self._give_and_take(link, self._missing)
        with suppress(PeerLost):  # a lost holder needs no DONE, and has sent all requested chunks
            link.ask(state_holder.DONE)
        link.close()

    def _give_and_take(self, link: _Link, missing: _Missing) -> _Link:
        """Fetch chunks from one holder until none is missing; return the link used last.

        If a transfer from GPU to GPU fails, continue with a new link through host memory.
        """
        while not missing.over:
            try:
                with self._on_the_way():
                    link.open_pair()
                self._take_from(link, missing)
                break
            except BaseException as error:
                link.close()
                if not isinstance(error, PeerLost) or link.source.pairs is None or missing.over:
                    raise
                log.warning(f"worker {link.worker}'s state cannot be transferred from device to device: {error}")
            by_hosts = replace(link.source, pairs=None)  # not in ``except``: there the error keeps the pair alive
            with self._on_the_way():  # does not call ``awaited``, because this holder has offered its state already
                link = _Link(by_hosts, lambda: self._wanted(missing), self._opened)
        return link

    @contextmanager
    def _on_the_way(self) -> Iterator[None]:
        """Context in which a thread only opens a connection and writes no tensor, so ``fetch`` need not wait for it."""
        with self._changed:
            self._away += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._away -= 1

    def _take_from(self, link: _Link, missing: _Missing) -> None:
        asked: deque[int] = deque()
        try:
            while link.worker not in self._refused:
                while len(asked) < link.ahead and (number := missing.take(wait=not asked)) is not None:
                    asked.append(number)
                    link.ask(number)
                if not asked:
                    return
                pieces = self._chunks[asked[0]]
                link.chunk(asked[0], [self._parts[tensor][start:stop] for tensor, start, stop in pieces])
                asked.popleft()
                missing.mark_arrived()
            raise PeerLost(f"worker {link.worker} gets no more requests, because it sent a damaged chunk")
        except Disagreement:
            self._refused.add(link.worker)
            raise
        finally:
            missing.give_back(asked)

    # ---- in the caller's thread

    def _run(self, works: Sequence[Callable[[], Any]], at_rest: Callable[[], bool]) -> None:
        """Run ``works`` in threads until ``at_rest()`` is True; while they run, call ``stay`` and ``progress``."""
        self._running = len(works)
        threads = [threading.Thread(target=self._one, args=(w,), name="receiving a state", daemon=True) for w in works]
        for thread in threads:
            thread.start()
        seen = -1
        while True:
            with self._changed:
                if self._changed.wait_for(at_rest, state_holder.LOOK_SECONDS):
                    return
            try:
                self._stay()
                self._hang_up(self._lost())
            except BaseException:
                self._end()
                for thread in threads:
                    thread.join()
                raise
            if self._missing.arrived != seen:
                seen = self._missing.arrived
                self._progress()

    def _at_rest(self) -> bool:
        return self._running == self._away if self._missing.complete else not self._running

    def _one(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  the thread's boundary: the caller raises it if the receipt fails
            self._errors.append(error.bare() if isinstance(error, PeerLost) else error)
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _opened(self, holder: int, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.append((holder, sock))
            if self._given_up:
                sock.shutdown(socket.SHUT_RDWR)

    def _hang_up(self, holders: Collection[int]) -> None:
        """Shut the connections to ``holders``, so that all waits for chunks from these holders end."""
        with self._lock:
            for holder, sock in self._sockets:
                if holder in holders:
                    with suppress(OSError):  # the socket is closed
                        sock.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        """Shut all connections and empty the queue of missing chunks, so that all receiving threads end."""
        with self._lock:
            self._given_up = True
            everybody = {holder for holder, _ in self._sockets}
        self._hang_up(everybody)
        self._missing.give_up()

    def _failure(self) -> Exception:
        """Return the error to raise if the state was not received: the first that is no ``PeerLost``, else the last."""
        for error in self._errors:
            if not isinstance(error, PeerLost):
                return error
        return self._errors[-1] if self._errors else PeerLost("no worker holds the state")
