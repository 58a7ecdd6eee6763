"""Small changes inside Megatron; each is applied when the Megatron module that it changes is imported.

``install`` and ``watch`` put a finder on ``sys.meta_path``.  The finder applies the fixes of a module right after the
module's code has run, and removes itself after the last fix.  This file does not import Megatron.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from recover_megatron.hostdevice.flags import warn_of_what_is_never_summed

SUPPORTED = "0.18 to 0.19"


class UnsupportedMegatron(RuntimeError):
    """Error: Megatron differs from what a fix expects.  The message names the difference and supported versions."""


@dataclass(frozen=True)
class Fix:
    """Change of the Megatron module ``module_name``, made once by ``apply(module)`` after the module was imported."""

    module_name: str
    apply: Callable[[ModuleType], None]
    why: str
    expects: Mapping[str, str | None] = field(default_factory=dict)
    """Name of a function in the module -> names of its parameters, separated by spaces; None if any parameters fit."""

    def make(self, module: ModuleType) -> None:
        """Apply the fix; if a function in ``expects`` differs, raise ``UnsupportedMegatron`` and change nothing."""
        for path, parameters in self.expects.items():
            _expect(module, path, parameters)
        self.apply(module)


def _expect(module: ModuleType, path: str, parameters: str | None) -> None:
    """Raise ``UnsupportedMegatron`` if ``module`` has no function ``path``, or if it has other ``parameters``."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    wanted = None if parameters is None else parameters.split()
    if found is None or wanted not in (None, list(inspect.signature(found).parameters)):
        seen = "is missing" if found is None else f"has the parameters {inspect.signature(found)}"
        raise UnsupportedMegatron(
            f"{module.__name__}.{path} {seen}, expected ({'...' if wanted is None else ', '.join(wanted)}): "
            f"recover_megatron does not support this version of Megatron-LM; supported are {SUPPORTED}."
        )


def _skip_make_in_wheel(module: ModuleType) -> None:
    compile_helpers = module.compile_helpers
    makefile = Path(str(module.__file__)).parent / "Makefile"

    @functools.wraps(compile_helpers)
    def compile_unless_built() -> None:
        if makefile.exists() or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    module.compile_helpers = compile_unless_built  # type: ignore[attr-defined]


def _load_and_save_shards(module: ModuleType) -> None:
    import torch

    load = module.DistributedOptimizer.load_state_dict
    module.DistributedOptimizer.load_state_dict = torch.no_grad()(load)
    save = module.DistributedOptimizer.sharded_param_state_fsdp_dtensor

    @functools.wraps(save)
    def with_empty_ones(self: Any, is_loading: bool = False) -> Any:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        empty = [parameter for parameter in parameters if not parameter._local_tensor.numel()]
        stepped = len(empty) == len(parameters) or any(self.optimizer.state.get(item) for item in parameters)
        for parameter in empty if is_loading or stepped else ():
            self.optimizer.state[parameter] = {
                name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")
            }
        return save(self, is_loading)

    module.DistributedOptimizer.sharded_param_state_fsdp_dtensor = with_empty_ones


def _splits_as_numpy(module: ModuleType) -> None:
    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    module.maybe_move_tensor_to_cpu = on_host  # type: ignore[attr-defined]


def _preload_copies(module: ModuleType) -> None:
    preload = module.FileSystemWriterAsync.preload_tensors

    @functools.wraps(preload)  # keeps the name, since the function is pickled by name for the writer process
    def preload_copies(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in preload(write_buckets, non_blocking)
        ]

    module.FileSystemWriterAsync.preload_tensors = staticmethod(preload_copies)


def _warn_of_instances(module: ModuleType) -> None:
    validate = module.validate_args

    @functools.wraps(validate)
    def validate_and_warn(args: Any, *rest: Any, **named: Any) -> Any:
        validated = validate(args, *rest, **named)
        warn_of_what_is_never_summed(args)
        return validated

    module.validate_args = validate_and_warn  # type: ignore[attr-defined]


def _allocated_on_the_stream(module: ModuleType) -> None:
    import torch

    # The setter ignores the value: for a tensor on the host, Megatron sets this attribute to None.
    module.DBuffer.allocation_stream = property(lambda self: torch.cuda.current_stream(), lambda self, none: None)


