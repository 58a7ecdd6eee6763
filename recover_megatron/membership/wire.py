"""Schemas of the messages to and from a coordinator, and the job's secret.

A connection begins with the proof of the secret, like any connection of the run (``network.connection``); the
coordinator is the server. Then come the messages of ``messages``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from recover_megatron.membership.messages.fields import read_runs
from recover_megatron.membership.messages.relayed import FromRelay, Relay, ToRelay, ToWorker
from recover_megatron.membership.messages.to_coordinator import ToCoordinator
from recover_megatron.membership.messages.to_member import ToMember
from recover_megatron.membership.records import SecretError
from recover_megatron.network import connection
from recover_megatron.network.messages import LONGEST, Auth, Challenge, Proof, Schema
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

MAX_TO_COORDINATOR = 16 << 20
"""Maximum bytes of one message from a member. The largest messages contain a status, or the last plan."""
MAX_TO_MEMBER = LONGEST
"""Maximum bytes of one message to a member. The largest messages contain a plan."""
TO_COORDINATOR: Schema[ToCoordinator | Relay] = Schema(ToCoordinator | Relay, MAX_TO_COORDINATOR, read_runs)
TO_MEMBER: Schema[ToMember | ToWorker] = Schema(ToMember | ToWorker, MAX_TO_MEMBER, read_runs)
FROM_RELAY: Schema[FromRelay] = Schema(FromRelay, MAX_TO_COORDINATOR)
TO_RELAY: Schema[ToRelay] = Schema(ToRelay, MAX_TO_COORDINATOR)

_PURPOSE = "recover-membership"
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

    def answer(self, challenge: Challenge) -> tuple[Auth, str]:
        """Return a member's answer to a ``challenge``, and the MAC that the coordinator must send then."""
        return connection.answer(self._value, _PURPOSE, challenge)

    def accept(self, nonce: str, auth: Auth) -> Proof | None:
        """Return the coordinator's proof for a member that has answered ``nonce``; None: it lacks the secret."""
        return connection.accept(self._value, _PURPOSE, nonce, auth)

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
