"""Errors of system calls on a connection: those that pass lose no data, and the first of the others is reported."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Buffer, Iterable, Sequence
from contextlib import closing
from typing import Any

import pytest

from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.line import Line


class Failing(socket.socket):
    """Its next calls that send data fail with these errors."""

    errors: Sequence[int] = ()

    def send(self, data: Buffer, *flags: int) -> int:
        self._fail()
        return super().send(data, *flags)

    def sendmsg(self, buffers: Iterable[Buffer], *rest: Any) -> int:
        self._fail()
        return super().sendmsg(buffers, *rest)

    def _fail(self) -> None:
        if self.errors:
            number, *self.errors = self.errors
            raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("errors", [(errno.ENOBUFS,), (errno.ENOMEM, errno.EAGAIN), (errno.ETIMEDOUT, errno.EPIPE)])
def test_a_failed_call_loses_no_frame_or_its_error_is_reported(errors: Sequence[int], gathers: bool) -> None:
    one, other = socket.socketpair()
    own = Failing(fileno=one.detach())
    own.errors = errors
    own.setblocking(False)
    other.settimeout(60)
    with closing(EventLoop()) as loop, closing(Line(loop, own)) as line, other:
        for frame in (b"first", b"second"):
            (line.gather if gathers else line.send)(frame)
            loop.run_once(0)
        if errno.EPIPE not in errors:
            while line.queued:
                loop.run_once()
            assert other.recv(100) == b"firstsecond"
        else:
            other.close()
            with pytest.raises(OSError, match=os.strerror(errors[0])):
                line.receive()
