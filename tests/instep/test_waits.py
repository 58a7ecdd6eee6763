"""Every live worker's wait ends: whatever the members of an epoch join with, in the end all have a place, or the run
ends, or those who have none are of no use to it.  Pure: what the workers do between two epochs is played.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.instep.decision import Beyond, Decision, JoinStatus, Rules
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.workload.grid import LaunchGrid, launch_grid
from tests.instep.test_plan import THREE, TWO, orphan

EPOCHS = 12
"""More than any of these runs needs until nothing changes any more."""
Statuses = dict[int, JoinStatus]


@dataclass(frozen=True)
class Adjusted:
    """How a run stands when nobody asks for another epoch."""

    decision: Decision
    further: Decision | None
    """What another epoch would decide, at a boundary, of the same workers; None: the run has ended."""


def settle(statuses: Statuses, grid: LaunchGrid, rules: Rules | None = None, beyond: Beyond | None = None) -> Adjusted:
    """Go from epoch to epoch as long as a worker has something to do that ends in the next one."""
    epochs = range(3, 3 + EPOCHS)
    for epoch in epochs:
        decision = decide(epoch, statuses, grid, rules, beyond=beyond)
        if decision.enough < 1:
            return Adjusted(decision, None)
        then = {worker: after(decision, worker, status) for worker, status in statuses.items()}
        there = {worker: replace(status, boundary=True) for worker, status in then.items() if placed(status)}
        arrived = any(status.ready and not statuses[worker].ready for worker, status in then.items())
        if not (arrived or decision.rebuild or decision.regroup):
            return Adjusted(decision, decide(epoch + 1, then | there, grid, rules, beyond=beyond))
        statuses = then | there if decision.regroup else then
    raise AssertionError(f"after {EPOCHS} epochs there is still something to do: {decision}")


def placed(status: JoinStatus) -> bool:
    return status.replica is not None


def after(decision: Decision, worker: int, status: JoinStatus) -> JoinStatus:
    """What a worker joins the next epoch with when it has done what ``decision`` has it do."""
    if (place := decision.place(worker)) is not None:
        replica, position = place
        now = {"at": decision.at + 1, "iteration": decision.iteration + 1, "version": decision.iteration}
        of = {"timeline": decision.timeline, "state_of": decision.timeline[0]}
        return JoinStatus(replica, position, node=status.node, unreached=status.unreached, **now, **of)
    if worker in decision.rebuild:
        return replace(status, position=decision.rebuild[worker], version=None, state_of=0)
    out = status.position is None and not status.ready  # it waits for the end of the run alone
    return replace(status, replica=None, ready=not out, building=False)


@st.composite
def losses(draw: st.DrawFn) -> tuple[Statuses, LaunchGrid, Rules]:
    """Whole replicas at a step, workers of broken ones on their way or out of the training, and newcomers."""
    replicas, tensor, pipeline = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = replicas * tensor * pipeline
    grid = launch_grid(size, tensor=tensor, context=1, pipeline=pipeline, inner_ranks=1)
    grid = grid.with_room_for(draw(st.integers(0, 5)))
    nodes, ready = st.sampled_from("ab"), st.booleans()
    checkpoints = draw(st.sampled_from([(), ((4, "save"),)]))
    statuses: Statuses = {}
    for replica, workers in enumerate(grid.replicas[:replicas]):
        whole = draw(st.sampled_from([True, False, False, False]))
        for position, worker in enumerate(workers):
            if whole:
                statuses[worker] = JoinStatus(replica, position, 7, iteration=7, version=6, node=draw(nodes))
            elif draw(st.sampled_from([True, True, False])):
                state = {"version": draw(st.sampled_from([None, 5, 6, 6, 7])), "ready": draw(ready)}
                statuses[worker] = orphan(position, node=draw(nodes), aside=draw(st.booleans()), **state)
    for newcomer in range(grid.world, grid.world + draw(st.integers(0, 6))):
        position = draw(st.one_of(st.none(), st.integers(0, grid.size - 1)))
        statuses[newcomer] = JoinStatus(None, position, ready=draw(ready), node=draw(nodes))
    if len(statuses) > 1 and draw(st.booleans()):
        one, other = draw(st.permutations(sorted(statuses)))[:2]
        statuses[one] = replace(statuses[one], unreached=(other,))
    told = {worker: replace(status, checkpoints=checkpoints) for worker, status in statuses.items()}
    return told, grid, Rules(cross_node=draw(st.booleans()), spares=draw(st.integers(0, 2)))


@given(losses(), st.sampled_from([Beyond(), Beyond(committed=9, seen=8)]))
def test_once_all_are_ready_a_plan_or_the_end_follows_and_nobody_waits_for_a_place_that_is_free(
    meeting: tuple[Statuses, LaunchGrid, Rules], beyond: Beyond
) -> None:
    statuses, grid, rules = meeting
    settled = settle(statuses, grid, rules, beyond)
    if settled.further is None:
        return
    assert settled.decision.grid, "the run goes on, and nobody computes or does anything that ends"
    if not settled.decision.broken:  # whom a worker does not reach is tried anew in every epoch
        assert (settled.further.fresh, dict(settled.further.rebuild)) == ((), {})


def new(position: int | None) -> JoinStatus:
    return JoinStatus(None, position, ready=True)


@pytest.mark.parametrize(
    ("newcomers", "grid", "replicas"),
    [
        ({4: new(0), 5: new(1)}, TWO, 2),
        ({4: new(0), 5: new(0)}, TWO, 2),
        ({4: new(None), 5: new(None)}, TWO, 2),
        ({4: new(1), 5: new(0), 6: new(None), 7: new(1)}, THREE, 3),
    ],
    ids=["with their models", "both with the same", "without a model", "for two more replicas"],
)
def test_newcomers_that_are_ready_when_all_replicas_break_come_in_with_the_next_boundary(
    newcomers: Statuses, grid: LaunchGrid, replicas: int
) -> None:
    """The survivors of two broken replicas are one; nobody would ask for the epoch that has the newcomers in it."""
    survivors = {0: orphan(0), 3: orphan(1)}
    shifted = {worker + grid.world - 4: status for worker, status in newcomers.items()}
    first = decide(5, survivors | shifted, grid)
    assert first.grid == {0: (0, 3)}
    assert first.regroup or first.rebuild
    settled = settle(survivors | shifted, grid)
    assert len(settled.decision.grid) == replicas


def test_so_they_do_after_a_rollback() -> None:
    """All but worker 6 make the new replica; it learns at once what to build, and with whom."""
    kept = {"checkpoints": ((4, "save"),)}
    survivors = {0: orphan(0, version=None, **kept), 1: orphan(1, version=None, **kept)}
    decision = decide(5, survivors | {4: new(0), 5: new(0)}, TWO)
    assert decision.rollback is not None
    assert (len(decision.grid), list(decision.rebuild.values())) == (1, [1])
