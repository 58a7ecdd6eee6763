"""Messages: the decoder lets nothing through that is not in the schema, and what is over is not believed."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation import SETTINGS, World, attach

from recover_megatron.membership.events import Connected, Heard, Received, Settle, State
from recover_megatron.membership.io import relay
from recover_megatron.membership.messages import relayed
from recover_megatron.membership.messages import to_coordinator as up
from recover_megatron.membership.messages import to_member as down
from recover_megatron.membership.messages.fields import MAX_DEPTH
from recover_megatron.membership.records import MAX_WORKERS, from_runs, to_runs
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.wire import FROM_RELAY, TO_COORDINATOR, TO_MEMBER, TO_RELAY
from recover_megatron.network import messages as wire
from recover_megatron.network import peer_store

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within ``value``, with each key or index of it."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = {"a": value} if type(value) is list else [value]
    return value


ODD = [
    None, True, False, 0, 1, -1, 255, 1 << 20, (1 << 53) + 1, 1 << 63, (1 << 96) + 1, 0.0, 2.5, -0.5, 1e9 + 1,
    "", "x", "x" * 300, "x" * 20_000, "0f" * 32, "0f" * 32 + "\n", "\ud800", "\0", [], [[]], [[0, 3]], [[3, 0]], [0, 1],
    [[0, 1], [1, 2]], {}, {"a": {}}, {"type": "beat"}, nested(MAX_DEPTH + 1),
]  # fmt: skip
"""Values that are wrong in one field or another."""


def texts(most: int) -> tuple[list[Any], list[Any]]:
    return ["x", "", "\U0001f680" * most], ["x" * (most + 1), 1, b"\xff"]


def whole(least: int, most: int) -> tuple[list[Any], list[Any]]:
    return [1, least, most], [least - 1, most + 1, True, 1.0, "1", None, [1]]


def digits(count: int) -> tuple[list[Any], list[Any]]:
    return ["0f" * (count // 2)], [
        "0" * (count - 1),
        "0" * (count - 1) + "\n",
        "0" * count + "\n",
        "F" * count,
        "g" * count,
    ]


EPOCH = {"epoch": 1, "term": 1, "members": [[0, 1]]}
HEARTBEAT = {"type": "heartbeat", "count": 1, "iteration": 1, "phase": "x", "waiting": False, "allow": 0.5}
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "any": ([{"a": [1]}, None, 1.5, 1 << 80, "x", nested(MAX_DEPTH)], []),
    "status": ([{"a": [1]}, None, 1.5, 1 << 80, "x", nested(MAX_DEPTH)], [nested(MAX_DEPTH + 1)]),
    "plan": ([{"a": [1]}, None, 1.5, 1 << 80, "x", nested(10 * MAX_DEPTH)], [nested(10 * MAX_DEPTH + 1)]),
    "code": whole(1, 255), "exit": whole(0, 255), "signal": whole(1, 64), "pid": whole(0, 1 << 31),
    "count": whole(0, (1 << 63) - 1), "number": whole(0, 1 << 53), "term": whole(0, (1 << 63) - 1),
    "worker": whole(0, MAX_WORKERS - 1), "size": whole(0, MAX_WORKERS), "version": whole(0, 1 << 16),
    "name": texts(256), "text": texts(2048), "error": texts(2000), "traceback": texts(16 << 10), "path": texts(4096),
    "long": texts(1 << 16), "bytes": whole(0, 16 << 20),
    "value": (["AA==", "", "AAAA" * (3 << 17)], ["AAAA" * (3 << 17) + "AA==", "A", "AA", "\xff", 1, None, ["AA=="]]),
    "parts": (
        [[[0, 1, 2]], [[1 << 53, 1 << 53, 1 << 53]] * 4096],
        [[], [[0, 1, 2]] * 4097, [[0, 1]], [[0, 1, 2, 3]], [[-1, 1, 2]], [[0, 1, (1 << 53) + 1]], [[0, 1.0, 2]], [0]],
    ),
    "hex32": digits(32), "hex64": digits(64), "flag": ([True, False], [0, 1, "true", None]),
    "seconds": ([0.5, 0, 1e9], [-0.5, 1e9 + 1, True, "1"]), "rows": ([[{"a": [1]}], []], [[1], {}, [None], [[]]]),
    "runs": (
        [[[0, 1], [3, 5]], [], [[0, MAX_WORKERS - 1]], [[0, 0], [1, 1]]],
        [[[0, MAX_WORKERS]], [[3, 2]], [[0, 1], [1, 2]], [[0]], [[0, 1, 2]], [[0, 1.0]], [[False, 1]], [[-1, 1]], "x"],
    ),
    "address": ([["h", 1], ["x" * 256, 65535]], [["h", 0], ["h", 65536], ["x" * 257, 1], ["h"], ["h", 1, 2], [1, 1]]),
    "addresses": ([[["h", 1]] * 3, []], [[["h", 1]] * 4, [["h", 0]], ["h"]]),
    "tried": ([[1, 2], [1 << 53] * 4096], [[0] * 4097, [-1], [True], [None]]),
    "place": ([[0, 1, 8], [0, 0, (1 << 31) - 1]], [[0, 1], [0, 1, 8, 9], [0, 1, 1 << 31], [0, -1, 8], [0, 1.0, 8], 1]),
    "loss": ([[7, 2.5], [7, None]], [2.5, [7], [7, True], [7.0, 2.5], [7, 2.5, 1], [-1, 2.5], [7, "x"]]),
    "plan_id": ([[3, 7], [0, 0]], [[3], [3, 7, 1], [-1, 7], [3, 1.0], 3, None]),
    "channels": ([[1, 1 << 53], [0] * 4096], [[], [0] * 4097, [-1], [1.0], [(1 << 53) + 1], 1]),
    "answers": ([[[1, 1 << 53]], [], [[0, 0]] * 4096], [[[0, 0]] * 4097, [[-1, 1]], [[1, -1]], [[1]], [[1, 1, 1]]]),
    "beats": (
        [[[1, HEARTBEAT], [1 << 53, HEARTBEAT]], [], [[0, HEARTBEAT]] * 4096],
        [[[0, HEARTBEAT]] * 4097, [[1, {"count": 1}]], [[1, {**HEARTBEAT, "x": 1}]], [[-1, HEARTBEAT]], [[1]]],
    ),
    "epoch": ([EPOCH], [{}, {"epoch": 1, "term": 1}, {**EPOCH, "type": "plan"}, [], "x"]),
    "presentation": ([{"formed": EPOCH, "term": 1, "committed": 7, "dead": [], "left": []}], [EPOCH, {}, []]),
}  # fmt: skip
"""Kind of a field -> values within its bounds, and values beyond them or of a wrong type."""
LISTED = {
    f"{where} {kind}": [part.partition("=")[::2] for part in fields.split()]
    for where, messages in tomllib.loads((Path(__file__).parent / "messages.toml").read_text()).items()
    for kind, fields in messages.items()
}
"""Message -> its fields, each with its kind."""
STAGES: dict[str, wire.Schema[Any]] = {
    "wire challenge": wire.CHALLENGE, "wire auth": wire.AUTH, "wire proof": wire.PROOF,
    "wire fetched": peer_store.FETCHED,
    **{f"peer {kind.__struct_config__.tag}": peer_store.REQUEST for kind in get_args(peer_store.Request)},
    **{f"up {kind.__struct_config__.tag}": TO_COORDINATOR for kind in get_args(up.ToCoordinator)},
    **{f"down {kind.__struct_config__.tag}": TO_MEMBER for kind in get_args(down.ToMember)},
    "relay relay": TO_COORDINATOR, "relay dial": relay.DIAL,
    **{f"relay {kind.__struct_config__.tag}": TO_MEMBER for kind in get_args(relayed.ToWorker)},
    **{f"relay {kind.__struct_config__.tag}": FROM_RELAY for kind in get_args(relayed.FromRelay)},
    **{f"relay {kind.__struct_config__.tag}": TO_RELAY for kind in get_args(relayed.ToRelay)},
}  # fmt: skip


def placed(fields: Any, path: str, value: Any) -> Any:
    """The fields, with this value at a path such as ``after.epoch``."""
    *outer, last = path.split(".")
    inner = fields
    for part in outer:
        inner = inner.setdefault(part, {})
    inner[last] = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
    return fields


def example(name: str) -> dict[str, Any]:
    """A valid message with all its fields, in JSON."""
    fields = {"type": name.split()[1]}
    for path, kind in LISTED.get(name, ()):
        if within := BOUNDS[kind.removeprefix("?")][0]:
            placed(fields, path, copy.deepcopy(within[0]))
    return fields


@settings(
    max_examples=int(os.environ.get("RECOVER_EXAMPLES", "300")), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.sampled_from([*STAGES]), st.data())
def test_a_spoiled_message_is_refused_or_is_another_valid_message(name: str, data: st.DataObject) -> None:
    stage, fields = STAGES[name], example(name)
    what = data.draw(st.sampled_from(["value", "missing", "unknown", "depth", "cut", "bytes", "garbage"]))
    if what in ("value", "missing"):
        for _ in range(data.draw(st.integers(1, min(3, len(fields))))):
            container, key = data.draw(st.sampled_from([*places(fields)]))
            if what == "value":
                container[key] = copy.deepcopy(data.draw(st.sampled_from(ODD) | JSON))
            else:
                del container[key]
    elif what == "unknown":
        fields["another " + data.draw(st.text())] = data.draw(JSON)
    body = json.dumps(fields).encode()
    if what == "depth":
        deep = data.draw(st.sampled_from([b"[", b'{"a":', b'[{"a":'])) * data.draw(
            st.sampled_from([1600, 20_000, 100_000])
        )
        body = body[:-1] + b',"' + data.draw(st.sampled_from([*fields, "more"])).encode() + b'":' + deep
    elif what == "cut":
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    elif what == "bytes":
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.binary(min_size=1, max_size=4)) + body[at + data.draw(st.integers(0, 4)) :]
    elif what == "garbage":
        body = data.draw(st.binary(max_size=300))
    try:
        found = stage.parse(body)
    except wire.WireError:
        return
    assert what not in ("unknown", "depth", "cut", "garbage")
    assert stage.parse(wire.encode(found)[4:]) == found


@pytest.mark.parametrize("body", [b'{"type":"' + b"x" * 1000 + b'"}', b'{"type":"beat","' + b"x" * 1000 + b'":1}'])
def test_an_error_quotes_little_of_a_message(body: bytes) -> None:
    with pytest.raises(wire.WireError) as refused:
        TO_COORDINATOR.parse(body)
    assert len(str(refused.value)) <= wire.MAX_QUOTED


@pytest.mark.parametrize("name", STAGES)
def test_each_field_keeps_its_bounds(name: str) -> None:
    message, kinds = STAGES[name].parse(json.dumps(example(name)).encode()), LISTED.get(name, ())
    assert {path.partition(".")[0] for path, _ in kinds} == {*message.__struct_fields__}
    assert STAGES[name].parse(wire.encode(message)[4:]) == message
    for path, kind in kinds:
        within, beyond = BOUNDS[kind.removeprefix("?")]
        for value, fits in [*((value, True) for value in within), *((value, False) for value in beyond)]:
            with nullcontext() if fits or (value is None and kind.startswith("?")) else pytest.raises(wire.WireError):
                STAGES[name].parse(json.dumps(placed(example(name), path, value)).encode())


@pytest.mark.parametrize("name", STAGES)
def test_a_field_without_a_default_is_required(name: str) -> None:
    fields = example(name)
    message = STAGES[name].parse(json.dumps(fields).encode())
    optional = {*message.__struct_fields__[len(message.__struct_fields__) - len(message.__struct_defaults__) :]}
    optional |= {"type"} if name.startswith("wire") or name == "relay dial" else set()  # the only message of its stage
    for field in fields:
        with nullcontext() if field in optional else pytest.raises(wire.WireError):
            STAGES[name].parse(json.dumps({key: fields[key] for key in fields if key != field}).encode())


JOIN = b'{"type":"join","epoch":1,"done":0,"status":'
MALFORMED = [
    b"[" * 50_000, b'{"type":' + b'{"a":' * 20_000, JOIN + b"NaN}", JOIN + b"1e999}", JOIN + b"9" * 10_000 + b"}",
    JOIN + b'"\xff"}', b'{"type":"done","type":"idle","epoch":1,"iteration":1}',
    b'{"type":"done","epoch":1,"iteration":1}{}', b'{"type":"view"}', b'{"type":["done"]}',
    b'{"epoch":1,"iteration":1}', b'"done"', b"\xff\xfe", b"",
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        TO_COORDINATOR.parse(body)


def test_a_text_that_utf_8_cannot_represent_arrives_with_question_marks() -> None:
    """A name of a file that is no UTF-8, in an exception for example."""
    sent = up.Note("\U0001f680 file \udcff, \ud800")
    assert TO_COORDINATOR.parse(wire.encode(sent)[4:]) == up.Note("\U0001f680 file ?, ?")
    join = up.Join(1, {"\ud800": [math.nan, math.inf, 0.5]}, 0)
    assert TO_COORDINATOR.parse(wire.encode(join)[4:]) == up.Join(1, {"?": [None, None, 0.5]}, 0)


def test_a_number_of_a_type_of_its_own_is_sent_as_a_number() -> None:
    """The loss that a user's loop tells, for example."""
    sent = up.Heartbeat(1, 7, type("Name", (str,), {})("data"), False, np.float64(0.5), loss=(6, np.float64(2.5)))
    assert TO_COORDINATOR.parse(wire.encode(sent)[4:]) == up.Heartbeat(1, 7, "data", False, 0.5, loss=(6, 2.5))


