"""SCRIPT before anything is started: whether it is there, and the one that is installed with recover-run.

``recover-run ... pretrain_gpt_recover.py ...`` works in any folder: a file of that name in the current one is run, else
the module that was installed with this package.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

INSTALLED = {"pretrain_gpt_recover.py": "pretrain_gpt_recover"}
"""Scripts that setup.py installs as modules."""


def installed_module(script: str) -> tuple[str, str] | None:
    """The module to run for ``script``, which is no file here, and where it lies; None: ``script`` is what it says.

    Only for a bare name: who writes a path means that file.
    """
    if script not in INSTALLED or os.path.lexists(script):
        return None
    spec = _find_module(INSTALLED[script])
    return (INSTALLED[script], str(spec.origin)) if spec is not None else None


def check_script(script: str) -> list[str]:
    """The reasons against running the file (or folder) ``script``."""
    path = Path(script)
    if path.is_dir():
        return [] if (path / "__main__.py").is_file() else [f"script {script} is a folder without a __main__.py"]
    if not path.exists():
        nearest = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
        hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
        return [f"script {script} does not exist (looked for {path.absolute()}){hint}"]
    return [] if os.access(path, os.R_OK) else [f"script {script} cannot be read: check its permissions"]


def check_module(module: str) -> list[str]:
    """The reasons against ``python -m module``."""
    if _find_module(module) is None:
        return [f"module {module} is not found: check its name, and that it is installed or in PYTHONPATH"]
    return []


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_module(module: str) -> ModuleSpec | None:
    """Look for ``module`` without importing anything, as ``python -m`` would: the current folder first."""
    first, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path])
    if spec is None and first.isidentifier():
        spec = importlib.util.find_spec(first)
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec
