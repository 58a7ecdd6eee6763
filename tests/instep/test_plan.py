"""What an epoch decides, the launch grid, the audit in the tail, and whose fault an exception is: pure."""

from __future__ import annotations

import platform
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.instep.errors import Disagreement
from recover_megatron.instep.faults import is_communication, signature
from recover_megatron.instep.gradients import EXTRAS, Tail
from recover_megatron.instep.grid import LaunchGrid, launch_grid
from recover_megatron.instep.plan import Status, decide
from recover_megatron.membership.words import LastWords
from recover_megatron.workload import assign, quotas

# ---- the launch grid


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.booleans())
def test_every_worker_has_one_place_and_tensor_ranks_are_neighbours(
    tensor: int, context: int, pipeline: int, lanes: int, replicas: int, pipeline_before_data: bool
) -> None:
    world = tensor * context * pipeline * lanes * replicas
    grid = launch_grid(
        world,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        lanes=lanes,
        pipeline_before_data=pipeline_before_data,
    )
    assert sorted(worker for replica in grid.replicas for worker in replica) == list(range(world)), grid
    assert grid.world == world
    for worker in range(world):
        replica, position = grid.place(worker)
        assert grid.replicas[replica][position] == worker
        assert grid.lane(worker) == position // (tensor * context * pipeline)
        assert grid.replicas[replica][position - position % tensor] == worker - position % tensor


def test_the_order_of_ranks_is_megatrons() -> None:
    sizes = {"tensor": 2, "context": 1, "pipeline": 2, "lanes": 1}
    assert launch_grid(8, **sizes).replicas == ((0, 1, 4, 5), (2, 3, 6, 7))  # type: ignore[arg-type]
    spread = launch_grid(8, **sizes, pipeline_before_data=True)  # type: ignore[arg-type]
    assert spread.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("world", [2, 6, 7])
def test_sizes_that_do_not_fill_the_world_are_refused(world: int) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        launch_grid(world, tensor=2, context=1, pipeline=2, lanes=1)


# ---- decisions


@st.composite
def meetings(draw: st.DrawFn) -> tuple[LaunchGrid, dict[int, Status], dict[int, tuple[int, ...]], int]:
    """A launch of which workers were lost, its replicas in a step, some of them not yet: what the members join with.

    Returns the grid, the statuses, what each whole replica that has begun ran, and the total.
    """
    replicas, positions, lanes = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    grid = launch_grid(replicas * positions * lanes, tensor=positions, context=1, pipeline=1, lanes=lanes)
    total = replicas * lanes * draw(st.integers(1, 4))
    every = list(range(replicas))
    shares = assign(total, lanes, every, quotas(total, every, multiple_of=lanes), replicas)
    dead = draw(st.sets(st.integers(0, grid.world - 1), max_size=grid.world))
    late = draw(st.sets(st.integers(0, replicas - 1)))
    statuses: dict[int, Status] = {}
    begun: dict[int, tuple[int, ...]] = {}
    for number, workers in enumerate(grid.replicas):
        whole = not dead & set(workers)
        ran = tuple(j for lane in shares[number] for j in lane)
        for worker in set(workers) - dead:
            # A worker of a broken replica may have noticed, or not yet.
            if not whole and draw(st.booleans()):
                statuses[worker] = Status(None, note="its replica is broken")
            elif number in late:
                statuses[worker] = Status(number, 6)
            else:
                statuses[worker] = Status(number, 7, True, total, ran)
        if whole and number not in late:
            begun[number] = ran
    return grid, statuses, begun, total


@given(meetings(), st.randoms(use_true_random=False))
def test_each_microbatch_is_in_one_gradient_or_is_run_again_by_one_replica(
    meeting: tuple[LaunchGrid, dict[int, Status], dict[int, tuple[int, ...]], int], source: random.Random
) -> None:
    grid, statuses, begun, total = meeting
    decision = decide(3, statuses, grid)
    whole = [n for n, workers in enumerate(grid.replicas) if set(workers) <= set(statuses)]
    whole = [n for n in whole if all(statuses[worker].replica == n for worker in grid.replicas[n])]
    assert list(decision.replicas) == whole
    assert sorted([*decision.workers(grid), *decision.spares]) == sorted(statuses)
    assert decision.step == bool(begun)
    if begun:
        again = [j for lanes in decision.rerun.values() for lane in lanes for j in lane]
        kept = [j for ran in begun.values() for j in ran]
        assert sorted([*kept, *again]) == list(range(total))
        assert set(decision.rerun) == set(whole)
        for lanes in decision.rerun.values():
            assert len(lanes) == grid.lanes
            assert len({len(lane) for lane in lanes}) == 1, "the lanes of a replica run in lock-step"
    else:
        assert not decision.rerun
    shuffled = list(statuses.items())
    source.shuffle(shuffled)
    assert decide(3, dict(shuffled), grid) == decision, "the answer may not depend on who reported first"


