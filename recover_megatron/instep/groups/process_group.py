"""Torch process group over replicas that stays the same object when its members change from epoch to epoch.

Megatron stores groups in many places.  So each group that spans replicas (data-parallel groups and the default group)
is replaced once by an ``EpochGroup``, whose users need not be notified when workers are lost.  The ``size`` and
``rank`` of an ``EpochGroup`` count only workers that have a place now.  The state of the training decides how an
operation is carried out (`traffic`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from recover_megatron.collectives.gloo.swappable_group import AbortableWorks
from recover_megatron.instep.groups.epoch_groups import name_of
from recover_megatron.instep.groups.traffic import Among, Mode, Operation, Traffic, caller
from recover_megatron.workload.grid import Slot


def _copy(target: torch.Tensor, source: torch.Tensor, places: Sequence[int]) -> None:
    """Write ``source`` at each of ``places`` in ``target``: the result of an all-gather without other workers."""
    for at in places:
        target.view(-1)[at * source.numel() : (at + 1) * source.numel()].copy_(source.reshape(-1))


class EpochGroup(dist.ProcessGroup):
    """Group over replicas.

    ``workers``: slots of the members at launch, in rank order.  ``original``: torch's group of the launch; None on a
    worker that was started later, which is never in ``Mode.STARTING``.  ``places``: ``workers``, and the slots of the
    replicas that a growing run may add.  ``mates``: (group that carries messages inside the replica, slots of
    that group's members in rank order); None if ``original`` carries these messages.
    """

    def __init__(
        self,
        traffic: Traffic,
        original: dist.ProcessGroup | None,
        workers: tuple[Slot, ...],
        label: str,
        places: tuple[Slot, ...] | None = None,
    ) -> None:
        self.workers = workers
        self.places = places or workers
        self.label = label
        self._original = original
        self.mates: tuple[dist.ProcessGroup, tuple[Slot, ...]] | None = None
        self._traffic = traffic
        self._guarded: dict[str, Callable[..., dist.Work]] = {}
        self._among: tuple[frozenset[Slot] | None, tuple[Slot, ...]] = (None, ())
        super().__init__(workers.index(traffic.me), len(workers))

    @property
    def original(self) -> dist.ProcessGroup:
        assert self._original is not None, "this worker started after the groups of the launch were created"
        return self._original

    # ---- members

    def among(self, live: frozenset[Slot]) -> tuple[Slot, ...]:
        """Return the group's slots that are in ``live``; cached, since Megatron often asks for sizes."""
        if self._among[0] is not live:
            self._among = live, tuple(slot for slot in self.places if slot in live)
        return self._among[1]

    def rank(self) -> int:
        members, me = self._traffic.members(self), self._traffic.me
        return members.index(me) if me in members else -1

    def size(self) -> int:
        return len(self._traffic.members(self))

    getRank, getSize = rank, size

    @property
    def _own_places(self) -> Sequence[int]:
        """Ranks whose part this worker fills in an all-gather without other workers.

        Until this worker has joined a run, these are all ranks.
        """
        return range(self.size()) if self._traffic.recovery is None else [self.rank()]

    def name(self) -> str:
        return self._original.name() if self._original is not None else self.label

    getBackendName = name

    @property
    def group_name(self) -> str:
        """Name of the group; not the original's name, since torch's functional collectives look up groups by name."""
        return f"recover {name_of(self.label, self.workers)}"

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

    # ---- collectives, as torch.distributed calls them

    def _run(
        self, operation: Operation, alone: Callable[[], None] = lambda: None, alike: Callable[[], None] | None = None
    ) -> dist.Work:
        self._traffic.run(self, operation, alone, alike)
        return _done()

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        def alike() -> None:
            for tensor in tensors:
                tensor.mul_(self.size())

        return self._run(lambda on, among: on.allreduce(tensors, opts or dist.AllreduceOptions()), alike=alike)

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> dist.Work:
        for tensor in tensors:
            options = dist.AllreduceOptions()
            options.reduceOp = opts.reduceOp
            self.allreduce([tensor], options)
        return _done()

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        root = opts.rootRank
        return self._run(lambda on, among: on.broadcast(tensors, among.from_root(opts, root)))

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        root = opts.rootRank
        return self._run(lambda on, among: on.reduce(tensors, among.to_root(opts, root)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather the inputs of all members; the outputs for members that die during the operation do not change."""

        def start(on: Any, among: Among) -> Any:
            return on.allgather([among.pick(output) for output in outputs], inputs, opts or c10d.AllgatherOptions())

        def alone() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                for at in self._own_places:
                    output[at].copy_(tensor)

        return self._run(start, alone)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> dist.Work:
        """Gather the inputs of all members into one tensor; otherwise like ``allgather``."""

        def start(on: Any, among: Among) -> Any:
            options = opts or c10d.AllgatherOptions()
            room = output.view(-1)[: len(among.expected) * tensor.numel()]
            if among.all_there:
                return on._allgather_base(room, tensor.reshape(-1), options)
            return on.allgather([among.parts(room)], [tensor.reshape(-1)], options)

        return self._run(start, lambda: _copy(output, tensor, self._own_places))

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return _done()

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        root = opts.rootRank

        def start(on: Any, among: Among) -> Any:
            options = among.to_root(opts, root)
            if among.present[options.rootRank] != self._traffic.me:
                return on.gather([], inputs, options)
            room = [among.pick(output) for output in outputs] or [[torch.empty_like(inputs[0]) for _ in among.present]]
            return on.gather(room, inputs, options)

        return self._run(start)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        root = opts.rootRank

        def start(on: Any, among: Among) -> Any:
            return on.scatter(outputs, [among.pick(parts) for parts in inputs], among.from_root(opts, root))

        return self._run(start)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> dist.Work:
        def start(on: Any, among: Among) -> Any:
            source = tensor if among.all_there else torch.cat(among.parts(tensor))
            return on._reduce_scatter_base(output, source, opts or dist.ReduceScatterOptions())

        return self._run(start)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        def start(on: Any, among: Among) -> Any:
            return on.alltoall(among.pick(outputs), among.pick(inputs), opts or dist.AllToAllOptions())

        return self._run(start)

    def alltoall_base(self, output: Any, tensor: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> dist.Work:
        def start(on: Any, among: Among) -> Any:
            options = opts or dist.AllToAllOptions()
            if among.all_there:
                return on.alltoall_base(output, tensor, out_sizes, in_sizes, options)
            size = len(among.expected)
            rooms = output.split(out_sizes or output.shape[0] // size)
            parts = tensor.split(in_sizes or tensor.shape[0] // size)
            return on.alltoall(among.pick(rooms), among.pick(parts), options)

        return self._run(start)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        if self._traffic.agreement_is_enough(self):
            return _done()
        return self._run(lambda on, among: on.barrier(opts or dist.BarrierOptions()))

    def monitored_barrier(self, *unused: Any, **unused_too: Any) -> None:
        self.barrier()

    # Point-to-point messages stay inside a replica.  (An interleaved pipeline of two stages sends them over the default
    # group.)  In every mode they are sent over ``mates`` or, if this is None, over torch's group of the launch.

    def guard_by(self, guard: AbortableWorks) -> None:
        """Make messages over torch's group of the launch, if that group uses gloo, fail when the token of ``guard`` is
        cancelled."""
        self._guarded = {name: guard.method(name, getattr(self.original, name)) for name in ("send", "recv")}

    def send(self, tensors: Any, to: int, tag: int) -> dist.Work:
        carry, rank = self._route("send", to)
        return carry(tensors, rank, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        carry, rank = self._route("recv", source)
        return carry(tensors, rank, tag)

    def _route(self, name: str, rank: int) -> tuple[Callable[..., dist.Work], int]:
        slot = self._traffic.members(self)[rank]
        if not self._traffic.is_mate(slot):
            self._traffic.refuse(caller(), self, "with a message to one worker of another replica, which may be lost")
        if self.mates is not None:
            return getattr(self.mates[0], name), self.mates[1].index(slot)
        return self._guarded.get(name) or getattr(self.original, name), self.workers.index(slot)


def _of_original(name: str) -> Callable[..., None]:
    """Return a method that calls method ``name`` of the original group; without an original it does nothing."""

    def method(self: EpochGroup, *args: Any) -> None:
        if self._original is not None:
            getattr(self._original, name)(*args)

    return method


for _name in ("set_timeout", "_set_default_timeout", "shutdown", "abort"):
    setattr(EpochGroup, _name, _of_original(_name))


def _not_carried(name: str) -> Callable[..., Any]:
    """Return a method for an unsupported operation: it calls torch's method in ``Mode.STARTING``, else ends the run."""

    def method(self: EpochGroup, *args: Any, **kwargs: Any) -> Any:
        if self._traffic.mode is Mode.STARTING:
            return getattr(self.original, name)(*args, **kwargs)
        self._traffic.refuse(replace(caller(), operation=name), self, "with an unsupported operation")

    return method


for _name in (
    "allgather_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "recv_anysource", "split_group", "merge_remote_group",
):  # fmt: skip
    setattr(EpochGroup, _name, _not_carried(_name))


def _done() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def register(group: dist.ProcessGroup, original: dist.ProcessGroup) -> None:
    """Register ``group`` with torch.distributed in place of ``original``."""
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


def register_new(group: dist.ProcessGroup, slots: tuple[Slot, ...], backend: str, *, default: bool = False) -> None:
    """Register with torch.distributed a group that has no original."""
    world = c10d._world
    world.pg_map[group] = (backend, None)
    world.pg_names[group] = f"{group.group_name} {len(world.pg_names)}"
    world.pg_group_ranks[group] = {slot: at for at, slot in enumerate(slots)}
    world.pg_to_tag[group] = ""  # as in torch for groups without a tag: to destroy a group, torch needs an entry
    world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
    if default:
        c10d._update_default_pg(group)


def renumber(ranks: dict[Slot, int]) -> None:
    """Rewrite torch's maps from global ranks to group ranks.  ``ranks``: slot -> new global rank.

    In groups inside a replica, a slot without a new rank gets a negative rank, which no worker uses, so that torch can
    still use the groups of a broken replica.
    """
    world = c10d._world
    for group, known in list(world.pg_group_ranks.items()):
        if isinstance(group, EpochGroup):
            members = [slot for slot in group.places if slot in ranks]
            world.pg_group_ranks[group] = {ranks[slot]: at for at, slot in enumerate(members)}
        else:
            slots = _slots_of.setdefault(group, list(known))
            world.pg_group_ranks[group] = {ranks.get(slot, -1 - slot): at for at, slot in enumerate(slots)}


def register_slots(group: dist.ProcessGroup, slots: list[Slot]) -> None:
    """Register the slots of the members of a group inside a replica, for ``renumber``."""
    _slots_of[group] = slots


_slots_of: dict[dist.ProcessGroup, list[Slot]] = {}
