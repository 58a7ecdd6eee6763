"""What Megatron tells of a run, on the console, TensorBoard, W&B, in its progress log, whoever is left to tell it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.instep.conftest import Reference
from tests.instep.logged import Numbers, console, differences, scalars
from tests.instep.runs import GRAD_NORM, LAYOUTS, NO_EVALUATION, Case, Layout, Result, Strike, check
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY

pytestmark = pytest.mark.slow

DP4, TP2 = LAYOUTS[0], LAYOUTS[2]


@pytest.mark.parametrize("saving", some("progress", ["", ASYNCHRONOUSLY], 1))
def test_the_progress_log_is_that_of_one_job_whose_workers_die(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, saving: str
) -> None:
    """Megatron computes its cumulative throughput since the start of the job with as many GPUs: it must find it."""
    saved = tmp_path / "saved"
    flags = ("--log-progress", "--save", str(saved), "--save-interval", "2", *saving.split())
    case = replace(Case(DP4, (Strike(0, 0, 3, "backward"), Strike(3, 0, 5, "forward")), restarts=1), flags=flags)
    result = case.patient("6-:3").run(forkserver, tmp_path / "out")  # with the newcomer from then on
    check(result, reference(case))
    lines = [line.split("\t")[2:5] for line in (saved / "progress.txt").read_text().splitlines()]
    assert {gpus for gpus, *_ in lines} == {"# GPUs: 4"}
    assert [what for _, what, *_ in lines].count("Starting job") == 1
    begun = {True: "Saving async checkpoint", False: "Saved checkpoint"}[bool(saving)]
    saves = [iteration for _, what, *more in lines if what == begun for iteration in more]
    assert saves == [f"Iteration: {iteration}" for iteration in (2, 4, 6, 8)], lines


@dataclass(frozen=True)
class Log:
    """What a run has told, by where."""

    console: Numbers
    board: Numbers
    wandb: Numbers


def tell(server: ForkServer, case: Case, out: Path) -> tuple[Result, Log]:
    board = ["--tensorboard-dir", str(out / "board"), "--tensorboard-log-interval", "1"]
    wandb = ["--wandb-project", "tests", "--wandb-exp-name", "log", "--wandb-save-dir", str(out / "wandb")]
    case = replace(case, flags=(*board, *wandb)).throughout("instruments.with_wandb")
    if case.restarts:
        case = case.patient(f"{case.strikes[-1].iteration + 3}-:{case.layout.replicas}")
    result = case.run(server, out)
    return result, Log(console(out.glob("worker-*.log")), scalars(out / "board"), lines(out / "wandb"))


def lines(folder: Path) -> Numbers:
    """What the stand-in for W&B was told."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(folder.glob("*.jsonl")):
        for step, values in map(json.loads, file.read_text().splitlines()):
            for name, value in values.items():
                found[name][step] = value
    return dict(found)


EXPERTS = Layout("experts-dp3", 3, inner_ranks=2, flags="--num-experts 4 --expert-model-parallel-size 2 "
                 "--moe-router-topk 2 "
                 "--disable-bias-linear --moe-router-load-balancing-type aux_loss seq_aux_loss "
                 "--moe-aux-loss-coeff 1e-2 1e-2 --moe-z-loss-coeff 1e-3 --moe-per-layer-logging")  # fmt: skip
PREDICTION = Layout(
    "mtp-pp2-dp3", 3, pipeline=2, flags="--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion"
)
LAST = Strike(2, 1, 4, "optimizer")
"""Of TP2: the last rank, which prints and writes, when the step is committed and nobody has told of it."""
CASES = [
    Case(TP2, (LAST,), 23, restarts=1, model=("--log-interval", "7")),
    Case(TP2, (LAST, Strike(0, 0, 9, "backward")), 23, restarts=2, model=("--log-interval", "100")),
    Case(TP2, (LAST, Strike(1, 1, 6, "reduce-scatter")), 10),
    Case(EXPERTS, (Strike(2, 1, 3, "backward"), Strike(1, 0, 5, "agree")), 7),
    Case(EXPERTS, (Strike(2, 1, 3, "optimizer"),), 23, restarts=1, model=("--log-interval", "7")),
    Case(PREDICTION, (Strike(2, 1, 3, "optimizer"), Strike(0, 0, 5, "backward")), 7),
    Case(PREDICTION, (Strike(2, 1, 3, "forward"),), 23, restarts=1, model=("--log-interval", "7")),
]


@pytest.mark.parametrize("case", some("log", CASES, 2), ids=lambda case: f"{case}{''.join(case.model[1:])}")
def test_every_number_that_is_logged_is_that_of_the_run_without_deaths(
    forkserver: ForkServer, tmp_path: Path, case: Case
) -> None:
    case = replace(case, model=(*case.model, *NO_EVALUATION))
    undisturbed, expected = tell(forkserver, replace(case, strikes=(), restarts=0), tmp_path / "undisturbed")
    assert undisturbed.ended.ok, undisturbed.told()
    result, log = tell(forkserver, case, tmp_path / "broken")
    check(result, undisturbed)
    assert case.restarts == 0 or result.replicas[-1] == case.layout.replicas, result.replicas
    assert len(log.console) > 4
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        assert differences(ours, theirs, GRAD_NORM) == [], str(case)


NORMS = ("--log-params-norm", "--log-num-zeros-in-grad", "--check-weight-hash-across-dp-replicas-interval", "2")
SHARDED = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
DEATHS = (Strike(3, 0, 3, "backward"), Strike(0, 0, 5, "optimizer"))
NORM_CASES = [
    (Case(Layout("sharded-bf16", 4, flags=f"{SHARDED} --bf16"), DEATHS, 7), 300.0),
    (Case(Layout("sharded-bf16-overlap", 4, flags=f"{SHARDED} --bf16 --overlap-grad-reduce --overlap-param-gather"),
          (Strike(3, 0, 3, "update", visit=2), Strike(2, 0, 5, "norm")), 7), 300.0),
    (Case(Layout("sharded", 4, flags=SHARDED), DEATHS, 7), 1.0),
    (Case(DP4, DEATHS, 7), 1.0),
    (Case(TP2, (Strike(2, 1, 3, "backward"),), 30, restarts=1), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("case", "near"), some("norms", NORM_CASES, 1), ids=str)
def test_norms_of_parameters_and_their_hashes_are_taken_among_who_lives(
    forkserver: ForkServer, tmp_path: Path, case: Case, near: float
) -> None:
    case = replace(case, model=(*NORMS, *NO_EVALUATION))
    undisturbed, expected = tell(forkserver, replace(case, strikes=(), restarts=0), tmp_path / "undisturbed")
    assert undisturbed.ended.ok, undisturbed.told()
    result, log = tell(forkserver, case, tmp_path / "broken")
    check(result, undisturbed, near)
    assert {"params norm", "num zeros"} <= set(log.console)
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        for name in [name for name in ours if "zeros" in name]:  # another order of additions, another exact zero
            mine, its = ours.pop(name), theirs.pop(name)
            assert mine.keys() == its.keys()
            assert all(abs(mine[at] - its[at]) <= 3 for at in mine), (mine, its)
        assert differences(ours, theirs, near * GRAD_NORM) == [], str(case)
