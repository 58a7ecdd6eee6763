"""A checkpoint written after a death is like any other: stock Megatron resumes from it, on any number of workers.

Whoever comes or goes while one is written, nobody waits for ever, and none is missing.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recover_megatron.membership.records import EXIT_FENCED, EXIT_SAME_FAULT
from recover_megatron.run_log.steps import read_steps
from tests.harness.forkserver import ForkServer, Run
from tests.harness.patience import patient
from tests.instep.altered import altered
from tests.instep.conftest import Runs
from tests.instep.logged import checkpoint, saved_arguments
from tests.instep.runs import (
    ADAM,
    DEEPSEEK,
    LAYOUTS,
    PARAMETERS,
    QUICK_TO_SEE_A_HANG,
    Case,
    Result,
    Strike,
    check_rows,
    check_steps,
)
from tests.instep.test_models import LLAMA, QWEN
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, losses

pytestmark = pytest.mark.slow

TRAINING = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "8"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
CONTEXT = ["--context-parallel-size", "2"]
DP4 = LAYOUTS[0]


SMALL = ["--global-batch-size", "24"]
ALIKE = "--dist-ckpt-optim-fully-reshardable".split()
LATENT_EXPERTS = [*DEEPSEEK.replace("--mtp-num-layers 1 ", "").split(), "--moe-layer-freq", "[0]*1+[1]*3"]
SPREAD = ["--expert-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("workers", "flags", "inject", "resuming", "sizes"),
    [
        (4, [], "1@3:forward", 2, []),
        (4, [], "0@4:checkpoint#3", 4, []),
        (4, ASYNCHRONOUSLY.split(), "2@2:backward", 2, []),
        (6, SMALL, "1@3:reduce-scatter", 2, PIPELINE),
        (4, ["--data-parallel-random-init"], "1@3:forward", 4, []),
        (6, SMALL, "3@3:backward", 2, (CONTEXT, [])),
        (8, LLAMA.split(), "6@4:checkpoint#3", 2, ([*CONTEXT, *PIPELINE], PIPELINE)),
        (4, [*LLAMA.split(), "--use-distributed-optimizer", *ALIKE], "1@2:update", 4, (PIPELINE, CONTEXT)),
        (4, LATENT_EXPERTS, "2@3:agree", 2, (PIPELINE, [])),
        (4, LATENT_EXPERTS, "3@3:agree", 2, (CONTEXT, PIPELINE)),
        (6, [*SMALL, *QWEN.split(), "--use-distributed-optimizer", *ALIKE], "3@3:norm", 2, (SPREAD, CONTEXT)),
    ],
    ids=[
        "two-of-three", "while-it-is-written", "asynchronous", "pipeline", "random-states", "context to one",
        "context and stages to stages", "stages to context", "latent stages to one", "latent context to stages",
        "spread experts to context",
    ],
)  # fmt: skip
def test_stock_megatron_resumes_where_a_run_with_a_death_saved(
    forkserver: ForkServer,
    tmp_path: Path,
    workers: int,
    flags: list[str],
    inject: str,
    resuming: int,
    sizes: list[str] | tuple[list[str], list[str]],
) -> None:
    """``sizes``: of a replica; two: of the run that saved, and of the one that resumes."""
    launched, resumed_with = sizes if isinstance(sizes, tuple) else (sizes, sizes)

    def train(name: str, count: int, *more: str) -> Path:
        out = tmp_path / name
        run = forkserver.run(count, [*TRAINING, *flags, *more], out, losses=out / "losses.jsonl", timeout=240)
        assert [code for code in run.codes if code not in (0, -9)] == [], run.tail()
        assert run.codes.count(-9) == int("--recover-inject" in more), run.codes
        return out

    recover, saved = [*launched, "--recover", "--recover-log-dir"], str(tmp_path / "checkpoints")
    undisturbed = train("undisturbed", workers, *recover, str(tmp_path / "undisturbed"))
    broken = train("broken", workers, *recover, str(tmp_path / "broken"), "--recover-inject", inject,
                   "--save", saved, "--save-interval", "4")  # fmt: skip
    expected = [step.loss for step in read_steps(undisturbed / "steps.jsonl")]
    assert [step.loss for step in read_steps(broken / "steps.jsonl")] == pytest.approx(expected, rel=1e-5)
    resumed = train("resumed", resuming, *resumed_with, "--load", saved, "--ckpt-step", "4")
    assert [step["loss"] for step in losses(resumed / "losses.jsonl")] == pytest.approx(expected[4:], rel=1e-5)


QUICK = f"--recover-heartbeat-interval 0.5 --recover-heartbeat-timeout {patient(5):g}".split()
QUICK += ["--recover-hang-timeout", f"{patient(20):g}"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--ckpt-format", "torch"],
        ["--ckpt-format", "torch_dist"],
        ["--ckpt-format", "torch_dist", "--use-distributed-optimizer"],
        ["--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--ckpt-assume-constant-structure"],
    ],
    ids=["torch", "torch_dist", "sharded", "constant structure"],
)
def test_who_was_put_out_in_the_middle_of_a_checkpoint_and_wakes_later_spoils_nothing(
    forkserver: ForkServer, tmp_path: Path, flags: list[str]
) -> None:
    """Worker 0 is stopped while it writes, put out, and goes on writing when the others have finished theirs."""
    checkpoints, resumed = tmp_path / "checkpoints", tmp_path / "resumed"
    script = [*altered("unwritten.frozen", checkpoints), *TRAINING]
    run = write(forkserver, tmp_path, script, *flags, "--save-interval", "4", *QUICK)
    assert run.codes == [EXIT_FENCED, 0, 0, 0], run.tail()
    assert "Traceback" not in run.logs[0].read_text(), run.logs[0].read_text()
    expected = [step.loss for step in read_steps(tmp_path / "run" / "steps.jsonl")]
    assert complete(tmp_path) == [4, 8]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "8"
    loading = [*flags[:3], "--load", str(checkpoints), "--ckpt-step", "4", "--exit-on-missing-checkpoint"]
    run = forkserver.run(2, [*TRAINING, *loading], resumed, losses=resumed / "losses.jsonl", timeout=240)
    assert run.ok, run.tail()
    assert [step["loss"] for step in losses(resumed / "losses.jsonl")] == pytest.approx(expected[4:], rel=1e-5)


def write(server: ForkServer, folder: Path, script: list[str], *flags: str) -> Run:
    """Four workers that write checkpoints."""
    recover = ["--save", str(folder / "checkpoints"), *flags, "--recover", "--recover-log-dir", str(folder / "run")]
    return server.run(4, [*script, *recover], folder / "run", timeout=240)


def complete(folder: Path) -> list[int]:
    """The iterations of the checkpoints that have got their names."""
    return sorted(int(path.name.removeprefix("iter_")) for path in (folder / "checkpoints").glob("iter_*"))


@pytest.mark.parametrize("how", ["", ASYNCHRONOUSLY], ids=["at once", "asynchronously"])
@pytest.mark.parametrize("unable", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_who_cannot_write_its_part_ends_and_the_others_write_again(
    forkserver: ForkServer, tmp_path: Path, unable: list[int], how: str
) -> None:
    """If nobody can, the run ends with the cause."""
    script = [*altered("unwritten.limited", ",".join(map(str, unable)), 4), *TRAINING]
    run = write(forkserver, tmp_path, script, "--save-interval", "2", *how.split())
    cause = (
        f"the checkpoint of iteration 4 cannot be written to {tmp_path / 'checkpoints'}: worker {{}}: OSError: [Errno "
        "27] File too"
    )
    if len(unable) == 4:
        assert set(run.codes) == {EXIT_SAME_FAULT}, run.tail()
        events = [json.loads(line) for line in (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()]
        (told,) = [event["reason"] for event in events if event["event"] == "stop"]
        assert any(cause.format(worker) in told for worker in unable), told
        assert complete(tmp_path) == [2]
    else:
        assert run.codes == [int(worker in unable) for worker in range(4)], run.tail()
        for worker in unable:
            assert cause.format(worker) in run.logs[worker].read_text()
        assert complete(tmp_path) == [2, 4, 6, 8]


def test_loaders_killed_while_a_checkpoint_is_written_cost_their_workers_and_not_the_checkpoint(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    script = [*altered("unwritten.lost_loaders", "0,2"), *TRAINING]
    run = write(forkserver, tmp_path, script, "--num-workers", "2", "--save-interval", "4")
    assert run.codes == [1, 0, 1, 0], run.tail()
    for worker in (0, 2):
        said = run.logs[worker].read_text()
        assert " of this worker was killed by signal 9" in said, said
        assert "cannot be written" not in said, said
    assert complete(tmp_path) == [4, 8]


def saving(case: Case, out: Path, interval: int) -> Case:
    saved = str(out / "saved")
    return case.with_flags("--save", saved, "--save-interval", str(interval), *ASYNCHRONOUSLY.split())


def held(case: Case, out: Path, pattern: str) -> Case:
    """With every checkpoint held up until the coordinator's events have ``pattern``."""
    return case.altered("unwritten.held_writers", out / "events-0.jsonl", pattern)