def _te_from(*versions: str) -> Callable[[ModuleType], None]:
    """Return a function that makes ``is_te_min_version`` accept ``versions``: the host device has their features."""

    def apply(module: ModuleType) -> None:
        is_min = module.is_te_min_version

        @functools.wraps(is_min)
        def is_min_or_ours(version: str, check_equality: bool = True) -> bool:
            return version in versions or bool(is_min(version, check_equality))

        module.is_te_min_version = is_min_or_ours  # type: ignore[attr-defined]

    return apply


def _shards_on_host(module: ModuleType) -> None:
    if not module.HAVE_FSDP:
        return  # Megatron itself reports that torch lacks FSDP
    mesh = module.DeviceMesh

    class HostMesh:
        @staticmethod
        def from_group(group: Any, device_type: str) -> Any:
            return mesh.from_group(group, "cpu" if device_type == "cuda" else device_type)

    module.DeviceMesh = HostMesh  # type: ignore[attr-defined]


def _with_rms_norm(class_name: str) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        from recover_megatron.hostdevice.apex_stub import RMSNorm

        original = getattr(module, class_name)

        def new(cls: type, config: Any, hidden_size: Any, eps: float = 1e-5, **others: Any) -> Any:
            if config.normalization == "RMSNorm":
                return RMSNorm(config, hidden_size, eps)
            if original.__new__ is object.__new__:
                return object.__new__(cls)
            return original.__new__(original, config, hidden_size, eps, **others)

        setattr(module, class_name, type(class_name, (original,), {"__new__": new, "__module__": module.__name__}))

    return apply


def _no_inference_layers(module: ModuleType) -> None:
    if not module.HAVE_TE and hasattr(module, "is_inference_column_parallel_linear"):
        _expect(module, "is_inference_column_parallel_linear", "module")
        module.is_inference_column_parallel_linear = lambda module: False  # type: ignore[attr-defined]


def _norms_of_vision(module: ModuleType) -> None:
    """Replace torch's LayerNorm where it is a default argument of the CLIP model (in some versions of Megatron)."""
    import torch

    norm = sys.modules[module.TransformerBlock.__module__].LayerNormImpl  # the class that CLIP's transformer block uses
    make = module.CLIPViTModel.__init__
    make.__defaults__ = tuple(norm if item is torch.nn.LayerNorm else item for item in make.__defaults__ or ())


def _local_layers_of_bert(module: ModuleType) -> None:
    if not module.HAVE_TE:
        module.bert_layer_with_transformer_engine_spec = module.bert_layer_local_spec  # type: ignore[attr-defined]


def _local_specs(module: ModuleType) -> None:
    from recover_megatron.hostdevice import hybrid

    hybrid.localize(module)


