"""Detection of the installed Megatron (wheel or checkout), and list of Megatron-Core's wrapped functions (``SEAMS``).

Functions of a training loop are wrapped by their roles (``recover_megatron.integrate``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron import hostdevice
from recover_megatron.errors import UserError
from recover_megatron.integrate import Seam, Wrapper
from recover_megatron.logger import get_logger

log = get_logger(__name__)

OLDEST = (0, 18)
NEWEST = (0, 19)
TESTED = "0.19.2"
SUPPORTED = f"supported: Megatron {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, tested: {TESTED}"

NEWER = (
    f"Megatron {{version}} in {{root}} is newer than the supported versions ({SUPPORTED}). The start fails if a "
    "wrapped function has another name or other parameters; other changes in Megatron are not detected"
)
SCRIPT = "pretrain_gpt"
"""Name of the GPT script at the root of a Megatron-LM checkout."""

_surviving = False


def is_surviving() -> bool:
    """Return whether the hooks of --recover are installed in this process, whichever loop it trains with."""
    return _surviving


def has_hooks() -> None:
    """Record that the hooks of --recover are installed: ``is_surviving`` then returns True."""
    global _surviving
    _surviving = True


@dataclass(frozen=True)
class Megatron:
    version: str
    root: Path
    """The folder that holds ``megatron/``: site-packages or a checkout."""

    @property
    def release(self) -> tuple[int, int]:
        return parse_release(self.version)

    @property
    def has_script(self) -> bool:
        """Return whether ``root`` contains a training script: a Megatron-LM checkout does, a wheel does not."""
        return (self.root / f"{SCRIPT}.py").is_file()


def parse_release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as "0.19.2" or "0.20.0rc0"; raises UserError for anything else."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UserError(f"cannot parse Megatron's version {version!r} ({SUPPORTED})")
    return int(match[1]), int(match[2])


def find_megatron(*, brings_script: bool = False) -> Megatron:
    """Find the Megatron of this process and check that this package supports it.

    Megatron's version file is read, so torch need not be imported.  Raises UserError if Megatron is missing, lacks
    ``megatron.training``, or has an unsupported version.  ``brings_script``: True if the user runs a training script,
    so Megatron itself need not contain one.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"Megatron-Core is not installed for {sys.executable}: pip install megatron-core=={TESTED}, "
            f"or put a Megatron-LM checkout first on PYTHONPATH ({SUPPORTED})"
        )
    core = Path(spec.origin).parent
    version = read_version(core / "package_info.py")
    megatron = Megatron(version, core.parent.parent)
    if megatron.release > NEWEST:
        if hostdevice.speaks():
            log.warning(NEWER.format(version=version, root=megatron.root))
    elif megatron.release < OLDEST:
        raise UserError(
            f"Megatron {version} in {megatron.root} is not supported ({SUPPORTED}): install another version, "
            f"for instance pip install megatron-core=={TESTED}"
        )
    if importlib.util.find_spec("megatron.training") is None:
        raise UserError(
            f"Megatron {version} in {megatron.root} has no megatron.training: "
            f"pip install megatron-core=={TESTED}, or put a complete Megatron-LM checkout first on PYTHONPATH"
        )
    if megatron.release < (0, 19) and not megatron.has_script and not brings_script:
        raise UserError(
            f"the wheel of Megatron {version} has no GPT builder: put a Megatron-LM checkout of that version first on "
            f"PYTHONPATH, or pip install megatron-core=={TESTED}"
        )
    return megatron


def read_version(package_info: Path) -> str:
    """Return Megatron's version without importing Megatron, which would import torch."""
    try:
        text = package_info.read_text(encoding="utf-8")
    except OSError:
        return importlib.metadata.version("megatron-core")
    found = {name: value for name, value in re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE)}
    if not {"MAJOR", "MINOR"} <= found.keys():
        raise UserError(f"cannot parse Megatron's version in {package_info} ({SUPPORTED})")
    return f"{found['MAJOR']}.{found['MINOR']}.{found.get('PATCH', '0')}"


_PARALLEL = "megatron.core.parallel_state"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_DDP = "megatron.core.distributed"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_WRITERS = "megatron.core.dist_checkpointing.strategies"
_FSDP = f"{_DDP}.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_FSDP2 = f"{_DDP}.fsdp.src.megatron_fsdp.experimental"
_ADAPTER = f"{_DDP}.fsdp.mcore_fsdp_adapter"

ENTRY = {
    seam.name: seam
    for seam in (
        Seam("megatron.training.arguments", "parse_args", ("extra_args_provider", "ignore_unknown_args")),
        Seam("megatron.training.training", "pretrain", ("cfg_container",)),
        Seam(_PARALLEL, "initialize_model_parallel"),
    )
}
"""Seams (by name) that `patched` wraps, so that a user's script either accepts --recover or is refused."""

