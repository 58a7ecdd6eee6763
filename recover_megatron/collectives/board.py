"""What the members of an epoch tell each other while they open its groups, kept by one of them: no node is special.

    every worker:   Board      a small key-value service in a thread; its address goes with the worker's status
    every group:    Pinned     this worker's view of the board that the group uses: a member's, chosen alike by all

If that member dies the epoch is over anyway, and in the next one the group uses another's.  A line of JSON each way:

    board -> client   {"nonce": s}
    client -> board   {"nonce": c, "mac": HMAC(secret, "client" s c)}     then any number of  {"set": key, "value": v}
    board -> client   {"mac": HMAC(secret, "board" s c)}                  and  {"want": key}
    board -> client   {"key": key, "value": v}                            as soon as somebody sets it

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
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.door import family_of
from recover_megatron.collectives.errors import PeerLost

_BACKLOG = 4096
_LONGEST_LINE = 1 << 20
_HANDSHAKE_SECONDS = 10.0
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


class Board:
    """Serves until the process ends.  ``host``: the address of this machine that the others can reach."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self.address = f"{host} {self.listener.getsockname()[1]}"
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
        server = await asyncio.start_server(self._guarded, sock=self.listener, limit=_LONGEST_LINE)
        await server.serve_forever()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes over one connection costs at most that connection."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError):
            if await asyncio.wait_for(self._knows(reader, writer), _HANDSHAKE_SECONDS):
                while line := await reader.readline():
                    self._handle(json.loads(line), writer)
        writer.close()

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
            with socket.create_connection((host, int(port)), timeout=_HANDSHAKE_SECONDS) as sock:
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
        mine, theirs = secrets.token_hex(32), str(json.loads(lines.readline(_LONGEST_LINE))["nonce"])
        sock.sendall(_line({"nonce": mine, "mac": _mac(self._secret, "client", theirs, mine)}))
        told = str(json.loads(lines.readline(_LONGEST_LINE))["mac"])
        if not hmac.compare_digest(told, _mac(self._secret, "board", theirs, mine)):
            raise ValueError("whoever answers does not know the run's secret")

    def _listen(self, lines: Any) -> None:
        while line := lines.readline(_LONGEST_LINE):
            told = json.loads(line)
            with self._changed:
                self._values[str(told["key"])] = str(told["value"]).encode("latin-1")
                self._changed.notify_all()


def _line(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode() + b"\n"