def test_an_oversized_message_is_refused_before_its_body_is_kept() -> None:
    decoder = wire.Decoder()
    decoder.feed(struct.pack(">I", wire.MAX_HANDSHAKE + 1))
    with pytest.raises(wire.WireError):
        decoder.message(wire.AUTH)


@given(st.lists(st.integers(0, 1 << 16), max_size=3), st.binary(max_size=60), st.data())
def test_a_stream_gives_the_same_however_it_is_cut(iterations: list[int], tail: bytes, data: st.DataObject) -> None:
    stream = b"".join(wire.encode(up.Done(1, i)) for i in iterations)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    decoder = wire.Decoder()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        while (message := decoder.message(TO_COORDINATOR)) is not None:
            assert isinstance(message, up.Done)
            found.append(message.iteration)
    assert found == iterations
    assert not decoder._buffer


@given(st.sets(st.integers(0, 3000)))
def test_runs_are_another_way_to_write_a_set(workers: set[int]) -> None:
    assert from_runs(to_runs(workers)) == workers


class Said:
    """A coordinator whose first or second epoch is formed, and messages to it as they come, from all workers."""

    def __init__(self, epoch: int = 1) -> None:
        self._world = World(3, candidates=1, node_agents=False)
        self._world.run_fairly(2.0)
        self.coordinator = self._world.coordinators[0]
        self.is_in(State.STEADY, 1)
        if epoch == 2:
            self.say(up.Complain(1, "a test"))
            self.say(up.Join(2, None, 0))

    def is_in(self, state: State, epoch: int) -> None:
        assert (self.coordinator.state, self.coordinator.epochs.formed.epoch) == (state, epoch)

    def say(self, message: up.ToCoordinator) -> None:
        for connection in list(self._world.connections.values()):
            self.coordinator.handle(Received(connection.number, message), self._world.now)
        self.coordinator.handle(Settle(), self._world.now)


