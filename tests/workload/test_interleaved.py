"""The size of an interleaved schedule's groups: it can be run, and needs no more memory than it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload.assign import group_size, runs


@given(st.integers(1, 16), st.integers(0, 200), st.integers(1, 40))
def test_any_number_from_that_of_the_stages_on_can_be_run(stages: int, more: int, usual: int) -> None:
    count = stages + more
    group = group_size(count, stages, usual)
    assert runs(count, stages, group)
    if runs(count, stages, usual):
        assert group == usual
    elif group > usual:
        assert not any(runs(count, stages, other) for other in range(1, group))
    else:
        assert not any(runs(count, stages, other) for other in range(group + 1, usual))


def test_the_groups_are_as_large_as_they_must_be() -> None:
    assert [group_size(count, 8, 8) for count in (8, 9, 16, 31, 32, 33, 34)] == [8, 9, 8, 11, 8, 11, 12]
    assert group_size(10, 2, 3) == 2  # 3, 3, 3, 1 cannot be


@pytest.mark.parametrize(("count", "stages"), [(0, 2), (7, 8), (3, 0)])
def test_fewer_microbatches_than_stages_are_refused(count: int, stages: int) -> None:
    with pytest.raises(ValueError, match="cannot run"):
        group_size(count, stages, 8)
