"""Megatron alone, as what a run with --recover and without a death must equal."""

from __future__ import annotations

import math
from pathlib import Path

from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Reference
from tests.instep.runs import GRAD_NORM, LOSS, Case
from tests.megatron_hooks.tiny import losses


def check_stock(forkserver: ForkServer, reference: Reference, folder: Path, case: Case) -> None:
    """The case's losses and norms are those of its script without --recover."""
    argv = case.argv(folder)
    argv = argv[: argv.index("--recover")]
    run = forkserver.run(case.layout.grid.world, argv, folder, losses=folder / "losses.jsonl")
    assert run.ok, run.tail()
    for step, row in zip(reference(case).steps, losses(folder / "losses.jsonl"), strict=True):
        assert math.isclose(step.loss, row["loss"], rel_tol=LOSS), (step, row)
        assert math.isclose(step.grad_norm, row["grad_norm"], rel_tol=GRAD_NORM), (step, row)
