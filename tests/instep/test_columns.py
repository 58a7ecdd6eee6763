"""Operations over replicas that only some pipeline stages make: between two steps they are made once,
whoever dies in them; in a step they end the run."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_SAME_FAULT
from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Runs
from tests.instep.runs import ROPE, Case, Layout, Strike

pytestmark = pytest.mark.slow

MTP = Layout("mtp", 2, pipeline=2, flags=f"--mtp-num-layers 1 {ROPE}")
MOE = Layout(
    "moe", 2, pipeline=2,
    flags="--num-layers 4 --num-experts 4 --moe-layer-freq [0]*2+[1]*2 --moe-z-loss-coeff 1e-3 --moe-router-topk 2 "
    "--disable-bias-linear",
)  # fmt: skip
PLAIN = Layout("pp2-dp3", 3, pipeline=2)


@pytest.mark.parametrize("layout", [MTP, MOE], ids=lambda layout: layout.name)
def test_what_only_some_stages_log_kills_nobody(runs: Runs, layout: Layout) -> None:
    """Neither in the reference, where nobody dies, nor where one does."""
    runs.check(Case(layout, (Strike(1, 1, 3, "backward"),), iterations=4))


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


@pytest.mark.parametrize(("where", "steps"), [("loss", 0), ("own", 0), ("optimizer", 2)])
def test_what_reaches_over_replicas_in_a_step_ends_the_run_and_is_named(runs: Runs, where: str, steps: int) -> None:
    result = runs(Case(PLAIN, iterations=4).altered("instruments.reaching", where))
    assert result.ended.codes == [EXIT_SAME_FAULT] * PLAIN.grid.world, result.told()
    place = r"allreduce at \S*instruments\.py:\d+ \(\w+\)"
    cause = re.compile(place + r" spans replicas \(group \S+ of \d workers\)")
    for worker in range(PLAIN.grid.world):
        assert cause.search(result.log(worker)), result.told()
    assert [step.iteration for step in result.steps] == list(range(1, steps + 1))


PROGRAM = str(Path(__file__).with_name("columns.py"))
ITERATIONS, REPLICAS = 3, 3
OPERATIONS = ("first", "second", "third", "all")
WHERE = ("before", "begun", "done", "over", "after")
Strikes = list[tuple[int, int, str, str]]
"""Worker, iteration, operation, where: see columns.py."""
Answers = dict[tuple[int, str], set[float]]
"""What the workers that were left got, by iteration and operation."""
# Replica r has worker r in the first stage and r + 3 in the second.
ONE = [[(worker, 2, operation, where)] for worker in (3, 5) for operation in OPERATIONS for where in WHERE]
TWO = [
    [(3, 2, first, where), (5, 2, second, again)]
    for first, second in (("first", "first"), ("first", "second"), ("third", "all"), ("all", "all"))
    for where in WHERE
    for again in WHERE
]


def run(server: ForkServer, folder: Path, strikes: Strikes) -> Answers:
    (folder / "inside").mkdir()
    argv = [PROGRAM, str(ITERATIONS), str(folder / "inside"), "--recover"]
    environment = {"COLUMNS_STRIKES": json.dumps(strikes)}
    ended = server.run(2 * REPLICAS, argv, folder, environment=environment, timeout=90)
    dead = {worker for worker, *_ in strikes}
    told = "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in ended.logs)
    assert ended.codes == [-9 if worker in dead else 0 for worker in range(2 * REPLICAS)], (ended.codes, told)
    found: Answers = defaultdict(set)
    alive = set(range(REPLICAS)) - {worker % REPLICAS for worker in dead}
    for worker, log in enumerate(ended.logs):
        for line in log.read_text().splitlines():
            if worker % REPLICAS in alive and line.startswith("{"):
                row = json.loads(line)
                found[row["iteration"], row["operation"]].add(row["got"])
    return found


def check_once(found: Answers, strikes: Strikes) -> None:
    """Each was made once: all have one answer, the sum of whole inputs, those of who was left among them."""
    lost = {worker % REPLICAS for worker, *_ in strikes}
    for iteration in range(1, ITERATIONS + 1):
        for operation in OPERATIONS:
            (got,) = found[iteration, operation]
            members = {int(bit) for bit in range(2 * REPLICAS) if int(got) >> bit & 1}
            everyone = set(range(0 if operation == "all" else REPLICAS, 2 * REPLICAS))
            left = {worker for worker in everyone if worker % REPLICAS not in lost}
            assert got == sum(2**worker for worker in members)
            assert left <= members <= everyone, (iteration, operation, members)
            assert members == everyone or iteration >= 2
            assert members == left or iteration <= 2, (iteration, operation, members)


def struck(strikes: Strikes) -> str:
    return "-".join(f"{worker}{operation}-{where}" for worker, _, operation, where in strikes)


@pytest.mark.parametrize("strikes", [[], *some("columns", ONE, 4), *some("columns-twice", TWO, 2)], ids=struck)
def test_an_operation_of_some_is_made_once_whoever_dies_in_it(
    forkserver: ForkServer, tmp_path: Path, strikes: Strikes
) -> None:
    check_once(run(forkserver, tmp_path, strikes), strikes)
