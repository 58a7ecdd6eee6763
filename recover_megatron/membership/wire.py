"""Messages of the control plane: frames (``network.connection``) checked against a schema before anyone sees them.

Nothing that arrives is trusted: every field has a type and a bound, unknown types and unknown fields are errors. An
error is a ``WireError``, and the only thing it ever costs is the connection it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recover_megatron.membership.records import MAX_WORKERS, MOST_ADDED
from recover_megatron.network import connection
from recover_megatron.network.connection import WireError

__all__ = ["WireError"]

PROTOCOL_VERSION = 7

MAX_HANDSHAKE = 4 << 10
"""Bytes of one message before the other side has proved that it knows the secret."""
MAX_TO_COORDINATOR = 16 << 20
"""Bytes of one message of a member: a status, or the last plan presented to a new coordinator."""
MAX_TO_MEMBER = 64 << 20
"""Bytes of one message to a member: a plan."""
MAX_ERROR = 2000
"""Characters of an error's type and message."""
MAX_TRACEBACK = 16 << 10
"""Characters of a traceback."""
MAX_TRIED = 4096
"""Microbatches that a worker names as those that may have ended it."""

Check = Callable[[Any], bool]
Schema = Mapping[str, tuple[Check, bool]]
"""Field name -> (its check, whether it must be there)."""


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _text(limit: int) -> Check:
    return lambda value: type(value) is str and len(value) <= limit


def _numbers(limit: int) -> Check:
    number = _integer(0, 1 << 53)
    return lambda value: type(value) is list and len(value) <= limit and all(map(number, value))


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


_rows: Check = lambda value: type(value) is list and all(type(row) is dict for row in value)  # noqa: E731


def _place(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and all(type(n) is int and 0 <= n < 1 << 31 for n in value)


def _address(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _text(256)(value[0]) and _integer(1, 65535)(value[1])


def _addresses(value: Any) -> bool:
    return type(value) is list and len(value) <= MOST_ADDED and all(map(_address, value))


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
_NAME = _text(256)
_NOTE = _text(2048)

_PRESENTATION: Schema = {
    "term": (_TERM, True),
    "formed_epoch": (_EPOCH, True),
    "formed_term": (_TERM, True),
    "formed_members": (_runs, True),
    "opened_epoch": (_EPOCH, False),
    "opened_term": (_TERM, False),
    "opened_members": (_runs, False),
    "committed": (_ITERATION, True),
    "dead": (_runs, True),
    "left": (_runs, True),
    "aside": (_runs, False),
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
        "place": (_place, False),
        "waiting": (_FLAG, True),
        "allow": (_SECONDS, True),
    },
    "beat": {},
    "join": {
        "epoch": (_EPOCH, True),
        "status": (_ANY, True),
        "done": (_ITERATION, True),
        "idle": (_EPOCH, False),
        "plan": (_ANY, False),
    },
    "done": {"epoch": (_EPOCH, True), "iteration": (_ITERATION, True)},
    "idle": {"epoch": (_EPOCH, True)},
    "complain": {"epoch": (_EPOCH, True), "reason": (_NOTE, True), "peer": (_WORKER, False)},
    "ack": {"epoch": (_EPOCH, True), "term": (_TERM, True)},
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
        "tried": (_numbers(MAX_TRIED), False),
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
        "epoch": (_EPOCH, True),
        "term": (_TERM, True),
        "members": (_runs, True),
        "dead": (_runs, True),
        "left": (_runs, True),
        "aside": (_runs, False),
        "committed": (_ITERATION, True),
        "reason": (_NOTE, True),
        "present_plan": (_WORKER, False),
        "after_epoch": (_EPOCH, False),
        "after_term": (_TERM, False),
        "after_members": (_runs, False),
    },
    "plan": {
        "epoch": (_EPOCH, True),
        "term": (_TERM, True),
        "members": (_runs, True),
        "committed": (_ITERATION, True),
        "data": (_ANY, False),
    },
    "commit": {"epoch": (_EPOCH, True), "iteration": (_ITERATION, True)},
    "kill": {"worker": (_WORKER, True), "reason": (_NOTE, True), "with": (_runs, False)},
    "note": {"worker": (_WORKER, True), "text": (_NOTE, True)},
    "fenced": {"reason": (_NOTE, True)},
    "stop": {
        "reason": (_NOTE, True),
        "code": (_integer(0, 255), True),
        "epoch": (_EPOCH, True),
        "by": (_WORKER, False),
    },
    "noted": {},
    "candidates": {
        "added": (_addresses, True),
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
        "launched": (_integer(0, MAX_WORKERS), True),
        "world": (_integer(0, MAX_WORKERS), True),
        "live": (_integer(0, MAX_WORKERS), True),
        "replicas": (_ANY, True),
        "replica_size": (_integer(0, MAX_WORKERS), True),
        "workers": (_rows, True),
        "hidden": (_integer(0, MAX_WORKERS), True),
        "stall": (_ANY, False),
        "faults": (_rows, True),
        "recoveries": (_rows, True),
        "drains": (_rows, False),
    },
}


def encode(message: Mapping[str, Any], limit: int = MAX_TO_MEMBER) -> bytes:
    """As ``frames.encode``."""
    return connection.encode(message, limit)


def parse(body: bytes, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """One checked message. ``WireError`` for anything else."""
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


class Decoder:
    """Cuts a byte stream into checked messages.

    ``limit`` and ``schemas`` may be changed between messages (the handshake has tighter ones); they hold for every
    message whose length has not been read yet.
    """

    def __init__(self, limit: int, schemas: Mapping[str, Schema]) -> None:
        self.limit = limit
        self.schemas = schemas
        self._frames = connection.Decoder(limit)

    @property
    def pending(self) -> int:
        """Bytes of an incomplete message that are held."""
        return self._frames.pending

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._frames.feed(data)

    def next(self) -> dict[str, Any] | None:
        """The next complete message, None if there is none yet. ``WireError`` ends the stream."""
        self._frames.limit = self.limit
        body = self._frames.next()
        return None if body is None else parse(body, self.schemas)
