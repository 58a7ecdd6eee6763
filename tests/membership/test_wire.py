"""The message decoder survives anything, and lets nothing through that is not in the schema."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.membership import wire
from recover_megatron.membership.records import MAX_WORKERS, from_runs, to_runs

SCHEMAS = {**wire.TO_COORDINATOR, **wire.TO_MEMBER, **wire.HANDSHAKE_TO_COORDINATOR, **wire.HANDSHAKE_TO_MEMBER}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
FIELDS = sorted({name for schema in SCHEMAS.values() for name in schema})
LIKELY = st.dictionaries(st.sampled_from(FIELDS), JSON | st.integers(0, 9) | st.just([[0, 3]]), max_size=8)


def decode(data: bytes, limit: int = 1 << 16) -> list[dict[str, Any]]:
    decoder = wire.Decoder(limit, SCHEMAS)
    decoder.feed(data)
    messages = []
    while (message := decoder.message()) is not None:
        messages.append(message)
    return messages


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_incomplete_and_never_more(data: bytes) -> None:
    try:
        messages = decode(data)
    except wire.WireError:
        return
    assert all(message["type"] in SCHEMAS for message in messages)


@given(st.sampled_from(sorted(SCHEMAS)), LIKELY)
def test_what_passes_fits_the_schema(kind: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"type": kind, **fields}).encode()
    try:
        (message,) = decode(struct.pack(">I", len(body)) + body)
    except wire.WireError:
        return
    for name, (check, required) in SCHEMAS[kind].items():
        assert check(message[name]) if name in message else not required
    assert message.keys() <= {"type", *SCHEMAS[kind]}


@given(st.lists(st.integers(0, 1 << 16), max_size=3), st.binary(max_size=60), st.data())
def test_a_stream_gives_the_same_however_it_is_cut(iterations: list[int], tail: bytes, data: st.DataObject) -> None:
    stream = b"".join(wire.encode({"type": "done", "epoch": 1, "iteration": i}) for i in iterations)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    decoder = wire.Decoder(1 << 16, SCHEMAS)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        while (message := decoder.message()) is not None:
            found.append(message["iteration"])
    assert found == iterations
    assert decoder.pending == 0


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 50_000,
        b'{"type":' + b'{"a":' * 20_000,
        b'{"type":"join","epoch":1,"done":0,"status":NaN}',
        b'{"type":"join","epoch":1,"done":0,"status":' + b"9" * 10_000 + b"}",
        b'{"type":"done","epoch":true,"iteration":1}',
        b'{"type":"done","epoch":1}',
        b'{"type":"done","epoch":1,"iteration":1,"more":1}',
        b'{"type":"done","epoch":-1,"iteration":1}',
        b'{"type":["done"]}',
        b'"done"',
        b"\xff\xfe",
        b"",
    ],
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        decode(struct.pack(">I", len(body)) + body, limit=1 << 20)


def test_an_oversized_message_is_refused_before_its_body_is_kept() -> None:
    decoder = wire.Decoder(100, SCHEMAS)
    decoder.feed(struct.pack(">I", 101))
    with pytest.raises(wire.WireError):
        decoder.message()


@given(st.sets(st.integers(0, 3000)))
def test_runs_are_another_way_to_write_a_set(workers: set[int]) -> None:
    assert from_runs(to_runs(workers)) == workers


@pytest.mark.parametrize("runs", [[[0, MAX_WORKERS]], [[3, 2]], [[0, 1], [1, 2]], [[0]], [[0, 1.0]], [[False, 1]], "x"])
def test_runs_that_would_expand_without_bound_are_refused(runs: object) -> None:
    body = json.dumps({"type": "revoke", "epoch": 1, "term": 1, "members": runs, "dead": [], "left": [], "reason": ""})
    with pytest.raises(wire.WireError):
        decode(struct.pack(">I", len(body)) + body.encode())
