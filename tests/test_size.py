"""The size of the house (tests/size.toml): lines of Python per package, and files and folders of an unhandy size."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

PACKAGE = REPOSITORY / "recover_megatron"
OTHERS = ("tests", "scripts", "benchmarks", "examples")
SLACK = 60
"""By how many lines a place may be below its number."""
SMALL, LARGE, MANY = 60, 450, 15
"""Lines of a small and of a large file; files of a folder with many."""


def table() -> dict[str, dict[str, int]]:
    return tomllib.loads((REPOSITORY / "tests" / "size.toml").read_text(encoding="utf-8"))


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def place(path: Path) -> str:
    """The package of a file of the product, ``root`` for a module beside the packages; else its topmost folder."""
    parts = path.relative_to(REPOSITORY).parts
    if parts[0] != PACKAGE.name:
        return parts[0]
    return parts[1] if len(parts) > 2 else "root"


def counted() -> dict[str, int]:
    found: Counter[str] = Counter()
    for folder in (PACKAGE, *(REPOSITORY / name for name in OTHERS)):
        for path in sources(folder):
            found[place(path)] += lines(path)
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
def test_a_place_has_no_more_lines_than_its_number(name: str) -> None:
    now, number = counted().get(name, 0), table()["lines"].get(name, 0)
    assert now <= number, f"{name} has {now} lines, tests/size.toml allows {number}: delete some, or raise the number"
    assert number - now <= SLACK, f"{name} has {now} lines: lower its {number} in tests/size.toml"


@pytest.mark.parametrize("kind", sorted(unhandy()))
def test_no_more_files_and_folders_are_of_an_unhandy_size(kind: str) -> None:
    found, number = unhandy()[kind], table()["unhandy"][kind]
    assert len(found) <= number, f"{len(found)} {kind}, tests/size.toml allows {number}: {', '.join(found)}"
    assert len(found) == number, f"{len(found)} {kind}: lower the {number} in tests/size.toml"
