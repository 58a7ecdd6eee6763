"""What the loss of a node would cost, against the definition, for launches of some nodes."""

from __future__ import annotations

import itertools

import pytest

from recover_megatron.workload.domains import Training, data_parallel_ranks_per_replica, node_losses, replicas_of


def test_a_replica_a_node_is_all_that_a_node_takes() -> None:
    losses = node_losses(Training(tensor=8), 32, 8)
    assert [(loss.workers, loss.broken, loss.whole, loss.lost) for loss in losses] == [(8, 1, 3, "")] * 4


def test_in_the_default_order_a_node_takes_a_stage_of_every_replica() -> None:
    losses = node_losses(Training(tensor=2, pipeline=4), 32, 8)
    assert [(loss.broken, loss.whole) for loss in losses] == [(4, 0)] * 4
    assert "of 2 of the 8 positions" in losses[0].lost
    in_blocks = node_losses(Training(tensor=2, pipeline=4, pipeline_before_data=True), 32, 8)
    assert [(loss.broken, loss.whole, loss.lost) for loss in in_blocks] == [(1, 3, "")] * 4


def test_where_every_replica_is_broken_orphans_of_all_positions_begin_again() -> None:
    losses = node_losses(Training(tensor=2, pipeline=2), 24, 8)  # the middle node has a half of each stage
    assert [(loss.broken, loss.whole, loss.lost) for loss in losses] == [(4, 2, "")] * 3
    every = node_losses(Training(tensor=4, pipeline=2, inner_ranks=2), 32, 8)
    assert [loss.lost == "" for loss in every] == [True] * 4


def test_the_only_replica_of_a_wide_job_goes_with_any_node() -> None:
    inner = data_parallel_ranks_per_replica(tensor=1, context=1, expert=16, expert_tensor=1)
    for spread in (False, True):
        losses = node_losses(Training(inner_ranks=inner, experts=True, spread=spread), 16, 8)
        assert all(loss.lost and not loss.whole for loss in losses)


def test_with_several_instances_copies_are_where_megatron_puts_them() -> None:
    # Shard s of 8 of 16 workers is on ranks s and s + 8: of two nodes each has one copy.
    assert not any(loss.lost for loss in node_losses(Training(spread=True, instances=2), 16, 8))
    assert all(loss.lost for loss in node_losses(Training(spread=True, instances=2), 16, 16))


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
        for loss in node_losses(training, world, per_node):
            gone = set(range(loss.node * per_node, (loss.node + 1) * per_node))
            whole = [workers for workers in replicas if not gone & set(workers)]
            assert loss.workers == len(gone)
            assert loss.broken == len(replicas) - len(whole)
            if whole and not spread:
                assert (loss.whole, loss.lost) == (len(whole), "")
            if not whole:
                nobody = any(gone >= set(column) for column in zip(*replicas, strict=True))
                assert bool(loss.lost) == (nobody or spread)


def test_with_snapshots_in_memory_the_run_goes_back_where_a_replica_is_left() -> None:
    losses = node_losses(Training(tensor=2, pipeline=4, memory=True), 32, 8)
    assert all(loss.back and loss.whole == 3 for loss in losses)
    assert all(loss.lost for loss in losses)
    assert not any(loss.back for loss in node_losses(Training(tensor=8, memory=True), 32, 8)), "no state is lost"
    few = node_losses(Training(inner_ranks=16, memory=True), 16, 8)
    assert all(loss.waits and not loss.back for loss in few), "too few are left"
    assert not any(loss.waits for loss in losses)