def abandoned(result: Result) -> bool:
    return '"event":"checkpoint abandoned"' in (result.out / "events.jsonl").read_text()


def check_saved(result: Result, iterations: list[int]) -> dict[str, torch.Tensor]:
    """That these are complete and no others, and the last one is told; its tensors."""
    saved = result.out / "saved"
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_{n:07d}" for n in iterations], result.told()
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(iterations[-1])
    return checkpoint(saved, iterations[-1])


def test_a_replica_that_comes_while_a_checkpoint_is_written_costs_neither_that_nor_a_hang(runs: Runs) -> None:
    """It comes while all but one look whether that of iteration 5 is written, and it is when the newcomer is ready."""
    case = Case(DP4, (Strike(0, 0, 2, "backward"),), 12, restarts=1).patient(f"6-:{DP4.replicas}")
    result = runs.check(saving(held(case, runs.out, "is a spare, and ready"), runs.out, 5), replicas=DP4.replicas)
    assert not abandoned(result)
    check_saved(result, [5, 10, 12])


@pytest.mark.parametrize("how", ["enter", "told"])
def test_the_last_checkpoint_is_saved_again_by_who_is_left_if_a_writer_dies_before_it_is_complete(
    runs: Runs, how: str
) -> None:
    case = Case(DP4, ())
    expected = runs(saving(case, runs.out / "whole", 8), "whole")
    case = replace(case, doomed=(1 if how == "enter" else 0,)).altered("unwritten.deadly_wait", how)
    result = runs.check(saving(case, runs.out, 8))
    assert abandoned(result)
    mine, its = check_saved(result, [8]), check_saved(expected, [8])
    assert mine.keys() == its.keys()
    assert all(torch.allclose(mine[name].double(), its[name].double(), atol=PARAMETERS) for name in mine)


