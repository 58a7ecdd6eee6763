"""Newcomers: workers that were not launched with the run join it while it goes on, whatever dies meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from script import play, table
from simulation import SETTINGS, World

from recover_megatron.membership.follower import Stage
from recover_megatron.membership.member import Member
from recover_megatron.membership.records import Fenced

# -- the state machines, one delivery after the other -----------------------------------------------------------------


def running_world(workers: int = 3, candidates: int = 3) -> World:
    world = World(workers, candidates=candidates, nodes=3)
    world.run_fairly(4.0)
    assert world.order == [1]
    return world


def members(world: World) -> frozenset[int]:
    """Of the last epoch formed."""
    return world.formed[world.order[-1]][1]


def deliver(world: World, count: int) -> None:
    """So many messages, the oldest connection first."""
    for _ in range(count):
        if pairs := world.deliverable():
            world.deliver(*pairs[0])


def everybody_goes_on(world: World) -> None:
    before = {w: world.worker(w).committed for w in world.node_of}
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    for w in world.node_of:
        if world.running(f"w{w}"):
            assert world.worker(w).committed > before[w]
            assert w in members(world)


@table("""
a newcomer is admitted and starts from what is committed
    world 3 nodes=3 candidates=3 runs=4; newcomers 0; run 2 -> members 0 1 2 3; goes_on_from 3; admitted 3; goes_on 20
nobody waits for a newcomer that is not ready
    world 3 nodes=3 candidates=3 runs=4; newcomers 0; busy 3; run 100 -> epochs 1; no admitted fault; wake; goes_on 20
the first plan waits for all of the launch however many newcomers there are
    world 3 nodes=3 candidates=3; freeze w1 w2; newcomers 0 1 2 0; run 3 -> epochs 0
    wake; run 4; goes_on 20; first_members_with 0 1 2
newcomers and the coordinator die and its successor waits for none of them, less long than for an unreached worker
    world 3 nodes=3 candidates=3 runs=4; newcomers 0 1; run 2 -> members 0 1 2 3 4
    kill 3; crash 0 lose; run 3 -> members 0 1 2 4; goes_on 20
newcomers are as good as any once they have a plan: the workers of the launch and the coordinator die, they go on
    world 3 nodes=3 candidates=3 runs=4; newcomers 0 1; run 3; kill 0 1 2; crash 0; run 20 -> members 3 4; goes_on 20
newcomers without a plan do not go on alone
    world 3 nodes=3 candidates=3 runs=4; newcomers 0; freeze w0; run 2 -> opened 0 1 2 3
    kill 0 1 2; run 2 -> out 10 3; epochs 1
newcomers make no coordinator lead
    world 3 nodes=3 candidates=3 runs=4; crash 0; crash 1; freeze w0 w1 w2; newcomers 0 1 2 0; run 10 -> epochs 1; led 0
