"""The layer rule (docs/architecture.md): who may import what, read from the source of every module."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

PACKAGE = "recover_megatron"
ANYWHERE = {
    "__version__",
    "arguments",
    "errors",
    "log_writer",
    "logger",
    "options",
    "orderly_end",
    "script_flags",
    "variables",
}
"""Modules of the package's root that every layer may use: they import nothing but the standard library."""

ALLOWED: dict[str, set[str]] = {
    # layer: the other layers of ours, and the libraries, that it may import
    "__init__": {"elastic"},
    "arguments": set(),
    "errors": set(),
    "log_writer": set(),
    "logger": set(),
    "options": set(),
    "orderly_end": set(),
    "script_flags": set(),
    "variables": set(),
    "network": set(),
    "membership": {"network"},
    "workload": set(),
    "run_log": set(),
    "report": {"run_log", "jinja2", "matplotlib"},
    "tools": set(),
    "status": {"membership", "run_log", "rich", "prometheus_client"},
    "collectives": {"network", "membership", "torch"},
    "instep": {"network", "membership", "workload", "collectives", "torch"},
    "elastic": {"membership", "network", "workload", "collectives", "instep", "torch"},
    "hostdevice": {"torch"},
    "integrate": set(),
    "launch": {"network", "membership", "workload", "psutil"},
    "launch.preflight": {"chaos"},
    "launch.store": {"torch"},
    "launch.device_test": {"torch"},
    "chaos": {"membership", "run_log"},
    "megatron_hooks": {
        "network", "membership", "workload", "collectives", "instep", "hostdevice", "integrate", "run_log", "chaos",
        "torch", "megatron",
    },
}  # fmt: skip


def modules() -> list[Path]:
    return sorted((REPOSITORY / PACKAGE).rglob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    """Every name that a module imports, wherever in the file, as the first part of its path; ours with its layer."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == PACKAGE:
                found |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return {name.split(".")[1] if name.startswith(PACKAGE + ".") else name.split(".")[0] for name in found}


def allowed(path: Path) -> set[str]:
    parts = path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts
    layer = parts[0]
    rules = ALLOWED.get(layer, set()) | ALLOWED.get(".".join(parts[:2]), set())
    return rules | {layer} | ANYWHERE | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert imported(path) - allowed(path) - {PACKAGE} == set()


def test_only_the_megatron_hooks_import_megatron() -> None:
    importers = {path.relative_to(REPOSITORY / PACKAGE).parts[0] for path in modules() if "megatron" in imported(path)}
    assert importers == {"megatron_hooks"}


@pytest.mark.parametrize("viewer", ["report", "status"])
def test_nobody_imports_a_viewer(viewer: str) -> None:
    importers = {str(path.relative_to(REPOSITORY / PACKAGE).parts[0]) for path in modules() if viewer in imported(path)}
    assert importers == {viewer}


def test_every_layer_has_a_rule() -> None:
    layers = {path.relative_to(REPOSITORY / PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert layers - {"__init__"} <= set(ALLOWED)
