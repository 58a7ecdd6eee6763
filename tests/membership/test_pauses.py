"""A control-plane process that is kept from running, for however long, costs no worker: simulated, and with SIGSTOP."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from pathlib import Path

import pytest
from cluster import QUICK, Cluster, cluster
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from script import play, table
from simulation import SETTINGS, World

from recover_megatron.membership.events import Abandon
from recover_megatron.membership.io.client import Client
from recover_megatron.membership.messages.to_member import Beat, Revoke
from recover_megatron.membership.records import Opened
from recover_megatron.membership.sides.follower import Stage
from recover_megatron.membership.sides.node_agent import NodeAgentClient
from recover_megatron.membership.wire import Secret
from recover_megatron.network import messages as wire
from tests.harness.patience import patient

PAUSES = st.lists(
    st.tuples(
        st.sampled_from(["c0", "c1", "node0", "node1"]),
        st.sampled_from([1.0, 3.0, 4.1, 4.3, 4.5, 4.7, 4.9, 5.1, 5.5, 6.0, 9.0, 20.0, 35.0]),
        st.sampled_from([0.0, 0.2, 3.0, 12.0]),
    ),
    min_size=1,
    max_size=4,
)
"""Who is stopped, for how long, and how long all run then."""


def started(workers: int, candidates: int, node_agents: bool, nodes: int = 2) -> World:
    """A run whose members speak at different times, as real ones do."""
    world = World(workers, candidates, nodes, node_agents)
    for name in world.members:
        world.frozen.add(name)
    for name in world.members:
        world.advance(0.23)
        world.frozen.discard(name)
        world.run_fairly(0.01, step=0.01)
    world.run_fairly(3.0, step=0.1)
    assert world.order == [1]
    return world


def nobody_is_lost(world: World, pauses: list[tuple[str, float, float]]) -> None:
    workers = list(world.node_of)
    for who, seconds, rest in pauses:
        world.frozen.add(who)
        world.run_fairly(seconds, step=0.25)
        world.frozen.discard(who)
        world.run_fairly(rest, step=0.25)
    world.run_fairly(30.0)
    before = {w: world.worker(w).committed for w in workers}
    world.run_fairly(5.0)
    assert [w for w in workers if world.worker(w).stage is Stage.OUT or world.worker(w).committed <= before[w]] == []
    assert world.logged("fault", "stop") == []
    assert all(members == frozenset(workers) for _, members in world.formed.values())


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(2, 5), st.booleans(), PAUSES)
@example(4, True, [("c0", 4.7, 0.0)])
@example(2, True, [("c0", 4.5, 0.0), ("c1", 35.0, 0.0)])
def test_no_pause_of_one_process_after_the_other_costs_a_worker(
    workers: int, node_agents: bool, pauses: list[tuple[str, float, float]]
) -> None:
    nobody_is_lost(started(workers, 2, node_agents), [p for p in pauses if node_agents or p[0].startswith("c")])


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 4), st.booleans(), PAUSES)
@example(3, True, [("c0", 6.0, 0.0)])
@example(3, False, [("c0", 35.0, 0.0)])
@example(1, False, [("c0", 1.0, 0.0), ("c0", 9.0, 0.0), ("c0", 35.0, 0.0)])
def test_no_pause_of_the_only_candidate_costs_a_worker(
    workers: int, node_agents: bool, pauses: list[tuple[str, float, float]]
) -> None:
    # It runs between two pauses: else they are one, and no member waits longer than the stall timeout for a candidate.
    nobody_is_lost(started(workers, 1, node_agents), [("c0", seconds, rest or 0.2) for _, seconds, rest in pauses])


def lose_host(world: World, node: int) -> None:
    """A host loses power, and the coordinator with it if it is the first: no end of any connection is seen."""
    world.power_off(node)
    if node == 0:
        world.frozen.add("c0")
    world.blocked |= {(f"node{other}", 0) for other in range(3) if node == 0}


@pytest.mark.parametrize("node", [0, 1, 2])
def test_the_silent_loss_of_any_host_costs_the_heartbeat_timeout_and_a_second(node: int) -> None:
    """In the simulation's own time."""
    world = started(6, 3, True, nodes=3)
    lose_host(world, node)
    lost_at = world.now
    while len(world.order) == 1:
        world.run_fairly(0.1, step=0.1)
    assert world.now - lost_at <= SETTINGS.heartbeat_timeout + SETTINGS.heartbeat_interval + 0.5
    left = {worker for worker, where in world.node_of.items() if where != node}
    assert world.newest == left
    world.run_fairly(60.0)
    assert not world.out & left
    assert len(world.order) == 2


