"""A state that comes from several holders at once; who is lost is left out, the others give what is missing.

    LEAD    from the first holder that answers: the text, and what is not equal in all holders
    PULL    from all holders with the same layout, several connections: the shared chunks, each from whoever is free
              a holder is lost  --> what it was asked for and has not given is asked of the others; where it was to
                                    come from device to device, of itself as well, over another connection
              a chunk is not what was sent --> refused, and that holder is not asked again
    all chunks are there --> DONE to all     no holder is left --> PeerLost, or Disagreement where one was refused

Bytes are received into the memory that ``place`` names: mostly the model's and the optimizer's own, which is in use.
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

STREAMS = 4
"""Connections, over all holders: one of them rarely fills a link, and one thread does not check what it brings."""
AHEAD = 2
"""Chunks that a holder is asked for before the first of them has arrived."""

Shared = Callable[[Any], int]
"""How many tensors of a tree, the first ones, are equal in all holders of the state."""


@dataclass(frozen=True)
class Source:
    """A worker that holds the state.  ``connect``: opens a connection to what it offers; raises ``Unreachable``.

    ``pairs``: this worker's own, where chunks are to come from device to device.
    """

    worker: int
    connect: Callable[[], socket.socket]
    pairs: Pairs | None = None


class _Link:
    """A connection to one holder, after its hello."""

    def __init__(
        self, source: Source, awaited: Callable[[], None], opened: Callable[[int, socket.socket], None]
    ) -> None:
        """``awaited``: asked until the holder offers something; raises to give up.

        ``opened``: told the holder and the connection.
        """
        try:
            self._socket = source.connect()
        except Unreachable as error:
            raise PeerLost(f"worker {source.worker} cannot be reached: {error}", road=error.road) from error
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
            raise Disagreement(f"worker {self.worker} announces chunks of {self.chunk_bytes} bytes")

    def _hello(self, awaited: Callable[[], None]) -> bytes:
        heard = b""
        while len(heard) < state_holder.HELLO.size:
            awaited()
            with suppress(TimeoutError):
                if not (came := self._socket.recv(state_holder.HELLO.size - len(heard))):
                    raise ConnectionResetError("it closed the connection")
                heard += came
        return heard

    @property
    def ahead(self) -> int:
        """Chunks that may be asked for before the first of them has arrived."""
        return 1 if self._pair is not None else AHEAD

    def open_pair(self) -> None:
        """Have chunks come from device to device, if the source says so.  Raises ``PeerLost``."""
        pairs = self.source.pairs
        if pairs is None or self._pair is not None:
            return
        unique_id = pairs.unique_id()
        self._send(state_holder.REQUEST.pack(state_holder.PAIR) + unique_id)
        self._pair = pairs.open(self._socket, unique_id, receives=True)
        self._pair.connect(self.chunk_bytes, lambda: self._send(state_holder.REQUEST.pack(state_holder.CONNECT)))
        log.info(f"the state of worker {self.worker} comes from device to device")

    def ask(self, number: int) -> None:
        """Have it send what has this number; a chunk that comes by a pair is asked for when its receive stands."""
        if self._pair is None or number < 0:
            self._send(state_holder.REQUEST.pack(number))

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise lost(error) from error

    def text(self) -> str:
        if not 0 < self.length <= state_holder.MAX_TEXT:
            raise Disagreement(f"worker {self.worker} announces a state of {self.length} bytes of text")
        self.ask(state_holder.TEXT)
        body = bytearray(self.length)
        self._fill(body)
        self._check(state_holder.TEXT, zlib.crc32(body))
        return body.decode()

    def chunk(self, number: int, parts: Sequence[torch.Tensor]) -> None:
        """Receive the chunk that was asked for first of those that have not come."""
        transport = self._transport if self._pair is None else self._pair
        self._check(number, transport.receive(parts, lambda: self._send(state_holder.REQUEST.pack(number))))

    def _check(self, number: int, found: int) -> None:
        trailer = bytearray(state_holder.TRAILER.size)
        self._fill(trailer)
        told, check_sum, stands = state_holder.TRAILER.unpack(trailer)
        if told == number and not stands:  # its bytes may have changed after the sum of them was taken
            raise PeerLost(f"worker {self.worker} does not hold that state any more")
        if (told, check_sum) != (number, found):
            raise Disagreement(f"a part of a state arrived from worker {self.worker} that is not the one that was sent")

    def _fill(self, buffer: bytearray) -> None:
        try:
            receive_into(self._socket, [memoryview(buffer)])
        except OSError as error:
            raise lost(error) from error

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None  # and its memory, though somebody may hold the link
        self._socket.close()


class _Missing:
    """The chunks that have not arrived, shared out among the threads that receive."""

    def __init__(self, numbers: range) -> None:
        self.changed = threading.Condition()
        self._todo = deque(numbers)
        self._wanted, self.arrived = len(numbers), 0
        self._given_up = False

    @property
    def over(self) -> bool:
        """Whether nothing is to be asked for any more."""
        return self._given_up or self.complete

    @property
    def complete(self) -> bool:
        return self.arrived == self._wanted

    def take(self, *, wait: bool) -> int | None:
        """One to ask for; None: there is none (``wait``: and there will be none, since all have arrived)."""
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: self._todo or self.over)
            return self._todo.popleft() if self._todo else None

    def came(self) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def give_back(self, numbers: Sequence[int]) -> None:
        with self.changed:
            if not self._given_up:
                self._todo.extendleft(reversed(numbers))
            self.changed.notify_all()

    def give_up(self) -> None:
        """Nobody is to ask for anything any more."""
        with self.changed:
            self._todo.clear()
            self._given_up = True
            self.changed.notify_all()


class Receiver:
    """One state on its way.  ``fetch`` once.

    ``sources``: the holders; the first is asked first.  ``stay``: called again and again; raises to end all of it.
    ``awaited``: the same while nothing of a holder's is there yet.  ``progress``: called as chunks arrive.
    ``lost``: the holders that are known to be dead, asked again and again.  The kernel closes the connections of a dead
    process only when it has taken its memory apart, so this end closes them.
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
        """Each with the holder at its other end."""
        self._lock = threading.Lock()
        self._given_up = False
        self._tensors: list[torch.Tensor] = []
        self._chunks: list[Chunk] = []
        self._parts: list[torch.Tensor] = []
        self._errors: list[Exception] = []
        self._changed = threading.Condition()
        self._running = self._away = 0
        """Threads, and those of them that are on the way to a holder, by a connection or a pair."""
        self._refused: set[int] = set()
        """Workers of whom something came that was not what they sent."""
        self._missing = _Missing(range(0))

    def fetch(self, shared: Shared) -> tuple[Any, int]:
        """The tree, and the bytes of its tensors.  ``shared``: of a tree's, how many tensors all holders have equal.

        Raises what ``stay`` and ``awaited`` raise, ``PeerLost``, and ``Disagreement``.
        """
        led: list[tuple[Any, _Link, int]] = []
        try:
            self._run([lambda: led.append(self._lead(shared))], lambda: not self._running)
            if not led:
                raise self._failure()
            tree, link, common = led.pop()  # from now on the thread's that pulls from it
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
        """The holders to which further connections are opened: each in turn."""
        known = [source for source in self._sources if source.worker != leader]
        lead = [source for source in self._sources if source.worker == leader]
        if lead[0].pairs is not None:  # one pair has all of what two devices can do, and costs memory of both
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
        """The text, room for all tensors, and the chunks that the first holder alone can give."""
        tree, tensors = unflatten(link.text(), self._place)
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("a state can be received into contiguous tensors only")
        number = shared(tree)
        if state_holder.layout_of(tensors[:number], link.chunk_bytes) != link.layout:
            raise Disagreement(f"worker {link.worker} says of its state what its text does not")
        self._tensors, self._parts = tensors, [bytes_of(tensor) for tensor in tensors]
        sizes = [part.numel() for part in self._parts]
        self._chunks, common = state_holder.chunks_of(sizes, number, link.chunk_bytes)
        own = _Missing(range(common, len(self._chunks)))
        return tree, self._give_and_take(link, own), common

    def _join(self, source: Source, layout: bytes) -> None:
        with self._on_the_way():
            link = _Link(source, lambda: self._awaited_for(self._missing), self._opened)
        if link.layout != layout:
            raise PeerLost(f"worker {source.worker} holds a state of another shape")
        self._pull(link)

    def _awaited_for(self, missing: _Missing) -> None:
        self._wanted(missing)
        self._awaited()

    def _wanted(self, missing: _Missing) -> None:
        if missing.over:
            raise PeerLost("nothing is missing any more")

    def _pull(self, link: _Link) -> None:
        link = self._give_and_take(link, self._missing)
        with suppress(PeerLost):  # it has given all that was wanted
            link.ask(state_holder.DONE)
        link.close()

    def _give_and_take(self, link: _Link, missing: _Missing) -> _Link:
        """Fetch from one holder until nothing is missing; the link by which it gave last."""
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
                log.warning(f"the state of worker {link.worker} does not come from device to device: {error}")
            by_hosts = replace(link.source, pairs=None)  # the error and its frames are gone, and with them the pair
            with self._on_the_way():  # nor does the epoch's end end it: that holder has offered its state
                link = _Link(by_hosts, lambda: self._wanted(missing), self._opened)
        return link

    @contextmanager
    def _on_the_way(self) -> Iterator[None]:
        """Meanwhile this thread writes nothing and tells no holder anything: who has all does not wait for it."""
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
                missing.came()
            raise PeerLost(f"worker {link.worker} is not to be believed")
        except Disagreement:
            self._refused.add(link.worker)
            raise
        finally:
            missing.give_back(asked)

    # ---- in the caller's

    def _run(self, works: Sequence[Callable[[], Any]], at_rest: Callable[[], bool]) -> None:
        """Run them side by side, asking ``stay`` meanwhile, until they are ``at_rest``."""
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
        except Exception as error:  # noqa: BLE001  the thread's boundary: the caller raises it, if it matters
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
        """End the connections to these, and with them every wait for what they were asked for."""
        with self._lock:
            for holder, sock in self._sockets:
                if holder in holders:
                    with suppress(OSError):  # closed already
                        sock.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        """Have all threads end: nothing is written to any tensor when they have."""
        with self._lock:
            self._given_up = True
            everybody = {holder for holder, _ in self._sockets}
        self._hang_up(everybody)
        self._missing.give_up()

    def _failure(self) -> Exception:
        """Why nobody has given it."""
        for error in self._errors:
            if not isinstance(error, PeerLost):
                return error
        return self._errors[-1] if self._errors else PeerLost("nobody holds the state")
