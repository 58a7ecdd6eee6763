"""Members without a part, and how a run is ended: the state machines over the simulated network."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script import play, table
from simulation import SETTINGS, World, attach

from recover_megatron.membership.ending import ExceptionReport, ExceptionReports, alike, true_cause
from recover_megatron.membership.events import Accepted, Connected, Heard, Lost, Notify, Outbox, Say, Tick
from recover_megatron.membership.leadership import can_tell
from recover_megatron.membership.messages import to_coordinator
from recover_megatron.membership.messages.to_coordinator import MAX_TRACEBACK
from recover_megatron.membership.messages.to_member import Beat, Fenced, Lead, Revoke, Stop
from recover_megatron.membership.records import WorkerId, cut_middle
from recover_megatron.membership.sides.follower import Stage
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.sides.node_agent import NodeAgentClient


def started(workers: int, *spares: int) -> World:
    world = World(workers, nodes=workers)
    world.spares = set(spares)
    world.run_fairly(4.0)
    return world


@table("""
commits wait for the members that have a part and for no other
    world 3 nodes=3 spares=2 runs=4; act 0; goes_on 3 2 -> done 2 0
where all are idle nothing is committed and nobody is to blame
    world 3 nodes=3 spares=0,1,2 runs=4; run 100 -> no commit; epochs 1
an idle member is never hung and makes nobody waited for
    world 3 nodes=3 spares=2 runs=4; mark 2 spare waits; busy 0 1; run 100 -> no fault stuck; wake; goes_on 3 0
an idle member that does not join the next rendezvous is put out there, and its launcher ends it
    world 4 nodes=4 spares=3 runs=4; busy 3; kill 0; run 60 -> faults dead:0 out:3 dead:3; members 1 2
a place in the next epoch ends idleness
    world 3 nodes=3 spares=2 runs=4; no_spares; kill 0; run 4 -> members 1 2; busy 2 -> stands 4 1
idle members alone do not go on while those with a part may be running
    world 5 nodes=5 spares=2,3,4 runs=4; cut 2 3 4 from 0; cut 0 1 from 1
    run 3 -> ahead 0 2; run 80 -> epochs 1; led 0; out 11 2 3 4
idle members go on when all the others are known to have died
    world 3 nodes=3 spares=1,2 runs=4; no_spares; kill 0; run 4 -> members 1 2; goes_on 4 1
and when the coordinator has died with them
    world 3 nodes=3 spares=1,2 runs=4; no_spares; crash 0; kill 0; run 4 -> members 1 2; goes_on 4 1
the run is finished when all that had a part have left
    world 3 nodes=3 spares=2 runs=4; finish 0 -> following 2; finish 1; run 3 -> out 0 2; ends 0
""")
def test_idle_members(script: str) -> None:
    play(script)


@pytest.mark.parametrize("reported_by", [(0, 1), (0,)])
def test_a_new_coordinator_commits_what_all_with_a_part_reported_and_nothing_else(reported_by: tuple[int, ...]) -> None:
    world = started(3, 2)
    before = world.worker(2).committed
    for w in reported_by:
        world.act(w)
    world.kill_coordinator(0, lose=True)
    world.busy |= {0, 1}
    for _ in range(20):
        for pair in world.deliverable():
            world.deliver(*pair)
        world.advance(0.3)
    world.busy.clear()
    for w in (0, 1, 2):
        world.act(w)  # join
    for _ in range(20):
        for pair in world.deliverable():
            world.deliver(*pair)
        world.advance(0.3)
    (plan,) = [record for record in world.log if record["event"] == "plan" and record["candidate"] == 1]
    assert plan["members"] == [[0, 2]]
    assert plan["committed"] == before + (len(reported_by) == 2)


@given(*[st.frozensets(st.integers(0, 4))] * 3, st.booleans())
def test_somebody_with_a_part_can_always_tell(
    reached: frozenset[int], idle: frozenset[int], missing: frozenset[int], own: bool
) -> None:
    assert can_tell(reached, idle, missing, own) == (own or not missing or not reached <= idle)


# -- giving up --------------------------------------------------------------------------------------------------------


@table("""
a worker that gives up ends the run for all and the first one wins
    world 3 nodes=3 candidates=3 runs=4; end 1 42 the disk is full; end 1 43 again; run 3; end 2 44 me too; run 80
    -> stops 42 the disk is full; out 42 0 1 2; because_of 1 the disk is full; led 0
giving up reaches the next coordinator when the first is lost with it
    world 3 nodes=3 runs=4; end 1 42 the disk is full; crash 0; run 15 -> stops 42 the disk is full
giving up before the first plan ends the run too
    world 2; end 0 7 no data; run 4 -> stops 7 no data; epochs 0
who never comes is not waited for longer than the start of the run would have
    world 3; kill_silently 2; end 0 7 no data; run 30 -> here 0 1; run 35 -> here 1; stops 7 no data
