"""What a group whose inside can change puts between a caller and the inner group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.gloo.abortable_work import AbortableWork, AbortableWorks
from recover_megatron.collectives.gloo.swappable_group import SwappableGroup


def test_operations_are_guarded_and_plain_questions_are_not() -> None:
    inner: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2, name=lambda: "gloo", allreduce=lambda _: dist.Work())
    group = SwappableGroup(inner, [4, 6], 6, "tp", "gloo")
    group.guard_by(AbortableWorks(CancelToken(1)))
    assert isinstance(group.allreduce([]), AbortableWork)
    assert [group.rank, group.size, group.name] == [inner.rank, inner.size, inner.name]
