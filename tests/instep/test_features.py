"""What Megatron users combine: each feature with a death in it trains as without the death."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import StepRecord, audit_problem, read_steps
from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE

pytestmark = pytest.mark.slow

ITERATIONS = 6
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MOE = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear"

FP16 = "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 16777216 --hysteresis 1"
"""The first iterations are skipped: the scale of their loss is too large."""


@dataclass(frozen=True)
class Feature:
    """``deaths``: a fault specification; ``replicas``: how many are left."""

    name: str
    workers: int
    flags: str
    deaths: str
    replicas: int
    near: float = 1e-5


FEATURES = [
    Feature("overlap", 4, "--overlap-grad-reduce", "2@1:reduce-scatter,3@4:all-gather", 2),
    Feature("dropout-and-loader-processes", 4, f"{DROPOUT} --num-workers 2", "1@4:forward#2", 3),
    Feature(
        "recomputation", 4, f"{DROPOUT} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1", "1@4:backward#2", 3,
    ),
    Feature("loss-per-token", 4, "--calculate-per-token-loss --pipeline-model-parallel-size 2", "0@3:backward#2", 1),
    Feature("sequence-parallel", 4, "--tensor-model-parallel-size 2 --sequence-parallel", "1@4:forward#3", 1),
    Feature(
        "interleaved", 8, "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 "
        "--overlap-grad-reduce", "1@4:forward#3", 1,
    ),
    Feature(
        "interleaved-of-two-stages", 6, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 24", "1@4:forward#3", 2,
    ),
    Feature("experts", 8, f"{MOE} --overlap-grad-reduce", "1@3:reduce-scatter,5@5:forward", 2),
    Feature("untied-embeddings", 4, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
            "2@4:forward#2", 1),
    Feature("bf16", 4, "--bf16", "1@4:backward#2", 3, near=2e-3),
    Feature("bf16-gradients", 4, "--bf16 --grad-reduce-in-bf16 --overlap-grad-reduce",
            "1@4:backward#2,2@5:reduce-scatter", 2, near=4e-3),
    Feature("fp16", 4, FP16, "1@2:backward#2,2@6:reduce-scatter", 2, near=1e-4),
    Feature("growing-batch", 4, "--rampup-batch-size 8 8 24 --global-batch-size 16", "1@2:forward,2@5:data", 2),
]  # fmt: skip


def train(server: ForkServer, feature: Feature, out: Path, *more: str) -> list[StepRecord]:
    argv = [OURS, *MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", str(ITERATIONS), *feature.flags.split()]
    run = server.run(feature.workers, [*argv, "--recover", "--recover-log-dir", str(out), *more], out, timeout=240)
    struck = len(feature.deaths.split(",")) if more else 0
    assert sorted(run.codes) == [*[-9] * struck, *[0] * (feature.workers - struck)], run.tail()
    steps = list(read_steps(out / "steps.jsonl"))
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    return steps


@pytest.mark.parametrize("feature", some("features", FEATURES, 4), ids=lambda feature: feature.name)
def test_a_death_changes_nothing_but_rounding(forkserver: ForkServer, tmp_path: Path, feature: Feature) -> None:
    expected = train(forkserver, feature, tmp_path / "undisturbed")
    steps = train(forkserver, feature, tmp_path / "broken", "--recover-inject", feature.deaths)
    # Orphans of two broken replicas may have built what they lack by then, and be one more.
    assert steps[-1].replicas in {feature.replicas, feature.replicas + (feature.name == "experts")}
    assert [step.grad_norm is None for step in steps] == [step.grad_norm is None for step in expected]
    assert (None in [step.grad_norm for step in steps]) == (feature.name == "fp16")
    assert [step.consumed_samples for step in steps] == [step.consumed_samples for step in expected]
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=feature.near)
    assert [step.grad_norm or 0 for step in steps] == pytest.approx(
        [step.grad_norm or 0 for step in expected], rel=10 * feature.near
    )
