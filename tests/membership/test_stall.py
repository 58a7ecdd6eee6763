"""A stall that many share is waited for; one worker that hangs is put out as fast as ever."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import QUICK, Cluster, cluster
from script import Script, play, table
from simulation import SETTINGS as SHORT
from simulation import World

from recover_megatron.membership.detect import SAY_SECONDS, Answer, Stall, many_share
from recover_megatron.membership.records import Settings

SETTINGS = replace(SHORT, stall_timeout=100.0)
FOUR = {0: 0, 1: 1, 2: 2, 3: 3}
PAIRS = {0: 0, 1: 0, 2: 1, 3: 1}
LATE = "no progress"


def test_more_than_half_of_the_replicas_and_more_than_one_share_a_stall() -> None:
    assert many_share([0, 1, 2], FOUR)
    assert not many_share([0, 1], FOUR)
    assert not many_share([0, 1], PAIRS)
    assert many_share([0, 2], PAIRS)
    assert not many_share([0], {0: 0})
    assert not many_share([7, 8, 9], FOUR), "spares are no replicas"


def test_a_worker_that_indexes_its_data_set_for_most_of_an_hour_is_waited_for_at_the_start() -> None:
    """By the settings that hold where none are given; all others have come to the first rendezvous, and wait."""
    world = World(4, candidates=1, settings=replace(Settings(), heartbeat_interval=50.0, heartbeat_timeout=250.0))
    world.busy = {3}
    world.run_fairly(3500.0, step=50.0)
    assert world.order == []
    world.busy.clear()
    world.run_fairly(100.0, step=50.0)
    assert world.order == [1]
    assert world.newest == {0, 1, 2, 3}
    assert world.logged("fault", "stop") == []


def consider(
    stall: Stall, now: float, *late: int, suspected: tuple[int, ...] = (), slow: tuple[int, ...] = ()
) -> Answer:
    return stall.consider(dict.fromkeys(late, LATE), dict.fromkeys(slow, LATE), suspected, FOUR, now)


def test_one_that_is_late_is_put_out_at_once() -> None:
    assert consider(Stall(SETTINGS), 50.0, 3) == Answer(frozenset({3}))


def test_the_first_to_be_late_is_not_put_out_while_others_that_may_share_its_stall_are_late_by_half() -> None:
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, 3, suspected=(1, 2)) == Answer()
    assert consider(stall, 52.0, 1, 2, 3) == Answer(say=True)
    # The same, but the others were only slow: it gets half of its time again.
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, 3, suspected=(1, 2)) == Answer()
    assert consider(stall, 51.0, 3) == Answer()
    assert stall.fresh == 51.0 - SETTINGS.hang_timeout / 2
    assert consider(stall, 61.0, 3) == Answer(frozenset({3}))


def test_who_was_put_out_lately_counts() -> None:
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, 3) == Answer(frozenset({3}))
    assert consider(stall, 55.0, 1, 2) == Answer(say=True)
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, 3) == Answer(frozenset({3}))
    assert consider(stall, 51.0 + SETTINGS.hang_timeout, 1, 2) == Answer(frozenset({1, 2}))


def test_a_stall_is_told_of_every_ten_seconds_and_ends_whole_or_after_its_timeout() -> None:
    stall = Stall(SETTINGS)
    said = [now for now in range(50, 100) if consider(stall, now, 0, 1, 2).say]
    assert said == list(range(50, 100, int(SAY_SECONDS)))
    assert consider(stall, 100.0, 1, 2) == Answer(over=50.0), "the others come a moment later"
    assert stall.fresh == 100.0
    assert consider(stall, 100.5) == Answer()
    assert consider(stall, 200.0, 0, 1, 2).say
    assert consider(stall, 200.0 + SETTINGS.stall_timeout, 0, 1, 2) == Answer(frozenset({0, 1, 2}))


@pytest.mark.parametrize("mate", [3, None])
def test_a_mate_of_who_waited_for_storage_comes_back_a_moment_after_it(mate: int | None) -> None:
    """Whether it is late before the other is back, or only then: it gets its whole time."""
    stall, waits = Stall(SETTINGS), {2: "data"} | ({mate: "its mate"} if mate else {})
    assert stall.consider({}, waits, (), PAIRS, 50.0) == Answer(say=True)
    assert stall.consider({3: "its mate"}, {}, (), PAIRS, 50.1) == Answer(over=pytest.approx(0.1))
    assert stall.fresh == 50.1
    assert stall.consider({3: "still late"}, {}, (), PAIRS, 61.0) == Answer(frozenset({3}))


def test_a_mate_that_is_late_only_when_the_other_is_back_already_gets_its_whole_time_too() -> None:
    """And nobody else does: neither whose own time for storage is over, nor one of another replica."""
    stall, waits = Stall(SETTINGS), {2: "data", 3: "its mate"}
    assert stall.consider({}, waits, (), PAIRS, 50.0) == Answer(say=True)
    assert stall.consider(waits, {}, (), PAIRS, 60.0).evict == frozenset({2, 3})
    stall = Stall(SETTINGS)
    assert stall.consider({}, {2: "data"}, (), PAIRS, 50.0) == Answer(say=True)
    assert stall.consider({0: "of another replica"}, {}, (), PAIRS, 50.1).evict == frozenset({0})


def test_who_waits_for_storage_is_told_of_and_not_put_out() -> None:
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, slow=(2,)) == Answer(say=True)
    assert consider(stall, 51.0, 1, slow=(2,)) == Answer(frozenset({1})), "a single hang is none of its business"
    assert consider(stall, 52.0) == Answer(over=2.0)


def test_hosts_that_stop_while_storage_has_been_out_for_long_have_their_whole_time() -> None:
    stall = Stall(SETTINGS)
    assert consider(stall, 50.0, slow=(2,)) == Answer(say=True)
    late = 60.0 + SETTINGS.stall_timeout
    assert consider(stall, late, 0, 1, 3, slow=(2,)) == Answer(say=True)
    assert stall.left(late) == SETTINGS.stall_timeout
    assert consider(stall, late + SETTINGS.stall_timeout, 0, 1, 3, slow=(2,)).evict == frozenset({0, 1, 3})


# -- the state machines over a simulated network -----------------------------------------------------------------------


@table("""
who stopped while it waited counts too
    world 4 runs=10; freeze w0 w1; run 1; mark 2 reduce waits; run 2; freeze w2; run 50 -> no fault
    wake; run 15 -> goes_on 20; fates live live live live
