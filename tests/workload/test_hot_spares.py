"""For which positions spares build their models before anybody is lost: pure."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.workload.placement import Candidate, Shape, assemble, build_ahead

NODES = st.sampled_from("abcd")


def shape_of(tensor: int, stages: int, cross_node: bool = False) -> Shape:
    return Shape(tensor * stages, tuple(tuple(range(s * tensor, (s + 1) * tensor)) for s in range(stages)), cross_node)


def stood(spares: dict[int, Candidate], built: dict[int, int]) -> dict[int, Candidate]:
    return {worker: Candidate(built.get(worker, its.position), its.node) for worker, its in spares.items()}


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.lists(NODES, max_size=9), st.booleans(), st.randoms()
)
def test_spares_are_spread_evenly_and_the_answer_does_not_depend_on_their_order(
    tensor: int, stages: int, replicas: int, where: list[str], cross_node: bool, random: object
) -> None:
    shape = shape_of(tensor, stages, cross_node)
    grid = [tuple(range(r * shape.size, (r + 1) * shape.size)) for r in range(replicas)]
    nodes = {worker: "abcd"[worker // tensor % 4] for its in grid for worker in its}
    first = replicas * shape.size
    spares = {first + n: Candidate(None, node) for n, node in enumerate(where)}
    built = build_ahead(spares, grid, nodes, shape)
    shuffled = list(spares)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert built == build_ahead({worker: spares[worker] for worker in shuffled}, grid, nodes, shape)
    assert set(built) <= set(spares)
    assert all(0 <= position < shape.size for position in built.values())
    if tensor == 1 or cross_node:
        assert set(built) == set(spares)
    # Who has built is left alone, and nobody has to be told again.
    assert build_ahead(stood(spares, built), grid, nodes, shape).keys() <= set(spares) - set(built)


def test_the_spares_of_one_node_cover_each_position_once_before_one_twice() -> None:
    grid, nodes = [(0, 1, 2, 3), (4, 5, 6, 7)], dict.fromkeys(range(8), "a")
    spares = {8 + n: Candidate(None, "spare") for n in range(6)}
    built = build_ahead(spares, grid, nodes, shape_of(1, 4))
    assert Counter(built.values()) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_position_is_covered_from_another_node_than_its_workers() -> None:
    """Position 0 is on node a, position 1 on node b: a spare on a is lost with the workers of position 0."""
    grid, nodes = [(0, 1), (2, 3)], {0: "a", 2: "a", 1: "b", 3: "b"}
    assert build_ahead({8: Candidate(None, "a"), 9: Candidate(None, "b")}, grid, nodes, shape_of(1, 2)) == {8: 1, 9: 0}


def test_a_spare_node_stands_ready_to_replace_any_lost_node() -> None:
    """TP 4, nodes of 8: of each stage a team."""
    shape, grid = shape_of(4, 2), [tuple(range(8)), tuple(range(8, 16))]
    nodes = {worker: f"n{worker // 8}" for worker in range(16)}
    spares = {16 + n: Candidate(None, "spare") for n in range(8)}
    ready = stood(spares, build_ahead(spares, grid, nodes, shape))
    placement = assemble({0}, ready, shape, 2)  # replica 1 is lost with its node
    assert (placement.replicas, placement.rebuild) == ({1: tuple(range(16, 24))}, {})


def test_what_is_left_of_a_tensor_group_takes_the_place_of_one_of_its_own_node() -> None:
    shape, grid = shape_of(2, 2), [(0, 1, 2, 3)]
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert build_ahead({9: Candidate(None, "b")}, grid, nodes, shape) == {9: 2}
    assert build_ahead({9: Candidate(None, "c")}, grid, nodes, shape) == {}


def test_who_is_not_ready_or_has_a_model_is_left_alone() -> None:
    grid, nodes = [(0,)], {0: "a"}
    spares = {1: Candidate(0, "b"), 2: Candidate(None, "b", ready=False), 3: Candidate(None, "b", fixed=True)}
    assert build_ahead(spares, grid, nodes, shape_of(1, 1)) == {}
