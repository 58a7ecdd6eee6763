"""How a worker reads from the peer store of another one, and tries whether it can be reached: no node is special.

    every worker    PeerStoreServer: a key-value service in a thread; its address goes with the worker's status
    every group     PeerStoreClient: this worker's view of the store that the group uses: a member's, chosen alike
    every ring      Neighbours: everybody tells on its own store, and asks on that of its successor
    one worker      Fetcher: bytes of another worker, in no epoch and without meeting it (``instep.state.overlap``)
    one worker      unreached: whom of the others it cannot connect to

If the member that keeps a group's store dies the epoch is over anyway, and in the next one the group uses another's.
A client talks in a thread, so a host that has gone silent blocks no training thread: what it asks is just not there,
until the epoch is revoked.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.network.connection import Challenge, Connection, Unreachable, family_of
from recover_megatron.network.peer_store import MOST_BYTES, PeerStoreServer

WAIT = timedelta(seconds=60)
"""How long the blocking operations of ``PeerStoreClient`` wait."""


class PeerStoreClient(dist.Store):
    """The peer store at ``address``.  Out of reach, all its operations raise ``PeerLost``.

    ``epoch``: that of the groups which use it: what they set is forgotten some epochs later.  None: they outlive it.
    """

    def __init__(self, address: str, secret: bytes, epoch: int | None = None) -> None:
        super().__init__()
        self._epoch = {} if epoch is None else {"epoch": epoch}
        self._address = address
        self._challenge = Challenge(secret)
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._asked = set[str]()
        self._unsent: list[dict[str, Any]] = []
        self._connection: Connection | None = None
        self._error: str | None = None
        self._road = False
        threading.Thread(target=self._talk, name="recover-peer-store-client", daemon=True).start()

    # ---- what a store is asked

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._send(set=key, value=text, **self._epoch)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            for key in keys:
                self._ask(key)
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta = WAIT) -> None:
        with self._changed:
            for key in keys:
                self._ask(key)
            there = self._changed.wait_for(
                lambda: self._error is not None or all(key in self._values for key in keys), timeout.total_seconds()
            )
            self._check()
        if not there:
            raise dist.DistStoreError(f"nobody published {', '.join(keys)} within {timeout.total_seconds():g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        """The waiting is bounded already."""

    def close(self) -> None:
        """No more of it is needed; idempotent."""
        self._fail("closed")

    # ---- inside

    def _ask(self, key: str) -> None:
        self._check()
        if key not in self._asked:
            self._asked.add(key)
            self._send(want=key)

    def _check(self) -> None:
        if self._error is not None:
            raise PeerLost(self._error, road=self._road)

    def _send(self, **message: Any) -> None:
        with self._changed:
            self._check()
            if self._connection is None:
                self._unsent.append(message)
                return
            try:
                self._connection.send(message)
            except Unreachable as error:
                self._fail(str(error))
                self._check()

    def _fail(self, reason: str, *, road: bool = False) -> None:
        with self._changed:
            if self._error is None:
                self._road = road
                self._error = f"the peer store at {self._address} is out of reach: {reason}"
            if self._connection is not None:
                self._connection.shutdown()
            self._changed.notify_all()

    def _talk(self) -> None:
        """In a thread of its own, until the connection ends."""
        try:
            connection = Connection(self._address, self._challenge)
        except Unreachable as error:
            self._fail(str(error), road=error.road)
            return
        try:
            with self._changed:
                self._connection = connection
                self._check()
                connection.send(*self._unsent)
            while True:
                told = connection.receive()
                with self._changed:
                    self._values[str(told["key"])] = str(told["value"]).encode("latin-1")
                    self._changed.notify_all()
        except (Unreachable, PeerLost, ValueError, KeyError) as error:
            self._fail(str(error), road=isinstance(error, Unreachable) and error.road)
        finally:
            with self._changed:
                self._connection = None
            connection.close()


@dataclass(frozen=True)
class Neighbours:
    """The peer stores of the members of a ring: each tells on its own, so nobody is needed but one's neighbours.

    A key ends in the rank of the member that sets it, the place in ``members``.
    """

    own: PeerStoreServer
    members: Sequence[int]
    client_of: Callable[[int], PeerStoreClient]
    """The view of a member's peer store."""
    epoch: int
    """What is set belongs to it."""

    def set(self, key: str, value: str) -> None:
        self.own.put(key, value, self.epoch)

    def get(self, key: str) -> bytes:
        return self._of(key).get(key)

    def check(self, keys: list[str]) -> bool:
        """Raises ``PeerLost``, which names the member."""
        for key in keys:
            try:
                if not self._of(key).check([key]):
                    return False
            except PeerLost as lost:
                raise PeerLost(str(lost), self._member(key), road=lost.road) from lost
        return True

    def _of(self, key: str) -> PeerStoreClient:
        return self.client_of(self._member(key))

    def _member(self, key: str) -> int:
        return self.members[int(key.rpartition("/")[2])]


