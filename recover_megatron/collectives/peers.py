"""Clients for the peer stores (key-value services) of other workers, and tests whether workers are reachable.

    in every worker     PeerStoreServer: the worker's peer store, run by a thread; its address is in the worker's status
    in every group      PeerStoreClient: all members of the group connect to the peer store of one member
    in every ring       Neighbours: each member sets values in its own store, and reads from its successor's store
    between workers     Fetcher: reads data of another worker, outside any epoch (``instep.state.overlap``)
    between workers     unreached: returns the workers to which this worker cannot connect

If the member whose store a group uses dies, the epoch ends; in the next epoch the group uses the store of a live
member.  A client connects and receives in a separate thread, so a host that does not answer blocks no training
thread.  Until the epoch is revoked, the values of that host's stores merely appear unset.
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

import torch.distributed as dist

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.network.connection import Connection, Unreachable, family_of
from recover_megatron.network.messages import encode
from recover_megatron.network.peer_store import FETCHED, REQUEST, VALUE, Fetch, PeerStoreServer, Range, Value, Want

WAIT = timedelta(seconds=60)
"""Default time limit of the blocking operations of ``PeerStoreClient``."""


class PeerStoreClient(dist.Store):
    """Client of the peer store at ``address``.  If the store is unreachable, all operations raise ``PeerLost``.

    ``epoch``: epoch of the groups that use this client.  Some epochs later the store deletes the values that this
    client has set.  None: the store keeps the values.
    """

    def __init__(self, address: str, secret: bytes, epoch: int | None = None) -> None:
        super().__init__()
        self._epoch = epoch
        self._address = address
        self._secret = secret
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._asked = set[str]()
        self._unsent = b""
        self._connection: Connection | None = None
        self._error: str | None = None
        self._unreachable = False
        threading.Thread(target=self._talk, name="recover-peer-store-client", daemon=True).start()

    # ---- methods of a store

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of ``key``.  Raises ValueError if the value is too long."""
        self._send(Value(key, value.encode() if isinstance(value, str) else bytes(value), self._epoch))

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
            raise dist.DistStoreError(f"no worker published {', '.join(keys)} within {timeout.total_seconds():g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the time limit is the argument ``timeout`` of ``wait``."""

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._fail("closed")

    # ---- inside

    def _ask(self, key: str) -> None:
        self._check()
        if key not in self._asked:
            self._asked.add(key)
            self._send(Want(key))

    def _check(self) -> None:
        if self._error is not None:
            raise PeerLost(self._error, unreachable=self._unreachable)

    def _send(self, message: Value | Want) -> None:
        frame = encode(message, REQUEST.limit)
        with self._changed:
            self._check()
            if self._connection is None:
                self._unsent += frame
                return
            try:
                self._connection.send(frame)
            except Unreachable as error:
                self._fail(str(error))
                self._check()

    def _fail(self, reason: str, *, unreachable: bool = False) -> None:
        with self._changed:
            if self._error is None:
                self._unreachable = unreachable
                self._error = f"the peer store at {self._address} is unreachable: {reason}"
            if self._connection is not None:
                self._connection.shutdown()
            self._changed.notify_all()

    def _talk(self) -> None:
        """Connect, then receive values until the connection ends; runs in a separate thread."""
        try:
            connection = Connection(self._address, self._secret)
        except Unreachable as error:
            self._fail(str(error), unreachable=error.unreachable)
            return
        try:
            with self._changed:
                self._connection = connection
                self._check()
                connection.send(self._unsent)
            while True:
                answer = connection.receive(VALUE)
                with self._changed:
                    self._values[answer.key] = answer.value
                    self._changed.notify_all()
        except (Unreachable, PeerLost) as error:
            self._fail(str(error), unreachable=isinstance(error, Unreachable) and error.unreachable)
        finally:
            with self._changed:
                self._connection = None
            connection.close()


@dataclass(frozen=True)
class Neighbours:
    """Key-value store of a ring, composed of the peer stores of its members.

    A member sets values only in its own peer store.  Every key ends in "/RANK", the rank (index in ``members``) of the
    member that sets it, so a reader knows which peer store has the value.  A member connects only to its neighbours.
    """

    own: PeerStoreServer
    members: Sequence[int]
    client_of: Callable[[int], PeerStoreClient]
    """Function: worker id of a member -> client of the member's peer store."""
    epoch: int
    """Epoch of the ring; the peer stores delete the values of this epoch some epochs later."""

    def set(self, key: str, value: str) -> None:
        self.own.put(key, value, self.epoch)

    def get(self, key: str) -> bytes:
        return self._of(key).get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set.  Raises ``PeerLost`` with the id of a member whose store is unreachable."""
        for key in keys:
            try:
                if not self._of(key).check([key]):
                    return False
            except PeerLost as lost:
                raise PeerLost(str(lost), self._member(key), unreachable=lost.unreachable) from lost
        return True

    def _of(self, key: str) -> PeerStoreClient:
        return self.client_of(self._member(key))

    def _member(self, key: str) -> int:
        return self.members[int(key.rpartition("/")[2])]


class Fetcher:
    """Connection to the peer store at ``address``, over which this worker reads data of the store's worker.

    A separate thread of that worker answers, so its training continues.  ``patience``: as in
    ``network.connection.Connection``.

    Raises ``PeerLost`` if the store is unreachable, closes the connection, or does not know the run's secret.
    """

    def __init__(self, address: str, secret: bytes, patience: Callable[[], None]) -> None:
        self._address = address
        try:
            self._connection = Connection(address, secret, patience)
        except Unreachable as error:
            raise self._lost(error) from error

    def fetch(self, update: int, parts: Sequence[Range]) -> bytes | None:
        """Return the requested data, at most ``MOST_BYTES`` bytes; None if the other worker does not have it.

        The other worker calls ``PeerStoreServer.source`` with the same arguments, and sends the result.
        """
        try:
            self._connection.send(encode(Fetch(update, list(parts))))
            size = self._connection.receive(FETCHED).size
            return None if size is None else self._connection.receive_bytes(size)
        except Unreachable as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._connection.close()

    def _lost(self, why: Unreachable) -> PeerLost:
        return PeerLost(f"the peer store at {self._address} gave no usable answer: {why}", unreachable=why.unreachable)


REACH_SECONDS = 4.0
"""Time limit in seconds that callers of ``unreached`` use."""
AT_ONCE = 256
"""Maximum number of connections that ``unreached`` opens concurrently."""
_PAUSE = 0.25
"""Pause in seconds before ``unreached`` tries workers again, and between its calls of ``gone``."""


def unreached(addresses: Mapping[int, str], seconds: float, gone: Callable[[], Collection[int]] = tuple) -> set[int]:
    """Return the workers to which this worker cannot open a TCP connection within ``seconds``.

    ``addresses``: worker id -> "HOST PORT" of the worker's peer store.  The kernel of the other host accepts the
    connection, so a worker that is stopped or busy counts as reachable.  Failed connections are tried again until the
    time is over, so a network path that recovers in time counts as reachable.  ``gone``: called repeatedly; returns
    workers that are not tried any more and are not in the result.
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
    """Try to connect to all ``addresses`` until ``deadline`` (time.monotonic); return the workers that were reached."""
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
            # The loop polls once after the deadline, because this process may have been delayed.
            if not left or {worker for worker, _ in trying.values()} <= set(gone()):
                break
    finally:
        for _, sock in trying.values():
            sock.close()
    return reached
