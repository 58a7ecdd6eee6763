"""A ring that goes round in another order than its caller counts in, torch's operations over it, and who is named."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.rendezvous import Known
from recover_megatron.collectives.ring.reordered import Reordered

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
        group.reduce_scatter(part, shards, shadows=(1,)).wait()
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


def test_a_refused_connection_names_the_member_that_refuses() -> None:
    with socket.socket() as bound:  # nobody listens there, and nobody else can take it meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        known = Known({f"ring/named/1/{rank}": f"127.0.0.1 {port} -" for rank in range(3)})
        with pytest.raises(EpochRevoked) as raised:
            open_group(PlainEpoch(1, [7, 8, 9], 8), known, name="named", secret=SECRET)
    cause = raised.value.__cause__
    assert isinstance(cause, PeerLost)
    assert (cause.peer, cause.road) == (9, True)


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
