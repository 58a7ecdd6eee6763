"""The program that this process runs, described for a comparison of workers: sources by content, packages by version.

A worker that begins late (in place of a lost one, as a spare, by ``--join``) reads the script and its modules anew from
a disk on which somebody may have edited them.  Workers compare what both have loaded:

    refuses   another content of the script, or of a module outside site-packages; Megatron and this package are
              compared wherever they lie; another release (the first two numbers) of a package in ``DECISIVE``
    warns     another patch of these, other versions of NumPy and Python
    ignored   other packages; what only one of the two has loaded; compiled modules, and modules without a source
              (``.pyc``, zip files, a notebook, ``-c``); generated modules (the temporary folder, ``_version.py`` and
              the like); ``sitecustomize``; sources above ``LARGEST`` bytes

A module goes by its name, the script by that of its file: the same program may lie elsewhere on another host.  Nobody
knows the text of a module after its import, so ``describe`` belongs at the start of the process.
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
"""Packages whose release decides on the numbers of a training."""
NOTED = (*DECISIVE, "numpy")
COMPARED = ("megatron", "recover_megatron")
"""Packages that are compared by content in site-packages, too."""
GENERATED = ("_version", "__version__", "version", "_build_info", "build_info", "sitecustomize", "usercustomize")
INSTALLED = {"site-packages", "dist-packages"}
LARGEST = 2 << 20
MOST = 5000
"""Files that are described: all of them fit into one message of a peer store."""
VERSION = str(vars(sys.modules["recover_megatron"])["__version__"])
"""The version of this package, as it was loaded."""
PACKAGE = "package "
FLAG = "code"
"""The name of the program for ``--recover-may-differ``."""


def describe(modules: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name -> digest of the source of each loaded module; ``PACKAGE`` and a name -> version.  Raises nothing."""
    loaded = dict(sys.modules if modules is None else modules)
    # Without what stands for a build: Megatron puts the revision of the working folder's git there.
    versions = {}
    for name in NOTED:
        with suppress(Exception):
            versions[name] = str(loaded[name].__version__).partition("+")[0]
    versions["Python"] = platform.python_version()
    return {**_sources(loaded), **{f"{PACKAGE}{name}": version for name, version in versions.items() if version}}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """In words, what refuses a worker with ``mine`` in a run with ``theirs``, and what is worth a warning."""
    refuses, warns = [], []
    for name in sorted(mine.keys() & theirs.keys()):
        here, there = mine[name], theirs[name]
        package = name.removeprefix(PACKAGE)
        if here == there:
            continue
        if package == name:
            refuses.append(f"{name} has another content")
        elif package in DECISIVE and here.split(".")[:2] != there.split(".")[:2]:
            refuses.append(f"{package} {here} (the run: {there})")
        else:
            warns.append(f"{package} {here} (the run: {there})")
    return refuses, warns


def _sources(loaded: Mapping[str, Any]) -> dict[str, str]:
    main = _path(loaded.get("__main__"))
    temporary, standard = (folder + os.sep for folder in (tempfile.gettempdir(), os.path.dirname(os.__file__)))
    found: dict[str, str] = {}
    for name, module in sorted(loaded.items()):
        path, top = "", name.partition(".")[0]
        with suppress(Exception):  # a module may be an object of its program's
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
                if name == "__main__" and text.startswith(b"#!"):  # with the path of an environment, if pip made it
                    text = text.partition(b"\n")[2]
                found[_name(name, path)] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return found


def _path(module: Any) -> str:
    """Path of a module's source.  Its attributes are not asked for: some modules import others at that."""
    path = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(path) if isinstance(path, str) else ""


def _name(name: str, path: str) -> str:
    folder, file = os.path.split(path)
    if name == "__main__":
        return f"script {os.path.basename(folder)}/{file}" if file == "__main__.py" else f"script {file}"
    return name.replace(".", "/") + ("/__init__.py" if file == "__init__.py" else ".py")