after the timeout the stalled are put out
    world 4 runs=10; freeze w0 w1 w2; run 115 -> no fault; run 10 -> fates dead dead dead live; goes_on 20
a death during a stall is handled at once and those stalled come back
    world 5 runs=10; freeze w0 w1 w2; run 30; kill 3 2; run 5 -> fates live live dead dead live
    wake; run 15 -> goes_on 20; fates live live dead dead live
hosts that freeze as a whole, with their launchers, come back whole
    world 4 nodes=4 runs=10; freeze node1 w1 node2 w2 node3 w3; run 12 -> waited_for; wake; run 15 -> goes_on 20
    freeze node1 w1 node2 w2 node3 w3; run 40 -> waited_for; wake; run 15 -> goes_on 20
    fates live live live live; members 0 1 2 3
a connection that breaks during a stall is made again
    world 4 node_agents=0 runs=10; freeze w0 w1 w2; run 10; disconnect w1; run 10 -> fates live live live live
    wake; run 20 -> goes_on 20; fates live live live live
a worker that waits for storage holds the run up and is told of
    world 4 runs=10; mark 2 data 100; busy 2; run 60 -> no fault; stalled data
    wake; goes_on 20; fates live live live live
a checkpoint of which nothing is written is told of long before its writer is put out
    world 4 runs=10; mark 2 checkpoint 3600; busy 2; run 60 -> no fault; stalled worker 2 checkpoint storage
    stalled while others wait 3600 more; wake; goes_on 20; fates live live live live
so is one of which all write and nobody can
    world 4 runs=10; mark 0 checkpoint 3600; mark 1 checkpoint 3600; mark 2 checkpoint 3600; mark 3 checkpoint 3600
    busy 0 1 2 3; run 150 -> no fault; stalled worker 0 worker 3 checkpoint without a time limit
    wake; goes_on 20; fates live live live live