class Fetcher:
    """A connection to the peer store at ``address``, to read bytes that the worker there holds; its thread answers.

    ``patience``: as that of ``network.connection.Connection``.  Raises ``PeerLost`` if the other side cannot be
    reached, hangs up, or does not know the run's secret.
    """

    def __init__(self, address: str, secret: bytes, patience: Callable[[], None]) -> None:
        self._address = address
        try:
            self._connection = Connection(address, Challenge(secret), patience)
        except Unreachable as error:
            raise self._lost(error, road=error.road) from error

    def fetch(self, what: Sequence[int]) -> bytes | None:
        """What the other side's ``source`` gives for these numbers: at most ``MOST_BYTES``; None: nothing."""
        try:
            self._connection.send({"fetch": list(what)})
            size = int(self._connection.receive()["bytes"])
            if size > MOST_BYTES:
                raise self._lost(f"it announces {size} bytes, the limit is {MOST_BYTES}")
            return None if size < 0 else self._connection.receive_bytes(size)
        except Unreachable as error:
            raise self._lost(error, road=error.road) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _lost(self, why: object, *, road: bool = False) -> PeerLost:
        return PeerLost(f"the peer store at {self._address} does not answer: {why}", road=road)


REACH_SECONDS = 4.0
"""What ``unreached`` is given by its callers."""
AT_ONCE = 256
"""Connections that it tries at a time."""
_PAUSE = 0.25
"""Before somebody who refused is tried again, and between two looks at who is still there."""


def unreached(addresses: Mapping[int, str], seconds: float, gone: Callable[[], Collection[int]] = tuple) -> set[int]:
    """The workers whose peer stores (worker -> "HOST PORT") cannot be connected to within ``seconds``.

    Only the kernels of both hosts take part: a worker that is stopped, or computes, can be reached.  A road that comes
    back meanwhile is not broken: a worker that cannot be reached is tried again until the time is over.
    ``gone``: who need not be tried any more, asked again and again; they are not among the answer.
    """
    deadline = time.monotonic() + seconds
    left, reached = sorted(addresses), set[int]()
    while left:
        missing: list[int] = []
        for at in range(0, len(left), AT_ONCE):
            batch = {worker: addresses[worker] for worker in left[at : at + AT_ONCE]}
            connected = _try(batch, min(deadline, time.monotonic() + seconds / 2), gone)
            missing += [worker for worker in batch if worker not in connected]
            reached |= connected
        now_gone = set(gone())
        left = [worker for worker in missing if worker not in now_gone]
        if time.monotonic() + _PAUSE >= deadline:
            break
        if left:
            time.sleep(_PAUSE)
    return set(left)


def _try(addresses: Mapping[int, str], deadline: float, gone: Callable[[], Collection[int]]) -> set[int]:
    """Those who have answered until all have, one way or the other, or the time is over."""
    poll, trying, reached = select.poll(), dict[int, tuple[int, socket.socket]](), set[int]()
    try:
        for worker, address in addresses.items():
            host, port = address.split(" ")
            sock = socket.socket(family_of(host), socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex((host, int(port)))
            if code == errno.EINPROGRESS:
                trying[sock.fileno()] = worker, sock
                poll.register(sock, select.POLLOUT)
            else:
                sock.close()
                reached |= {worker} if code == 0 else set()
        while trying:
            left = max(0.0, deadline - time.monotonic())
            for number, _ in poll.poll(min(left, _PAUSE) * 1000):
                worker, sock = trying.pop(number)
                poll.unregister(number)
                reached |= {worker} if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 else set()
                sock.close()
            # The last look is one behind the deadline: this process, too, may have been held up.
            if not left or {worker for worker, _ in trying.values()} <= set(gone()):
                break
    finally:
        for _, sock in trying.values():
            sock.close()
    return reached
