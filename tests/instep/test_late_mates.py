"""A mate that comes late to an operation which a broken replica has given up: its tensors stay as they are.

gloo itself goes on with an operation whose wait has timed out: when the mate comes, it writes to the caller's tensors.
"""

from __future__ import annotations

import gc
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from traceback import extract_stack
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.gloo import abortable_groups as gloo_groups
from recover_megatron.collectives.gloo import swappable_group
from recover_megatron.collectives.gloo.abortable_groups import (
    NO_TIMEOUT,
    GivenUp,
    Identity,
    looks,
    loops,
    open_sockets,
    shut,
)
from recover_megatron.collectives.gloo.swappable_group import AbortableWorks, SwappableGroup
from recover_megatron.instep.faults import is_communication
from recover_megatron.instep.groups import model_parallel_groups
from recover_megatron.instep.groups.model_parallel_groups import ModelParallelGroups
from tests.harness.waiting import DEADLINE, eventually

CPU = torch.device("cpu")


def inside() -> ModelParallelGroups:
    """The groups of a replica without one over NCCL: nothing has to be aborted, and nobody watches the main thread."""
    leaving: Any = SimpleNamespace(begin=lambda: None, left=lambda: None)
    return ModelParallelGroups((), CPU, leaving=lambda *_: leaving)


def kept(groups: ModelParallelGroups, inner: Any, rank: int, *, placeholder: bool = False) -> SwappableGroup:
    group = SwappableGroup(inner, [0, 1], rank, "tp", "gloo", placeholder=placeholder)
    groups.keep(group)
    return group


Pair = tuple[ModelParallelGroups, SwappableGroup, SwappableGroup]
"""The groups of rank 0, its group of two, and the same group at its mate."""


def of_launch() -> Pair:
    mine, store = inside(), dist.HashStore()

    def member(rank: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, rank, 2)
        backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=DEADLINE))
        group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def both() -> dist.ProcessGroup:
        with ThreadPoolExecutor(1) as pool:
            mate = pool.submit(member, 1)
            first = member(0)
        mates.append(mate.result())
        dist.distributed_c10d._world.pg_map[first] = ("gloo", store)
        return first

    mates: list[dist.ProcessGroup] = []
    first = mine.make(both)
    mine._sockets, mine._mixed = mine._mixed, []  # both ends are in this process, one more than a member has
    del dist.distributed_c10d._world.pg_map[first]
    return mine, kept(mine, first, 0), kept(inside(), mates[0], 1)


def made_anew() -> Pair:
    store = dist.HashStore()
    epoch: Any = SimpleNamespace(number=3, over=False, on_end=lambda call: None)
    both = inside(), inside()
    first, mate = (kept(groups, dist.ProcessGroup(0, 1), at, placeholder=True) for at, groups in enumerate(both))
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(groups.rebuild, epoch, 0, store, "127.0.0.1") for groups in both]:
            made.result(DEADLINE)
    theirs = both[1]._gloo
    assert theirs is not None
    while theirs._connected:  # duplicates, of this process's, too, which a mate elsewhere does not have
        theirs._connected.pop().close()
    return both[0], first, mate


class Tensors:
    """Tensors that one member brings to an operation, and those that it gets."""

    def __init__(self, value: float) -> None:
        self.mine, self.twice = torch.full((4,), value), torch.full((8,), value)
        self.got, self.both, self.parts = torch.zeros(4), torch.zeros(8), [torch.zeros(4), torch.zeros(4)]

    def state(self) -> torch.Tensor:
        return torch.cat([self.mine, self.twice, self.got, self.both, *self.parts])


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


Start = Callable[[Any, Tensors, int], dist.Work]
OPERATIONS: dict[str, Start] = {
    "allreduce": lambda on, its, rank: on.allreduce([its.mine]),
    "broadcast": lambda on, its, rank: on.broadcast([its.mine], rooted(dist.BroadcastOptions(), 1)),
    "reduce": lambda on, its, rank: on.reduce([its.mine], rooted(dist.ReduceOptions(), 0)),
    "allgather": lambda on, its, rank: on.allgather([its.parts], [its.mine]),
    "allgather base": lambda on, its, rank: on._allgather_base(its.both, its.mine),
    "reduce scatter": lambda on, its, rank: on._reduce_scatter_base(its.got, its.twice),
    "alltoall": lambda on, its, rank: on.alltoall_base(its.both, its.twice, [], []),
    "message": lambda on, its, rank: on.recv([its.got], 1, 0) if rank == 0 else on.send([its.mine], 0, 0),
}