""")
def test_newcomers(script: str) -> None:
    play(script)


def test_a_newcomer_finds_the_run_behind_a_first_candidate_that_was_started_again() -> None:
    """It does not wait there until the silence of a dead one is over."""
    play("world 3 nodes=3 candidates=3 runs=4; crash 0; run 20; restart 0; newcomers 0; run 3 -> members 0 1 2 3")


def test_two_newcomers_at_once_cost_one_epoch() -> None:
    world = running_world()
    for node in (0, 1):
        world.add_newcomer(node)
    for number in (3, 4):
        world.act(number)
    coordinator = world.coordinators[0]
    for _ in range(4):  # all that is ready is handled before it settles
        for number, direction in world.deliverable():
            world.deliver(number, direction, settle=False)
    assert {3, 4} <= coordinator.roster.workers.keys()
    world.settle(0)
    world.run_fairly(2.0)
    assert world.order == [1, 2]
    assert members(world) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("lose", [False, True])
@pytest.mark.parametrize("dies", range(40))
def test_the_coordinator_may_die_at_any_moment_of_an_admission(dies: int, lose: bool) -> None:
    world = running_world()
    world.add_newcomer(0)
    world.act(3)
    deliver(world, dies)
    world.kill_coordinator(0, lose=lose)
    everybody_goes_on(world)
    assert members(world) == {0, 1, 2, 3}


@pytest.mark.parametrize("victim", [3, 1])
@pytest.mark.parametrize("dies", range(40))
def test_a_worker_may_die_at_any_moment_of_an_admission(dies: int, victim: int) -> None:
    """The newcomer itself, or another."""
    world = running_world()
    world.add_newcomer(0)
    world.act(3)
    deliver(world, dies)
    world.kill_worker(victim)
    everybody_goes_on(world)
    assert members(world) == {0, 1, 2, 3} - {victim}


def test_an_id_never_comes_back() -> None:
    """Not that of the launch, not that of another newcomer, dead or alive."""
    world = running_world()
    world.add_newcomer(0)
    world.run_fairly(2.0)
    world.kill_worker(3)
    world.add_newcomer(1)
    world.run_fairly(2.0)
    assert members(world) == {0, 1, 2, 4}
    for number, name in ((0, "n0"), (3, "n3"), (4, "n4")):
        hello = {"worker": number, "incarnation": f"{number + 99:032x}", "host": "x", "pid": 1, "newcomer": True}
        world.members[name] = Member(hello, 3, SETTINGS, world.now)
        world.current[name] = None
        world._member_effects(name, world.members[name].join({}, ""))  # type: ignore[attr-defined]
    epochs = list(world.order)
    world.run_fairly(2.0)
    for name in ("n0", "n3", "n4"):
        assert world.members[name].stage is Stage.OUT
        assert isinstance(world.members[name].out, Fenced)
    assert world.order == epochs


# -- real processes ---------------------------------------------------------------------------------------------------


def admitted(run: Cluster, *newcomers: int) -> None:
    """Everybody that runs has a plan with the newcomers, and commits."""
    for process in run.workers.values():
        if process.popen.poll() is None:
            process.wait_for(lambda line: line["event"] == "plan" and set(newcomers) <= set(line["members"]))
            process.event("commit", start=process.says())


@pytest.mark.slow
def test_two_newcomers_join_a_run_in_turn_and_a_death_is_made_up_for(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=3, launcher=True) as run:
        run.start_worker(3, newcomer=True)
        admitted(run, 3)
        run.workers[1].kill()
        run.go_on_without(1)
        run.start_worker(4, newcomer=True)
        admitted(run, 3, 4)
        first = next(line for line in run.workers[4].lines if line["event"] == "plan")
        assert first["members"] == [0, 2, 3, 4]
        assert first["committed"] > 0
        assert run.wait_event("admitted", worker=4)


@pytest.mark.slow
def test_two_newcomers_at_once_and_one_is_killed_before_it_has_joined(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=3, launcher=True) as run:
        run.start_worker(3, newcomer=True, never_join=True).event("connected")
        run.start_worker(4, newcomer=True)
        run.start_worker(5, newcomer=True)
        run.workers[3].kill()
        admitted(run, 4, 5)
        assert not [e for e in run.events() if e["event"] == "admitted" and e["worker"] == 3]


@pytest.mark.slow
def test_the_coordinator_dies_while_a_newcomer_waits_for_its_plan_and_again_after(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=3, candidates=3, launcher=True, heartbeat_timeout=3.0) as run:
        run.workers[2].kill(signal.SIGSTOP)  # it does not come to the rendezvous before the coordinator is dead
        run.start_worker(3, newcomer=True)
        run.wait_event("admitted", worker=3)
        run.wait_event("revoke", epoch=2)
        killed = run.coordinators[0].kill()
        run.workers[2].kill(signal.SIGCONT)
        admitted(run, 3)
        leader = run.leader(since=killed)
        starts = {n: p.says() for n, p in run.workers.items()}
        run.coordinators[leader].kill()
        for number, process in run.workers.items():
            plan = process.event("plan", start=starts[number])
            assert plan["members"] == [0, 1, 2, 3]
            process.event("commit", start=process.says())


@pytest.mark.slow
def test_a_worker_with_an_unknown_id_that_is_no_newcomer_is_not_taken_in(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=2) as run:
        run.start_worker(7)
        assert "no worker 7" in run.wait_event("refused")["reason"]
