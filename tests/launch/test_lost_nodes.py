"""No single loss of a node ends a run: launchers as nodes, which die whole, in trainings compared with the undisturbed.

A *node* is a launcher with two workers, all on this machine.  It is lost when a fault of one of its workers takes every
process of the launcher's with it (``faulty.whole_node``), in whatever phase of the iteration the fault names; its
workers, its coordinator and, of node 0, the store are gone at once.

What is left must end with 0, and have trained as the run without losses has: losses, gradient norms, what Megatron logs
and the parameters at the end, in float64, and each microbatch once.  (With the distributed optimizer in float32: its
shards are that by design.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.membership.records import EXIT_NO_REPLICA
from tests.drawn import some
from tests.harness.forkserver import Run
from tests.harness.patience import patient
from tests.instep.conftest import Reference, reference
from tests.instep.logged import console, differences
from tests.instep.runs import (
    ADAM,
    CLIPPED,
    SHARDED,
    Case,
    Layout,
    Result,
    Strike,
    check,
    check_parameters,
    check_sharded,
)

from .conftest import TOKEN, Bench, Launch
from .test_several_nodes import kill_nodes

__all__ = ["reference"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several nodes")]

PATIENCE = patient(300)
"""Seconds for a training: each worker imports torch and Megatron for itself."""
QUICK = ("--recover-heartbeat-interval", "0.5", "--recover-heartbeat-timeout", f"{patient(5):g}")
ITERATIONS = 8
PER_NODE = 2
MAPPING = "--use-tp-pp-dp-mapping"


def layout(nodes: int, stages: int, mapping: bool) -> Layout:
    """Pipelines; in Megatron's default order of ranks each stage has nodes of its own."""
    replicas = nodes * PER_NODE // stages
    name = f"pp{stages}-dp{replicas}{'-mapped' * mapping}"
    return Layout(name, replicas, pipeline=stages, flags=MAPPING * mapping + f" --num-layers {stages}" * (stages > 2))


@dataclass(frozen=True)
class Loss:
    """A node that is lost, or one worker of it, when its first worker comes to this phase."""

    node: int
    iteration: int
    phase: str
    visit: int = 1
    whole: bool = True

    @property
    def worker(self) -> int:
        return self.node * PER_NODE


@dataclass(frozen=True)
class Scenario:
    """Nodes that are lost, and what it must come to."""

    name: str
    nodes: int
    losses: tuple[Loss, ...]
    replicas: int
    """In the end, when all that those left can make have been put together."""
    stages: int = 2
    mapping: bool = False
    sharded: bool = False
    flags: tuple[str, ...] = ()
    saves: bool = False
    """A checkpoint after every second iteration, and no snapshots in memory."""
    tiers: tuple[str, ...] = ()
    """Where the states come from to which the run goes back."""
    when: str = ""
    """See ``Case.patient``; default: from iteration 7 on that many."""

    def __str__(self) -> str:
        order, optimizer = ("mapped" * self.mapping, "sharded" * self.sharded)
        return "-".join(filter(None, (self.name, order, optimizer)))

    def case(self, out: Path) -> Case:
        """The training, by the tests of single steps."""
        where = layout(self.nodes, self.stages, self.mapping)
        strikes = [Strike(*where.grid.place(loss.worker), loss.iteration, loss.phase, visit=loss.visit)  # type: ignore[arg-type]
                   for loss in self.losses]  # fmt: skip
        whole = [loss.node for loss in self.losses if loss.whole]
        mates = tuple(worker for node in whole for worker in range(node * PER_NODE + 1, (node + 1) * PER_NODE))
        case = Case(where, tuple(strikes), ITERATIONS, doomed=mates)
        # Megatron loads no checkpoint of the default format with SGD.
        case = replace(case, model=(*CLIPPED, *SHARDED) if self.sharded else ADAM if self.saves else ())
        case = case if self.sharded else case.throughout("instruments.double")
        flags = [*QUICK, *self.flags]
        if self.saves:
            flags += ["--recover-memory-tier", "off", "--save", str(out / "checkpoints"), "--save-interval", "2"]
        case = case.with_flags(*flags).altered("instruments.as_forked", out / "training")
        doomed = ",".join(str(node * PER_NODE) for node in whole)
        return case.altered("faulty.whole_node", doomed, TOKEN).patient(self.when or f"7-:{self.replicas}")


def train(bench: Bench, scenario: Scenario) -> tuple[Result, list[Launch]]:
    """Launch it, and wait until all launchers have ended."""
    out = bench.folder / "logs"
    (out / "training").mkdir(parents=True)
    case = scenario.case(out)
    started = bench.nodes(scenario.nodes, *case.argv(out), per_node=PER_NODE)
    for launch in started:
        launch.process.wait(PATIENCE)
    ends = {worker["worker_id"]: worker for worker in json.loads((out / "workers.json").read_text())}
    lost = {loss.node for loss in scenario.losses if loss.whole}
    codes = [
        -9 if worker // PER_NODE in lost else ends[worker]["exit_code"] if ends[worker]["signal"] is None else -9
        for worker in range(case.layout.grid.world)
    ]
    logs = [out / f"worker-{worker}.log" for worker in range(case.layout.grid.world)]
    return Result(case, Run(codes, logs), out), started


