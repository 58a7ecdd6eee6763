"""The state of a position is lost with all who held it: the run goes back, in place, to a checkpoint or a snapshot.

Workers are killed for good; those that live stay the same processes.  From there on the run is the failure-free one,
and so are its steps.jsonl and its parameters at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.membership.records import EXIT_STATE_LOST
from recover_megatron.run_log.steps import read_steps
from recover_megatron.workload.snapshots import Spread, copies, part_of
from tests.drawn import some
from tests.instep import hsdp
from tests.instep.altered import altered
from tests.instep.conftest import Runs
from tests.instep.hsdp import second
from tests.instep.logged import console, differences
from tests.instep.runs import (
    ADAM,
    CLIPPED,
    DEEPSEEK,
    HALF_MOMENTS,
    INTERLEAVED,
    NO_EVALUATION,
    OVERLAP,
    SHARDED,
    Case,
    Layout,
    Result,
    Strike,
    check,
    check_rows,
    check_sharded,
)
from tests.instep.test_models import LLAMA, QWEN
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY

pytestmark = pytest.mark.slow

TORCH = ("--ckpt-format", "torch")
LAST_ONE = ("--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "5")
RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)
ON_THE_HOST = ("--recover-shadow-device", "cpu")
EP2 = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2"
EXPERTS = Layout("experts", 3, inner_ranks=2, flags=EP2)
SIXTEEN = Layout("sixteen", 4, flags="--bf16 --ddp-bucket-size 2000")
SKIPPED = Layout("skipped", 4, flags="--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 16777216 "
                 "--hysteresis 1")  # fmt: skip
TP2, DP4 = Layout("tp2-dp2", 2, tensor=2), Layout("dp4", 4)
LLAMA_PP2 = Layout("llama-cp2-pp2", 2, context=2, pipeline=2, flags=f"{LLAMA} {OVERLAP}")
DEEPSEEK_PP2 = Layout("deepseek", 2, pipeline=2, flags=f"{DEEPSEEK} {OVERLAP}")
QWEN_EP2 = Layout("qwen3", 3, inner_ranks=2, flags=f"{QWEN} {OVERLAP}")
BOTH = (Strike(0, 1, 6, "backward"), Strike(1, 1, 6, "forward"))
"""All that hold the state of position 1, at once."""
ALL_BUT_ONE = (Strike(0, 0, 6, "forward"), Strike(0, 1, 6, "forward"), Strike(1, 1, 6, "forward"))


@dataclass(frozen=True)
class Scenario:
    """A loss of the state, and what it must lead to."""

    name: str
    case: Case
    replicas: int
    """That end the run."""
    to: tuple[int, ...] = (4,)
    """The iterations one of which the run goes back to; of checkpoints one is saved after every second."""
    when: str = ""
    """See ``Case.patient``."""
    said: str = ""
    """By one of those who live."""
    near: float = 1.0
    """See ``check``; 10 at least with Adam."""

    def __str__(self) -> str:
        return self.name

    def run(self, runs: Runs, case: Case, by: Callable[..., None] = check) -> Result:
        """Run ``case``, the scenario's with further flags; it must be the failure-free run in the end."""
        near = max(self.near, 10.0 if "adam" in case.model else 1.0)
        result = runs.check(case.patient(self.when) if self.when else case, near, by)
        assert self.said in result.said, result.told()
        return result


# ---- to its newest checkpoint


def at_once(layout: Layout, *workers: int) -> tuple[Strike, ...]:
    """The loss of these workers in iteration 6."""
    return tuple(Strike(*layout.grid.place(worker), 6, "forward") for worker in workers)


def sharded(
    name: str,
    layout: Layout,
    *flags: str,
    lost: tuple[int, ...] = (1, 2),
    replicas: int = 2,
    spoil: int | None = None,
    **more: Any,
) -> Scenario:
    """With shards, some of which are lost with their shadows; ``spoil``: a worker that cuts the newest checkpoint."""
    case = Case(replace(layout, name=f"sharded-{layout.name}"), at_once(layout, *lost), 10, model=SHARDED, flags=flags)
    return Scenario(
        f"shards, {name}", case if spoil is None else case.altered("faulty.spoil", spoil, 6, "."), replicas, **more
    )


