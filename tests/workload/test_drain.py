"""Which nodes the run can do without: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload.domains import drain, leaving

NAMES = st.sampled_from("abcd")


@given(
    st.lists(NAMES, min_size=1, max_size=12),
    st.integers(1, 3),
    st.lists(NAMES, unique=True),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
)
def test_what_is_accepted_leaves_enough_and_what_is_refused_would_not(
    nodes_of: list[str], size: int, wanted: list[str], fewest: int, shards: int
) -> None:
    nodes = dict(enumerate(nodes_of))
    replicas = {r: tuple(range(r * size, (r + 1) * size)) for r in range(len(nodes) // size)}
    found = drain(wanted, nodes, replicas, fewest, shards)
    assert sorted([*found.accepted, *found.refused]) == sorted(wanted)

    def enough(draining: set[str]) -> bool:
        staying = set(replicas) - leaving(replicas, nodes, draining)
        return len(staying) >= fewest and (
            not shards or {r % shards for r in staying} == {r % shards for r in replicas}
        )

    there = {node for node in found.accepted if node in nodes_of}
    assert not there or enough(there)
    assert all(node in nodes_of and not enough(there | {node}) for node in found.refused)


@pytest.mark.parametrize(
    ("replicas", "fewest", "shards", "why"),
    [
        ({}, 1, 0, "no replica is whole now"),
        ({0: (0,), 1: (1,)}, 1, 0, "no whole replica would be left, one is needed: 2 of 2 have workers on a"),
        ({0: (0,), 1: (2,)}, 2, 0, "1 of 2 whole replicas would be left, 2 are wanted (--recover-min-replicas)"),
        ({0: (0,), 1: (2,), 2: (1,), 3: (3,)}, 1, 2, "hold nothing of shards [0] of the optimizer's state"),
    ],
)
def test_the_reason_is_told(replicas: dict[int, tuple[int, ...]], fewest: int, shards: int, why: str) -> None:
    found = drain(["a"], {0: "a", 1: "a", 2: "b", 3: "b"}, replicas, fewest, shards)
    assert (found.accepted, list(found.refused)) == ((), ["a"])
    assert why in found.refused["a"]


def test_a_node_on_which_nobody_lives_is_drained_whatever_is_left() -> None:
    assert drain(["gone", "a"], {0: "a"}, {}).accepted == ("gone",)
