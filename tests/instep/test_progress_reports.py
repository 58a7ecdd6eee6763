"""How long a worker may take between two marks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.grid import launch_grid
from recover_megatron.instep.hooks import FIRST_SECONDS, ProgressReports
from recover_megatron.instep.orphan import Orphan


class Told:
    """In place of the session: the seconds that were allowed beyond the hang timeout, mark by mark."""

    def __init__(self) -> None:
        self.allowed: list[float] = []
        self.revoked, self.epoch = False, 3

    def mark(self, iteration: int, phase: str, microbatch: Any, waiting: bool, allow: float) -> None:
        self.allowed.append(allow)

    def agree(self, number: int) -> None:
        """All agree at once."""


HOOKS: Any = SimpleNamespace(iteration=lambda: 1, inject=lambda phase, iteration: None)


@pytest.mark.parametrize(("mates", "allowed"), [((1, 4), FIRST_SECONDS), ((1, 2), 0.0)])
def test_mates_of_a_newcomer_may_wait_until_its_kernels_are_compiled(mates: tuple[int, ...], allowed: float) -> None:
    """Worker 1 has trained for long; the newcomer, worker 4 of a run of four, compiles in its first step."""
    session: Any = Told()
    progress = ProgressReports(session, HOOKS)
    progress.agree(1)
    grid = launch_grid(4, tensor=2, context=1, pipeline=1, inner_ranks=1)
    comm_config: Any = None
    mine = Assignment(session, 1, grid, comm_config)
    decision: Any = SimpleNamespace(
        epoch=3,
        at=7,
        grid={0: mates},
        place=lambda me: (0, 0),
        peer_stores_by_slot=lambda grid: {},
    )
    nothing: Any = SimpleNamespace(settled=lambda: None)
    orphan = Orphan(session, HOOKS, progress, mine, nothing, nothing, nothing, at_launch=True)
    mine.take_up = lambda given: (mine.stand(0, 0), setattr(mine, "taken_up", given))  # type: ignore[method-assign, assignment]
    orphan.come_back(decision)
    progress.mark("forward")
    progress.agree(7)
    progress.mark("forward")
    assert session.allowed[-3:] == [allowed, allowed, 0.0]
