"""Megatron-FSDP 2 (``--megatron-fsdp-version 2`` of Megatron main): its shard groups, their gradients, their state.

What it does is that of `buckets`: it spreads parameters and gradients over a shard group, whose workers reduce-scatter
the gradients of each microbatch, and each adds its shard up.  What differs:

    Megatron d98e8a6 builds one shard group of all data-parallel ranks     here: as many as there are replicas
    ("DP-outer" axes are in its library, not yet in its training)
    an average over the mesh of the shard group                            here: divided by the number of shard groups
    main_grad gets the first gradient of a step itself                     here: added, in memory that no operation of
                                                                           a broken shard group may still write to
    the norm is summed over the data-parallel ranks twice                  here: once, that of plain data parallelism

The last reduction of a pass is the seam: where its library would reduce over outer axes ("is_last_microbatch"), the
shard is handed to the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from recover_megatron.collectives.ledger import Span
from recover_megatron.megatron_hooks import monkeypatch


def install() -> None:
    """Wrap its seams, in a Megatron that has it."""
    monkeypatch.wrap("FullyShardedDataParallelV2.__init__", _in_shard_groups)
    monkeypatch.wrap("FullyShardedOptimizer.get_grad_stats_parallel_group", _inside_the_model)


def is_version2(chunk: Any) -> bool:
    """Whether a model chunk is wrapped in Megatron-FSDP 2."""
    return hasattr(type(getattr(chunk, "module", None)), "parameter_groups")


def units(chunk: Any) -> list[Any]:
    """The modules of which each has its parameters gathered at once."""
    return [module for module in chunk.module.modules() if hasattr(type(module), "parameter_groups")]


def groups_of(chunk: Any) -> list[Any]:
    return [group for unit in units(chunk) for group in unit.parameter_groups]


def _in_shard_groups(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        # Megatron gives all but the first three by position, or the groups by name.
        *rest, groups = args if pg_collection is None else (*args, pg_collection)
        inside = copy.copy(groups)
        inside.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        inside.expt_dp = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        original(self, config, ddp_config, module, *rest, pg_collection=inside, **kwargs)
        for group in groups_of(self):
            group.grad_divisor *= ddp_config.num_distributed_optimizer_instances
        self.no_sync = lambda: _not_the_last(self.module.context)

    return __init__


@contextmanager
def _not_the_last(context: Any) -> Iterator[None]:
    """Microbatches after which more of the same pass come."""
    context.is_last_microbatch = False
    try:
        yield
    finally:
        context.is_last_microbatch = True


def _inside_the_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron sums the squares over the mesh of each parameter before it sums over this group."""

    def get_grad_stats_parallel_group(self: Any) -> Any:
        return parallel_state.get_model_parallel_group()

    return get_grad_stats_parallel_group


def padding(buffer: Any) -> Iterator[Span]:
    """What of the own shard of a buffer belongs to no parameter; offsets in the shard."""
    end = 0
    shapes = range(len(buffer.layout.tensor_shapes))
    owned = [its for its in map(buffer._get_owned_range, shapes) if its is not None]
    for its in sorted(owned, key=lambda one: one.buffer_relative_offset):
        if its.buffer_relative_offset > end:
            yield Span(end, its.buffer_relative_offset)
        end = its.buffer_relative_offset + its.numel
    if end < buffer.local_buffer.numel():
        yield Span(end, buffer.local_buffer.numel())


def weights(chunk: Any) -> list[torch.Tensor]:
    """This worker's shards of the parameters, as the optimizer updates them, and as the model computes with them."""
    return [
        buffer.get_local_tensor(index)
        for group in groups_of(chunk)
        for buffer in dict.fromkeys((group.main_weight, group.model_weight))
        for index in range(len(group.fsdp_parameters))
    ]


def tidy(chunk: Any) -> None:
    """Forget what an exception in the middle of an iteration left: nothing is gathered, reduced or under way.

    An operation of the broken shard group that is not over may still write where parameters were gathered: that memory
    is left to it.  What comes after this on the current stream comes after all that was begun on Megatron's two.
    """
    context = chunk.module.context
    for its in (context.allgather_stream, context.reduce_scatter_stream):
        # Else a gradient of the interrupted pass may be added after the shards were zeroed for the next one.
        torch.cuda.current_stream().wait_stream(its)
    context.is_last_microbatch = True
    for unit in units(chunk):
        unit._phase = type(unit).Phase.RESTING
        unit._unshard_event = None
        unit._num_ready_grad_parameters = 0
        for group in unit.parameter_groups:
            group.reshard_parameters()
            gathered = group._unsharded_model_weight
            group._unsharded_model_weight = type(gathered)(
                gathered.mesh, gathered.placements, gathered.layout.tensor_shapes, gathered.dtype, gathered.device
            )
            group.release_unsharded_storage()
            for parameter in group.fsdp_parameters:
                parameter.sharded.grad = parameter.unsharded.grad = None
                if group.requires_grad:  # the optimizer may have cast it, and not have cast it back
                    parameter.sharded.grad_dtype = group.main_grad.dtype
                parameter.unsharded.data = torch.empty(0, dtype=gathered.dtype, device=gathered.device)