def _norm_in_product(module: ModuleType) -> None:
    from recover_megatron.hostdevice import hybrid

    make = module.QKNormConfigResolver.__init__

    @functools.wraps(make)
    def with_local(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.fused_norm_linear_impl is None:
            self.fused_norm_linear_impl = hybrid.local_modules()["TELayerNormColumnParallelLinear"]

    module.QKNormConfigResolver.__init__ = with_local


def _recomputed_without_scales(module: ModuleType) -> None:
    """Change the default of the parameter ``fp8`` to None, in versions of Megatron that have this parameter."""
    make = module.CheckpointWithoutOutput.__init__
    if not module.HAVE_TE and inspect.getfullargspec(make).args[1:2] == ["fp8"]:
        make.__defaults__ = (None, *make.__defaults__[1:])


def _norms_in_float64(module: ModuleType) -> None:
    from recover_megatron.hostdevice.apex_stub import sum_of_squares

    @functools.wraps(module.local_multi_tensor_l2_norm)
    def local_multi_tensor_l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[Any, None]:
        tensors = [tensor for item in tensor_lists for tensor in item]
        # Return float32, as Megatron does: all workers must sum the same dtype, and some have only a float32 zero.
        return sum_of_squares(tensors).sqrt().float().view(1), None

    module.local_multi_tensor_l2_norm = local_multi_tensor_l2_norm  # type: ignore[attr-defined]


def _attention(module: ModuleType) -> None:
    from recover_megatron.hostdevice import attention

    module.DotProductAttention = attention.for_class(module.DotProductAttention, module)  # type: ignore[attr-defined]


_TE = {"is_te_min_version": "version check_equality"}
_OPERANDS = "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
_GATHER = "input_ tensor_parallel_output_grad group output_split_sizes use_global_buffer"
_NORM = "config hidden_size eps persist_layer_norm zero_centered_gamma normalization"

FIXES = {
    "prebuilt-helpers": Fix(
        "megatron.core.datasets.utils",
        _skip_make_in_wheel,
        "Megatron runs `make` in its datasets folder at start; the wheel contains the compiled extension but no "
        "Makefile, so the run would fail",
        {"compile_helpers": ""},
    ),
    "checkpoint-copies": Fix(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        _preload_copies,
        "before training continues, an asynchronous checkpoint copies tensors from the device to the host; it does not "
        "copy tensors that are on the host, so it would save values that later steps have changed",
        {"FileSystemWriterAsync.preload_tensors": "write_buckets non_blocking"},
    ),
    "load-without-grad": Fix(
        "megatron.core.optimizer.distrib_optimizer",
        _load_and_save_shards,
        "the distributed optimizer loads float32 parameters into views of leaf tensors without torch.no_grad(), which "
        "autograd refuses; and torch's Adam has no state for a parameter whose shard is empty on a worker, but "
        "a checkpoint of Megatron-FSDP needs the state of each parameter on all workers",
        {
            "DistributedOptimizer.load_state_dict": "self state_dict",
            "DistributedOptimizer.sharded_param_state_fsdp_dtensor": "self is_loading",
        },
    ),
    "splits-as-numpy": Fix(
        "megatron.core.transformer.moe.moe_utils",
        _splits_as_numpy,
        "the all-to-all dispatcher converts its split sizes to numpy arrays only if they are CUDA tensors",
        {"maybe_move_tensor_to_cpu": "tensor as_numpy record_stream"},
    ),
    "instances-summed": Fix(
        "megatron.training.arguments",
        _warn_of_instances,
        "Megatron silently trains a wrong model with --outer-dp-sharding-strategy optim, and a separate model per "
        "Megatron-FSDP instance without --overlap-grad-reduce: the fix only logs a warning",
        {"validate_args": "args defaults"},
    ),
    "logits-kept": Fix(
        "megatron.training.arguments",
        _te_from("2.9.0"),
        "Megatron refuses --qk-clip and --log-max-attention-logit without Transformer Engine 2.9, which saves the "
        "largest logits; the host device's attention saves them, too",
        _TE,
    ),
    "remainders": Fix(
        "megatron.core.optimizer",
        _te_from("2.1.0.dev0"),
        "--use-precision-aware-optimizer needs an optimizer that can store main parameters as the remainders of "
        "bfloat16 parameters; Megatron checks Transformer Engine's version, but the host device's optimizer can do it",
        _TE,
    ),
    "remainders-by-default": Fix(
        "megatron.core.optimizer.optimizer_config", _te_from("2.1.0"), "same reason as remainders, for flag checks", _TE
    ),
    "norms-in-float64": Fix(
        "megatron.core.utils",
        _norms_in_float64,
        "without apex Megatron computes the norms of gradients and parameters with torch in float32; on the CPU such a "
        "norm is too small if a tensor has 2^24 elements or more",
        {"local_multi_tensor_l2_norm": None},
    ),
    "shards-on-host": Fix(
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        _shards_on_host,
        "with --use-torch-fsdp2 Megatron creates a mesh of CUDA devices, on which torch would place the parameters",
    ),
    "streams-of-buffers": Fix(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer",
        _allocated_on_the_stream,
        "Megatron-FSDP 2 of Megatron main asserts that a buffer was allocated on a CUDA stream",
    ),
    "attention": Fix(
        "megatron.core.transformer.dot_product_attention",
        _attention,
        "the local transformer's attention refuses context parallelism, multi-latent attention (keys and values of "
        "different widths) and packed sequences; with the fix, they use torch's scaled_dot_product_attention",
        {
            "DotProductAttention.forward": _OPERANDS,
            "tensor_parallel.gather_from_sequence_parallel_region": _GATHER,
        },
    ),
    "hybrid-stack": Fix(
        "megatron.core.models.hybrid.hybrid_block",
        _local_specs,
        "the last norm of a hybrid model is a module of Transformer Engine",
    ),
    "hybrid-specs": Fix(
        "megatron.core.models.hybrid.hybrid_layer_specs",
        _local_specs,
        "the layers of hybrid models are specified with Transformer Engine's modules only",
    ),
    "norm-in-product": Fix(
        "megatron.core.transformer.mla_qk_norm_config",
        _norm_in_product,
        "with --qk-layernorm, a hybrid model's multi-latent attention needs a norm and a linear layer as one module; "
        "the local transformer has no such module, so Megatron raises a RuntimeError",
        {"QKNormConfigResolver.__init__": "self config submodules"},
    ),
    "recomputed-without-scales": Fix(
        "megatron.core.tensor_parallel.random",
        _recomputed_without_scales,
        "for --recompute-modules layernorm and moe_act, fp8=False counts as FP8 (only None does not), so Megatron "
        "requests Transformer Engine's scales: a NameError without Transformer Engine",
        {"CheckpointWithoutOutput.__init__": None},
    ),
    "rms-norm": Fix(
        "megatron.core.fusions.fused_layer_norm",
        _with_rms_norm("FusedLayerNorm"),
        "the local transformer's final norm is FusedLayerNorm, which refuses --normalization RMSNorm",
        {"FusedLayerNorm.__init__": f"self {_NORM}"},
    ),
    "rms-norm-in-layers": Fix(
        "megatron.core.transformer.torch_norm",
        _with_rms_norm("WrappedTorchNorm"),
        "the local transformer's layers use torch's RMSNorm, which Megatron refuses with sequence parallelism",
        {"WrappedTorchNorm.__new__": f"cls {_NORM}"},
    ),
    "no-inference-layers": Fix(
        "megatron.core.tensor_parallel.inference_layers",
        _no_inference_layers,
        "multi-token prediction of Megatron main checks if a layer is an instance of a class for inference, which does "
        "not exist without Transformer Engine: a TypeError",
    ),
    "local-layers-of-bert": Fix(
        "megatron.core.models.bert.bert_layer_specs",
        _local_layers_of_bert,
        "pretrain_bert.py always imports Transformer Engine's layers, and fails with an ImportError without them; with "
        "the fix, and without --spec, it uses the local layers, as other models do with --transformer-impl local",
    ),
    "norms-of-vision": Fix(
        "megatron.core.models.vision.clip_vit_model",
        _norms_of_vision,
        "without Transformer Engine the norms of CLIP are torch.nn.LayerNorm, which does not accept the arguments that "
        "Megatron passes to a norm: a TypeError",
    ),
}


class _Finder:
    """Finder that applies each pending fix when the fix's module is imported, and removes itself after the last fix."""

    def __init__(self) -> None:
        self.pending: dict[str, list[Fix]] = {}
        self.first: Callable[[str], None] | None = None
        """Function that is called once, with the name of the first Megatron module, before the module's code runs."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.pending and not (self.first and name.startswith("megatron.")):
            return None
        spec = next(filter(None, (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader  # created by Python for this import only, so other imports are not affected
        execute = loader.exec_module

        def execute_and_fix(module: ModuleType) -> None:
            del loader.exec_module
            first, self.first = self.first, None
            if first:
                first(name)
            execute(module)
            fixes = self.pending.pop(name, [])
            if not self.pending and self in sys.meta_path:
                sys.meta_path.remove(self)
            for fix in fixes:
                fix.make(module)

        loader.exec_module = execute_and_fix  # type: ignore[method-assign]
        return spec


_finder = _Finder()
_installed: set[str] = set()


def watch(*fixes: Fix, first: Callable[[str], None] | None = None) -> None:
    """Register ``fixes``; apply a fix now if its module has been imported, else when the module is imported.

    ``first`` is called with the name of the first Megatron module that is imported, before the module's code runs.
    """
    _finder.first = first or _finder.first
    for fix in fixes:
        if module := sys.modules.get(fix.module_name):
            fix.make(module)
        else:
            _finder.pending.setdefault(fix.module_name, []).append(fix)
    if _finder.pending and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def install(only: Collection[str] | None = None) -> None:
    """Register the fixes with the names ``only`` (default: all of ``FIXES``); idempotent.

    Raises ``UnsupportedMegatron`` if an imported module differs from what its fix expects.  The import of such a
    module after this call raises it, too.
    """
    names = [name for name in (FIXES if only is None else only) if name not in _installed]
    _installed.update(names)
    watch(*(FIXES[name] for name in names))
