"""A torch process group that outlives its members: the outside stays, the inside is that of the present epoch.

Megatron keeps groups in a hundred places.  Those that reach over replicas (data-parallel ones and the default group)
are replaced, once, by ``EpochGroup``: who holds it need not be told when workers are lost.  Its ``size`` and ``rank``
are those among the workers that have a place now.  Groups inside a replica are those of `replica_group`.

What an operation does depends on where the training is (``Traffic``):

    STARTING    before the first epoch: torch's own group, as it was made
    STEP        inside a training step, which sums by itself what crosses replicas: nothing is sent
    SECTION     inside a section: a gloo group of the epoch; a revocation raises EpochRevoked ...
    DEFERRED    ... or, in a section whose workers depend on each other inside their replica (evaluation), lets the rest
                of the section run with what is at hand; its end tells
    OPEN        anywhere else: the operation is a section of its own, tried again with whoever is left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.instep.guard import Guard
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.staging import Staged

WORLD = "world"
"""Label of the default group."""


class Mode(Enum):
    """See the module's text."""

    STARTING = "starting"
    STEP = "step"
    SECTION = "section"
    DEFERRED = "deferred"
    OPEN = "open"


Operation = Callable[[Any], Any]
"""Starts one collective on a backend and returns its work."""


class Traffic:
    """Routes the operations of all ``EpochGroup``s of a worker, which stands (or will stand) in ``slot``."""

    def __init__(self, slot: int, mode: Mode = Mode.STARTING) -> None:
        self.mode = mode
        self.slot = slot
        self.recovery: Recovery | None = None

    @contextmanager
    def during(self, mode: Mode) -> Iterator[None]:
        """Run a part of the training in ``mode``."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def members(self, group: EpochGroup) -> tuple[int, ...]:
        """The slots of a group in which somebody stands now, in its order."""
        if self.recovery is None or not self.recovery.started:
            return group.workers
        return group.among(self.recovery.live)

    @property
    def me(self) -> int:
        """This worker's slot."""
        return self.slot if self.recovery is None or not self.recovery.started else self.recovery.slot

    def agreement_is_enough(self, group: EpochGroup) -> bool:
        """Carry out a barrier of all workers outside sections: that all have reported one more decision is one."""
        if self.mode is not Mode.OPEN or self.recovery is None or group.label != WORLD:
            return False
        self.recovery.section("barrier", lambda: None)
        return True

    def run(self, group: EpochGroup, operation: Operation, alone: Callable[[], None]) -> None:
        """Carry out one operation.  ``alone``: its effect if this worker were the only member."""
        if self.mode is Mode.STARTING:
            work = operation(group.original)
            if work is not None:
                work.wait()
        elif self.mode is Mode.STEP:
            alone()
        elif self.mode is Mode.OPEN:
            assert self.recovery is not None
            with self.during(Mode.SECTION):
                self.recovery.section(f"{group.label} operation", lambda: self._inside(group, operation))
        elif self.mode is Mode.DEFERRED and self.recovery is not None and self.recovery.generation.over:
            alone()
        else:
            try:
                self._inside(group, operation)
            except EpochRevoked:
                if self.mode is not Mode.DEFERRED:
                    raise
                alone()

    def _inside(self, group: EpochGroup, operation: Operation) -> None:
        assert self.recovery is not None
        generation = self.recovery.generation
        self.recovery.strike("traffic")
        try:
            with self.recovery.waiting(f"{group.label} operation"):
                backend = generation.control(group.label, self.members(group))
                staged = Staged()
                backend.wait(backend.call(lambda on: operation(staged.to(on))))
                staged.bring_back()
        except PeerLost as lost:
            generation.end(str(lost))
            raise EpochRevoked(generation.number, str(lost)) from lost


def _copy(target: torch.Tensor, source: torch.Tensor, places: Sequence[int]) -> None:
    """What gathering from oneself alone leaves: the own part at its place."""
    for at in places:
        target.view(-1)[at * source.numel() : (at + 1) * source.numel()].copy_(source.reshape(-1))


