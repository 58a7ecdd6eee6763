"""Megatron-FSDP 2 (``--megatron-fsdp-version 2`` of Megatron main): shard groups, gradients, and state.

Version 2 works like version 1 (see `fsdp_buckets`): the workers of a shard group reduce-scatter the gradients of each
microbatch and accumulate their shards.  Differences between Megatron d98e8a6 and this package:

    Megatron: one shard group of all data-parallel ranks (Megatron's     here: one shard group per replica
    library has "DP-outer" axes, but its training does not use them)
    Megatron: gradients are averaged over the mesh of the shard group    here: also divided by the number of groups
    Megatron: the first gradient of a step replaces main_grad            here: gradients are added to zeroed memory, to
                                                                         which no operation of a broken group can write
    Megatron: the norm is summed over the data-parallel ranks twice      here: once, as in plain data parallelism

At the last reduction of a pass ("is_last_microbatch"), Megatron's library would reduce over outer axes.  Instead, the
hook then gives the shard to the step.
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
    """Wrap the seams of Megatron-FSDP 2, if this release of Megatron has Megatron-FSDP 2."""
    monkeypatch.wrap("FullyShardedDataParallelV2.__init__", _in_shard_groups)
    monkeypatch.wrap("FullyShardedOptimizer.get_grad_stats_parallel_group", _inside_the_model)


def is_version2(chunk: Any) -> bool:
    """Return whether a model chunk is wrapped in Megatron-FSDP 2."""
    return hasattr(type(getattr(chunk, "module", None)), "parameter_groups")


def units(chunk: Any) -> list[Any]:
    """Return the FSDP units of a model chunk: modules each of which gathers all its parameters together."""
    return [module for module in chunk.module.modules() if hasattr(type(module), "parameter_groups")]


def groups_of(chunk: Any) -> list[Any]:
    return [group for unit in units(chunk) for group in unit.parameter_groups]


def _in_shard_groups(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        # Megatron passes the process groups as the last positional argument, or by name.
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
    """Context in which Megatron-FSDP treats no microbatch as the last microbatch of a pass."""
    context.is_last_microbatch = False
    try:
        yield
    finally:
        context.is_last_microbatch = True


def _inside_the_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``get_grad_stats_parallel_group`` return the model-parallel group.

    Megatron would otherwise sum the norms over the data-parallel ranks a second time (see the module's docstring).
    """

    def get_grad_stats_parallel_group(self: Any) -> Any:
        return parallel_state.get_model_parallel_group()

    return get_grad_stats_parallel_group


def padding(buffer: Any) -> Iterator[Span]:
    """Yield the padding ranges in this worker's shard of a buffer, as offsets in the shard."""
    end = 0
    shapes = range(len(buffer.layout.tensor_shapes))
    owned = [part for part in map(buffer._get_owned_range, shapes) if part is not None]
    for part in sorted(owned, key=lambda one: one.buffer_relative_offset):
        if part.buffer_relative_offset > end:
            yield Span(end, part.buffer_relative_offset)
        end = part.buffer_relative_offset + part.numel
    if end < buffer.local_buffer.numel():
        yield Span(end, buffer.local_buffer.numel())


def weights(chunk: Any) -> list[torch.Tensor]:
    """Return this worker's shards of a chunk's main parameters and model parameters."""
    return [
        buffer.get_local_tensor(index)
        for group in groups_of(chunk)
        for buffer in dict.fromkeys((group.main_weight, group.model_weight))
        for index in range(len(group.fsdp_parameters))
    ]


def tidy(chunk: Any) -> None:
    """Reset a model chunk to its state between two iterations, after an exception has interrupted an iteration.

    A pending operation of the broken shard group may still write to the memory of gathered parameters, so this function
    abandons that memory, and the next gathering uses other memory.  Later work on the current stream is ordered after
    all work on Megatron's two streams.
    """
    context = chunk.module.context
    for stream in (context.allgather_stream, context.reduce_scatter_stream):
        # Without this wait, a gradient of the interrupted pass may be added to shards zeroed for the next pass.
        torch.cuda.current_stream().wait_stream(stream)
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
                if group.requires_grad:  # an interrupted optimizer may have left the gradient in another dtype
                    parameter.sharded.grad_dtype = group.main_grad.dtype
                parameter.unsharded.data = torch.empty(0, dtype=gathered.dtype, device=gathered.device)
