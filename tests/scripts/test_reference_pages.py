"""Reference data: docs/data/*.toml is well-formed and complete; pages made from the code are up to date."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import code_tables
import pytest

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


def test_pages_made_from_the_code_are_up_to_date() -> None:
    made = code_tables.pages()
    found = {name: (code_tables.FOLDER / name).read_text(encoding="utf-8") for name in made}
    assert found == made, "run: python scripts/code_tables.py"


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
