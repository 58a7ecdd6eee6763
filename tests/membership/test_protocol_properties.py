"""Any order of deliveries, deaths, freezes and partitions: the real state machines keep the protocol's promises."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation import SETTINGS, PropertyViolated, World

from recover_megatron.membership import leadership
from recover_megatron.membership.coordinator import Coordinator, State
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.failover import Evidence
from recover_megatron.membership.follower import Stage
from recover_megatron.membership.records import Formed, Presentation
from recover_megatron.membership.roster import Member, Roster

MOST_WORKERS = 8
Moves = list[tuple[str, int, int]]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 30), st.integers(1, 6)),
        st.tuples(st.just("act"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("advance"), st.sampled_from([1, 3, 6, 12]), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 6), st.integers(0, 1)),
        st.tuples(st.just("report"), st.just(0), st.just(0)),
        st.tuples(st.just("kill coordinator"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("restart coordinator"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("idle"), st.integers(0, 4), st.integers(0, 1)),
        st.tuples(st.just("freeze"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("freeze coordinator"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("thaw"), st.just(0), st.just(0)),
        st.tuples(st.just("block"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("heal"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("partition"), st.integers(0, 7), st.integers(0, 2)),
        st.tuples(st.just("work"), st.integers(1, 127), st.just(0)),
        st.tuples(st.just("upwards"), st.integers(0, 127), st.just(0)),
        st.tuples(st.just("downwards"), st.integers(0, 127), st.just(0)),
        st.tuples(st.just("newcomer"), st.integers(0, 2), st.integers(0, 1)),
    ),
    min_size=5,
    max_size=60,
)


def play(world: World, move: tuple[str, int, int]) -> None:
    """One move; moves that make no sense in the present state do nothing."""
    kind, a, b = move
    workers = len(world.node_of)
    match kind:
        case "deliver":
            for _ in range(b):
                if pairs := world.deliverable():
                    world.deliver(*pairs[a % len(pairs)])
        case "act":
            world.act(a % workers)
        case "advance":
            world.advance(float(a))
        case "run":
            world.run_fairly(0.5 + a)
        case "kill":
            if world.running(f"w{a % workers}"):
                world.kill_worker(a % workers, silently=bool(b))
        case "report":
            for number in list(world.unreported):
                world.report_death(number)
        case "kill coordinator":
            # the run does not promise to outlive all of its candidates
            if len(world.coordinators) > 1:
                world.kill_coordinator(a, lose=bool(b))
        case "restart coordinator":
            world.start_coordinator(a)
        case "idle":
            (world.spares.add if b else world.spares.discard)(a % workers)
        case "freeze":
            if world.running(f"w{a % workers}"):
                world.frozen.add(f"w{a % workers}")
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
            for w in range(workers):
                if a >> w & 1:
                    world.act(w)
        case "upwards" | "downwards":  # for the workers of the set
            for number, direction in world.deliverable():
                owner = world.connections[number].owner
                chosen = owner.startswith("w") and a >> int(owner[1:]) & 1
                if direction == kind.removesuffix("wards") and chosen:
                    queue = getattr(world.connections[number], direction)
                    while queue and (number, direction) in world.deliverable():
                        world.deliver(number, direction)
        case "newcomer":  # b: it joins at once
            if workers < MOST_WORKERS:
                world.add_newcomer(a)
                if b:
                    world.act(workers)
        case "heal":
            if world.blocked:
                world.blocked.remove(sorted(world.blocked)[a % len(world.blocked)])


def every_wait_ends(world: World) -> None:
    """After a long, fair time every worker is dead, out, or has seen steps commit lately."""
    world.run_fairly(2 * SETTINGS.start_timeout)
    world.ask_for_places()
    world.run_fairly(10 * SETTINGS.heartbeat_timeout)
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


def world_of(workers: int, started: bool, node_agents: bool, spares: Collection[int] = ()) -> World:
    world = World(workers, candidates=3, nodes=3, node_agents=node_agents)
    world.spares = {spare for spare in spares if spare < workers}
    if started:
        world.run_fairly(4.0)
        assert world.order == [1]
    return world


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.booleans(), st.sets(st.integers(0, 4)))
def test_one_lineage_and_no_decision_taken_twice_whatever_happens(
    moves: Moves, workers: int, started: bool, node_agents: bool, spares: set[int]
) -> None:
    explore(moves, world_of(workers, started, node_agents, spares), to_the_end=False)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.sets(st.integers(0, 4)))
def test_every_live_workers_wait_ends_whatever_happened(
    moves: Moves, workers: int, node_agents: bool, spares: set[int]
) -> None:
    explore(moves, world_of(workers, True, node_agents, spares), to_the_end=True)


def no_quorum(patch: pytest.MonkeyPatch) -> None:
    """Anybody may go on."""
    patch.setattr(leadership, "may_go_on", lambda reached, bases, gone, own: bool(reached))


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
    patch.setattr(Rendezvous, "revoke_message", lambda self, reason: {**revoke(self, reason), "committed": 0})


def hasty(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator ends the epoch before all have presented what they hold."""

    def gather(self: Coordinator, now: float) -> None:
        self.state = State.RENDEZVOUS
        self.roster.changes.append("a new coordinator leads")

    patch.setattr(Coordinator, "_gather", gather)


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

SCENARIOS: dict[str, tuple[Moves, set[int]]] = {
    "partitioned": (PARTITIONED, set()),
    "crashed": (CRASHED, set()),
    "half done": (HALF_DONE, set()),
    "spares apart": (SPARES_APART, {1, 2}),
    "promoted": (PROMOTED, {1, 2}),
    "joined": (JOINED, set()),
    "told one": (TOLD_ONE, set()),
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
