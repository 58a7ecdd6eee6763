"""Run a user's script as ``__main__`` with the host device on, here and in the processes that it spawns.

A process started by ``multiprocessing``'s spawn or forkserver (Megatron's persistent checkpoint writer is one) imports
its parent's main module before it unpickles its task.  It finds that module by ``__main__.__spec__``: ours names
``recover_megatron.hostdevice.spawned``, which activates the host device and then runs the user's script as
``__mp_main__``, as Python would have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from recover_megatron import hostdevice

VARIABLE = "RECOVER_HOSTDEVICE_MAIN"
"""Environment variable by which spawned processes learn what to run: ``path:FILE`` or ``module:NAME``."""


class ScriptMissing(Exception):
    """There is no such script or module; the message says which."""


def _load(target: str) -> tuple[CodeType, dict[str, Any]]:
    """The code of ``path:FILE`` or ``module:NAME`` and the module attributes it is to see."""
    kind, _, name = target.partition(":")
    if kind == "path":
        try:
            source = Path(name).read_bytes()
        except OSError as problem:
            raise ScriptMissing(f"cannot read the script {name}: {problem.strerror}") from None
        return compile(source, name, "exec"), {"__file__": name, "__package__": None}
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    code = spec.loader.get_code(spec.name) if spec and spec.loader and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        raise ScriptMissing(f"there is no module {name} that can be run")
    return code, {"__file__": spec.origin, "__package__": spec.parent}


class _SpawnSpec(ModuleSpec):
    """Names our module to processes that are spawned, and the user's package to the import system."""

    def __init__(self, package: str | None) -> None:
        super().__init__("recover_megatron.hostdevice.spawned", None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        """The package against which the script's relative imports are resolved."""
        return self._package


def run(target: str, arguments: list[str]) -> None:
    """Activate the host device, run ``path:FILE`` or ``module:NAME`` as ``__main__``.  Raises ``ScriptMissing``."""
    kind, _, name = target.partition(":")
    sys.path[0:1] = [os.path.dirname(os.path.abspath(name)) if kind == "path" else os.getcwd()]
    if kind == "path":
        code, attributes = _load(target)
        hostdevice.activate()
    else:  # finding a module imports the packages around it, Megatron's perhaps
        hostdevice.activate()
        code, attributes = _load(target)
    os.environ[VARIABLE] = target
    sys.argv[:] = [attributes["__file__"], *arguments]
    main = ModuleType("__main__")
    vars(main).update(attributes, __spec__=_SpawnSpec(attributes["__package__"]))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second: what children send back names it
    exec(code, vars(main))


def run_again(namespace: dict[str, Any]) -> None:
    """In a spawned process: run the parent's script in ``namespace``, which is that of ``__mp_main__``."""
    hostdevice.activate()
    code, attributes = _load(os.environ[VARIABLE])
    namespace.update(attributes, __spec__=_SpawnSpec(attributes["__package__"]))
    exec(code, namespace)
