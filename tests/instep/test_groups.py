"""Groups that torch knows of without having made them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from recover_megatron.instep.process_group import EpochGroup, register_new
from recover_megatron.instep.traffic import Mode, Traffic


def test_a_group_that_was_registered_can_be_destroyed_and_leaves_nothing() -> None:
    """Megatron destroys some of its groups when the model is built once more, for another position."""
    world = c10d._world
    maps = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    before = [len(known) for known in maps]
    group = EpochGroup(Traffic(0, Mode.STEP), None, (0, 1), "data_parallel_group_gloo")
    register_new(group, (0, 1), "gloo")
    assert [len(known) for known in maps] == [count + 1 for count in before]
    dist.destroy_process_group(group)
    assert [len(known) for known in maps] == before
