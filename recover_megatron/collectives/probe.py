"""Try whether other workers can be reached: all at once, for a bounded time.

Only the kernels of both hosts take part: a worker that is stopped, or computes, can be reached.  A road that comes back
meanwhile is not broken: whoever cannot be reached is tried again until the time is over.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Collection, Mapping

from recover_megatron.network.addresses import family_of

SECONDS = 4.0
AT_ONCE = 256
"""Connections that are tried at a time."""
_PAUSE = 0.25
"""Before somebody who refused is tried again, and between two looks at who is still there."""


def unreached(addresses: Mapping[int, str], seconds: float, gone: Callable[[], Collection[int]] = tuple) -> set[int]:
    """The workers whose peer stores (worker -> "HOST PORT") cannot be connected to.

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
