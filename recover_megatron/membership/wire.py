"""Messages of the control plane on the wire: JSON in frames (``network.connection``), checked before use.

No incoming data is trusted: each stage of a connection accepts only its own messages (``messages``), whose fields have
types and bounds; unknown fields are errors. An invalid message raises ``WireError``, and only the connection that sent
it is closed.

A connection begins with the proof of the job's secret, like any connection of the run (``network.connection``):

    coordinator -> member   challenge(version, nonce Nc)
    member -> coordinator   auth(nonce Nm, mac = HMAC(secret, "member"      | Nc | Nm))
    coordinator -> member   proof(mac = HMAC(secret, "coordinator" | Nc | Nm))
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from recover_megatron.membership.messages.fields import Hex64, Message, read_runs
from recover_megatron.membership.messages.to_coordinator import ToCoordinator
from recover_megatron.membership.messages.to_member import ToMember
from recover_megatron.membership.records import SecretError
from recover_megatron.network import connection
from recover_megatron.network.connection import WireError
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

PROTOCOL_VERSION = 12

MAX_HANDSHAKE = 4 << 10
"""Maximum bytes of one message before the other side has proved that it knows the secret."""
MAX_TO_COORDINATOR = 16 << 20
"""Maximum bytes of one message from a member. The largest messages contain a status, or the last plan."""
MAX_TO_MEMBER = 64 << 20
"""Maximum bytes of one message to a member. The largest messages contain a plan."""
MAX_QUOTED = 100
"""Maximum characters of a ``WireError``'s text."""


class Challenge(Message, frozen=True):
    """First message of a coordinator."""

    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    nonce: Hex64


class Auth(Message, frozen=True):
    """A member's answer."""

    nonce: Hex64
    mac: Hex64


class Proof(Message, frozen=True):
    """The coordinator's proof."""

    mac: Hex64


class Stage[T]:
    """Stage of a connection, for one direction. ``limit``: maximum bytes of one message."""

    def __init__(self, messages: Any, limit: int) -> None:
        """Create a stage in which ``messages`` (a type, or a union) are expected."""
        self.limit = limit
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(messages, dec_hook=read_runs)

    def parse(self, body: bytes) -> T:
        """Return the message in ``body``. Raises ``WireError`` if this stage does not expect it."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # The text may quote the message, at any length.
            raise WireError(f"{type(error).__name__}: {error}"[:MAX_QUOTED]) from error


AUTH: Stage[Auth] = Stage(Auth, MAX_HANDSHAKE)
CHALLENGE: Stage[Challenge] = Stage(Challenge, MAX_HANDSHAKE)
PROOF: Stage[Proof] = Stage(Proof, MAX_HANDSHAKE)
TO_COORDINATOR: Stage[ToCoordinator] = Stage(ToCoordinator, MAX_TO_COORDINATOR)
TO_MEMBER: Stage[ToMember] = Stage(ToMember, MAX_TO_MEMBER)


def _plain(value: Any) -> Any:
    """Return a number or text of a subclass, such as numpy's float64, as JSON has it. Raises TypeError for others."""
    return json.loads(json.dumps(value))


def encode(message: Message, limit: int = MAX_TO_MEMBER) -> bytes:
    """Return the frame of ``message``, with "?" in place of characters that UTF-8 cannot represent (surrogates).

    Raises ValueError if the frame's body exceeds ``limit`` bytes. A number that is infinite or NaN becomes null.
    """
    try:
        body = msgspec.json.encode(message, enc_hook=_plain)
    except UnicodeEncodeError:
        body = json.dumps(msgspec.to_builtins(message, enc_hook=_plain), ensure_ascii=False).encode(errors="replace")
    return connection.frame(body, limit, message.kind)


class Decoder(connection.Decoder):
    """Splits a byte stream into checked messages."""

    def message[T](self, stage: Stage[T]) -> T | None:
        """Return the next complete message, None if there is none yet. A ``WireError`` ends the stream."""
        self.limit = stage.limit
        body = self.next()
        return None if body is None else stage.parse(body)


SECRET_FILE = "secret"
"""Name of the file with the secret that a launch generated; the file is in the log folder of the launch."""
MIN_SECRET = 16
"""Minimum bytes of a secret, because shorter secrets can be guessed offline from one recorded handshake."""


class Secret:
    """The job's secret. It is never taken from a command line, and appears in no log and no traceback."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_SECRET:
            raise SecretError(f"the job's secret has {len(value)} bytes; use at least {MIN_SECRET} random bytes")
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def mac(self, role: str, coordinator_nonce: str, member_nonce: str) -> str:
        """Return the hex HMAC by which ``role`` ("member" or "coordinator") proves that it knows the secret."""
        return connection.mac(self._value, "recover-membership", role, coordinator_nonce, member_nonce).hex()

    def answer(self, challenge: Challenge) -> tuple[Auth, str]:
        """Return a member's answer to a ``challenge``, and the proof that the coordinator must send then."""
        nonces = challenge.nonce, connection.nonce()
        return Auth(nonces[1], self.mac("member", *nonces)), self.mac("coordinator", *nonces)

    def key(self, purpose: str) -> bytes:
        """Return a key derived from the secret for another protocol of the run, such as the ring's."""
        return connection.mac(self._value, "recover-key", purpose)


def read_secret_file(path: Path) -> Secret:
    """Return the secret in a file of mode 0600 (or stricter) owned by this user or root. Raises ``SecretError``."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise SecretError(f"secret file {path} is not a regular file")
            if info.st_mode & 0o077:
                mode = f"mode {info.st_mode & 0o777:04o}"
                raise SecretError(f"secret file {path} is accessible to others ({mode}): chmod 600 it")
            if info.st_uid not in (os.geteuid(), 0):
                raise SecretError(f"secret file {path} belongs to user {info.st_uid}, not to you")
            return Secret(file.read(1 << 16).strip())
    except OSError as error:
        raise SecretError(f"secret file {path} cannot be read: {error.strerror}") from error


def find_secret(environ: Mapping[str, str] = os.environ, path: Path | None = None) -> Secret:
    """Return the secret from ``path``, else from the environment (value or file name). Raises ``SecretError``."""
    if path is not None:
        return read_secret_file(path)
    if value := environ.get(SECRET_VARIABLE):
        return Secret(value.encode())
    if name := environ.get(SECRET_FILE_VARIABLE):
        return read_secret_file(Path(name))
    raise SecretError(
        f"no secret: set {SECRET_VARIABLE} to at least {MIN_SECRET} random characters, "
        f"or {SECRET_FILE_VARIABLE} to a file of mode 0600 that holds them"
    )
