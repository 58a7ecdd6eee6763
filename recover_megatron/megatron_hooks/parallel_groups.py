"""Process groups that replace Megatron's groups and keep working after workers are lost.

torch.distributed.init_process_group     creates the default group, an EpochGroup
parallel_state.create_group              creates an EpochGroup if the group spans several replicas, otherwise a
                                         SwappableGroup, which is registered in ModelParallelGroups
torch.distributed.new_group              the same as create_group, for groups that other code creates
a new plan                               renumbers the n occupied slots as global ranks 0 .. n-1, without gaps: rank 0
                                         prints, the last rank logs, and ranks 0 .. n-1 write checkpoints.  The sizes in
                                         Megatron's arguments keep their values from the launch
log_utils.safe_get_world_size            returns the launch's size, so that Megatron attributes all lines of its
                                         progress log to one job
a place in another replica               makes this worker and its new peers rebuild the groups inside that replica

A worker that builds its model while other workers train (``alone``) creates no torch group.  Until it has a place, each
of its groups has this worker as the only member.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args

from recover_megatron import integrate, out_of_turn
from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.groups.model_parallel_groups import ModelParallelGroups
from recover_megatron.instep.groups.process_group import EpochGroup, register, register_new, register_slots, renumber
from recover_megatron.instep.groups.traffic import WORLD, Caller, Mode, Traffic, caller
from recover_megatron.instep.manager import Manager, View
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.fsdp.fsdp_state import install_meshes
from recover_megatron.megatron_hooks.layout import inner_ranks_of
from recover_megatron.megatron_hooks.logging import writers
from recover_megatron.workload.grid import LaunchGrid, Slot, launch_grid


def renew_rank_copies(model: Iterable[torch.nn.Module], context_ranks: Sequence[int]) -> None:
    """Set ``context_ranks`` in every module that stores the global ranks of its context-parallel group.

    Transformer Engine's attention gets the list when the model is built, and sends keys and values to these ranks.
    """
    for chunk in model:
        for module in chunk.modules():
            if getattr(module, "cp_global_ranks", None):
                module.cp_global_ranks = list(context_ranks)


KNOWN = {
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads", "allreduce"): (
        "the number of tokens: the step has summed it over the complete batch, in the tail bucket"),
    ("megatron.core.transformer.moe.moe_utils", "get_updated_expert_bias", "allreduce"): (
        "the tokens of each expert: the step has summed them over the complete batch, in the tail bucket"),
    ("megatron.core.distributed.finalize_model_grads", "_update_router_qb_beta", "allreduce"): (
        "the quantiles of the experts' scores: the step has computed them over the complete batch, in the tail bucket"),
    ("megatron.core.optimizer.qk_clip", "clip_qk", "allreduce"): (
        "the largest logits of attention: the step has computed them over the complete batch, in the tail bucket"),
    ("megatron.training.training", "train_step", "allreduce"): (
        "the loss and its divisor: the step has summed them over the complete batch, in the tail bucket"),
    ("megatron.bridge.training.train", "train_step", "allreduce"): (
        "the loss and its divisor, in Megatron-Bridge's loop: summed in the tail bucket"),
    ("megatron.core.optimizer.optimizer", "has_grad_norm_group", "allreduce"): (
        "a test, with the distributed optimizer over all replicas, for parameters with a separate gradient norm: only "
        "--mtp-detach-heads creates such parameters, and --recover refuses this flag with that optimizer"),
    ("megatron.core.timers", "start", "barrier"): (
        "barrier at the start of a time measurement (--timing-log-level 1 and 2): no result depends on it"),
    ("megatron.core.timers", "stop", "barrier"): "barrier at the end of a time measurement: no result depends on it",
}  # fmt: skip
"""Megatron's operations over replicas for which a step sends nothing: (module, function, operation) -> the reason.