def test_no_plan_is_made_of_joins_of_a_rendezvous_that_is_over() -> None:
    said = Said()
    said.say(up.Complain(1, "a test"))
    said.say(up.Join(1, None, 0))
    said.is_in(State.RENDEZVOUS, 1)
    said.say(up.Join(2, None, 0))
    said.is_in(State.STEADY, 2)


@pytest.mark.parametrize("message", [up.Done(1, 99), up.Idle(1)], ids=lambda message: message.kind)
def test_reports_of_an_epoch_that_is_over_decide_nothing(message: up.ToCoordinator) -> None:
    said = Said(epoch=2)
    before = said.coordinator.epochs.committed
    said.say(message)
    assert said.coordinator.epochs.committed == before
    workers = said.coordinator.roster.workers.values()
    assert {(worker.done, worker.idle_in == 2) for worker in workers} == {(0, False)}


def test_a_complaint_about_an_epoch_that_is_over_ends_no_other() -> None:
    said = Said(epoch=2)
    said.say(up.Complain(1, "a test"))
    said.is_in(State.STEADY, 2)


def revoke(epoch: int, term: int) -> down.Revoke:
    return down.Revoke(epoch, term, [[0, 2]], [], [], 4, "a test")


def plan(epoch: int, term: int) -> down.Plan:
    return down.Plan(epoch, term, [[0, 2]], 4)


