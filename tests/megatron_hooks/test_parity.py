"""Without --recover, pretrain_gpt_recover.py trains bitwise as Megatron-LM's own script does; with it, up to rounding.

Each layout runs 20 iterations in both scripts, with a checkpoint after 10 that the other one resumes from.  With
--recover gradients are added in another order, and dropout draws other numbers (by microbatch, not by stream).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE, STOCK, losses

ITERATIONS = 20


@dataclass(frozen=True)
class Layout:
    """A way to spread the model over workers, or a feature that changes the arithmetic."""

    name: str
    workers: int
    flags: str = ""
    schedule: tuple[str, ...] = tuple(SCHEDULE)
    dropout: bool = False
    replicas: int = 1

    @property
    def argv(self) -> list[str]:
        return [*MODEL, *self.schedule, *MOCK, *([] if self.dropout else NO_DROPOUT), *self.flags.split()]


STEPWISE = ("--train-iters", "20", "--lr-warmup-iters", "2")
MOE = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2 "
    "--disable-bias-linear"
)
LAYOUTS = [
    Layout("dp4", 4, replicas=4),
    Layout("dp4-dropout", 4, dropout=True, replicas=4),
    Layout("tp2-dp2", 4, "--tensor-model-parallel-size 2", replicas=2),
    Layout("pp2-dp2", 4, "--pipeline-model-parallel-size 2", replicas=2),
    Layout("tp2-pp2-dp2", 8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", replicas=2),
    Layout("interleaved", 4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", replicas=2),
    Layout("sequence-parallel", 4, "--tensor-model-parallel-size 2 --sequence-parallel", dropout=True, replicas=2),
    Layout("moe-ep2", 4, MOE, replicas=2),
    Layout("distributed-optimizer", 2, "--use-distributed-optimizer", replicas=2),
    Layout(
        "distributed-optimizer-overlap",
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        replicas=2,
    ),
    Layout("bf16", 2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", replicas=2),
    Layout(
        "bf16-moments",
        2,
        "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
        replicas=2,
    ),
    Layout("per-token-loss", 2, "--calculate-per-token-loss", replicas=2),
    Layout("step-schedule", 2, schedule=(*STEPWISE, "--step-batch-size-schedule", "0:8 80:16"), replicas=2),
]


def train(server: ForkServer, script: str, layout: Layout, out: Path, *flags: str) -> list[dict[str, float]]:
    """One run to its end; returns the recorded iterations."""
    run = server.run(layout.workers, [script, *layout.argv, *flags], out, losses=out / "losses.jsonl", timeout=240)
    assert run.ok, run.tail()
    return losses(out / "losses.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("layout", some("stock", LAYOUTS, 2), ids=lambda layout: layout.name)
def test_losses_and_checkpoints_are_those_of_the_stock_script(
    forkserver: ForkServer, tmp_path: Path, layout: Layout
) -> None:
    def save(name: str) -> list[str]:
        return ["--save", str(tmp_path / name / "checkpoints"), "--save-interval", "10"]

    def load(name: str) -> list[str]:
        return ["--load", str(tmp_path / name / "checkpoints"), "--ckpt-step", "10"]

    stock = train(forkserver, STOCK, layout, tmp_path / "stock", *save("stock"))
    ours = train(forkserver, OURS, layout, tmp_path / "ours", *save("ours"))
    assert len(stock) == ITERATIONS
    assert ours == stock
    assert train(forkserver, OURS, layout, tmp_path / "ours-resumes", *load("stock")) == stock[10:]
    assert train(forkserver, STOCK, layout, tmp_path / "stock-resumes", *load("ours")) == stock[10:]


FP16 = "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 16777216 --hysteresis 1"
"""The first iterations are skipped: the scale of their loss is too large."""
RECOVERABLE = [
    *(replace(layout, dropout=False) for layout in LAYOUTS),
    Layout("moe-ep2-sharded", 4, f"{MOE} --use-distributed-optimizer", replicas=2),
    Layout("tp2-dp2-sharded", 4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
           replicas=2),
    Layout("bf16-plain", 2, "--bf16", replicas=2),
    Layout("bf16-gradients", 4, "--bf16 --grad-reduce-in-bf16", replicas=4),
    Layout("fp16", 4, f"{FP16} --loss-scale-window 3", replicas=4),
    Layout("overlap", 4, "--overlap-grad-reduce", replicas=4),
    Layout("recompute", 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
           replicas=2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", some("parity", RECOVERABLE, 3), ids=lambda layout: layout.name)
def test_with_recover_and_no_failure_the_losses_are_the_stock_ones_and_the_audit_is_whole(
    forkserver: ForkServer, tmp_path: Path, layout: Layout
) -> None:
    stock = train(forkserver, OURS, layout, tmp_path / "stock")
    recover = train(forkserver, OURS, layout, tmp_path / "ours", "--recover", "--recover-log-dir", str(tmp_path))
    near = 2e-3 if "bf16" in layout.name else 1e-6
    assert [step["loss"] for step in recover] == pytest.approx([step["loss"] for step in stock], rel=near)
    assert [step["grad_norm"] or 0 for step in recover] == pytest.approx(
        [step["grad_norm"] or 0 for step in stock], rel=10 * near
    )
    assert (None in [step["grad_norm"] for step in recover]) == (layout.name == "fp16")
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    assert [{"loss": step.loss, "grad_norm": step.grad_norm} for step in steps] == recover
    consumed = 0
    for step in steps:
        assert audit_problem(step) is None
        assert step.replicas == len(step.microbatches) == layout.replicas
        consumed += 2 * sum(len(ids) for ids in step.microbatches.values())
        assert step.consumed_samples == consumed
    if "ramp" not in layout.name and "step" not in layout.name:
        assert consumed == 16 * ITERATIONS
