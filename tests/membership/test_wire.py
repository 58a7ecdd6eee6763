"""Messages: the decoder lets nothing through that is not in the schema, and what is over is not believed."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import SETTINGS, World

from recover_megatron.membership import wire
from recover_megatron.membership.events import Connected, Heard, Received, Settle, State
from recover_megatron.membership.records import MAX_WORKERS, from_runs, to_runs
from recover_megatron.membership.sides.member import Member

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
        *(
            b'{"type":"heartbeat","count":1,"iteration":8,"phase":"","waiting":false,"allow":0,"loss":' + loss + b"}"
            for loss in (b"2.5", b"[7]", b"[7,1e999]", b"[7,true]", b"[7.0,2.5]", b"[7,2.5,1]")
        ),
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


class Said:
    """A coordinator whose first or second epoch is formed, and messages to it as they come, from all workers."""

    def __init__(self, epoch: int = 1) -> None:
        self._world = World(3, candidates=1, node_agents=False)
        self._world.run_fairly(2.0)
        self.coordinator = self._world.coordinators[0]
        self.is_in(State.STEADY, 1)
        if epoch == 2:
            self.say(type="complain", epoch=1, reason="a test")
            self.say(type="join", epoch=2, status=None, done=0)

    def is_in(self, state: State, epoch: int) -> None:
        assert (self.coordinator.state, self.coordinator.epochs.formed.epoch) == (state, epoch)

    def say(self, **message: Any) -> None:
        for connection in list(self._world.connections.values()):
            self.coordinator.handle(Received(connection.number, message), self._world.now)
        self.coordinator.handle(Settle(), self._world.now)


def test_no_plan_is_made_of_joins_of_a_rendezvous_that_is_over() -> None:
    said = Said()
    said.say(type="complain", epoch=1, reason="a test")
    said.say(type="join", epoch=1, status=None, done=0)
    said.is_in(State.RENDEZVOUS, 1)
    said.say(type="join", epoch=2, status=None, done=0)
    said.is_in(State.STEADY, 2)


@pytest.mark.parametrize("message", [{"type": "done", "iteration": 99}, {"type": "idle"}], ids=lambda m: m["type"])
def test_reports_of_an_epoch_that_is_over_decide_nothing(message: dict[str, Any]) -> None:
    said = Said(epoch=2)
    before = said.coordinator.epochs.committed
    said.say(**message, epoch=1)
    assert said.coordinator.epochs.committed == before
    workers = said.coordinator.roster.workers.values()
    assert {(worker.done, worker.idle_in == 2) for worker in workers} == {(0, False)}


def test_a_complaint_about_an_epoch_that_is_over_ends_no_other() -> None:
    said = Said(epoch=2)
    said.say(type="complain", epoch=1, reason="a test")
    said.is_in(State.STEADY, 2)


class Heeding:
    """A worker that has been told by the coordinator of term 7 that rendezvous 3 is open."""

    def __init__(self) -> None:
        hello = {"worker": 0, "incarnation": "0" * 32, "host": "here", "pid": 1}
        self.member = Member(hello, 1, SETTINGS, 0.0)
        self.member.handle(Connected(), 0.0)
        self.hear("revoke", epoch=3, term=7)

    def hear(self, kind: str, **message: Any) -> None:
        rest: dict[str, Any] = {"members": [[0, 2]], "committed": 4, "dead": [], "left": [], "reason": "a test"}
        self.member.handle(Heard({"type": kind, **rest, **message}), 0.0)


@pytest.mark.parametrize("other", [{"epoch": 2, "term": 7}, {"epoch": 3, "term": 6}], ids=["epoch", "term"])
def test_a_worker_takes_up_the_plan_of_the_rendezvous_that_is_open_and_no_other(other: dict[str, int]) -> None:
    heeding = Heeding()
    heeding.hear("plan", **other)
    assert heeding.member.plan is None
    assert heeding.member.revoked
    heeding.hear("plan", epoch=3, term=7)
    assert heeding.member.plan is not None
    assert not heeding.member.revoked


def test_a_worker_follows_no_coordinator_that_another_one_has_followed() -> None:
    heeding = Heeding()
    heeding.hear("revoke", epoch=4, term=6)
    heeding.hear("lead", term=6)
    heeding.hear("plan", epoch=3, term=7)
    assert heeding.member.plan is not None
    assert heeding.member.plan.epoch == 3
    assert heeding.member.presentation.term == 7


def test_a_worker_believes_the_commits_of_its_own_epoch_alone() -> None:
    heeding = Heeding()
    heeding.hear("plan", epoch=3, term=7)
    heeding.hear("commit", epoch=2, iteration=99)
    assert heeding.member.committed == 4
    heeding.hear("commit", epoch=3, iteration=5)
    assert heeding.member.committed == 5
