"""Broken edges between live workers: what they tell, what the plan makes of it, and that no run repeats for ever."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.instep.meeting.edges import MOST, TRUSTED, Edges, describe
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.workload.grid import LaunchGrid, launch_grid
from recover_megatron.workload.placement import between, edge, inside

PAIRS = launch_grid(6, tensor=2, context=1, pipeline=1, inner_ranks=1)
"""Three replicas of two: a host each."""
STAGES = launch_grid(6, tensor=1, context=1, pipeline=2, inner_ranks=1)
"""Three replicas (0, 3), (1, 4), (2, 5), on hosts of two workers each."""


def in_step(grid: LaunchGrid, unreached: Mapping[int, Collection[int]] = {}, **fields: object) -> dict[int, JoinStatus]:
    """All of the launch, in step 7, with the nominal share of 12 microbatches in their gradients."""
    statuses = {}
    for replica, workers in enumerate(grid.replicas):
        ran = tuple(range(replica, 12, len(grid.replicas)))
        for position, worker in enumerate(workers):
            statuses[worker] = JoinStatus(
                replica, position, at=7, step=True, total=12, ran=ran, iteration=7, peer_store=f"10.0.0.{worker} 1",
                node=f"h{worker // 2}", unreached=tuple(unreached.get(worker, ())),
            )  # fmt: skip
    return {worker: replace(status, **fields) for worker, status in statuses.items()}  # type: ignore[arg-type]


def counted(decision: Decision, statuses: Mapping[int, JoinStatus]) -> list[int]:
    """What is in the gradients once the plan is carried out."""
    ran = [j for workers in decision.grid.values() for j in statuses[workers[0]].ran]
    return sorted(
        ran + [j for inner_ranks in decision.rerun.values() for inner_rank in inner_ranks for j in inner_rank]
    )


def test_two_hosts_that_do_not_hear_each_other_cost_one_replica_and_no_microbatch() -> None:
    statuses = in_step(PAIRS, {2: (4, 5), 3: (4, 5), 4: (2, 3), 5: (2, 3)})
    decision = decide(3, statuses, PAIRS)
    assert decision.replicas == (0, 1)
    assert decision.left_out == {2: ((2, 4), (2, 5), (3, 4), (3, 5))}
    assert decision.spares == (4, 5)
    assert counted(decision, statuses) == list(range(12))
    text = "\n".join(describe(decision, statuses))
    assert "worker 2 on h1 (10.0.0.2) and worker 4 on h2 (10.0.0.4)" in text
    assert "replica 2 is left out" in text


def test_one_ends_word_is_enough() -> None:
    assert decide(3, in_step(PAIRS, {5: (2,)}), PAIRS).replicas == (0, 1)


def test_one_broken_edge_among_four_replicas_costs_one_of_them() -> None:
    grid = launch_grid(4, tensor=1, context=1, pipeline=1, inner_ranks=1)
    decision = decide(3, in_step(grid, {0: (1,)}), grid)
    assert decision.replicas == (0, 2, 3)
    assert decision.left_out == {1: ((0, 1),)}


def test_a_replica_that_cannot_talk_inside_is_none_and_is_not_put_together_again_over_the_same_edge() -> None:
    hosts = {worker: worker // 2 for worker in range(6)}
    deaf = {w: [o for o in range(6) if {hosts[w], hosts[o]} == {1, 2}] for w in range(6)}
    first = decide(3, in_step(STAGES, deaf), STAGES)
    assert first.replicas == (0,)
    assert set(first.left_out) == {1, 2}  # 2 is torn, and 1 cannot talk to 0 on all positions
    # At the boundary they are ready: 1 and 2 hear everybody that works, 4 and 5 do not hear worker 3.
    spares = {
        worker: replace(status, replica=None, ready=True, step=False, ran=())
        for worker, status in in_step(STAGES, deaf, at=8, version=7).items()
    }
    working = {w: replace(spares[w], replica=0, ready=False, boundary=True) for w in (0, 3)}
    second = decide(4, {**spares, **working}, STAGES)
    assert second.replicas == (0,)
    assert second.rebuild in ({1: 1}, {2: 1})  # one of those two is to become a second stage
    moved = min(second.rebuild)
    third = decide(5, {**spares, **working, moved: replace(spares[moved], position=1)}, STAGES)
    assert third.replicas == (0, 1)
    assert sorted(third.grid[1]) == [1, 2]
    assert not inside(third.grid, third.broken)


@given(st.sampled_from([PAIRS, STAGES, launch_grid(6, tensor=1, context=1, pipeline=1, inner_ranks=1)]), st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_broken_who_works_together_can_and_every_microbatch_counts_once(
    grid: LaunchGrid, data: st.DataObject
) -> None:
    pairs = [(one, other) for one in range(6) for other in range(6) if one != other]
    told = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8))
    unreached = {w: [other for one, other in told if one == w] for w in range(6)}
    statuses = in_step(grid, unreached)
    decision = decide(3, statuses, grid)
    broken = {edge(*pair) for pair in told}
    assert not inside(decision.grid, broken)
    assert not between(decision.grid, broken)
    if decision.grid:
        assert counted(decision, statuses) == list(range(12))
    assert decision == decide(3, dict(reversed(statuses.items())), grid)


# ---- how a worker comes to tell


class Road:
    """Stands in for trying: who cannot be reached, and whom was asked for."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken
        self.tried: list[set[int]] = []

    def __call__(self, addresses: Mapping[int, str], seconds: float, gone: Callable[[], Collection[int]]) -> set[int]:
        self.tried.append(set(addresses))
        return self.broken & set(addresses)


