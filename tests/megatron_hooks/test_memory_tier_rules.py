"""When a snapshot is taken and of which parts, when a host without memory for it ends a run; without a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.errors import UserError
from recover_megatron.instep.decision import Decision, JoinStatus, Rules
from recover_megatron.instep.grid import launch_grid
from recover_megatron.instep.plan import decide
from recover_megatron.instep.snapshots import Taking
from recover_megatron.megatron_hooks import memory_tier
from recover_megatron.megatron_hooks.memory_tier import MemoryTier

GRID = launch_grid(4, tensor=1, context=1, pipeline=2, inner_ranks=1)
"""Two replicas: workers 0 and 2, 1 and 3."""
NODES = ("a", "b", "a", "b")
RULES = Rules(memory="always", spread=True, holders=2)


class Store:
    """What is begun."""

    interval, size, newest, wanted = 2, 0, None, True

    def __init__(self) -> None:
        self.begun: list[tuple[Taking, set[int], set[int]]] = []

    def finish(self, epoch: int, stay: Any) -> tuple[bool, float]:
        return False, 0.0

    def begin(self, taking: Taking, own: Mapping[int, Any], others: Mapping[int, Any]) -> None:
        self.begun.append((taking, set(own), set(others)))


def in_section(worker: int) -> JoinStatus:
    """All have begun decision 9, a snapshot, after iteration 2."""
    replica, position = GRID.place(worker)
    domains = (f"node {NODES[worker]}",)
    return JoinStatus(
        replica, position, at=9, iteration=3, version=2, node=NODES[worker], domains=domains, peer_store=f"at {worker}"
    )


STATUSES = {worker: in_section(worker) for worker in range(4)}


def tier(me: int, decision: Decision, *, version: int = 2, sharded: bool = True) -> tuple[MemoryTier, Store]:
    """That of worker ``me`` in a section of the epoch of ``decision``."""
    store = Store()
    groups = SimpleNamespace(check=lambda: None, most=lambda values, slots: list(values))
    mine = SimpleNamespace(
        me=me, position=GRID.place(me)[1], grid=GRID, decision=decision, epoch_groups=groups, live=frozenset(range(4))
    )
    recovery: Any = SimpleNamespace(
        assignment=mine,
        snapshots=store,
        progress=SimpleNamespace(mark=lambda *_, **__: None),
        hooks=SimpleNamespace(log=lambda *_, **__: None),
        boundary=SimpleNamespace(joining_next=False, in_section_of_others=True),
        sections=SimpleNamespace(run=lambda kind, run: run()),
    )
    state: Any = SimpleNamespace(version=version, first=1, tree=lambda: {"column": [torch.zeros(100)]})
    shards: Any = SimpleNamespace(complete=lambda: None, primaries=list) if sharded else None
    return MemoryTier(recovery, state, shards, wanted=True, every=2), store


def test_the_parts_of_all_who_take_a_snapshot_are_those_that_the_plan_wants() -> None:
    decision = decide(5, STATUSES, GRID, RULES)
    for me in range(4):
        memory, store = tier(me, decision)
        memory.at_boundary()
        ((taking, own, others),) = store.begun
        assert own | others == {part for part, its in decision.copies.items() if me in its}
        assert taking == Taking(5, 2, len(decision.copies), together=True)


def test_no_snapshot_with_shards_is_taken_of_those_who_are_about_to_leave() -> None:
    """Node a is drained while all are in the section of a snapshot.  What its workers have of the optimizer's state
    changes hands at the next boundary; the plan has parts for those only who stay."""
    decision = decide(6, STATUSES, GRID, RULES, drain=("a",))
    assert decision.leaving == {0}
    assert len(decision.copies) == GRID.size + 2
    for me in range(4):
        memory, store = tier(me, decision)
        memory.at_boundary()
        assert store.begun == []
    memory, store = tier(3, decision, sharded=False)
    memory.at_boundary()
    assert len(store.begun) == 1, "without shards a part is a position's, of which those who stay have the state"


def test_after_the_run_went_back_to_its_start_a_host_without_the_memory_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_tier, "available_memory", lambda: 1)
    decision = decide(5, STATUSES, GRID, RULES)
    memory, store = tier(0, decision, version=0)
    with pytest.raises(UserError, match="the hosts do not have the memory for it"):
        memory.at_boundary()
    memory, store = tier(0, replace(decision, timeline=(5, 0)), version=0)
    memory.at_boundary()
    assert store.begun == [], "it is said, and none is taken"
