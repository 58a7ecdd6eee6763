"""Any order of deliveries, deaths, freezes and partitions: the real state machines keep the protocol's promises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import simulation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from simulation import SETTINGS, PropertyViolated, World

from recover_megatron.membership import leadership
from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.epochs import Epochs, Rendezvous, RevokeConfirmations
from recover_megatron.membership.events import State
from recover_megatron.membership.messages.to_coordinator import Abandon
from recover_megatron.membership.records import Evidence, Formed, Presentation
from recover_megatron.membership.roster import Member, Roster
from recover_megatron.membership.sides.follower import Stage
from tests.drawn import some
from tests.formal import check as model

MOST_WORKERS = 8
MOST_CANDIDATES = 6
Moves = list[tuple[str, int, int]]
NOTHING, FLAG, NODE = st.just(0), st.integers(0, 1), st.integers(0, 2)
ANY_WORKER, FIRST_WORKERS = st.integers(0, 6), st.integers(0, 4)


def moves_of(kinds: str, a: st.SearchStrategy[int] = NOTHING, b: st.SearchStrategy[int] = NOTHING) -> list[Any]:
    return [st.tuples(st.just(kind), a, b) for kind in kinds.split(", ")]


MOVES = st.lists(
    st.one_of(
        *moves_of("deliver", st.integers(0, 30), st.integers(1, 6)),
        *moves_of("advance", st.sampled_from([1, 3, 6, 12])),
        *moves_of("run", st.integers(0, 3)),
        *moves_of("report, thaw, witness, reap"),
        *moves_of("act, freeze", ANY_WORKER),
        *moves_of("kill, die", ANY_WORKER, FLAG),
        *moves_of("kill coordinator, idle, busy", FIRST_WORKERS, FLAG),
        *moves_of("wait", FIRST_WORKERS, NODE),
        *moves_of("restart coordinator", FIRST_WORKERS),
        *moves_of("freeze coordinator, freeze launcher, candidate", NODE),
        *moves_of("block, storage, drain", NODE, NODE),
        *moves_of("heal", st.integers(0, 8)),
        *moves_of("partition", st.integers(0, 7), NODE),
        *moves_of("work", st.integers(1, 127)),
        *moves_of("upwards, downwards", st.integers(0, 127)),
        *moves_of("newcomer, power off", st.integers(0, 3), FLAG),
    ),
    min_size=5,
    max_size=60,
)


def play(world: World, move: tuple[str, int, int]) -> None:
    """One move; moves that make no sense in the present state do nothing."""
    kind, a, b = move
    workers = len(world.node_of)
    its = list(world.node_of)  # their ids
    match kind:
        case "deliver":
            for _ in range(b):
                if pairs := world.deliverable():
                    world.deliver(*pairs[a % len(pairs)])
        case "act":
            world.act(its[a % workers])
        case "advance":
            world.advance(float(a))
        case "run":
            world.run_fairly(0.5 + a)
        case "kill":
            if world.running(f"w{its[a % workers]}"):
                world.kill_worker(its[a % workers], silently=bool(b))
        case "die":  # its launcher tells it at once; b: it finishes the system call that it was in
            number = its[a % workers]
            if world.running(f"w{number}") and world.launcher_runs(number):
                world.tell_of_dying(number, last_act=bool(b))
        case "reap":
            for number in list(world.dying):
                world.reap(number)
        case "report":
            for number in list(world.unreported):
                world.report_death(number)
        case "kill coordinator":
            # the run does not promise to outlive all of its candidates
            if len(world.coordinators) > 1:
                world.kill_coordinator(a, lose=bool(b))
        case "restart coordinator":
            if a < 3 or a in world.added.values():
                world.start_coordinator(a)
        case "idle":
            (world.spares.add if b else world.spares.discard)(its[a % workers])
        case "freeze":
            if world.running(f"w{its[a % workers]}"):
                world.frozen.add(f"w{its[a % workers]}")
        case "freeze launcher":
            if f"node{a}" in world.members:
                world.frozen.add(f"node{a}")
        case "freeze coordinator":
            world.frozen.add(f"c{a}")
        case "thaw":
            world.frozen.clear()
        case "block":
            world.blocked.add((f"node{a}", b))
        case "partition":  # the nodes of the set reach all candidates but b, the others only b
            for node in range(3):
                for candidate in range(3):
                    link = (f"node{node}", candidate)
                    (world.blocked.add if (a >> node & 1) == (candidate == b) else world.blocked.discard)(link)
        case "work":
            for place, w in enumerate(its):
                if a >> place & 1:
                    world.act(w)
        case "upwards" | "downwards":  # for the workers of the set
            for number, direction in world.deliverable():
                owner = world.connections[number].owner
                chosen = owner.startswith("w") and a >> its.index(int(owner[1:])) & 1
                if direction == kind.removesuffix("wards") and chosen:
                    queue = getattr(world.connections[number], direction)
                    while queue and (number, direction) in world.deliverable():
                        world.deliver(number, direction)
        case "newcomer":  # b: it joins at once
            joined = max(map(int, (name[4:] for name in world.members if name.startswith("node"))), default=0)
            node = a if a < 3 else joined  # the last one that has joined
            if workers < MOST_WORKERS and f"node{node}" not in world.off:
                world.add_newcomer(node)
                if b:
                    world.act(list(world.node_of)[-1])
        case "candidate":  # on a node that joins, or on one of the launch that is told to
            if world.has_node_agents and len(world.coordinators) < MOST_CANDIDATES:
                node = world.add_node() if a == 2 else a
                if f"node{node}" not in world.off:
                    world.add_candidate(node)
        case "power off":
            if world.has_node_agents and f"node{a}" in world.members and len(world.coordinators) > 1:
                world.power_off(a, a if b else None)
        case "witness":
            world.answer_questions()
        case "storage":  # b: a candidate loses it, all have it again, or it answers one claim
            if b == 2:
                world.answer_claims(1)
            else:
                world.no_storage = {a} if b else set()
        case "drain":
            world.now += 1.0  # an observer that asks too often is refused
            world.drain(b, a)
        case "busy":  # b: it computes, and others may have to wait for it for long
            (world.busy.add if b else world.busy.discard)(its[a % workers])
            if b and world.running(f"w{its[a % workers]}"):
                world.worker(its[a % workers]).mark(99, "forward", None, False, 0.0)
        case "wait":  # b: for the others, in a step's operation or in one of its own; or it goes on
            world.waits.pop(its[a % workers], None)
            if b:
                world.waits[its[a % workers]] = ("reduce-scatter", "barrier")[b - 1]
        case "stop":  # it computes, and does not run
            if world.running(f"w{its[a % workers]}"):
                play(world, ("busy", a, 1))
                world.frozen.add(f"w{its[a % workers]}")
        case "wake":
            world.busy.discard(its[a % workers])
            world.frozen.discard(f"w{its[a % workers]}")
        case "break":
            connection = world.current[f"w{its[a % workers]}"]
            if connection is not None and connection.candidate in world.coordinators:
                world.break_up(connection)
        case "heal":
            if world.blocked:
                world.blocked.remove(sorted(world.blocked)[a % len(world.blocked)])


def every_wait_ends(world: World) -> None:
    """After a long, fair time, in which nobody is busy, every worker is dead, out, or has seen steps commit lately.

    Those that wait for the others where these do not come are not helped.
    """
    world.busy.clear()
    world.run_fairly(2 * SETTINGS.start_timeout)
    world.ask_for_places()
    world.run_fairly(10 * SETTINGS.heartbeat_timeout)
    if world.waits:  # two kinds of waits are ended one after the other, or the run is, after as many epochs as it may
        world.run_fairly((2 * 2 + SETTINGS.max_stuck_epochs + 1) * 2 * SETTINGS.hang_timeout)
    before = {w: world.worker(w).committed for w in world.node_of}
    world.run_fairly(10 * SETTINGS.heartbeat_timeout)
    for w in world.node_of:
        if world.running(f"w{w}") and world.worker(w).stage is not Stage.OUT:
            assert world.worker(w).committed > before[w], f"worker {w} waits for ever: {world.worker(w).__dict__}"


def explore(moves: Moves, world: World, to_the_end: bool) -> None:
    for move in moves:
        play(world, move)
    if to_the_end:
        every_wait_ends(world)


SPARES = st.one_of(st.sets(st.integers(0, 4)), st.just({0, 1, 2, 3, 4}))
"""All: nobody has a part, as where all replicas are broken."""
GRACE = st.sampled_from([0.0, 2.0])
GATED = {0, 1, 3}
"""Workers that join when all have heard, as over NCCL; the others do at once, as orphans and spares."""


def world_of(
    workers: int,
    started: bool,
    node_agents: bool,
    spares: Collection[int] = (),
    nodes: int = 3,
    slack: int | None = None,
    grace: float = 0.0,
    witness: bool = False,
    gated: Collection[int] = (),
) -> World:
    its = replace(SETTINGS, grace=grace)
    world = World(workers, nodes, nodes, node_agents, its, slack, witness)
    world.drains_nodes, world.gated = True, set(gated)
    world.spares = {spare for spare in spares if spare < workers}
    if started:
        world.run_fairly(4.0)
        assert world.order == [1]
    return world


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.booleans(), st.sets(st.integers(0, 4)), st.sampled_from([0.0, 2.0]))
def test_one_lineage_and_no_decision_taken_twice_whatever_happens(
    moves: Moves, workers: int, started: bool, node_agents: bool, spares: set[int], grace: float
) -> None:
    """Nodes are drained meanwhile, and (``grace``) workers that are late set aside."""
    explore(moves, world_of(workers, started, node_agents, spares, grace=grace, gated=GATED), to_the_end=False)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), SPARES, st.integers(2, 3), st.integers(0, 2), GRACE)
def test_one_lineage_with_a_lease_whatever_happens(
    moves: Moves, workers: int, started: bool, spares: set[int], nodes: int, slack: int, grace: float
) -> None:
    """The storage answers late, or not all, and coordinators that are frozen or have stepped down, too."""
    explore(moves, world_of(workers, started, True, spares, nodes, slack, grace, gated=GATED), to_the_end=False)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), SPARES, st.integers(2, 3), st.integers(0, 2), GRACE)
def test_every_wait_ends_with_a_lease(
    moves: Moves, workers: int, spares: set[int], nodes: int, slack: int, grace: float
) -> None:
    explore(moves, world_of(workers, True, True, spares, nodes, slack, grace, gated=GATED), to_the_end=True)


def halves(slack: int = 0) -> World:
    """Two nodes of two workers each, a candidate on each; the first leads."""
    return world_of(4, True, True, nodes=2, slack=slack)


def lose_node(world: World, node: int, silently: bool) -> None:
    world.kill_coordinator(node)
    if silently:
        world.blocked |= {(f"node{node}", candidate) for candidate in range(2)}
        world.blocked |= {(f"node{other}", node) for other in range(2)}
    for w, where in world.node_of.items():
        if where == node and world.running(f"w{w}"):
            world.kill_worker(w, silently=silently)
    world.dead.add(f"node{node}")


def cut_cable(world: World) -> None:
    world.blocked |= {("node0", 1), ("node1", 0)}


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("one_fewer", [False, True])
def test_either_node_of_two_is_survived_within_the_heartbeat_timeout_and_2_s(
    lost: int, silently: bool, one_fewer: bool
) -> None:
    """Also where the node that is left had lost a worker before."""
    world = halves(slack=1)
    left = {w for w, node in world.node_of.items() if node != lost}
    if one_fewer:
        world.kill_worker(gone := min(left))
        world.run_fairly(3.0)
        left.discard(gone)
    before, now = len(world.order), world.now
    lose_node(world, lost, silently)
    while len(world.order) == before:
        assert world.now - now <= SETTINGS.heartbeat_timeout + 2
        world.run_fairly(0.25, step=0.25)
    assert world.newest == left
    committed = max(world.commits)
    world.run_fairly(10.0)
    assert not world.out & left
    assert max(world.commits) > committed


@pytest.mark.parametrize("no_storage", [set(), {0}, {1}])
def test_of_two_nodes_that_do_not_hear_each_other_one_goes_on(no_storage: set[int]) -> None:
    """Whoever reaches the storage first; who does not reach it is no candidate for that."""
    world = halves()
    world.no_storage = no_storage
    cut_cable(world)
    world.run_fairly(6 * SETTINGS.stall_timeout)
    out = world.out
    assert len(world.holders) == 1
    goes_on = world.holders[0].members
    assert goes_on in ({0, 1}, {2, 3})
    assert out == {0, 1, 2, 3} - goes_on
    if no_storage:
        assert goes_on == ({2, 3} if no_storage == {0} else {0, 1})


def test_a_holder_that_is_frozen_comes_back_to_a_run_that_nobody_else_has_gone_on_with() -> None:
    """Frozen after it got the lease: the other half stops. Frozen before: the other half has it, and this one stops."""
    world = halves()
    cut_cable(world)
    while not world.holders:
        world.run_fairly(0.25, step=0.25)
    holder = world.holders[0].members
    node = {world.node_of[w] for w in holder}.pop()
    world.frozen |= {f"w{w}" for w in holder} | {f"node{node}", f"c{node}"}
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    assert world.out == {0, 1, 2, 3} - holder
    world.blocked.clear()
    world.frozen.clear()
    committed = max(world.commits)
    world.run_fairly(8 * SETTINGS.heartbeat_timeout)
    assert max(world.commits) > committed
    assert not world.out & holder


@pytest.mark.parametrize("lost", [0, 1])
def test_the_idle_go_on_alone_where_nobody_had_a_part(lost: int) -> None:
    """All replicas are broken, and spares build what is missing, when a node is lost. They know what was committed."""
    world = halves(slack=1)
    world.spares = {0, 1, 2, 3}
    world.kill_worker(0)
    world.run_fairly(3.0)
    assert all(world.worker(w).idle_in for w in (1, 2, 3))
    left = {w for w in (1, 2, 3) if world.node_of[w] != lost}
    lose_node(world, lost, silently=True)
    world.spares = set()
    world.run_fairly(4 * SETTINGS.heartbeat_timeout)
    assert (world.newest, world.out & left) == (left, set())
    committed = max(world.commits)
    world.run_fairly(5.0)
    assert max(world.commits) > committed


@pytest.mark.parametrize("late", [0, 1])
def test_a_side_that_has_the_lease_and_dies_is_not_followed_by_the_other(late: int) -> None:
    """Which asks only then, and is refused: the other may have gone on before."""
    world = halves()
    world.no_storage = {late}
    cut_cable(world)
    while not world.holders:
        world.run_fairly(0.25, step=0.25)
    committed = max(world.commits)
    while max(world.commits) == committed:
        world.run_fairly(0.25, step=0.25)
    world.power_off(1 - late, 1 - late)
    world.no_storage = set()
    world.run_fairly(2 * SETTINGS.stall_timeout)
    assert world.out == {2 * late, 2 * late + 1}
    assert len(world.holders) == 1


def test_a_worker_that_loses_touch_leads_nobody_away_though_there_is_a_lease() -> None:
    world = halves(slack=1)
    world.break_up(next(c for c in world.connections.values() if c.owner == "w3" and c.member_uses))
    world.run_fairly(6 * SETTINGS.heartbeat_timeout)
    assert not world.out
    assert not world.holders


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.sets(st.integers(0, 4)), st.sampled_from([0.0, 2.0]))
def test_every_live_workers_wait_ends_whatever_happened(
    moves: Moves, workers: int, node_agents: bool, spares: set[int], grace: float
) -> None:
    explore(moves, world_of(workers, True, node_agents, spares, grace=grace, gated=GATED), to_the_end=True)


def no_quorum(patch: pytest.MonkeyPatch) -> None:
    """Anybody may go on."""
    patch.setattr(leadership, "may_go_on", lambda reached, bases, gone, own: bool(reached))


def lease_for_all(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the lease gets it."""
    patch.setattr(simulation, "may_take", lambda holder, claim: True)


