"""No single loss takes all copies of anything, wherever copies can be placed so; what it costs to lose a node."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.instep.decision import Decision, JoinStatus, Rules
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.workload.domains import (
    CHECKPOINT,
    SNAPSHOTS,
    Training,
    domain_losses,
    drain,
    leaving,
    names,
    on_nodes,
    replicas_of,
    stride_of,
    touched_by,
)
from recover_megatron.workload.grid import LaunchGrid, launch_grid
from recover_megatron.workload.shards import Layout
from recover_megatron.workload.snapshots import copies

GPUS = 8
Copies = Mapping[int, Sequence[int]]


def touched_in(grid: LaunchGrid, gpus: int = GPUS, nodes_of_a_rack: int = 0) -> dict[int, frozenset[str]]:
    """Of a launch in rank order on nodes of ``gpus``."""

    def domains(slot: int) -> list[str]:
        node = slot // gpus
        return [f"node {node}", *([f"rack {node // nodes_of_a_rack}"] if nodes_of_a_rack else [])]

    return touched_by(grid.replicas, {slot: domains(slot) for replica in grid.replicas for slot in replica})


def columns(grid: LaunchGrid) -> list[tuple[int, ...]]:
    """Of each position: one worker a replica."""
    return [tuple(replica[position] for replica in grid.replicas) for position in range(grid.size)]


def survives_any(column: Sequence[int], touched: Mapping[int, frozenset[str]], copies: int, stride: int) -> bool:
    """After the loss of any domain a holder of each unit is left in a replica that is whole: none touches it."""
    layout = Layout(tuple(column), tuple(column), copies - 1, stride)
    return not any(frozenset.intersection(*map(touched.__getitem__, layout.holders(unit))) for unit in layout.units)


LAYOUTS = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2)))
NODES = (2, 3, 4, 6, 8, 16, 33, 64, 512)


@pytest.mark.parametrize("shadows", [1, 2])
@pytest.mark.parametrize("pipeline_first", [False, True])
def test_no_single_node_takes_all_copies_of_a_shard_where_the_column_spans_nodes(
    shadows: int, pipeline_first: bool
) -> None:
    """All TP, PP, CP, EP over both orders of ranks, 2 to 512 nodes of 8."""
    seen = 0
    for (tensor, pipeline, context, inner), nodes in itertools.product(LAYOUTS, NODES):
        world, size = nodes * GPUS, tensor * pipeline * context * inner
        if world % size or world // size < 2 or (nodes > 64 and size < 32):
            continue
        grid = launch_grid(
            world, tensor=tensor, context=context, pipeline=pipeline, inner_ranks=inner,
            pipeline_before_data=pipeline_first,
        )  # fmt: skip
        touched = touched_in(grid)
        column = columns(grid)[0]
        stride = stride_of(column, touched, shadows + 1)
        survives = survives_any(column, touched, shadows + 1, stride)
        most = max(sum(node in touched[slot] for slot in column) for node in frozenset().union(*touched.values()))
        if 2 * most <= len(column):  # else some two holders need one node, whatever is done
            seen += 1
            assert survives, (tensor, pipeline, context, inner, nodes, stride)
            assert stride <= most
    assert seen > 100


def test_who_follows_keeps_the_copy_where_that_is_good_enough_or_nothing_better_is_to_be_had() -> None:
    apart = {worker: frozenset({f"node {worker % 2}"}) for worker in range(6)}
    assert stride_of(range(6), apart, 2) == 1
    assert stride_of(range(6), dict.fromkeys(range(6), frozenset()), 2) == 1
    assert stride_of(range(6), dict.fromkeys(range(6), frozenset({"node a"})), 2) == 1
    assert stride_of([0], {0: frozenset()}, 2) == 1


def test_where_racks_can_be_kept_apart_they_are_and_else_nodes() -> None:
    grid = launch_grid(8 * GPUS, tensor=2, context=1, pipeline=1, inner_ranks=1)
    column = columns(grid)[0]
    two_racks = touched_in(grid, nodes_of_a_rack=4)
    assert stride_of(column, two_racks, 2) == 16
    assert survives_any(column, two_racks, 2, 16)
    one_rack = touched_in(grid, nodes_of_a_rack=8)
    assert stride_of(column, one_rack, 2) == 4
    assert survives_any(column, touched_in(grid), 2, 4)


@pytest.mark.parametrize(("copies", "rack", "stride"), [(2, 32, 256), (3, 32, 128), (2, 625, 5000), (3, 625, 2500)])
def test_racks_of_ten_thousand_are_kept_apart_by_no_longer_way_than_they_need(
    copies: int, rack: int, stride: int
) -> None:
    """No smaller stride than a rack's row takes its copies out of it."""
    touched = {slot: frozenset({f"node {slot // 8}", f"rack {slot // 8 // rack}"}) for slot in range(10_000)}
    found = stride_of(range(10_000), touched, copies)
    assert found == stride
    assert survives_any(range(10_000), touched, copies, found)


