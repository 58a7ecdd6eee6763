"""The program that this process runs, described for a comparison of workers: sources by content, packages by version.

A worker that starts late (in place of a lost worker, as a spare, by ``--join``) reads the script and its modules from a
disk where they may have been edited since the launch.  Workers compare the modules that both have loaded:

    refuses   another content of the script, or of a module outside site-packages; Megatron and this package are
              compared wherever they are installed; another release (the first two numbers) of a ``DECISIVE`` package
    warns     another patch release of these packages, other versions of NumPy and Python
    ignored   other packages; modules that only one worker has loaded; compiled modules, and modules without a source
              (``.pyc``, zip files, a notebook, ``-c``); generated modules (the temporary folder, ``_version.py`` and
              the like); ``sitecustomize``; sources above ``LARGEST`` bytes

A module is identified by its name, the script by its file name: the same program may be installed elsewhere on another
host.  A module's file may be edited after its import, so call ``describe`` at the start of the process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

DECISIVE = ("torch", "megatron.core", "transformer_engine")
"""Packages whose release affects the numerical results of a training."""
NOTED = (*DECISIVE, "numpy")
COMPARED = ("megatron", "recover_megatron")
"""Packages that are compared by content in site-packages, too."""
GENERATED = ("_version", "__version__", "version", "_build_info", "build_info", "sitecustomize", "usercustomize")
INSTALLED = {"site-packages", "dist-packages"}
LARGEST = 2 << 20
MOST = 5000
"""Largest number of files that are described; so many fit into one message of a peer store."""
VERSION = str(vars(sys.modules["recover_megatron"])["__version__"])
"""Version of this package, as it was loaded."""
PACKAGE = "package "
FLAG = "code"
"""Name that stands for the program in ``--recover-may-differ``."""


def describe(modules: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return module -> digest of its source, and ``PACKAGE`` + name of a package -> its version.  Raises nothing."""
    loaded = dict(sys.modules if modules is None else modules)
    # Without the build suffix: Megatron puts the git revision of the working directory there.
    versions = {}
    for name in NOTED:
        with suppress(Exception):
            versions[name] = str(loaded[name].__version__).partition("+")[0]
    versions["Python"] = platform.python_version()
    return {**_sources(loaded), **{f"{PACKAGE}{name}": version for name, version in versions.items() if version}}


def differences(own_code: Mapping[str, str], run_code: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return why a worker with ``own_code`` is refused by a run with ``run_code``, and differences that only warn."""
    refuses, warns = [], []
    for name in sorted(own_code.keys() & run_code.keys()):
        own, run = own_code[name], run_code[name]
        package = name.removeprefix(PACKAGE)
        if own == run:
            continue
        if package == name:
            refuses.append(f"the content of {name} differs")
        elif package in DECISIVE and own.split(".")[:2] != run.split(".")[:2]:
            refuses.append(f"{package} {own} (the run: {run})")
        else:
            warns.append(f"{package} {own} (the run: {run})")
    return refuses, warns


def _sources(loaded: Mapping[str, Any]) -> dict[str, str]:
    main = _path(loaded.get("__main__"))
    temporary, standard = (folder + os.sep for folder in (tempfile.gettempdir(), os.path.dirname(os.__file__)))
    found: dict[str, str] = {}
    for name, module in sorted(loaded.items()):
        path, top = "", name.partition(".")[0]
        with suppress(Exception):  # the program may have put any object into sys.modules
            path = _path(module)
        if not path or name == "__mp_main__" or len(found) == MOST:
            continue
        if name != "__main__" and (
            not path.endswith(".py")
            or top in sys.stdlib_module_names
            or name.rpartition(".")[2] in GENERATED
            or (top not in COMPARED and (path.startswith(standard) or not INSTALLED.isdisjoint(path.split(os.sep))))
            or (path.startswith(temporary) and not main.startswith(temporary))
        ):
            continue
        with suppress(OSError, ValueError):
            if os.path.getsize(path) <= LARGEST:
                text = Path(path).read_bytes()
                if name == "__main__" and text.startswith(b"#!"):  # this line has an environment's path if pip wrote it
                    text = text.partition(b"\n")[2]
                found[_name(name, path)] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return found


def _path(module: Any) -> str:
    """Return the path of a module's source.  Reads only ``__dict__``: attribute access makes some import others."""
    path = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(path) if isinstance(path, str) else ""


def _name(name: str, path: str) -> str:
    folder, file = os.path.split(path)
    if name == "__main__":
        return f"script {os.path.basename(folder)}/{file}" if file == "__main__.py" else f"script {file}"
    return name.replace(".", "/") + ("/__init__.py" if file == "__init__.py" else ".py")