FIRST = Scenario("both holders of a position at once", Case(TP2, BOTH, 10, model=ADAM), 1)
SCENARIOS = [
    # At the end with a test set, of which one that is built for position 1 sees nothing.
    Scenario("evaluated", FIRST.case.with_flags("--eval-interval", "4", "--eval-iters", "1"), 1),
    Scenario("the legacy format", Case(TP2, BOTH, 10, flags=TORCH), 1),
    # That of iteration 4 may not be written yet, which is a matter of the disk.
    Scenario("asynchronous", FIRST.case.with_flags(*ASYNCHRONOUSLY.split()), 1, to=(2, 4)),
    Scenario("replaced", Case(TP2, BOTH, 12, restarts=2, flags=TORCH), 2, when="9-:2"),
    # Each replica is one worker: the others are whole, and go back all the same.
    Scenario(
        "a shard and its shadow",
        Case(DP4, (Strike(1, 0, 6, "backward"), Strike(2, 0, 6, "forward")), 10, model=SHARDED), 2,
        said="the optimizer state of workers 1 had no other copy",
    ),
    Scenario(
        "moments in 16 bits",
        Case(Layout("aware-dp4", 4, flags=f"--bf16 {HALF_MOMENTS}"),
             (Strike(1, 0, 6, "backward"), Strike(2, 0, 6, "forward")), 10, model=SHARDED), 2, near=300.0,
    ),
    Scenario("a position with its shards", Case(TP2, BOTH, 10, model=SHARDED), 1),
    sharded("fully reshardable", DP4, *RESHARDABLE),
    sharded("each worker reads a part", DP4, *RESHARDABLE, "--ckpt-fully-parallel-load"),
    sharded("by position, fully reshardable", TP2, *RESHARDABLE, lost=(1, 3), replicas=1),
    sharded("experts, fully reshardable", EXPERTS, *RESHARDABLE, lost=(1, 3, 5), replicas=1),
    sharded("instances, fully reshardable", Layout("instances", 4, flags="--num-distributed-optimizer-instances 2"),
            *RESHARDABLE, lost=(0, 2)),
    Scenario("a context rank", Case(Layout("cp2-dp2", 2, context=2), BOTH, 10, model=ADAM), 1),
    sharded("a context rank of a stage", LLAMA_PP2, lost=(5, 7), replicas=1),
    sharded("latent attention, experts, further tokens", DEEPSEEK_PP2, *RESHARDABLE, lost=(2, 3), replicas=1),
    sharded("an expert rank", QWEN_EP2, lost=(0, 2, 4), replicas=1),
    sharded("experts, legacy", EXPERTS, *TORCH, lost=(1, 3, 5), replicas=1),
    # Its part of the optimizer's state, too, is that of iteration 2, though the tracker file names another one.
    sharded("legacy, the newest cannot be read", DP4, *TORCH, spoil=3, to=(2,)),
    # Checkpoints of an optimizer that has not made a step.
    *(sharded(f"the first steps are left out, {name}", SKIPPED, *flags, near=300.0)
      for name, flags in (("by bucket", ()), ("legacy", TORCH))),
    sharded("in host memory", SIXTEEN, *ON_THE_HOST, near=300.0),
    sharded("in host memory, fully reshardable", SIXTEEN, *RESHARDABLE, *ON_THE_HOST, near=300.0),
    sharded("in host memory, legacy", SIXTEEN, *TORCH, *ON_THE_HOST, near=300.0),
    Scenario(
        "one orphan is left", Case(TP2, ALL_BUT_ONE, 10, restarts=3, flags=TORCH).altered("pacing.late"), 1,
        said="waits up to 300 s for other workers",
    ),
    Scenario(
        "the newest cannot be read", Case(TP2, BOTH, 10, flags=TORCH).altered("faulty.spoil", 0, 6, "."), 1, (2,),
        said="cannot load the checkpoint of iteration 4 in",
    ),
    # Of which Megatron keeps one, and which it loads where it is newer, whatever it is told to load.
    Scenario("the non-persistent one", FIRST.case.with_flags(*LAST_ONE), 1, to=(5,)),
    Scenario(
        "the non-persistent one cannot be read",
        FIRST.case.with_flags(*LAST_ONE).altered("faulty.spoil", 0, 6, "non_persistent"), 1, to=(4,),
        said="cannot load the checkpoint of iteration 5 in",
    ),
    Scenario(
        "the newest cannot be read, torch_dist", FIRST.case.altered("faulty.spoil", 0, 6, "."), 1, (2,),
        said="cannot load the checkpoint of iteration 4 in",
    ),
    # Two are left, both needed: one dies, and a newcomer takes its part.
    *(
        Scenario(
            f"a death in the load, {visit}",
            Case(TP2, (*BOTH, Strike(0, 0, 5, "rollback", visit=visit)), 10, restarts=3, flags=TORCH), 1,
        )
        for visit in (1, 2)
    ),
]  # fmt: skip