TWO = launch_grid(4, tensor=2, context=1, pipeline=1, lanes=1)


def of_both(first: Status, second: Status) -> dict[int, Status]:
    return {0: first, 1: first, 2: second, 3: second}


def test_what_a_broken_replica_ran_does_not_count() -> None:
    whole, broken = Status(0, 4, True, 4, (0, 2)), Status(1, 4, True, 4, (1, 3))
    decision = decide(2, {0: whole, 1: whole, 3: broken}, TWO)
    assert decision.replicas == (0,)
    assert decision.spares == (3,)
    assert decision.rerun == {0: [[1, 3]]}


def test_a_replica_that_has_not_begun_the_step_gets_more_than_those_that_wait_for_it() -> None:
    three = launch_grid(3, tensor=1, context=1, pipeline=1, lanes=1)
    decision = decide(2, {0: Status(0, 5, True, 9, (0, 3, 6)), 1: Status(1, 4), 2: Status(2, 4)}, three)
    assert {replica: len(lanes[0]) for replica, lanes in decision.rerun.items()} == {0: 0, 1: 3, 2: 3}


def test_a_decision_that_is_no_step_has_nothing_to_run_again() -> None:
    decision = decide(2, of_both(Status(0, 9), Status(1, 8, True, 4, (1, 3))), TWO)
    assert (decision.at, decision.step, decision.rerun) == (9, False, {})


def test_nobody_whole_is_a_decision_without_replicas() -> None:
    decision = decide(2, {1: Status(0, 3), 2: Status(None)}, TWO)
    assert decision.replicas == ()
    assert decision.spares == (1, 2)


def test_mates_of_whom_one_has_not_heard_of_the_commit_yet_are_one_replica() -> None:
    heard, not_yet = Status(0, 8, True, 4), Status(0, 7, True, 4, (0, 2))
    other = Status(1, 8, True, 4, (1, 3))
    decision = decide(2, {0: heard, 1: not_yet, 2: other, 3: other}, TWO)
    assert decision.at == 8
    assert decision.rerun == {0: [[0]], 1: [[2]]}


@pytest.mark.parametrize(
    "statuses",
    [
        of_both(Status(0, 7, True, 4, (0, 2)), Status(1, 7, True, 4, (1, 2))),
        of_both(Status(0, 7, True, 4, (0, 2)), Status(1, 7, True, 6, (1, 3))),
        of_both(Status(0, 7, True, 4, (0, 2)), Status(1, 7, True, 4, (1, 3))) | {1: Status(0, 7, True, 4, (0,))},
        of_both(Status(0, 7, True, 4, (0, 2)), Status(1, 7, True, 4, (1, 3))) | {1: Status(0, 6, True, 4, (0, 2))},
        of_both(Status(0, 9, True, 4), Status(1, 9, True, 4)) | {1: Status(0, 7)},
    ],
    ids=["counted twice", "another total", "mates ran different ids", "a mate is behind", "a mate is two behind"],
)
def test_states_that_no_order_of_events_explains_are_refused(statuses: dict[int, Status]) -> None:
    with pytest.raises(Disagreement):
        decide(2, statuses, TWO)


def test_a_status_is_the_same_after_its_way_through_json() -> None:
    status = Status(3, 12, True, 8, (1, 5), "because")
    assert Status.from_json(status.to_json()) == status
    with pytest.raises(Disagreement, match="does not know"):
        Status.from_json({**status.to_json(), "speed": 1})
    with pytest.raises(Disagreement, match="does not know"):
        Status.from_json({"replica": 1})


# ---- the tail