@pytest.mark.parametrize("make", [of_launch, made_anew])
@pytest.mark.parametrize("start", OPERATIONS.values(), ids=OPERATIONS)
def test_a_mate_that_comes_when_an_operation_was_given_up_changes_no_tensor_of_it(
    make: Callable[[], Pair], start: Start
) -> None:
    groups, group, mate = make()
    its, theirs = Tensors(1.0), Tensors(2.0)
    work = start(group, its, 0)
    groups.end()
    with pytest.raises(RuntimeError) as given_up:
        work.wait()
    assert is_communication(given_up.value)
    groups.left()
    before = its.state()
    with pytest.raises(RuntimeError) as late:
        start(mate.inner, theirs, 1).wait(timedelta(seconds=DEADLINE))
    assert is_communication(late.value)
    assert torch.equal(its.state(), before)


@pytest.mark.parametrize("make", [of_launch, made_anew])
def test_the_connections_are_shut_before_anybody_is_let_out_of_an_operation(make: Callable[[], Pair]) -> None:
    groups, _, _ = make()
    was_shut: list[bool] = []
    token: CancelToken = groups._cancel_token
    token._wakers.insert(0, lambda: was_shut.append(bool(groups._shut)))  # as the guard's own, which is the first
    groups.end()
    assert was_shut == [True]


def test_a_connection_that_its_other_end_has_reset_is_waited_for_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        of_gloo = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with of_gloo:
        with pytest.raises(ConnectionResetError):
            of_gloo.recv(1)
        assert shut([of_gloo.dup()]) & set(open_sockets().values())


class Connection:
    """A connection of a group, of which gloo closes its own descriptor after ``looks`` of the worker.

    ``members``: of the group; where it has one, the connection is another thread's.
    """

    def __init__(self, looks: int, members: int = 2) -> None:
        self._looks = looks
        self.seen: list[int] = []
        """Number of descriptors that each look could see; -1: all of this process."""
        self.groups = inside()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.of_gloo: socket.socket | None = None
        inner = dist.ProcessGroup(0, members)

        def create() -> dist.ProcessGroup:
            self.of_gloo = socket.create_connection(self._listener.getsockname())
            dist.distributed_c10d._world.pg_map[inner] = ("gloo", None)
            return inner

        self.groups.make(create)
        del dist.distributed_c10d._world.pg_map[inner]

    def open_sockets(self, among: Any = None) -> dict[int, Identity]:
        self._looks -= 1
        if not self._looks:
            self.close()
        self.seen.append(-1 if among is None else len(among))
        return open_sockets(among)

    def close(self) -> None:
        if self.of_gloo is not None:
            self.of_gloo.close()
            self.of_gloo = None

    def close_all(self) -> None:
        self.close()
        self._listener.close()


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Connection]:
    made = Connection(request.param)
    monkeypatch.setattr(model_parallel_groups, "open_sockets", made.open_sockets)
    yield made
    made.close_all()


@pytest.mark.parametrize("connection", [3], indirect=True)
def test_a_worker_is_out_of_its_replica_when_gloo_has_closed_the_connections(connection: Connection) -> None:
    under_way = Sum()
    connection.groups.guard.method("allreduce", lambda: under_way)()
    connection.groups.end()
    assert connection.of_gloo is not None
    connection.seen.clear()
    connection.groups.left()
    assert connection.of_gloo is None
    assert connection.seen[:2] == [-1, 1], "a process may have thousands of descriptors: they are looked through once"
    assert under_way.over, "the worker has waited until it was"


@pytest.mark.parametrize("connection", [-1], indirect=True)
def test_a_worker_whose_gloo_does_not_close_its_connections_ends(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_parallel_groups, "LEAVE_SECONDS", 0.01)
    reasons: list[str] = []
    monkeypatch.setattr(model_parallel_groups, "end_process", reasons.append)
    connection.groups.end()
    connection.groups.left()
    assert reasons == ["gloo has not closed 1 connections that this worker shut down"]


