"""Messages on a connection: JSON in frames, checked before use.

A frame is a 4-byte big-endian length and a JSON object in UTF-8. No incoming data is trusted: the receiver checks the
length before it stores the body. Each stage of a connection accepts only its own messages, whose fields have types and
bounds; unknown fields are errors. Invalid data raises ``WireError``, and only the connection that carried it is closed.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 13
"""Version of the messages of the control plane and of the peer stores; both sides of a connection must have it."""

LONGEST = 64 << 20
"""Maximum bytes of any message."""
MAX_HANDSHAKE = 4 << 10
"""Maximum bytes of one message before the other side has proved that it knows the secret."""
MAX_QUOTED = 100
"""Maximum characters of the text of a ``WireError`` about an invalid body."""

_HEADER = struct.Struct(">I")

Number = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Number of an epoch or of an iteration, for example."""
Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class WireError(Exception):
    """Error for received data that is no message of this protocol."""


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Part of a message."""


class Message(Part, frozen=True, tag_field="type", tag=lambda name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()):
    """Message with the field ``type``: the name of its class in lower case, such as "attach_node_agent"."""

    @property
    def kind(self) -> str:
        """The value of the field ``type``."""
        return str(self.__struct_config__.tag)


class Challenge(Message, frozen=True):
    """First message of a server."""

    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    nonce: Hex64


class Auth(Message, frozen=True):
    """A client's answer."""

    nonce: Hex64
    mac: Hex64


class Proof(Message, frozen=True):
    """The server's proof."""

    mac: Hex64


class Schema[T]:
    """Messages that are expected at one stage of a connection. ``limit``: maximum bytes of one message."""

    def __init__(self, messages: Any, limit: int, dec_hook: Callable[[Any, Any], Any] | None = None) -> None:
        """Create the schema of ``messages`` (a type, or a union).

        ``dec_hook``: function, as in msgspec, that checks fields of types that msgspec does not know.
        """
        self.limit = limit
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(messages, dec_hook=dec_hook)

    def parse(self, body: bytes) -> T:
        """Return the message in ``body``. Raises ``WireError`` if this schema does not have it."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # The text may quote the message, at any length.
            raise WireError(f"{type(error).__name__}: {error}"[:MAX_QUOTED]) from error


CHALLENGE: Schema[Challenge] = Schema(Challenge, MAX_HANDSHAKE)
AUTH: Schema[Auth] = Schema(Auth, MAX_HANDSHAKE)
PROOF: Schema[Proof] = Schema(Proof, MAX_HANDSHAKE)


def _plain(value: Any) -> Any:
    """Return a number or text of a subclass, such as numpy's float64, as JSON has it. Raises TypeError for others."""
    return json.loads(json.dumps(value))


def encode(message: Message, limit: int = LONGEST) -> bytes:
    """Return the frame of ``message``, with "?" in place of characters that UTF-8 cannot represent (surrogates).

    Raises ValueError if the frame's body exceeds ``limit`` bytes. A number that is infinite or NaN becomes null.
    """
    try:
        body = msgspec.json.encode(message, enc_hook=_plain)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message, enc_hook=_plain), ensure_ascii=False)
        body = msgspec.json.encode(json.loads(text.encode(errors="replace")))  # json.dumps writes NaN, which is no JSON
    if len(body) > limit:
        raise ValueError(f"message {message.kind!r} has {len(body)} bytes, more than the limit of {limit}")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Splitter of a byte stream into checked messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def message[T](self, schema: Schema[T]) -> T | None:
        """Return the next message; None if it is incomplete. A ``WireError`` ends the stream."""
        body = self.next(schema.limit)
        return None if body is None else schema.parse(body)

    def next(self, limit: int) -> bytes | None:
        """Return the body of the next frame; None if the frame is incomplete.

        Raises ``WireError`` if the body is longer than ``limit``: the rest of the stream is then unusable.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > limit:
            raise WireError(f"a message of {length} bytes is longer than the limit of {limit}")
        data = self.take(_HEADER.size + length)
        return None if data is None else data[_HEADER.size :]

    def take(self, size: int) -> bytes | None:
        """Return the next ``size`` bytes, with their frames if there are any; None if fewer bytes have arrived."""
        if len(self._buffer) < size:
            return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
