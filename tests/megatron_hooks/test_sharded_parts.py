"""What is decided about the shadows of a distributed optimizer's state without a run."""

from __future__ import annotations

from recover_megatron.megatron_hooks.optimizer.shadows import differing_units


def test_shadows_that_differ_are_those_of_one_optimizer_one_column_and_one_unit() -> None:
    dense, experts, others = (0, 0), (1, 0), (1, 1)
    rows = [
        [*dense, 4, 11, *dense, 3, 12, *experts, 4, 21],
        [*dense, 3, 12, *others, 4, 99],  # its experts are others: what it says of unit 4 is of no concern to the first
        [*experts, 4, 21, *experts, 2, 22],
    ]
    assert differing_units(rows) == []
    assert differing_units([*rows, [*dense, 3, 13]]) == [3]
    assert differing_units([]) == []