def gone_back(runs: Runs, scenario: Scenario) -> Result:
    """Run it with checkpoints; it must be the failure-free run, but for what was run twice, which is told."""
    case = replace(scenario.case, model=(*scenario.case.model, *CLIPPED))
    case = case.with_flags("--save", str(runs.out / "checkpoints"), "--save-interval", "2")
    result = scenario.run(runs, case)
    assert 0 in result.ended.codes, "nobody was started in place of all"
    assert result.replicas[-1] >= scenario.replicas, result.replicas
    (to,) = {back["to"] for back in result.of_training("rolled back")}
    assert to in scenario.to, result.told()
    assert f"rolled back to iteration {to} (from disk, {runs.out / 'checkpoints'}" in result.said, result.told()
    return result


def test_a_lost_state_is_that_of_the_newest_checkpoint(runs: Runs, tmp_path: Path) -> None:
    result = gone_back(runs, FIRST)
    (back,) = result.of_training("rolled back")
    assert (back["lost"], back["tier"]) == (1, "disk")
    assert result.replicas == [2] * 4 + [1] * 6, result.replicas
    superseded = list(read_steps(tmp_path / "steps.jsonl.1"))
    assert [step.iteration for step in superseded] == [1, 2, 3, 4, 5], "what was run twice is kept"
    logged, expected = (console(its.out.glob("worker-*.log")) for its in (result, runs.reference(result.case)))
    assert differences(logged, expected, 1e-4) == []


@pytest.mark.parametrize("scenario", some("rollbacks", SCENARIOS, 2), ids=str)
def test_it_is_however_it_was_lost(runs: Runs, scenario: Scenario) -> None:
    gone_back(runs, scenario)


def test_with_the_last_resort_off_the_run_ends_and_names_its_checkpoint(runs: Runs) -> None:
    flags = ("--save", str(runs.out / "checkpoints"), "--save-interval", "2", "--recover-last-resort", "off")
    result = runs(FIRST.case.with_flags(*flags))
    assert result.ended.codes == [EXIT_STATE_LOST, -9, EXIT_STATE_LOST, -9], result.told()
    assert result.of_training("rolled back") == []
    assert result.said.count("no last resort: --recover-last-resort off.") == 1
    assert "Last checkpoint: iteration 4" in result.said, result.told()


# ---- with Megatron-FSDP: all that hold a shard

OFF = ("--recover-memory-tier", "off")
"""Else there is a newer snapshot where a node has all that hold a shard."""


def of_groups(
    name: str, layout: Layout, *more: Strike, lost: tuple[Strike, ...] = BOTH, replicas: int = 1, to: int = 4,
    when: str = "", said: str = "", **changed: Any,
) -> Scenario:  # fmt: skip
    case = replace(Case(layout, (*lost, *more), 10, flags=OFF), **changed)
    return Scenario(name, case, replicas, (to,), when, said, hsdp.NEAR.get(layout, 10.0))