Any other operation over replicas in a step ends the run (``UnknownOperation``), because if each replica did the
operation alone, the replicas would diverge, or a value would be counted twice."""


AVERAGED = (
    "megatron.training.utils.common_utils", "average_losses_across_data_parallel_group", "allreduce"
)  # fmt: skip
"""All-reduce by which some loss functions (BERT's) average the loss of one microbatch over data-parallel ranks.

The result is a sum, which the loss function divides by the size of the group.  `trainer` and `evaluation` compute the
mean over all microbatches from each worker's own losses instead.""" ""


def is_averaged(caller: Caller) -> bool:
    """Return whether the caller's operation is ``AVERAGED``."""
    return (caller.module, caller.function, caller.operation) == AVERAGED


def is_known(caller: Caller) -> bool:
    """Return whether the caller's operation is in ``KNOWN``."""
    return (caller.module, caller.function, caller.operation) in KNOWN


RANK_LISTS = tuple(name for name in vars(parallel_state) if name.endswith("_GLOBAL_RANKS"))
"""Names of the variables of parallel_state that list the global ranks of groups."""


class Groups:
    """Process groups of this worker.  Call ``install`` before Megatron creates a group.

    ``slot``: this worker's slot at launch, or the slot for which it builds its model ``alone``.  ``ports``: ports of
    the rendezvous store and the coordinators; connections to these ports that are opened while Megatron creates its
    groups belong to no group.  ``device``: this worker's device.  ``most``: the number of replicas to which the run may
    grow.
    """

    def __init__(
        self, slot: Slot, ports: Collection[int], device: torch.device, *, alone: bool = False, most: int = 0
    ) -> None:
        self._most = most
        self._ports = ports
        self._device = device
        self._begin(slot, alone=alone)

    def _begin(self, slot: Slot, *, alone: bool) -> None:
        self.traffic, self.alone = Traffic(slot, Mode.ALONE if alone else Mode.STARTING, is_known, is_averaged), alone
        self.inside = ModelParallelGroups(self._ports, self._device)
        self._grid: LaunchGrid | None = None
        self.model: Sequence[torch.nn.Module] = ()
        """Model chunks of this worker, whose modules may store global ranks; empty until the model is built."""
        self._replica = -1
        self._own: list[SwappableGroup] = []
        self._mates: SwappableGroup | None = None
        self._lists: dict[str, Any] = {}
        self._profiled: list[int] = []
        """Ranks of --profile-ranks, as numbered at launch; empty if Megatron profiles all ranks or none."""
        self._creating = False
        """True while ``_create_group`` calls the original function, whose calls of ``new_group`` are not replaced."""

    def install(self, loop: Loop) -> None:
        """Wrap Megatron's functions that create groups; raises UserError if their signatures are unknown."""
        out_of_turn.begin()
        monkeypatch.wrap("create_group", self._create_group)
        for module in (dist, dist.distributed_c10d):
            integrate.wrap(module, "new_group", ("ranks",), self._new_group, monkeypatch.SUPPORTED)
        loop.wrap("initialize", self._initialize)
        # If a line of Megatron's progress log has a number of GPUs other than `args.world_size`, Megatron attributes it
        # to another job, and then does not find the start of the present job.
        loop.wrap("world_size", lambda original: lambda: get_args().world_size)

    def again(self, slot: Slot) -> None:
        """Forget all groups, because this worker will build its model again, for ``slot`` and without other workers."""
        self._begin(slot, alone=True)

    def _initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _initialize_distributed(*args: Any, **kwargs: Any) -> Any:
            make_default = dist.init_process_group

            def init_process_group(*args: Any, **kwargs: Any) -> None:
                if self.alone:
                    everyone = self._world(None)
                    register_new(everyone, everyone.workers, str(kwargs["backend"]), default=True)
                else:
                    # An interleaved pipeline of two stages sends messages inside its replica through the default group.
                    self.inside.make(lambda: make_default(*args, **kwargs))

            with monkeypatch.replaced(dist, init_process_group=init_process_group):
                result = original(*args, **kwargs)
            if not self.alone:
                default = dist.distributed_c10d._get_default_group()
                outside = self._world(default)
                if dist.get_backend(default) == "gloo":
                    outside.guard_by(self.inside.guard)
                register(outside, default)
            # Sample counts and learning rates use the data-parallel size at launch, even after workers are lost.
            parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()
            self._lists = {name: getattr(parallel_state, name) for name in RANK_LISTS}
            self._profiled = list(getattr(get_args(), "profile_ranks", None) or ())
            if getattr(get_args(), "use_megatron_fsdp", False):
                install_meshes(lambda: self.apart, (EpochGroup, SwappableGroup))
            return result

        return _initialize_distributed

    def _world(self, original: Any) -> EpochGroup:
        world = int(os.environ["WORLD_SIZE"])
        grid, everyone = self._known_grid(world), tuple(map(Slot, range(world)))
        return EpochGroup(self.traffic, original, everyone, WORLD, grid.column(everyone))

    def _known_grid(self, world: int) -> LaunchGrid:
        if self._grid is None:
            self._grid = grid_of(get_args(), world, self._most)
            self._replica = self._grid.place(self.traffic.slot)[0]
        return self._grid

    @property
    def grid(self) -> LaunchGrid:
        """The launch grid; known after Megatron has created its groups."""
        assert self._grid is not None
        return self._grid

    def _create_group(self, original: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            self._creating = True
            try:
                return original(*args, **kwargs)
            finally:
                self._creating = False

        def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            grid = self._known_grid(dist.get_world_size())
            members = tuple(map(Slot, range(dist.get_world_size()) if ranks is None else ranks))
            if self.traffic.slot not in members:
                return dist.GroupMember.NON_GROUP_MEMBER if self.alone else create(ranks, *args, **kwargs)
            label = str(kwargs.get("group_desc") or name).lower()
            options = kwargs.get("pg_options")  # Megatron's options for this group (--nccl-communicator-config-path)
            inside = len({grid.place(slot)[0] for slot in members}) == 1
            places = members if inside else grid.column(members)
            if self.alone:
                backend = str(kwargs.get("backend") or dist.get_backend())
                group: Any = EpochGroup(self.traffic, None, members, label, places)
                if inside:
                    group = self._inside(group, members, label, backend, options)
                register_new(group, members, backend)
                return group
            group = self.inside.make(lambda: create(ranks, *args, **kwargs)) if inside else None
            if group is None:
                group = create(ranks, *args, **kwargs)
                outside: Any = EpochGroup(self.traffic, group, members, label, places)
            else:
                outside = self._inside(group, members, label, str(dist.get_backend(group)), options)
            register(outside, group)
            made = parallel_state._global_process_group_list
            if made and made[-1] is group:
                made[-1] = outside
            return outside

        return create_group

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``new_group``: groups that a script creates are replaced in the same way as Megatron's groups.

        `traffic` checks each use of a group over several replicas.
        """
        make = self._create_group(original, "new_group")

        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._creating or not dist.is_initialized():
                return original(ranks, *args, **kwargs)
            ranks = None if ranks is None else sorted(ranks)
            if self.traffic.mode in (Mode.STARTING, Mode.ALONE):
                return make(ranks, *args, **kwargs)
            slots = self.traffic.occupied_slots or [Slot(rank) for rank in range(dist.get_world_size())]
            members = tuple(slots if ranks is None else (slots[rank] for rank in ranks))
            if self.traffic.me in members and len({self.grid.place(slot)[0] for slot in members}) > 1:
                group = EpochGroup(self.traffic, None, members, str(kwargs.get("group_desc") or "new_group").lower())
                where = "and was created after the training began, so workers that join later lack it: create it sooner"
                self.traffic.refuse(replace(caller(), operation="new_group"), group, where)
            return original(ranks, *args, **kwargs)

        return new_group

    def _inside(self, group: Any, members: tuple[Slot, ...], label: str, backend: str, options: Any) -> SwappableGroup:
        positions = [self.grid.place(slot)[1] for slot in members]
        name = "-".join([label or "group", *map(str, positions)])
        number = sum(own.own_name.startswith(f"{name}#") for own in self._own)
        me = self.grid.place(self.traffic.slot)[1]
        outside = SwappableGroup(
            group, positions, me, f"{name}#{number}", backend, placeholder=self.alone, options=options
        )
        self._own.append(outside)
        self.inside.keep(outside)
        return outside

    @property
    def me(self) -> Slot:
        """The slot that this worker occupies, or the slot for which it builds its model."""
        return self.traffic.me

    # ---- the mode of the training, from which `traffic` decides what an operation over replicas does

    @property
    def apart(self) -> bool:
        """True while this worker is not part of the training, so its operations over replicas involve only itself."""
        return self.traffic.mode is Mode.ALONE

    def leave_training(self) -> None:
        """Leave the training: operations over replicas send nothing until ``open`` is called."""
        self.traffic.mode = Mode.ALONE

    @property
    def is_open(self) -> bool:
        """True while this worker takes part in the training, but is in no step and no section."""
        return self.traffic.mode is Mode.OPEN

    def open(self) -> None:
        """Allow operations over replicas.  Called at the start of the training and before each step."""
        self.traffic.mode = Mode.OPEN

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context of a training step, in which operations of ``KNOWN`` send nothing.

        The step itself does the communication between replicas.
        """
        return self.traffic.during(Mode.STEP)

    def deferring(self) -> AbstractContextManager[None]:
        """Return the context of a section that, if the epoch ends in it, runs to its end and is then repeated."""
        return self.traffic.during(Mode.DEFERRED)

    @contextmanager
    def in_section(self) -> Iterator[None]:
        """Context of a section, in which groups of the epoch carry out the collectives inside the replica.

        The workers of a replica learn at different times that the epoch has ended.  The first of them enters the
        rendezvous.  The collectives of the others then fail, because their group ends with the epoch; otherwise they
        would wait for the first worker.
        """
        slots = self.grid.replicas[self._replica]
        with ExitStack() as stack:
            stack.enter_context(self.traffic.during(Mode.SECTION))
            for group in self._own:
                if len(group.positions) > 1:
                    members = tuple(slots[position] for position in group.positions)
                    over_epoch = EpochGroup(self.traffic, None, members, group.own_name)
                    stack.enter_context(group.carried_by(over_epoch))
            yield

    def regroup(self, view: View) -> None:
        """Rebuild the groups inside this worker's new replica over the present workers of that replica.

        Every worker of that replica must call this method.  Raises ``EpochRevoked`` and ``PeerLost``.
        """
        default = dist.distributed_c10d._get_default_group()
        assert isinstance(default, EpochGroup)
        slots = self.grid.replicas[view.replica]
        if self._mates is None:
            # Messages of the default group inside the replica are sent through a SwappableGroup: see EpochGroup.
            everyone = range(self.grid.size)
            alone = EpochGroup(self.traffic, None, slots, "mates")
            self._mates = SwappableGroup(alone, everyone, view.position or 0, "mates", str(dist.get_backend(default)))
            self.inside.keep(self._mates)
        # The groups outlive the epoch, so they use a peer store that lives as long as the replica.
        peer_store = view.decision.peer_stores[view.decision.grid[view.replica][0]]
        store = PeerStoreClient(peer_store, view.communication.secret)
        self.inside.rebuild(view.groups, view.replica, store, view.communication.host)
        default.mates = (self._mates, slots)
        moved = dict(zip(self.grid.replicas[self._replica], slots, strict=True))
        for group in self._own:
            register_slots(group, [slots[position] for position in group.positions])
        self._lists = {name: _moved(value, moved) for name, value in self._lists.items()}
        self._replica = view.replica

    def left(self, manager: Manager) -> None:
        """Release all groups, because this worker has left the training and has no place.  Call it in the main thread.

        The epoch's groups are closed first, while the ``Leaving`` thread still runs: closing them may wait for the
        device, and that thread terminates the process if the main thread is stuck in a call.
        """
        manager.release()
        self.inside.left()

    def planned(self, decision: Decision) -> None:
        """Renumber the global ranks in torch and Megatron according to the new plan ``decision``."""
        ranks = {slot: at for at, slot in enumerate(decision.slots(self.grid))}
        renumber(ranks)
        for name, ranks_at_launch in self._lists.items():
            setattr(parallel_state, name, _renumbered(ranks_at_launch, ranks))
        get_args().rank = ranks[self.traffic.me]
        if self._profiled:
            # train() creates a profiler at its start if this rank is listed, and checks the list in each iteration.
            get_args().profile_ranks = _renumbered(self._profiled, ranks)
        if get_args().context_parallel_size > 1:
            renew_rank_copies(self.model, dist.get_process_group_ranks(parallel_state.get_context_parallel_group()))
        writers.take_turns(ranks[self.traffic.me] == len(ranks) - 1)


def _moved(value: Any, moved: dict[Slot, Slot]) -> Any:
    """Translate lists of global ranks by ``moved`` (old slot -> new slot); a list with an unknown slot is kept."""
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, int) for item in value) and not set(value) <= set(moved):
            return value
        return type(value)(_moved(item, moved) for item in value)
    return moved.get(Slot(value), value) if isinstance(value, int) else value


def _renumbered(value: Any, ranks: dict[Slot, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_renumbered(item, ranks) for item in value)
    return ranks.get(Slot(value), -1 - value) if isinstance(value, int) else value


def column_of(group: Any) -> tuple[Slot, ...]:
    """Return the slots of a Megatron group at launch, and those that the group gets if the run grows."""
    return group.places if isinstance(group, EpochGroup) else launched_of(group)


def launched_of(group: Any) -> tuple[Slot, ...]:
    """Return the slots of a Megatron group at launch."""
    return group.workers if isinstance(group, EpochGroup) else tuple(map(Slot, dist.get_process_group_ranks(group)))


def grid_of(args: Any, world: int, most: int = 0) -> LaunchGrid:
    """Return the launch grid of a run with these flags, with room for ``most`` replicas."""
    grid = launch_grid(
        world,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        inner_ranks=inner_ranks_of(args, world),
        pipeline_before_data=getattr(args, "use_tp_pp_dp_mapping", False),
    )
    return grid.with_room_for(most)
