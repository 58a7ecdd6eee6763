"""docs/reference is what scripts/reference.py makes of the code and of docs/data, which is well-formed and complete."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import module_map
import pytest
import reference

from recover_megatron.status.model import Gone, RunStatus, Training, WorkerStatus
from tests.harness import REPOSITORY

DATA = sorted((REPOSITORY / "docs" / "data").glob("*.toml"))


def data(name: str) -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "docs" / "data" / f"{name}.toml").read_text(encoding="utf-8"))


def names(name: str, heading: str) -> set[str]:
    """The names in backquotes of the first column of a table."""
    (table,) = [table for table in data(name)["table"] if table["heading"] == heading]
    return {name for row in table["rows"] for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_each_file_of_data_has_a_title_an_introduction_and_whole_tables(path: Path) -> None:
    found = data(path.stem)
    assert set(found) <= {"title", "intro", "table"}
    assert found["title"]
    assert 1 <= len(found["intro"].strip().splitlines()) <= 4
    for table in found["table"]:
        assert set(table) <= {"heading", "text", "columns", "rows"}
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_page_is_up_to_date() -> None:
    assert reference.outdated() == {}, "run: python scripts/reference.py"


def test_there_is_no_page_that_nothing_makes() -> None:
    assert {path.name for path in reference.FOLDER.iterdir()} == {*reference.pages(), "index.md"}


def test_a_flag_has_its_value_its_default_its_meaning_and_when_to_change_it() -> None:
    rows = {row.split(" | ")[0]: row.count(" | ") for row in reference.command_line().splitlines()}
    assert rows["| `--recover-shadow-device device\\|cpu`"] == 3
    assert rows["| `--recover-heartbeat-timeout S`"] == 3


@pytest.mark.parametrize("command", reference.COMMANDS)
def test_the_page_has_every_command(command: str) -> None:
    assert f"\n## {command}\n" in reference.command_line()


def test_every_exit_code_has_its_meaning() -> None:
    codes = [line.split(" | ")[0] for line in reference.exit_codes().splitlines() if line.startswith("| ")]
    assert [code.strip("| ") for code in codes[2:]] == ["0", "1", "1", "2", "10", "11", "12", "13", "14", "128 + S"]


def test_the_schema_of_json_has_every_field() -> None:
    run = {field.name for field in fields(RunStatus)} | {"headline", "schema", "replicas_running", "between"}
    assert names("status_json", "Fields") == run
    assert names("status_json", "Fields of a worker") == {field.name for field in fields(WorkerStatus)}
    assert names("status_json", "Fields of training") == {field.name for field in fields(Training)}
    (gone,) = [row[1] for row in data("status_json")["table"][0]["rows"] if row[0] == "`gone`"]
    assert {field.name for field in fields(Gone)} <= set(re.findall(r"`(\w+)`", gone))


def test_every_event_that_the_workers_write_is_documented() -> None:
    written = set[str]()
    package = REPOSITORY / "recover_megatron"
    for path in (*(package / "instep").rglob("*.py"), *(package / "megatron_hooks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "log":
                written |= {
                    its.value for its in node.args[:2] if isinstance(its, ast.Constant) and isinstance(its.value, str)
                }
    assert written == names("events", "events.jsonl")


def test_the_layout_names_the_modules_that_there_are() -> None:
    package = REPOSITORY / "recover_megatron"
    there = {path.relative_to(REPOSITORY).with_suffix("").as_posix() for path in package.rglob("*.py")}
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
    "path", sorted((REPOSITORY / "docs" / "data" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_row_of_the_results_is_complete(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["title"]
    assert found["date"]
    assert found["machine"]
    for run in found["runs"]:
        assert run["what"]
        assert {len(run["columns"])} == {len(row) for row in run["rows"]}