def survives(bench: Bench, reference: Reference, scenario: Scenario) -> Result:
    """Train it to its end, and compare it with the run in which nobody is lost."""
    result, started = train(bench, scenario)
    lost = {loss.node for loss in scenario.losses if loss.whole}
    ends = [launch.wait() for launch in started]
    said = "".join(launch.err for launch in started)
    assert ends == [-9 if node in lost else 0 for node in range(scenario.nodes)], said
    assert [launch.left() for launch in started] == [[]] * scenario.nodes
    undisturbed = reference(result.case)
    (check_sharded if scenario.sharded else check)(result, undisturbed, 10.0 if scenario.sharded else 0.1)
    if not scenario.sharded:
        check_parameters(result, undisturbed, bound=1e-10)
    logged, expected = (console(run.out.glob("worker-*.log")) for run in (result, undisturbed))
    assert differences(logged, expected, 1e-4 if scenario.sharded else 2e-6) == []
    assert result.replicas[-1] == scenario.replicas, result.told()
    assert {back["tier"] for back in result.of_training("rolled back")} == {*scenario.tiers}, result.told()
    return result


# ---- each single node of four: its replicas are missing, others are made of those that it has broken

PHASES = ("forward", "backward", "reduce-scatter", "agree")
SINGLE = [
    Scenario(f"node {node}", 4, (Loss(node, 5, PHASES[node]),), 3, mapping=mapping, sharded=sharded)
    for node, mapping, sharded in product(range(4), (False, True), (False, True))
]


@pytest.mark.parametrize("scenario", some("a node of four", SINGLE, 1), ids=str)
def test_any_node_of_four_may_be_lost(bench: Bench, reference: Reference, scenario: Scenario) -> None:
    survives(bench, reference, scenario)


# ---- either node of two, of which each has all that hold a stage: back to the newest state, by the lease

MEMORY = ("--recover-memory-interval", "2")
HALVES = [
    Scenario(
        f"node {node} of two by {tier}", 2, (Loss(node, 6, "backward"),), 1, sharded=sharded, tiers=(tier,),
        saves=tier == "disk", flags=MEMORY if tier == "memory" else (),
    )
    for node, tier, sharded in product(range(2), ("memory", "disk"), (False, True))
]  # fmt: skip


@pytest.mark.parametrize("scenario", some("a node of two", HALVES, 2), ids=str)
def test_either_node_of_two_may_be_lost_with_all_that_hold_a_stage(
    bench: Bench, reference: Reference, scenario: Scenario
) -> None:
    """Node 0 has the store and the coordinator that leads: nobody can tell its loss from a cut cable."""
    result = survives(bench, reference, scenario)
    (loss,) = scenario.losses
    (back,) = result.of_training("rolled back")
    assert back["to"] in (2, 4), "the newest may be on its way"
    assert "the run can survive the loss of either half of the workers: the lease is at" in bench.launches[0].err
    assert bench.lease_claims() == ([[[2, 3]]] if loss.node == 0 else [])


# ---- several of four


def two(sharded: bool) -> list[Scenario]:
    """Of two nodes, or a node and a worker, of four; in Megatron's default order nodes 0 and 1 have the first stage."""
    back: dict[str, Any] = {"saves": True, "tiers": ("disk",), "sharded": sharded}
    stage = Loss(3, 5, "forward")
    return [
        # Of the three replicas in between node 3 has a part in two, so with the second one all copies of a shard.
        Scenario("one after the other", 4, (Loss(0, 4, "backward"), Loss(2 if sharded else 3, 7, "forward")), 2,
                 sharded=sharded, when="6-6:3,8-:2"),
        Scenario("a stage in one iteration", 4, (Loss(2, 5, "forward"), Loss(3, 5, "recovery")), 2, **back),
        # Of four stages, each on a node: a replica is made of three nodes, then of two.
        Scenario("in the load", 4, (stage, Loss(0, 5, "rollback")), 1, stages=4, **back),
        Scenario("after the load", 4, (stage, Loss(0, 5, "rollback", visit=2)), 1, stages=4, **back),
        Scenario("those that lead", 4, (Loss(0, 3, "agree"), Loss(1, 5, "forward"), Loss(3, 7, "backward")), 1,
                 mapping=True, sharded=sharded, when="8-:1"),
        # Three of four replicas are broken at once: with one shadow each, all copies of a shard.
        Scenario("and a worker at once", 4, (Loss(0, 5, "forward"), Loss(3, 5, "forward", whole=False)), 2,
                 sharded=sharded, saves=sharded, tiers=("disk",) * sharded),
        Scenario("in a checkpoint", 4, (Loss(1, 4, "checkpoint"),), 3, sharded=sharded),
    ]  # fmt: skip


@pytest.mark.parametrize("scenario", some("nodes of four", [*two(False), *two(True)], 2), ids=str)
def test_more_may_be_lost_and_in_whatever_it_does_then(bench: Bench, reference: Reference, scenario: Scenario) -> None:
    survives(bench, reference, scenario)


def test_a_node_that_is_lost_during_the_start_ends_the_launch_with_a_code_that_is_requeued(bench: Bench) -> None:
    case = replace(SINGLE[0], losses=()).case(bench.folder / "logs")
    started = bench.nodes(4, *case.argv(bench.folder / "logs"), per_node=PER_NODE)
    bench.workers(count=8)
    kill_nodes(started[1])
    others = [launch for node, launch in enumerate(started) if node != 1]
    assert [launch.wait() for launch in others] == [EXIT_NO_REPLICA] * 3, [launch.err for launch in others]
