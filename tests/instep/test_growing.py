"""Replicas that come and go in order: a run grows beyond its launch and shrinks, spares are hot, nodes are drained.

What is trained stays the same: see ``runs``.  Newcomers have the ids that follow the launch's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recover_megatron.run_log.events import read_events
from recover_megatron.status.__main__ import DrainExit
from tests.drawn import some
from tests.harness.waiting import eventually, written_lines
from tests.instep import hsdp
from tests.instep.conftest import Runs
from tests.instep.runs import (
    CLIPPED,
    INTERLEAVED,
    LAYOUTS,
    NO_EVALUATION,
    OVERLAP,
    ROPE,
    SHARDED,
    SLOW_TO_SEE_A_HANG,
    Case,
    Layout,
    Result,
    Strike,
    check,
    check_evaluations,
    check_rows,
    check_sharded,
)
from tests.instep.test_layouts import ADAM as RECIPE_ADAM
from tests.instep.test_layouts import SPREAD

pytestmark = pytest.mark.slow

# ---- nodes that are drained, by the real command
DP4, TP3, PP3 = LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]
SHARDED_DP4, SHARDED_TP3 = Layout("sharded-dp4", 4), Layout("sharded-tp2-dp3", 3, tensor=2)
OVERLAPPED = Layout("sharded-overlap", 4, flags=OVERLAP)
INSTANCES = Layout("sharded-instances", 4, flags="--num-distributed-optimizer-instances 2")
NODES = ("a", "a", "b", "c")
PAIRS = ("a", "a", "b", "b", "c", "c")
NO_SHADOWS = ("--recover-shadow-shards", "0")


def draining(when: str, layout: Layout, nodes: tuple[str, ...], *strikes: Strike, **more: object) -> Case:
    """A run in which nodes are drained; ``when``: see ``draining``."""
    case = Case(layout, strikes, nodes=nodes, **{"model": CLIPPED, **more})  # type: ignore[arg-type]
    return case.altered("pacing.draining", when)


def said(result: Result, order: int = 0) -> tuple[str, int]:
    """What the command of an order has said, and its exit code."""
    path = result.out / f"drain-{order}.txt"
    eventually(lambda: written_lines(path)[-1:] != [] and written_lines(path)[-1].isdecimal(), path.name)
    *lines, code = written_lines(path)
    return "\n".join(lines), int(code)


ORDERLY = {
    "of-one-worker": (draining("3@forward:b", DP4, NODES), 3),
    "of-two-workers": (draining("3@forward:b", TP3, PAIRS), 2),
    "with-a-mate-on-another-node": (draining("3:b", PP3, ("a", "b", "c", "a", "c", "c")), 2),
    "two-nodes-at-once": (draining("3:b,3:c", DP4, NODES), 2),
    "a-shard-group": (draining("3:b", hsdp.THREE, PAIRS, model=tuple(NO_EVALUATION)), 2),
}
SPREAD_DRAINS = {
    "no-other-copy": (draining("3@forward:b", SHARDED_DP4, ("a", "a", "b", "b"), model=SHARDED, flags=NO_SHADOWS), 2),
    "overlapped": (draining("3@forward:b", OVERLAPPED, NODES, model=SHARDED), 3),
    "instances": (draining("3:b", INSTANCES, ("a", "b", "c", "c"), model=SHARDED), 3),
    "shadows": (draining("3:b", SHARDED_TP3, PAIRS, model=SHARDED), 2),
}


@pytest.mark.parametrize("name", some("drains", [*ORDERLY, *SPREAD_DRAINS], 1))
def test_a_drained_node_costs_no_step_and_no_microbatch(runs: Runs, name: str) -> None:
    case, left = (ORDERLY | SPREAD_DRAINS)[name]
    result = runs.check(case, by=check_sharded if name in SPREAD_DRAINS else check)
    assert result.replicas == [case.layout.replicas] * 3 + [left] * 5
    assert not any(event.get("reran") for event in read_events(result.out / "events.jsonl"))
    told, code = said(result)
    assert code == DrainExit.DRAINED, told
    assert told.splitlines()[-1] == "b is drained: it may be switched off"
    there = [worker for worker, node in enumerate(case.nodes) if node == "b"]
    assert all(
        f"worker {worker} exits, and the run continues: node b is drained" in result.log(worker) for worker in there
    )
    assert {event["event"] for event in result.events} & {"fault", "exception"} == set()


def test_what_cannot_be_drained_is_refused_with_the_reason_and_what_is_drained_stays_so(runs: Runs) -> None:
    case = draining("2:nowhere,3:b,5:b,6:c,8:a", DP4, NODES, iterations=10)
    result = runs.check(case)
    assert result.replicas == [4] * 3 + [3] * 3 + [2] * 4
    told = [said(result, order) for order in range(5)]
    assert [code for _, code in told] == [3, 0, 0, 0, 3], told
    assert "the run has no node or host of this name; its nodes: a, b, c" in told[0][0]
    assert told[2][0] == "b is drained: it may be switched off"
    assert "no complete replica would be left, one is required: 2 of 2 have workers on a" in told[4][0]


ACROSS = ("a", "b", "c", "a", "c", "c")
"""Replica 1 of PP3: its first stage is on node b, its last one on node c."""
DEATHS = {
    "in-the-step-of-the-order": (draining("3@forward:b", DP4, NODES, Strike(0, 0, 3, "backward")), 2),
    "of-one-that-leaves": (draining("3@forward:b", DP4, NODES, Strike(2, 0, 3, "agree")), 3),
    "at-the-boundary": (draining("3@forward:b", DP4, NODES, Strike(3, 0, 4, "recovery")), 2),
    "of-one-that-leaves-at-the-boundary": (draining("3@forward:b", DP4, NODES, Strike(2, 0, 4, "recovery")), 3),
    "of-its-mate": (draining("3@forward:b", PP3, ACROSS, Strike(1, 1, 3, "backward")), 2),
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
    result = runs.check(case, by=check_sharded if name in SPREAD_DEATHS else check, replicas=left)
    told, code = said(result)
    assert (told.splitlines()[-1], code) == ("b is drained: it may be switched off", DrainExit.DRAINED)


# ---- growth beyond the replicas of the launch
DP2, TP2, PP2 = Layout("dp2", 2), Layout("tp2-dp2", 2, tensor=2), Layout("pp2-dp2", 2, pipeline=2)
ADAM_MODEL = (*CLIPPED, *RECIPE_ADAM.split())
SHARDED_MODEL = (*ADAM_MODEL, "--use-distributed-optimizer")


def grown(
    layout: Layout,
    newcomers: int,
    when: str,
    deaths: str = "",
    most: int = 6,
    iterations: int = 22,
    model: tuple[str, ...] = CLIPPED,
) -> Case:
    """A run of at most ``most`` replicas, to which ``newcomers`` workers come.

    ``when``: which iterations wait for how many replicas (``patient``).  ``deaths``: what is injected.  A worker that
    may die in several iterations (``at``) has done so before the last of them is made: a newcomer comes when it can.
    """
    flags = ("--recover-max-replicas", str(most))
    struck: dict[int, list[int]] = {}
    for fault in filter(None, deaths.split(",")):
        worker, iteration = fault.split(":")[0].split("@")
        struck.setdefault(int(worker), []).append(int(iteration))
    flags += ("--recover-inject", deaths) if deaths else ()
    case = Case(layout, (), iterations, flags=flags, spares=newcomers, model=model, doomed=tuple(struck))
    if late := [worker for worker, its in struck.items() if len(its) > 1]:
        case = case.until_struck(max(struck[late[0]]), *late)
    return case.patient(when)


def equal(runs: Runs, case: Case, replicas: int | None = None) -> Result:
    by = check_sharded if "--use-distributed-optimizer" in case.model else check
    return runs.check(case, by=by, replicas=replicas)


@pytest.mark.parametrize("layout", some("joining", [DP2, TP2, PP2], 1), ids=lambda layout: layout.name)
def test_workers_that_join_a_whole_run_make_a_replica_more(runs: Runs, layout: Layout) -> None:
    case = grown(layout, layout.positions, "3-:3")
    result = equal(runs, case, replicas=3)
    assert result.replicas[0] == 2, result.replicas


def at(worker: int, phase: str, first: int = 2, last: int = 19) -> str:
    """Kill a worker in this phase of the first of these iterations that has it."""
    return ",".join(f"{worker}@{iteration}:{phase}:kill" for iteration in range(first, last + 1))


TO_SIX_AND_BACK = "0@17:backward:kill,3@17:reduce-scatter:kill,5@18:forward:kill"
CASES = {
    "back to three": (grown(DP2, 4, "3-16:6", TO_SIX_AND_BACK), 6, 3),
    "back to three in pairs": (grown(TP2, 4, "3-16:4", "1@17:backward:kill,5@18:agree:kill"), 4, 3),
    "a newcomer without its state dies": (grown(DP2, 4, "3-:5", at(3, "regroup#1")), 5, 5),
    "a newcomer with its state dies": (grown(DP2, 4, "3-:5", at(3, "regroup#2")), 5, 5),
    "a newcomer dies in its first step": (grown(DP2, 4, "3-:5", at(3, "backward")), 0, 5),
    "a newcomer's mate dies": (grown(TP2, 4, "3-:3", at(4, "regroup#1")), 3, 3),
    "a giver dies": (grown(DP2, 4, "3-:5", at(1, "transfer")), 5, 5),
    "a giver and a newcomer die": (grown(DP2, 4, "3-:4", f"{at(0, 'transfer')},{at(4, 'regroup#2')}"), 4, 4),
    "a giver dies at the boundary": (grown(DP2, 4, "3-:5", at(0, "recovery")), 0, 5),
    "a stage that gives dies": (grown(PP2, 4, "3-:3", at(2, "transfer")), 3, 3),
    "a newcomer is replaced": (replace(grown(DP2, 2, "3-16:4,22-:4", "2@17:backward:kill", 4, 28), restarts=1), 4, 4),
    "all of the launch die": (grown(DP2, 4, "3-16:6", "0@17:backward:kill,1@17:agree:kill"), 6, 4),
    "all of the launch and a newcomer die one after the other": (
        grown(DP2, 4, "3-16:6", "1@17:optimizer:kill,0@18:all-gather:kill,2@19:agree:kill"), 6, 3,
    ),
}  # fmt: skip
"""Name -> the run, the most replicas that it must have had (0: that is a matter of time), those at its end."""


def grows(runs: Runs, case: Case, most: int, last: int) -> None:
    result = equal(runs, case, replicas=last)
    assert not most or max(result.replicas) == most, result.replicas


@pytest.mark.parametrize("name", some("growing", list(CASES), 2))
def test_a_run_grows_and_shrinks_whoever_dies_and_trains_the_same(runs: Runs, name: str) -> None:
    grows(runs, *CASES[name])


def sharded(layout: Layout, newcomers: int, when: str, deaths: str = "", iterations: int = 22) -> Case:
    return grown(layout, newcomers, when, deaths, iterations=iterations, model=SHARDED_MODEL)


ONE_AFTER_THE_OTHER = "0@17:backward:kill,3@18:update:kill,5@19:param-gather:kill"
SHARDED_CASES = {
    "back to three": (sharded(DP2, 4, "3-16:6", ONE_AFTER_THE_OTHER), 6, 3),
    "back to three in pairs": (sharded(TP2, 4, "3-16:4", "1@17:update:kill"), 4, 3),
    "stages": (sharded(PP2, 2, "3-:3"), 3, 3),
    "overlapped": (sharded(replace(DP2, name="dp2-overlap", flags=OVERLAP), 4, "3-16:6", ONE_AFTER_THE_OTHER), 6, 3),
    "a newcomer without its state dies": (sharded(DP2, 4, "3-:5", at(3, "regroup#1")), 0, 5),
    "a newcomer with its state dies": (sharded(DP2, 4, "3-:5", at(3, "regroup#2")), 5, 5),
    "a newcomer dies while shards change hands": (sharded(DP2, 4, "3-:5", at(4, "repartition")), 0, 5),
    "a newcomer dies when shards have changed hands": (sharded(DP2, 4, "3-:5", at(4, "repartition#2")), 0, 5),
    "a giver dies": (sharded(DP2, 4, "3-:5", at(1, "transfer")), 5, 5),
    "a giver dies while shards change hands": (sharded(DP2, 4, "3-:5", at(1, "repartition")), 0, 5),
    "all of the launch die": (sharded(DP2, 4, "3-16:6", "0@17:update:kill,1@18:norm:kill"), 6, 4),
}


@pytest.mark.parametrize("name", some("growing sharded", list(SHARDED_CASES), 2))
def test_the_distributed_optimizer_is_spread_over_all_that_have_come_and_over_those_that_are_left(
    runs: Runs, name: str
) -> None:
    grows(runs, *SHARDED_CASES[name])


def featured(name: str, flags: str = "", model: tuple[str, ...] = CLIPPED, more: Any = (), **fields: Any) -> Case:
    """Two replicas that become four and are three at the end; ``more``: further fields of the case."""
    layout = Layout(f"grown-{name}", 2, flags=flags, **fields)
    first = 2 * layout.positions
    deaths = f"0@17:backward:kill,{first}@18:reduce-scatter:kill"
    return replace(grown(layout, first, "3-16:4", deaths, model=model), **dict(more))


EVALUATED: Any = {"model": CLIPPED[len(NO_EVALUATION) :], "more": {"evaluated": True}}
SOME, SOME_VPP = "--eval-global-batch-size 2", f"{INTERLEAVED} --eval-global-batch-size 4"
FEATURES = {
    "experts": featured("ep2", SPREAD, inner_ranks=2),
    "experts, sharded": featured("ep2-sharded", SPREAD, SHARDED_MODEL, inner_ranks=2),
    "context": featured("cp2", f"{ROPE} --normalization RMSNorm", context=2),
    "interleaved": featured("interleaved", INTERLEAVED, pipeline=2, samples=24),
    "averaged": featured("averaged", "--ddp-average-in-collective"),
    "per token": featured("per-token", "--calculate-per-token-loss"),
    "growing batch": featured("batch", grows=(12 * 12, 18)),
    "overlap": featured("overlap", "--overlap-grad-reduce --ddp-bucket-size 2000"),
    "dropout": featured("dropout", more={"dropout": True}),
    "balanced": featured("balanced").with_flags("--recover-balance"),
    "evaluated": featured("evaluated", **EVALUATED),
    "evaluated by some": featured("evaluated-by-some", SOME, **EVALUATED),
    "evaluated by some pipelines": featured("evaluated-by-some-vpp", SOME_VPP, **EVALUATED, pipeline=2, samples=24),
    "verified": featured("verified").with_flags("--recover-verify-interval", "1"),
}


@pytest.mark.parametrize("name", some("growing features", list(FEATURES), 1))
def test_what_users_combine_grows_as_well(runs: Runs, name: str) -> None:
    result = equal(runs, FEATURES[name])
    if result.case.evaluated:
        check_evaluations(result, runs.reference(result.case))
    assert max(result.replicas) == 4, result.replicas
    assert result.replicas[-1] < 4, result.replicas


def test_a_grown_run_goes_back_to_the_snapshots_that_it_has_taken_since(runs: Runs) -> None:
    """The newcomers are on the node of worker 1, which is lost as a whole: it held shards with all their shadows."""
    case = sharded(DP2, 2, "3-16:4", "1@20:forward:kill,2@20:forward:kill,3@20:forward:kill")
    case = replace(case, nodes=("a", "b")).with_flags("--recover-memory-interval", "1")
    result = runs.check(case, by=check_sharded)
    assert [plan["rollback"]["source"] for plan in result.plans.values() if plan["rollback"]][:1] == ["memory"]
    assert (max(result.replicas), result.replicas[-1]) == (4, 1), result.replicas


def test_spares_that_are_asked_for_stay_spares(runs: Runs) -> None:
    case = grown(DP2, 2, "3-17:3,20-:2", "0@18:backward:kill,1@18:backward:kill")
    result = equal(runs, case.with_flags("--recover-spares", "1"))
    assert max(result.replicas) == 3, result.replicas
    assert result.replicas[-1] == 2, "the spare has taken the place of one of the launch"


def test_a_node_with_replicas_that_have_come_is_drained(runs: Runs) -> None:
    case = replace(grown(DP2, 2, "3-18:4"), nodes=("a", "b"))
    result = equal(runs, case.altered("pacing.draining", "19:b"))
    assert max(result.replicas) == 4, result.replicas
    assert result.replicas[-1] == 1, "the newcomers are on the last node"
    assert said(result)[1] == DrainExit.DRAINED


@pytest.mark.parametrize("model", some("resuming", [ADAM_MODEL, SHARDED_MODEL], 1), ids=lambda model: model[-1])
def test_stock_megatron_resumes_at_the_launchs_size_what_a_grown_run_saved(runs: Runs, model: tuple[str, ...]) -> None:
    folder = str(runs.out / "checkpoints")
    case = grown(DP2, 2, "3-11:4", most=4, iterations=16, model=model)
    result = equal(runs, case.with_flags("--save", folder, "--save-interval", "12"))
    assert result.replicas[11] == 4, result.replicas
    resumed = runs.stock(Case(DP2, iterations=16, model=model), "--load", folder, "--ckpt-step", "12")
    check_rows(result.steps[12:], resumed.recorded)


# ---- hot spares: their models are built before anybody is lost
STRUCK = 5
"""The run waits for the spares before it."""


def hot(layout: Layout, spares: int, *strikes: Strike, model: tuple[str, ...] = CLIPPED) -> Case:
    case = Case(layout, strikes, spares=spares, model=model, flags=SLOW_TO_SEE_A_HANG)
    workers = range(layout.grid.world, layout.grid.world + spares)
    ready = ";".join(f"worker-{worker}.log:worker {worker} is ready for position" for worker in workers)
    when = f"2-{STRUCK}:{ready}"
    case = case.altered("pacing.awaiting", when)
    return case if filled_at_once(case) else case.patient(f"{STRUCK + 2}-:{replicas_left(case)}")


def filled_at_once(case: Case) -> bool:
    """Whether whoever takes a place only waits for it, and nothing else is lost: so it is there at the boundary."""
    lost = {strike.replica for strike in case.strikes}
    return len(lost) == 1 and len(case.strikes) == case.layout.positions


def replicas_left(case: Case) -> int:
    """The replicas at the end."""
    return case.layout.replicas - max(0, len(case.strikes) - case.spares)


HOT = {
    phase: hot(DP4, 1, Strike(1, 0, STRUCK, phase))
    for phase in ("data", "forward", "backward", "reduce-scatter", "all-gather", "agree", "optimizer")
} | {
    "sharded": hot(SHARDED_DP4, 1, Strike(2, 0, STRUCK, "backward"), model=SHARDED),
    "a-donor-dies": hot(DP4, 1, Strike(1, 0, STRUCK, "backward"), Strike(0, 0, STRUCK + 1, "transfer")),
    "another-dies-at-the-boundary": hot(DP4, 2, Strike(1, 0, STRUCK, "backward"), Strike(2, 0, STRUCK + 1, "recovery")),
}
HOT["node"] = replace(
    hot(TP3, 2, Strike(1, 0, STRUCK, "forward"), Strike(1, 1, STRUCK, "forward")), nodes=("a", "a", "b", "b", "c", "c")
)
"""All that a node had: the spares, on another one, are a whole replica."""
HOT["mate"] = replace(hot(TP3, 2, Strike(1, 1, STRUCK, "backward")), iterations=14)
"""Its mate must come out of the training first: a boundary or two later."""


@pytest.mark.parametrize("name", some("hot spares", list(HOT), 1))
def test_a_hole_is_filled_at_the_next_boundary_and_nothing_is_built_for_it(runs: Runs, name: str) -> None:
    case = HOT[name]
    result = runs.check(case, by=check_sharded if name == "sharded" else check, replicas=replicas_left(case))
    world = case.layout.grid.world
    logs = [(result.out / f"worker-{worker}.log").read_text() for worker in range(world + case.spares)]
    assert [log.count("builds the model of position") for log in logs] == [0] * world + [1] * case.spares
    if filled_at_once(case):
        assert result.replicas[STRUCK:] == [case.layout.replicas] * 3, result.replicas