def test_a_connection_of_the_program_that_stays_open_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, under_way, reasons = Connection(-1, members=1), Sum(), list[str]()
    connection.groups.guard.method("allreduce", lambda: under_way)()
    monkeypatch.setattr(model_parallel_groups, "end_process", reasons.append)
    monkeypatch.setattr(model_parallel_groups, "LEAVE_SECONDS", 0.01)
    connection.groups.end()
    connection.groups.left()
    assert connection.of_gloo is not None
    assert connection.of_gloo.recv(1) == b"", "it is shut: it may be gloo's"
    assert reasons == []
    assert under_way.over
    connection.close_all()


named = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="gloo's threads have no name in this torch"
)

LONG = 32 << 20
"""Elements of a message that takes some 50 ms to arrive; it is made longer for a machine on which it does not."""


def in_the_middle(start: Callable[[SwappableGroup, torch.Tensor], dist.Work]) -> ModelParallelGroups:
    """The groups of a worker that was let out of a receive, which ``start`` begins, in the middle of its message."""
    for length in (LONG, 2 * LONG, 4 * LONG, 8 * LONG):
        groups, group, mate = of_launch()
        got = torch.zeros(length)
        work = start(group, got)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(mate.inner.send, [torch.ones(length)], 0, 0)
            eventually(got[0].item, every=0.0005)
            del work
            groups.end()
            sent.exception()  # perhaps: it was still sending
        if not got[-1]:
            return groups
    pytest.fail("every message had arrived before it was looked at")


def open_of(groups: ModelParallelGroups) -> bool:
    """Return True if connections that the worker has shut are still open."""
    return bool(groups._shut & set(open_sockets().values()))


def test_a_receive_that_nobody_waits_for_is_kept_until_gloo_has_closed_its_connection() -> None:
    groups = in_the_middle(lambda group, got: group.recv([got], 1, 0))
    eventually(lambda: not open_of(groups))
    assert groups.guard._receives
    groups.left()
    assert not groups.guard._receives


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=DEADLINE)], ids=["for ever", "for a time"])
def test_a_receive_that_was_waited_for_is_not_kept(timeout: timedelta | None) -> None:
    groups, group, mate = of_launch()
    got = torch.zeros(4)
    work = group.recv([got], 1, 0)
    sent = mate.send([torch.ones(4)], 0, 0)
    assert groups.guard._receives
    assert work.wait(timeout)
    assert sent.wait()
    assert got.all()
    assert not groups.guard._receives


@named
def test_gloo_has_threads_of_the_name_by_which_their_looks_are_counted() -> None:
    _groups, _, _ = of_launch()
    threads = loops()
    before = looks(threads)
    assert before
    eventually(lambda: all(looks(threads)[name] > count for name, count in before.items()))


@pytest.mark.parametrize(
    ("seen", "over"),
    [
        ([({5: 9}, {"1": 0, "2": 0}), ({5: 9}, {"1": 30, "2": 31})], True),
        ([({5: 9}, {"1": 0, "2": 0}), ({5: 9}, {"1": 29, "2": 99})], False),
        ([({5: 9}, {"1": 0, "2": 0}), ({5: 8}, {"1": 30, "2": 30})], False),
        ([({5: 9, 6: 0}, {"1": 0}), ({5: 9}, {"1": 30})], False),
        ([({5: 9}, {"1": 0, "2": 0}), ({5: 9}, {"1": 30})], True),
        ([({5: 9}, {}), ({5: 9}, {})], False),
    ],
    ids=["all look", "one does not look", "one reads", "one closes", "one ends", "none has the name"],
)
def test_gloo_has_given_up_where_each_of_its_threads_looks_often_and_reads_nothing(
    seen: list[tuple[dict[int, int], dict[str, int]]], over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GivenUp, "FIRST", 0)
    given_up, found = GivenUp(), False
    for bytes_left, counts in seen:
        monkeypatch.setattr(gloo_groups, "unread", lambda _, its=bytes_left: its)
        monkeypatch.setattr(gloo_groups, "looks", lambda _, its=counts: its)
        assert not found
        found = given_up.over(bytes_left)
    assert found is over


