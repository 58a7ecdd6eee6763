"""Run a user's script as ``__main__`` after a preparation, in this process and in processes that the script spawns.

A process started by ``multiprocessing``'s spawn or forkserver (for example Megatron's persistent checkpoint writer)
imports its parent's main module before it unpickles its task.  It finds that module by ``__main__.__spec__``.  So the
spec that is set here names a module ``spawned``, which runs the same preparation and then the user's script as
``__mp_main__``, as Python would.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from recover_megatron import __version__
from recover_megatron.errors import end_process

VARIABLE = "RECOVER_MAIN"
"""Environment variable that names the script for spawned processes: ``path:FILE`` or ``module:NAME``."""


class ScriptMissing(Exception):
    """Error for a script or module that does not exist or cannot be read; the message names it."""


def _load(target: str) -> tuple[CodeType, dict[str, Any]]:
    """Return the code of ``path:FILE`` or ``module:NAME``, and its module's attributes.  Raises ``ScriptMissing``."""
    kind, _, name = target.partition(":")
    if kind == "path":
        try:
            source = Path(name).read_bytes()
        except OSError as problem:
            raise ScriptMissing(f"cannot read the script {name}: {problem.strerror}") from None
        try:
            return compile(source, name, "exec", dont_inherit=True), {"__file__": name, "__package__": None}
        except SyntaxError as error:
            traceback.print_exception(error.with_traceback(None))  # as Python itself does for a script
            sys.exit(1)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as missing:
        if not f"{name}.".startswith(f"{missing.name}."):
            raise  # an import of an enclosing package failed
        spec = None
    code = spec.loader.get_code(spec.name) if spec and spec.loader and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        raise ScriptMissing(f"no module named {name} can be run")
    return code, {"__file__": spec.origin, "__package__": spec.parent}


class _SpawnSpec(ModuleSpec):
    """Spec of the user's script: its name is the module for spawned processes, its parent is the script's package."""

    def __init__(self, spawned: str, package: str | None) -> None:
        super().__init__(spawned, None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        """Package against which the script's relative imports are resolved."""
        return self._package


@dataclass(frozen=True)
class Runner:
    """Command ``python -m NAME [-m] SCRIPT [ARGUMENTS...]``; NAME has a module ``spawned`` that calls ``again``."""

    name: str
    about: str
    prepare: Callable[[], None]
    """Preparation, called before the script runs, also in each process that the script spawns."""
    after: Callable[[], None] = lambda: None
    """Function that is called when the script has finished without an error."""

    def main(self, arguments: list[str]) -> int:
        """Run the script; return 2 for a wrong command line or a missing script, else exit as the script does."""
        usage, prefix = f"usage: python -m {self.name} [-m] SCRIPT [ARGUMENTS...]", self.name.rpartition(".")[2]
        if arguments[:1] in (["-h"], ["--help"]):
            print(f"{usage}\n\n{self.about}")
            return 0
        if arguments[:1] == ["--version"]:
            print(f"{self.name} {__version__}")
            return 0
        kind = "path"
        if arguments[:1] == ["-m"]:
            kind, arguments = "module", arguments[1:]
        if not arguments or arguments[0].startswith("-"):
            print(usage, file=sys.stderr)
            return 2
        try:
            self._run(kind, arguments[0], arguments[1:])
        except ScriptMissing as problem:
            print(f"[{prefix}] {problem}", file=sys.stderr)
            return 2
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        self.after()
        end_process()

    def _run(self, kind: str, name: str, arguments: list[str]) -> None:
        """Run a file, a folder's ``__main__.py`` or a module as ``__main__``.  Raises ``ScriptMissing``."""
        sys.argv[:] = [name, *arguments]
        target, place = name, os.getcwd()
        if kind == "path":
            target = os.path.join(place, name)
            place = os.path.dirname(os.path.realpath(target))
        if is_folder := kind == "path" and os.path.isdir(target):
            target, place = os.path.join(target, "__main__.py"), target
        if is_folder or not sys.flags.safe_path:
            sys.path[: not sys.flags.safe_path] = [place]
        os.environ[VARIABLE] = f"{kind}:{target}"
        if kind == "path":
            code, attributes = _load(f"{kind}:{target}")
            self.prepare()
        else:  # finding a module imports its parent packages, perhaps Megatron
            self.prepare()
            code, attributes = _load(f"{kind}:{target}")
            sys.argv[0] = attributes["__file__"]
        main = ModuleType("__main__")
        vars(main).update(attributes, __spec__=self._spec(attributes))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # child processes' pickles name __mp_main__
        exec(code, vars(main))

    def again(self, namespace: dict[str, Any]) -> None:
        """Run the parent's script in a spawned process, in ``namespace`` (of ``__mp_main__``)."""
        self.prepare()
        code, attributes = _load(os.environ[VARIABLE])
        namespace.update(attributes, __spec__=self._spec(attributes))
        exec(code, namespace)

    def _spec(self, attributes: dict[str, Any]) -> ModuleSpec:
        return _SpawnSpec(f"{self.name}.spawned", attributes["__package__"])
