"""Small changes inside Megatron itself, each made when (if ever) its module is imported.

``install`` puts a finder on ``sys.meta_path`` that lets Python's own finders do the work and runs the fix right after
the module's code; when all fixes are applied the finder removes itself.  Megatron is never imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPORTED = "0.17 to 0.19"


class UnsupportedMegatron(RuntimeError):
    """Megatron is not as the fix expects it; the message names what differs and the supported versions."""


@dataclass(frozen=True)
class Fix:
    """``apply(module)`` is called once, after ``module_name`` was imported."""

    module_name: str
    apply: Callable[[ModuleType], None]
    why: str


def _expect(module: ModuleType, path: str, parameters: list[str]) -> Any:
    """The function at ``path`` in ``module``; ``UnsupportedMegatron`` unless its parameters are the expected ones."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None or list(inspect.signature(found).parameters) != parameters:
        seen = "is missing" if found is None else f"has the parameters {inspect.signature(found)}"
        raise UnsupportedMegatron(
            f"{module.__name__}.{path} {seen}, expected ({', '.join(parameters)}): this version of Megatron-LM is not "
            f"known to recover_megatron; supported are {SUPPORTED}."
        )
    return found


def _minor_version() -> int:
    """Megatron-Core's minor version, from its file: while its package is being imported it has no attributes yet."""
    text = (Path(str(sys.modules["megatron.core"].__file__)).parent / "package_info.py").read_text(encoding="utf-8")
    found = re.search(r"^MINOR = (\d+)", text, re.MULTILINE)
    if found is None:
        raise UnsupportedMegatron(f"megatron/core/package_info.py names no minor version; supported are {SUPPORTED}.")
    return int(found[1])


def _skip_make_in_wheel(module: ModuleType) -> None:
    compile_helpers = _expect(module, "compile_helpers", [])
    makefile = Path(str(module.__file__)).parent / "Makefile"

    @functools.wraps(compile_helpers)
    def compile_unless_built() -> None:
        if makefile.exists() or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    module.compile_helpers = compile_unless_built  # type: ignore[attr-defined]


def _load_without_grad(module: ModuleType) -> None:
    import torch

    load = _expect(module, "DistributedOptimizer.load_state_dict", ["self", "state_dict"])
    module.DistributedOptimizer.load_state_dict = torch.no_grad()(load)


def _splits_as_numpy(module: ModuleType) -> None:
    _expect(module, "maybe_move_tensor_to_cpu", ["tensor", "as_numpy", "record_stream"])

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    module.maybe_move_tensor_to_cpu = on_host  # type: ignore[attr-defined]


def _preload_copies(module: ModuleType) -> None:
    preload = _expect(module, "FileSystemWriterAsync.preload_tensors", ["write_buckets", "non_blocking"])

    @functools.wraps(preload)  # by whose name it is pickled for the writer process
    def preload_copies(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in preload(write_buckets, non_blocking)
        ]

    module.FileSystemWriterAsync.preload_tensors = staticmethod(preload_copies)


def _send_copies(module: ModuleType) -> None:
    operands = ["tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"]
    send = _expect(module, "_p2p_ops", [*operands, "group", "prev_pipeline_rank", "next_pipeline_rank"])
    if _minor_version() >= 18:
        return

    @functools.wraps(send)
    def send_copies(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        prev, next_ = (None if t is None else t.clone() for t in (tensor_send_prev, tensor_send_next))
        return send(tensor_send_prev=prev, tensor_send_next=next_, **others)

    module._p2p_ops = send_copies  # type: ignore[attr-defined]


def _with_rms_norm(class_name: str) -> Callable[[ModuleType], None]:
    parameters = ["config", "hidden_size", "eps", "persist_layer_norm", "zero_centered_gamma", "normalization"]

    def apply(module: ModuleType) -> None:
        from recover_megatron.hostdevice.apex_stub import RMSNorm

        original = _expect(module, class_name, parameters)

        def new(cls: type, config: Any, hidden_size: Any, eps: float = 1e-5, **others: Any) -> Any:
            if config.normalization == "RMSNorm":
                return RMSNorm(config, hidden_size, eps)
            if original.__new__ is object.__new__:
                return object.__new__(cls)
            return original.__new__(original, config, hidden_size, eps, **others)

        setattr(module, class_name, type(class_name, (original,), {"__new__": new, "__module__": module.__name__}))

    return apply


FIXES = {
    "prebuilt-helpers": Fix(
        "megatron.core.datasets.utils",
        _skip_make_in_wheel,
        "Megatron runs `make` in its datasets folder at start; the wheel brings the compiled extension but no "
        "Makefile, and the run would end there",
    ),
    "checkpoint-copies": Fix(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        _preload_copies,
        "an asynchronous checkpoint copies the device's tensors to the host before training goes on; tensors that are "
        "on the host already are not copied, and the writer would save what training makes of them meanwhile",
    ),
    "load-without-grad": Fix(
        "megatron.core.optimizer.distrib_optimizer",
        _load_without_grad,
        "loading the distributed optimizer's float32 parameters writes to views of leaves with grad mode on, which "
        "autograd refuses",
    ),
    "splits-as-numpy": Fix(
        "megatron.core.transformer.moe.moe_utils",
        _splits_as_numpy,
        "the all-to-all dispatcher makes its split sizes numpy arrays only of tensors whose is_cuda is true",
    ),
    "send-copies": Fix(
        "megatron.core.pipeline_parallel.p2p_communication",
        _send_copies,
        "0.17 frees a pipeline tensor that is still being sent; a CUDA stream forgives that, gloo would send garbage "
        "(0.18 waits first)",
    ),
    "rms-norm": Fix(
        "megatron.core.fusions.fused_layer_norm",
        _with_rms_norm("FusedLayerNorm"),
        "the local transformer's final norm is FusedLayerNorm, which refuses --normalization RMSNorm",
    ),
    "rms-norm-in-layers": Fix(
        "megatron.core.transformer.torch_norm",
        _with_rms_norm("WrappedTorchNorm"),
        "the local transformer's layers take torch's RMSNorm, which Megatron refuses with sequence parallelism",
    ),
}


class _Finder:
    """Applies the pending fixes as their modules are imported, then removes itself."""

    def __init__(self, fixes: Collection[Fix]) -> None:
        self.pending = {fix.module_name: fix for fix in fixes}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.pending:
            return None
        spec = next(filter(None, (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader  # made for this one import: nobody else's exec_module changes
        execute = loader.exec_module

        def execute_and_fix(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            fix = self.pending.pop(name, None)
            if not self.pending and self in sys.meta_path:
                sys.meta_path.remove(self)
            if fix:
                fix.apply(module)

        loader.exec_module = execute_and_fix  # type: ignore[method-assign]
        return spec


_installed: set[str] = set()


def install(only: Collection[str] | None = None) -> None:
    """Arrange for the fixes named in ``only`` (default: all) to be applied; idempotent.

    A fix whose module is imported already is applied at once.  Raises ``UnsupportedMegatron``, here or from the
    import, where Megatron is not as expected.
    """
    later = []
    for name in FIXES if only is None else only:
        fix = FIXES[name]
        if name in _installed:
            continue
        _installed.add(name)
        if module := sys.modules.get(fix.module_name):
            fix.apply(module)
        else:
            later.append(fix)
    if later:
        sys.meta_path.insert(0, _Finder(later))