def summed(fills: list[tuple[int, list[int]]], total: int, share: float = 1.0) -> Tail:
    """The tail after the sum over workers that filled it so: (replica, ids)."""
    tails = [Tail((0,), total, 8, torch.device("cpu")) for _ in fills]
    for tail, (replica, ids) in zip(tails, fills, strict=True):
        tail.fill(replica, ids, torch.tensor([1.0, 2.0], dtype=torch.float64), share)
    result = Tail((0,), total, 8, torch.device("cpu"))
    result.bucket.flat.copy_(torch.stack([tail.bucket.flat for tail in tails]).sum(dim=0))
    return result


def test_the_tail_tells_who_counted_what_from_the_sum() -> None:
    tail = summed([(0, [0, 2]), (3, [1, 3])], 4)
    assert tail.verify() == {0: [0, 2], 3: [1, 3]}
    assert tail.extras[:3].tolist() == [2.0, 4.0, 0.0]


def test_several_workers_of_a_replica_in_one_column_count_together_as_one() -> None:
    tail = summed([(1, [0, 1, 2])] * 3 + [(6, [3])] * 3, 4, share=1 / 3)
    assert tail.verify() == {1: [0, 1, 2], 6: [3]}


@pytest.mark.parametrize("second", [[1], [1, 2, 3], []], ids=["one is missing", "one is there twice", "a share"])
def test_a_sum_in_which_an_id_is_not_counted_once_is_refused(second: list[int]) -> None:
    with pytest.raises(Disagreement, match="counted other than once"):
        summed([(0, [0, 2]), (1, second)], 4).verify()


def test_filling_again_leaves_what_is_finished_alone() -> None:
    tail = Tail((0,), 4, 1, torch.device("cpu"))
    tail.fill(0, [0, 1], torch.zeros(1, dtype=torch.float64), 1.0)
    tail.bucket.flat[:4] = 1.0
    tail.bucket.ledger.mark(range(0, 4), 1)
    tail.fill(0, [3], torch.ones(1, dtype=torch.float64), 1.0, seconds=0.5)
    assert tail.bucket.flat[:10].tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 0.5, 1]


def test_more_numbers_than_the_tail_has_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="room for"):
        Tail((0,), 4, 1, torch.device("cpu")).fill(0, [], torch.zeros(EXTRAS + 1, dtype=torch.float64), 1.0)


# ---- whose fault


@pytest.mark.parametrize(
    ("error", "communication"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), True),
        (dist.DistBackendError("NCCL error in: x.cpp"), True),
        (ConnectionResetError("by peer"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (Disagreement("counted twice"), False),
    ],
    ids=repr,
)
def test_only_errors_of_communication_may_be_another_workers_fault(error: Exception, communication: bool) -> None:
    assert is_communication(error) is communication


def test_the_same_fault_is_known_on_whatever_worker_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(worker: int, host: str, error: Exception) -> LastWords:
        monkeypatch.setattr(platform, "node", lambda: host)
        return LastWords(f"worker {worker}", worker, 4, 7, signature(error))

    nan = "Rank {}, node {}, device {}, iteration 4: Unexpected result nan (message='NaN\nin the loss')"
    first = words(1, "node-a", RuntimeError(nan.format(1, "node-a", 1)))
    assert words(12, "node-b", RuntimeError(nan.format(12, "node-b", 4))).repeats(first)
    assert not words(12, "node-b", ValueError(nan.format(12, "node-b", 4))).repeats(first)
    assert not words(12, "node-b", RuntimeError("out of memory")).repeats(first)
    assert not words(1, "node-a", RuntimeError(nan.format(1, "node-a", 1))).repeats(first), "a mate's is no second one"


def test_a_fault_that_a_loader_process_meets_is_the_one_met_on_the_spot() -> None:
    class Reads(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is rotten")

    with pytest.raises(ValueError, match="rotten") as on_the_spot:
        Reads()[0]
    batches = iter(torch.utils.data.DataLoader(Reads(), num_workers=1))
    with pytest.raises(ValueError, match="rotten") as in_a_process:
        next(batches)
    batches._shutdown_workers()  # the error holds them, and they hold our pipes, the one to the fork server, too
    assert signature(in_a_process.value) == signature(on_the_spot.value) == "ValueError: sample 0 is rotten"
