"""Blocking connection to a candidate: of an observer (``recover-status``), or of a worker that leaves."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress

from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import Address, AuthenticationError, MembershipError
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, TO_MEMBER, Secret
from recover_megatron.network import messages
from recover_megatron.network.connection import proves

ANSWER_SECONDS = 10.0
"""Default time limit for a candidate's answer to an observer."""
LEAVE_SECONDS = 3.0
"""Time limit for each answer to a member that leaves."""


class NoAnswer(MembershipError):
    """The candidate does not run, or does not answer like a coordinator; the message says which."""


class OtherVersion(NoAnswer):
    """A coordinator answers, but has another version of the protocol."""


class CandidateConnection:
    """Connection to the candidate at ``address``. All calls block, for at most ``timeout`` seconds each.

    Raises ``NoAnswer``, and ``AuthenticationError`` if the secret is not the run's secret.
    """

    def __init__(self, address: Address, secret: Secret, timeout: float = ANSWER_SECONDS) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._timeout = timeout
        self._decoder = messages.Decoder()
        try:
            self._sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        try:
            self._shake_hands(secret)
        except BaseException:
            self.close()
            raise

    def send(self, message: fields.Message) -> None:
        """Send a message. Returns also if the candidate has closed the connection, because ``hear`` says so."""
        try:
            self._sock.settimeout(self._timeout)
            self._sock.sendall(messages.encode(message, MAX_TO_COORDINATOR))
        except OSError as error:
            # Messages that the candidate sent before it closed must still be read: one may be ``stop``.
            if not isinstance(error, ConnectionError):
                raise NoAnswer(f"{self.name}: {error.strerror or error}") from error

    def hear[T](self, schema: messages.Schema[T]) -> T:
        """Return the next message, which must arrive within ``timeout`` seconds."""
        until = time.monotonic() + self._timeout
        try:
            while (message := self._decoder.message(schema)) is None:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
                data = self._sock.recv(1 << 18)
                if not data:
                    raise NoAnswer(f"{self.name} closed the connection")
                self._decoder.feed(data)
        except TimeoutError as error:
            raise NoAnswer(f"{self.name} did not answer within {self._timeout:.0f} s") from error
        except ConnectionError as error:
            raise NoAnswer(f"{self.name} closed the connection ({error.strerror})") from error
        except messages.WireError as error:
            raise NoAnswer(f"{self.name} is not a coordinator: {error}") from error
        except OSError as error:
            raise NoAnswer(f"{self.name}: {error.strerror or error}") from error
        return message

    def end_sending(self) -> None:
        """Send an end of file; the candidate then closes the connection."""
        with suppress(OSError):  # it has closed the connection
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _shake_hands(self, secret: Secret) -> None:
        challenge = self.hear(messages.CHALLENGE)
        if challenge.version != messages.PROTOCOL_VERSION:
            text = f"{self.name} has protocol version {challenge.version}, this program {messages.PROTOCOL_VERSION}"
            raise OtherVersion(f"{text}: use the recover-status that belongs to the run")
        auth, expected = secret.answer(challenge)
        self.send(auth)
        try:
            proof = self.hear(messages.PROOF)
        except NoAnswer as error:
            if "closed the connection" not in str(error):
                raise
            raise AuthenticationError(f"{self.name} rejects the secret: it is not the secret of this run") from error
        if not proves(proof.mac, expected):
            raise AuthenticationError(f"{self.name} does not know the secret: it is not a coordinator of this run")


class Observer(CandidateConnection):
    """Connection of an observer, which has no effect on the run."""

    def ask(self, drain: str | None = None) -> to_member.View | to_member.Stop:
        """Return the answer; ``Stop`` if the run has ended (or ends on this side of a partition).

        ``drain``: also request a drain of the node or host of that name; a candidate that does not lead ignores it.
        """
        self.send(to_coordinator.Observe() if drain is None else to_coordinator.Drain(drain))
        message = self.hear(TO_MEMBER)
        if isinstance(message, to_member.Refused):
            raise NoAnswer(f"{self.name}: {message.reason}")
        if not isinstance(message, to_member.View | to_member.Stop):
            raise NoAnswer(f"{self.name} sent an unexpected {message.kind!r}")
        return message


def leave_directly(address: Address, secret: Secret, farewell: Sequence[fields.Message]) -> None:
    """Send a member's last messages to the candidate at ``address``, and wait until it has closed the connection.

    Returns also if the candidate does not answer within LEAVE_SECONDS.
    """
    with suppress(NoAnswer, AuthenticationError), closing(CandidateConnection(address, secret, LEAVE_SECONDS)) as peer:
        for message in farewell:
            peer.send(message)
        peer.end_sending()
        while True:
            peer.hear(TO_MEMBER)
