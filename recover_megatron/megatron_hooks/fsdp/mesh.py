"""Torch's device meshes, which Megatron-FSDP makes of Megatron's groups, and what it asks of others through them.

device_mesh._get_pg_from_name           our groups, as they were given to the mesh: torch looks them up by their names,
                                        under which it knows what is inside of them at the launch, or nothing
update_uneven_dtensor_chunk_metadata,   which part of a parameter each worker has is asked of its mates: not where the
validate_uneven_dtensor                 model is built alone.  It is for checkpoints, which ask once more.
sync_rng_states_across_tp_group         not there either: each microbatch brings its random numbers
FullyShardedDataParallel.__init__       buffers as for no_shard, also with --outer-dp-sharding-strategy optim (`outer`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from torch.distributed import device_mesh

from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
from recover_megatron.errors import UserError
from recover_megatron.instep.process_group import EpochGroup
from recover_megatron.instep.traffic import Mode, Traffic
from recover_megatron.megatron_hooks import monkeypatch


class HasTraffic(Protocol):
    """``groups.Groups``, whose ``traffic`` is another object where a model is built again."""

    traffic: Traffic


def install(groups: HasTraffic) -> None:
    """Wrap the seams, once a process; raises UserError for a torch or Megatron that has not the ones we know."""
    if not hasattr(device_mesh, "_get_pg_from_name"):
        raise UserError(
            f"--use-megatron-fsdp with --recover needs torch 2.11 or later, whose device meshes find a group that is "
            f"given to them; this is torch {torch.__version__}"
        )
    if hasattr(device_mesh._get_pg_from_name, "__wrapped__"):
        return

    def not_alone(original: Callable[..., None]) -> Callable[..., None]:
        def ask(of: Any) -> None:
            if groups.traffic.mode is not Mode.ALONE:
                original(of)

        return ask

    monkeypatch.wrap(device_mesh, "_get_pg_from_name", ("mesh", "name"), _ours_first)
    monkeypatch.wrap(param_and_grad_buffer, "update_uneven_dtensor_chunk_metadata", ("dtensor",), not_alone)
    monkeypatch.wrap(param_and_grad_buffer, "validate_uneven_dtensor", ("dtensor",), not_alone)
    monkeypatch.wrap(FullyShardedDataParallel, "__init__", ("self", "config", "ddp_config"), _unsharded)
    monkeypatch.wrap(FullyShardedDataParallel, "sync_rng_states_across_tp_group", ("self",), not_alone)


def _unsharded(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        ddp_config.outer_dp_sharding_strategy = "no_shard"
        original(self, config, ddp_config, *args, **kwargs)

    return __init__


def _ours_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_pg_from_name(mesh: Any, name: str) -> Any:
        given = mesh._pg_registry.get(name)
        return given if isinstance(given, (EpochGroup, SwappableGroup)) else original(mesh, name)

    return _get_pg_from_name
