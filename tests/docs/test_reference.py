"""docs/reference is what scripts/reference.py makes of the code and of docs/data."""

from __future__ import annotations

import pytest
import reference


@pytest.mark.parametrize("name", reference.pages())
def test_a_generated_page_is_up_to_date(name: str) -> None:
    made = reference.pages()[name]()
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == made, "run: python scripts/reference.py"


def test_there_is_no_page_that_nothing_makes() -> None:
    assert {path.name for path in reference.FOLDER.iterdir()} == set(reference.pages())


def test_a_flag_has_its_value_its_default_its_meaning_and_when_to_change_it() -> None:
    rows = {row.split(" | ")[0]: row.count(" | ") for row in reference.command_line().splitlines()}
    assert rows["| `--recover-shadow-device device\\|cpu`"] == 3
    assert rows["| `--recover-heartbeat-timeout S`"] == 3


@pytest.mark.parametrize("command", reference.COMMANDS)
def test_the_page_has_every_command(command: str) -> None:
    assert f"\n## {command}\n" in reference.command_line()


def test_every_exit_code_has_its_meaning() -> None:
    codes = [line.split(" | ")[0] for line in reference.exit_codes().splitlines() if line.startswith("| ")]
    assert [code.strip("| ") for code in codes[2:]] == ["0", "1", "1", "2", "10", "11", "12", "13"]
