"""Megatron alone, as what a run with --recover and without a death must equal."""

from __future__ import annotations

import math

from tests.instep.conftest import Runs
from tests.instep.runs import GRAD_NORM, LOSS, Case
from tests.megatron_hooks.tiny import losses


def check_stock(runs: Runs, case: Case) -> None:
    """The case's losses and norms are those of its script without --recover."""
    argv = case.argv(runs.out)
    argv, told = argv[: argv.index("--recover")], runs.out / "losses.jsonl"
    run = runs.forkserver.run(case.layout.grid.world, argv, runs.out, losses=told)
    assert run.ok, run.tail()
    for step, row in zip(runs.reference(case).steps, losses(told), strict=True):
        assert math.isclose(step.loss, row["loss"], rel_tol=LOSS), (step, row)
        assert math.isclose(step.grad_norm, row["grad_norm"], rel_tol=GRAD_NORM), (step, row)
