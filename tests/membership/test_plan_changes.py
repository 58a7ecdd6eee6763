"""A plan that is sent as changes: it is received as it was, and its size does not grow with the number of workers."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.membership.messages.plan_changes import pack, unpack
from recover_megatron.membership.records import Json, PlanRequest, WorkerId, Workers, members_only

VALUES = st.sampled_from([0, 1, True, False, 1.0, None, "", "a", [], [1], [True], {}, {"b": 1}])
STATUSES = st.dictionaries(st.sampled_from("abcde"), VALUES)
PLANS = st.dictionaries(st.integers(0, 12).map(WorkerId), STATUSES, min_size=1)


def plan_of(statuses: dict[WorkerId, Any], **more: Any) -> Json:
    members = tuple(sorted(statuses))
    request = PlanRequest(1, members, statuses, None, 0, {}, more.get("drain", ()), ())
    return json.loads(json.dumps(members_only(request)))


def sent(plan: Json, base: Json = None) -> tuple[Json, int]:
    """The plan as a member that holds ``base`` receives it, and the bytes of that message."""
    members = Workers(plan["members"])
    text = json.dumps(pack(plan, members, base))
    return unpack(json.loads(text), members, base), len(text)


@given(PLANS, st.none() | PLANS, st.booleans())
def test_a_plan_is_received_as_it_was(
    statuses: dict[WorkerId, Any], before: dict[WorkerId, Any] | None, drains: bool
) -> None:
    """To the last type: 1, True and 1.0 are equal in Python, and are different texts."""
    plan, base = plan_of(statuses, drain=("n",) * drains), plan_of(before) if before else None
    text, old = json.dumps(plan), copy.deepcopy(base)
    assert json.dumps(sent(plan, base)[0], sort_keys=True) == json.dumps(json.loads(text), sort_keys=True)
    assert (json.dumps(plan), base) == (text, old), "neither plan is changed by that"


def status_of(worker: int, iteration: int) -> dict[str, Any]:
    """Status of a worker of Megatron: eight workers on each node, in replicas of 64 (TP 8 x PP 8)."""
    node = f"node-{worker // 8:05d}"
    same = {"step": True, "total": 512, "flags": "0123456789abcdef", "code": "fedcba9876543210", "pace": 0.0}
    place = {"replica": worker // 64, "position": worker % 64, "node": node, "device": worker % 8}
    return {**place, **same, "at": iteration, "iteration": iteration, "peer_store": f"10.0.{worker // 8}.1:{worker}"}


def test_the_change_of_one_position_is_sent_for_its_workers_only() -> None:
    base, plan = (plan_of({WorkerId(n): {"at": at if n % 16 == 0 else 0} for n in range(256)}) for at in (0, 1))
    packed = pack(plan, Workers(range(256)), base)
    assert (packed["common"], len(packed["own"])) == ({}, 16)


def test_what_a_survivor_gets_does_not_grow_with_the_number_of_workers() -> None:
    sizes = []
    for world in (128, 2048):
        base = plan_of({WorkerId(n): status_of(n, 7) for n in range(world)})
        statuses = {WorkerId(n): status_of(n, 8) for n in range(world) if n != 5}
        statuses[WorkerId(9)]["unreached"] = [5]
        plan, size = sent(plan_of(statuses), base)
        assert plan == plan_of(statuses)
        whole, first = sent(plan_of(statuses))
        assert whole == plan
        assert first < len(json.dumps(plan)) / 2, "what most statuses share is sent once to a newcomer, too"
        sizes.append(size)
    assert first < len(json.dumps(plan)) / 10, "and what is large is compressed"
    assert sizes[0] == sizes[1] < 200


@pytest.mark.parametrize("plan", [None, 3, {"a": 1}, {"members": [1], "statuses": {"1": 3}}, {"members": [2, 1]}])
def test_a_plan_of_another_form_is_sent_whole(plan: Json) -> None:
    assert pack(plan, Workers([WorkerId(1)]), plan) == {"whole": plan}
    assert unpack({"whole": plan}, Workers([WorkerId(1)])) == plan


NO_JSON = base64.b64encode(zlib.compress(b"no JSON")).decode()
DEEP = base64.b64encode(zlib.compress(b"[" * 100_000)).decode()


@pytest.mark.parametrize(
    "packed",
    [
        3, [], {}, {"rest": {}, "common": {}, "own": []},
        {"zlib": "?"}, {"zlib": base64.b64encode(b"no zlib").decode()}, {"zlib": DEEP}, {"zlib": DEEP[:40]},
        {"zlib": NO_JSON},
        {"rest": {}, "common": {}, "own": {"1": 3}}, {"rest": {}, "common": {}, "own": {}, "without": {"1": ["a"]}},
    ],
)  # fmt: skip
def test_what_is_no_packed_plan_is_refused(packed: Json) -> None:
    with pytest.raises(ValueError, match="packed"):
        unpack(packed, Workers([WorkerId(1)]))
