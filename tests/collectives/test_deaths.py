"""Real deaths at every boundary of a message: what the survivors end with is what their ledgers say."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.collectives.crew import Crew, Fault, Outcome, Scenario
from tests.collectives.expected import check
from tests.doubles.nccl.core import Errors

pytestmark = pytest.mark.slow

RINGS = {"shared-memory": {"transport_kind": "tcp"}, "tcp": {"transport_kind": "tcp-inline"}}
WAYS = RINGS | {"nccl": {"collective": "native"}}
rings = pytest.mark.parametrize("way", RINGS.values(), ids=RINGS)
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
operations = pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Forks workers from a parent that imported torch once."""
    with Crew() as crew:
        yield crew


def survive(crew: Crew, scenario: Scenario, *faults: Fault) -> Outcome:
    """Carry it out, with these faults where any are named, and check what the survivors end with."""
    scenario = dataclasses.replace(scenario, faults=list(faults) or scenario.faults)
    outcome = crew.run(scenario)
    check(scenario, outcome)
    return outcome


def boundaries(crew: Crew, scenario: Scenario, worker: int) -> int:
    """How many boundaries ``worker`` passes."""
    return next(result.boundaries for result in survive(crew, scenario).results if result.worker == worker)


def at_boundaries(crew: Crew, op: str, rerun: bool, first: int, step: int) -> None:
    scenario = Scenario(3, [50], op=op, segment_bytes=64, rerun=rerun)
    total = boundaries(crew, scenario, 1)
    assert total > 20
    for at in range(first, total + 1, step):
        outcome = survive(crew, scenario, Fault(1, at))
        assert len(outcome.epochs) == 2 or at == total


@operations
@pytest.mark.parametrize("rerun", [True, False], ids=["rerun", "no-rerun"])
def test_a_death_at_a_boundary_of_either_half(crew: Crew, op: str, rerun: bool) -> None:
    at_boundaries(crew, op, rerun, 2 * rerun, 11)


@operations
@pytest.mark.parametrize("rerun", [True, False], ids=["rerun", "no-rerun"])
def test_a_death_at_every_boundary_of_either_half(crew: Crew, op: str, rerun: bool) -> None:
    at_boundaries(crew, op, rerun, 0, 1)


@ways
@operations
def test_a_death_or_a_stop_with_every_kind_of_group(crew: Crew, way: dict, op: str) -> None:
    """Of one that is stopped no connection tells: the revocation alone interrupts."""
    scenario = Scenario(4, [61, 7, 0], op=op, segment_bytes=64, **way)
    total = boundaries(crew, scenario, 2)
    for at in range(0, total, max(1, total // 3)):
        survive(crew, scenario, Fault(2, at))
        survive(crew, scenario, Fault(2, at, "stop"))


@pytest.mark.parametrize("step", [23, 2])
def test_a_death_at_the_boundaries_of_the_resumption(crew: Crew, step: int) -> None:
    """Worker 1 dies in the first epoch, worker 2 anywhere in the second: exchange, pull or the rest."""
    first = Scenario(4, [90], segment_bytes=64, faults=[Fault(1, 25)])
    for at in range(20, boundaries(crew, first, 2) + 1, step):
        survive(crew, first, Fault(1, 25), Fault(2, at))


def test_members_that_hear_of_nothing_from_the_membership_are_interrupted_too(crew: Crew) -> None:
    """The death runs round the ring by itself: also members without a connection to the dead worker give up."""
    for at in (3, 40):
        outcome = survive(crew, Scenario(5, [2000], announce=False), Fault(2, at))
        assert all(result.revoked for result in outcome.results)


@rings
def test_a_dead_workers_forked_child_does_not_hide_its_death(crew: Crew, way: dict) -> None:
    """Loaders of data are forked from a worker and outlive it; here nobody but the connections tells of the death."""
    survive(crew, Scenario(3, [500], children=True, announce=False, **way), Fault(1, 20))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    workers = draw(st.integers(1, 5))
    mortal = draw(st.lists(st.integers(0, workers - 1), unique=True, max_size=workers - 1))
    way = draw(st.sampled_from(sorted(WAYS)))
    latest = 7 if way == "nccl" else 200  # it has few boundaries
    return Scenario(
        workers,
        draw(st.lists(st.integers(0, 300), min_size=1, max_size=3)),
        op=draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        shadows=draw(st.integers(0, 2)),
        segment_bytes=draw(st.sampled_from([16, 64, 256, 1024])),
        depth=draw(st.integers(1, 4)),
        rerun=draw(st.booleans()),
        faults=[Fault(it, draw(st.integers(0, latest)), draw(st.sampled_from(["kill", "stop"]))) for it in mortal],
        seed=draw(st.integers(0, 1000)),
        nccl={"polls": draw(st.sampled_from([0, 2, 10])), "errors": draw(st.sampled_from(list(map(int, Errors))))},
        **WAYS[way],
    )


@settings(max_examples=int(os.environ.get("RECOVER_EXAMPLES", "150")))
@given(scenarios())
@example(Scenario(2, [1], faults=[Fault(0, 1)]))
@example(Scenario(4, [400, 33], faults=[Fault(0, 12), Fault(3, 40), Fault(1, 90)]))
@example(Scenario(5, [200], transport_kind="tcp-inline", faults=[Fault(1, 27), Fault(3, 27)]))
def test_any_sequence_of_deaths_leaves_what_the_ledgers_say(crew: Crew, scenario: Scenario) -> None:
    survive(crew, scenario)
