"""Messages of the control plane: frames (``network.connection``) checked against a schema before use.

No incoming data is trusted: every field has a type and a bound; unknown types and unknown fields are errors. An invalid
message raises ``WireError``, and only the connection that sent it is closed.

A connection begins with the proof of the job's secret, like any connection of the run (``network.connection``):

    coordinator -> member   challenge(version, nonce Nc)
    member -> coordinator   auth(nonce Nm, mac = HMAC(secret, "member"      | Nc | Nm))
    coordinator -> member   proof(mac = HMAC(secret, "coordinator" | Nc | Nm))
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recover_megatron.membership.records import MAX_WORKERS, MOST_ADDED, SecretError
from recover_megatron.network import connection
from recover_megatron.network.connection import WireError
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

__all__ = ["WireError"]

PROTOCOL_VERSION = 10

MAX_HANDSHAKE = 4 << 10
"""Maximum bytes of one message before the other side has proved that it knows the secret."""
MAX_TO_COORDINATOR = 16 << 20
"""Maximum bytes of one message from a member. The largest messages contain a status, or the last plan."""
MAX_TO_MEMBER = 64 << 20
"""Maximum bytes of one message to a member. The largest messages contain a plan."""
MAX_ERROR = 2000
"""Maximum characters of an error's type and message."""
MAX_TRACEBACK = 16 << 10
"""Maximum characters of a traceback."""
MAX_TRIED = 4096
"""Maximum number of microbatches that a worker names as possible causes of its failure."""

Check = Callable[[Any], bool]
Schema = Mapping[str, tuple[Check, bool]]
"""Field name -> (check of the field's value, whether the field is required)."""


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _text(limit: int) -> Check:
    return lambda value: type(value) is str and len(value) <= limit


def _list(check: Check, most: float = math.inf, least: int = 0) -> Check:
    return lambda value: type(value) is list and least <= len(value) <= most and all(map(check, value))


def _runs(value: Any) -> bool:
    if type(value) is not list:
        return False
    previous = -1
    for run in value:
        if type(run) is not list or len(run) != 2 or type(run[0]) is not int or type(run[1]) is not int:
            return False
        if not previous < run[0] <= run[1] < MAX_WORKERS:
            return False
        previous = run[1]
    return True


