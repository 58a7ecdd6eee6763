"""Messages between the ranks of NCCL's double: threads of one process, and processes.

    Net (one a process, made when first used): a listener on loopback; a message goes to (address, key) and waits there

A process that has died is known by its connections: ``dead``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable

from recover_megatron.network.system import close_in_children

_HEADER = struct.Struct("!IQ")
_LOOK = 0.05
"""Seconds from one look at what no message tells to the next."""


class Net:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.changed = threading.Condition()
        self._mail: dict[str, bytes] = {}
        self._connections: dict[str, socket.socket] = {}
        self._sockets: list[socket.socket] = [self._listener]
        self._sending = threading.Lock()
        self.dead: set[str] = set()
        close_in_children(self)
        threading.Thread(target=self._accept, name="net of NCCL's double", daemon=True).start()

    def close_in_child(self) -> None:
        """A forked process must not keep this one's connections open."""
        for sock in self._sockets:
            sock.close()

    # ---- what ranks do

    def deliver(self, address: str, key: str, payload: bytes = b"") -> None:
        """To whoever asks for ``key`` in the process at ``address``; lost if that is dead."""
        if address == self.address:
            return self._put(key, payload)
        with self._sending, contextlib.suppress(OSError):
            if address in self.dead:
                return
            if address not in self._connections:
                try:
                    self._connections[address] = self._connect(address)
                except OSError:
                    return self._buried(address)
            name = key.encode()
            self._connections[address].sendall(_HEADER.pack(len(name), len(payload)) + name + payload)

    def take(self, key: str, ended: Callable[[], bool]) -> bytes | None:
        """The message, once; None: ``ended`` came first.  ``ended`` is asked after every change."""
        with self.changed:
            while key not in self._mail:
                if ended():
                    return None
                self.changed.wait(_LOOK)
            return self._mail.pop(key)

    def poke(self) -> None:
        """What ``ended`` looks at has changed."""
        with self.changed:
            self.changed.notify_all()

    # ---- connections

    def _put(self, key: str, payload: bytes) -> None:
        with self.changed:
            self._mail[key] = payload
            self.changed.notify_all()

    def _buried(self, address: str) -> None:
        with self.changed:
            self.dead.add(address)
            self.changed.notify_all()

    def _connect(self, address: str) -> socket.socket:
        host, port = address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)))
        self._sockets.append(sock)
        mine = self.address.encode()
        sock.sendall(_HEADER.pack(len(mine), 0) + mine)
        threading.Thread(target=self._watch, args=(sock, address), daemon=True).start()
        return sock

    def _watch(self, sock: socket.socket, address: str) -> None:
        """Nothing comes this way but the end."""
        with contextlib.suppress(OSError):
            sock.recv(1)
        sock.close()
        self._buried(address)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                threading.Thread(target=self._read, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        sender = ""
        try:
            with sock.makefile("rb") as stream:
                while len(header := stream.read(_HEADER.size)) == _HEADER.size:
                    name_length, length = _HEADER.unpack(header)
                    name, payload = stream.read(name_length).decode(), stream.read(length)
                    if len(payload) < length:
                        break
                    if sender:
                        self._put(name, payload)
                    else:
                        sender = name
        except OSError:
            pass
        sock.close()
        if sender:
            self._buried(sender)


_net: tuple[int, Net] | None = None
_making = threading.Lock()


def net() -> Net:
    """That of this process; a forked one makes its own."""
    global _net
    with _making:
        if _net is None or _net[0] != os.getpid():
            _net = os.getpid(), Net()
        return _net[1]
