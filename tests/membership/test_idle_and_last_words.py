"""Members without a part, and words that end the run: the state machines over the simulated network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import SETTINGS, World

from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, CoordinatorLost
from recover_megatron.membership.events import Notify, Say
from recover_megatron.membership.exception_reports import MAX_TRACEBACK, ExceptionReport, alike, cut_middle, true_cause
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.member import Member
from recover_megatron.membership.node_agent_client import NodeAgentClient
from recover_megatron.membership.quorum import can_tell


def world_with(workers: int, spares: set[int], candidates: int = 2, nodes: int | None = None, **options: Any) -> World:
    world = World(workers, candidates=candidates, nodes=nodes or workers, **options)
    world.spares = set(spares)
    world.run_fairly(4.0)
    return world


def committed(world: World, number: int) -> int:
    return world.worker(number).committed


def test_commits_wait_for_the_members_that_have_a_part_and_for_no_other() -> None:
    world = world_with(3, {2})
    before = committed(world, 2)
    assert before > 0
    world.act(0)
    world.run_fairly(3.0)
    assert committed(world, 2) > before
    assert world.worker(2).done == 0


def test_where_all_are_idle_nothing_is_committed_and_nobody_is_to_blame() -> None:
    world = world_with(3, {0, 1, 2})
    world.run_fairly(5 * SETTINGS.hang_timeout)
    assert world.commits == {}
    assert world.order == [1]


def test_an_idle_member_is_never_hung_and_makes_nobody_waited_for() -> None:
    world = world_with(3, {2})
    spare = world.worker(2)
    spare.mark(0, "spare", None, True, 0.0)  # it waits, and will for ever
    for w in (0, 1):
        world.busy.add(w)  # they compute, without a mark
    world.run_fairly(5 * SETTINGS.hang_timeout)
    assert not [record for record in world.log if record["event"] in ("fault", "stuck")]
    world.busy.clear()
    before = committed(world, 0)
    world.run_fairly(3.0)
    assert committed(world, 0) > before


def test_an_idle_member_that_does_not_join_the_next_rendezvous_is_put_out_there() -> None:
    world = world_with(4, {3})
    world.busy.add(3)  # it never gets to its join
    world.kill_worker(0)
    world.run_fairly(3 * SETTINGS.hang_timeout)
    faults = [(record["kind"], record["worker"]) for record in world.log if record["event"] == "fault"]
    assert faults == [("dead", 0), ("out", 3), ("dead", 3)]  # the last by its launcher's hand
    assert world.formed[world.order[-1]][1] == {1, 2}


def test_a_place_in_the_next_epoch_ends_idleness() -> None:
    world = world_with(3, {2})
    world.spares.clear()
    world.kill_worker(0)
    world.run_fairly(4.0)
    assert world.formed[world.order[-1]][1] == {1, 2}
    before = committed(world, 1)
    world.busy.add(2)
    world.run_fairly(4.0)
    assert committed(world, 1) <= before + 1  # it waits for worker 2, which has a part now


@pytest.mark.parametrize("reported_by", [(0, 1), (0,)])
def test_a_new_coordinator_commits_what_all_with_a_part_reported_and_nothing_else(reported_by: tuple[int, ...]) -> None:
    world = world_with(3, {2})
    before = committed(world, 2)
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


def test_idle_members_alone_do_not_go_on_while_those_with_a_part_may_be_running() -> None:
    world = world_with(5, {2, 3, 4})
    for node in (2, 3, 4):
        world.blocked.add((f"node{node}", 0))
    for node in (0, 1):
        world.blocked.add((f"node{node}", 1))
    world.run_fairly(3.0)  # the majority is idle, the others commit on for a while
    assert committed(world, 0) > committed(world, 2)
    world.run_fairly(4 * SETTINGS.lost_timeout)
    assert world.order == [1]
    assert {record["candidate"] for record in world.log if record["event"] == "lead"} == {0}
    for w in (2, 3, 4):
        assert isinstance(world.worker(w).out, CoordinatorLost)
        assert world.worker(w).out.code == EXIT_LOST_MAJORITY


@pytest.mark.parametrize("coordinator_too", [False, True])
def test_idle_members_go_on_when_all_the_others_are_known_to_have_died(coordinator_too: bool) -> None:
    world = world_with(3, {1, 2})
    world.spares.clear()
    if coordinator_too:
        world.kill_coordinator(0)
    world.kill_worker(0)
    world.run_fairly(4.0)
    assert world.formed[world.order[-1]][1] == {1, 2}
    before = committed(world, 1)
    world.run_fairly(4.0)
    assert committed(world, 1) > before


@given(*[st.frozensets(st.integers(0, 4))] * 3, st.booleans())
def test_somebody_with_a_part_can_always_tell(
    reached: frozenset[int], idle: frozenset[int], missing: frozenset[int], own: bool
) -> None:
    assert can_tell(reached, idle, missing, own) == (own or not missing or not reached <= idle)


def test_the_run_is_finished_when_all_that_had_a_part_have_left() -> None:
    world = world_with(3, {2})
    for w in (0, 1):
        assert world.worker(2).stage is Stage.FOLLOWING
        world._member_effects(f"w{w}", world.worker(w).leave())
        world.dead.add(f"w{w}")
        for number, direction in world.deliverable():
            world.deliver(number, direction)
    world.run_fairly(3.0)
    out = world.worker(2).out
    assert isinstance(out, CoordinatorLost)
    assert out.code == 0
    assert [record["code"] for record in world.log if record["event"] == "stop"] == [0]


# -- giving up --------------------------------------------------------------------------------------------------------


def stops(world: World) -> list[tuple[int, str]]:
    return [(record["code"], record["reason"]) for record in world.log if record["event"] == "stop"]


def test_a_worker_that_gives_up_ends_the_run_for_all_and_the_first_one_wins() -> None:
    world = world_with(3, set(), candidates=3)
    world._member_effects("w1", world.worker(1).end_run(42, "the disk is full"))
    world._member_effects("w1", world.worker(1).end_run(43, "again"))
    world.run_fairly(3.0)
    world._member_effects("w2", world.worker(2).end_run(44, "me too"))
    world.run_fairly(4 * SETTINGS.lost_timeout)
    assert stops(world) == [(42, "the disk is full")]
    for w in range(3):
        out = world.worker(w).out
        assert isinstance(out, CoordinatorLost)
        assert (out.code, str(out), out.by) == (42, "the disk is full", 1)
    assert {record["candidate"] for record in world.log if record["event"] == "lead"} == {0}


def test_giving_up_reaches_the_next_coordinator_when_the_first_is_lost_with_it() -> None:
    world = world_with(3, set())
    world._member_effects("w1", world.worker(1).end_run(42, "the disk is full"))
    world.kill_coordinator(0)
    world.run_fairly(3 * SETTINGS.heartbeat_timeout)
    assert stops(world) == [(42, "the disk is full")]


def test_giving_up_before_the_first_plan_ends_the_run_too() -> None:
    world = World(2)
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(4.0)
    assert stops(world) == [(7, "no data")]
    assert world.formed == {}


def test_who_comes_late_to_the_start_of_a_run_that_was_given_up_is_told() -> None:
    world = World(3)
    world.frozen.add("w2")  # it has not started yet
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(10.0)
    assert stops(world) == [(7, "no data")]
    assert 0 in world.coordinators
    world.frozen.clear()
    world.run_fairly(5.0)
    out = world.worker(2).out
    assert isinstance(out, CoordinatorLost)
    assert out.code == 7
    assert 0 not in world.coordinators


def test_who_never_comes_is_not_waited_for_longer_than_the_start_of_the_run_would_have() -> None:
    world = World(3)
    world.kill_worker(2, silently=True)
    world.unreported.clear()
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(SETTINGS.start_timeout / 2)
    assert 0 in world.coordinators
    world.run_fairly(SETTINGS.start_timeout / 2 + 5)
    assert 0 not in world.coordinators
    assert stops(world) == [(7, "no data")]


@pytest.mark.parametrize("given_up", [True, False])
def test_a_launcher_that_comes_after_the_end_of_a_short_run_is_told_how_it_ended(given_up: bool) -> None:
    world = World(2, nodes=1)
    world.frozen.add("node0")
    world.run_fairly(2.0)
    for w in (0, 1):
        member = world.worker(w)
        world._member_effects(f"w{w}", member.end_run(7, "no data") if given_up else member.leave())
    world.dead |= set() if given_up else {"w0", "w1"}
    while not stops(world):
        world.deliver(*next(pair for pair in world.deliverable() if pair[1] == "up"))
    assert [code for code, _ in stops(world)] == [7 if given_up else 0]
    assert 0 in world.coordinators
    world.frozen.clear()
    world.run_fairly(2.0)
    launcher = world.members["node0"]
    assert isinstance(launcher.out, CoordinatorLost)
    assert (launcher.out.code, launcher.last_epoch) == (7 if given_up else 0, 1)
    assert 0 not in world.coordinators


def test_a_launcher_that_lost_its_connection_just_before_the_end_is_told_when_it_comes_back() -> None:
    world = World(2, nodes=2)
    world.run_fairly(4.0)
    world.frozen.add("node1")
    world.run_fairly(SETTINGS.heartbeat_timeout + 2)
    assert [record["node"] for record in world.log if record["event"] == "witness_gone"] == ["node1"]
    for w in (0, 1):
        world._member_effects(f"w{w}", world.worker(w).leave())
    world.dead |= {"w0", "w1"}
    world.run_fairly(1.0)
    assert stops(world)
    world.frozen.clear()
    world.run_fairly(2 * SETTINGS.heartbeat_timeout)
    launcher = world.members["node1"]
    assert isinstance(launcher.out, CoordinatorLost)
    assert (launcher.out.code, launcher.out.told) == (0, True)
    assert 0 not in world.coordinators


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


def test_a_launcher_that_never_comes_does_not_keep_the_coordinator() -> None:
    world = World(2, nodes=1)
    world.frozen.add("node0")
    world.run_fairly(2.0)
    world._member_effects("w0", world.worker(0).end_run(7, "no data"))
    world.run_fairly(SETTINGS.heartbeat_timeout + 3)
    assert 0 not in world.coordinators


def stop_launcher(world: World, node: int, signal: int) -> None:
    """Somebody tells it to end its workers, and it does."""
    launcher = world.members[f"node{node}"]
    assert isinstance(launcher, NodeAgentClient)
    world._member_effects(f"node{node}", launcher.stopping(signal))
    for _ in range(20):
        for number, direction in world.deliverable():
            world.deliver(number, direction)
    for worker in [number for number, on in world.node_of.items() if on == node]:
        world.kill_worker(worker)


def test_a_run_whose_launchers_are_told_to_stop_ends_by_their_signal() -> None:
    world = world_with(4, set(), nodes=2)
    stop_launcher(world, 0, 2)
    world.run_fairly(3.0)
    assert stops(world) == []  # the other node goes on
    stop_launcher(world, 1, 15)
    world.run_fairly(3.0)
    assert stops(world) == [(143, "ended by SIGTERM, which the launcher on node1 received")]


def test_workers_that_die_by_themselves_are_not_taken_for_stopped() -> None:
    world = world_with(4, set(), nodes=2)
    stop_launcher(world, 0, 2)
    world.run_fairly(3.0)
    for worker in [number for number, on in world.node_of.items() if on == 1]:
        world.kill_worker(worker)
    world.run_fairly(3.0)
    assert stops(world) == [(10, "no live worker is left")]


def test_the_last_worker_that_said_why_is_named_when_nobody_is_left() -> None:
    world = world_with(2, set())
    world.kill_worker(1)
    world.run_fairly(3.0)
    end_with(world, 0, words(own=True, error="RuntimeError: uncorrectable ECC error"))
    why = "worker 0 on node0 was the last to say why: RuntimeError: uncorrectable ECC error"
    assert stops(world) == [(10, f"no live worker is left; {why}")]


# -- exception report
# -------------------------------------------------------------------------------------------------------

ERROR = "RuntimeError: the loss is not a number"


def words(
    microbatch: int | None = 5, error: str = ERROR, group: int = 0, iteration: int = 7, **more: Any
) -> dict[str, Any]:
    said = {"iteration": iteration, "error": error, "traceback": "Traceback ...", "group": group, **more}
    return said if microbatch is None else {**said, "microbatch": microbatch}


def end_with(world: World, number: int, said: dict[str, Any]) -> None:
    world._member_effects(f"w{number}", world.worker(number).report_exception(said))
    world.run_fairly(1.0)
    assert world.worker(number).noted
    if world.worker(number).stage is not Stage.OUT:
        world.kill_worker(number)
        world.run_fairly(2.0)


def test_the_second_replica_that_ends_in_the_same_way_ends_the_run_with_the_true_cause() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(group=1))
    assert stops(world) == []
    end_with(world, 0, words(group=0))
    where = "on worker 3 on node3, then on worker 0 on node0"
    assert stops(world) == [(1, f"microbatch 5 of iteration 7 raises {ERROR} wherever it is run: {where}")]
    events = [record for record in world.log if record["event"] == "exception"]
    assert [(e["worker"], e["host"], e["iteration"], e["microbatch"], e["error"]) for e in events] == [
        (3, "node3", 7, 5, ERROR),
        (0, "node0", 7, 5, ERROR),
    ]
    assert [isinstance(world.worker(w).out, CoordinatorLost) for w in (0, 1, 2)] == [True] * 3


@pytest.mark.parametrize(
    "other", [words(group=1), words(6), words(None), words(iteration=8), words(error="RuntimeError: something else")]
)
def test_the_same_replica_or_another_fault_ends_nobody_else(other: dict[str, Any]) -> None:
    world = world_with(4, set())
    end_with(world, 3, words(group=1))
    end_with(world, 2, other)
    assert stops(world) == []
    before = committed(world, 0)
    world.run_fairly(3.0)
    assert committed(world, 0) > before


def test_a_fault_that_shows_after_the_pass_is_known_by_what_both_replicas_have_tried() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(10, group=0, tried=[2, 6, 10]))  # the same error at other work: a fault of its own
    assert stops(world) == []
    end_with(world, 1, words(11, group=1, tried=[3, 5, 7, 9, 11]))
    where = "on worker 3 on node3, then on worker 1 on node1"
    assert stops(world) == [
        (1, f"one of the microbatches 5, 9 of iteration 7 raises {ERROR} wherever it is run: {where}")
    ]


def test_the_third_replica_that_the_same_microbatch_ends_ends_the_run_whatever_the_errors_say() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, "KeyError: a", group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(5, "ValueError: b", group=0, tried=[2, 5]))
    assert stops(world) == []
    end_with(world, 1, words(7, "KeyError: c", group=1, tried=[3, 5, 7]))
    ((code, reason),) = stops(world)
    assert code == 1
    assert reason.startswith("microbatch 5 of iteration 7 ends every worker that runs it")
    assert all(error in reason for error in ("KeyError: a", "ValueError: b", "KeyError: c"))


def test_three_replicas_with_no_microbatch_in_common_are_three_faults() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(9, "KeyError: a", group=3, tried=[1, 5, 9]))
    end_with(world, 0, words(5, "ValueError: b", group=0, tried=[2, 5]))
    end_with(world, 1, words(9, "KeyError: c", group=1, tried=[3, 9]))
    assert stops(world) == []


def test_faults_of_hosts_and_devices_say_nothing_about_the_work() -> None:
    world = world_with(4, set())
    for number in (3, 0, 1):
        end_with(world, number, words(group=number, error="OSError: Too many open files", own=True))
    assert stops(world) == []


def test_a_fault_outside_of_microbatches_is_that_of_its_phase() -> None:
    world = world_with(4, set())
    end_with(world, 3, words(None, group=3, phase="eval"))
    end_with(world, 0, words(None, group=0, phase="checkpoint"))
    assert stops(world) == []
    end_with(world, 1, words(None, group=1, phase="checkpoint"))
    where = "on worker 0 on node0, then on worker 1 on node1"
    assert stops(world) == [(1, f"iteration 7 (checkpoint) raises {ERROR} wherever it is run: {where}")]


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


def test_last_words_said_while_no_coordinator_is_reached_are_told_to_the_next_one_once() -> None:
    world = world_with(3, set())
    world.kill_coordinator(0)
    world._member_effects("w2", world.worker(2).report_exception(words()))
    world.run_fairly(2.0)
    assert world.worker(2).noted
    (event,) = [record for record in world.log if record["event"] == "exception"]
    assert (event["candidate"], event["worker"]) == (1, 2)


def test_a_fault_without_a_microbatch_is_told_by_its_iteration() -> None:
    first, second = (ExceptionReport(f"worker {n} on a", n, 7, None, ERROR) for n in (0, 1))
    assert true_cause(second, [first]) == (
        f"iteration 7 raises {ERROR} wherever it is run: on worker 0 on a, then on worker 1 on a"
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
    assert cause.endswith(f"then on {name}")


def test_idleness_is_told_once_and_not_before_the_first_plan() -> None:
    member = Member({"worker": 0}, 1, SETTINGS, 0.0)
    assert member.idle() == []
    world = world_with(2, set())
    (said,) = world.worker(0).idle()
    assert said == Say({"type": "idle", "epoch": 1})
    assert world.worker(0).idle() == []


def test_a_revoke_tells_who_is_dead_and_who_has_left_before_anybody_is_notified() -> None:
    world = world_with(3, set())
    world.kill_worker(1)
    seen = []
    original = world._member_effects

    def watch(name: str, effects: list[Any]) -> None:
        for effect in effects:
            if name == "w0" and isinstance(effect, Notify) and effect.kind == "revoke":
                seen.append(world.worker(0).presentation.dead)
        original(name, effects)

    world._member_effects = watch  # type: ignore[method-assign]
    world.run_fairly(2.0)
    assert seen == [{1}]


def test_a_member_that_has_slept_for_longer_than_it_may_be_silent_is_not_in_touch() -> None:
    assert not Member({"worker": 0}, 1, SETTINGS, 0.0).in_touch(0.0)
    world = world_with(2, set())
    member = world.worker(0)
    assert member.in_touch(world.now)
    assert not member.in_touch(world.now + SETTINGS.heartbeat_timeout + SETTINGS.heartbeat_interval)
