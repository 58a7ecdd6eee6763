"""The observer's side: one connection, one question at a time, every wait ends. See ``view``."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from recover_megatron.membership import wire
from recover_megatron.membership.auth import Secret
from recover_megatron.membership.client import Address
from recover_megatron.membership.records import AuthenticationError, MembershipError
from recover_megatron.network.connection import nonce

ANSWER_SECONDS = 10.0
"""A candidate that says nothing for this long is given up."""


class NoAnswer(MembershipError):
    """The candidate is not there, or does not answer as a coordinator does; the message says which."""


class OtherVersion(NoAnswer):
    """A coordinator is there, of another version of the protocol."""


class Observer:
    """A connection to the candidate at ``address``. All calls block, for at most ``timeout`` seconds each.

    Raises ``NoAnswer``, and ``AuthenticationError`` where the secret is not that of the run.
    """

    def __init__(self, address: Address, secret: Secret, timeout: float = ANSWER_SECONDS) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._timeout = timeout
        self._decoder = wire.Decoder(wire.MAX_HANDSHAKE, wire.HANDSHAKE_TO_MEMBER)
        try:
            self._sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        try:
            self._shake_hands(secret)
        except BaseException:
            self.close()
            raise

    def ask(self, drain: str | None = None) -> dict[str, Any]:
        """The answer, a message ``view``; or ``stop``: the run has ended (or ends on this side of a partition).

        ``drain``: ask, too, for the node or host of that name to be drained; a candidate that does not lead forgets it.
        """
        self._send({"type": "observe"} if drain is None else {"type": "drain", "node": drain})
        message = self._hear()
        if message["type"] == "refused":
            raise NoAnswer(f"{self.name}: {message['reason']}")
        if message["type"] not in ("view", "stop"):
            raise NoAnswer(f"{self.name} answers with {message['type']!r}")
        return message

    def close(self) -> None:
        """End the connection; nobody minds."""
        self._sock.close()

    def _shake_hands(self, secret: Secret) -> None:
        challenge = self._expect("challenge")
        if challenge["version"] != wire.PROTOCOL_VERSION:
            versions = f"version {challenge['version']} of the protocol, this is {wire.PROTOCOL_VERSION}"
            raise OtherVersion(f"{self.name} speaks {versions}: use the recover-status that belongs to the run")
        nonces = (challenge["nonce"], nonce())
        self._send({"type": "auth", "nonce": nonces[1], "mac": secret.mac("member", *nonces)})
        try:
            proof = self._expect("proof")
        except NoAnswer as error:
            if "closed the connection" not in str(error):
                raise
            raise AuthenticationError(f"{self.name} refuses the secret: it is not that of this run") from error
        if not secret.proves(proof["mac"], "coordinator", *nonces):
            raise AuthenticationError(f"{self.name} does not know the secret: it is no coordinator of this run")
        self._decoder.limit, self._decoder.schemas = wire.MAX_TO_MEMBER, wire.TO_MEMBER

    def _expect(self, kind: str) -> dict[str, Any]:
        message = self._hear()
        if message["type"] != kind:
            raise NoAnswer(f"{self.name} says {message['type']!r} where a coordinator says {kind!r}")
        return message

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._sock.settimeout(self._timeout)
            self._sock.sendall(wire.encode(message, wire.MAX_HANDSHAKE))
        except OSError as error:
            # What it said before it closed is still to be heard: the end of the run, perhaps.
            if not isinstance(error, ConnectionError):
                raise NoAnswer(f"{self.name}: {error.strerror or error}") from error

    def _hear(self) -> dict[str, Any]:
        until = time.monotonic() + self._timeout
        try:
            while (message := self._decoder.next()) is None:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
                data = self._sock.recv(1 << 18)
                if not data:
                    raise NoAnswer(f"{self.name} closed the connection")
                self._decoder.feed(data)
        except TimeoutError as error:
            raise NoAnswer(f"{self.name} does not answer within {self._timeout:.0f} s") from error
        except ConnectionError as error:
            raise NoAnswer(f"{self.name} closed the connection ({error.strerror})") from error
        except wire.WireError as error:
            raise NoAnswer(f"{self.name} is no coordinator: {error}") from error
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        return message
