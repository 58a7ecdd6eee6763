"""What users combine, each with deaths, against the same flags without --recover: every number and every tensor.

    Recipe.flags   what is added to ``runs.MODEL``; the last one of a flag counts
    faults_of      which faults may be drawn for it

A few of more than eighty recipes are drawn a run, all of them with RECOVER_MATRIX=all.  Adam divides by the size of a
gradient, which turns the rounding noise of a gradient that is zero into a step; with a large epsilon a rounding
difference stays one.
"""

from __future__ import annotations

import random
import shlex
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_FENCED
from recover_megatron.run_log.steps import violations
from tests.drawn import SEED, some
from tests.harness.forkserver import ForkServer, Run
from tests.instep.altered import altered
from tests.instep.conftest import FEW
from tests.instep.logged import checkpoint, console, differences, scalars
from tests.instep.runs import (
    GRAD_NORM,
    HALF_MOMENTS,
    INTERLEAVED,
    LATENT,
    MODEL,
    NO_EVALUATION,
    PARAMETERS,
    QUICK_TO_SEE_A_HANG,
    ROPE,
    SLOW_TO_SEE_A_HANG,
    Case,
    Layout,
    Result,
    Strike,
    check_parameters,
    check_rows,
    distance,
    placed,
    recorded,
)
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, OURS, STOCK

ADAM = "--optimizer adam --adam-eps 1e-2 --lr 0.01 --min-lr 0.003"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
SPREAD = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
AUXILIARY = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
LATER_EXPERTS = "--num-layers 4 --moe-layer-freq [0]*2+[1]*2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
SHARDED = "--use-distributed-optimizer"
SETS = "--full-validation --multiple-validation-sets --eval-interval 3 --eval-iters 1"
BUCKETS = "--ddp-bucket-size 2000"
OVERLAP = f"--overlap-grad-reduce {BUCKETS}"
TOLD = (
    "--log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
    "--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard"
)
"""What all of Megatron's release recipes log."""
RELEASE = (
    f"{SHARDED} --overlap-grad-reduce --overlap-param-gather {ADAM} --manual-gc --disable-bias-linear --clip-grad 1.0 "
    f"--weight-decay 0.1 --adam-beta2 0.95 --bf16 --untie-embeddings-and-output-weights {TOLD} --eval-iters 2"
)
BESIDE = f"{SPREAD} {AUXILIARY} --bf16 --overlap-moe-expert-parallel-comm"
"""Forward passes run beside backward passes of the microbatch before."""


@dataclass(frozen=True)
class Recipe:
    """One way to train. ``near``: how much larger than usual differences from the failure-free run may be."""

    name: str
    layout: Layout
    flags: str = ""
    near: float = 1.0
    iterations: int = 8
    dropout: bool = False
    """Then the failure-free run has --recover, too, which draws its random numbers by microbatch."""
    checkpoint: str | None = None
    """The format of the checkpoint that is written at the end and compared; None: none is."""
    data: bool = False
    """Whether it reads an indexed data set instead of mock data."""
    left_out: tuple[int, ...] = ()
    """Iterations that are not made: no fault strikes in them."""
    exits: bool = False
    """Whether Megatron ends the process in the middle of ``train()``: its checkpoint alone tells the parameters."""

    @property
    def made(self) -> list[int]:
        """Its iterations."""
        return [iteration for iteration in range(1, self.iterations + 1) if iteration not in self.left_out]

    def __str__(self) -> str:
        return self.name


def dp(replicas: int, name: str = "", samples: int = 12, **sizes: int) -> Layout:
    return Layout(f"{name}dp{replicas}", replicas, samples=samples, **sizes)


tp = partial(dp, name="tp2-", tensor=2)
ep = partial(dp, name="ep2-", inner_ranks=2)


def pp(replicas: int, samples: int = 12) -> Layout:
    return dp(replicas, "pp2-", samples, pipeline=2)