class Heeding:
    """A worker that has been told by the coordinator of term 7 that rendezvous 3 is open."""

    def __init__(self) -> None:
        self.member = Member(attach(0, 0), 1, SETTINGS, 0.0)
        self.member.handle(Connected(), 0.0)
        self.hear(revoke(3, 7))

    def hear(self, message: down.ToMember) -> None:
        self.member.handle(Heard(message), 0.0)


@pytest.mark.parametrize("other", [{"epoch": 2, "term": 7}, {"epoch": 3, "term": 6}], ids=["epoch", "term"])
def test_a_worker_takes_up_the_plan_of_the_rendezvous_that_is_open_and_no_other(other: dict[str, int]) -> None:
    heeding = Heeding()
    heeding.hear(plan(**other))
    assert heeding.member.plan is None
    assert heeding.member.revoked
    heeding.hear(plan(3, 7))
    assert heeding.member.plan is not None
    assert not heeding.member.revoked


def test_a_worker_follows_no_coordinator_that_another_one_has_followed() -> None:
    heeding = Heeding()
    heeding.hear(revoke(4, 6))
    heeding.hear(down.Lead(6))
    heeding.hear(plan(3, 7))
    assert heeding.member.plan is not None
    assert heeding.member.plan.epoch == 3
    assert heeding.member.presentation.term == 7


def test_a_worker_believes_the_commits_of_its_own_epoch_alone() -> None:
    heeding = Heeding()
    heeding.hear(plan(3, 7))
    heeding.hear(down.Commit(2, 99))
    assert heeding.member.committed == 4
    heeding.hear(down.Commit(3, 5))
    assert heeding.member.committed == 5
