"""What users combine, each with deaths, against the same flags without --recover: every number and every tensor.

A few of ``layouts.RECIPES`` are drawn a run, all of them with RECOVER_MATRIX=all; faults are drawn by RECOVER_SEED.
"""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import numpy
import pytest
import torch

from recover_megatron.run_log.steps import read_steps, violations
from tests.drawn import SEED, some
from tests.harness.forkserver import ForkServer, Run
from tests.instep.layouts import RECIPES, Recipe, faults_of
from tests.instep.logged import checkpoint, console, differences, scalars
from tests.instep.runs import (
    GRAD_NORM,
    MODEL,
    NO_EVALUATION,
    PARAMETERS,
    QUICK_TO_SEE_A_HANG,
    Strike,
    check_rows,
    distance,
    recorded,
)
from tests.megatron_hooks.tiny import OURS, STOCK

pytestmark = pytest.mark.slow


FEW = {"-few": 15, "-fewer": 8}
"""Validation sets: what is added to the prefix -> documents."""


@pytest.fixture(scope="session")
def indexed_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small indexed data set of documents of different lengths, each with an end mark.

    Beside it are those of ``FEW``.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("indexed") / "text"
    source = random.Random(0)
    for more, documents in (("", 400), *FEW.items()):
        builder = IndexedDatasetBuilder(f"{prefix}{more}.bin", dtype=numpy.int32)
        for _ in range(documents):
            tokens = [source.randrange(126) for _ in range(source.randrange(3, 40))]
            builder.add_document(torch.tensor([*tokens, 126], dtype=torch.int32), [len(tokens) + 1])
        builder.finalize(f"{prefix}{more}.idx")
    return str(prefix)


def argv(recipe: Recipe, out: Path, data: str) -> list[str]:
    flags = [*MODEL, *recipe.layout.argv, "--hidden-dropout", "0", "--attention-dropout", "0", *NO_EVALUATION]
    if "--step-batch-size-schedule" in recipe.flags:
        at = flags.index("--global-batch-size")
        del flags[at : at + 2]
    if "--train-samples" not in recipe.flags:
        flags += ["--train-iters", str(recipe.iterations)]
    if recipe.checkpoint:
        flags += ["--save", str(out / "checkpoints"), "--save-interval", "4"]
    flags += ["--tensorboard-dir", str(out / "board"), "--tensorboard-log-interval", "1"]
    flags += ["--tensorboard-queue-size", "1", *shlex.split(recipe.flags)]
    if recipe.data:
        flags = [flag for flag in flags if flag not in ("--mock-data", "--split", "90,10,0")]
        sets = ["--train-data-path", data, "--valid-data-path", *(data + more for more in FEW)]
        flags += sets if "--multiple-validation-sets" in flags else ["--split", "90,10,0", "--data-path", data]
        flags += ["--data-cache-path", str(out / "cache")]
    return flags


def train(server: ForkServer, recipe: Recipe, out: Path, data: str, *more: str, script: str, restarts: int = 0) -> Run:
    return server.run(
        recipe.layout.grid.world, [script, *argv(recipe, out, data), *more], out,
        losses=None if "--recover" in more else out / "losses.jsonl", restarts=restarts, timeout=400,
    )  # fmt: skip


def with_recover(out: Path, strikes: tuple[Strike, ...], recipe: Recipe) -> list[str]:
    more = ["--recover", "--recover-log-dir", str(out)]
    if strikes:
        more += ["--recover-inject", ",".join(strike.spec(recipe.layout) for strike in strikes)]
    return more + QUICK_TO_SEE_A_HANG * any(strike.kind == "stop" for strike in strikes)


@pytest.mark.parametrize("recipe", some("layouts", RECIPES, 3), ids=str)
def test_deaths_change_no_number_that_is_logged_and_no_tensor_that_is_saved(
    forkserver: ForkServer, tmp_path: Path, indexed_data: str, recipe: Recipe
) -> None:
    strikes, restarts = faults_of(recipe, random.Random(f"{recipe.name} {SEED}"))
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    # --recover draws random numbers by microbatch; the plain script has not all that there is for data and losses.
    plain = with_recover(stock, (), recipe) if recipe.dropout else []
    # And Megatron's checkpoint writer, a process of its own, imports it without the host device.
    beyond = any(part in recipe.name for part in ("mtp", "sets", "async")) or recipe.layout.context > 1
    script = OURS if plain or beyond else STOCK
    told = f"{recipe.name} with {[strike.spec(recipe.layout) for strike in strikes]}, {restarts} restarts: "

    expected = train(forkserver, recipe, stock, indexed_data, *plain, script=script)
    assert expected.ok, expected.tail()
    run = train(forkserver, recipe, ours, indexed_data, *with_recover(ours, strikes, recipe), script=OURS,
                restarts=restarts)  # fmt: skip
    struck = {strike.worker(recipe.layout) for strike in strikes}
    mates = {
        mate for strike in strikes if strike.kind == "stop" for mate in recipe.layout.grid.replicas[strike.replica]
    }
    for worker, code in enumerate(run.codes):
        assert code == (-9 if worker in struck else 0) or worker in mates, told + run.tail()

    steps = list(read_steps(ours / "steps.jsonl"))
    made = [iteration for iteration in range(1, recipe.iterations + 1) if iteration not in recipe.left_out]
    assert [step.iteration for step in steps] == made, told
    if "batch" not in recipe.name:
        assert violations(steps, recipe.layout.samples) == [], told
    if not recipe.dropout:
        check_rows(steps, recorded(stock), recipe.near, told)
    near = recipe.near * GRAD_NORM
    theirs = console(sorted(stock.glob("worker-*.log")))
    assert theirs, expected.tail()
    assert differences(console(sorted(ours.glob("worker-*.log"))), theirs, near) == [], told
    assert differences(scalars(ours / "board"), scalars(stock / "board"), near) == [], told
    if recipe.checkpoint:
        its, mine = (checkpoint(folder / "checkpoints", recipe.iterations) for folder in (stock, ours))
        assert set(its) == set(mine), told
        assert distance(mine, its) < recipe.near * PARAMETERS, told