def cp(replicas: int, *, pipeline: int = 1, tensor: int = 1) -> Layout:
    name = "cp2-" + f"tp{tensor}-" * (tensor > 1) + f"pp{pipeline}-" * (pipeline > 1)
    return dp(replicas, name, tensor=tensor, pipeline=pipeline, context=2)


RECIPES = [
    # experts
    Recipe("experts", dp(3), f"{EXPERTS} {AUXILIARY}"),
    Recipe("experts-spread", ep(2), f"{SPREAD} {AUXILIARY}"),
    Recipe("experts-spread-overlap", ep(3), f"{SPREAD} {AUXILIARY} {OVERLAP}"),
    Recipe("experts-by-sequence", dp(3), f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss "
           "--moe-aux-loss-coeff 1e-2"),
    Recipe("experts-z-loss", dp(3), f"{EXPERTS} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("experts-z-loss-spread", ep(2), f"{SPREAD} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("experts-per-layer-logs", dp(3), f"{EXPERTS} {AUXILIARY} --moe-per-layer-logging"),
    Recipe("experts-shared", dp(3), f"{EXPERTS} {AUXILIARY} --moe-shared-expert-intermediate-size 32"),
    Recipe("experts-sinkhorn", dp(3), "--num-experts 4 --moe-router-topk 1 --disable-bias-linear "
           "--moe-router-load-balancing-type sinkhorn"),
    Recipe("experts-sigmoid", dp(3), f"{EXPERTS} --moe-router-score-function sigmoid "
           "--moe-router-load-balancing-type none"),
    Recipe("experts-capacity", dp(3), f"{EXPERTS} {AUXILIARY} --moe-expert-capacity-factor 2.0"),
    Recipe("experts-in-later-stages", pp(3), f"{EXPERTS} {LATER_EXPERTS} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("experts-in-later-stages-sharded", pp(3), f"{EXPERTS} {LATER_EXPERTS} {AUXILIARY} {SHARDED} {ADAM}"),
    Recipe("experts-in-every-other-layer", pp(2), f"{EXPERTS} --num-layers 4 --moe-layer-freq 2 {AUXILIARY}"),
    Recipe("experts-interleaved", pp(2, 24), f"{EXPERTS} {INTERLEAVED} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("experts-jitter", dp(3), f"{EXPERTS} {AUXILIARY} --moe-input-jitter-eps 1e-2", dropout=True),
    Recipe("experts-forced", dp(3), f"{EXPERTS} {AUXILIARY} --moe-router-force-load-balancing", dropout=True),
    Recipe("experts-biased", dp(3), f"{EXPERTS} {AUXILIARY} --moe-router-force-biased -0.5", dropout=True),
    Recipe("experts-traced", dp(3), f"{EXPERTS} {AUXILIARY} --moe-routing-trace-path OUT"),
    Recipe("experts-average-quantiles", dp(3), f"{EXPERTS} --moe-router-load-balancing-type quantile_balancing "
           "--moe-aux-loss-coeff 0 --moe-router-quantile-balancing-ema 0.9"),
    Recipe("experts-padded", dp(3), f"{EXPERTS} {AUXILIARY} --moe-expert-capacity-factor 1.0 "
           "--moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall"),
    Recipe("experts-tensor-parallel", tp(2), f"{EXPERTS} {AUXILIARY} --sequence-parallel"),
    Recipe("experts-sharded", ep(2), f"{SPREAD} {AUXILIARY} {SHARDED} {ADAM}"),
    # forward passes beside backward passes
    Recipe("beside", ep(3), f"{BESIDE} --moe-z-loss-coeff 1e-3", near=300),
    Recipe("beside-sharded", ep(3), f"{BESIDE} {OVERLAP} --overlap-param-gather {SHARDED} {ADAM}", near=300,
           checkpoint="torch_dist"),
    Recipe("beside-interleaved", dp(3, "ep2-pp2-", 24, inner_ranks=2, pipeline=2), f"{BESIDE} {INTERLEAVED} {OVERLAP} "
           "--calculate-per-token-loss --moe-shared-expert-intermediate-size 32", near=300),
    Recipe("beside-interleaved-mtp", dp(2, "ep2-pp2-", 24, inner_ranks=2, pipeline=2), f"{BESIDE} {INTERLEAVED} {ROPE} "
           f"--mtp-num-layers 1 {OVERLAP} --overlap-param-gather {SHARDED} {ADAM}", near=300),
    Recipe("beside-mtp", ep(3), f"{BESIDE} {ROPE} --mtp-num-layers 1 {OVERLAP}", near=300),
    Recipe("beside-tensors", tp(2, inner_ranks=2), f"{BESIDE} --expert-tensor-parallel-size 1 --sequence-parallel "
           f"{OVERLAP} {SHARDED} {ADAM}", near=300),
    Recipe("beside-dropout", ep(2), f"{BESIDE} {DROPOUT} --recompute-granularity selective", near=300, dropout=True),
    Recipe("beside-fp16", ep(3), f"{BESIDE.replace('bf16', 'fp16')} --accumulate-allreduce-grads-in-fp32 "
           "--initial-loss-scale 65536 --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream "
           f"{LATER_EXPERTS} --log-interval 7 --eval-interval 2 --eval-iters 2", near=300, iterations=14),
    # prediction of several tokens
    Recipe("mtp", dp(3), f"{ROPE} --mtp-num-layers 1"),
    Recipe("mtp-two", dp(3), f"{ROPE} --mtp-num-layers 2"),
    Recipe("mtp-pipeline", pp(3), f"{ROPE} --mtp-num-layers 1"),
    Recipe("mtp-pipeline-experts", pp(2), f"{ROPE} --mtp-num-layers 1 {EXPERTS} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("mtp-interleaved", pp(2, 24), f"{ROPE} --mtp-num-layers 1 {INTERLEAVED}"),
    Recipe("mtp-per-token", pp(3), f"{ROPE} --mtp-num-layers 1 --calculate-per-token-loss"),
    Recipe("mtp-repeated", pp(3), f"{ROPE} --mtp-num-layers 2 --mtp-use-repeated-layer "
           "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Recipe("mtp-detached", dp(3), f"{ROPE} --mtp-num-layers 1 --mtp-detach-heads"),
    Recipe("mtp-standalone", pp(3), f"{ROPE} --mtp-num-layers 1 --pipeline-model-parallel-layout Et|tmL"),
    # the model's parts
    Recipe("qk-layernorm", dp(4), "--qk-layernorm"),
    Recipe("swiglu", tp(2), "--swiglu --disable-bias-linear --ffn-hidden-size 32"),
    Recipe("squared-relu", dp(3), "--squared-relu"),
    Recipe("rmsnorm", tp(3), "--normalization RMSNorm"),
    Recipe("grouped-queries", tp(2), "--num-attention-heads 4 --group-query-attention --num-query-groups 2"),
    Recipe("rope", pp(3), f"{ROPE}"),
    Recipe("rope-partial", dp(4), f"{ROPE} --rotary-percent 0.5"),
    Recipe("llama", tp(2), f"--swiglu --ffn-hidden-size 32 --normalization RMSNorm {ROPE} --disable-bias-linear "
           "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"),
    Recipe("window", dp(3), f"{ROPE} --window-size 4,0 --window-attn-skip-freq 2"),
    Recipe("learnable-softmax", dp(3), "--softmax-type learnable"),
    Recipe("mup", dp(3), "--use-mup --mup-width-mult 2.0"),
    Recipe("untied", pp(3), "--untie-embeddings-and-output-weights"),
    Recipe("tied", pp(2)),
    Recipe("tied-overlap", pp(3), OVERLAP),
    # pipelines
    Recipe("uneven-stages", pp(3), "--num-layers 3 --decoder-first-pipeline-num-layers 1"),
    Recipe("interleaved", pp(3, 24), INTERLEAVED),
    Recipe("interleaved-overlap", pp(3, 24), f"{INTERLEAVED} {OVERLAP}"),
    Recipe("interleaved-of-four-stages", dp(2, "pp4-", 16, pipeline=4), "--num-layers 8 "
           f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAP}"),
    Recipe("embedding-in-pipeline-split", pp(2), "--num-layers 3 --account-for-embedding-in-pipeline-split"),
    # tensors
    Recipe("sequence-parallel", tp(3), "--sequence-parallel"),
    Recipe("sequence-parallel-dropout", tp(2), f"--sequence-parallel {DROPOUT}", dropout=True),
    # the context
    Recipe("context", cp(3), f"{ROPE} --normalization RMSNorm"),
    Recipe("context-overlap-dropout", cp(3), f"{DROPOUT} {OVERLAP}", dropout=True),
    Recipe("context-tensors", cp(2, tensor=2), f"{ROPE} --sequence-parallel"),
    Recipe("context-pipeline-mtp", cp(2, pipeline=2), f"{ROPE} --mtp-num-layers 1"),
    Recipe("context-per-token", cp(3), "--calculate-per-token-loss"),
    Recipe("context-experts", cp(2), f"{EXPERTS} {AUXILIARY} --moe-z-loss-coeff 1e-3"),
    Recipe("context-experts-spread", cp(3), f"{SPREAD} {AUXILIARY} --moe-router-score-function sigmoid "
           "--moe-router-enable-expert-bias"),
    Recipe("context-sharded", cp(3), f"{SHARDED} {OVERLAP} --overlap-param-gather {ADAM}", checkpoint="torch_dist"),
    Recipe("latent-attention", dp(3), LATENT),
    Recipe("latent-attention-context", cp(2), LATENT),
    # dropout and recomputation
    Recipe("dropout", dp(4), DROPOUT, dropout=True),
    Recipe("dropout-recompute-full", pp(2), f"{DROPOUT} --recompute-granularity full --recompute-method block "
           "--recompute-num-layers 1", dropout=True),
    Recipe("dropout-recompute-selective", tp(2), f"{DROPOUT} --recompute-granularity selective", dropout=True),
    # batch and schedules
    Recipe("step-batch-schedule", dp(3), "--step-batch-size-schedule '0:6 288:12'"),
    Recipe("recompute-full-uniform", dp(4), f"{DROPOUT} --recompute-granularity full --recompute-method uniform "
           "--recompute-num-layers 1", dropout=True),
    Recipe("train-samples", dp(3), "--train-samples 96 --lr-decay-samples 96 --lr-warmup-samples 24"),
    Recipe("weight-decay-schedule", dp(3), "--start-weight-decay 0.0 --end-weight-decay 0.1 "
           "--weight-decay-incr-style linear"),
    Recipe("decoupled-lr", pp(2), "--untie-embeddings-and-output-weights --decoupled-lr 0.1 --decoupled-min-lr 0.02"),
    Recipe("warmup-wsd", dp(3), "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2"),
    # numbers
    Recipe("fp16-growing-scale", dp(3), "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 4096 "
           "--loss-scale-window 3", near=300),
    Recipe("fp16-too-large-a-scale", dp(4), "--fp16 --accumulate-allreduce-grads-in-fp32 "
           "--initial-loss-scale 16777216 --hysteresis 1", near=300),  # its first iterations are skipped
    Recipe("fp16-full-gradients", dp(3), "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 65536",
           near=300),
    Recipe("bf16", tp(2), "--bf16", near=300),
    Recipe("bf16-bf16-gradients", dp(3), "--bf16 --grad-reduce-in-bf16", near=1000),
    Recipe("bf16-sharded-overlap", dp(3), f"--bf16 {SHARDED} {OVERLAP} --overlap-param-gather {ADAM}", near=300),
    Recipe("bf16-added-up-in-fp32", dp(3), "--bf16 --grad-reduce-in-bf16 "
           "--ddp-param-name-patterns-for-fp32-local-accumulation all", near=1000),
    Recipe("bf16-moments", tp(2), f"--bf16 {SHARDED} {HALF_MOMENTS} {ADAM}", near=300),
    Recipe("bf16-moments-and-gradients", pp(3), f"--bf16 {SHARDED} {HALF_MOMENTS} --main-grads-dtype bf16 {ADAM}",
           near=1000),
    Recipe("per-token", pp(3), "--calculate-per-token-loss"),
    Recipe("adam", dp(4), ADAM),
    Recipe("no-clipping", dp(3), "--clip-grad 0"),
    Recipe("zero-fraction", dp(3), "--init-method-std 0.1"),
    # the distributed optimizer
    Recipe("sharded", dp(4), f"{SHARDED} {ADAM}", checkpoint="torch_dist"),
    Recipe("sharded-overlap", dp(4), f"{SHARDED} {OVERLAP} --overlap-param-gather {ADAM}"),
    Recipe("sharded-pipeline", pp(3), f"{SHARDED} {ADAM}"),
    Recipe("sharded-padded", dp(3), f"{SHARDED} {OVERLAP} --overlap-param-gather {ADAM} "
           "--ddp-pad-buckets-for-high-nccl-busbw"),
    # checkpoints
    Recipe("checkpoint-torch", tp(2), "--ckpt-format torch", checkpoint="torch"),
    Recipe("checkpoint-dist", pp(3), "--ckpt-format torch_dist", checkpoint="torch_dist"),
    Recipe("checkpoint-async", dp(3), f"--ckpt-format torch_dist {ASYNCHRONOUSLY}", checkpoint="torch_dist"),
    Recipe("checkpoint-experts", ep(2), f"{SPREAD} {AUXILIARY}", checkpoint="torch_dist"),
    # how it is run
    Recipe("log-interval-3", dp(3), "--log-interval 3", iterations=9),
    Recipe("log-interval-7", pp(2), "--log-interval 7", iterations=14),
    Recipe("log-interval-100", dp(3), "--log-interval 100"),
    Recipe("checkpoint-beside", dp(3), "--non-persistent-ckpt-type global --non-persistent-save-interval 2",
           checkpoint="torch_dist"),
    Recipe("exit-interval", dp(3), "--exit-interval 6", iterations=6, checkpoint="torch_dist", exits=True),
    Recipe("phases", dp(3), "--train-samples 96 --phase-transition-iterations 5,8", iterations=5, data=True,
           checkpoint="torch_dist", exits=True),
    Recipe("timeout-after-start", dp(3), "--distributed-timeout-seconds-after-init 60"),
    Recipe("watched", dp(3), "--check-for-large-grads --check-for-spiky-loss --rerun-mode validate_results "
           "--train-sync-interval 2 --exit-duration-in-mins 100"),
    Recipe("indexed-data", dp(3), "--num-workers 2", data=True),
    Recipe("indexed-data-pipeline", pp(2), "--num-workers 1", data=True),
    Recipe("shuffled", dp(4), "--dataloader-type cyclic --num-workers 2 --eval-interval 2 --eval-iters 2", data=True),
    Recipe("shuffled-whole", tp(3), "--dataloader-type cyclic --no-data-sharding", data=True),
    Recipe("packed-sequences", dp(3), "--reset-position-ids --reset-attention-mask --eod-mask-loss", data=True),
    Recipe("documents-apart-sets", dp(3), "--dataloader-inter-document-masking", data=True),
    Recipe("left-out", dp(4), "--iterations-to-skip 1 4 6 7", iterations=9, left_out=(1, 4, 6, 7)),
    Recipe("left-out-data", pp(3), "--iterations-to-skip 3 4 --num-workers 1", data=True, left_out=(3, 4)),
    Recipe("left-out-growing-batch", dp(3), "--step-batch-size-schedule '0:6 192:12 576:18' --iterations-to-skip "
           "2 4 5 7", iterations=9, left_out=(2, 4, 5, 7)),
    Recipe("left-out-steps-batch", pp(3), "--step-batch-size-schedule '0:6 384:12' --iterations-to-skip 3 4 8",
           iterations=9, left_out=(3, 4, 8)),
    Recipe("validation-sets", tp(3), f"{SETS} --eval-global-batch-size 3", data=True),
    Recipe("validation-sets-pipeline", pp(3), f"{SETS} --eval-global-batch-size 6 --num-workers 1", data=True),
    Recipe("evaluation", dp(3), "--eval-interval 2 --eval-iters 2"),
    Recipe("evaluation-later", pp(3), "--eval-interval 2 --eval-iters 2 --start-eval-at-iter 4 "
           "--eval-micro-batch-size 2 --eval-global-batch-size 12"),
    # Megatron's release recipes in small: all of their flags but widths, and what needs Transformer Engine (Megatron
    # itself cannot write the checkpoint of so small a DeepSeek)
    Recipe("release-gpt3-batch-async", tp(3), f"{RELEASE} {BUCKETS} --sequence-parallel "
           "--step-batch-size-schedule '0:6 576:12' "
           "--train-samples 84 --lr-decay-samples 84 --lr-warmup-samples 12 --decoupled-lr 0.02 --decoupled-min-lr "
           f"0.002 --apply-layernorm-1p --squared-relu {ROPE} --rotary-percent 0.5 --num-attention-heads 4 "
           f"--group-query-attention --num-query-groups 2 --eval-interval 4 --log-interval 5 {ASYNCHRONOUSLY} "
           "--save-retain-interval 8 --exit-interval 200", near=300, iterations=10, checkpoint="torch_dist",
           data=True),
    Recipe("release-mixtral", tp(3), f"{RELEASE} {BUCKETS} --sequence-parallel {SPREAD} "
           f"--expert-tensor-parallel-size 1 {AUXILIARY} {ROPE} --rotary-percent 0.5 --normalization RMSNorm --swiglu "
           "--ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
           "--train-samples 96 --lr-decay-samples 96 --lr-warmup-samples 12 --eval-interval 4 "
           "--no-ckpt-fully-parallel-save", near=300, checkpoint="torch_dist"),
    Recipe("release-deepseek-mtp", dp(2, "pp2-ep2-", 24, pipeline=2, inner_ranks=2), f"{RELEASE} "
           f"{LATENT} {SPREAD} --num-layers 4 --pipeline-model-parallel-layout Et|t|t|tmL "
           "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --normalization RMSNorm --swiglu --ffn-hidden-size 32 "
           "--moe-ffn-hidden-size 16 --moe-layer-freq [0]*1+[1]*3 --moe-shared-expert-intermediate-size 16 "
           "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-pre-softmax "
           "--moe-router-num-groups 2 --moe-router-group-topk 1 "
           "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
           "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --expert-tensor-parallel-size 1 "
           "--enable-experimental --no-check-for-nan-in-loss-and-grad --lr-warmup-init 1e-7 --train-samples 192 "
           "--lr-decay-samples 192 --lr-warmup-samples 24 --eval-interval 4 --manual-gc-interval 3", near=300),
    Recipe("release-nemotron-mtp", tp(3), f"{RELEASE} --sequence-parallel {EXPERTS} {ROPE} --normalization RMSNorm "
           "--squared-relu --moe-shared-expert-intermediate-size 16 --moe-router-load-balancing-type seq_aux_loss "
           "--moe-aux-loss-coeff 1e-2 --moe-router-topk-scaling-factor 5.0 --moe-router-score-function sigmoid "
           "--moe-router-enable-expert-bias --moe-router-dtype fp32 --mtp-num-layers 2 "
           "--calculate-per-token-loss --mtp-loss-scaling-factor 0.3 --grad-reduce-in-bf16 --ddp-num-buckets 3 "
           "--disable-gloo-process-groups --ckpt-fully-parallel-load "
           "--ckpt-assume-constant-structure --dist-ckpt-strictness log_all --lr-decay-style WSD "
           "--lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 48 --train-samples 144 --lr-decay-samples 144 "
           "--lr-warmup-samples 24 --override-opt_param-scheduler --save-retain-interval 8 --eval-interval 4 "
           "--log-interval 5 --log-progress --log-energy --log-memory-interval 5 --timing-log-option minmax "
           "--check-weight-hash-across-dp-replicas-interval 4", near=1000, iterations=12, checkpoint="torch_dist"),
]  # fmt: skip

PHASES = ("data", "forward", "backward", "reduce-scatter", "agree", "optimizer")


def faults_of(recipe: Recipe, source: random.Random) -> tuple[tuple[Strike, ...], int]:
    """One to three faults, one replica at least is left; how many of those lost are started again: none, or all.

    If all, then so early that all replicas train the last iteration, and by kills: a run that waits for replicas sees a
    hang late.  With the distributed optimizer one fault: its one shadow is renewed at the next boundary only, where
    "agree" may strike.
    """
    layout = recipe.layout
    most = 1 if SHARDED in recipe.flags else min(3, layout.replicas - 1)
    victims = source.sample(range(layout.replicas), source.randint(1, most))
    early = recipe.made[: -len(victims) - 1]
    kinds = ["stop" if source.random() < 0.1 else "kill" for _ in victims]
    again = "stop" not in kinds and len(early) >= len(victims) and source.random() < 0.5
    iterations = sorted(source.sample(early if again else recipe.made, len(victims)))
    strikes = []
    for replica, iteration, kind in zip(victims, iterations, kinds, strict=True):
        phase = source.choice(PHASES)
        # Only the first tensor rank of the first stage reads data in all layouts.
        position = 0 if phase == "data" else source.randrange(layout.positions)
        strikes.append(Strike(replica, position, iteration, phase, kind))
    return tuple(strikes), len(strikes) if again else 0


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
    flags += ["--tensorboard-queue-size", "1", *shlex.split(recipe.flags.replace("OUT", str(out)))]
    if recipe.data:
        flags = [flag for flag in flags if flag not in ("--mock-data", "--split", "90,10,0")]
        sets = ["--train-data-path", data, "--valid-data-path", *(data + more for more in FEW)]
        flags += sets if "--multiple-validation-sets" in flags else ["--split", "90,10,0", "--data-path", data]
        flags += ["--data-cache-path", str(out / "cache")]
    return flags


def train(server: ForkServer, recipe: Recipe, out: Path, data: str, *more: str, script: str, restarts: int = 0) -> Run:
    # From the last fault on: each newcomer may cost an iteration, and another one where it comes while one is made.
    waiting = altered("pacing.patient", f"{recipe.made[-restarts - 1]}-:{recipe.layout.replicas}") if restarts else ()
    return server.run(
        recipe.layout.grid.world, [*waiting, script, *argv(recipe, out, data), *more], out, training=out / "training",
        losses=None if "--recover" in more else out / "losses.jsonl", restarts=restarts, timeout=400,
    )  # fmt: skip


def with_recover(out: Path, strikes: tuple[Strike, ...], recipe: Recipe, restarts: int = 0) -> list[str]:
    more = ["--recover", "--recover-log-dir", str(out)]
    if strikes:
        more += ["--recover-inject", ",".join(strike.spec(recipe.layout) for strike in strikes)]
    more += QUICK_TO_SEE_A_HANG * any(strike.kind == "stop" for strike in strikes)
    return more + [*SLOW_TO_SEE_A_HANG] * bool(restarts)


def wrong_ends(recipe: Recipe, strikes: tuple[Strike, ...], run: Run) -> dict[int, int]:
    """Worker -> exit code, of those that did not end as they should.

    Mates of who was stopped wait for it and make no progress either: they may be put out with it.
    """
    allowed = defaultdict(lambda: {0})
    for strike in strikes:
        if strike.kind == "stop":
            allowed |= {mate: {0, -9, EXIT_FENCED} for mate in recipe.layout.grid.replicas[strike.replica]}
    allowed |= {strike.worker(recipe.layout): {strike.code} for strike in strikes}
    return {worker: code for worker, code in (*enumerate(run.codes), *run.more.items()) if code not in allowed[worker]}


def test_a_fault_that_has_not_struck_is_seen_by_its_workers_exit_code() -> None:
    recipe = Recipe("two mates", tp(3))
    strikes = (Strike(0, 0, 3, "forward", "stop"), Strike(1, 1, 4, "forward"))
    ends = partial(wrong_ends, recipe, strikes)
    assert ends(Run([-9, EXIT_FENCED, 0, -9, 0, 0], [])) == {}
    assert ends(Run([0, 0, 0, -9, 0, 0], [])) == {0: 0}
    assert ends(Run([-9, 0, -9, -9, 0, 1], [], {6: 1})) == {2: -9, 5: 1, 6: 1}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", some("layouts", RECIPES, 3), ids=str)
def test_deaths_change_no_number_that_is_logged_and_no_tensor_that_is_saved(
    forkserver: ForkServer, tmp_path: Path, indexed_data: str, recipe: Recipe
) -> None:
    strikes, restarts = faults_of(recipe, random.Random(f"{recipe.name} {SEED}"))
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    # --recover draws random numbers by microbatch; the plain script has not all that there is for data and losses.
    plain = with_recover(stock, (), recipe) if recipe.dropout else []
    # And Megatron's checkpoint writer, a process of its own, imports it without the host device.
    beyond = any(part in recipe.name for part in ("mtp", "sets", "async", "beside")) or recipe.layout.context > 1
    script = OURS if plain or beyond else STOCK
    told = f"{recipe.name} with {[strike.spec(recipe.layout) for strike in strikes]}, {restarts} restarts: "

    expected = train(forkserver, recipe, stock, indexed_data, *plain, script=script)
    assert expected.ok, expected.tail()
    run = train(forkserver, recipe, ours, indexed_data, *with_recover(ours, strikes, recipe, restarts),
                script=OURS, restarts=restarts)  # fmt: skip
    wrong = wrong_ends(recipe, strikes, run)
    assert not wrong, (told, wrong, run.tail())

    case = Case(recipe.layout, strikes, recipe.iterations)
    result, undisturbed = Result(case, run, ours), Result(case, expected, stock)
    steps = result.steps
    assert [step.iteration for step in steps] == recipe.made, told
    if restarts:
        assert sum(worker >= recipe.layout.grid.world for worker in placed(result.grid)) == restarts, (
            told,
            result.grid,
        )
        assert steps[-1].replicas == len(result.grid) == recipe.layout.replicas, (told, result.grid)
    assert violations(steps, None if "batch" in recipe.name else recipe.layout.samples) == [], told
    if not recipe.dropout:
        check_rows(steps, recorded(stock), recipe.near, told)
    near = recipe.near * GRAD_NORM
    theirs = console(sorted(stock.glob("worker-*.log")))
    assert theirs, expected.tail()
    assert differences(console(sorted(ours.glob("worker-*.log"))), theirs, near) == [], told
    assert differences(scalars(ours / "board"), scalars(stock / "board"), near) == [], told
    if not recipe.exits:
        check_parameters(result, undisturbed, recipe.near * PARAMETERS)
    if recipe.checkpoint:
        its, mine = (checkpoint(folder / "checkpoints", recipe.iterations) for folder in (stock, ours))
        assert set(its) == set(mine), told
        assert distance(mine, its) < recipe.near * PARAMETERS, told
