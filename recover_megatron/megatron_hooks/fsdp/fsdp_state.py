"""A worker's parameter shards under Megatron-FSDP, and the cleanup of a model after an interrupted iteration.

Between two iterations only the shards that a worker owns matter.  In each iteration it gathers all other parts of the
parameters again.

Functions that are wrapped when a model is built (``install_meshes``):

device_mesh._get_pg_from_name           returns the process group that was passed to the mesh, if this package created
                                        that group.  Torch would otherwise look up the group's name, and find a group
                                        of the launch or no group
update_uneven_dtensor_chunk_metadata,   exchange between workers which part of a parameter each worker has.  A worker
validate_uneven_dtensor                 that builds a model alone skips this exchange: only checkpoints need it, and
                                        each checkpoint repeats it
sync_rng_states_across_tp_group         a worker that builds a model alone also skips this function, because random
                                        numbers are seeded for each microbatch
FullyShardedDataParallel.__init__       builds the model as for no_shard, even with --outer-dp-sharding-strategy optim
                                        (`outer`)
_init_optimizer_states_with_dummy_values   creates the moments into which a checkpoint is loaded.  Megatron sets only
                                        ``grad``, which a precision-aware optimizer ignores, so the wrapper also sets
                                        ``decoupled_grad``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor, debug

from recover_megatron import integrate
from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.fsdp import version2
from recover_megatron.megatron_hooks.layout import spreads_optimizer


def is_fsdp(chunk: Any) -> bool:
    """Return whether a model chunk is wrapped in Megatron-FSDP, of any version."""
    return hasattr(chunk, "megatron_fsdp_dist_index") or version2.is_version2(chunk)


def local(value: Any) -> Any:
    """Return this worker's part of a distributed tensor; any other value unchanged."""
    return value._local_tensor if isinstance(value, DTensor) else value


def weights(chunk: Any) -> list[torch.Tensor]:
    """Return a model chunk's parameter tensors, in a fixed order.  Each tensor is equal on all workers of a column.

    With Megatron-FSDP: this worker's shards of the model parameters and of the main parameters, without the buffers'
    padding.  Main parameters that are also sharded over the shard groups are left out.
    """
    if not is_fsdp(chunk):
        return [parameter.data for parameter in chunk.parameters()]
    if version2.is_version2(chunk):
        return version2.weights(chunk)
    spread = spreads_optimizer(get_args())
    return [
        buffer.get_item(item, only_shard=True)
        for group in chunk.param_and_grad_buffer.parameter_groups
        for buffer in (group.model_weight_buffer, None if spread else group.main_weight_buffer)
        if buffer is not None
        for item in range(len(buffer.params))
    ]


def tidy(chunk: Any) -> None:
    """Reset a model chunk to its state between two iterations, after an exception has interrupted an iteration.

    Does not wait for operations of the broken shard group, whose process groups have been aborted.
    """
    if version2.is_version2(chunk):
        version2.tidy(chunk)
        return
    fsdp = chunk.module
    for stream in (fsdp.grad_reduce_pipeline.rs_stream, fsdp.all_gather_pipeline.ag_stream):
        if stream is not None:
            # Without this wait, a gradient of the interrupted pass may be added to shards zeroed for the next pass.
            torch.cuda.current_stream().wait_stream(stream)
    groups = fsdp.param_and_grad_buffer.parameter_groups
    _tidy_reductions(fsdp.grad_reduce_pipeline, groups)
    _tidy_gathering(fsdp.all_gather_pipeline, groups)
    for parameter in fsdp.raw_param.values():
        parameter.grad = None
        parameter.grad_added_to_main_grad = False
    idle = type(fsdp.module._training_state).IDLE
    for module in fsdp.module.modules():
        module._training_state = idle
    fsdp._params_require_handle_grad = set()
    fsdp._root_pre_backward_hook_issued = False
    fsdp.is_last_microbatch = True
    fsdp.microbatch_count = 0


def _tidy_reductions(pipeline: Any, groups: Any) -> None:
    pipeline.grad_reduce_queue.clear()
    for number, status in list(pipeline.bucket_status.items()):
        buffer = pipeline.get_fsdp_buffer(number)
        # If coalescing was interrupted, torch still has the list of coalesced operations, and would refuse a new list.
        dist.distributed_c10d._world.pg_coalesce_state.pop(buffer.data_parallel_group, None)
        abandon(buffer)
        buffer.reset_param_main_grad()
        pipeline.bucket_status[number] = type(status).EMPTY
    pipeline.bucket_grad_ready_params = [set() for _ in groups]


