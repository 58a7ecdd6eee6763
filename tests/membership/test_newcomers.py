"""Newcomers: workers that were not launched with the run join it while it goes on, whatever dies meanwhile."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from msgspec.structs import replace
from script import Script, play, table
from simulation import SETTINGS, World, attach

from recover_megatron.membership.epochs import RevokeConfirmations
from recover_megatron.membership.events import Received, Send
from recover_megatron.membership.messages.fields import NO_PLAN
from recover_megatron.membership.messages.to_coordinator import Join
from recover_megatron.membership.messages.to_member import Plan
from recover_megatron.membership.records import Evidence, Fenced, Json, Opened
from recover_megatron.membership.sides.follower import Stage
from recover_megatron.membership.sides.member import Member

# -- the state machines, one delivery after the other -----------------------------------------------------------------


def three_nodes(joining: int = 0) -> Script:
    played = Script(SETTINGS)
    played.world("3", "candidates=3", "nodes=3", "runs=4")
    for _ in range(joining):
        played.joins()
    return played


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
a newcomer finds the run behind a first candidate that was started again: it waits there for no dead one's silence
    world 3 nodes=3 candidates=3 runs=4; crash 0; run 20; restart 0; newcomers 0; run 3 -> members 0 1 2 3
""")
def test_newcomers(script: str) -> None:
    play(script)


@pytest.mark.parametrize("presented", ["the plan", "another plan", "no plan"])
def test_only_who_holds_the_plan_before_gets_the_changes_to_it(presented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer gets all of it; after the coordinator's death everybody does, unless a member presented the plan."""
    bases: dict[tuple[int, int], tuple[int, int]] = {}
    planned = Member._planned

    def noted(self: Member, message: Plan) -> None:
        bases[message.epoch, self._worker] = message.base
        planned(self, message)

    joins = Member._join_message

    def presents(self: Member, opened: Opened, status: Json) -> Join:
        join = joins(self, opened, status)
        if join.plan is None or presented == "the plan":
            return join
        return replace(join, plan=None) if presented == "no plan" else replace(join, holds=(1, 1))

    monkeypatch.setattr(Member, "_planned", noted)
    monkeypatch.setattr(Member, "_join_message", presents)
    world = three_nodes(joining=1).it
    world.run_fairly(10)
    world.kill_coordinator(0)
    world.run_fairly(30)
    first, second, third = sorted({epoch for epoch, _ in bases})
    assert {bases[first, n] for n in range(3)} == {NO_PLAN}
    assert [bases[second, n] for n in range(4)] == [(first, world.formed[first][0])] * 3 + [NO_PLAN]
    before = (second, world.formed[second][0]) if presented == "the plan" else NO_PLAN
    assert {bases[third, n] for n in range(4)} == {before}


def test_what_a_failover_costs_per_member_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def count(kind: type[object], name: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: (calls.update([name]), method(*given))[1])

    count(Evidence, "add")  # costs as much as there are members
    count(RevokeConfirmations, "_counts")
    costs = []
    for workers in (12, 48):
        world = World(workers, nodes=3)
        world.run_fairly(4.0)
        calls.clear()
        world.kill_coordinator(0)
        world.run_fairly(30.0)
        assert len(world.order) == 2
        costs.append((calls["add"], calls["_counts"] / workers))
    assert costs[1][0] == costs[0][0] <= 4
    assert costs[1][1] < 2 * costs[0][1]


def test_two_newcomers_at_once_cost_one_epoch() -> None:
    world = three_nodes().it
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
    assert world.newest == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("death", "left"),
    [("crash 0", "0 1 2 3"), ("crash 0 lose", "0 1 2 3"), ("kill 3", "0 1 2"), ("kill 1", "0 2 3")],
)
@pytest.mark.parametrize("messages", range(40))
def test_the_coordinator_or_a_worker_may_die_at_any_moment_of_an_admission(
    messages: int, death: str, left: str
) -> None:
    admission = f"world 3 nodes=3 candidates=3 runs=4; newcomers 0; act 3; deliver {messages}"
    play(f"{admission}; {death} -> goes_on 20; members {left}")


def test_an_id_never_comes_back() -> None:
    """Not that of the launch, not that of another newcomer, dead or alive."""
    world = three_nodes().it
    world.add_newcomer(0)
    world.run_fairly(2.0)
    world.kill_worker(3)
    world.add_newcomer(1)
    world.run_fairly(2.0)
    assert world.newest == {0, 1, 2, 4}
    for number, name in ((0, "n0"), (3, "n3"), (4, "n4")):
        world.members[name] = Member(attach(number, number + 99, newcomer=True), 3, SETTINGS, world.now)
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
        run.continue_without(1)
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
        assert 3 not in [event["worker"] for event in run.logged("admitted")]


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
        starts = run.said()
        run.coordinators[leader].kill()
        run.plan_again(starts)
        plans = [process.event("plan", start=starts[number]) for number, process in run.workers.items()]
        assert [plan["members"] for plan in plans] == [[0, 1, 2, 3]] * 4