def _address(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _text(256)(value[0]) and _integer(1, 65535)(value[1])


def _loss(value: Any) -> bool:
    """Return whether ``value`` is ``[step, loss]``. A loss that is not finite is None."""
    if type(value) is not list or len(value) != 2 or not _ITERATION(value[0]):
        return False
    return value[1] is None or (type(value[1]) is float and math.isfinite(value[1]))


def _hex(length: int) -> Check:
    digits = frozenset("0123456789abcdef")
    return lambda value: type(value) is str and len(value) == length and digits.issuperset(value)


_WORKER = _integer(0, MAX_WORKERS - 1)
_EPOCH = _integer(0, 1 << 53)
_TERM = _integer(0, 1 << 96)
_ITERATION = _integer(0, 1 << 53)
_SECONDS: Check = lambda value: type(value) in (int, float) and 0 <= value <= 1e9  # noqa: E731
_FLAG: Check = lambda value: type(value) is bool  # noqa: E731
_ANY: Check = lambda value: True  # noqa: E731
_ROWS = _list(lambda row: type(row) is dict)
_NAME = _text(256)
_NOTE = _text(2048)


def _epoch(prefix: str = "", required: bool = True) -> Schema:
    """Return the schema of the fields that ``records.Formed.to_wire`` writes."""
    checks = {"epoch": _EPOCH, "term": _TERM, "members": _runs}
    return {f"{prefix}{name}": (check, required) for name, check in checks.items()}


_GONE: Schema = {"dead": (_runs, True), "left": (_runs, True), "aside": (_runs, False)}
_PRESENTATION: Schema = {
    "term": (_TERM, True),
    **_epoch("formed_"),
    **_epoch("opened_", required=False),
    "committed": (_ITERATION, True),
    **_GONE,
}

HANDSHAKE_TO_COORDINATOR: Mapping[str, Schema] = {"auth": {"nonce": (_hex(64), True), "mac": (_hex(64), True)}}
HANDSHAKE_TO_MEMBER: Mapping[str, Schema] = {
    "challenge": {"version": (_integer(0, 1 << 16), True), "nonce": (_hex(64), True)},
    "proof": {"mac": (_hex(64), True)},
}

TO_COORDINATOR: Mapping[str, Schema] = {
    "attach": {
        "worker": (_WORKER, True),
        "incarnation": (_hex(32), True),
        "host": (_NAME, True),
        "pid": (_integer(0, 1 << 31), True),
        "node_agent": (_NAME, False),
        "done": (_ITERATION, True),
        "idle": (_EPOCH, False),
        "vacant": (_FLAG, False),
        "newcomer": (_FLAG, False),
        "silent": (_FLAG, False),
        **_PRESENTATION,
    },
    "attach_node_agent": {
        "node": (_NAME, True),
        "incarnation": (_hex(32), True),
        "running": (_runs, False),
        "silent": (_FLAG, False),
        **_PRESENTATION,
    },
    "heartbeat": {
        "count": (_integer(0, 1 << 63), True),
        "iteration": (_ITERATION, True),
        "phase": (_NAME, True),
        "microbatch": (_ITERATION, False),
        "place": (_list(_integer(0, (1 << 31) - 1), 3, 3), False),
        "goes_back": (_FLAG, False),
        "loss": (_loss, False),
        "waiting": (_FLAG, True),
        "allow": (_SECONDS, True),
    },
    "beat": {},
    "join": {
        "epoch": (_EPOCH, True),
        "status": (_ANY, True),
        "done": (_ITERATION, True),
        "idle": (_EPOCH, False),
        "vacant": (_FLAG, False),
        "plan": (_ANY, False),
    },
    "done": {"epoch": (_EPOCH, True), "iteration": (_ITERATION, True)},
    "idle": {"epoch": (_EPOCH, True)},
    "complain": {"epoch": (_EPOCH, True), "reason": (_NOTE, True), "peer": (_WORKER, False)},
    "ack": {"epoch": (_EPOCH, True), "term": (_TERM, True)},
    "heard": {"epoch": (_EPOCH, True), "term": (_TERM, True)},
    "ended": {"worker": (_WORKER, True), "how": (_NAME, True)},
    "candidate": {"address": (_address, True)},
    "stopping": {"signal": (_integer(1, 64), True)},
    "spawned": {"worker": (_WORKER, True), "pid": (_integer(0, 1 << 31), True)},
    "bye": {"idle": (_EPOCH, False)},
    "give_up": {"code": (_integer(1, 255), True), "reason": (_NOTE, True)},
    "report_exception": {
        "iteration": (_ITERATION, True),
        "microbatch": (_ITERATION, False),
        "error": (_text(MAX_ERROR), True),
        "traceback": (_text(MAX_TRACEBACK), True),
        "group": (_WORKER, True),
        "phase": (_NAME, False),
        "tried": (_list(_ITERATION, MAX_TRIED), False),
        "own": (_FLAG, False),
    },
    "note": {"text": (_NOTE, True)},
    "abandon": {"reason": (_NOTE, True)},
    "observe": {},
    "drain": {"node": (_NAME, True)},
    "drain_answer": {"epoch": (_EPOCH, True), "node": (_NAME, True), "reason": (_NOTE, True)},
}

TO_MEMBER: Mapping[str, Schema] = {
    "beat": {},
    "standby": {},
    "lead": {"term": (_TERM, True)},
    "refused": {"reason": (_NOTE, True)},
    "revoke": {
        **_epoch(),
        **_GONE,
        "committed": (_ITERATION, True),
        "reason": (_NOTE, True),
        "present_plan": (_WORKER, False),
        **_epoch("after_", required=False),
    },
    "all_heard": {"epoch": (_EPOCH, True), "term": (_TERM, True)},
    "plan": {**_epoch(), "committed": (_ITERATION, True), "data": (_ANY, False)},
    "commit": {"epoch": (_EPOCH, True), "iteration": (_ITERATION, True)},
    "kill": {"worker": (_WORKER, True), "reason": (_NOTE, True), "with": (_runs, False)},
    "note": {"worker": (_WORKER, True), "text": (_NOTE, True)},
    "fenced": {"reason": (_NOTE, True)},
    "stop": {
        "reason": (_NOTE, True),
        "code": (_integer(0, 255), True),
        "epoch": (_EPOCH, True),
        "by": (_WORKER, False),
        "left": (_runs, False),
    },
    "noted": {},
    "candidates": {
        "added": (_list(_address, MOST_ADDED), True),
        "world": (_integer(0, MAX_WORKERS), True),
        "lease": (_text(4096), False),
        "slack": (_integer(0, MAX_WORKERS), False),
        "witnessed": (_FLAG, False),
    },
    "tell": {"text": (_NOTE, True)},
    "drain": {"stays": (_FLAG, False)},
    "view": {
        "state": (_NAME, True),
        "term": (_TERM, True),
        "epoch": (_EPOCH, True),
        "opened": (_EPOCH, True),
        "committed": (_ITERATION, True),
        "commit_age": (_SECONDS, False),
        **{name: (_integer(0, MAX_WORKERS), True) for name in ("launched", "world", "live")},
        "replicas": (_ANY, True),
        "replica_size": (_integer(0, MAX_WORKERS), True),
        "workers": (_ROWS, True),
        "hidden": (_integer(0, MAX_WORKERS), True),
        "stall": (_ANY, False),
        "faults": (_ROWS, True),
        "recoveries": (_ROWS, True),
        "drains": (_ROWS, False),
    },
}


def encode(message: Mapping[str, Any], limit: int = MAX_TO_MEMBER) -> bytes:
    return connection.encode(message, limit)


def parse(body: bytes, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the message in ``body`` if it fits one of ``schemas``. Raises ``WireError`` if it does not."""
    message = connection.parse(body)
    kind = message.get("type")
    schema = schemas.get(kind) if type(kind) is str else None
    if schema is None:
        raise WireError(f"message type {str(kind)[:40]!r} is not expected here")
    for name, (check, required) in schema.items():
        if name not in message:
            if required:
                raise WireError(f"{kind}: field {name!r} is missing")
        elif not check(message[name]):
            raise WireError(f"{kind}: field {name!r} has a wrong type or is out of bounds")
    unknown = message.keys() - schema.keys() - {"type"}
    if unknown:
        raise WireError(f"{kind}: unknown field {min(unknown)[:40]!r}")
    return message


class Decoder(connection.Decoder):
    """Splits a byte stream into checked messages; ``schemas``, like ``limit``, may be changed between messages."""

    def __init__(self, limit: int, schemas: Mapping[str, Schema]) -> None:
        super().__init__(limit)
        self.schemas = schemas

    def message(self) -> dict[str, Any] | None:
        """Return the next complete message, None if there is none yet. A ``WireError`` ends the stream."""
        body = self.next()
        return None if body is None else parse(body, self.schemas)


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

    def answer(self, challenge: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        """Return a member's message ``auth`` for a ``challenge``, and the proof that the coordinator must send then."""
        nonces = challenge["nonce"], connection.nonce()
        auth = {"type": "auth", "nonce": nonces[1], "mac": self.mac("member", *nonces)}
        return auth, self.mac("coordinator", *nonces)

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
