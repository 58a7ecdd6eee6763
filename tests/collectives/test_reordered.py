"""A ring that goes round in another order than its caller counts in, torch's operations over it, and who is named."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.rendezvous import Known
from recover_megatron.collectives.ring.reordered import Reordered
from recover_megatron.collectives.ring.torch_operations import RoundBackend

from .together import DEADLINE, SECRET, Dictionary, PlainEpoch

MEMBERS = [10, 20, 30, 40]
RING = [10, 30, 20, 40]
"""20 and 30 are no neighbours of 10 and 40 in the other order."""


def threads(count: int, member: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(DEADLINE) for future in [pool.submit(member, at) for at in range(count)]]


def turned(do: Callable[[Reordered], Any]) -> list[Any]:
    """What ``do`` gives at each of MEMBERS, in their order, over a ring in the order RING."""
    store = Dictionary()

    def member(at: int) -> Any:
        epoch = PlainEpoch(1, RING, MEMBERS[at])
        group = Reordered(open_group(epoch, store, name="turned", secret=SECRET), MEMBERS)
        try:
            assert (group.rank, group.size, group.members) == (at, 4, tuple(MEMBERS))
            return do(group)
        finally:
            group.close()

    return threads(4, member)


def test_ranks_shards_and_rows_are_the_callers() -> None:
    shards = [[Span(0, 3)], [Span(3, 4)], [], [Span(4, 10)]]

    def do(group: Reordered) -> Any:
        whole = Bucket(torch.full((7,), float(group.rank + 1)))
        group.all_reduce(whole).wait()
        part = Bucket(torch.full((10,), float(10**group.rank)))
        group.reduce_scatter(part, shards, shadows=1).wait()
        own = Bucket(torch.full((10,), float(group.rank)))
        group.all_gather(own, shards).wait()
        rows = group.exchange([group.rank] * (group.rank + 1))
        return whole.flat, part.flat, own.flat, rows, group.exchange_doubles([group.rank / 4])

    for rank, (whole, part, own, rows, doubles) in enumerate(turned(do)):
        assert whole.tolist() == [10.0] * 7
        mine = [value for span in shards[rank] for value in part[span.start : span.stop].tolist()]
        assert mine == [1111.0] * len(mine)
        assert own.tolist() == [0.0] * 3 + [1.0] + [3.0] * 6
        assert rows == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
        assert doubles == [[0.0], [0.25], [0.5], [0.75]]


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_torchs_operations_give_what_gloo_would_give() -> None:
    def do(group: Reordered) -> Any:
        rank, backend = group.rank, RoundBackend(group)
        mine = torch.arange(4.0) + 10 * rank
        results: dict[str, Any] = {}

        def run(name: str, start: Callable[[Any], Any], *tensors: torch.Tensor) -> None:
            backend.wait(backend.call(start))
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
    for rank, found in enumerate(turned(do)):
        assert found["sum"] == [[60.0, 64.0, 68.0, 72.0]]
        assert found["max"] == [[max(int(row[at]) % 7 for row in every) for at in range(4)]]
        assert found["broadcast"] == [every[2]]
        assert found["allgather"] == every
        assert found["into"] == [[value for row in every for value in row]]
        assert found["gather"] == (every if rank == 1 else [])
        assert found["reduce_scatter"] == [[60.0 + 4 * rank]]
        assert found["scatter"] == [[every[3][rank]]]
        assert found["alltoall"] == [[row[rank] for row in every]]


def test_a_refused_connection_names_the_member_that_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    known = Known({f"ring/named/1/{rank}": f"127.0.0.1 {port} -" for rank in range(3)})
    with pytest.raises(EpochRevoked) as raised:
        open_group(PlainEpoch(1, [7, 8, 9], 8), known, name="named", secret=SECRET)
    cause = raised.value.__cause__
    assert isinstance(cause, PeerLost)
    assert (cause.peer, cause.road) == (2, True)


def test_a_neighbour_that_hangs_up_is_named_and_the_road_is_not_blamed() -> None:
    store = Dictionary()

    def member(at: int) -> Any:
        group: Group = open_group(PlainEpoch(1, [7, 8], [7, 8][at]), store, name="hung-up", secret=SECRET)
        if at == 0:
            group.abort("it fails here")
            group.close()
            return None
        with pytest.raises(EpochRevoked):
            group.all_reduce(Bucket(torch.zeros(100))).wait()
        lost = group.lost
        group.close()
        return lost

    lost = threads(2, member)[1]
    assert (lost.peer, lost.road) == (7, False)