IN_THE_LOAD = Strike(0, 0, 5, "rollback")
GROUP_SCENARIOS = [
    *(of_groups(its.name, its) for its in (hsdp.TWO, hsdp.OPTIMIZER, hsdp.TENSOR, hsdp.CONTEXT, hsdp.EXPERTS)),
    *(of_groups(its.name, its) for its in (hsdp.SIXTEEN_BITS, hsdp.HALF_MOMENTS, hsdp.DOUBLE, hsdp.ASKED_FOR_ONE)),
    *(of_groups(its.name, its) for its in (hsdp.TENSOR_EXPERTS, hsdp.BIASES, hsdp.QUANTILES)),
    *(of_groups(its.name, its) for its in (hsdp.OUTER_TWO, hsdp.OUTER_TENSOR, hsdp.OUTER_SIXTEEN, hsdp.OUTER_EXPERTS)),
    *(
        scenario
        for name, layout in (("shard groups", hsdp.TWO), ("outer", hsdp.OUTER_TWO))
        for scenario in (
            of_groups(f"{name}, replaced", layout, iterations=12, restarts=2, replicas=2, when="9-:2"),
            of_groups(f"{name}, the newest cannot be read", layout, to=2, train_with=altered("faulty.spoil", 0, 6, "."),
                      said="cannot load the checkpoint of iteration 4 in"),
            *(of_groups(f"{name}, a death in the load, {visit}", layout, replace(IN_THE_LOAD, visit=visit), restarts=3)
              for visit in (1, 2)),
        )
    ),
    *(
        of_groups(f"{name}, a death in the middle of the load, {operation}", layout, doomed=(0,), restarts=3,
                  train_with=altered("faulty.in_shard_group", 0, 5, operation, visit, "kill"))
        for name, layout in (("shard groups", hsdp.TWO), ("outer", hsdp.OUTER_TWO))
        for operation, visit in (("gather_object", 1), ("scatter_object_list", 1), ("all_gather_object", 1))
    ),
    # Position 1 of the last shard group lives; what it has not is lost all the same.
    of_groups("outer, a part and its shadow", hsdp.OUTER_THREE, said="had no other copy", replicas=2, iterations=14,
              when="9-:2"),
    of_groups("shard groups, the non-persistent one", hsdp.TWO, to=5, flags=(*OFF, *LAST_ONE)),
    of_groups("outer, shadows in host memory", hsdp.OUTER_TWO, flags=(*OFF, "--recover-shadow-device", "cpu")),
]  # fmt: skip


@pytest.mark.parametrize("scenario", some("shard groups to a checkpoint", GROUP_SCENARIOS, 3), ids=str)
def test_a_lost_shard_of_megatron_fsdp_is_that_of_the_newest_checkpoint(runs: Runs, scenario: Scenario) -> None:
    gone_back(runs, scenario)


def test_a_lost_shard_of_megatron_fsdp_is_that_of_the_checkpoint_of_megatron_alone_with_which_the_run_began(
    runs: Runs,
) -> None:
    folder = runs.out / "stock-checkpoints"
    case = replace(of_groups("", hsdp.TWO).case, model=tuple(CLIPPED))
    stock = runs.stock(replace(case, strikes=()), "--save", str(folder), "--save-interval", "4")
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    result = runs(case.with_flags("--load", str(folder)), "again")
    check_rows(stock.recorded[4:], result.steps, 10.0)
    (back,) = result.of_training("rolled back")
    assert (back["to"], back["lost"], back["folder"]) == (4, 1, str(folder)), result.told()


# ---- to snapshots in the memory of the other of two nodes, without a checkpoint
#
# Megatron's default order: position 0 of both replicas is on node a, position 1 on node b, which is lost.

PP2 = Layout("pp2-dp2", 2, pipeline=2)
ALONE = Layout("pp2-dp1", 1, pipeline=2)
NODES = ("a", "a", "b", "b")
EVERY_2 = ("--recover-memory-tier", "auto", "--recover-memory-interval", "2")
SPREAD_MODEL = (*CLIPPED, *SHARDED)
NODE_B = (Strike(0, 1, 6, "backward"), Strike(1, 1, 6, "forward"))
"""All that hold the state of position 1, at once."""
TRAVELLING = (Strike(0, 1, 5, "backward"), Strike(1, 1, 5, "snapshot"))
"""The giver of the snapshot of position 1 has copied it, and nobody has got it."""
AT_ONCE = (Strike(0, 1, 3, "backward"), Strike(1, 1, 3, "snapshot"))
"""The same, where the one that has arrived is that of before the first step."""
IN_THE_UPDATE = (Strike(0, 1, 6, "optimizer"), Strike(1, 1, 6, "optimizer"))
"""All of position 1 once more: the step is committed, so it is lost, too."""
COPIES = copies(PP2.grid.replicas, {worker: (node,) for worker, node in enumerate(NODES)}, "auto", Spread(2))
SHARDS = part_of(PP2.grid.replicas[1][1], range(4), 2)
"""The part of a snapshot that has a shard of position 1."""


