"""Iterations that are left out: what counts as done before and after them."""

from __future__ import annotations

import pytest

from recover_megatron.megatron_hooks.microbatches import skipped_before, with_skipped


@pytest.mark.parametrize(
    ("iteration", "skipped", "done"), [(0, (1,), 1), (3, (4, 5, 7), 5), (5, (4, 5), 5), (6, (4, 5), 6), (2, (), 2)]
)
def test_what_is_left_out_right_after_an_iteration_is_over_with_it(
    iteration: int, skipped: tuple[int, ...], done: int
) -> None:
    assert with_skipped(iteration, skipped) == done
    assert with_skipped(done, skipped) == done


@pytest.mark.parametrize(
    ("iteration", "begun", "found"), [(6, 0, 2), (6, 3, 2), (6, 4, 1), (6, 5, 0), (4, 0, 0), (2, 0, 1), (2, 1, 0)]
)
def test_a_line_tells_how_many_were_left_out_before_it_since_the_run_began(
    iteration: int, begun: int, found: int
) -> None:
    assert skipped_before(iteration, begun, (1, 4, 5)) == found