class EpochGroup(dist.ProcessGroup):
    """See the module's text.  ``workers``: slots, in rank order; ``original``: torch's group of those who were there at
    launch (None where this worker was not: ``Mode.STARTING`` is not for it).

    ``mates``: another group that carries messages inside the replica, and the slots of its members in rank order.
    """

    def __init__(
        self, traffic: Traffic, original: dist.ProcessGroup | None, workers: tuple[int, ...], label: str
    ) -> None:
        self.workers = workers
        self.label = label
        self._original = original
        self.mates: tuple[dist.ProcessGroup, tuple[int, ...]] | None = None
        self._traffic = traffic
        self._guarded: dict[str, Callable[..., dist.Work]] = {}
        self._among: tuple[frozenset[int] | None, tuple[int, ...]] = (None, ())
        super().__init__(workers.index(traffic.me), len(workers))

    @property
    def original(self) -> dist.ProcessGroup:
        assert self._original is not None, "this worker was not there when the groups of the launch were made"
        return self._original

    # ---- who

    def among(self, live: frozenset[int]) -> tuple[int, ...]:
        """The workers that are in ``live``.  Megatron asks for sizes many times an iteration: kept for the last one."""
        if self._among[0] is not live:
            self._among = live, tuple(worker for worker in self.workers if worker in live)
        return self._among[1]

    def rank(self) -> int:
        members, me = self._traffic.members(self), self._traffic.me
        return members.index(me) if me in members else -1

    def size(self) -> int:
        return len(self._traffic.members(self))

    getRank, getSize = rank, size

    @property
    def _own_places(self) -> Sequence[int]:
        """Where a gathering in which nobody else takes part puts this worker's part.

        All places where it builds its model alone: the others would say the same, or it need not know.
        """
        return range(self.size()) if self._traffic.recovery is None else [self.rank()]

    def name(self) -> str:
        return self._original.name() if self._original is not None else self.label

    getBackendName = name

    @property
    def group_name(self) -> str:
        return self._original.group_name if self._original is not None else f"{self.label} {self.workers}"

    def getGroupName(self) -> str:
        return self.group_name

    @property
    def group_desc(self) -> str:
        return self._original.group_desc if self._original is not None else self.label

    @property
    def _device_types(self) -> list[torch.device]:
        return self._original._device_types if self._original is not None else [torch.device("cpu")]

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._original.bound_device_id if self._original is not None else None

    def _get_backend(self, device: torch.device) -> Any:
        return self.original._get_backend(device)

    def set_timeout(self, timeout: Any) -> None:
        if self._original is not None:
            self._original.set_timeout(timeout)

    def _set_default_timeout(self, timeout: Any) -> None:
        if self._original is not None:
            self._original._set_default_timeout(timeout)

    def shutdown(self) -> None:
        if self._original is not None:
            self._original.shutdown()

    def abort(self) -> None:
        if self._original is not None:
            self._original.abort()

    # ---- collectives, as torch.distributed calls them

    def _run(self, operation: Operation, alone: Callable[[], None] = lambda: None) -> dist.Work:
        self._traffic.run(self, operation, alone)
        return _done()

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda on: on.allreduce(tensors, opts or dist.AllreduceOptions()))

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> dist.Work:
        for tensor in tensors:
            options = dist.AllreduceOptions()
            options.reduceOp = opts.reduceOp
            self.allreduce([tensor], options)
        return _done()

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        return self._run(lambda on: on.broadcast(tensors, opts))

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        return self._run(lambda on: on.reduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The caller made room for who was there when it asked: a loss meanwhile leaves the last places as is."""

        def start(on: Any) -> Any:
            size = self.size() if on is not self._original else len(self.workers)
            return on.allgather([output[:size] for output in outputs], inputs, opts or dist.AllgatherOptions())

        def alone() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                for at in self._own_places:
                    output[at].copy_(tensor)

        return self._run(start, alone)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> dist.Work:
        """As ``allgather``."""

        def start(on: Any) -> Any:
            size = self.size() if on is not self._original else len(self.workers)
            room = output.view(-1)[: size * tensor.numel()]
            return on._allgather_base(room, tensor.reshape(-1), opts or dist.AllgatherOptions())

        return self._run(start, lambda: _copy(output, tensor, self._own_places))

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return _done()

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        return self._run(lambda on: on.gather(outputs, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        return self._run(lambda on: on.scatter(outputs, inputs, opts))

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda on: on._reduce_scatter_base(output, tensor, opts or dist.ReduceScatterOptions()))

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda on: on.alltoall(outputs, inputs, opts or dist.AllToAllOptions()))

    def alltoall_base(self, output: Any, tensor: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> dist.Work:
        options = opts or dist.AllToAllOptions()
        return self._run(lambda on: on.alltoall_base(output, tensor, out_sizes, in_sizes, options))

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        if self._traffic.agreement_is_enough(self):
            return _done()
        return self._run(lambda on: on.barrier(opts or dist.BarrierOptions()))

    def monitored_barrier(self, *unused: Any, **unused_too: Any) -> None:
        self.barrier()

    # Point-to-point messages stay inside a replica (an interleaved pipeline of two stages sends them over the default
    # group): torch's own group carries them, whatever the mode, under the ranks of the launch, or ``mates`` does.

    def guard_by(self, guard: Guard) -> None:
        """Have gloo's messages over torch's own group end with ``guard``'s switch."""
        self._guarded = {name: guard.method(name, getattr(self.original, name)) for name in ("send", "recv")}

    def send(self, tensors: Any, to: int, tag: int) -> dist.Work:
        carry, rank = self._carrier("send", to)
        return carry(tensors, rank, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        carry, rank = self._carrier("recv", source)
        return carry(tensors, rank, tag)

    def _carrier(self, name: str, rank: int) -> tuple[Callable[..., dist.Work], int]:
        slot = self._traffic.members(self)[rank]
        if self.mates is not None:
            return getattr(self.mates[0], name), self.mates[1].index(slot)
        return self._guarded.get(name) or getattr(self.original, name), self.workers.index(slot)


def _done() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def register(group: dist.ProcessGroup, original: dist.ProcessGroup) -> None:
    """Make torch.distributed know the group in place of its original."""
    world = c10d._world
    is_default = original is world.default_pg
    world.pg_map[group] = world.pg_map[original]
    world.pg_names[group] = world.pg_names[original]
    world.pg_group_ranks[group] = dict(world.pg_group_ranks[original])
    world.pg_backend_config[group] = world.pg_backend_config[original]
    if original in world.pg_to_tag:
        world.pg_to_tag[group] = world.pg_to_tag[original]
    if is_default:
        world.default_pg = group


def register_new(group: dist.ProcessGroup, slots: tuple[int, ...], backend: str, *, default: bool = False) -> None:
    """Make torch.distributed know a group that has no original."""
    world = c10d._world
    world.pg_map[group] = (backend, None)
    world.pg_names[group] = f"{group.group_name} {len(world.pg_names)}"
    world.pg_group_ranks[group] = {slot: at for at, slot in enumerate(slots)}
    world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
    if default:
        c10d._update_default_pg(group)


def renumber(ranks: dict[int, int]) -> None:
    """Rewrite torch's map from global ranks to group ranks: ``ranks`` gives each slot's new global rank.

    Slots without one keep a rank that nobody uses, so that the groups of a broken replica stay well-formed.
    """
    world = c10d._world
    for group, known in list(world.pg_group_ranks.items()):
        if isinstance(group, EpochGroup):
            members = [slot for slot in group.workers if slot in ranks]
            world.pg_group_ranks[group] = {ranks[slot]: at for at, slot in enumerate(members)}
        else:
            slots = _slots_of.setdefault(group, list(known))
            world.pg_group_ranks[group] = {ranks.get(slot, -1 - slot): at for at, slot in enumerate(slots)}


def stands_in(group: dist.ProcessGroup, slots: list[int]) -> None:
    """Tell ``renumber`` in which slots the members of a group inside a replica stand."""
    _slots_of[group] = slots


_slots_of: dict[dist.ProcessGroup, list[int]] = {}