def test_what_is_saved_again_counts_no_samples_that_were_left_out_since(runs: Runs) -> None:
    """Iteration 8 is left out: it makes no step, but its samples count as consumed."""
    case = Case(DP4, doomed=(1,), model=("--iterations-to-skip", "8"))
    result = runs(saving(case.altered("unwritten.deadly_wait", "enter"), runs.out, 7))
    assert list(result.ended.codes) == [0, -9, 0, 0], result.told()
    assert abandoned(result)
    check_saved(result, [7, 8])
    consumed = {n: saved_arguments(runs.out / "saved", n).consumed_train_samples for n in (7, 8)}
    assert consumed == {n: n * DP4.samples for n in (7, 8)}


def test_a_spare_that_comes_while_the_last_checkpoint_is_written_does_not_cost_it(runs: Runs) -> None:
    case = Case(DP4, (Strike(0, 0, 8, "backward"),), restarts=1)
    result = runs.check(saving(held(case, runs.out, "is admitted"), runs.out, 8))
    assert not abandoned(result)
    check_saved(result, [8])


@pytest.mark.parametrize("how", ["write", "copy", "stop"])
def test_a_worker_ends_with_its_writer_and_the_others_save_again(runs: Runs, how: str) -> None:
    case = Case(DP4).with_flags(*QUICK_TO_SEE_A_HANG)
    result = runs(saving(case.altered("unwritten.deadly_writers", how), runs.out, 8))
    assert list(result.ended.codes) == [0, 1, 0, 0], result.told()
    told = "WriterStopped: process .* has been stopped" if how == "stop" else "WriterKilled: the process .* by signal 9"
    assert re.search(told, result.log(1)), result.told()
    check_steps(result, runs.reference(case))
    check_saved(result, [8])


def test_a_part_that_cannot_be_written_in_the_background_ends_the_run_with_the_reason(runs: Runs) -> None:
    result = runs(saving(Case(DP4).altered("unwritten.deadly_writers", "fail"), runs.out, 8))
    assert set(result.ended.codes) == {EXIT_SAME_FAULT}, result.told()
    (stop,) = [event for event in result.events if event["event"] == "stop"]
    assert "the process that writes checkpoints for this worker ended with exit code 1" in str(stop["reason"])
    assert not list((runs.out / "saved").glob("iter_*"))
    assert not (runs.out / "saved" / "latest_checkpointed_iteration.txt").exists()


def test_a_worker_without_a_part_in_a_checkpoint_is_waited_for_by_nobody(runs: Runs) -> None:
    """Rank 0 writes everything.  That was worker 1, until a newcomer stood before it."""
    case = Case(DP4, (Strike(0, 0, 2, "backward"),), 8, restarts=1).patient(f"5-:{DP4.replicas}")
    result = runs.check(saving(case.with_flags("--no-ckpt-fully-parallel-save"), runs.out, 4))
    assert sorted(result.grid.items()) == [(0, [4]), (1, [1]), (2, [2]), (3, [3])]
    check_saved(result, [4, 8])


SIZES = "num-layers,hidden-size,num-attention-heads,max-position-embeddings,seq-length"


def test_a_run_whose_model_is_that_of_its_checkpoint_survives_and_takes_a_newcomer(runs: Runs) -> None:
    """--use-checkpoint-args: the sizes of the model are in the checkpoint alone, for who comes later, too."""
    case, saved = Case(DP4, iterations=12, model=ADAM), runs.out / "saved"
    whole = runs(case.with_flags("--save", str(saved), "--save-interval", "4"), "whole")
    assert whole.ended.ok, whole.told()
    load = ("--use-checkpoint-args", "--load", str(saved), "--ckpt-step", "4", "--exit-on-missing-checkpoint")
    struck = replace(case, strikes=(Strike(1, 0, 6, "backward"),), restarts=1).patient(f"9-:{DP4.replicas}")
    result = runs(struck.altered("instruments.without", SIZES).with_flags(*load))
    assert list(result.ended.codes) == [0, -9, 0, 0], result.told()
    check_rows(result.steps, whole.steps[4:], told=str(case))
    assert result.replicas[-1] == DP4.replicas