a launcher that never comes does not keep the coordinator
    world 2 nodes=1; freeze node0; run 2; end 0 7 no data; run 8 -> here 1
who comes late to the start of a run that was given up is told
    world 3; freeze w2; end 0 7 no data; run 10 -> stops 7 no data; here 0 1; wake; run 5 -> out 7 2; here 1
a launcher that comes after a short run that was given up is told how it ended
    world 2 nodes=1; freeze node0; run 2; end 0 7 no data; run 1 -> stops 7 no data; here 0 1
    wake; run 2 -> launcher_ends 0 7; here 1
and after one that ended in order
    world 2 nodes=1; freeze node0; run 2; finish 0; finish 1; run 1 -> ends 0; here 0 1
    wake; run 2 -> launcher_ends 0 0; here 1
a launcher that lost its connection just before the end is told when it comes back
    world 2 runs=4; freeze node1; run 7 -> some witness_gone; finish 0; finish 1; run 1 -> ends 0
    wake; run 10 -> launcher_ends 1 0; here 1
a run whose launchers are told to stop ends by their signal
    world 4 runs=4; told_to_stop 0 2; kill 0 1; run 3 -> stops; told_to_stop 1 15; kill 2 3; run 3
    stops 143 ended by SIGTERM, which the launcher on node1 received
workers that die by themselves are not taken for stopped
    world 4 runs=4; told_to_stop 0 2; kill 0 1; run 3; kill 2 3; run 3 -> stops 10 no live worker is left
""")
def test_how_a_run_is_ended(script: str) -> None:
    play(script)


def test_a_launcher_that_comes_while_the_second_epoch_is_made_knows_that_there_was_a_first() -> None:
    world = World(3, nodes=3)
    world.frozen.add("node0")
    world.run_fairly(4.0)
    assert world.order == [1]
    world.busy |= {0, 1}  # they do not come to the next rendezvous for now
    world.kill_worker(2)
    world.run_fairly(1.0)
    world.frozen.clear()
    world.run_fairly(2.0)
    launcher = world.members["node0"]
    assert isinstance(launcher, NodeAgentClient)
    assert launcher.planned == {0, 1, 2}
    assert launcher.presentation.opened is not None
    assert launcher.presentation.opened.epoch == 2


@table("""
both launchers were told to stop
    world 4; freeze w1; run 2; told_to_stop 0 2; told_to_stop 1 2; kill 0; run 3 -> ends 130 ended by SIGINT
one of them was
    world 4; freeze w1; run 2; told_to_stop 0 2; kill 0; run 3 -> ends 10 before the first plan
