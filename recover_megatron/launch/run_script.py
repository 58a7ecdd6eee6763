"""Run a script in this interpreter as ``python SCRIPT`` or ``python -m MODULE`` would: what a warm worker does.

The end is left to the interpreter: SystemExit, atexit handlers, threads that are waited for, flushing.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Any

PRELOAD_NAME = "__recover_preload__"


@dataclass(frozen=True)
class Script:
    """A script file, or a module by its name."""

    name: str
    is_module: bool

    def set_path(self) -> None:
        """Make ``sys.path[0]`` what the interpreter would make it."""
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))

    def show(self, error: BaseException) -> None:
        """Print ``error`` as the interpreter would, without the frames of this package before the script's."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (*_OWN_FILES, runpy.__file__):
            trace = trace.tb_next
        if trace is None:
            trace = error.__traceback__ if not isinstance(error, SyntaxError) else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)


_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "warm.py"), "<frozen runpy>", "<string>")


def load_for_preload(script: Script) -> dict[str, Any]:
    """Execute the script under a name that is not ``__main__``.  Returns its globals; raises what it raises."""
    if script.is_module:
        return runpy.run_module(script.name, run_name=PRELOAD_NAME)
    return _execute(script.name, PRELOAD_NAME)


def run_as_main(script: Script) -> None:
    """Execute the script as ``__main__``.  An uncaught exception is shown and becomes SystemExit(1)."""
    try:
        if script.is_module:
            sys.modules["__main__"] = _new_module("__main__")
            # What the interpreter itself calls for -m: it sets __spec__, which multiprocessing needs.
            runpy._run_module_as_main(script.name)  # type: ignore[attr-defined]
        else:
            _execute(script.name, "__main__")
    except Exception as error:  # noqa: BLE001 - whatever the script did not catch, as the interpreter
        script.show(error)
        sys.exit(1)


def _execute(path: str, name: str) -> dict[str, Any]:
    absolute = os.path.abspath(path)
    module = _new_module(name)
    module.__file__ = absolute
    module.__loader__ = importlib.machinery.SourceFileLoader(name, absolute)
    module.__dict__["__cached__"] = None
    sys.modules[name] = module
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module.__dict__


def _new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    return module
