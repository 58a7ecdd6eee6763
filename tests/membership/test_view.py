"""Observers are answered from any state, within bounds, and nothing in the run depends on them."""

from __future__ import annotations

import copy
import math
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from simulation import SETTINGS, World
from test_protocol_properties import MOVES, Moves, play, world_of
from test_wire import JSON

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.events import Close, Closed, Exit, Received, Send, Settle, State
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.messages.to_coordinator import Done, GiveUp, Observe
from recover_megatron.membership.messages.to_member import Stop, View
from recover_megatron.membership.roster import Fate
from recover_megatron.membership.view import LAST, MAX_OBSERVERS, MAX_ROWS, History, statuses_of
from recover_megatron.membership.wire import MAX_TO_MEMBER, TO_MEMBER, Secret
from recover_megatron.network.messages import encode

OBSERVE = Observe()


def asked(coordinator: Coordinator, session: int, now: float) -> list[Any]:
    """The effects of one question, the log of them aside."""
    effects = coordinator.handle(Received(session, OBSERVE), now)
    return [effect for effect in effects if isinstance(effect, (Send, Close, Exit))]


def picture(coordinator: Coordinator, now: float) -> View:
    """The view as it arrives."""
    return TO_MEMBER.parse(encode(coordinator.view(now))[4:])


def steady() -> tuple[World, Coordinator]:
    world = World(3)
    world.run_fairly(4.0)
    assert world.coordinators[0].state is State.STEADY
    return world, world.coordinators[0]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.sets(st.integers(0, 4)))
def test_the_view_of_any_state_is_a_message_and_looking_changes_nothing(
    moves: Moves, workers: int, started: bool, spares: set[int]
) -> None:
    world = world_of(workers, started, True, spares)
    for move in moves:
        play(world, move)
        for coordinator in world.coordinators.values():
            before = picture(coordinator, world.now)
            (answer,) = asked(coordinator, 10**6 + len(world.log), world.now)[:1]
            assert answer.message.kind == ("stop" if coordinator.state is State.STOPPED else "view")
            assert picture(coordinator, world.now) == before
            coordinator.handle(Closed(10**6 + len(world.log), True, "it has seen enough"), world.now)
            assert picture(coordinator, world.now) == before
            fates = {row["worker"]: row["fate"] for row in before.workers}
            evicted = dict.fromkeys(coordinator.history.evicted, "out")
            assert fates == {n: worker.fate.value for n, worker in coordinator.roster.workers.items()} | evicted


@given(JSON | st.dictionaries(st.sampled_from(["statuses", "members"]), JSON | st.dictionaries(st.text(), JSON)))
def test_any_plan_and_status_can_be_shown(plan: Any) -> None:
    coordinator = Coordinator(2, SETTINGS, salt=1)
    coordinator.epochs.plan = plan
    coordinator.roster.workers[0].status = plan
    record = {"event": "plan", "epoch": 1, "members": [[0, 1]], "committed": 0, "seconds": {}}
    coordinator.history.note(record, plan, 1.0)
    assert picture(coordinator, 2.0).recoveries[0]["ago"] == 1.0


def test_a_view_of_the_largest_run_with_the_longest_texts_fits_a_message() -> None:
    coordinator = Coordinator(MAX_ROWS + 1000, SETTINGS, salt=1)
    wide = "\U0001f680" * 300
    numbers = dict.fromkeys(("replica", "position", "slot", "at", "iteration", "total", "quota"), (1 << 53) - 1)
    for worker in coordinator.roster.workers.values():
        worker.host = worker.node_agent = worker.progress.phase = wide
        worker.status = {**numbers, "note": wide, "node": wide, "ran": [1] * 1000}
        worker.session, worker.progress.iteration, worker.progress.microbatch = 1, 1 << 53, 1 << 53
    coordinator.roster.workers[MAX_ROWS + 500].fate = Fate.DEAD
    for _ in range(2 * LAST):
        fault = {"event": "fault", "kind": "dead", "worker": MAX_ROWS + 500, "host": wide, "reason": wide * 10}
        coordinator.history.note(fault, None, 0.0)
    message = coordinator.view(1.0)
    frame = encode(message)
    assert len(frame) < MAX_TO_MEMBER
    assert TO_MEMBER.parse(frame[4:]).hidden == 1000
    assert MAX_ROWS + 500 in {row["worker"] for row in message.workers}  # who is gone is shown first
    assert len(message.faults) == LAST


def test_an_evicted_worker_stays_evicted_when_its_launcher_has_killed_it() -> None:
    coordinator = Coordinator(2, SETTINGS, salt=1)
    for kind, reason in (("out", "no progress for 7.1 s"), ("dead", "its process has ended (SIGKILL)")):
        coordinator.history.note({"event": "fault", "kind": kind, "worker": 1, "reason": reason}, None, 1.0)
    coordinator.roster.workers[1].fate = Fate.DEAD
    (row,) = [row for row in picture(coordinator, 2.0).workers if row["worker"] == 1]
    assert (row["fate"], row["why"]) == ("out", "no progress for 7.1 s; its process has ended (SIGKILL)")


