"""Description of the program that a process runs, to find workers with different code.

A worker that starts after the launch (a replacement, a spare, a worker of ``--join``) reads the script and its modules
from a disk where they may have been edited since.  For a late worker, the modules that both this worker and
the run have loaded are compared.  Differences have these effects:

    refused   the content of the script, or of a module outside site-packages; the content of Megatron or this package,
              wherever it is installed; the release (first two numbers) of a ``DECISIVE`` package
    warning   the patch release of a ``DECISIVE`` package; the version of NumPy or Python
    ignored   other packages; modules that only one worker has loaded; compiled modules, and modules without a source
              (``.pyc``, zip files, a notebook, ``-c``); generated modules (in the temporary folder, ``_version.py`` and
              similar names); ``sitecustomize``; sources above ``LARGEST`` bytes

A module is identified by its name, and the script by its file name, because hosts may have the program in different
folders.  ``describe`` reads the files, which may be edited after the import, so call it at the start of the process.
A prepared process, which may wait for hours, calls ``remember`` when it has imported its modules.
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
"""Packages whose release may change the numerical results of a training."""
NOTED = (*DECISIVE, "numpy")
COMPARED = ("megatron", "recover_megatron")
"""Packages whose content is compared even if they are installed in site-packages."""
GENERATED = ("_version", "__version__", "version", "_build_info", "build_info", "sitecustomize", "usercustomize")
INSTALLED = {"site-packages", "dist-packages"}
LARGEST = 2 << 20
MOST = 5000
"""Greatest number of files in a description, which must fit into one message of a peer store."""
VERSION = str(vars(sys.modules["recover_megatron"])["__version__"])
"""Version of this package that the process has loaded."""
PACKAGE = "package "
FLAG = "code"
"""Name that lets ``--recover-may-differ`` accept workers with other program code."""


_remembered: dict[str, str] = {}
"""Module's name -> digest of its source, for the modules that were loaded when ``remember`` was called."""


def remember() -> None:
    """Make later descriptions of this process use the present content of the files of the loaded modules."""
    _remembered.update(_sources(dict(sys.modules)))


def describe(modules: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return module's name -> digest of its source, and ``PACKAGE`` + package's name -> its version.

    ``modules``: default ``sys.modules``.  Raises no error.
    """
    loaded = dict(sys.modules if modules is None else modules)
    # Versions without the build suffix, where Megatron puts the git revision of the working directory.
    versions = {}
    for name in NOTED:
        with suppress(Exception):
            versions[name] = str(loaded[name].__version__).partition("+")[0]
    versions["Python"] = platform.python_version()
    return {**_sources(loaded), **{f"{PACKAGE}{name}": version for name, version in versions.items() if version}}


def differences(own_code: Mapping[str, str], run_code: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return why a run with ``run_code`` refuses a worker with ``own_code``, and differences that only cause a warning.

    Both results are lists of texts; both arguments are results of ``describe``.
    """
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
    found = dict(_remembered)
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
            if _name(name, path) not in found and os.path.getsize(path) <= LARGEST:
                text = Path(path).read_bytes()
                if name == "__main__" and text.startswith(b"#!"):  # pip writes a host's path into this line
                    text = text.partition(b"\n")[2]
                found[_name(name, path)] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return found


def _path(module: Any) -> str:
    """Return the path of a module's file; an empty text if it has none.

    Reads only ``__dict__``, because attribute access makes some modules import other modules.
    """
    path = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(path) if isinstance(path, str) else ""


def _name(name: str, path: str) -> str:
    folder, file = os.path.split(path)
    if name == "__main__":
        return f"script {os.path.basename(folder)}/{file}" if file == "__main__.py" else f"script {file}"
    return name.replace(".", "/") + ("/__init__.py" if file == "__init__.py" else ".py")
