"""What a group whose inside can change puts between a caller and the inner group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.gloo.swappable_group import COLLECTIVES, AbortableWork, AbortableWorks, SwappableGroup
from recover_megatron.instep.process_group import EpochGroup


def test_operations_are_guarded_and_plain_questions_are_not() -> None:
    inner: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2, name=lambda: "gloo", allreduce=lambda _: dist.Work())
    group = SwappableGroup(inner, [4, 6], 6, "tp", "gloo")
    group.guard_by(AbortableWorks(CancelToken(1)))
    assert isinstance(group.allreduce([]), AbortableWork)
    assert [group.rank, group.size, group.name] == [inner.rank, inner.size, inner.name]


def test_a_group_of_one_is_not_guarded_since_it_waits_for_nobody() -> None:
    inner: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1, name=lambda: "gloo", broadcast=lambda _: dist.Work())
    group = SwappableGroup(inner, [4], 4, "tp", "gloo")
    group.guard_by(AbortableWorks(CancelToken(1)))
    assert group.broadcast is inner.broadcast


def test_collectives_are_carried_another_way_for_a_while_and_messages_are_not() -> None:
    inner: Any = SimpleNamespace(allreduce=lambda _: "inside", send=lambda *_: "inside")
    other: Any = SimpleNamespace(**{name: lambda *_: "over the epoch" for name in COLLECTIVES})
    group: Any = SwappableGroup(inner, [4, 6], 6, "tp", "nccl")
    with group.carried_by(other):
        assert [group.allreduce([]), group.send([], 0, 0)] == ["over the epoch", "inside"]
        inner.allreduce = lambda _: "renewed"
        assert group.barrier() == "over the epoch"
    assert group.allreduce([]) == "renewed"
    assert "barrier" not in vars(group), "the inner group has none: torch's own answers"


def test_all_that_may_be_carried_another_way_is_carried_out_over_replicas() -> None:
    assert all(name in vars(EpochGroup) for name in COLLECTIVES)