def corrupted(case: Case, part: int) -> Case:
    """With, of a part that a worker of node b gives, the copy on node a corrupted."""
    (keeper,) = (worker for worker in COPIES[part] if NODES[worker] == "a")
    return case.altered("faulty.corrupt", f"snapshot-{part}", keeper, 6)


LOST = Case(PP2, NODE_B, 8, flags=EVERY_2, nodes=NODES, model=CLIPPED)
SPREAD = replace(LOST, model=SPREAD_MODEL)


def ways(lost: Case, adam: Case, part: int) -> list[Scenario]:
    """To lose node b; ``adam``: the same with Adam; ``part``: one that node b gives."""
    alone = replace(lost, layout=ALONE, strikes=(Strike(0, 1, 6, "forward"),), restarts=1, nodes=("a", "b"))
    return [
        # What was taken before iteration 5 may be on its way still.
        Scenario("replaced", replace(lost, restarts=2, iterations=12), 2, (2, 4), when="9-:2"),
        # 4: where the section in which it was begun was made again, by those who then give it.
        Scenario("while a snapshot travels", replace(lost, strikes=TRAVELLING), 1, (2, 4)),
        Scenario("after the step", replace(lost, strikes=IN_THE_UPDATE), 1, (2, 4)),
        Scenario("in the first iterations", replace(adam, strikes=AT_ONCE), 1, (0, 2)),
        Scenario("a corrupted chunk", corrupted(adam, part), 1, (2,),
                 said=f"copy of part {part} of the snapshot after iteration 4 are corrupted"),
        Scenario("the only replica", alone, 1, (2, 4), said="waits up to 300 s for other workers"),
    ]  # fmt: skip


def spread(name: str, layout: Layout, nodes: str, lost: tuple[int, ...], replicas: int, **more: Any) -> Scenario:
    near = more.pop("near", 10.0)
    case = replace(SPREAD, layout=layout, strikes=at_once(layout, *lost), nodes=tuple(nodes), **more)
    return Scenario(name, case, replicas, (2, 4), near=near)


MEMORY_SCENARIOS = [
    *ways(LOST, replace(LOST, model=(*CLIPPED, *ADAM)), part=1),
    Scenario("copied when the update waits for it", LOST.altered("pacing.late_copy"), 1, (2, 4)),
]
SHARD_SCENARIOS = [
    *(replace(way, name=f"{way.name}, sharded") for way in ways(SPREAD, SPREAD, part=SHARDS)),
    Scenario("nobody comes", SPREAD, 1, (2, 4)),
    spread("three replicas", Layout("sharded-pp2-dp3", 3, pipeline=2), "aaabbb", (3, 4, 5), 1),
    spread("16 bits, parameters arrive later", Layout("sharded-bf16", 2, pipeline=2, flags=f"--bf16 {OVERLAP}"),
           "aabb", (2, 3), 1, near=300.0),
    spread("moments in 16 bits", Layout("sharded-aware", 2, pipeline=2, flags=f"--bf16 {HALF_MOMENTS} {OVERLAP}"),
           "aabb", (2, 3), 1, near=300.0),
    spread("shadows in host memory", Layout("sharded-host", 2, pipeline=2,
                                            flags=f"--bf16 {OVERLAP} --recover-shadow-device cpu"),
           "aabb", (0, 1), 1, near=300.0),
    spread("instances", Layout("sharded-instances", 4, flags="--num-distributed-optimizer-instances 2"),
           "abab", (0, 2), 2),
    spread("experts", Layout("sharded-experts", 3, inner_ranks=2, flags=EP2), "ababab", (1, 3, 5), 1),
    spread("context ranks of a stage", LLAMA_PP2, "aaaabbbb", (4, 5, 6, 7), 1),
    spread("a context rank of a stage", LLAMA_PP2, "ababaaaa", (1, 3), 1),
    spread("latent attention, experts, further tokens", DEEPSEEK_PP2, "aabb", (2, 3), 1),
    spread("latent attention, experts, replaced", DEEPSEEK_PP2, "aabb", (0, 1), 2, restarts=2),
    spread("expert ranks of Qwen3", QWEN_EP2, "ababab", (0, 2, 4), 1),
    spread("experts over all, replaced", Layout("sharded-experts-wide", 1, inner_ranks=2, flags=EP2), "ab", (1,), 1,
           restarts=1),
    spread("without shadows", Layout("sharded-alone", 4, flags="--recover-shadow-shards 0"), "abcd", (2,), 3),
    spread("interleaved", Layout("sharded-interleaved", 2, pipeline=2,
                                 flags=f"{INTERLEAVED} {OVERLAP}"),
           "aabb", (2, 3), 1),
]  # fmt: skip