def test_a_present_stride_stays_as_long_as_no_other_is_better() -> None:
    touched = {worker: frozenset({f"node {worker // 2}"}) for worker in range(8)}
    assert stride_of(range(8), touched, 2, before=3) == 3
    assert stride_of(range(8), touched, 2, before=1) == 2
    assert stride_of(range(8), touched, 3, before=4) != 4  # two hops lead back to where they began


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 3), st.integers(1, 13))
def test_the_copies_of_a_unit_are_on_different_workers_and_asking_again_changes_nothing(
    nodes: list[int], copies: int, before: int
) -> None:
    touched = {worker: frozenset({f"node {node}"}) for worker, node in enumerate(nodes)}
    ring = tuple(range(len(nodes)))
    stride = stride_of(ring, touched, copies, before)
    assert stride_of(ring, touched, copies, stride) == stride
    layout = Layout(ring, ring, copies - 1, stride)
    for unit in layout.units:
        assert len(set(layout.holders(unit))) == len(layout.holders(unit)) == min(copies, len(ring))
        assert all(unit in layout.held(worker) for worker in layout.holders(unit))


def test_a_worker_is_lost_with_its_node_and_with_what_the_user_or_slurm_says() -> None:
    assert names("tux3", "", {}) == ("node tux3",)
    assert names("tux3", "rack 7, hall b", {}) == ("node tux3", "domain rack 7", "domain hall b")
    slurm = {"SLURM_TOPOLOGY_ADDR": "s0.s4.tux3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert names("tux3-0", "", slurm) == ("node tux3-0", "switch s0", "switch s0.s4")
    assert names("tux3-0", "r7", slurm) == ("node tux3-0", "domain r7")
    assert names("tux3", "", {"SLURM_TOPOLOGY_ADDR": "tux3", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ("node tux3",)


def test_a_replica_touches_what_any_of_its_workers_stands_in() -> None:
    touched = touched_by([(0, 1), (2, 3)], {0: ["node a"], 1: ["node b"], 2: ["node b"]})
    assert touched[0] == touched[1] == {"node a", "node b"}
    assert touched[2] == touched[3] == {"node b"}


NAMES = st.sampled_from("abcd")


@given(
    st.lists(NAMES, min_size=1, max_size=12),
    st.integers(1, 3),
    st.lists(NAMES, unique=True),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
)
def test_what_is_accepted_leaves_enough_and_what_is_refused_would_not(
    nodes_of: list[str], size: int, wanted: list[str], fewest: int, shards: int
) -> None:
    nodes = dict(enumerate(nodes_of))
    replicas = {r: tuple(range(r * size, (r + 1) * size)) for r in range(len(nodes) // size)}
    found = drain(wanted, nodes, replicas, fewest, shards)
    assert sorted([*found.accepted, *found.refused]) == sorted(wanted)

    def enough(draining: set[str]) -> bool:
        staying = set(replicas) - leaving(replicas, nodes, draining)
        return len(staying) >= fewest and (
            not shards or {r % shards for r in staying} == {r % shards for r in replicas}
        )

    there = {node for node in found.accepted if node in nodes_of}
    assert not there or enough(there)
    assert all(node in nodes_of and not enough(there | {node}) for node in found.refused)


@pytest.mark.parametrize(
    ("replicas", "fewest", "shards", "why"),
    [
        ({}, 1, 0, "no replica is complete now"),
        ({0: (0,), 1: (1,)}, 1, 0, "no complete replica would be left, one is required: 2 of 2 have workers on a"),
        ({0: (0,), 1: (2,)}, 2, 0, "1 of 2 complete replicas would be left, 2 are required (--recover-min-replicas)"),
        ({0: (0,), 1: (2,), 2: (1,), 3: (3,)}, 1, 2, "would not hold shards [0] of the optimizer state"),
    ],
)
def test_the_reason_is_told(replicas: dict[int, tuple[int, ...]], fewest: int, shards: int, why: str) -> None:
    found = drain(["a"], {0: "a", 1: "a", 2: "b", 3: "b"}, replicas, fewest, shards)
    assert (found.accepted, list(found.refused)) == ((), ["a"])
    assert why in found.refused["a"]


def test_a_node_on_which_nobody_lives_is_drained_whatever_is_left() -> None:
    assert drain(["gone", "a"], {0: "a"}, {}).accepted == ("gone",)


POSITIONS, COPIES = " of {} positions", "all copies of some shards"
LAUNCHES = {
    "a replica a node is all that a node takes": (Training(tensor=8), 32, 8, 1, 3, ""),
    "in the default order a node takes a stage of every replica": (
        Training(tensor=2, pipeline=4), 32, 8, 4, 0, "all workers of 2" + POSITIONS.format(8),
    ),
    "in blocks it takes a replica": (Training(tensor=2, pipeline=4, pipeline_before_data=True), 32, 8, 1, 3, ""),
    # The middle node has a half of each stage.
    "where every replica is broken orphans of all positions begin again": (
        Training(tensor=2, pipeline=2), 24, 8, 4, 2, "",
    ),
    "where the only replica is broken, too": (Training(tensor=4, pipeline=2, inner_ranks=2), 32, 8, 1, 1, ""),
    "the only replica of a wide job goes with any node": (
        Training(inner_ranks=16, experts=True), 16, 8, 1, 0, POSITIONS.format(16),
    ),
    "... and its shards": (Training(inner_ranks=16, experts=True, spread=True), 16, 8, 1, 0, COPIES),
    # Shard s of 8 of 16 workers is on ranks s and s + 8: of two nodes each has one copy.
    "with several instances copies are where Megatron puts them": (Training(spread=True, instances=2), 16, 8, 8, 8, ""),
    "the only node takes all": (Training(), 16, 16, 16, 0, "every worker"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_loss_of_any_node_costs(name: str) -> None:
    training, world, per_node, broken, whole, lost = LAUNCHES[name]
    losses = domain_losses(training, on_nodes(world, per_node))
    assert [(loss.workers, loss.broken, loss.whole) for loss in losses] == [(per_node, broken, whole)] * len(losses)
    assert len(losses) == world // per_node
    assert all(lost in loss.lost if lost else not loss.lost for loss in losses)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_is_said_to_end_exactly_where_no_state_is_left(spread: bool, blocks: bool) -> None:
    """By the definition: plain, a position of which nobody is left; spread, nothing can be better than that."""
    for tensor, pipeline, nodes, per_node in itertools.product((1, 2, 4), (1, 2, 4), (2, 3, 4), (4, 8)):
        world = nodes * per_node
        if world % (tensor * pipeline):
            continue
        training = Training(tensor=tensor, pipeline=pipeline, pipeline_before_data=blocks, spread=spread)
        replicas = replicas_of(
            world, tensor=tensor, context=1, pipeline=pipeline, inner_ranks=1, pipeline_before_data=blocks
        )
        for loss in domain_losses(training, on_nodes(world, per_node)):
            node = int(loss.domain.removeprefix("node "))
            gone = set(range(node * per_node, (node + 1) * per_node))
            whole = [workers for workers in replicas if not gone & set(workers)]
            assert loss.workers == len(gone)
            assert loss.broken == len(replicas) - len(whole)
            if whole and not spread:
                assert (loss.whole, loss.lost) == (len(whole), "")
            if not whole:
                nobody = any(gone >= set(column) for column in zip(*replicas, strict=True))
                assert bool(loss.lost) == (nobody or spread)


def test_with_snapshots_in_memory_the_run_goes_back_where_a_replica_is_left() -> None:
    losses = domain_losses(Training(tensor=2, pipeline=4, memory=True), on_nodes(32, 8))
    assert all(loss.back and loss.whole == 3 for loss in losses)
    assert all(loss.lost for loss in losses)
    assert not any(loss.back for loss in domain_losses(Training(tensor=8, memory=True), on_nodes(32, 8))), (
        "no state is lost"
    )
    few = domain_losses(Training(inner_ranks=16, memory=True), on_nodes(16, 8))
    assert all(loss.waits and not loss.back for loss in few), "too few are left"
    assert not any(loss.waits for loss in losses)


def left_of(
    launch: LaunchGrid, domains: Sequence[Sequence[str]], name: str, kept: Copies, rules: Rules, checkpoint: bool
) -> list[Decision]:
    """What the epochs decide after the loss of a domain, until nothing changes any more; of workers in lock-step."""
    there = {
        worker: [(part, 5, 0, 0, len(kept)) for part, its in kept.items() if worker in its]
        for worker in range(len(domains))
    }
    statuses: dict[int, JoinStatus] = {}
    for replica, workers in enumerate(launch.replicas):
        whole = not any(name in domains[worker] for worker in workers)
        for position, worker in enumerate(workers):
            if name not in domains[worker]:
                status = JoinStatus(replica if whole else None, position, 7, iteration=7, version=6, digest="d")
                status = replace(
                    status, boundary=whole, ready=not whole, node=domains[worker][0], domains=domains[worker]
                )
                statuses[worker] = replace(status, snapshots=there[worker], checkpoints=[(4, "save")] * checkpoint)
    decisions = list[Decision]()
    for epoch in range(2, 12):
        found = decide(epoch, statuses, launch, rules)
        decisions.append(found)
        before = dict(statuses)
        for worker, position in found.rebuild.items():
            statuses[worker] = replace(statuses[worker], position=position, version=None, digest="")
        for replica, workers in found.grid.items():
            for position, worker in enumerate(workers):
                statuses[worker] = replace(
                    statuses[worker], replica=replica, position=position, boundary=True, ready=False, at=found.at,
                    iteration=found.iteration, version=found.version, digest="",
                )  # fmt: skip
        for worker, status in statuses.items():
            of = found.timeline[0]
            statuses[worker] = replace(
                status, timeline=found.timeline, state_of=of, at=found.at, iteration=found.iteration
            )
        if statuses == before:
            break
    return decisions


@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize("blocks", [False, True])
def test_what_is_said_of_a_loss_is_what_the_workers_decide(memory: str, blocks: bool) -> None:
    """All nodes and racks of two, where the job spans two; with a checkpoint and without."""
    ends = Counter[str]()
    shapes = itertools.product((1, 2), (1, 2, 4), (1, 2), (2, 3, 4), (False, True))
    for tensor, pipeline, inner, nodes, checkpoint in shapes:
        per_node = 2 if nodes > 2 else 4
        world, sizes = nodes * per_node, {"tensor": tensor, "pipeline": pipeline, "inner_ranks": inner}
        if world % (tensor * pipeline * inner):
            continue
        training = Training(**sizes, pipeline_before_data=blocks, memory=memory != "off", checkpoint=checkpoint)
        domains = on_nodes(world, per_node, [[f"rack {node // 2}"] for node in range(nodes)])
        launch = launch_grid(world, context=1, pipeline_before_data=blocks, **sizes)
        kept = copies(launch.replicas, dict(enumerate(domains)), memory)
        for loss in domain_losses(training, domains):
            if loss.workers == world:
                continue
            rules = Rules(memory=memory, replaced=True)
            found = left_of(launch, domains, loss.domain, kept, rules, checkpoint)
            shown = training, world, loss, found
            placed = [each for each in found if each.grid]
            assert len(found[-1].grid) == loss.later * (not loss.lost or bool(loss.back)), shown
            if loss.back or loss.waits:
                assert not placed or placed[0].rollback is not None
                assert found[-1].short == loss.waits, shown
                ends[loss.back] += 1
            elif loss.lost:
                assert (bool(found[-1].state_lost), found[-1].enough) == (loss.later > 0, 0), shown
                ends["12" if loss.later else "10"] += 1
            else:
                first = found[0]  # whole ones, if there are any, have orphans beside them at once where these fit
                assert first.rollback is None, shown
                assert (len({*first.grid} - {*first.fresh}) or len(first.grid)) == loss.whole, shown
                ends["on"] += 1
    assert ends["on"] > 20, ends
    assert blocks or memory == "auto" or min(ends["12"], ends["10"]) > 0, ends
    assert blocks or ends[SNAPSHOTS if memory == "auto" else CHECKPOINT] > 5, ends