def tried_by_two(broken: set[int]) -> tuple[Road, Edges]:
    """The roads of worker 2."""
    unreachable = Road(broken)
    return unreachable, Edges(2, unreachable, pause=lambda seconds: None)


def planned(edges: Edges, epoch: int, at: int) -> None:
    """All have met in step ``at``, and the decision before it is committed."""
    statuses = in_step(PAIRS, at=at)
    edges.record(decide(epoch, statuses, PAIRS), statuses, committed=at - 1)


def epochs(edges: Edges, count: int) -> list[tuple[int, ...]]:
    """So many epochs at step 7 that end without a death; what was told for each."""
    told = []
    for number in range(count):
        told.append(edges.look(7, lambda: frozenset(range(6))))
        planned(edges, number, at=7)
    return told


def test_after_the_second_epoch_at_one_decision_everybody_is_tried() -> None:
    unreachable, edges = tried_by_two({4})
    planned(edges, 1, at=5)
    assert epochs(edges, 3) == [(), (), (4,)]
    assert unreachable.tried == [{0, 1, 3, 4, 5}]


def test_with_whom_a_connection_failed_is_tried_at_once() -> None:
    unreachable, edges = tried_by_two({4})
    planned(edges, 1, at=5)
    edges.noticed(4)
    assert epochs(edges, 1) == [(4,)]
    assert unreachable.tried == [{4}]


def test_who_was_not_reached_is_tried_again_and_a_mended_road_is_used() -> None:
    unreachable, edges = tried_by_two({4})
    assert epochs(edges, 3)[-1] == (4,)
    unreachable.broken = set()
    planned(edges, 5, at=9)
    assert edges.look(11, lambda: frozenset(range(6))) == ()


def test_a_road_that_lets_connections_be_made_but_no_more_is_left_out_after_some_epochs() -> None:
    """Trying finds nothing: what the connections themselves failed with counts in the end."""
    _, edges = tried_by_two(set())
    edges.noticed(4)
    told = []
    for _ in range(TRUSTED + 3):
        told += epochs(edges, 1)
        edges.noticed(4)
    assert told[: TRUSTED + 1] == [()] * (TRUSTED + 1)
    assert told[-1] == (4,)


def test_epochs_at_one_decision_are_counted_to_a_bound_and_any_progress_begins_again() -> None:
    _, edges = tried_by_two(set())
    epochs(edges, MOST + 1)
    assert edges.tries == MOST
    planned(edges, 99, at=8)
    assert edges.tries == 0


def test_who_dies_meanwhile_is_tried_by_nobody() -> None:
    unreachable, edges = tried_by_two({4})
    epochs(edges, 1)
    edges.noticed(4)
    assert edges.look(7, lambda: frozenset({0, 1, 2, 3, 5})) == ()
    assert not any(4 in tried for tried in unreachable.tried)