def _tidy_gathering(pipeline: Any, groups: Any) -> None:
    """Reset the pipeline as ``AllGatherPipeline.reset`` does, but do not wait for pending operations."""
    pipeline.param_gather_event_map.clear()
    for key, status in list(pipeline.bucket_status.items()):
        group = groups[key[0]]
        pipeline.bucket_can_be_released[key] = False
        if group.model_weight_buffer is not None:
            abandon(group.model_weight_buffer)
        # Megatron keeps the memory of parameters that belong to no FSDP unit (``PRESERVED``), and fills it again.
        kept = group.fsdp_unit_id is None
        pipeline.bucket_status[key] = type(status).PRESERVED if kept else type(status).EMPTY


def abandon(buffer: Any) -> None:
    """Drop the current memory of the bucket of ``buffer`` without touching it; the next use allocates new memory.

    An abandoned operation may still read and write the old memory until gloo notices that the connections are
    closed.  The operation's references to its tensors do not protect this memory, because Megatron frees a bucket by
    resizing its storage to 0, and reuses a double buffer (--fsdp-double-buffer) for the next bucket.
    """
    allocator, bucket = buffer.temporary_bucket_allocator, buffer.bucket_index.bucket_id
    if hasattr(allocator, "backup_allocator"):
        _abandon_double_buffer(allocator, bucket)
        allocator = allocator.backup_allocator
    allocator.buckets.pop(bucket, None)


def _abandon_double_buffer(allocator: Any, bucket: int) -> None:
    """Drop the memory of a bucket in a named double buffer; the next use of the buffer allocates new memory.

    The separate named memory of a bucket that fits in no buffer (--fsdp-db-use-persist-buf-on-alloc-fail) is dropped,
    too.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer

    place = allocator.using_buffer.get(bucket)
    taken = None if place is None else allocator._get_gbuf_name(*place)
    own = f"{allocator.name}_not_fit_in_fixed_pool_{bucket}_"
    known = get_global_memory_buffer().buffer
    for key in [key for key in known if key[0] == taken or key[0].startswith(own)]:
        del known[key]
    if place is not None:
        allocator.free(bucket)


def forget_meshes() -> None:
    """Clear torch's cache of sharding propagation, whose results refer to the device meshes of a deleted model.

    Otherwise torch would use these results for a new model, whose meshes compare equal but have other groups.
    """
    debug._clear_sharding_prop_cache()


def install_meshes(alone: Callable[[], bool], ours: tuple[type, ...]) -> None:
    """Wrap the functions that the module's docstring lists, and those of `version2`, once per process.

    Raises UserError if torch is too old, or if a function has an unexpected signature.  ``alone``: function that
    returns whether this worker builds a model without other workers.  ``ours``: types of this package's
    process groups.
    """
    if not hasattr(device_mesh, "_get_pg_from_name"):
        raise UserError(
            f"--use-megatron-fsdp with --recover needs torch 2.11 or later, whose device meshes accept existing "
            f"process groups; this is torch {torch.__version__}"
        )
    if hasattr(device_mesh._get_pg_from_name, "__wrapped__"):
        return

    def ours_first(original: Callable[..., Any]) -> Callable[..., Any]:
        def _get_pg_from_name(mesh: Any, name: str) -> Any:
            given = mesh._pg_registry.get(name)
            return given if isinstance(given, ours) else original(mesh, name)

        return _get_pg_from_name

    def not_alone(original: Callable[..., None]) -> Callable[..., None]:
        def ask(of: Any) -> None:
            if not alone():
                original(of)

        return ask

    if reasons := monkeypatch.misfits(monkeypatch.FSDP_SEAMS):
        raise UserError(*reasons)
    integrate.wrap(device_mesh, "_get_pg_from_name", ("mesh", "name"), ours_first, monkeypatch.SUPPORTED)
    version2.install()
    monkeypatch.wrap("update_uneven_dtensor_chunk_metadata", not_alone)
    monkeypatch.wrap("validate_uneven_dtensor", not_alone)
    monkeypatch.wrap("FullyShardedDataParallelV1.__init__", _unsharded)
    monkeypatch.wrap("DistributedOptimizer._init_optimizer_states_with_dummy_values", _gradient_where_it_is_read)
    monkeypatch.wrap("FullyShardedDataParallelV1.sync_rng_states_across_tp_group", not_alone)


def _unsharded(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        ddp_config.outer_dp_sharding_strategy = "no_shard"
        original(self, config, ddp_config, *args, **kwargs)

    return __init__


def _gradient_where_it_is_read(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def _init_optimizer_states_with_dummy_values(self: Any) -> None:
        every = [one for group in self.optimizer.param_groups for one in group["params"] if local(one).numel()]
        decoupled = every if getattr(self.optimizer, "use_decoupled_grad", False) else []
        for parameter in decoupled:
            parameter.decoupled_grad = torch.zeros_like(parameter)
        original(self)
        for parameter in decoupled:
            parameter.decoupled_grad = None

    return _init_optimizer_states_with_dummy_values
