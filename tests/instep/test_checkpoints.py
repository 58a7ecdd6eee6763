"""A checkpoint written after a death is like any other: stock Megatron resumes from it, on any number of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_FENCED, EXIT_SAME_FAULT
from recover_megatron.run_log.steps import read_steps
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, losses

pytestmark = pytest.mark.slow

TRAINING = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "8"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("workers", "flags", "inject", "resuming"),
    [
        (4, [], "1@3:forward", 2),
        (4, [], "0@4:checkpoint#3", 4),
        (4, ASYNCHRONOUSLY.split(), "2@2:backward", 2),
        (6, [*PIPELINE, "--global-batch-size", "24"], "1@3:reduce-scatter", 2),
        (4, ["--data-parallel-random-init"], "1@3:forward", 4),
    ],
    ids=["two-of-three", "while-it-is-written", "asynchronous", "pipeline", "random-states"],
)
def test_stock_megatron_resumes_where_a_run_with_a_death_saved(
    forkserver: ForkServer, tmp_path: Path, workers: int, flags: list[str], inject: str, resuming: int
) -> None:
    def train(name: str, count: int, *more: str) -> Path:
        out = tmp_path / name
        run = forkserver.run(count, [*TRAINING, *flags, *more], out, losses=out / "losses.jsonl", timeout=240)
        assert [code for code in run.codes if code not in (0, -9)] == [], run.tail()
        assert run.codes.count(-9) == int("--recover-inject" in more), run.codes
        return out

    def saving(name: str) -> list[str]:
        return ["--save", str(tmp_path / name / "checkpoints"), "--save-interval", "4"]

    recover = ["--recover", "--recover-log-dir"]
    undisturbed = train("undisturbed", workers, *recover, str(tmp_path / "undisturbed"))
    broken = train("broken", workers, *recover, str(tmp_path / "broken"), "--recover-inject", inject, *saving("broken"))
    expected = [step.loss for step in read_steps(undisturbed / "steps.jsonl")]
    assert [step.loss for step in read_steps(broken / "steps.jsonl")] == pytest.approx(expected, rel=1e-5)
    resumed = train("resumed", resuming, "--load", str(broken / "checkpoints"), "--ckpt-step", "4")
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
    checkpoints = tmp_path / "checkpoints"
    saving = [*flags, "--save", str(checkpoints), "--save-interval", "4"]
    recover = ["--recover", "--recover-log-dir", str(tmp_path / "run"), *QUICK]
    script = [*altered("faulty.frozen", checkpoints), *TRAINING]
    run = forkserver.run(4, [*script, *saving, *recover], tmp_path / "run", timeout=240)
    assert run.codes == [EXIT_FENCED, 0, 0, 0], run.tail()
    assert "Traceback" not in run.logs[0].read_text(), run.logs[0].read_text()
    expected = [step.loss for step in read_steps(tmp_path / "run" / "steps.jsonl")]
    assert sorted(path.name for path in checkpoints.iterdir() if path.name.startswith("iter_")) == [
        "iter_0000004",
        "iter_0000008",
    ]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "8"
    resumed = tmp_path / "resumed"
    loading = [*flags[:3], "--load", str(checkpoints), "--ckpt-step", "4", "--exit-on-missing-checkpoint"]
    run = forkserver.run(2, [*TRAINING, *loading], resumed, losses=resumed / "losses.jsonl", timeout=240)
    assert run.ok, run.tail()
    assert [step["loss"] for step in losses(resumed / "losses.jsonl")] == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.parametrize("how", ["", ASYNCHRONOUSLY], ids=["at once", "asynchronously"])
@pytest.mark.parametrize("unable", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_who_cannot_write_its_part_ends_and_the_others_write_again(
    forkserver: ForkServer, tmp_path: Path, unable: list[int], how: str
) -> None:
    """If nobody can, the run ends with the cause."""
    checkpoints = tmp_path / "checkpoints"
    script = [*altered("faulty.limited", ",".join(map(str, unable)), 4), *TRAINING]
    flags = ["--save", str(checkpoints), "--save-interval", "2", *how.split()]
    recover = ["--recover", "--recover-log-dir", str(tmp_path / "run")]
    run = forkserver.run(4, [*script, *flags, *recover], tmp_path / "run", timeout=240)
    complete = sorted(path.name for path in checkpoints.glob("iter_*"))
    cause = (
        f"the checkpoint of iteration 4 cannot be written to {checkpoints}: worker {{}}: OSError: [Errno 27] File too"
    )
    if len(unable) == 4:
        assert set(run.codes) == {EXIT_SAME_FAULT}, run.tail()
        events = [json.loads(line) for line in (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()]
        (told,) = [event["reason"] for event in events if event["event"] == "stop"]
        assert any(cause.format(worker) in told for worker in unable), told
        assert complete == ["iter_0000002"]
    else:
        assert run.codes == [int(worker in unable) for worker in range(4)], run.tail()
        for worker in unable:
            assert cause.format(worker) in run.logs[worker].read_text()
        assert complete == [f"iter_{iteration:07d}" for iteration in (2, 4, 6, 8)]


def test_loaders_killed_while_a_checkpoint_is_written_cost_their_workers_and_not_the_checkpoint(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    script = [*altered("faulty.lost_loaders", "0,2"), *TRAINING]
    flags = ["--num-workers", "2", "--save", str(tmp_path / "checkpoints"), "--save-interval", "4"]
    recover = ["--recover", "--recover-log-dir", str(tmp_path / "run")]
    run = forkserver.run(4, [*script, *flags, *recover], tmp_path / "run", timeout=240)
    assert run.codes == [1, 0, 1, 0], run.tail()
    for worker in (0, 2):
        said = run.logs[worker].read_text()
        assert "which reads data for this worker, was killed by signal 9" in said, said
        assert "cannot be written" not in said, said
    complete = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert complete == ["iter_0000004", "iter_0000008"]