SEAMS = {
    seam.name: seam
    for seam in (
        Seam(_PARALLEL, "create_group", ("ranks", "timeout", "backend", "pg_options", "use_local_synchronization",
                                         "group_desc")),
        Seam(_SCHEDULES, "backward_step", ("input_tensor", "output_tensor")),
        Seam("megatron.core.models.common.model_chunk_schedule_plan", "TransformerModelChunkSchedulePlan.run",
             ("f_schedule_plan", "b_schedule_plan")),
        Seam(_SCHEDULES, "forward_step_calc_loss", ("model", "output_tensor", "loss_func", "config", "vp_stage",
                                                    "collect_non_loss_data", "num_microbatches")),
        Seam(f"{_DDP}.distributed_data_parallel", "DistributedDataParallel._make_backward_post_hook",
             ("self", "param")),
        Seam(f"{_DDP}.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_grad_sync",
             ("self", "force_all_reduce")),
        Seam(f"{_DDP}.param_and_grad_buffer", "_ParamAndGradBucketGroup.finish_grad_sync",
             ("self", "force_all_reduce")),
        Seam(f"{_DDP}.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_param_sync", ("self", "force_sync")),
        Seam(f"{_DDP}.param_and_grad_buffer", "_ParamAndGradBucketGroup.finish_param_sync",
             ("self", "skip_next_bucket_dispatch")),
        Seam("megatron.core.optimizer.optimizer_config", "OptimizerConfig.__post_init__", ("self",)),
        Seam(_OPTIMIZER, "DistributedOptimizer.__init__", ("self", "optimizer", "config")),
        Seam(_OPTIMIZER, "DistributedOptimizer._copy_model_grads_to_main_grads", ("self",)),
        Seam(_OPTIMIZER, "DistributedOptimizer._copy_main_params_to_model_params", ("self",)),
        Seam(_OPTIMIZER, "DistributedOptimizer.get_parameter_state_dp_zero", ("self",)),
        Seam(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_dp_reshardable", ("self",)),
        Seam(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_fully_reshardable", ("self",)),
        Seam(f"{_WRITERS}.filesystem_async", "FileSystemWriterAsync.get_save_function_and_args", ("self",)),
        Seam(f"{_WRITERS}.filesystem_async", "FileSystemWriterAsync.retrieve_write_results", ("self",)),
        Seam(f"{_WRITERS}.filesystem_async", "get_write_results_queue", ("mp_mode",)),
        Seam(f"{_WRITERS}.async_utils", "PersistentAsyncCaller.schedule_async_call", ("self", "async_req")),
        Seam(f"{_WRITERS}.async_utils", "PersistentAsyncCaller.is_current_async_call_done",
             ("self", "blocking", "no_dist")),
        Seam(f"{_WRITERS}.async_utils", "PersistentAsyncCaller.close", ("self", "abort")),
        Seam("megatron.core.transformer.moe.router", "apply_biased_logits", ("logits", "std", "layer_number")),
        Seam("megatron.training.datasets.fim_dataset", "GPTFIMDataset._query_document_sample_shuffle_indices",
             ("self", "idx"), optional=True),
        Seam("megatron.core.transformer.moe.router_trace", "RouterTracer.__init__",
             ("self", "output_dir", "max_steps", "rank"), optional=True),
        Seam("megatron.training.checkpointing", "check_checkpoint_args", ("checkpoint_args",), optional=True),
        Seam("megatron.training.argument_utils", "ArgumentGroupFactory._get_field_docstrings",
             ("self", "src_cfg_class"), optional=True),
    )
}  # fmt: skip
"""Seams (by name) of Megatron's functions that --recover wraps or, on distributed optimizers, replaces."""

FSDP_SEAMS = {
    seam.name: seam
    for seam in (
        Seam(_FSDP, "GradReducePipeline._bucket_group_gradient_reduce",
             ("self", "bucket_group", "async_op", "outer_fsdp_group_grad_reduce")),
        Seam(_FSDP, "update_uneven_dtensor_chunk_metadata", ("dtensor",)),
        Seam(_FSDP, "validate_uneven_dtensor", ("dtensor",)),
        Seam(_OPTIMIZER, "DistributedOptimizer._init_optimizer_states_with_dummy_values", ("self",)),
        Seam(_ADAPTER, "FullyShardedDataParallelV1.__init__", ("self", "config", "ddp_config"),
             formerly="FullyShardedDataParallel"),
        Seam(_ADAPTER, "FullyShardedDataParallelV1.sync_rng_states_across_tp_group", ("self",),
             formerly="FullyShardedDataParallel"),
        # Functions of Megatron-FSDP version 2, which only Megatron's main branch has.
        Seam(_ADAPTER, "FullyShardedDataParallelV2.__init__", ("self", "config", "ddp_config", "module",
             "fsdp_unit_modules", "disable_bucketing", "device", "pg_collection"), optional=True),
        Seam("megatron.core.optimizer.fully_sharded_optimizer", "FullyShardedOptimizer.get_grad_stats_parallel_group",
             ("self",), optional=True),
        Seam(f"{_FSDP2}.parameter_group", "FsdpParameterGroup.reduce_partial_gradients",
             ("self", "partial_grad", "is_last_microbatch"), optional=True),
        Seam(f"{_FSDP2}.dbuffer", "DBuffer._get_owned_range", ("self", "tensor_index"), optional=True),
    )
}  # fmt: skip
"""Seams (by name) of Megatron's functions that --recover wraps only with --use-megatron-fsdp."""


def misfits(seams: dict[str, Seam]) -> list[str]:
    """Return an error message for each of ``seams`` whose function or parameters the installed Megatron lacks."""
    reasons = [reason for seam in seams.values() if (reason := seam.misfit())]
    return [f"--recover: {reason} ({SUPPORTED})" for reason in reasons]


def wrap(name: str, wrapper: Wrapper) -> None:
    """Wrap the seam ``name`` with ``wrapper``; raises UserError if the function does not match the seam."""
    (SEAMS | FSDP_SEAMS)[name].wrap(wrapper, SUPPORTED)


@contextmanager
def replaced(owner: Any, /, **values: Any) -> Iterator[None]:
    """Context that sets existing attributes of ``owner`` to ``values`` (name -> value), and restores them."""
    originals = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
