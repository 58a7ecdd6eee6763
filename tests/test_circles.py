"""No import circle among the modules of the package: each module can be read, and imported, after those it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.harness import REPOSITORY

PACKAGE = "recover_megatron"

Graph = Mapping[str, Iterable[str]]
"""Module -> the modules that it imports."""


def sources() -> dict[str, Path]:
    """Every module of the package by its name; a package by that of its folder."""
    found = {}
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, and those for type checkers; not what is inside functions."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def imported(source: str, modules: Iterable[str]) -> set[str]:
    """The modules of ``modules`` that a module imports at its top.

    An import under ``if TYPE_CHECKING`` counts: who reads the types must know both modules at once. An import inside of
    a function does not: it is made when the function runs.
    """
    known, found = set(modules), set[str]()
    for statement in statements(ast.parse(source).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            names = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= names & known
            found |= {statement.module} if names - known else set()
    return found & known


def circles(graph: Graph) -> set[frozenset[str]]:
    """The sets of modules each of which reaches all the others of its set: strongly connected components, by Tarjan."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            component = frozenset(stack[at:])
            del stack[at:]
            if len(component) > 1 or module in graph[module]:
                found.add(component)

    for module in graph:
        if module not in number:
            visit(module)
    return found


def test_no_modules_import_each_other() -> None:
    modules = sources()
    graph = {name: sorted(imported(path.read_text(encoding="utf-8"), modules)) for name, path in modules.items()}
    assert circles(graph) == set(), "a circle of imports: hand over the part that is needed, or move it down"


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["e"], "f": ["a", "g"], "g": ["f"]}
    assert circles(graph) == {frozenset("abc"), frozenset("e"), frozenset("fg")}


def test_imports_are_found_wherever_they_are_made_at_the_top() -> None:
    modules = ["p.a", "p.b", "p.c", "p.d", "p.e", "p"]
    source = (
        "import p.a, os\nfrom p import b\nfrom p.c import thing\n"
        "if TYPE_CHECKING:\n    from p.d import Thing\ndef late():\n    import p.e\n"
    )
    assert imported(source, modules) == {"p.a", "p.b", "p.c", "p.d"}
    assert imported("from p import version", modules) == {"p"}
