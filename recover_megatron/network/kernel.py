"""What this host's kernel tells, and what is asked of it for a process of a run.

Of a TCP connection: ``struct tcp_info`` of linux/tcp.h, whose layout is stable.
"""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
import termios

_PROBES, _UNACKED, _LAST_ACK = 3, 24, 56


def unacknowledged(sock: socket.socket) -> float:
    """Seconds for which the other host's kernel has acknowledged nothing, while there is something to acknowledge.

    Packets under way, or more than one question for room that nobody answered: where this host has no route any more
    nothing is under way, and a host whose process reads nothing answers each.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (unacked,) = struct.unpack_from("I", info, _UNACKED)
    (last_ack,) = struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked or info[_PROBES] > 1 else 0.0


def all_delivered(sock: socket.socket) -> bool:
    """Whether the other host's kernel has all that was written, and no word that it sent before that is unread here."""
    if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        return False
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it has failed, which reading tells
    return False


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as this process may: strangers' connections count against it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