@named
def test_a_connection_that_gloo_never_closes_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation was freed in the middle of a message, as by a collective that has lost one of several mates."""
    reasons: list[str] = []
    monkeypatch.setattr(model_parallel_groups, "end_process", reasons.append)
    groups = in_the_middle(lambda group, got: group.inner.recv([got], 1, 0))
    shut_ones = set(groups._shut)
    groups.left()
    assert reasons == []
    assert shut_ones & set(open_sockets().values())
    del groups
    gc.collect()  # gloo closes it with the group
    eventually(lambda: not shut_ones & set(open_sockets().values()))


_released = threading.Event()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """No thread of ``quiesce`` outlives its test."""
    _released.clear()
    yield
    _released.set()
    eventually(lambda: not settling())


def settling() -> bool:
    return swappable_group.SETTLING in {thread.name for thread in threading.enumerate()}


class Sum(dist.Work):
    """A collective that was left; it is over, with an error, when the main thread waits for that, or never."""

    def __init__(self, *, stuck: bool = False) -> None:
        super().__init__()
        self.over = False
        self._stuck = stuck

    def is_completed(self) -> bool:
        return self.over

    def wait(self, timeout: Any = None) -> bool:
        if timeout != NO_TIMEOUT:
            raise RuntimeError("Operation timed out!")
        if self._stuck:
            _released.wait()
            return False
        eventually(lambda: "join" in (frame.name for frame in extract_stack(main_frame())))
        self.over = True
        raise RuntimeError("Connection closed by peer")


def main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


@pytest.mark.parametrize("stuck", [False, True])
def test_a_collective_that_was_left_is_waited_for_unless_it_is_stuck(
    monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    monkeypatch.setattr(swappable_group, "_SETTLE_SECONDS", 0.01 if stuck else DEADLINE)
    token, work = CancelToken(1), Sum(stuck=stuck)
    guard = AbortableWorks(token)
    waited = guard.method("allreduce", lambda: work)()
    token.cancel("a death")
    with pytest.raises(dist.DistBackendError, match="was abandoned"):
        waited.wait()
    guard.quiesce()
    assert work.over is not stuck
    assert not guard._under_way


@pytest.mark.parametrize("make", [of_launch, made_anew])
def test_a_reduce_scatter_that_has_failed_holds_nobody_up(
    make: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work is never completed."""
    monkeypatch.setattr(swappable_group, "_SETTLE_SECONDS", DEADLINE)
    groups, group, _ = make()
    work = OPERATIONS["reduce scatter"](group, Tensors(1.0), 0)
    groups.end()
    with pytest.raises(RuntimeError):
        work.wait()
    groups.left()
    assert not settling()
    assert not work.is_completed(), "torch tells of its end now: quiesce() need not ask in another way"


class During(Sum):
    """A sum during a look at which another thread, that of a backward pass, starts one."""

    def __init__(self, guard: AbortableWorks) -> None:
        super().__init__()
        self._guard = guard

    def is_completed(self) -> bool:
        self._guard._under_way.add(Sum(stuck=True))
        return True


@pytest.mark.parametrize("look", ["start", "quiesce"])
def test_two_threads_may_start_collectives_at_once(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swappable_group, "_SETTLE_SECONDS", 0.01)
    guard = AbortableWorks(CancelToken(1))
    guard._under_way.add(During(guard))
    if look == "quiesce":
        guard.quiesce()
    else:
        guard.method("allreduce", lambda: Sum(stuck=True))()
        assert len(guard._under_way) == 2


def test_works_that_are_over_are_not_kept() -> None:
    """They hold their tensors: an activation of each layer, say."""
    guard = AbortableWorks(CancelToken(1))
    one = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=DEADLINE))
    assert guard.method("allreduce", one.allreduce)([torch.ones(1)]).wait()
    assert guard.method("_reduce_scatter_base", one._reduce_scatter_base)(torch.ones(1), torch.ones(1)).wait()
    assert not guard._under_way


def test_a_work_that_nobody_waits_for_is_not_kept_when_it_is_over_and_the_next_begins() -> None:
    guard, works = AbortableWorks(CancelToken(1)), [Sum(), Sum()]
    for work in works:
        guard.method("allreduce", lambda its=work: its)()
        work.over = True
    assert guard._under_way == {works[1]}
