"""Process groups: which of Megatron's reach over replicas, and what they are after workers were lost.

torch.distributed.init_process_group     the default group  --> EpochGroup
parallel_state.create_group              of several replicas --> EpochGroup
                                         of one replica      --> torch's own, noted by InsideGroups
a new plan                               global ranks count the workers that have a place, without gaps: rank 0
                                         prints, the last rank logs, checkpoints are written by ranks 0 .. n-1
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, global_vars, initialize

from recover_megatron.instep.grid import LaunchGrid, launch_grid
from recover_megatron.instep.inside import InsideGroups
from recover_megatron.instep.plan import Decision
from recover_megatron.instep.process_group import WORLD, EpochGroup, Traffic, register, renumber
from recover_megatron.megatron_hooks import seams
from recover_megatron.megatron_hooks.layout import lanes_of

RANK_LISTS = tuple(name for name in vars(parallel_state) if name.endswith("_GLOBAL_RANKS"))
"""parallel_state's lists of the global ranks of a group."""


class Groups:
    """The groups of this worker.  ``install`` before Megatron makes any; ``grid`` is known once it has."""

    def __init__(self, me: int) -> None:
        self.traffic = Traffic()
        self.inside = InsideGroups(store_port=int(os.environ["MASTER_PORT"]))
        self.grid: LaunchGrid | None = None
        self._me = me
        self._lists: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap the seams; raises UserError if this Megatron's are not the ones we know."""
        seams.wrap(
            parallel_state,
            "create_group",
            ("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"),
            self._create_group,
        )
        seams.wrap(initialize, "_initialize_distributed", ("get_embedding_ranks",), self._initialize)

    def _initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _initialize_distributed(*args: Any, **kwargs: Any) -> Any:
            make_default = dist.init_process_group

            def init_process_group(*args: Any, **kwargs: Any) -> None:
                # It carries messages inside a replica, too: those of an interleaved pipeline of two stages.
                self.inside.make(lambda: make_default(*args, **kwargs))

            with seams.replaced(dist, "init_process_group", init_process_group):
                result = original(*args, **kwargs)
            default = dist.distributed_c10d._get_default_group()
            everyone = tuple(range(dist.get_world_size()))
            register(EpochGroup(self.traffic, default, everyone, self._me, WORLD))
            # Sample counts and learning rates go by the launch's size, whoever is left.
            parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()
            self._lists = {name: getattr(parallel_state, name) for name in RANK_LISTS}
            return result

        return _initialize_distributed

    def _create_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.grid is None:
                self.grid = grid_of(get_args(), dist.get_world_size())
            members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
            if self._me not in members:
                return original(ranks, *args, **kwargs)
            if len({self.grid.place(worker)[0] for worker in members}) == 1:
                return self.inside.make(lambda: original(ranks, *args, **kwargs))
            group = original(ranks, *args, **kwargs)
            outside = EpochGroup(self.traffic, group, members, self._me, str(kwargs.get("group_desc", "")).lower())
            register(outside)
            made = parallel_state._global_process_group_list
            if made and made[-1] is group:
                made[-1] = outside
            return outside

        return create_group

    def planned(self, decision: Decision) -> None:
        """Take up the ranks of a new plan."""
        assert self.grid is not None
        ranks = {worker: at for at, worker in enumerate(decision.workers(self.grid))}
        renumber(ranks)
        for name, ranks_at_launch in self._lists.items():
            setattr(parallel_state, name, _renumbered(ranks_at_launch, ranks))
        args = get_args()
        args.rank, args.world_size = ranks[self._me], len(ranks)
        if args.rank == args.world_size - 1:
            take_up_logging(args)


def _renumbered(value: Any, ranks: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_renumbered(item, ranks) for item in value)
    return ranks.get(value, -1 - value) if isinstance(value, int) else value


def take_up_logging(args: Any) -> None:
    """The last rank writes to TensorBoard and W&B: a worker that becomes it opens what the lost one had."""
    for name, setter in (("_GLOBAL_TENSORBOARD_WRITER", "_set_tensorboard_writer"),
                         ("_GLOBAL_WANDB_WRITER", "_set_wandb_writer")):  # fmt: skip
        if getattr(global_vars, name, None) is None and hasattr(global_vars, setter):
            getattr(global_vars, setter)(args)


def column_of(group: Any) -> tuple[int, ...]:
    """The workers, at launch, of a group of Megatron's."""
    return group.workers if isinstance(group, EpochGroup) else tuple(dist.get_process_group_ranks(group))


def grid_of(args: Any, world: int) -> LaunchGrid:
    """The launch grid of a run with these flags."""
    return launch_grid(
        world,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        lanes=lanes_of(args),
        pipeline_before_data=getattr(args, "use_tp_pp_dp_mapping", False),
    )
