"""The layer between a caller and the inner group of a group whose inside can change; gloo groups made anew."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, PeerLost
from recover_megatron.collectives.gloo import abortable_groups as groups
from recover_megatron.collectives.gloo.abortable_groups import GlooGroups
from recover_megatron.collectives.gloo.swappable_group import COLLECTIVES, AbortableWork, AbortableWorks, SwappableGroup
from recover_megatron.instep.groups.process_group import EpochGroup
from tests.harness.waiting import DEADLINE, eventually


@pytest.fixture
def pair() -> Iterator[dist.ProcessGroup]:
    """Rank 0 of two of gloo's in this process; rank 1 is connected, and sends nothing."""
    store, limit = dist.HashStore(), timedelta(seconds=1)
    with ThreadPoolExecutor(1) as other:
        ends = other.submit(dist.ProcessGroupGloo, store, 1, 2, limit)
        inner = dist.ProcessGroupGloo(store, 0, 2, limit)
    group = dist.ProcessGroup(store, 0, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
    silent = ends.result()
    yield group
    del silent


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


def test_a_forked_process_collects_no_group_that_its_parent_has_dropped() -> None:
    """A loader's process would wait in the group's destructor for threads of its parent's."""
    dropped: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))]
    dropped.append(dropped)
    gc.disable()
    try:
        del dropped
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
        assert not gc.isenabled()
        try:
            eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        finally:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        assert status == 0
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("collects", [True, False])
def test_a_fork_leaves_the_collection_of_garbage_as_it_is(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(gc.isenabled())
        assert gc.isenabled() is collects
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == collects
    finally:
        gc.enable()


ONE, TWO = torch.ones(1), torch.ones(2)
SENT: dict[str, Callable[[Any], dist.Work]] = {
    "allreduce": lambda group: group.allreduce([ONE]),
    "all_gather_single_coalesced": lambda group: group.all_gather_single_coalesced([TWO], [ONE]),
    "reduce_scatter": lambda group: group.reduce_scatter([ONE], [[ONE, ONE]]),
    "reduce_scatter_single": lambda group: group.reduce_scatter_single(ONE, TWO),
    "reduce_scatter_single_coalesced": lambda group: group.reduce_scatter_single_coalesced([ONE], [TWO]),
    "recv": lambda group: group.recv([ONE], 1, 0),
}


@pytest.mark.parametrize("send", SENT.values(), ids=SENT)
def test_an_operation_of_a_broken_replica_is_left_though_its_mate_says_nothing(
    pair: dist.ProcessGroup, send: Callable[[Any], dist.Work]
) -> None:
    token = CancelToken(1)
    group = SwappableGroup(pair, [4, 6], 4, "tp", "gloo")
    group.guard_by(AbortableWorks(token))
    work = send(group)
    token.cancel("a death")
    with pytest.raises(dist.DistBackendError, match="was abandoned") as left:
        work.wait()
    assert "transport" not in str(left.value.__context__), "gloo's own time limit ended the wait; in a run it has none"


def test_all_that_may_be_carried_another_way_is_carried_out_over_replicas() -> None:
    assert all(name in vars(EpochGroup) for name in COLLECTIVES)


# ---- gloo groups that are made anew


def test_a_member_that_is_lost_while_gloo_groups_open_is_told_as_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death closes the connections after gloo has made them, and before this worker looks for them."""
    find, store = groups._connections, dist.HashStore()

    def shut(listeners: set[groups.Address]) -> list[socket.socket]:
        found = find(listeners)
        for sock in found:
            with sock, suppress(OSError):  # the other member was faster
                sock.shutdown(socket.SHUT_RDWR)
        return found

    def closed(listeners: set[groups.Address]) -> list[socket.socket]:
        eventually(lambda: not shut(listeners))
        return []

    monkeypatch.setattr(groups, "_connections", closed)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(GlooGroups, me, {"all": [0, 1]}, store, CancelToken(1), ring="r", timeout=DEADLINE)
            for me in range(2)
        ]
        for end in ends:
            with pytest.raises(PeerLost):
                end.result(DEADLINE)
