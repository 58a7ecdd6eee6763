"""The pages of the docs that scripts write from the sources and from docs/data are current and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import module_map
import pytest
import results_page

from tests.harness import REPOSITORY as ROOT


@pytest.mark.parametrize("script", [module_map, results_page], ids=lambda script: script.__name__)
def test_a_generated_page_is_current(script: ModuleType) -> None:
    for path, make in script.PAGES.items():
        assert path.read_text(encoding="utf-8") == make(), f"run: python scripts/{script.__name__}.py"


def test_the_layout_names_the_modules_that_there_are() -> None:
    package = ROOT / "recover_megatron"
    there = {path.relative_to(ROOT).with_suffix("").as_posix() for path in package.rglob("*.py")}
    sections = re.split(r"(?m)^## ", module_map.modules())[1:]
    named = {
        f"{section.split(chr(10))[0]}/{module}"
        for section in sections
        for module in re.findall(r"(?m)^\| `(\w+)` \| \S", section)
    }
    assert {name for name in there if not name.endswith("__init__")} == named


def test_every_hook_of_the_list_is_wrapped_by_a_module() -> None:
    rows = re.findall(r"(?m)^\| `.*\| ([^|]*) \|$", module_map.hooks())
    assert len(rows) > 60
    assert all(re.fullmatch(r"(`[\w/]+`(, |$))+", users) for users in rows), rows


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "data" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_row_of_the_results_is_complete(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["title"]
    assert found["date"]
    assert found["machine"]
    for run in found["runs"]:
        assert run["what"]
        assert {len(run["columns"])} == {len(row) for row in run["rows"]}
