"""Frames: a 4-byte big-endian length and a JSON object in UTF-8.

Nothing that arrives is trusted: the length is checked before a byte of the body is kept, and a body is parsed only when
it is complete.  An error is a ``WireError``, and the only thing it ever costs is the connection it came from.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # launchers and coordinators have no use for it, and it is half of what they import
    import asyncio

_HEADER = struct.Struct(">I")


class WireError(Exception):
    """The other side sent something that is no message of this protocol."""


def encode(message: Mapping[str, Any], limit: int) -> bytes:
    """The frame of one message. ``ValueError`` if it is no JSON or longer than ``limit`` bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise ValueError(f"message {message.get('type')!r} has {len(body)} bytes, more than the limit of {limit}")
    return _HEADER.pack(len(body)) + body


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"{name} is no JSON")


def parse(body: bytes) -> dict[str, Any]:
    """The object of a frame. ``WireError`` for anything else."""
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from error
    if type(message) is not dict:
        raise WireError("not a JSON object")
    return message


def _length(header: bytes | bytearray, limit: int) -> int:
    (length,) = _HEADER.unpack_from(header)
    if length > limit:
        raise WireError(f"a message of {length} bytes is longer than the limit of {limit}")
    return int(length)


class Decoder:
    """Cuts a byte stream into frames.

    ``limit`` (bytes of a body) may be changed between frames: it holds for all whose length has not been read yet.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame that are held."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The body of the next complete frame, None if there is none yet. ``WireError`` ends the stream."""
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _length(self._buffer, self.limit)
        if len(self._buffer) < end:
            return None
        return self._cut(end)[_HEADER.size :]

    def take(self, size: int) -> bytes | None:
        """The next ``size`` bytes as they are, None if not all have arrived: what a frame said would follow it."""
        return self._cut(size) if len(self._buffer) >= size else None

    def _cut(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


async def read(reader: asyncio.StreamReader, limit: int) -> dict[str, Any] | None:
    """The next message of a stream, None at its end. ``WireError``; ``limit``: bytes of its body."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return parse(await reader.readexactly(_length(header, limit)))
    except EOFError:  # asyncio.IncompleteReadError
        return None