@pytest.mark.slow
def test_a_worker_with_an_unknown_id_that_is_no_newcomer_is_not_taken_in(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=2) as run:
        run.start_worker(7)
        assert "no worker 7" in run.wait_event("refused")["reason"]


@pytest.mark.parametrize("silently", ["", "silently"])
def test_every_node_of_the_launch_is_replaced_and_the_run_goes_on(silently: str) -> None:
    """And those that replaced them, too."""
    one_after_the_other = [f"joins; lose {node} {silently}; run 20" for node in range(6)]
    first, second = "; ".join(one_after_the_other[:3]), "; ".join(one_after_the_other[3:])
    world = "world 3 candidates=3 nodes=3 runs=4"
    play(f"{world}; {first} -> goes_on 15; running 3 4 5; {second} -> goes_on 15; running 6 7 8")


@table("""
so many are told, and another one when one of them is lost
    world 3 candidates=3 nodes=3 runs=4; joins; joins; joins; joins -> know 0 1 2; lose 3; run 2 -> know 1 2 3
candidates of launchers that fall silent make room for others: their nodes are off, and no connection is closed
    world 3 candidates=3 nodes=3 runs=4; joins; joins; joins; lose 3 silently; run 20; lose 4 silently; run 20
    lose 5 silently; run 20; joins -> know 3; led 0
each new coordinator is told of them anew, and tells all
    world 3 candidates=3 nodes=3 runs=4; joins; joins -> know 0 1; crash 0; run 10 -> know 0 1; led 0 1
half of the workers needs the lease of the candidate that joined: the other half is lost at once, silently
    world 4 candidates=2 nodes=2 slack=0 runs=4; lose 1; run 20; joins; newcomers 2; run 2 -> members 0 1 4 5
    lose 0 silently; run 30 -> holders 4 5; members 4 5; goes_on 15; running 4 5
who came after the lease was taken may be all that is left: the other half goes on
    world 2 candidates=2 nodes=2 slack=0 runs=4
    lose 0 silently; run 30 -> holders 1; joins; run 4 -> holders 1 2
    lose 1 silently; run 30 -> holders 2; joins; run 4 -> holders 2 3
    lose 2 silently; run 30 -> holders 3; joins; run 4 -> holders 3 4; goes_on 15; running 3 4
""")
def test_candidates_that_join(script: str) -> None:
    play(script)


def test_without_candidates_that_join_the_run_ends_with_the_last_of_the_launch() -> None:
    one_after_the_other = "; ".join(f"joins alone; lose {node}; run 20" for node in range(3))
    play(f"world 3 candidates=3 nodes=3 runs=4; {one_after_the_other}; run 80 -> out 11 3 4 5")


def test_who_is_turned_away_is_told_of_no_candidates() -> None:
    world = three_nodes(1).it
    world.kill_worker(2)
    world.run_fairly(2.0)
    coordinator = world.coordinators[0]
    sent = coordinator.handle(Received(999, attach(2, 7)), world.now)
    assert [effect.message.kind for effect in sent if isinstance(effect, Send)] == ["fenced"]


def test_members_whose_lists_differ_meet_all_the_same() -> None:
    """The coordinator is lost, with all others of the launch, when only one member was told of a second candidate."""
    played = three_nodes(1)
    world = played.it
    second = world.add_candidate(world.add_node())
    node = next(name for name, port in world.added if world.added[(name, port)] == second)
    world.run_fairly(1.0)
    world.lists["w0"] = world.members["w0"]._added = tuple(a for a in world.added if a[0] != node)
    for candidate in range(3):
        world.kill_coordinator(candidate)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    played.goes_on("15", "0", "1", "2", "3")


def test_a_candidate_that_was_followed_and_is_not_told_any_more_is_left_like_any_other() -> None:
    """Its launcher is lost, and the candidate's process is not: it leads on, then is lost, too."""
    played = three_nodes(2)
    world = played.it
    for launched in range(3):
        world.kill_coordinator(launched)
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    leading = next(k for k, c in world.coordinators.items() if c.leadership.term)
    node = next(name for (name, _), number in world.added.items() if number == leading)
    world.dead.add(node)
    world._end_of_file(node)
    played.goes_on("15", "0", "1", "2", "3", "4")
    world.kill_coordinator(leading)
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)
    played.goes_on("15", "0", "1", "2", "3", "4")
    assert leading in world.added.values()
