"""The tree over which all workers talk between two steps: few connections, torch's results, nobody left waiting."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from recover_megatron.collectives.epoch import CancelToken, CollectiveMismatch, EpochRevoked, PeerLost
from recover_megatron.collectives.tree import FAN, Tree, TreeBackend, parents
from recover_megatron.network.peer_store import PeerStoreServer
from tests.harness.waiting import DEADLINE

SECRET = b"what the workers of the test share"


class Workers:
    """``size`` workers in this process, with a peer store each."""

    def __init__(self, size: int) -> None:
        self.stores = [PeerStoreServer("127.0.0.1", SECRET) for _ in range(size)]
        self.tokens = [CancelToken(1) for _ in range(size)]
        self.members = [10 * rank for rank in range(size)]

    def tree(self, rank: int) -> Tree:
        addresses = [store.address for store in self.stores]
        return Tree(rank, self.members, addresses, self.stores[rank], SECRET, self.tokens[rank], name="tree/1/test")


def together(size: int, do: Callable[[Tree], Any], workers: Workers | None = None) -> list[Any]:
    """What ``do`` returns at each member of a tree, by rank."""
    workers = workers or Workers(size)

    def run(rank: int) -> Any:
        tree = workers.tree(rank)
        try:
            return do(tree)
        finally:
            tree.close()

    with ThreadPoolExecutor(size) as pool:
        return [found.result(DEADLINE) for found in [pool.submit(run, rank) for rank in range(size)]]


# ---- its shape


@pytest.mark.parametrize("size", [1, 2, 9, 10, 100, 1024])
def test_everybody_has_one_parent_and_few_children_and_is_not_far_from_the_first(size: int) -> None:
    above = parents(size)
    assert above[0] == -1
    assert all(0 <= above[place] < place for place in range(1, size))
    assert max(Counter(above[1:]).values(), default=0) <= FAN
    depth = [0] * size
    for place in range(1, size):
        depth[place] = depth[above[place]] + 1
    assert FAN ** max(depth) <= max(1, size * FAN)


# ---- operations


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_torchs_operations_give_what_gloo_would_give() -> None:
    def do(tree: Tree) -> Any:
        rank, backend = tree.rank, TreeBackend(tree)
        mine = torch.arange(4.0) + 10 * rank
        results: dict[str, Any] = {}

        def run(name: str, start: Callable[[Any], Any], *tensors: torch.Tensor) -> None:
            backend.call(start)
            results[name] = [tensor.tolist() for tensor in tensors]

        one = mine.clone()
        run("sum", lambda on: on.allreduce([one], dist.AllreduceOptions()), one)
        top = (mine % 7).int()
        run("max", lambda on: on.allreduce([top], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)), top)
        sent = mine.clone()
        run("broadcast", lambda on: on.broadcast([sent], options(dist.BroadcastOptions, rootRank=2)), sent)
        rows = [torch.zeros(4) for _ in range(4)]
        run("allgather", lambda on: on.allgather([rows], [mine], AllgatherOptions()), *rows)
        flat = torch.zeros(16)
        run("into", lambda on: on._allgather_base(flat, mine, AllgatherOptions()), flat)
        got = [torch.zeros(4) for _ in range(4)] if rank == 1 else []
        at_one = options(dist.GatherOptions, rootRank=1)
        run("gather", lambda on: on.gather([got] if rank == 1 else [], [mine], at_one), *got)
        part = torch.zeros(1)
        run("reduce_scatter", lambda on: on._reduce_scatter_base(part, mine, ReduceScatterOptions()), part)
        spread = torch.zeros(1)
        from_three = options(dist.ScatterOptions, rootRank=3)
        run("scatter", lambda on: on.scatter([spread], [list(mine.split(1))] if rank == 3 else [], from_three), spread)
        swapped = torch.zeros(4)
        run("alltoall", lambda on: on.alltoall_base(swapped, mine, [], [], dist.AllToAllOptions()), swapped)
        run("barrier", lambda on: on.barrier(dist.BarrierOptions()))
        return results

    every = [[float(10 * rank + at) for at in range(4)] for rank in range(4)]
    for rank, found in enumerate(together(4, do)):
        assert found["sum"] == [[60.0, 64.0, 68.0, 72.0]]
        assert found["max"] == [[max(int(row[at]) % 7 for row in every) for at in range(4)]]
        assert found["broadcast"] == [every[2]]
        assert found["allgather"] == every
        assert found["into"] == [[value for row in every for value in row]]
        assert found["gather"] == (every if rank == 1 else [])
        assert found["reduce_scatter"] == [[60.0 + 4 * rank]]
        assert found["scatter"] == [[every[3][rank]]]
        assert found["alltoall"] == [[row[rank] for row in every]]


def test_a_nan_of_any_member_at_any_place_stays_in_a_maximum_and_a_minimum() -> None:
    """Gloo's own loses one, depending on the member and the place."""
    cases = [(op, bad) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN) for bad in range(3)]

    def do(tree: Tree) -> list[list[bool]]:
        backend, found = TreeBackend(tree), []
        for op, bad in cases:
            mine = torch.full((5,), float(tree.rank))
            if tree.rank == bad:
                mine[[0, 4]] = torch.nan
            how = options(dist.AllreduceOptions, reduceOp=op)
            backend.call(lambda on, mine=mine, how=how: on.allreduce([mine], how))
            found.append(mine.isnan().tolist())
        return found

    assert together(3, do) == [[[True, False, False, False, True]] * len(cases)] * 3