""")
def test_a_signal_before_all_workers_have_come_ends_the_run(script: str) -> None:
    """Of a worker that has not come nobody knows the launcher; both launchers have come."""
    play(script, replace(SETTINGS, start_needs_all=True))


def test_idleness_is_told_once_and_not_before_the_first_plan() -> None:
    member = Member(attach(0, 0), 1, SETTINGS, 0.0)
    assert member.idle() == []
    world = started(2)
    (said,) = world.worker(0).idle()
    assert said == Say(to_coordinator.Idle(1))
    assert world.worker(0).idle() == []


def test_a_revoke_tells_who_is_dead_and_who_has_left_before_anybody_is_notified() -> None:
    world = started(3)
    world.kill_worker(1)
    seen = []
    original = world._member_effects

    def watch(name: str, effects: list[Any]) -> None:
        for effect in effects:
            if name == "w0" and isinstance(effect, Notify) and isinstance(effect.message, Revoke):
                seen.append(world.worker(0).presentation.dead)
        original(name, effects)

    world._member_effects = watch  # type: ignore[method-assign]
    world.run_fairly(2.0)
    assert seen == [{1}]


@pytest.mark.parametrize(
    "end",
    [
        Stop("all workers have left", 0, 1),
        Fenced("it was silent"),
        None,
    ],
    ids=["the run has ended", "it was put out", "no coordinator is found"],
)
def test_a_member_that_is_out_asks_to_be_woken_no_more(end: Stop | Fenced | None) -> None:
    """Its thread may have something to send yet, and would run all the time until that is sent."""
    world = started(2)
    member = world.worker(0)
    assert member.deadline < math.inf
    if end is None:
        member.handle(Lost("its host is gone"), world.now)
        while member.stage is not Stage.OUT:
            member.handle(Tick(), member.deadline)
    else:
        member.handle(Heard(end), world.now)
    assert member.stage is Stage.OUT
    assert member.deadline == math.inf


def test_a_member_that_has_slept_for_longer_than_it_may_be_silent_is_not_in_touch() -> None:
    assert not Member(attach(0, 0), 1, SETTINGS, 0.0).in_touch(0.0)
    world = started(2)
    member = world.worker(0)
    assert member.in_touch(world.now)
    member.handle(Tick(), world.now + SETTINGS.heartbeat_interval)
    awake = world.now + SETTINGS.heartbeat_timeout + 2 * SETTINGS.heartbeat_interval
    assert not member.in_touch(awake)
    (asleep,) = [effect.message.number for effect in member.handle(Tick(), awake) if isinstance(effect, Say)]
    member.handle(Heard(Beat(asleep - 1)), awake)
    assert not member.in_touch(awake), "the answer lay there while it slept"
    for _ in range(9):
        member.handle(Heard(Beat()), awake)
    assert not member.in_touch(awake), "the coordinator has asked for a heartbeat, and may not have received the last"
    member.handle(Heard(Beat(asleep)), awake + 1)
    assert member.in_touch(awake + 1)
    member.handle(Heard(Lead(member.presentation.term + 1)), awake + 1)
    assert not member.in_touch(awake + 1), "another one may have put it out of its epoch"
    assert member.in_touch(awake + 1, in_epoch=False)


def test_a_launcher_that_slept_is_up_to_date_only_after_the_answer_to_its_last_heartbeat() -> None:
    launcher = NodeAgentClient("n", "0" * 32, 1, SETTINGS, 0.0)
    for event in (Tick(), Accepted(), Connected()):
        sent = launcher.handle(event, 0.0)
    for number in (1, 2):
        assert sent[-1] == Say(to_coordinator.Beat(number))
        for _ in range(3):
            launcher.handle(Heard(Beat()), 0.0)
            assert not launcher.up_to_date, "the coordinator has asked for a heartbeat because the launcher was silent"
        launcher.handle(Heard(Beat(number)), 0.0)
        assert launcher.up_to_date
        sent = launcher.ask()


ERROR = "RuntimeError: the loss is not a number"


@table("""
the last worker that said why is named when nobody is left
    world 2 nodes=2 runs=4; kill 1; run 3; raises 0 at=5 own=1 RuntimeError: uncorrectable ECC error
    -> ends 10 no live worker is left
    ends 10 worker 0 on node0 reported the last error: RuntimeError: uncorrectable ECC error
one replica says nothing about the work
    world 2 nodes=2 runs=4; raises 0 at=0 group=0 TypeError: no loss; raises 1 at=0 group=0 TypeError: no loss
    -> ends 10 no live worker is left
the second replica that ends in the same way ends the run with the true cause
    world 4 nodes=4 runs=4; raises 3 at=5 group=1 NaN -> stops; raises 0 at=5 group=0 NaN
    stops 1 microbatch 5 of iteration 7 fails wherever it is run, on worker 3 on node3, then on worker 0 on node0: NaN
    exceptions 3:node3:7:5:NaN 0:node0:7:5:NaN; out 1 0 1 2
a fault that shows after the pass is known by what both replicas have tried
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 NaN
    raises 0 at=10 group=0 tried=2,6,10 NaN -> stops
    raises 1 at=11 group=1 tried=3,5,7,9,11 NaN
    ends 1 one of the microbatches 5, 9 of iteration 7 fails wherever it is run
    ends 1 run, on worker 3 on node3, then on worker 1 on node1: NaN
the third replica that the same microbatch ends ends the run whatever the errors say
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 KeyError: a
    raises 0 at=5 group=0 tried=2,5 ValueError: b -> stops; raises 1 at=7 group=1 tried=3,5,7 KeyError: c
    -> ends 1 microbatch 5 of iteration 7 ends every worker that runs it
    ends 1 KeyError: a; ends 1 ValueError: b; ends 1 KeyError: c
three replicas with no microbatch in common are three faults
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 KeyError: a; raises 0 at=5 group=0 tried=2,5 ValueError: b
    raises 1 at=9 group=1 tried=3,9 KeyError: c -> stops
faults of hosts and devices say nothing about the work
    world 4 nodes=4 runs=4; raises 3 at=5 group=3 own=1 OSError: Too many; raises 0 at=5 group=0 own=1 OSError: Too many
    raises 1 at=5 group=1 own=1 OSError: Too many -> stops
a fault outside of microbatches is that of its phase
    world 4 nodes=4 runs=4; raises 3 group=3 phase=eval NaN; raises 0 group=0 phase=checkpoint NaN -> stops
    raises 1 group=1 phase=checkpoint NaN
    stops 1 iteration 7 (checkpoint) fails wherever it is run, on worker 0 on node0, then on worker 1 on node1: NaN
the same fault of all replicas at once is one of the work though each met it in another microbatch
    world 3 nodes=3 runs=4; raises 0 at=1 group=0 sample 1: NaN; raises 1 at=5 group=1 sample 5: NaN
    raises 2 at=9 group=2 sample 9: NaN -> ends 1 iteration 7 fails in all replicas: sample