who is held up is told of together with its mate, whose wait for storage began after its own last mark
    world 4 runs=10; place 0 0 0; place 1 0 1; place 2 1 0; place 3 1 1; busy 2 3; mark 2 forward; mark 3 forward
    run 6.7; mark 2 data 100; run 60 -> no fault; stalled worker 2 data worker 3
    wake; goes_on 20; fates live live live live
a silent node is no stall though it is in all replicas if the others can go back
    world 4 slack=1 runs=10; place 0 0 0 back; place 1 1 0 back; place 2 0 1 back; place 3 1 1 back; run 2
    power_off 1; run 8 -> members 0 1; no stalled; more_commits 20
also without a lease where the others are most
    world 6 nodes=3 runs=10; place 0 0 0 back; place 1 1 0 back; place 2 0 1 back; place 3 1 1 back; place 4 0 2 back
    place 5 1 2 back; run 2; power_off 2; run 8 -> members 0 1 2 3; no stalled
if all its positions are elsewhere too they need not
    world 6 nodes=3 slack=1 runs=10; place 0 0 0; place 1 0 1; place 2 1 1; place 3 1 2; place 4 0 2; place 5 1 0
    run 2; power_off 2; run 8 -> members 0 1 2 3; no stalled; more_commits 20
if they can not it is waited for
    world 4 slack=1 runs=10; place 0 0 0 back; place 1 1 0; place 2 0 1; place 3 1 1; run 2
    power_off 1; run 20 -> no fault; stalled worker 2 worker 3
nor is a node lost of which a worker is heard though its launcher is not
    world 4 nodes=1 runs=10; freeze node0 w0 w1 w2; run 30 -> no fault; stalled worker 0 worker 2
    wake; run 15 -> goes_on 20; fates live live live live
so it is where they are too few for a replica
    world 6 nodes=2 slack=2 runs=10; place 0 0 0 back; place 1 0 1 back; place 2 0 2 back; place 3 0 3 back
    place 4 1 0 back; place 5 1 1 back; run 2; power_off 1; run 20 -> no fault; stalled worker 3 worker 5
and so are two nodes
    world 6 nodes=3 slack=1 runs=10; place 0 0 0 back; place 1 1 0 back; place 2 0 1 back; place 3 1 1 back
    place 4 0 2 back; place 5 1 2 back; run 2; power_off 1 2; run 20 -> no fault; stalled worker 2 worker 5
""")
def test_a_stall(script: str) -> None:
    play(script, SETTINGS)


@table("""
a worker that waits twice where the others do not come is put out and they go on
    world 3 runs=10; waits barrier 1; waits reduce-scatter 0 2; run 24 -> some stuck; no fault
    run 22 -> faults out:1; why 1 waits again in barrier of iteration; wake; goes_on 10 0 2
so is one of two replicas
    world 2 runs=10; waits barrier 0; waits reduce-scatter 1; run 46 -> lost 0; wake; goes_on 10 1
so is one that waits where it had reported a step that the others are in
    world 3 runs=10; waits agree 1; waits reduce-scatter 0 2; run 46 -> lost 1; wake; goes_on 10 0 2
one that waits elsewhere the second time has met the others in between
    world 3 runs=10; waits agree 1; waits reduce-scatter 0 2; run 24 -> some stuck
    waits reduce-scatter 1; waits agree 2; run 22 -> no fault; wake; goes_on 20 0 1 2
where no two replicas wait in the same nobody is put out and all end
    world 3 runs=10; waits agree 1; waits barrier 2; waits reduce-scatter 0; run 100 -> no fault
    stops 11 all workers waited for each other in 4 epochs in a row
so do those that all wait in the same
    world 3 runs=10; waits reduce-scatter 0 1 2; run 100 -> no fault
    stops 11 all workers waited for each other in 4 epochs in a row
a commit in between begins the account anew
    world 3 runs=10; waits barrier 1; waits reduce-scatter 0 2; run 24 -> some stuck; wake; goes_on 10
    waits barrier 1; waits reduce-scatter 0 2; run 24 -> no fault; wake; goes_on 10