def test_a_run_that_a_worker_ends_without_a_reason_ends_in_order() -> None:
    world, coordinator = steady()
    effects = coordinator.handle(Received(coordinator.roster.workers[1].session, GiveUp(5, "")), world.now)
    assert coordinator.state is State.STOPPED
    assert any(isinstance(effect, Send) and isinstance(effect.message, Stop) for effect in effects)
    assert picture(coordinator, world.now).faults[-1]["why"] == "no reason given"


def test_an_observer_is_answered_by_a_candidate_that_does_not_lead_too() -> None:
    coordinator = Coordinator(3, SETTINGS, salt=1)
    (answer,) = asked(coordinator, 1, 0.0)
    assert answer.message.state == "standby"
    assert coordinator.handle(Settle(), 0.0) == []


def test_who_asks_without_a_pause_is_refused_and_told_no_more() -> None:
    world, coordinator = steady()
    assert asked(coordinator, 999, world.now)[0].message.kind == "view"
    refusal, closing = asked(coordinator, 999, world.now + 0.01)
    assert refusal.message.kind == "refused"
    assert closing == Close(999)
    assert coordinator.state is State.STEADY


def test_an_observer_cannot_become_a_member() -> None:
    world, coordinator = steady()
    before = copy.deepcopy(picture(coordinator, world.now))
    for message in (world.worker(0)._attach_message(), Done(1, 99), GiveUp(1, "")):
        assert asked(coordinator, 999, world.now)[0].message.kind == "view"
        assert Close(999) in coordinator.handle(Received(999, message), world.now)
    assert picture(coordinator, world.now) == before


def test_the_newest_observer_finds_room_and_the_quietest_goes() -> None:
    world, coordinator = steady()
    for session in range(1000, 1000 + MAX_OBSERVERS):
        assert len(asked(coordinator, session, world.now)) == 1
    asked(coordinator, 1000, world.now + 1.0)  # is heard of again
    answer, closing = asked(coordinator, 2000, world.now + 1.0)
    assert answer.message.kind == "view"
    assert closing == Close(1001)


def test_observers_are_told_of_the_end_and_the_end_does_not_wait_for_them() -> None:
    world, coordinator = steady()
    asked(coordinator, 999, world.now)
    session = coordinator.roster.workers[0].session
    effects = coordinator.handle(Received(session, GiveUp(42, "enough")), world.now)
    (stop,) = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Stop)]
    assert 999 in stop.sessions
    assert Exit(42, "enough") in effects


def test_views_do_not_pile_up_for_an_observer_that_does_not_read() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    secret = Secret(b"a secret that is long enough")
    server = CoordinatorServer(Coordinator(1, SETTINGS, salt=1), listener, secret, lambda record: None)
    with socket.create_connection(listener.getsockname()) as silent:
        while not server._connections:
            server._accept()
        (number, connection), *_ = server._connections.items()
        large = replace(server.coordinator.view(0.0), workers=[{"host": "x" * 1000}] * 1000)
        while not connection.line.queued:  # the kernel takes a few
            server._send((number,), large)
        before = connection.line.queued
        assert before <= len(encode(large))
        server._send((number,), large)
        assert connection.line.queued == before
        server._send((number,), Stop("", 0, 1))
        assert connection.line.queued > before  # how the run ended is told
        assert silent.fileno() >= 0
    server.close()


@pytest.mark.parametrize(("loss", "shown"), [(2.5, 2.5), (math.nan, None), (math.inf, None)])
def test_the_loss_that_a_worker_tells_is_shown_until_it_tells_another(loss: float, shown: float | None) -> None:
    world, coordinator = steady()
    member, session = world.worker(1), object.__new__(Session)
    session._core = member
    session.show_loss(7, loss)
    for phase in ("forward", "all-reduce"):
        member.mark(8, phase, None, False, 0.0)
        world.run_fairly(2 * SETTINGS.heartbeat_interval)
        assert [row.get("loss") for row in picture(coordinator, world.now).workers] == [None, [7, shown], None]


def test_the_cause_told_first_stays_the_cause() -> None:
    history = History()
    where = {"worker": 1, "host": "h"}
    history.note({"event": "exception", **where, "error": "ValueError: 7"}, None, 1.0)
    history.note({"event": "fault", "kind": "dead", **where, "reason": "its connection was closed"}, None, 2.0)
    assert history.ends == {1: (1.0, "ValueError: 7; its connection was closed")}


@pytest.mark.parametrize("statuses", [{"0": {"replica": 1}}, {"0": {"replica": 1, "position": None, "more": [1]}}])
def test_keys_that_are_missing_or_unknown_do_not_matter(statuses: dict[str, Any]) -> None:
    assert statuses_of({"statuses": statuses}) == {0: {"replica": 1}}
