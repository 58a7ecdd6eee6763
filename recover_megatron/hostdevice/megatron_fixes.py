"""Small changes inside Megatron itself, each made when (if ever) its module is imported.

``install`` puts a finder on ``sys.meta_path`` that lets Python's own finders do the work and runs the fix right after
the module's code; when all fixes are applied the finder removes itself.  Megatron is never imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
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


FIXES = {
    "prebuilt-helpers": Fix(
        "megatron.core.datasets.utils",
        _skip_make_in_wheel,
        "Megatron runs `make` in its datasets folder at start; the wheel brings the compiled extension but no "
        "Makefile, and the run would end there",
    ),
    "load-without-grad": Fix(
        "megatron.core.optimizer.distrib_optimizer",
        _load_without_grad,
        "loading the distributed optimizer's float32 parameters writes to views of leaves with grad mode on, which "
        "autograd refuses",
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
