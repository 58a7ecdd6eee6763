"""Operations that only some workers of a replica make, between decisions, with deaths at every moment of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.forkserver import ForkServer

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("columns.py"))
ITERATIONS, REPLICAS = 3, 3
OPERATIONS = ("first", "second", "third", "all")
WHERE = ("before", "begun", "done", "over", "after")
# Replica r has worker r in the first stage and r + 3 in the second.
ONE = [[(worker, 2, operation, where)] for worker in (3, 5) for operation in OPERATIONS for where in WHERE]
TWO = [
    [(3, 2, first, where), (5, 2, second, again)]
    for first, second in (("first", "first"), ("first", "second"), ("third", "all"), ("all", "all"))
    for where in WHERE
    for again in WHERE
]


def run(
    server: ForkServer, folder: Path, strikes: list[tuple[int, int, str, str]]
) -> dict[tuple[int, str], set[float]]:
    """What the workers that were left got, by iteration and operation."""
    (folder / "inside").mkdir()
    argv = [PROGRAM, str(ITERATIONS), str(folder / "inside"), "--recover"]
    ended = server.run(
        2 * REPLICAS, argv, folder, environment={"COLUMNS_STRIKES": json.dumps(strikes)}, timeout=90
    )  # fmt: skip
    struck = {worker for worker, *_ in strikes}
    told = "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in ended.logs)
    assert ended.codes == [-9 if worker in struck else 0 for worker in range(2 * REPLICAS)], (ended.codes, told)
    found: defaultdict[tuple[int, str], set[float]] = defaultdict(set)
    alive = set(range(REPLICAS)) - {worker % REPLICAS for worker in struck}
    for worker, log in enumerate(ended.logs):
        for line in log.read_text().splitlines():
            if worker % REPLICAS in alive and line.startswith("{"):
                row = json.loads(line)
                found[row["iteration"], row["operation"]].add(row["got"])
    return found


def check(found: dict[tuple[int, str], set[float]], strikes: list[tuple[int, int, str, str]]) -> None:
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


def name(strikes: list[tuple[int, int, str, str]]) -> str:
    return "-".join(f"{worker}{operation}-{where}" for worker, _, operation, where in strikes)


@pytest.mark.parametrize("strikes", [[], *some("columns", ONE, 4), *some("columns-twice", TWO, 2)], ids=name)
def test_an_operation_of_some_is_made_once_whoever_dies_in_it(
    forkserver: ForkServer, tmp_path: Path, strikes: list[tuple[int, int, str, str]]
) -> None:
    check(run(forkserver, tmp_path, strikes), strikes)
