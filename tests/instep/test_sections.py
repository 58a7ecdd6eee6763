"""Sections in which the workers of a replica need each other: who hears of a death first leaves nobody behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.instep.rendezvous import Sections
from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.hsdp import TWO
from tests.instep.runs import Case, Layout

NOBODY: Any = SimpleNamespace(check=lambda: None, leave_if_broken=lambda: None)
HOOKS: Any = SimpleNamespace(log=lambda *unused, **unused_too: None)


class Progress:
    at = 0

    def begin(self) -> int:
        self.at += 1
        return self.at

    def agree(self, number: int) -> None:
        raise EpochRevoked(1, "worker 3 died")

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def test_who_misses_the_commit_of_the_second_run_returns_what_that_one_returned() -> None:
    """The first run is reported in an epoch that ends; the others commit the second one while this worker waits."""

    def interrupted(mine: bool, members: Sequence[int]) -> bool:
        raise EpochRevoked(2, "worker 2 died")

    def meet(number: int) -> None:
        assignment.decision.at = number

    groups = SimpleNamespace(any=interrupted)
    assignment: Any = SimpleNamespace(
        decision=SimpleNamespace(at=0), live={0, 1, 2}, epoch_groups=groups, committed=lambda number: False
    )
    committed, returned = iter([False, True]), iter(["first", "second"])
    rendezvous: Any = SimpleNamespace(committed_before_the_end=lambda number: next(committed), in_section=meet)
    progress: Any = Progress()
    sections = Sections(HOOKS, progress, assignment, NOBODY, rendezvous)
    assert sections.run("asynchronous checkpoint", lambda: next(returned)) == "second"


SHARDED = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
TENSOR, STAGES = Layout("tp2-dp2", 2, tensor=2), Layout("pp2-dp2", 2, pipeline=2)
NORM = ("--log-params-norm",)
PARTED = {
    "checkpoint of a model in shards": (TWO, "checkpoint", ("--save-interval", "1")),
    "norm over tensor parallelism": (TENSOR, "parameters' norm", NORM),
    "norm over stages": (STAGES, "parameters' norm", NORM),
    "norm with the distributed optimizer": (
        Layout("tp2-dp2-sharded", 2, tensor=2, flags=SHARDED), "parameters' norm", NORM,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some("parted sections", list(PARTED), 2))
def test_who_hears_of_a_death_first_leaves_its_mate_of_a_section_waiting_for_nobody(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    """Worker 0 dies; in the other replica the second waits for the first, which never begins that attempt."""
    layout, kind, flags = PARTED[name]
    late, begins = layout.grid.replicas[1]
    saving = ("--save", str(tmp_path / "saved")) if kind == "checkpoint" else ()
    case = Case(layout, flags=(*saving, *flags), doomed=(0,))
    result = runs.check(case.altered("pacing.parted", kind, 0, begins, late))
    assert result.replicas == [2, 2, 2, *[1] * 5], result.replicas
    if saving:
        assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "8"
