"""Limits of tests/size.toml: lines of code per package, words of the documentation, sizes of files and folders."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

PACKAGE = REPOSITORY / "recover_megatron"
OTHERS = ("tests", "scripts", "benchmarks", "examples")
SLACK = 60
"""By how many lines of code a place may be below its number."""
FEW_WORDS = 500
"""By how many words a text may be below its number."""
SMALL, LARGE, MANY = 60, 450, 15
"""Lines (all of them) of a small and of a large file; files of a folder with many."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def table() -> dict[str, dict[str, int]]:
    return tomllib.loads((REPOSITORY / "tests" / "size.toml").read_text(encoding="utf-8"))


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines(source: str) -> int:
    """The lines of code, as tinygrad's sz.py counts them: those with a token that is no comment and no docstring.

    A string that is a statement by itself, below an attribute for example, is a docstring, too.
    """
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def place(path: Path) -> str:
    """The package of a file of the product, ``root`` for a module beside the packages; else its topmost folder."""
    parts = path.relative_to(REPOSITORY).parts
    if parts[0] != PACKAGE.name:
        return parts[0]
    return parts[1] if len(parts) > 2 else "root"


@cache
def counted() -> dict[str, int]:
    found: Counter[str] = Counter()
    for folder in (PACKAGE, *(REPOSITORY / name for name in OTHERS)):
        for path in sources(folder):
            found[place(path)] += code_lines(path.read_text(encoding="utf-8"))
    return dict(found)


def unhandy() -> dict[str, list[str]]:
    """The product's files and folders of an unhandy size, by kind."""
    modules = {path: lines(path) for path in sources(PACKAGE) if path.name != "__init__.py"}
    folders = Counter(path.parent for path in modules)

    def named(paths: list[Path], sizes: dict[Path, int]) -> list[str]:
        return [f"{path.relative_to(REPOSITORY)} ({sizes[path]})" for path in sorted(paths)]

    return {
        f"folders over {MANY} files": named([path for path in folders if folders[path] > MANY], dict(folders)),
        f"files under {SMALL} lines": named([path for path in modules if modules[path] < SMALL], modules),
        f"files over {LARGE} lines": named([path for path in modules if modules[path] > LARGE], modules),
    }


@pytest.mark.parametrize("name", sorted(table()["lines"].keys() | counted().keys()))
def test_a_place_has_no_more_lines_of_code_than_its_number(name: str) -> None:
    now, number = counted().get(name, 0), table()["lines"].get(name, 0)
    assert now <= number, (
        f"{name} has {now} lines of code, tests/size.toml allows {number}: delete some, or raise the number"
    )
    assert number - now <= SLACK, f"{name} has {now} lines of code: lower its {number} in tests/size.toml"


def words() -> dict[str, int]:
    """The words of the documentation that is written by hand, code blocks included; of ``docs`` all pages together."""
    pages = [path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name not in ("reference", "api")]
    named = {"README.md": [REPOSITORY / "README.md"], "CHANGELOG.md": [REPOSITORY / "CHANGELOG.md"], "docs": pages}
    return {name: sum(len(path.read_text(encoding="utf-8").split()) for path in paths) for name, paths in named.items()}


@pytest.mark.parametrize("name", sorted(table()["words"]))
def test_the_documentation_has_no_more_words_than_its_number(name: str) -> None:
    now, number = words()[name], table()["words"][name]
    assert now <= number, f"{name} has {now} words, tests/size.toml allows {number}: delete some, or raise the number"
    assert number - now <= FEW_WORDS, f"{name} has {now} words: lower its {number} in tests/size.toml"


@pytest.mark.parametrize("kind", sorted(unhandy()))
def test_no_more_files_and_folders_are_of_an_unhandy_size(kind: str) -> None:
    found, number = unhandy()[kind], table()["unhandy"][kind]
    assert len(found) <= number, f"{len(found)} {kind}, tests/size.toml allows {number}: {', '.join(found)}"
    assert len(found) == number, f"{len(found)} {kind}: lower the {number} in tests/size.toml"


def test_the_product_has_no_more_lines_of_code_than_its_number() -> None:
    now, number = sum(counted()[name] for name in counted() if name not in OTHERS), table()["product"]["all"]
    assert now <= number, f"the product has {now} lines of code, tests/size.toml allows {number}"
    assert number - now <= SLACK, f"the product has {now} lines of code: lower its {number} in tests/size.toml"


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    source = '''"""A module."""
# a comment

NUMBER = 3  # a line of code
"""Its docstring,
of two lines."""

def function():
    """A docstring."""
    return """text that is
returned"""
'''
    assert code_lines(source) == 4