def shard_groups(layout: Layout) -> Scenario:
    """Node b has the second worker of every shard group of Megatron-FSDP."""
    lost = tuple(Strike(replica, 1, 6, "backward") for replica in range(layout.replicas))
    case = replace(LOST, layout=layout, strikes=lost, nodes=("a", "b") * layout.replicas, model=tuple(NO_EVALUATION))
    return Scenario(layout.name, case, 1, (2, 4), near=hsdp.NEAR.get(layout, 10.0))


SECONDS = [pytest.param(shard_groups(its), marks=second) for its in (hsdp.SECOND_TWO, hsdp.SECOND_SIXTEEN)]
GROUPS_OF_TWO = [hsdp.TWO, hsdp.OPTIMIZER, hsdp.SIXTEEN_BITS, hsdp.OUTER_TWO, hsdp.OUTER_THREE, hsdp.OUTER_SIXTEEN]


@pytest.mark.parametrize(
    "scenario",
    [
        *MEMORY_SCENARIOS,
        *some("shards in snapshots", SHARD_SCENARIOS, 2),
        *map(shard_groups, some("shard groups in snapshots", GROUPS_OF_TWO, 1)),
        *SECONDS,
    ],
    ids=str,
)
def test_a_lost_node_is_that_of_the_newest_snapshot(runs: Runs, scenario: Scenario) -> None:
    """By workers that stay the same processes; with its shards of the optimizer and all their shadows, too."""
    case = scenario.case
    result = scenario.run(runs, case, check_sharded if case.model == SPREAD_MODEL else check)
    struck = {strike.worker(case.layout) for strike in case.strikes}
    assert {result.ended.codes[w] for w in range(case.layout.grid.world) if w not in struck} == {0}, (
        "the same processes"
    )
    assert result.replicas[-1] == scenario.replicas, result.told()
    assert "memory tier: snapshots every 2 iterations need up to 0.00" in result.said, result.told()
    backs = result.of_training("rolled back")
    # A worker of the node that left its broken replica before it came to the phase dies when it comes there again.
    later = sum("takes position" in result.log(worker) for worker in struck)
    assert bool(later) + 1 <= len(backs) <= later + 1, result.told()
    for back in backs:
        assert back["to"] in scenario.to, result.told()
        assert (back["tier"], back["folder"]) == ("memory", "")
        committed = case.strikes[0].iteration - (case.strikes != IN_THE_UPDATE)
        assert back["lost"] == committed - back["to"], result.told()
        assert f"rolled back to iteration {back['to']} (from memory)" in result.said, result.told()


def test_where_no_node_has_all_of_a_position_nothing_is_kept(runs: Runs) -> None:
    case = replace(LOST, strikes=(), iterations=3, nodes=("a", "b", "a", "b"))
    result = runs.check(case)
    assert result.said.count("memory tier: off, as each part of the state has copies in several failure domains") == 1
    assert "memory tier: snapshots" not in result.said


def test_a_host_without_the_memory_for_it_is_refused_at_the_start(runs: Runs) -> None:
    result = runs(replace(LOST, strikes=(), iterations=3).altered("faulty.poor_host", 2))
    assert 0 not in result.ended.codes, result.told()
    assert result.steps == []
    assert "GiB of host memory per worker; a host lacks this memory, so no snapshots are taken" in result.said
    assert "--recover-memory-tier: a host lacks the memory for snapshots" in result.said
