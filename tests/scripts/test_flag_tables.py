"""The docs' tables of flags are those of the flags."""

from __future__ import annotations

import flag_tables
import pytest


@pytest.mark.parametrize("page", flag_tables.TABLES)
def test_the_docs_table_of_flags_is_up_to_date(page: str) -> None:
    _, text, updated = flag_tables.updated(page)
    assert text == updated, "run: python scripts/flag_tables.py"


def test_a_table_names_the_flag_its_value_its_default_and_when_to_touch_it() -> None:
    _, text, _ = flag_tables.updated("operations.md")
    assert "| `--recover-shadow-device device\\|cpu` | device | where device memory is short" in text
    assert "| `--recover-heartbeat-timeout S` | 5.0 | up on networks" in text