@table("""
a worker that is deaf when the coordinator is lost is waited for if its launcher speaks for it
    world 4 runs=4; freeze w3 c0; run 15 0.25; wake w3; run 10 -> led 0 1; always 0 1 2 3; goes_on 5 3
a worker that hangs while its launcher is stopped costs itself alone
    world 3 nodes=1 runs=4; freeze node0; run 10; freeze w2; run 30 -> faults out:2; members 0 1
    wake; goes_on 5 0; running 0 1; stops
a launcher that is stopped while the run ends has the verdict when it runs again
    world 2 nodes=1 runs=4; freeze node0; run 30; end 0 12 the state is lost; run 30; wake; run 1 -> launcher_ends 0 12
""")
def test_a_process_that_is_stopped(script: str) -> None:
    play(script)


def test_a_launcher_that_is_stopped_and_turns_away_presents_what_lay_unread() -> None:
    world = started(4, 2, True)
    world.frozen.add("node0")
    world.run_fairly(2 * SETTINGS.heartbeat_timeout)
    world.frozen.add("w3")
    world.run_fairly(2 * SETTINGS.hang_timeout)
    launcher, formed = world.members["node0"], list(world.formed)[-1]
    assert world.formed[formed][1] == {0, 1, 2}
    assert launcher.presentation.formed.epoch < formed
    world._member_effects("node0", [Abandon("it thinks that the coordinator was silent")])
    assert launcher.presentation.opened is not None
    assert (launcher.presentation.opened.epoch, launcher.presentation.opened.members) == (formed, {0, 1, 2})


def test_what_lies_in_the_connection_that_a_launcher_gives_up_is_read_before_it_turns_to_another() -> None:
    revoke = Revoke(4, 9, [[0, 2]], [], [], committed=7, reason="a worker hangs")
    core = NodeAgentClient("node0", "a" * 32, 2, SETTINGS, time.monotonic())
    client = Client(core, [("127.0.0.1", 1), ("127.0.0.1", 2)], Secret(b"s" * 32), lambda notice: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        client._sock, client._state = ours, "open"
        client._decoder = wire.Decoder()
        client._selector.register(ours, selectors.EVENT_READ)
        theirs.sendall(wire.encode(Beat()) + wire.encode(revoke))
        client._abandon("it was silent")
        assert core.presentation.opened == Opened(4, frozenset({0, 1, 2}), 9)
        assert b'"abandon"' in theirs.recv(1 << 16)


@pytest.mark.parametrize(("candidates", "seconds"), [(1, 5.5), (2, 4.25), (2, 4.5), (2, 4.75), (2, 5.5)])
def test_a_worker_that_is_deaf_while_the_coordinator_is_stopped_is_not_put_out(candidates: int, seconds: float) -> None:
    """What the coordinator sends at once when it runs again is not acknowledged yet, and was nothing for so long.

    And the launcher that speaks for the worker may have turned away meanwhile: it lives, and comes back.
    """
    world = started(4, candidates, True)
    world.frozen.add("w3")
    world.run_fairly(8.0, step=0.25)
    world.frozen.add("c0")
    world.advance(seconds)
    world.frozen.discard("c0")
    world.run_fairly(4.0, step=0.25)
    world.frozen.discard("w3")
    nobody_is_lost(world, [])


TIMES = {**QUICK, "heartbeat_interval": 0.4, "hang_timeout": 30.0, "stall_timeout": 600.0}


def pause(run: Cluster, candidate: int, seconds: float) -> None:
    """Stop a coordinator, and see that every worker goes on commits after it runs again, whoever leads by then."""
    run.coordinators[candidate].kill(signal.SIGSTOP)
    time.sleep(patient(seconds))
    run.coordinators[candidate].kill(signal.SIGCONT)
    for _ in range(2):
        run.commit_again()


def nobody_was_put_out(run: Cluster, candidates: int) -> None:
    assert [process.popen.poll() for process in [*run.workers.values(), *run.coordinators]] == [None] * (
        len(run.workers) + candidates
    )
    for candidate in range(candidates):
        assert not run.logged("fault", "stop", candidate=candidate)
    for process in run.workers.values():
        assert {tuple(line["members"]) for line in process.lines if line["event"] == "plan"} == {(0, 1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [True, False])
def test_a_stopped_only_coordinator_costs_no_worker(tmp_path: Path, launcher: bool) -> None:
    """Just below the heartbeat timeout, above it, and for longer than members look for another coordinator."""
    with cluster(tmp_path, **TIMES) as run:
        run.start(4, launcher=launcher, step=0.7)
        run.all_commit()
        for seconds in (2.7, 13.5 if launcher else 3.6):
            pause(run, 0, seconds)
        nobody_was_put_out(run, 1)


@pytest.mark.slow
def test_a_stopped_leader_costs_no_worker_however_many_had_turned_away(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=4, candidates=2, launcher=True, step=0.7, **TIMES) as run:
        for candidate, seconds in ((0, 2.7), (1, 2.9), (0, 3.6), (1, 3.6)):
            pause(run, candidate, seconds)
        nobody_was_put_out(run, 2)