where one of them was killed or of a bad host or said another thing it may be chance
    world 3 nodes=3 runs=4; raises 0 at=1 group=0 NaN; raises 1 at=5 group=1 NaN; kill 2; run 3
    -> ends 10 no live worker is left
of a bad host
    world 2 nodes=2 runs=4; raises 0 at=1 group=0 own=1 NaN; raises 1 at=5 group=1 own=1 NaN -> ends 10 no live worker
of storage that has hung up
    world 2 nodes=2 runs=4; raises 0 at=1 group=0 OSError: read: [Errno 5] I/O
    raises 1 at=5 group=1 OSError: read: [Errno 5] I/O -> ends 10 no live worker
another thing
    world 2 nodes=2 runs=4; raises 0 at=1 group=0 NaN; raises 1 at=5 group=1 Key -> ends 10 no live worker
the same fault between two steps of each next replica in turn is one of the work
    world 3 nodes=3 runs=4; kill 0; run 3; raises 1 iteration=4 group=1 phase=agree no step 1; run 3
    raises 2 iteration=5 group=2 phase=agree no step 2 -> ends 1 iterations 4 and 5 fail in all replicas: no step 2
in iterations that are further apart it may be chance
    world 3 nodes=3 runs=4; kill 0; run 3; raises 1 iteration=4 group=1 phase=agree no step; run 3
    raises 2 iteration=6 group=2 phase=agree no step -> ends 10 no live worker is left
in microbatches of two iterations
    world 3 nodes=3 runs=4; kill 0; run 3; raises 1 at=3 iteration=4 group=1 NaN; run 3
    raises 2 at=3 iteration=5 group=2 NaN -> ends 10 no live worker is left
last words said while no coordinator is reached are told to the next one once
    world 3 nodes=3 runs=4; crash 0; raises 2 at=5 NaN -> exceptions 2:node2:7:5:NaN; led 0 1
""")
def test_exceptions(script: str) -> None:
    play(script)


def test_a_worker_that_an_exception_ends_was_last_seen_where_it_was_raised() -> None:
    """In a recovery's line and in recover-status."""
    worker = started(3).coordinators[0].roster.workers[WorkerId(2)]
    ExceptionReports(Outbox()).add(worker, to_coordinator.ReportException(7, "NaN", "", 0, phase="data"))
    assert (worker.progress.iteration, worker.progress.phase) == (7, "data")


@pytest.mark.parametrize(
    "other", ["at=5 group=1 NaN", "at=6 NaN", "NaN", "at=5 iteration=8 NaN", "at=5 RuntimeError: something else"]
)
def test_the_same_replica_or_another_fault_ends_nobody_else(other: str) -> None:
    play(f"world 4 nodes=4 runs=4; raises 3 at=5 group=1 NaN; raises 2 {other} -> stops; goes_on 3")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Rank 3, device 1: result nan (found NaN in bucket #3)",
            "Rank 12, device 0: result inf (found Inf in bucket #0)",
        ),
        ("no file /scratch/job_17/tmpabcdefgh/x", "no file /scratch/job_9/tmpzyxwvuts/x"),
        ("values 0.125 and 1e-05 at 0x7f3a", "values -3 and 2.5 at 0xbeef"),
        ("shape [1, 2, 3] of node12a", "shape [4] of node7b"),
        ("request 3f2a9c-71b0e4 failed", "request 9911aa-0a failed"),
    ],
)
def test_errors_are_alike_but_for_numbers_and_names_with_numbers(one: str, other: str) -> None:
    assert alike(one) == alike(other)
    assert alike(one) != alike(f"not {other}")


@given(st.text("#0123 .,:[]-naif", max_size=2000))
def test_no_error_takes_long_to_compare(error: str) -> None:
    assert len(alike(error)) <= len(error)


def test_a_fault_without_a_microbatch_is_told_by_its_iteration() -> None:
    first, second = (ExceptionReport(f"worker {n} on a", n, 7, None, ERROR) for n in (0, 1))
    assert true_cause(second, [first]) == (
        f"iteration 7 fails wherever it is run, on worker 0 on a, then on worker 1 on a: {ERROR}"
    )


@given(st.text(max_size=400), st.integers(80, 300))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, limit: int) -> None:
    short = cut_middle(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert len(short) == limit
        assert text.startswith(short[:10])
        assert text.endswith(short[-10:])


def test_the_reason_of_a_stop_is_bounded_however_long_the_words() -> None:
    name = f"worker 1 on {'h' * 256}"
    first, second = (ExceptionReport(name, n, 1 << 53, 1 << 53, "x" * MAX_TRACEBACK) for n in (0, 1))
    cause = true_cause(second, [first])
    assert cause is not None
    assert len(cause) <= 2000
    assert f", on {name}, then on {name}: xxx" in cause
