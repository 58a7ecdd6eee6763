"""A replica that is late is set aside, and comes back: who is (pure), and what becomes of it (a simulated network)."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script import Script, play, table
from simulation import SETTINGS as SHORT
from simulation import World
from test_protocol_properties import Moves, every_wait_ends
from test_protocol_properties import play as play_move

from recover_megatron.membership.detect import STEP_PHASES, WorkerProgress, behind
from recover_megatron.membership.records import to_runs
from recover_megatron.membership.roster import Fate

SETTINGS = replace(SHORT, grace=4.0)
PAIRS = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def waits(worker: int, since: float = 1.0, heard: float = 100.0) -> WorkerProgress:
    return WorkerProgress(worker, waiting_since=since, heard=heard, phase="reduce-scatter")


def works(worker: int, phase: str = "forward", allow: float = 0.0) -> WorkerProgress:
    return WorkerProgress(worker, phase=phase, allow=allow, heard=100.0)


def late(*group: WorkerProgress, now: float = 100.0, **settings: float) -> set[int]:
    return set(behind(group, PAIRS, now, replace(SETTINGS, **settings)))  # type: ignore[arg-type]


def test_the_one_replica_for_which_all_others_have_waited_for_the_grace_is_late() -> None:
    others = [waits(worker) for worker in (2, 3, 4)]
    assert late(works(0), works(1), *others, waits(5, since=95.9)) == {0, 1}
    assert late(works(0), waits(1), *others, waits(5, since=95.9)) == {0, 1}  # a replica computes as a whole
    assert late(works(0), works(1), *others, waits(5, since=96.1)) == set()  # the last of them has just come
    assert late(works(0), works(1), *others, works(5)) == set()  # two are late
    assert late(*[waits(worker) for worker in PAIRS]) == set()  # nobody is
    assert late(works(0), works(1), *others, waits(5), grace=0.0) == set()
    assert late(works(0), works(1), *others, waits(5), min_replicas=3) == set()


def test_who_waits_and_is_not_heard_any_more_is_late_and_who_does_something_else_is_not() -> None:
    others = [waits(worker) for worker in (1, 2, 3, 4, 5)]
    assert late(waits(0, heard=95.0), *others) == {0, 1}
    assert late(waits(0, heard=97.0), *others) == set()
    assert late(works(0, "optimizer"), *others) == {0, 1}  # stopped in the next step, before its next heartbeat
    assert late(works(0, "checkpoint"), *others) == set()
    assert late(works(0, allow=600.0), *others) == set()  # compiles
    assert late(works(0, "data", allow=SETTINGS.stall_timeout), *others) == {0, 1}
    assert late(works(9), *others[1:]) == set()  # a spare


@given(st.lists(st.tuples(st.sampled_from([*STEP_PHASES, "eval"]), st.booleans()), min_size=6, max_size=6))
def test_never_two_replicas_and_never_a_part_of_one(workers: list[tuple[str, bool]]) -> None:
    group = [WorkerProgress(n, phase=p, waiting_since=1.0 if w else None) for n, (p, w) in enumerate(workers)]
    found = late(*group)
    assert found in (set(), {0, 1}, {2, 3}, {4, 5})
    assert not any(workers[n][1] and workers[n ^ 1][1] for n in found)


# -- the state machines over a simulated network -----------------------------------------------------------------------


def running(*options: str) -> Script:
    played = Script(SETTINGS)
    played.world("4", "runs=10", *options)
    return played


@table("""
who is late is set aside, the others commit, and it is back when it asks
    world 4 runs=10; late 1; more_commits 5; fates live aside live live; why 1 late by more than 4 s; members 0 2 3
    wake; run 5 -> fates live live live live; members 0 1 2 3; goes_on 20; no fault
who was stopped comes back too, and who stays away is put out
    world 4 runs=10; stop 1; wake; run 8 -> fates live live live live
    late 2; freeze w2; run 24 -> lost 2; more_commits 20
a death while one is aside, and the death of that one, are survived
    world 4 runs=10; late 1; kill 0; run 5; more_commits 20; kill 1; run 5 -> lost 0 1; more_commits 20
the death of the last of the others, too
    world 4 runs=10; late 1; kill 3; run 5; more_commits 20; kill 1; run 5 -> lost 1 3; more_commits 20
who was put out while it was aside stays out under the next coordinator
    world 4 runs=10; stop 1; run 24; crash 0; run 10; wake; run 10 -> members 0 2 3; more_commits 20
