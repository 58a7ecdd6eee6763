"""The tables that scripts write into the docs: flags, variables, and what becomes of NVIDIA's configurations."""

from __future__ import annotations

import flag_tables
import pytest
import recipe_table


@pytest.mark.parametrize("page", flag_tables.TABLES)
def test_the_docs_table_of_flags_is_up_to_date(page: str) -> None:
    found = flag_tables.updated(page)
    assert found.text == found.new, "run: python scripts/flag_tables.py"


def test_a_table_names_the_flag_its_value_its_default_and_when_to_touch_it() -> None:
    text = flag_tables.updated("operations.md").text
    assert "| `--recover-shadow-device device\\|cpu` | device | where device memory is short" in text
    assert "| `--recover-heartbeat-timeout S` | 5.0 | up on networks" in text


def test_the_docs_say_what_becomes_of_each_of_nvidias_configurations() -> None:
    found = recipe_table.updated()
    assert found.text == found.new, "run: python scripts/recipe_table.py"


def test_a_configuration_is_refused_by_every_flag_that_cannot_be_kept() -> None:
    found = {its.recipe.name: its for its in recipe_table.verdicts()}
    assert len(found) > 230
    fsdp = found["examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8"]
    assert fsdp.answer is recipe_table.Answer.REFUSED
    assert "delayed FP8 scaling" in fsdp.reasons
    mixtral = found["release/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release"]
    assert (mixtral.answer, mixtral.reasons) == (recipe_table.Answer.TAKEN, ())