of a replica that waits elsewhere only the worker is put out that does
    world 6 nodes=3 runs=10; place 0 0 0; place 1 0 1; place 2 1 0; place 3 1 1; place 4 2 0; place 5 2 1
    waits reduce-scatter 0 1 2 4 5; waits barrier 3; run 46 -> lost 3
a worker that does not come to a rendezvous since it waits for those that have come is put out within the hang timeout
    world 3 runs=10; mark 1 operation waits; busy 1; run 22 -> some stuck; mark 1 operation waits 600
    run 19 -> no fault; run 4 -> lost 1; goes_on 10 0 2
it has the time that its mark allows while one that it may wait for computes
    world 4 runs=10; mark 1 operation waits 600; mark 3 forward 100; busy 1 3; kill 0; run 90 -> faults dead:0
    run 38 -> lost 0 3
""")
def test_workers_that_all_wait_for_each_other(script: str) -> None:
    play(script, SETTINGS)


AGENTS = pytest.mark.parametrize("agents", [1, 0], ids=["launchers", "no launchers"])


@AGENTS
@pytest.mark.parametrize("seconds", [15, 30, 90])
def test_three_of_four_that_stop_and_go_on_are_waited_for(agents: int, seconds: int) -> None:
    told = "some" if seconds > 20 or not agents else "no"
    stop = f"world 4 node_agents={agents} runs=10; freeze w0 w1 w2; run {seconds}; wake; run 15 -> goes_on 20"
    play(f"{stop}; fates live live live live; no fault; {told} stalled; {told} stall_over", SETTINGS)


@AGENTS
@pytest.mark.parametrize(("stopped", "left"), [("w0", "1 2 3"), ("w0 w1", "2 3")])
def test_half_of_them_or_fewer_are_put_out_as_fast_as_a_single_one(agents: int, stopped: str, left: str) -> None:
    """After the hang timeout; where no launcher tells that they live, after the heartbeat timeout."""
    stop = f"world 4 node_agents={agents} runs=10; freeze {stopped}; run {22 if agents else 7}"
    play(f"{stop} -> live {left}; goes_on 20; no stalled", SETTINGS)


def test_who_did_not_run_holds_its_own_silence_against_nobody() -> None:
    """Neither workers nor launchers turn to another coordinator, though their clocks say that this one was silent."""
    played = Script(SETTINGS)
    played.world("4", "nodes=4", "runs=10")
    played.freeze("node1", "w1", "node2", "w2", "node3", "w3")
    for seconds in ("0", "30"):  # what was on the way comes later than the first look at the clock
        played.run(seconds)
        for connection in played.it.connections.values():
            connection.down.clear()
    played.wake()
    played.it.advance(0.1)
    played.run("20")
    played.more_commits("20")
    played.fates("live", "live", "live", "live")
    played.no("abandoned")
    played.led("0")


# -- real processes and signals ----------------------------------------------------------------------------------------


def send(run: Cluster, number: int, *workers: int) -> None:
    """A signal."""
    for worker in workers:
        run.workers[worker].kill(number)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [True, False], ids=["launcher", "no launcher"])
def test_three_of_four_processes_that_are_stopped_for_a_while_all_go_on(tmp_path: Path, launcher: bool) -> None:
    with cluster(tmp_path, **{**QUICK, "stall_timeout": 600.0}) as run:
        run.start(4, launcher=launcher)
        run.all_commit()
        send(run, signal.SIGSTOP, 0, 1, 2)
        run.wait_event("stalled")
        send(run, signal.SIGCONT, 0, 1, 2)
        run.wait_event("stall_over")
        run.commit_again()
        assert not run.logged("fault")


@pytest.mark.slow
def test_processes_that_stay_stopped_are_put_out_after_the_stall_timeout(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=4, launcher=True, **QUICK) as run:
        send(run, signal.SIGSTOP, 0, 1, 2)
        run.wait_event("stalled")
        run.continue_without(0, 1, 2)
        assert run.exit_codes(0, 1, 2) == [-9] * 3
