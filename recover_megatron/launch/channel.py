"""Messages between the launcher and the parent process of a warm start: JSON objects over a Unix socket pair.

The socket keeps message boundaries (SOCK_SEQPACKET); a message may carry file descriptors.
"""

from __future__ import annotations

import json
import socket
from typing import Any

LONGEST_MESSAGE = 64 * 1024
MOST_DESCRIPTORS = 2


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send one message.  Raises ValueError if it is too long, OSError if the other end is gone."""
    data = json.dumps(message).encode()
    if len(data) > LONGEST_MESSAGE:
        raise ValueError(f"message of {len(data)} bytes, at most {LONGEST_MESSAGE}")
    socket.send_fds(channel, [data], list(descriptors))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which are not inheritable; None when the other end is gone.

    Raises BlockingIOError if the channel does not block and nothing is there.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, LONGEST_MESSAGE, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    return (json.loads(data), list(descriptors)) if data else None
