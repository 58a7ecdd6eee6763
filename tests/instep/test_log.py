"""What Megatron tells of a run, on the console, TensorBoard, W&B, in its progress log, whoever is left to tell it.

And a run whose log files cannot be written is the run without failures all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.processes import mount
from tests.instep.conftest import Runs
from tests.instep.logged import Numbers, console, differences, scalars
from tests.instep.runs import (
    GRAD_NORM,
    LAYOUTS,
    NO_EVALUATION,
    PARAMETERS,
    ROPE,
    Case,
    Layout,
    Result,
    Strike,
    check,
    distance,
)
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY

pytestmark = pytest.mark.slow

DP4, TP2 = LAYOUTS[0], LAYOUTS[2]


@pytest.mark.parametrize("saving", some("progress", ["", ASYNCHRONOUSLY], 1))
def test_the_progress_log_is_that_of_one_job_whose_workers_die(runs: Runs, saving: str) -> None:
    """Megatron computes its cumulative throughput since the start of the job with as many GPUs: it must find it."""
    saved = runs.out / "saved"
    flags = ("--log-progress", "--save", str(saved), "--save-interval", "2", *saving.split())
    case = Case(DP4, (Strike(0, 0, 3, "backward"), Strike(3, 0, 5, "forward")), restarts=1, flags=flags)
    runs.check(case.patient("6-:3"))  # with the newcomer from then on
    lines = [line.split("\t")[2:5] for line in (saved / "progress.txt").read_text().splitlines()]
    assert {gpus for gpus, *_ in lines} == {"# GPUs: 4"}
    assert [what for _, what, *_ in lines].count("Starting job") == 1
    begun = {True: "Saving async checkpoint", False: "Saved checkpoint"}[bool(saving)]
    saves = [iteration for _, what, *more in lines if what == begun for iteration in more]
    assert saves == [f"Iteration: {iteration}" for iteration in (2, 4, 6, 8)], lines


def test_a_progress_log_on_a_full_disk_ends_nobody(runs: Runs) -> None:
    """Not at the start, where the job's own line is written, nor at a checkpoint, where all of them are read."""
    saved, disk = runs.out / "saved", runs.out / "disk"
    saved.mkdir(parents=True)
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=4k", "none", disk)
    try:
        (disk / "of-another-job").write_bytes(bytes(4096))
        (saved / "progress.txt").symlink_to(disk / "progress.txt")
        flags = ("--log-progress", "--save", str(saved), "--save-interval", "2")
        result = runs(Case(DP4, (Strike(0, 0, 3, "backward"),), flags=flags))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert result.ended.codes == [-9, 0, 0, 0], result.told()
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "8"
    warning = f"recover: warning: {saved}/progress.txt cannot be written (No space left on device)"
    # Worker 0 has the job's own line; its successor has none for a checkpoint, since that line is missing.
    assert result.log(0).count(warning) == 1, result.told()
    for worker in (0, 1):
        assert result.log(worker).count("cannot read progress.txt; checkpoints are not logged") == 1, result.told()


@dataclass(frozen=True)
class Log:
    """What a run has told, by where."""

    console: Numbers
    board: Numbers
    wandb: Numbers


def tell(runs: Runs, case: Case, folder: str) -> tuple[Result, Log]:
    out = runs.out / folder
    board = ["--tensorboard-dir", str(out / "board"), "--tensorboard-log-interval", "1"]
    wandb = ["--wandb-project", "tests", "--wandb-exp-name", "log", "--wandb-save-dir", str(out / "wandb")]
    case = replace(case, flags=(*board, *wandb)).throughout("instruments.with_wandb")
    if case.restarts:
        case = case.patient(f"{case.strikes[-1].iteration + 3}-:{case.layout.replicas}")
    result = runs(case, folder)
    return result, Log(console(out.glob("worker-*.log")), scalars(out / "board"), lines(out / "wandb"))


