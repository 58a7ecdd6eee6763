"""Nodes drained while the run trains: their workers leave in order, no step is lost, no microbatch is run again.

What is compared is what test_equality.py compares; see ``runs``.  The command is the real one (``draining``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.run_log.events import read_events
from recover_megatron.status.__main__ import DrainExit
from tests.drawn import some
from tests.harness.waiting import eventually, written_lines
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, NO_EVALUATION, Case, Layout, Result, Strike, check
from tests.instep.test_sharded import OVERLAP, SHARDED
from tests.instep.units import check_sharded

pytestmark = pytest.mark.slow

DP4, TP2, PP2 = LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]
SHARDED_DP4, SHARDED_TP2 = Layout("sharded-dp4", 4), Layout("sharded-tp2-dp3", 3, tensor=2)
OVERLAPPED = Layout("sharded-overlap", 4, flags=OVERLAP)
INSTANCES = Layout("sharded-instances", 4, flags="--num-distributed-optimizer-instances 2")
MODEL = (*NO_EVALUATION, "--clip-grad", "0.2")
NODES = ("a", "a", "b", "c")
PAIRS = ("a", "a", "b", "b", "c", "c")
NO_SHADOWS = ("--recover-shadow-shards", "0")


def draining(when: str, layout: Layout, nodes: tuple[str, ...], *strikes: Strike, **more: object) -> Case:
    """A run in which nodes are drained; ``when``: see ``draining``."""
    case = Case(layout, strikes, nodes=nodes, **{"model": MODEL, **more})  # type: ignore[arg-type]
    return replace(case, train_with=(str(Path(__file__).with_name("draining.py")), when, case.script))


def said(result: Result, order: int = 0) -> tuple[str, int]:
    """What the command of an order has said, and its exit code."""
    path = result.out / f"drain-{order}.txt"
    eventually(lambda: written_lines(path)[-1:] != [] and written_lines(path)[-1].isdecimal(), path.name)
    *lines, code = written_lines(path)
    return "\n".join(lines), int(code)


def reran(result: Result) -> list[object]:
    """What was run again in the whole run."""
    return [event["reran"] for event in read_events(result.out / "events.jsonl") if event.get("reran")]


ORDERLY = {
    "of-one-worker": (draining("3@forward:b", DP4, NODES), 3),
    "of-two-workers": (draining("3@forward:b", TP2, PAIRS), 2),
    "with-a-mate-on-another-node": (draining("3:b", PP2, ("a", "b", "c", "a", "c", "c")), 2),
    "two-nodes-at-once": (draining("3:b,3:c", DP4, NODES), 2),
}
SPREAD = {
    "no-other-copy": (draining("3@forward:b", SHARDED_DP4, ("a", "a", "b", "b"), model=SHARDED, flags=NO_SHADOWS), 2),
    "overlapped": (draining("3@forward:b", OVERLAPPED, NODES, model=SHARDED), 3),
    "instances": (draining("3:b", INSTANCES, ("a", "b", "c", "c"), model=SHARDED), 3),
    "shadows": (draining("3:b", SHARDED_TP2, PAIRS, model=SHARDED), 2),
}


@pytest.mark.parametrize("name", some("drains", [*ORDERLY, *SPREAD], 1))
def test_a_drained_node_costs_no_step_and_no_microbatch(runs: Runs, name: str) -> None:
    case, left = (ORDERLY | SPREAD)[name]
    result = runs(case)
    (check_sharded if name in SPREAD else check)(result, runs.reference(case))
    assert result.replicas == [case.layout.replicas] * 3 + [left] * 5
    assert reran(result) == []
    told, code = said(result)
    assert code == DrainExit.DRAINED, told
    assert told.splitlines()[-1] == "b is drained: it may be switched off"
    there = [worker for worker, node in enumerate(case.nodes) if node == "b"]
    assert all(
        f"worker {worker} ends, and the run goes on: node b is drained" in result.log(worker) for worker in there
    )
    assert {event["event"] for event in result.events} & {"fault", "exception"} == set()


def test_what_cannot_be_drained_is_refused_with_the_reason_and_what_is_drained_stays_so(runs: Runs) -> None:
    case = draining("2:nowhere,3:b,5:b,6:c,8:a", DP4, NODES, iterations=10)
    result = runs.check(case)
    assert result.replicas == [4] * 3 + [3] * 3 + [2] * 4
    told = [said(result, order) for order in range(5)]
    assert [code for _, code in told] == [3, 0, 0, 0, 3], told
    assert "the run has no node and no host of this name; its nodes: a, b, c" in told[0][0]
    assert told[2][0] == "b is drained: it may be switched off"
    assert "no whole replica would be left, one is needed: 2 of 2 have workers on a" in told[4][0]


ACROSS = ("a", "b", "c", "a", "c", "c")
"""Replica 1 of PP2: its first stage is on node b, its last one on node c."""
DEATHS = {
    "in-the-step-of-the-order": (draining("3@forward:b", DP4, NODES, Strike(0, 0, 3, "backward")), 2),
    "of-one-that-leaves": (draining("3@forward:b", DP4, NODES, Strike(2, 0, 3, "agree")), 3),
    "at-the-boundary": (draining("3@forward:b", DP4, NODES, Strike(3, 0, 4, "recovery")), 2),
    "of-one-that-leaves-at-the-boundary": (draining("3@forward:b", DP4, NODES, Strike(2, 0, 4, "recovery")), 3),
    "of-its-mate": (draining("3@forward:b", PP2, ACROSS, Strike(1, 1, 3, "backward")), 2),
    "in-the-step-after-it": (draining("3@forward:b", DP4, NODES, Strike(1, 0, 4, "reduce-scatter")), 2),
}
SPREAD_DEATHS = {
    "while-the-state-changes-hands": (
        draining("3@forward:b", SHARDED_DP4, NODES, Strike(0, 0, 4, "repartition"), model=SHARDED), 2,
    ),
    "of-one-that-leaves-while-its-state-changes-hands": (
        draining("3@forward:b", SHARDED_DP4, NODES, Strike(2, 0, 4, "repartition"), model=SHARDED), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some("deaths in drains", [*DEATHS, *SPREAD_DEATHS], 1))
def test_a_death_while_a_node_is_drained(runs: Runs, name: str) -> None:
    case, left = (DEATHS | SPREAD_DEATHS)[name]
    result = runs(case)
    (check_sharded if name in SPREAD_DEATHS else check)(result, runs.reference(case))
    assert result.replicas[-1] == left, result.replicas
    told, code = said(result)
    assert (told.splitlines()[-1], code) == ("b is drained: it may be switched off", DrainExit.DRAINED)
