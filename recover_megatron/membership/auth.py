"""Proof of the job's secret: a mutual HMAC-SHA256 challenge with fresh nonces on both sides.

    coordinator -> member   challenge(version, nonce Nc)
    member -> coordinator   auth(nonce Nm, mac = HMAC(secret, "member"      | Nc | Nm))
    coordinator -> member   proof(mac = HMAC(secret, "coordinator" | Nc | Nm))

The role in the text keeps a proof from being sent back as one's own. The coordinator does nothing for a connection
before it has the member's proof; the member presents nothing before it has the coordinator's. The secret itself never
travels, is never logged, and is never taken from a command line. What follows the handshake is neither encrypted nor
signed: the control network is trusted not to change packets in flight (docs/membership.md).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from recover_megatron.membership.records import SecretError
from recover_megatron.network import connection
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

SECRET_FILE = "secret"
"""Name of the file in a launch's log folder with the secret that the launch made up."""
MIN_SECRET = 16
"""Bytes: shorter secrets can be guessed offline from one recorded handshake."""


class Secret:
    """The job's secret; shows itself in no log and no traceback."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_SECRET:
            raise SecretError(f"the job's secret has {len(value)} bytes; give at least {MIN_SECRET} random ones")
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def mac(self, role: str, coordinator_nonce: str, member_nonce: str) -> str:
        """The proof of ``role`` ("member" or "coordinator") for one pair of nonces, in hex."""
        return connection.mac(self._value, "recover-membership", role, coordinator_nonce, member_nonce).hex()

    def proves(self, mac: str, role: str, coordinator_nonce: str, member_nonce: str) -> bool:
        """Whether ``mac`` is that proof, compared in constant time."""
        return connection.proves(mac, self.mac(role, coordinator_nonce, member_nonce))

    def key(self, purpose: str) -> bytes:
        """A key derived from the secret for another protocol of the run, such as the ring's."""
        return connection.mac(self._value, "recover-key", purpose)


def read_secret_file(path: Path) -> Secret:
    """The secret in a file of mode 0600 (or stricter) that belongs to this user; ``SecretError`` says what is wrong."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise SecretError(f"secret file {path} is not a regular file")
            if info.st_mode & 0o077:
                raise SecretError(
                    f"secret file {path} is open to others (mode {info.st_mode & 0o777:04o}): chmod 600 it"
                )
            if info.st_uid not in (os.geteuid(), 0):
                raise SecretError(f"secret file {path} belongs to user {info.st_uid}, not to you")
            return Secret(file.read(1 << 16).strip())
    except OSError as error:
        raise SecretError(f"secret file {path} cannot be read: {error.strerror}") from error


def find_secret(environ: Mapping[str, str] = os.environ, path: Path | None = None) -> Secret:
    """The secret from ``path``, else from the environment (the value, or a file's name); ``SecretError`` if none."""
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
