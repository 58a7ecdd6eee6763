"""Connections that a worker's peer store lets in and then gives away, for others of the worker to speak over.

    client                                                   server: the peer store's thread
    open_stream   -- proof of the secret, both ways (client) -->
                  -- {"stream": "tree/5/..."} ----------------->   Streams.arrived
                  <-- {"stream": "tree/5/..."} -----------------   from here on the connection is a plain socket
                                                                     |- of a kind that is served: its handler gets it
                                                                     '- else it waits until ``take`` asks for it

So whoever knows where somebody's peer store is can connect to any part of that worker, proved on both sides, without
another listener and without a word through a store.  The kind is the part of the name before the first slash.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from recover_megatron.network.client import Connection
from recover_megatron.network.forks import close_in_children
from recover_megatron.network.proof import Challenge

MOST_WAITING = 4096
"""Connections that nobody has taken; the oldest makes room for a newer one."""
LOOK_SECONDS = 0.25
"""How often somebody who waits for a connection asks whether the wait is to end."""

Handler = Callable[[str, socket.socket], None]
"""Gets a name and its connection, which is its own from then on; called in the server's thread: must be quick."""


def open_stream(
    address: str, challenge: Challenge, name: str, patience: Callable[[], None] = lambda: None
) -> socket.socket:
    """A blocking connection to whatever has the name ``name`` at the worker whose peer store is at ``address``.

    ``patience``: as that of ``Connection``.  Raises ``Unreachable``.
    """
    connection = Connection(address, challenge, patience)
    try:
        return connection.detach({"stream": name})
    except BaseException:
        connection.close()
        raise


class Streams:
    """The connections that have come to one worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, socket.socket] = {}
        self._handlers: dict[str, Handler] = {}
        close_in_children(self)

    def serve(self, kind: str, handler: Handler) -> None:
        """Have ``handler`` called for all of this kind, also for those that have come already."""
        with self._changed:
            self._handlers[kind] = handler
            names = [name for name in self._waiting if name.partition("/")[0] == kind]
            came = [(name, self._waiting.pop(name)) for name in names]
        for name, sock in came:
            handler(name, sock)

    def arrived(self, name: str, sock: socket.socket) -> None:
        """One has come; it is proved."""
        with self._changed:
            handler = self._handlers.get(name.partition("/")[0])
            if handler is None:
                if (before := self._waiting.pop(name, None)) is not None:
                    before.close()  # whoever made it has given it up
                self._waiting[name] = sock
                if len(self._waiting) > MOST_WAITING:
                    self._waiting.pop(next(iter(self._waiting))).close()
                self._changed.notify_all()
        if handler is not None:
            handler(name, sock)

    def take(self, name: str, patience: Callable[[], None]) -> socket.socket:
        """The connection of this name, when it has come.  ``patience``: called while it has not; raises to give up."""
        while True:
            patience()
            with self._changed:
                if self._changed.wait_for(lambda: name in self._waiting, LOOK_SECONDS):
                    return self._waiting.pop(name)

    def wake(self) -> None:
        """Have those who wait in ``take`` ask their patience; from any thread."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, prefix: str) -> None:
        """Close what waits under names that begin so: nobody will take it any more."""
        with self._changed:
            for name in [name for name in self._waiting if name.startswith(prefix)]:
                self._waiting.pop(name).close()

    def close_in_child(self) -> None:
        """A forked process must not keep the connections of its parent open."""
        for sock in self._waiting.values():
            sock.close()
