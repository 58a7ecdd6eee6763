"""Any order of deliveries, deaths, freezes and partitions: the real state machines keep the protocol's promises."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation import SETTINGS, World

from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.member import Stage

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 30), st.integers(1, 6)),
        st.tuples(st.just("act"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("advance"), st.sampled_from([1, 3, 6, 12]), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 4), st.integers(0, 1)),
        st.tuples(st.just("report"), st.just(0), st.just(0)),
        st.tuples(st.just("kill coordinator"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("freeze"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("freeze coordinator"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("thaw"), st.just(0), st.just(0)),
        st.tuples(st.just("block"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("heal"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("partition"), st.integers(0, 7), st.integers(0, 2)),
        st.tuples(st.just("work"), st.integers(1, 31), st.just(0)),
        st.tuples(st.just("upwards"), st.integers(0, 31), st.just(0)),
        st.tuples(st.just("downwards"), st.integers(0, 31), st.just(0)),
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
                world.kill_coordinator(a)
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
        case "heal":
            if world.blocked:
                world.blocked.remove(sorted(world.blocked)[a % len(world.blocked)])


def every_wait_ends(world: World) -> None:
    """After a long, fair time every worker is dead, out, or has seen steps commit lately."""
    world.run_fairly(2 * SETTINGS.start_timeout)
    before = {w: world.worker(w).committed for w in world.node_of}
    world.run_fairly(10 * SETTINGS.heartbeat_timeout)
    for w in world.node_of:
        if world.running(f"w{w}") and world.worker(w).stage is not Stage.OUT:
            assert world.worker(w).committed > before[w], f"worker {w} waits for ever: {world.worker(w).__dict__}"


def explore(moves: list[tuple[str, int, int]], world: World, to_the_end: bool) -> None:
    for move in moves:
        play(world, move)
    if to_the_end:
        every_wait_ends(world)


def world_of(workers: int, started: bool, witnesses: bool, coordinator: type[Coordinator] = Coordinator) -> World:
    world = World(workers, candidates=3, nodes=3, witnesses=witnesses, coordinator=coordinator)
    if started:
        world.run_fairly(1.0)
    return world


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans(), st.booleans())
def test_one_lineage_and_no_decision_taken_twice_whatever_happens(
    moves: list[tuple[str, int, int]], workers: int, started: bool, witnesses: bool
) -> None:
    explore(moves, world_of(workers, started, witnesses), to_the_end=False)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(MOVES, st.integers(3, 5), st.booleans())
def test_every_live_workers_wait_ends_whatever_happened(
    moves: list[tuple[str, int, int]], workers: int, witnesses: bool
) -> None:
    explore(moves, world_of(workers, True, witnesses), to_the_end=True)
