"""What the members of an epoch tell each other while they open its groups, kept by one of them: no node is special.

    every worker:   Board      a small key-value service in a thread; its address goes with the worker's status
    every group:    Pinned     this worker's view of the board that the group uses: a member's, chosen alike by all
    every ring:     Neighbours everybody tells on its own board, and asks on that of its successor

If that member dies the epoch is over anyway, and in the next one the group uses another's.  A line of JSON each way:

    board -> client   {"nonce": s}
    client -> board   {"nonce": c, "mac": HMAC(secret, "client" s c)}     then  {"set": key, "value": v, "epoch": n}
    board -> client   {"mac": HMAC(secret, "board" s c)}                  and  {"want": key}
    board -> client   {"key": key, "value": v}                            as soon as somebody sets it

A board also gives bytes of its own worker to whoever asks (`fetch`).

Asked once, a board answers when it can: nobody polls it over the network.  The client's talking is done by a thread, so
a host that has gone silent blocks no training thread: what it asks is just not there, until the epoch is revoked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.door import family_of
from recover_megatron.collectives.errors import PeerLost, is_of_the_road
from recover_megatron.collectives.silence import is_silent, watch

_BACKLOG = 4096
LONGEST_LINE = 1 << 20
LONGEST_BEFORE_PROOF = 1 << 10
HANDSHAKE_SECONDS = 5.0
MOST_UNPROVED = 256
QUIET_SECONDS = 60.0
"""Between two lines about a board that can let nobody in."""
MOST_BYTES = 16 << 20
"""Limit of what a board gives for one request (``fetch``)."""
Source = Callable[[Sequence[int]], bytes | None]
"""What a board gives for some numbers; called in its thread.  None: it does not have that."""
KEPT_EPOCHS = 4
"""A board forgets what belongs to epochs before the newest so many that it has heard of: their groups are gone."""
WAIT = timedelta(seconds=60)
"""How long the blocking operations of ``Pinned`` wait."""

_open: weakref.WeakSet[Board] = weakref.WeakSet()


def _close_in_child() -> None:
    """A process forked from a worker must not keep the board of a dead worker open."""
    for board in list(_open):
        board.listener.close()


os.register_at_fork(after_in_child=_close_in_child)


def _mac(secret: bytes, role: str, board_nonce: str, client_nonce: str) -> str:
    return hmac.new(secret, f"board|{role}|{board_nonce}|{client_nonce}".encode(), "sha256").hexdigest()


def prove(secret: bytes, mine: str, theirs: str) -> dict[str, str]:
    """A client's answer to a board's nonce ``theirs``."""
    return {"nonce": mine, "mac": _mac(secret, "client", theirs, mine)}


def check_board(secret: bytes, mine: str, theirs: str, told: dict[str, str]) -> None:
    """Raise ValueError unless what the board ``told`` then shows that it knows the secret."""
    if not hmac.compare_digest(str(told["mac"]), _mac(secret, "board", theirs, mine)):
        raise ValueError("whoever answers does not know the run's secret")


class _Lines:
    """The lines of a connection, none longer than asked for, whatever the other side sends."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._read = b""

    async def next(self, limit: int) -> bytes:
        """The next one; empty at the end.  Raises ValueError for one of more than ``limit`` bytes."""
        while b"\n" not in self._read:
            if len(self._read) > limit:
                raise ValueError("a line without an end")
            more = await self._reader.read(1 << 16)
            if not more:
                return b""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        if len(line) > limit:
            raise ValueError("a line that is too long")
        return line + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    """The object of a line.  Raises ValueError."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


class Board:
    """Serves until the process ends.  ``host``: the address of this machine that the others can reach.

    Who has not proved to know the secret may say ``LONGEST_BEFORE_PROOF`` bytes, within ``HANDSHAKE_SECONDS``; of
    ``MOST_UNPROVED`` such connections the oldest makes room for a newer one, and where no descriptor is left all do.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self.address = f"{host} {self.listener.getsockname()[1]}"
        self.source: Source = lambda what: None
        self._secret = secret
        self._values: dict[str, str] = {}
        self._wanted: defaultdict[str, list[asyncio.StreamWriter]] = defaultdict(list)
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        self._quiet_until = 0.0
        self._epochs: defaultdict[int, set[str]] = defaultdict(set)  # what each has set
        _open.add(self)
        # Not epoll, which a forked process would share with this one.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        threading.Thread(target=self._serve, name="recover-board", daemon=True).start()

    def put(self, key: str, value: str, epoch: int | None = None) -> None:
        """Set a value from this process, from any thread: whoever wants it is told.

        ``epoch``: the value is forgotten some epochs later; None: it is kept.
        """
        self._loop.call_soon_threadsafe(self._set, key, value, epoch)

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
            print(f"recover: the board of this worker: {context['message']}: {error}", file=sys.stderr, flush=True)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._unproved.pop(writer, None)
        writer.transport.abort()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes over one connection costs at most that connection."""
        self._unproved[writer] = None
        if len(self._unproved) > MOST_UNPROVED:
            self._drop(next(iter(self._unproved)))
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError):
                # Else an answer waits 40 ms for an acknowledgement: asyncio sees to it only for sockets that tell
                # their protocol, which accepted ones do not.
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                lines = _Lines(reader)
                if await asyncio.wait_for(self._knows(lines, writer), HANDSHAKE_SECONDS):
                    self._unproved.pop(writer, None)
                    while line := await lines.next(LONGEST_LINE):
                        message = _parsed(line)
                        if "fetch" in message:
                            await self._give([int(number) for number in message["fetch"]], writer)
                        else:
                            self._handle(message, writer)
        finally:
            self._unproved.pop(writer, None)
            for key in [key for key, waiting in self._wanted.items() if writer in waiting]:
                self._wanted[key].remove(writer)
                if not self._wanted[key]:
                    del self._wanted[key]
            writer.close()

    async def _give(self, what: Sequence[int], writer: asyncio.StreamWriter) -> None:
        found = self.source(what)
        writer.write(json.dumps({"bytes": -1 if found is None else len(found)}).encode() + b"\n")
        if found is not None:
            writer.write(found)
        await writer.drain()

    async def _knows(self, lines: _Lines, writer: asyncio.StreamWriter) -> bool:
        mine = secrets.token_hex(32)
        _tell(writer, nonce=mine)
        theirs = _parsed(await lines.next(LONGEST_BEFORE_PROOF))
        nonce = str(theirs["nonce"])
        if not hmac.compare_digest(str(theirs["mac"]), _mac(self._secret, "client", mine, nonce)):
            return False
        _tell(writer, mac=_mac(self._secret, "board", mine, nonce))
        return True

    def _handle(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "want" not in message:
            epoch = message.get("epoch")
            self._set(message["set"], message["value"], None if epoch is None else int(epoch))
        elif (key := message["want"]) in self._values:
            _tell(writer, key=key, value=self._values[key])
        else:
            self._wanted[key].append(writer)

    def _set(self, key: str, value: str, epoch: int | None) -> None:
        self._values[key] = value
        if epoch is not None:
            self._epochs[epoch].add(key)
            while len(self._epochs) > KEPT_EPOCHS:
                for old in self._epochs.pop(min(self._epochs)):
                    self._values.pop(old, None)
        for waiting in self._wanted.pop(key, []):
            _tell(waiting, key=key, value=value)


def _tell(writer: asyncio.StreamWriter, **message: str) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


class Pinned(dist.Store):
    """The board at ``address``.  Out of reach, all its operations raise ``PeerLost``.

    ``epoch``: that of the groups which use it: what they set is forgotten some epochs later.  None: they outlive it.
    """

    def __init__(self, address: str, secret: bytes, epoch: int | None = None) -> None:
        super().__init__()
        self._epoch = {} if epoch is None else {"epoch": epoch}
        self._address = address
        self._secret = secret
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._asked: set[str] = set()
        self._unsent: list[dict[str, Any]] = []
        self._socket: socket.socket | None = None
        self._error: str | None = None
        self._road = False
        threading.Thread(target=self._talk, name="recover-board-client", daemon=True).start()

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
            if self._socket is None:
                self._unsent.append(message)
                return
            try:
                self._socket.sendall(_line(message))
            except OSError as error:
                self._fail(str(error))
                self._check()

    def _fail(self, reason: str, *, road: bool = False) -> None:
        with self._changed:
            if self._error is None:
                self._road = road
                self._error = f"the board at {self._address} is out of reach: {reason}"
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _talk(self) -> None:
        try:
            host, port = self._address.split(" ")
            try:
                connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS)
            except OSError as error:
                self._fail(str(error), road=True)
                return
            with connection as sock:
                watch(sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with sock.makefile("rb") as lines:
                    self._prove(sock, lines)
                    sock.settimeout(None)
                    with self._changed:
                        self._socket = sock
                        self._check()
                        sock.sendall(b"".join(map(_line, self._unsent)))
                    self._listen(lines)
                self._fail("it closed the connection", road=is_silent(sock))
        except (OSError, ValueError, KeyError, PeerLost) as error:
            self._fail(str(error), road=isinstance(error, OSError) and is_of_the_road(error))
        finally:
            with self._changed:
                self._socket = None

    def _prove(self, sock: socket.socket, lines: Any) -> None:
        mine, theirs = secrets.token_hex(32), str(json.loads(lines.readline(LONGEST_LINE))["nonce"])
        sock.sendall(_line(prove(self._secret, mine, theirs)))
        check_board(self._secret, mine, theirs, json.loads(lines.readline(LONGEST_LINE)))

    def _listen(self, lines: Any) -> None:
        while line := lines.readline(LONGEST_LINE):
            told = json.loads(line)
            with self._changed:
                self._values[str(told["key"])] = str(told["value"]).encode("latin-1")
                self._changed.notify_all()


class Neighbours:
    """The boards of the members of a ring: each tells on its own, and is asked there by whoever needs to know it.

    So nobody is needed but one's neighbours.  A key ends in the rank of the member that sets it.  ``pinned`` gives the
    view of the board at an address; what is set belongs to ``epoch``.
    """

    def __init__(self, own: Board, addresses: Sequence[str], pinned: Callable[[str], Pinned], epoch: int) -> None:
        self._own = own
        self._addresses = addresses
        self._pinned = pinned
        self._epoch = epoch

    def set(self, key: str, value: str) -> None:
        self._own.put(key, value, self._epoch)

    def get(self, key: str) -> bytes:
        return self._of(key).get(key)

    def check(self, keys: list[str]) -> bool:
        """Raises ``PeerLost``, which names the member."""
        for key in keys:
            try:
                if not self._of(key).check([key]):
                    return False
            except PeerLost as lost:
                raise PeerLost(str(lost), self._rank(key), road=lost.road) from lost
        return True

    def _of(self, key: str) -> Pinned:
        return self._pinned(self._addresses[self._rank(key)])

    @staticmethod
    def _rank(key: str) -> int:
        return int(key.rpartition("/")[2])


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