who is aside and loses its connection makes another
    world 4 runs=10; late 1; disconnect w1; more_commits 5; fates live aside live live; wake; run 15 -> members 0 1 2 3
    fates live live live live; goes_on 20; no fault
and who was stopped does
    world 4 runs=10; stop 1; disconnect w1; more_commits 5; fates live aside live live; wake; run 15 -> members 0 1 2 3
    fates live live live live; goes_on 20; no fault
all of a replica that is aside are waited for, and one that stays away is put out
    world 6 runs=10; place 0 0 0; place 1 0 1; place 2 1 0; place 3 1 1; place 4 2 0; place 5 2 1
    mark 2 forward; mark 3 forward; busy 2 3; run 10 -> fates live live aside aside live live
    kill 0 1 4 5; act_again 2; run 10 -> in_rendezvous; live 2; run 20 -> members 2; lost 0 1 3 4 5
an heir that dies too ends the run
    world 4 runs=10; late 1; kill 0 2 3; run 2 -> stops; kill 1; run 2 -> stops 10 no live worker is left
others that have finished while one was aside leave nothing to do
    world 4 runs=10; late 1; finish 0; finish 2; finish 3; run 2 -> ends 0
""")
def test_one_that_is_late(script: str) -> None:
    play(script, SETTINGS)


def comes_back(played: Script, number: int, candidate: int) -> None:
    """It moves again, has a place, nothing is committed twice, and nobody was lost."""
    world = played.it
    played.wake()
    world.run_fairly(2 * SETTINGS.heartbeat_timeout + 5)
    coordinator = world.coordinators[candidate]
    assert number in coordinator.epochs.formed.members
    assert coordinator.roster.workers[number].fate is Fate.LIVE
    assert world.worker(number).plan.epoch == coordinator.epochs.formed.epoch
    played.more_commits("20")
    played.no("fault")


@pytest.mark.parametrize("wakes", ["at once", "later"])
@pytest.mark.parametrize(("knows", "node_agents"), [(True, True), (True, False), (False, True)])
def test_who_is_aside_outlives_the_coordinator_whether_it_has_heard_that_it_is_aside(
    knows: bool, node_agents: bool, wakes: str
) -> None:
    """What the lost coordinator had sent to a worker that was stopped may be lost with it: the others tell the next."""
    played = running(f"node_agents={node_agents:d}")
    if knows:
        played.late("1")
        assert played.it.worker(1).presentation.aside == {1}
    else:
        played.stop("1")
    played.crash("0", "lose")
    if wakes == "later":
        played.it.run_fairly(3 * SETTINGS.heartbeat_timeout)
        assert played.it.coordinators[1].roster.workers[1].fate is Fate.ASIDE
        played.more_commits("5")
    comes_back(played, 1, candidate=1)


@pytest.mark.parametrize("formed", [True, False])
@pytest.mark.parametrize("lost", ["connection", "coordinator"])
def test_who_has_asked_for_its_place_and_loses_its_connection_or_its_coordinator_has_the_place(
    lost: str, formed: bool
) -> None:
    """Whether the epoch that leaves it out was formed before that, or one of its members has not joined it yet."""
    played = running()
    world = played.it
    played.late("1", "" if formed else "0")
    world.busy.discard(1)
    while not world.logged("back"):
        world.act(1)
        number, _ = next(pair for pair in world.deliverable() if world.connections[pair[0]].owner == "w1")
        world.deliver(number, "up" if world.connections[number].up else "down")
    if lost == "connection":
        connection = world.current["w1"]
        assert connection is not None
        world.break_up(connection)
    else:
        played.crash("0", "lose")
    comes_back(played, 1, candidate=0 if lost == "connection" else 1)


@pytest.mark.parametrize("node_agents", [True, False])
@pytest.mark.parametrize("woken", ["before", "after"])
@pytest.mark.parametrize("spares", [set(), {0}])
def test_who_is_aside_goes_on_alone_when_all_others_are_lost(spares: set[int], woken: str, node_agents: bool) -> None:
    """Whether it asks for its place before or after they are; a spare that is left has nothing to go on from.

    Its first plan tells what was committed without it, and nothing does before.
    """
    played = running(f"node_agents={node_agents:d}", f"spares={','.join(map(str, spares))}")
    world = played.it
    played.late("1")
    played.more_commits("5")
    newest, before = max(world.commits), world.worker(1).committed
    assert newest > before
    if woken == "before":  # nobody has heard of it yet
        played.wake()
        world.act(1)
    for worker in {0, 2, 3} - spares:
        world.kill_worker(worker)
    played.run("2")
    if woken == "after":
        played.stops()
        assert world.worker(1).committed == before
        played.wake()
    played.run("4")
    (epoch,) = [record for record in world.logged("plan") if record["members"] == to_runs({1} | spares)]
    assert epoch["committed"] >= newest
    played.more_commits("20")
    played.stops()


@pytest.mark.parametrize("told", [True, False])
def test_who_is_aside_goes_on_alone_only_when_the_others_are_gone_for_certain(told: bool) -> None:
    """``told``: their launchers see them end. Else they may be running where nobody reaches them."""
    end = "run 80; more_commits 20" if told else "freeze node0 node1; run 80 -> ends 11"
    kill = "kill_unheard 0 2 3" if told else "kill_silently 0 2 3"
    play(f"world 4 runs=10; late 1; act_again 1; act 1; {kill}; {end}", SETTINGS)


AROUND = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 30), st.just(1)),
        st.tuples(st.just("run"), st.sampled_from([1, 1, 2, 6, 12]), st.just(0)),
        st.tuples(st.sampled_from(["act", "kill", "break", "stop", "wake"]), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("busy"), st.integers(0, 3), st.just(1)),
        st.tuples(st.sampled_from(["kill coordinator", "restart coordinator"]), st.integers(0, 2), st.just(1)),
    ),
    min_size=4,
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(AROUND, st.booleans(), st.booleans(), st.sets(st.sampled_from([0, 3])))
def test_one_lineage_and_every_wait_ends_whatever_happens_while_one_is_aside(
    moves: Moves, node_agents: bool, stopped: bool, spares: set[int]
) -> None:
    world = World(4, candidates=3, node_agents=node_agents, settings=SETTINGS)
    world.spares = spares
    world.run_fairly(10)
    played = Script(SETTINGS, world)
    (played.stop if stopped and node_agents else played.late)("1")
    for move in moves:
        play_move(world, move)
    world.frozen.clear()
    every_wait_ends(world)


def test_a_node_with_a_replica_aside_is_not_drained_before_that_is_back_and_has_left() -> None:
    played = running()
    world = played.it
    world.drains_nodes = True
    played.late("2")
    world.drain(0, 1)
    played.run("4")

    def row() -> tuple[str, list[list[int]]]:
        (row,) = world.coordinators[0].view(world.now).drains
        return row["state"], row["workers"]

    played.fates("live", "live", "aside", "left")
    assert row() == ("moving", [[2, 2]])
    played.wake()
    played.run("8")
    played.fates("live", "live", "left", "left")
    assert row() == ("drained", [])
    assert world.coordinators[0].epochs.formed.members == {0, 1}
    played.more_commits("20")


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["coordinator", "others"])
def test_a_stopped_process_that_is_aside_comes_back_whoever_is_killed_meanwhile(tmp_path: Path, lost: str) -> None:
    """The coordinator, whose next one it turns to when it goes on; or all other workers: then it goes on alone."""
    with cluster(tmp_path, heartbeat_interval=0.2, heartbeat_timeout=5.0, grace=1.0) as run:
        run.start_coordinators(3, 2, (), (), "--grace", "1")
        run.start_node_agent()
        run.start_workers(3, phase="forward", step=0.05)
        # By then its heartbeats, five times a second, have told that it is in a step.
        run.workers[1].wait_for(lambda line: line["event"] == "commit" and line["iteration"] >= 20)
        run.workers[1].kill(signal.SIGSTOP)
        run.wait_event("aside", worker=1)
        run.continue_without(1)
        if lost == "coordinator":
            run.coordinators[0].kill()
            run.wait_event("lead", candidate=1)
            run.continue_without(1)
        else:
            for other in (0, 2):
                run.workers[other].kill()
            run.wait_event("waits", workers=[[1, 1]])
        start = run.workers[1].says()
        run.workers[1].kill(signal.SIGCONT)
        members = [1] if lost == "others" else [0, 1, 2]
        run.workers[1].wait_for(lambda line: line["event"] == "plan" and line["members"] == members)
        run.workers[1].event("commit", start=start + 1)
        faults = {event["worker"] for candidate in range(2) for event in run.logged("fault", candidate=candidate)}
        assert faults == ({0, 2} if lost == "others" else set())