def test_the_first_operation_of_many_members_gives_all_of_them_the_same() -> None:
    def do(tree: Tree) -> list[float]:
        mine = torch.tensor([1.0, float(tree.rank)])
        TreeBackend(tree).call(lambda on: on.allreduce([mine], dist.AllreduceOptions()))
        return list(mine.tolist())

    assert together(20, do) == [[20.0, 190.0]] * 20


def test_members_that_do_not_make_the_same_operations_are_told_so() -> None:
    def do(tree: Tree) -> str:
        backend, mine = TreeBackend(tree), torch.zeros(1)
        try:
            if tree.rank:
                backend.call(lambda on: on.barrier(dist.BarrierOptions()))
            else:
                backend.call(lambda on: on.allreduce([mine], dist.AllreduceOptions()))
        except (CollectiveMismatch, PeerLost) as error:
            return type(error).__name__
        return ""

    assert together(2, do) == ["CollectiveMismatch", "PeerLost"]


# ---- deaths


def test_a_members_death_is_seen_by_its_neighbours_and_the_revocation_wakes_the_others() -> None:
    size = 12  # 1 has children: 9, 10, 11
    workers, waiting, lost_ones = Workers(size), threading.Barrier(size), list[int | None]()

    def do(tree: Tree) -> str:
        waiting.wait(DEADLINE)
        try:
            if tree.rank != 1:
                TreeBackend(tree).call(lambda on: on.barrier(dist.BarrierOptions()))
        except PeerLost as lost:
            lost_ones.append(lost.peer)
            for token in workers.tokens:  # what the membership does when it is told
                token.cancel("worker 1 is gone")
            return "lost"
        except EpochRevoked:
            return "revoked"
        return "dead"

    found = together(size, do, workers)
    assert found[1] == "dead"
    assert {*found[:1], *found[2:]} <= {"revoked", "lost"}
    assert lost_ones[0] == workers.members[1]  # who is revoked hangs up, too, and others may see that before they are


def test_who_waits_for_a_member_that_does_not_come_is_woken_by_the_revocation() -> None:
    workers = Workers(3)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(workers.tree, 0)
        workers.tokens[0].cancel("worker 1 is gone")
        with pytest.raises(EpochRevoked):
            opening.result(DEADLINE)
