"""A checkpoint written after a death is like any other: stock Megatron resumes from it, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.membership.errors import EXIT_FENCED
from recover_megatron.run_log.steps import read_steps
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
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
    script = [str(Path(__file__).with_name("frozen.py")), str(checkpoints)]
    saving = [*flags, "--save", str(checkpoints), "--save-interval", "4"]
    recover = ["--recover", "--recover-log-dir", str(tmp_path / "run"), *QUICK]
    run = forkserver.run(4, [*script, *TRAINING[1:], *saving, *recover], tmp_path / "run", timeout=240)
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
