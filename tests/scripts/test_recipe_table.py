"""NVIDIA's configurations go through our parser and checks, and the docs say what became of them."""

from __future__ import annotations

import recipe_table


def test_the_docs_say_what_becomes_of_each_of_nvidias_configurations() -> None:
    text, updated = recipe_table.updated()
    assert text == updated, "run: python scripts/recipe_table.py"


def test_a_configuration_is_refused_by_every_flag_that_cannot_be_kept() -> None:
    found = {its.recipe.name: its for its in recipe_table.verdicts()}
    assert len(found) > 230
    fsdp = found["examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8"]
    assert fsdp.answer is recipe_table.Answer.REFUSED
    assert "delayed FP8 scaling" in fsdp.reasons
    mixtral = found["release/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release"]
    assert (mixtral.answer, mixtral.reasons) == (recipe_table.Answer.TAKEN, ())
