"""Run a user's script as ``__main__`` after something was prepared, here and in the processes that it spawns.

A process started by ``multiprocessing``'s spawn or forkserver (Megatron's persistent checkpoint writer is one) imports
its parent's main module before it unpickles its task.  It finds that module by ``__main__.__spec__``: ours names a
module ``spawned``, which prepares the same and then runs the user's script as ``__mp_main__``, as Python would have.
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
        try:
            return compile(source, name, "exec", dont_inherit=True), {"__file__": name, "__package__": None}
        except SyntaxError as error:
            traceback.print_exception(error.with_traceback(None))  # as of a script that Python itself was given
            sys.exit(1)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as missing:
        if not f"{name}.".startswith(f"{missing.name}."):
            raise  # something that a package around it imports
        spec = None
    code = spec.loader.get_code(spec.name) if spec and spec.loader and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        raise ScriptMissing(f"there is no module {name} that can be run")
    return code, {"__file__": spec.origin, "__package__": spec.parent}


class _SpawnSpec(ModuleSpec):
    """Names a module of ours to processes that are spawned, and the user's package to the import system."""

    def __init__(self, spawned: str, package: str | None) -> None:
        super().__init__(spawned, None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        """The package against which the script's relative imports are resolved."""
        return self._package


@dataclass(frozen=True)
class Runner:
    """``python -m NAME [-m] SCRIPT [ARGUMENTS...]``; the package NAME has a module ``spawned`` that calls ``again``."""

    name: str
    about: str
    prepare: Callable[[], None]
    """Called before the script is loaded, and in each process that it spawns."""
    after: Callable[[], None] = lambda: None
    """Called when the script has ended well."""

    def main(self, arguments: list[str]) -> int:
        """Run the script; 2 where the command line is wrong or the script missing, else what the script does."""
        usage, say = f"usage: python -m {self.name} [-m] SCRIPT [ARGUMENTS...]", self.name.rpartition(".")[2]
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
            print(f"[{say}] {problem}", file=sys.stderr)
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
        else:  # finding a module imports the packages around it, Megatron's perhaps
            self.prepare()
            code, attributes = _load(f"{kind}:{target}")
            sys.argv[0] = attributes["__file__"]
        main = ModuleType("__main__")
        vars(main).update(attributes, __spec__=self._spec(attributes))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second: what children send back names it
        exec(code, vars(main))

    def again(self, namespace: dict[str, Any]) -> None:
        """In a spawned process: run the parent's script in ``namespace``, which is that of ``__mp_main__``."""
        self.prepare()
        code, attributes = _load(os.environ[VARIABLE])
        namespace.update(attributes, __spec__=self._spec(attributes))
        exec(code, namespace)

    def _spec(self, attributes: dict[str, Any]) -> ModuleSpec:
        return _SpawnSpec(f"{self.name}.spawned", attributes["__package__"])
