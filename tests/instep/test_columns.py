"""Operations over replicas that only some pipeline stages make: between two steps they are whose they are, and in one
they end the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_SAME_FAULT
from recover_megatron.run_log.steps import read_steps
from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Reference, Runs
from tests.instep.runs import Case, Layout, Result, Strike, check

pytestmark = pytest.mark.slow

MTP = Layout("mtp", 2, pipeline=2, flags="--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion")
MOE = Layout(
    "moe", 2, pipeline=2,
    flags="--num-layers 4 --num-experts 4 --moe-layer-freq [0]*2+[1]*2 --moe-z-loss-coeff 1e-3 --moe-router-topk 2 "
    "--disable-bias-linear",
)  # fmt: skip
PLAIN = Layout("pp2-dp3", 3, pipeline=2)


@pytest.mark.parametrize("layout", [MTP, MOE], ids=lambda layout: layout.name)
def test_what_only_some_stages_log_kills_nobody(
    forkserver: ForkServer, reference: Reference, layout: Layout, tmp_path: Path
) -> None:
    """Neither in the reference, where nobody dies, nor where one does."""
    case = Case(layout, (Strike(1, 1, 3, "backward"),), iterations=4)
    check(case.run(forkserver, tmp_path), reference(case))


def test_a_death_in_what_one_stage_sums_while_the_other_waits_for_it(runs: Runs) -> None:
    """Worker 3 is the second stage of one replica; the others sum without it, on the input that they had."""
    case = Case(PLAIN, iterations=4, doomed=(3,)).altered("instruments.reaching", "log")
    result = runs.check(case)
    lost = next(replica for replica, workers in enumerate(PLAIN.grid.replicas) if 3 in workers)
    for replica, workers in enumerate(PLAIN.grid.replicas):
        if replica != lost:
            for worker in workers:
                said = re.findall(r"summed (\w+) in (\d): (\d+)", result.log(worker))
                sums = {(int(iteration), name): int(value) for name, iteration, value in said}
                # 1 of the first stage, and what the second has summed over the replicas.
                full, left = 1 + 3, 1 + 2
                expected = {(1, "first"): full, (1, "second"): full, (2, "first"): full, (2, "second"): full}
                expected |= {(3, "first"): full, (3, "second"): left, (4, "first"): left, (4, "second"): left}
                assert sums == expected, result.told()


@pytest.mark.parametrize(("where", "steps"), [("loss", 0), ("optimizer", 2)])
def test_what_reaches_over_replicas_in_a_step_ends_the_run_and_is_named(
    forkserver: ForkServer, tmp_path: Path, where: str, steps: int
) -> None:
    case = Case(PLAIN, iterations=4).altered("instruments.reaching", where)
    ended = forkserver.run(PLAIN.grid.world, case.argv(tmp_path), tmp_path, timeout=200)
    result = Result(case, ended, tmp_path)
    assert ended.codes == [EXIT_SAME_FAULT] * PLAIN.grid.world, result.told()
    for worker in range(PLAIN.grid.world):
        cause = re.compile(
            r"allreduce at \S*instruments\.py:\d+ \(\w+\) reaches over replicas \(group \S+ of 3 workers\)"
        )
        assert cause.search(result.log(worker)), result.told()
    path = tmp_path / "steps.jsonl"
    assert [step.iteration for step in read_steps(path)] == list(range(1, steps + 1)) if steps else True
