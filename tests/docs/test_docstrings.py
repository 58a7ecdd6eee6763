"""Docstrings of the product: how they begin, and that each stands under the one name that it describes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.harness import REPOSITORY

NO_OPENING = frozenset(
    "What Who Whose Whether Of As That Those It One Which By With Made Where How They These This For".split()
)
"""Words that leave the noun of a first sentence to be guessed."""
SOURCES = [
    *sorted((REPOSITORY / "recover_megatron").rglob("*.py")),
    *(REPOSITORY / name for name in ("pretrain_gpt_recover.py", "docs/conf.py")),
    *sorted((REPOSITORY / "scripts").glob("*.py")),
]


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """The line and text of each docstring of a file: of the module, a class, a function, an attribute."""
    return list(_docstrings(ast.parse(path.read_text(encoding="utf-8"))))


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def test_no_docstring_begins_with_a_word_that_leaves_its_noun_out() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.split(maxsplit=6)[:6]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if text.split() and text.split()[0].strip("\"'`,.:;") in NO_OPENING
    ]
    assert not found, "\n".join(found)


def test_all_docstrings_are_found() -> None:
    source = '''"""Module."""
NUMBER = 1
"""Attribute."""


class Thing:
    """Class."""

    def method(self) -> None:
        """Method."""
'''
    assert [text for _, text in _docstrings(ast.parse(source))] == ["Module.", "Attribute.", "Class.", "Method."]
