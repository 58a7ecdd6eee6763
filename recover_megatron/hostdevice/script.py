"""Run a user's script as ``__main__`` after a preparation, in this process and in processes that the script spawns.

A process started by ``multiprocessing``'s spawn or forkserver (for example Megatron's persistent checkpoint writer)
imports its parent's main module before it unpickles its task.  The name of the main module is in the parent's
``__main__.__spec__``.  So this file sets a spec with the name of a module ``spawned``, which runs the same preparation
and then the user's script as ``__mp_main__``.
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
    """Error: the user's script or module does not exist or cannot be read.  The message names it."""


def _load(target: str) -> tuple[CodeType, dict[str, Any]]:
    """Return the code of a script, and attributes for the module in which it runs.  Raises ``ScriptMissing``.

    ``target``: ``path:FILE`` or ``module:NAME``.
    """
    kind, _, name = target.partition(":")
    if kind == "path":
        try:
            source = Path(name).read_bytes()
        except OSError as problem:
            raise ScriptMissing(f"cannot read the script {name}: {problem.strerror}") from None
        try:
            return compile(source, name, "exec", dont_inherit=True), {"__file__": name, "__package__": None}
        except SyntaxError as error:
            traceback.print_exception(error.with_traceback(None))  # print the same text as Python does for a script
            sys.exit(1)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as missing:
        if not f"{name}.".startswith(f"{missing.name}."):
            raise  # another module is missing, which a parent package of ``name`` imports
        spec = None
    code = spec.loader.get_code(spec.name) if spec and spec.loader and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        raise ScriptMissing(f"no module named {name} can be run")
    return code, {"__file__": spec.origin, "__package__": spec.parent}


class _SpawnSpec(ModuleSpec):
    """Spec of the user's script.

    ``spawned``: name of the module that a spawned process imports; ``package``: package of the script.
    """

    def __init__(self, spawned: str, package: str | None) -> None:
        super().__init__(spawned, None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        """Package against which the script's relative imports are resolved."""
        return self._package


@dataclass(frozen=True)
class Runner:
    """Command ``python -m NAME [-m] SCRIPT [ARGUMENTS...]``; the package NAME must have a module ``spawned``."""

    name: str
    about: str
    prepare: Callable[[], None]
    """Function that is called before the script runs, in this process and in each process that the script spawns."""
    after: Callable[[], None] = lambda: None
    """Function that is called after the script has finished without an error."""

    def main(self, arguments: list[str]) -> int:
        """Run the command; return its exit status.

        The status is 0 for --help and --version, 2 for a wrong command line or a missing script.  If the script runs,
        the process exits as the script does.
        """
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
        else:  # prepare first, since the search for a module imports its parent packages, which may import Megatron
            self.prepare()
            code, attributes = _load(f"{kind}:{target}")
            sys.argv[0] = attributes["__file__"]
        main = ModuleType("__main__")
        vars(main).update(attributes, __spec__=self._spec(attributes))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # spawned processes pickle objects of __mp_main__
        exec(code, vars(main))

    def again(self, namespace: dict[str, Any]) -> None:
        """Run the parent process's script in a spawned process; ``namespace``: attributes of ``__mp_main__``."""
        self.prepare()
        code, attributes = _load(os.environ[VARIABLE])
        namespace.update(attributes, __spec__=self._spec(attributes))
        exec(code, namespace)

    def _spec(self, attributes: dict[str, Any]) -> ModuleSpec:
        return _SpawnSpec(f"{self.name}.spawned", attributes["__package__"])