def tell_both(runs: Runs, case: Case, near: float = 1.0) -> tuple[Result, Log, Log]:
    """The case's run, after ``check``, what it has told, and what the run without deaths has."""
    undisturbed, expected = tell(runs, replace(case, strikes=(), restarts=0), "undisturbed")
    assert undisturbed.ended.ok, undisturbed.told()
    result, log = tell(runs, case, "broken")
    check(result, undisturbed, near)
    return result, log, expected


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
PREDICTION = Layout("mtp-pp2-dp3", 3, pipeline=2, flags=f"--mtp-num-layers 1 {ROPE}")
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
def test_every_number_that_is_logged_is_that_of_the_run_without_deaths(runs: Runs, case: Case) -> None:
    result, log, expected = tell_both(runs, replace(case, model=(*case.model, *NO_EVALUATION)))
    assert case.restarts == 0 or result.replicas[-1] == case.layout.replicas, result.replicas
    assert len(log.console) > 4
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        assert differences(ours, theirs, GRAD_NORM) == [], str(case)


NORMS = ("--log-params-norm", "--log-num-zeros-in-grad", "--check-weight-hash-across-dp-replicas-interval", "2")
SPREAD = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --use-distributed-optimizer"
DEATHS = (Strike(3, 0, 3, "backward"), Strike(0, 0, 5, "optimizer"))
NORM_CASES = [
    (Case(Layout("sharded-bf16", 4, flags=f"{SPREAD} --bf16"), DEATHS, 7), 300.0),
    (Case(Layout("sharded-bf16-overlap", 4, flags=f"{SPREAD} --bf16 --overlap-grad-reduce --overlap-param-gather"),
          (Strike(3, 0, 3, "update", visit=2), Strike(2, 0, 5, "norm")), 7), 300.0),
    (Case(Layout("sharded", 4, flags=SPREAD), DEATHS, 7), 1.0),
    (Case(DP4, DEATHS, 7), 1.0),
    (Case(TP2, (Strike(2, 1, 3, "backward"),), 30, restarts=1), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("case", "near"), some("norms", NORM_CASES, 1), ids=str)
def test_norms_of_parameters_and_their_hashes_are_taken_among_who_lives(runs: Runs, case: Case, near: float) -> None:
    _, log, expected = tell_both(runs, replace(case, model=(*NORMS, *NO_EVALUATION)), near)
    assert {"params norm", "num zeros"} <= set(log.console)
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        assert differences(ours, theirs, near * GRAD_NORM) == [], str(case)


def test_the_norm_is_that_of_the_update_also_where_parameters_come_while_the_next_step_computes(runs: Runs) -> None:
    flags = ("--log-params-norm", *NO_EVALUATION)
    overlap = f"{SPREAD} --overlap-grad-reduce --overlap-param-gather"
    waiting, expected = tell(runs, Case(Layout("sharded", 4, flags=SPREAD), model=flags), "waiting")
    result, log = tell(runs, Case(Layout("sharded-overlap", 4, flags=overlap), DEATHS, model=flags), "overlapping")
    check(result, waiting)
    assert len(log.console["params norm"]) == 8
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        assert differences(ours, theirs, GRAD_NORM) == []


ALL = (
    "--log-throughput --log-timers-to-tensorboard --timing-log-level 2 --log-validation-ppl-to-tensorboard "
    "--log-world-size-to-tensorboard --log-memory-to-tensorboard --log-params-norm "
    "--log-energy --eval-interval 2 --eval-iters 1"
)
"""All that Megatron 0.19.2 can log of a training but for what has a test of its own."""
EVERYTHING = Layout("everything-pp2-dp3", 3, pipeline=2, flags="--num-experts 4 --moe-router-topk 2 "
                    "--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
                    f"--moe-z-loss-coeff 1e-3 --moe-per-layer-logging --mtp-num-layers 1 {ROPE}")  # fmt: skip
ALL_CASES = [
    Case(EVERYTHING, (Strike(2, 1, 3, "optimizer"), Strike(0, 0, 5, "backward")), 7),
    *(
        Case(EVERYTHING, (Strike(2, 1, 3, "backward"),), 15, restarts=1, model=("--log-interval", n))
        for n in ("1", "7")
    ),
    Case(EVERYTHING, (Strike(2, 1, 3, "agree"),), 15, restarts=1, model=("--log-interval", "100")),
]


@pytest.mark.parametrize("case", some("all logs", ALL_CASES, 1), ids=lambda case: f"{case}{''.join(case.model[1:])}")
def test_everything_is_told_in_the_iterations_of_the_run_without_deaths_and_the_throughput_is_the_launchs(
    runs: Runs, case: Case
) -> None:
    result, log, expected = tell_both(runs, replace(case, model=(*case.model, *ALL.split())))
    assert case.restarts == 0 or result.replicas[-1] == case.layout.replicas, result.replicas
    for ours, theirs in ((log.console, expected.console), (log.board, expected.board), (log.wandb, expected.wandb)):
        assert differences(ours, theirs, GRAD_NORM) == [], str(case)
    # Operations of an iteration per GPU of the launch, in 1e12; of the first one Megatron tells no seconds.
    work = [
        rate * board["iteration-time"][at]
        for board in (log.board, expected.board)
        for at, rate in board["throughput"].items()
        if at in board.get("iteration-time", {})
    ]
    every = int(case.model[-1]) if case.model else 1
    assert len(work) == 2 * (case.iterations // every - (every == 1))
    assert work == pytest.approx(work[:1] * len(work), rel=1e-5)


def test_replicas_spares_epochs_and_recoveries_are_told_even_when_the_worker_that_tells_them_dies(runs: Runs) -> None:
    """The last rank writes: first worker 3, then worker 2, which opens a writer of its own."""
    board = runs.out / "board"
    flags = ("--tensorboard-dir", str(board), "--tensorboard-queue-size", "1", "--tensorboard-log-interval", "1")
    case = Case(LAYOUTS[0], (Strike(1, 0, 3, "backward"), Strike(3, 0, 6, "forward")), flags=flags)
    result = runs.check(case)
    told = scalars(board)
    assert len(list(board.glob("events.out.tfevents.*"))) == 2
    replicas = {step.iteration: step.replicas for step in result.steps}
    assert told["recover/replicas"] == replicas, result.told()
    assert told["recover/spares"] == dict.fromkeys(replicas, 0)
    assert told["recover/epoch"] == {step.iteration: step.epoch for step in result.steps}
    assert told["recover/workers_live"] == replicas
    assert told["recover/replicas_of_launch"] == dict.fromkeys(replicas, 4)
    for name in ("recovery_seconds", "recoveries", "microbatches_rerun"):
        assert {iteration for iteration, value in told[f"recover/{name}"].items() if value > 0} == {3, 6}, name
    assert set(told["recover/recovery_seconds/rerun"]) == {3, 6}
    goodput = told["recover/goodput_ratio"]
    assert goodput[1] == 1 > goodput[4] == 0.75 > goodput[7] == 0.5
    assert all(goodput[at] < goodput[at + 1] for at in (3, 6))
    losses = {step.iteration: step.loss for step in result.steps}
    assert told["lm loss"] == pytest.approx({i: losses[i] for i in told["lm loss"]}, rel=1e-6)
    assert set(told["lm loss"]) == set(losses)


FILES = ("steps.jsonl", "events.jsonl", "events-0.jsonl")


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Every write fails: there is no space left."""
    for name in FILES:
        (folder / name).symlink_to("/dev/full")
    yield


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Every write blocks for as long as the run goes on."""
    descriptors = []
    for name in FILES:
        os.mkfifo(folder / name)
        descriptors.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptors[-1], bytes(4096))
    yield
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("disk", [full, frozen], ids=lambda disk: disk.__name__)
def test_a_full_or_frozen_log_disk_changes_nothing_and_neither_does_a_death_of_who_writes(
    runs: Runs, disk: contextlib.AbstractContextManager[None]
) -> None:
    case = Case(LAYOUTS[0], (Strike(0, 0, 3, "backward"),))
    with disk(runs.out):  # type: ignore[operator]
        result = runs(case)
    assert result.ended.codes == [-9, 0, 0, 0], result.told()
    theirs = runs.reference(case).left[0]["parameters"]
    assert sorted(result.left) == [1, 2, 3]
    for left in result.left.values():
        assert distance(left["parameters"], theirs) < PARAMETERS
    said = "".join(result.log(worker) for worker in (0, 1))
    for name in FILES[:2] if disk is full else ():
        warning = f"recover: warning: {runs.out / name} cannot be written (No space left on device)"
        assert said.count(warning) == 2, said  # by each who wrote
