"""The double of nccl4py's Communicator: what NCCL's documents say of its states, and no better than they promise.

The source of each behaviour is named where it is; "guide" is NCCL's user guide 2.29, "header" is nccl.h of 2.29.7.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.doubles.nccl.core import (
    IN_PROGRESS,
    REMOTE_ERROR,
    SUCCESS,
    Core,
    Errors,
    NcclError,
    NcclInvalid,
    UniqueId,
)
from tests.doubles.nccl.net import net
from tests.doubles.nccl.operations import AllGather, Collective, Part, Receive, ReduceScatter, Send
from tests.doubles.nccl.streams import Illegal, Stream, current_device


class Communicator:
    core: Core

    def __init__(self, ptr: int | None = None) -> None:
        """A null communicator."""
        del ptr
        self.is_valid = False
        self.rank = self.nranks = -1
        self.key = ""
        self.addresses: list[str] = []
        self.ended = False
        """Its kernels stop: aborted."""
        self.device = current_device()
        self._error = SUCCESS
        self._late: int | None = None
        """Queries until an error that has happened is told."""
        self._polls = 0
        self._pending: tuple[list[Any], Stream] | None = None
        """The launch that is in progress: it is enqueued at the end of that."""
        self._job: threading.Thread | None = None
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}
        """Of collectives, and of messages per pair: NCCL matches by order (guide, "Point-to-point")."""
        self._connected: set[int] = set()

    # ---- how it comes to be

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId, config: Any = None) -> Any:
        """Guide, ncclCommInitRankConfig: non-blocking returns at once, in progress until all ranks have called."""
        if config is None or config.blocking is not False:
            raise Illegal("the double is for non-blocking communicators")
        cls.core.calls.append("init")
        if net().address == unique_id.root and rank == 0:
            _in_thread(lambda: _root(unique_id, nranks))
        found = cls()
        found.is_valid = True
        cls.core.live.add(found)
        found._polls = cls.core.draw()
        found._job = _in_thread(lambda: found._meet_at_root(unique_id, rank))
        return found

    def _meet_at_root(self, unique_id: UniqueId, rank: int) -> None:
        """Of the others it is told by who made the id, when all have come.

        NCCL does it in a thread of its own; the communicator is in progress meanwhile, and a little longer.
        """
        text, root = unique_id.text, unique_id.root
        net().deliver(root, f"{text}|{rank}", net().address.encode())
        table = net().take(f"{text}|{rank}|table", lambda: self.ended or self._sees_death([root]))
        if table is not None:
            self.addresses = json.loads(table)
            self.key, self.rank, self.nranks = text, rank, len(self.addresses)

    def _meet(self, name: str, ranks: Sequence[int]) -> bool:
        for rank in ranks:
            net().deliver(self.addresses[rank], f"{name}|{rank}|{self.rank}")
        others = [self.addresses[rank] for rank in ranks]
        ended = lambda: self.ended or self._sees_death(others)  # noqa: E731
        return all(net().take(f"{name}|{self.rank}|{rank}", ended) is not None for rank in ranks)

    # ---- states

    def get_async_error(self) -> int:
        """Guide, ncclCommGetAsyncError."""
        self._valid()
        with self._lock:
            if self._late is not None and self._error == SUCCESS:
                self._late -= 1
                if self._late <= 0:
                    self._error = REMOTE_ERROR
            if self._error != SUCCESS:
                return self._error
            if self._job is not None and self._job.is_alive():
                return IN_PROGRESS
            if self._job is not None and not self.key:
                return IN_PROGRESS  # it met nobody
            if self._polls > 0:
                self._polls -= 1
                return IN_PROGRESS
            pending, self._pending, self._job = self._pending, None, None
        if pending is not None:
            parts, stream = pending
            stream.in_progress -= 1
            stream.submit(lambda: self._run(parts))
        return SUCCESS

    def _on_its_device(self, what: str) -> None:
        if (current := current_device()) != self.device:
            self.core.strays.append(f"{what}: the current device was {current}, not {self.device}")

    def _valid(self) -> None:
        if not self.is_valid:
            raise NcclInvalid("the communicator is null")

    def _not_in_progress(self, what: str) -> None:
        """Guide: after ncclInProgress nothing may be called before the state is ncclSuccess, but for aborting."""
        self._valid()
        with self._lock:
            if self._polls > 0 or self._pending is not None or self._job is not None:
                raise Illegal(f"{what} while the communicator is in progress")

    def abort(self) -> None:
        """Header, ncclCommAbort: at any time, from any thread; kernels stop, the pointer is null afterwards."""
        self.core.calls.append("abort")
        self._on_its_device("abort")
        self.core.live.discard(self)
        self.is_valid = False
        with self._lock:
            if self._pending is not None:  # it is not enqueued any more
                self._pending[1].in_progress -= 1
                self._pending = None
            self.ended = True
        net().poke()

    # ---- operations

    def reduce_scatter(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, op: int, *, stream: Any = None) -> None:
        del op
        count = sendbuf.numel() // self.nranks
        if sendbuf.dtype != recvbuf.dtype or count < 1 or recvbuf.numel() < count:
            raise NcclInvalid("buffers that do not fit")  # nccl4py: Communicator.reduce_scatter
        self._call(ReduceScatter(recvbuf, sendbuf), stream)

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, *, stream: Any = None) -> None:
        if sendbuf.dtype != recvbuf.dtype or recvbuf.numel() < sendbuf.numel() * self.nranks or not sendbuf.numel():
            raise NcclInvalid("buffers that do not fit")
        self._call(AllGather(recvbuf, sendbuf), stream)

    def send(self, sendbuf: torch.Tensor, peer: int, *, stream: Any = None) -> None:
        self._call(Send(sendbuf, peer), stream)

    def recv(self, recvbuf: torch.Tensor, peer: int, *, stream: Any = None) -> None:
        self._call(Receive(recvbuf, peer), stream)

    def _call(self, part: Part | Collective, stream: Stream) -> None:
        if self.core.grouped is not None:
            self.core.grouped.append((self, stream, part))
        else:
            self.launch([part], stream)

    def launch(self, parts: list[Any], stream: Stream) -> None:
        """In progress for a while; only then is it in the stream (guide, "Nonblocking Group Operation")."""
        self._not_in_progress("an operation")
        self._on_its_device("an operation")
        if self._error:
            raise NcclError(self._error)
        numbered = [part.numbered(self) for part in parts]
        with self._lock:
            stream.in_progress += 1
            polls = self._polls = self.core.draw()
            self._pending = numbered, stream
        strangers = {peer for part in parts for peer in part.peers(self)} - self._connected
        if strangers:
            self._job = _in_thread(lambda: self._connect(sorted(strangers)))
        elif not polls:  # it returned ncclSuccess
            self.get_async_error()

    def _connect(self, peers: Sequence[int]) -> None:
        """Ranks connect when they first talk to each other (guide, NCCL_RUNTIME_CONNECT): until then the call is in
        progress, and no rank goes on before the others have called it."""
        if self._meet(f"{self.key}|connect", peers):
            self._connected.update(peers)
        else:
            while not self.ended and self._error == SUCCESS:  # in progress for good
                time.sleep(0.001)

    def _run(self, parts: list[Any]) -> None:
        """A kernel: its output is garbage until it is complete, and stays so when it is stopped (guide,
        ncclCommAbort).  It ends in any case, so whoever waits for the stream does not see a difference.

        One that is stopped runs through its steps, copies nothing and posts each of them all the same
        (src/device/prims_simple.h: genericOp, postPeer; prims_ll.h): its peers' kernels complete, without an error.
        """
        for part in parts:
            part.spoil()
        left = sorted(parts, key=lambda part: isinstance(part, Send))  # all go on at the same time
        if posted := not self.ended:
            for part in parts:
                part.post(self)
        while posted and left and left[0].finish(self):
            del left[0]
        for part in left if self.ended and self.core.posts else ():
            part.run_through(self, posted=posted)

    def arrived(self, key: str, peers: Sequence[int]) -> bytes | None:
        """For operations: what a peer sent; None: this end was stopped."""
        addresses = [self.addresses[peer] for peer in peers]
        return net().take(key, lambda: self.ended or self._sees_death(addresses))

    def deliver(self, peer: int, key: str, payload: bytes = b"") -> None:
        net().deliver(self.addresses[peer], key, payload)

    def _sees_death(self, addresses: Sequence[str]) -> bool:
        """Whether a kernel ends because a peer is dead; the error is there before it."""
        if not net().dead.intersection(addresses) or self.core.errors == Errors.NEVER:
            return False
        with self._lock:
            if self.core.errors == Errors.LATE:
                self._late = self.core.draw_late() if self._late is None else self._late
                return False
            self._error = self._error or REMOTE_ERROR
            return True


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, name="a job of NCCL's double", daemon=True)
    thread.start()
    return thread


def _root(unique_id: UniqueId, nranks: int) -> None:
    """Tells all ranks where the others are, when all have come (guide, "Creating a Communicator")."""
    came = [net().take(f"{unique_id.text}|{rank}", lambda: False) for rank in range(nranks)]
    addresses = [address.decode() for address in came if address is not None]
    for rank, address in enumerate(addresses):
        net().deliver(address, f"{unique_id.text}|{rank}|table", json.dumps(addresses).encode())
