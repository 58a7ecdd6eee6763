"""Ask another worker for bytes that it holds, in no epoch and without meeting it: a thread of its `board` answers.

    client -> board   {"fetch": [numbers]}                          after the board's handshake
    board -> client   {"bytes": n} and n bytes                      n = -1: it does not have that

For whoever cannot go on without something that others have and cannot meet them now: see ``instep.overlap``.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Sequence

from recover_megatron.collectives.board import HANDSHAKE_SECONDS, LONGEST_LINE, MOST_BYTES, check_board, prove
from recover_megatron.collectives.errors import PeerLost, is_of_the_road
from recover_megatron.collectives.silence import is_silent, watch

PIECE_SECONDS = 0.25
"""How long an answer is waited for before ``patience`` is asked."""


class Fetcher:
    """A connection to the board at ``address``.

    ``patience`` is called whenever nothing has come for ``PIECE_SECONDS``, and raises when that is to end: a process
    that is stopped answers nothing and closes nothing.  Raises ``PeerLost`` if the other side cannot be reached, hangs
    up, or does not know the run's secret.
    """

    def __init__(self, address: str, secret: bytes, patience: Callable[[], None]) -> None:
        self._address = address
        self._patience = patience
        self._read = bytearray()
        host, port = address.split(" ")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS)
        except OSError as error:
            raise self._lost(error, road=True) from error
        watch(self._socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(PIECE_SECONDS)
        try:
            mine, theirs = secrets.token_hex(32), str(json.loads(self._line())["nonce"])
            self._send(prove(secret, mine, theirs))
            check_board(secret, mine, theirs, json.loads(self._line()))
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise self._lost(error) from error
        except BaseException:
            self.close()
            raise

    def fetch(self, what: Sequence[int]) -> bytes | None:
        """What the other side's ``Board.source`` gives for these numbers: at most ``MOST_BYTES``; None: nothing."""
        self._send({"fetch": list(what)})
        try:
            size = int(json.loads(self._line())["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._lost(error) from error
        if size > MOST_BYTES:
            raise self._lost(f"it announces {size} bytes, the limit is {MOST_BYTES}")
        return None if size < 0 else self._take(size)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    # ---- inside

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._lost(error) from error

    def _line(self) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > LONGEST_LINE:
                raise self._lost("its answer has no end")
            self._more()
        return self._take(end + 1)

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            self._more()
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    def _more(self) -> None:
        while True:
            try:
                came = self._socket.recv(1 << 20)
            except TimeoutError:
                self._patience()
                continue
            except OSError as error:
                raise self._lost(error, road=is_of_the_road(error)) from error
            if not came:
                raise self._lost("it closed the connection", road=is_silent(self._socket))
            self._read += came
            return

    def _lost(self, why: object, *, road: bool = False) -> PeerLost:
        return PeerLost(f"the board at {self._address} does not answer: {why}", road=road)