def test_a_lease_that_everybody_gets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lease_for_all(monkeypatch)
    world = halves()
    cut_cable(world)
    with pytest.raises(PropertyViolated):
        world.run_fairly(60.0)


def same_number(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator numbers on after the last formed epoch, as if no rendezvous had been opened since."""
    add = Evidence.add

    def forgetful(self: Evidence, presentation: Presentation) -> None:
        before = self.highest_epoch
        add(self, presentation)
        self.highest_epoch = max(before, self.formed.epoch)

    patch.setattr(Evidence, "add", forgetful)


def eager_commit(patch: pytest.MonkeyPatch) -> None:
    """The first report commits."""
    done = Epochs.done

    def eager(self: Epochs, worker: Member, iteration: int, now: float) -> None:
        for member in self.formed.members:
            done(self, self._roster.workers[member], iteration, now)

    patch.setattr(Epochs, "done", eager)


def idle_may_tell(patch: pytest.MonkeyPatch) -> None:
    """Members without a part go on like any others."""
    patch.setattr(leadership, "can_tell", lambda reached, idle, missing, own: True)


def idle_for_good(patch: pytest.MonkeyPatch) -> None:
    """Who was idle once never holds up a commit again."""

    def idle(self: Roster, epoch: Formed) -> frozenset[int]:
        return frozenset(m for m in epoch.members if self.workers[m].idle_in)

    patch.setattr(Roster, "idle", idle)
    patch.setattr(Epochs, "is_ready", lambda self, w: w.done > self.committed or bool(w.idle_in))


def newcomers_decide(patch: pytest.MonkeyPatch) -> None:
    """What an epoch has committed is looked for in the reports of newcomers, too, who were not in it."""
    commit = Epochs.commit
    patch.setattr(Epochs, "commit", lambda self, reporters: commit(self, reporters | self.formed.members))


def tells_nothing(patch: pytest.MonkeyPatch) -> None:
    """A coordinator tells with the end of an epoch nothing of its commits."""
    revoke = Rendezvous.revoke_message
    patch.setattr(
        Rendezvous,
        "revoke_message",
        lambda self, *told, **how: structs.replace(revoke(self, *told, **how), committed=0),
    )


def hasty(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator ends the epoch before all have presented what they hold."""

    def gather(self: Coordinator, now: float) -> None:
        self.state = State.RENDEZVOUS
        self.roster.changes.append("a new coordinator leads")

    patch.setattr(Coordinator, "_gather", gather)


def hears_itself(patch: pytest.MonkeyPatch) -> None:
    """Whoever is told of a rendezvous is taken to have heard it."""
    patch.setattr(RevokeConfirmations, "_counts", lambda self, number: False)


PARTITIONED = [("partition", 1, 1), *[("run", 3, 0)] * 16]
"""One node reaches all candidates but the second, the other two only the second, for longer than a stall may last."""

TAKEOVER = [("kill coordinator", 0, 1), *[("downwards", 31, 0), ("upwards", 31, 0)] * 3, ("run", 3, 0), ("run", 3, 0)]
"""The coordinator dies; its members turn to the next one at once, before they do anything else."""

CRASHED = [("kill", 0, 0), ("upwards", 31, 0), ("downwards", 6, 0), ("work", 6, 0), ("upwards", 6, 0), *TAKEOVER]
"""A worker dies; the coordinator dies while the new plan is on its way."""

HALF_DONE = [("work", 1, 0), ("upwards", 1, 0), *TAKEOVER]
"""One worker has reported a step when the coordinator dies."""

SPARES_APART = [("partition", 1, 1), ("run", 2, 0), ("freeze", 0, 0), *[("run", 3, 0)] * 8, ("thaw", 0, 0)]
"""As partitioned, and the two nodes that reach the second candidate only have spares; the first commits for a while."""

PROMOTED = [("idle", 1, 0), ("kill", 2, 0), ("run", 2, 0), *HALF_DONE]
"""A spare gets a place, and has not reported a step when the coordinator dies."""

JOINED = [("work", 7, 0), ("upwards", 7, 0), ("newcomer", 0, 1), *TAKEOVER]
"""All have reported a step when the coordinator dies, and a newcomer comes to the next one."""

TOLD_ONE = [
    ("work", 7, 0), ("upwards", 7, 0), ("downwards", 1, 0), ("kill coordinator", 0, 1),
    *[("downwards", 6, 0), ("upwards", 6, 0)] * 3, *[("downwards", 7, 0), ("upwards", 7, 0)] * 3, ("run", 3, 0),
]  # fmt: skip
"""The coordinator dies when one worker has heard of a commit, and that one is the last to come to the next."""

HALF_TOLD = [
    ("kill", 0, 0),
    ("upwards", 31, 0),
    ("downwards", 1, 0),
    ("upwards", 1, 0),
    ("downwards", 31, 0),
    ("run", 3, 0),
]
"""A worker dies; one of the others hears that the epoch is over before the other."""

SCENARIOS: dict[str, tuple[Moves, set[int]]] = {
    "partitioned": (PARTITIONED, set()),
    "crashed": (CRASHED, set()),
    "half done": (HALF_DONE, set()),
    "spares apart": (SPARES_APART, {1, 2}),
    "promoted": (PROMOTED, {1, 2}),
    "joined": (JOINED, set()),
    "told one": (TOLD_ONE, set()),
    "half told": (HALF_TOLD, set()),
}


def scenario_world(spares: set[int]) -> World:
    return world_of(3, True, False, spares)


@pytest.mark.parametrize(
    ("bug", "scenario"),
    [
        (no_quorum, "partitioned"),
        (same_number, "crashed"),
        (eager_commit, "half done"),
        (idle_may_tell, "spares apart"),
        (idle_for_good, "promoted"),
        (newcomers_decide, "joined"),
        (tells_nothing, "told one"),
        (hears_itself, "half told"),
        (hasty, "told one"),
    ],
)
def test_a_deliberate_bug_in_the_coordinator_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves, spares = SCENARIOS[scenario]
    explore(moves, scenario_world(spares), to_the_end=True)
    bug(monkeypatch)
    with pytest.raises(PropertyViolated):
        explore(moves, scenario_world(spares), to_the_end=False)


DIES = [("busy", 0, 1), ("die", 0, 0), ("run", 3, 0)]
"""A worker dies while it computes, and its launcher tells so before the worker's connection ends."""


def told_though_it_lives(patch: pytest.MonkeyPatch) -> None:
    """The launcher tells a death without a fence: the worker goes on."""

    def tell(self: World, number: int, last_act: bool) -> None:
        launcher = self.node(f"w{number}")
        self._member_effects(launcher, self._launcher_of(number).ended(number, "SIGKILL"))

    patch.setattr(World, "tell_of_dying", tell)


def test_a_launcher_that_tells_the_death_of_a_worker_that_lives_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    explore(DIES, world := world_of(3, True, True), to_the_end=True)
    assert world.newest == {1, 2}
    told_though_it_lives(monkeypatch)
    with pytest.raises(PropertyViolated, match="are taken for dead, and live"):
        explore(DIES, world_of(3, True, True), to_the_end=False)


@pytest.mark.parametrize("state", ["live", "aside", "out", "abandoning", "newcomer", "returning"])
@pytest.mark.parametrize("last_act", [False, True])
def test_a_death_that_is_told_early_and_twice_counts_once_in_every_state(state: str, last_act: bool) -> None:
    """The others go on without the worker, and what it had sent before is not listened to."""
    world = world_of(3, True, True, grace=2.0)
    number = 2
    match state:
        case "aside" | "returning":
            world.busy.add(2)
            world.coordinators[0].roster.set_aside([2], "a test", world.now)
            world.run_fairly(2.0)
            assert world.newest == {0, 1}
            if state == "returning":
                world.busy.clear()
                world.act(2)
                connection = world.current["w2"]
                assert connection is not None
                while world.coordinators[0].roster.returning != {2}:
                    world.deliver(connection.number, "up")
        case "out":
            world.frozen.add("w2")
            world.coordinators[0].roster.exclude(world.coordinators[0].roster.workers[2], "a test", world.now)
            world.settle(0)
            world.frozen.clear()
        case "abandoning":
            connection = world.current["w2"]
            assert connection is not None
            connection.up.append(Abandon("a test"))
        case "newcomer":
            world.add_newcomer(2)
            number = 3
            world.act(3)
    world.tell_of_dying(number, last_act)
    while pairs := [pair for pair in world.deliverable() if world.connections[pair[0]].owner.startswith("node")]:
        world.deliver(*pairs[0])  # the launcher's word comes first
    assert world.coordinators[0].roster.workers[number].fate.value == "dead"
    committed = max(world.commits)
    world.run_fairly(4.0)
    assert world.newest == {0, 1, 2} - {number}
    assert max(world.commits) > committed
    assert world.coordinators[0].roster.workers[number].fate.value == "dead"
    faults = [record["kind"] for record in world.logged("fault") if record["worker"] == number]
    assert faults.count("dead") == (state != "newcomer"), faults


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_worker_lost_before_the_first_plan_ends_a_run_that_needs_all(needs_all: bool) -> None:
    world = World(3, settings=replace(SETTINGS, start_needs_all=needs_all))
    world.busy.add(2)
    world.run_fairly(2.0)
    world.kill_worker(1)
    world.busy.clear()
    world.run_fairly(3.0)
    assert world.order == ([] if needs_all else [2])
    assert [record["code"] for record in world.logged("stop")] == ([10] if needs_all else [])


@pytest.mark.parametrize("last_word", [True, False])
def test_a_launcher_that_outruns_a_workers_last_word_tells_of_no_fault(last_word: bool) -> None:
    """Without a last word it is one; here the connection stays open, as where a child of the process has it."""
    world = world_of(3, True, True)
    world.kill_worker(2, silently=True)
    world.report_death(2, "exit code 0")
    for _ in range(2):
        for number, direction in world.deliverable():
            if world.connections[number].owner == "node2":
                world.deliver(number, direction)
    if last_word:
        world._member_effects("w2", world.worker(2).leave())
    world.run_fairly(3.0)
    faults = [(record["worker"], record["kind"]) for record in world.logged("fault")]
    assert faults == ([] if last_word else [(2, "dead")])
    assert world.coordinators[0].roster.workers[2].fate.value == ("left" if last_word else "dead")


needs_spin = pytest.mark.skipif(
    bool(model.missing_tools()),
    reason=f"THE PROTOCOL'S MODEL IS NOT CHECKED: not installed: {', '.join(model.missing_tools())}",
)


def cases(configurations: tuple) -> list:
    return [pytest.param(configuration, id=configuration.what) for configuration in configurations]


@pytest.mark.slow
@needs_spin
@pytest.mark.parametrize("configuration", some("configurations", cases(model.CONFIGURATIONS), 3))
def test_the_protocol_holds_in_every_reachable_state(configuration: object) -> None:
    result = model.check(configuration)
    assert result.complete
    assert result.errors == 0


@pytest.mark.slow
@needs_spin
@pytest.mark.parametrize("mutant", some("mutants", cases(model.MUTANTS), 3))
def test_a_deliberate_bug_in_the_protocol_is_found(mutant: object) -> None:
    assert model.check(mutant).errors > 0
