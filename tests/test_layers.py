"""The layer rule (docs/architecture.md): who may import what, read from the source of every module; and no circles."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

PACKAGE = "recover_megatron"
ANYWHERE = {
    "arguments",
    "errors",
    "log_writer",
    "logger",
    "options",
    "out_of_turn",
    "program",
    "rules",
    "script_flags",
    "variables",
}
"""Modules of the package's root that every layer may use: they import nothing but the standard library."""

ALLOWED: dict[str, set[str]] = {
    # layer: the other layers of ours, and the libraries, that it may import
    "__init__": {"elastic"},
    **{name: set() for name in ANYWHERE},
    "network": {"msgspec"},
    "membership": {"network", "msgspec"},
    "workload": set(),
    "run_log": set(),
    "report": {"run_log", "jinja2", "matplotlib"},
    "tools": set(),
    "status": {"membership", "run_log", "rich", "prometheus_client"},
    "collectives": {"network", "membership", "torch"},
    "instep": {"network", "membership", "workload", "collectives", "torch"},
    "elastic": {"membership", "network", "workload", "collectives", "torch"},
    "hostdevice": {"torch"},
    "integrate": set(),
    "launch": {"network", "membership", "workload", "psutil"},
    "launch.command_line.preflight": {"chaos"},
    "launch.nodes.store": {"torch"},
    "launch.device_test": {"torch"},
    "chaos": {"membership", "run_log"},
    "megatron_hooks": {
        "network", "membership", "workload", "collectives", "instep", "hostdevice", "integrate", "run_log", "chaos",
        "torch", "megatron",
    },
}  # fmt: skip


CLIENTS = ("megatron_hooks", "elastic", "hostdevice", "collectives")
INTERFACE = {"manager", "faults", "trainer", "decision"}
"""Modules of ``instep`` that its clients may import: the manager, the errors, a step's trainer, the plan's records."""
BESIDE = {"megatron_hooks.parallel_groups": {"groups.model_parallel_groups", "groups.process_group", "groups.traffic"}}
"""Module of a client -> what it imports besides: Megatron's process groups are made of those of ``instep``."""

MODULES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))
NAMES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES
}
"""Every module of the package by its name; a package by that of its folder."""


def names(nodes: Iterable[ast.AST], known: Iterable[str] = NAMES) -> set[str]:
    """The modules that imports among ``nodes`` name: of a name that is no known module's, the one that it is in."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in inside}
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """Every name that a module imports, wherever in the file, as the first part of its path; ours with its layer."""
    found = names(ast.walk(tree(path)))
    return {name.split(".")[1] if name.startswith(PACKAGE + ".") else name.split(".")[0] for name in found}


def allowed(path: Path) -> set[str]:
    parts = path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts
    layer = parts[0]
    rules = ALLOWED.get(layer, set()) | ALLOWED.get(".".join(parts), set())
    return rules | {layer} | ANYWHERE | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert imported(path) - allowed(path) - {PACKAGE} == set()


def test_only_the_megatron_hooks_import_megatron() -> None:
    importers = {path.relative_to(REPOSITORY / PACKAGE).parts[0] for path in MODULES if "megatron" in imported(path)}
    assert importers == {"megatron_hooks"}


def test_the_clients_of_instep_know_its_interface_and_nothing_behind_it() -> None:
    package = f"{PACKAGE}.instep."
    clients = {name: path for name, path in NAMES.items() if name.split(".")[1:2] and name.split(".")[1] in CLIENTS}
    found = {
        name.removeprefix(f"{PACKAGE}."): {
            its.removeprefix(package) for its in names(ast.walk(tree(path))) if its.startswith(package)
        }
        for name, path in clients.items()
    }
    assert {name: its - INTERFACE for name, its in found.items() if its - INTERFACE} == BESIDE


@pytest.mark.parametrize("viewer", ["report", "status"])
def test_nobody_imports_a_viewer(viewer: str) -> None:
    importers = {str(path.relative_to(REPOSITORY / PACKAGE).parts[0]) for path in MODULES if viewer in imported(path)}
    assert importers == {viewer}


def test_every_layer_has_a_rule() -> None:
    layers = {path.relative_to(REPOSITORY / PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert layers - {"__init__"} <= set(ALLOWED)


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count: whoever reads one module of a circle must read them all."""
    TopologicalSorter({name: names(ast.walk(tree(path))) - {name} for name, path in NAMES.items()}).prepare()


def test_a_circle_is_found_wherever_its_imports_are_made() -> None:
    known = ["p", "p.a", "p.b", "p.c", "p.d", "p.e"]
    source = (
        "import p.a, os\nfrom p import b\nfrom p.c import thing\n"
        "if TYPE_CHECKING:\n    from p.d import Thing\ndef late():\n    import p.e\n"
    )
    found = names(ast.walk(ast.parse(source)), known)
    assert found & set(known) == {"p.a", "p.b", "p.c", "p.d", "p.e"}
    assert names(ast.parse("from p import version").body, known) == {"p"}
    with pytest.raises(CycleError):
        TopologicalSorter({"p": found, "p.e": {"p"}}).prepare()
