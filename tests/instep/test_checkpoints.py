"""A checkpoint written after a death is like any other: stock Megatron resumes from it, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from recover_megatron.report.steps import read_steps
from tests.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, losses

pytestmark = pytest.mark.slow

TRAINING = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "8"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("workers", "flags", "inject", "resuming"),
    [
        (4, [], "1@3:forward", 2),
        (4, [], "0@4:checkpoint#3", 4),
        (4, ["--async-save"], "2@2:backward", 2),
        (6, [*PIPELINE, "--global-batch-size", "24"], "1@3:reduce-scatter", 2),
    ],
    ids=["two-of-three", "while-it-is-written", "asynchronous", "pipeline"],
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
