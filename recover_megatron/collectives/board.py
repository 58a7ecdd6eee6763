"""What the members of an epoch tell each other while they open its groups, kept by one of them: no node is special.

    every worker:   Board      a small key-value service in a thread; its address goes with the worker's status
    every group:    Pinned     this worker's view of the board that the group uses: a member's, chosen alike by all

If that member dies the epoch is over anyway, and in the next one the group uses another's.  A line of JSON each way:

    board -> client   {"nonce": s}
    client -> board   {"nonce": c, "mac": HMAC(secret, "client" s c)}     then any number of  {"set": key, "value": v}
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
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.door import family_of
from recover_megatron.collectives.errors import PeerLost

_BACKLOG = 4096
LONGEST_LINE = 1 << 20
HANDSHAKE_SECONDS = 10.0
MOST_BYTES = 16 << 20
"""Limit of what a board gives for one request (``fetch``)."""
Source = Callable[[Sequence[int]], bytes | None]
"""What a board gives for some numbers; called in its thread.  None: it does not have that."""
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


class Board:
    """Serves until the process ends.  ``host``: the address of this machine that the others can reach."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self.address = f"{host} {self.listener.getsockname()[1]}"
        self.source: Source = lambda what: None
        self._secret = secret
        self._values: dict[str, str] = {}
        self._wanted: defaultdict[str, list[asyncio.StreamWriter]] = defaultdict(list)
        _open.add(self)
        threading.Thread(target=self._serve, name="recover-board", daemon=True).start()

    def _serve(self) -> None:
        # Not epoll, which a forked process would share with this one.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.PollSelector())) as runner:
            runner.run(self._accept())

    async def _accept(self) -> None:
        server = await asyncio.start_server(self._guarded, sock=self.listener, limit=LONGEST_LINE)
        await server.serve_forever()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes over one connection costs at most that connection."""
        # Else an answer waits 40 ms for an acknowledgement: asyncio sees to it only for sockets that tell their
        # protocol, which accepted ones do not.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError):
                if await asyncio.wait_for(self._knows(reader, writer), HANDSHAKE_SECONDS):
                    while line := await reader.readline():
                        message = json.loads(line)
                        if "fetch" in message:
                            await self._give([int(number) for number in message["fetch"]], writer)
                        else:
                            self._handle(message, writer)
        finally:
            writer.close()

    async def _give(self, what: Sequence[int], writer: asyncio.StreamWriter) -> None:
        found = self.source(what)
        writer.write(json.dumps({"bytes": -1 if found is None else len(found)}).encode() + b"\n")
        if found is not None:
            writer.write(found)
        await writer.drain()

    async def _knows(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        mine = secrets.token_hex(32)
        _tell(writer, nonce=mine)
        theirs = json.loads(await reader.readline())
        nonce = str(theirs["nonce"])
        if not hmac.compare_digest(str(theirs["mac"]), _mac(self._secret, "client", mine, nonce)):
            return False
        _tell(writer, mac=_mac(self._secret, "board", mine, nonce))
        return True

    def _handle(self, message: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if "want" in message:
            key = message["want"]
            self._wanted[key].append(writer)
        else:
            key = message["set"]
            self._values[key] = message["value"]
        if key in self._values:
            for waiting in self._wanted.pop(key, []):
                _tell(waiting, key=key, value=self._values[key])


def _tell(writer: asyncio.StreamWriter, **message: str) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


class Pinned(dist.Store):
    """The board at ``address``, for groups of one epoch.  Out of reach, all its operations raise ``PeerLost``."""

    def __init__(self, address: str, secret: bytes) -> None:
        super().__init__()
        self._address = address
        self._secret = secret
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._asked: set[str] = set()
        self._unsent: list[dict[str, str]] = []
        self._socket: socket.socket | None = None
        self._error: str | None = None
        threading.Thread(target=self._talk, name="recover-board-client", daemon=True).start()

    # ---- what a store is asked

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._send(set=key, value=text)

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
            raise PeerLost(self._error)

    def _send(self, **message: str) -> None:
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

    def _fail(self, reason: str) -> None:
        with self._changed:
            if self._error is None:
                self._error = f"the board at {self._address} is out of reach: {reason}"
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _talk(self) -> None:
        try:
            host, port = self._address.split(" ")
            with socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with sock.makefile("rb") as lines:
                    self._prove(sock, lines)
                    sock.settimeout(None)
                    with self._changed:
                        self._socket = sock
                        self._check()
                        sock.sendall(b"".join(map(_line, self._unsent)))
                    self._listen(lines)
            self._fail("it closed the connection")
        except (OSError, ValueError, KeyError, PeerLost) as error:
            self._fail(str(error))
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


def _line(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode() + b"\n"
