"""A small training run with deaths on order, and what it must equal: the same run without them.

    Run.of(layout, strikes)  --fork server-->  exit codes, steps.jsonl, parameters of every worker that trained on
    Checked against Reference: the failure-free run of the same layout

The optimizer is SGD: a rounding difference stays one.  (Adam divides by the size of the gradient: a parameter whose
true gradient is zero, such as the bias of the attention keys, would move by the sign of its rounding noise.)
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recover_megatron.membership.records import EXIT_FENCED
from recover_megatron.run_log.events import read_events
from recover_megatron.run_log.steps import StepRecord, read_steps, violations
from recover_megatron.workload.grid import LaunchGrid, launch_grid
from tests.harness.forkserver import ForkServer
from tests.harness.forkserver import Run as Ended
from tests.harness.patience import patient
from tests.instep.altered import altered
from tests.megatron_hooks.tiny import OURS, losses

SAMPLES = 12
"""Global batch, in microbatches of one sample: whole shares for 4, 3, 2 and 1 replicas."""
SEQUENCE = 16
MODEL = (
    f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length {SEQUENCE} --max-position-embeddings 16 "
    "--micro-batch-size 1 --optimizer sgd --sgd-momentum 0.9 --lr 0.3 --min-lr 0.1 "
    "--lr-decay-style cosine --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 1 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --attention-softmax-in-fp32 --distributed-backend gloo "
    "--log-interval 1 --split 90,10,0 --num-workers 0 --mock-data"
).split()
EVALUATE = "--eval-interval 1 --eval-iters 2".split()
NO_EVALUATION = "--eval-interval 1000 --eval-iters 0".split()
CLIPPED = (*NO_EVALUATION, "--clip-grad", "0.2")
"""Evaluation takes most of the time, and others test it.  The gradients are clipped in every iteration: only then does
their norm, which the workers of a replica find between them, have an effect."""
ADAM = tuple("--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --disable-bias-linear".split())
"""With an epsilon well above rounding: see the text above.  Without the biases of attention keys."""
SHARDED = (*ADAM, "--use-distributed-optimizer")
HALF_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
"""Of bf16 models; the main parameters are in 32 bits."""
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
QUICK_TO_SEE_A_HANG = ["--recover-heartbeat-interval", "0.5", "--recover-heartbeat-timeout", f"{patient(6):g}"]
QUICK_TO_SEE_A_HANG += ["--recover-hang-timeout", f"{patient(6):g}"]
SLOW_TO_SEE_A_HANG = ("--recover-hang-timeout", f"{patient(200):g}")
"""For those that wait until replicas are put together."""

LOSS, GRAD_NORM, PARAMETERS = 1e-5, 1e-4, 1e-5
"""How far a run may be from the failure-free one, relative."""
SECONDS, SECONDS_EACH = 200, 5
"""After which a run counts as stuck, and for each of its iterations: it takes a few, on a loaded machine some tens."""


@dataclass(frozen=True)
class Layout:
    """A way to spread the model over workers."""

    name: str
    replicas: int
    tensor: int = 1
    pipeline: int = 1
    inner_ranks: int = 1
    """Of a replica: what expert parallelism spreads over."""
    flags: str = ""
    samples: int = SAMPLES
    """Global batch."""
    context: int = 1
    grows: tuple[int, int] | None = None
    """(samples, global batch): the global batch from so many samples on, which iterations before it make up."""

    @property
    def grid(self) -> LaunchGrid:
        world = self.replicas * self.positions
        return launch_grid(
            world, tensor=self.tensor, context=self.context, pipeline=self.pipeline, inner_ranks=self.inner_ranks,
            pipeline_before_data="--use-tp-pp-dp-mapping" in self.flags,
        )  # fmt: skip

    @property
    def positions(self) -> int:
        """Workers of a replica: position = (stage * context + context rank) * tensor + tensor rank (of the first inner
        rank)."""
        return self.tensor * self.context * self.pipeline * self.inner_ranks

    @property
    def argv(self) -> list[str]:
        sizes = ["--tensor-model-parallel-size", str(self.tensor), "--pipeline-model-parallel-size", str(self.pipeline)]
        sizes += ["--context-parallel-size", str(self.context)] * (self.context > 1)
        flags = self.flags.split()
        if self.grows is not None:
            after, batch = self.grows
            return [*sizes, "--step-batch-size-schedule", f"0:{self.samples} {after * SEQUENCE}:{batch}", *flags]
        return [*sizes, "--global-batch-size", str(self.samples), *flags]

    def consumed(self, iterations: int) -> int:
        """The samples of the first iterations."""
        after, batch = self.grows or (0, self.samples)
        before = min(iterations, after // self.samples)
        return before * self.samples + (iterations - before) * batch


LAYOUTS = [
    Layout("dp4", 4),
    Layout("dp4-overlap", 4, flags="--overlap-grad-reduce --ddp-bucket-size 2000"),
    Layout("tp2-dp3", 3, tensor=2),
    Layout("pp2-dp3", 3, pipeline=2),
    Layout("tp2-pp2-dp2", 2, tensor=2, pipeline=2),
]
ROPE = "--position-embedding-type rope --no-rope-fusion"
INTERLEAVED = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 8 --q-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    f"{ROPE} --qk-layernorm"
)
DEEPSEEK = (
    f"{LATENT} --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --mtp-num-layers 1 "
    "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0]*1+[1]*1 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
"""DeepSeek-V3 in small."""
CONTEXT_LAYOUTS = [
    Layout("cp2-dp3", 3, context=2),
    Layout("cp2-tp2-dp2", 2, context=2, tensor=2),
    Layout("cp2-pp2-dp2", 2, context=2, pipeline=2),
    Layout("deepseek-pp2-dp3", 3, pipeline=2, flags=DEEPSEEK),
]


@dataclass(frozen=True)
class Strike:
    """One fault: position ``position`` of ``replica`` at the ``visit``-th visit of ``phase`` in ``iteration``."""

    replica: int
    position: int
    iteration: int
    phase: str
    kind: str = "kill"
    visit: int = 1
    until: int = 0
    """The last iteration in which it may strike, where nobody knows which one it will be; 0: ``iteration``."""

    def spec(self, layout: Layout) -> str:
        worker, iterations = self.worker(layout), range(self.iteration, max(self.iteration, self.until) + 1)
        return ",".join(f"{worker}@{iteration}:{self.phase}#{self.visit}:{self.kind}" for iteration in iterations)

    def worker(self, layout: Layout) -> int:
        return layout.grid.replicas[self.replica][self.position]

    @property
    def code(self) -> int:
        """How its worker must end: one that hangs is killed by its launcher."""
        return -9 if self.kind in ("kill", "stop") else 1


@dataclass(frozen=True)
class Case:
    """A run to make: the layout, the iterations, who dies."""

    layout: Layout
    strikes: tuple[Strike, ...] = ()
    iterations: int = 8
    dropout: bool = False
    flags: tuple[str, ...] = ()
    script: tuple[str, ...] = (OURS,)
    spares: int = 0
    """Workers that are started with the run, beyond those of its launch."""
    restarts: int = 0
    """Workers that are started in place of others, in all."""
    train_with: tuple[str, ...] = ()
    """What is put before ``script`` (see ``altered``), but not of the failure-free run."""
    model: tuple[str, ...] = ()
    """Flags that change the training, of the failure-free run, too."""
    doomed: tuple[int, ...] = ()
    """Workers that kill themselves, other than by a strike."""
    nodes: tuple[str, ...] = ()
    """The node of each worker of the launch; default: one for all."""
    evaluated: bool = False
    """Whether there is an evaluation after each iteration though none is struck: that is most of a run's time."""

    def with_flags(self, *flags: str) -> Case:
        """The same with further flags, which the failure-free run does without."""
        return replace(self, flags=(*self.flags, *flags))

    def altered(self, function: str, *arguments: object) -> Case:
        """The same, in which something is altered by a function of a module that ``altered`` names."""
        return replace(self, train_with=(*altered(function, *arguments), *self.train_with))

    def throughout(self, function: str, *arguments: object) -> Case:
        """The same, in which something is altered, in the failure-free run, too."""
        return replace(self, script=(*altered(function, *arguments), *self.script))

    def patient(self, when: str) -> Case:
        """The same, waiting for replicas that are put together; ``when``: see ``pacing.patient``."""
        return self.altered("pacing.patient", when).with_flags(*SLOW_TO_SEE_A_HANG)

    def lingers(self) -> Case:
        """The same, in which the connections of a worker that is killed stay open until all others have ended."""
        return self.altered("faulty.linger")

    def until_struck(self, iteration: int, *workers: int) -> Case:
        """The same, waiting before ``iteration`` until a fault of each of these has struck; to be called first.

        For faults of who comes when it can, at what happens when it comes.
        """
        when = ";".join(f"worker-{worker}.log:injected fault {worker}@" for worker in workers)
        return self.altered("pacing.awaiting", f"{iteration}:{when}")

    def over_nccl(self, **double: Any) -> Case:
        """The same, whose gradients travel over NCCL's double (``double``: its settings)."""
        return self.altered("instruments.over_nccl", json.dumps(double))

    def __str__(self) -> str:
        inject = ",".join(strike.spec(self.layout) for strike in self.strikes)
        newcomers = f" +{self.spares} spares" * bool(self.spares) + f" {self.restarts} restarts" * bool(self.restarts)
        return f"{self.layout.name}{'-dropout' if self.dropout else ''} {inject}{newcomers}"

    @property
    def failure_free(self) -> Case:
        evaluated = self.evaluated or any(strike.phase == "eval" for strike in self.strikes)
        return Case(
            self.layout, (), self.iterations, self.dropout, script=self.script, model=self.model, evaluated=evaluated
        )

    def argv(self, out: Path) -> list[str]:
        phases = {strike.phase for strike in self.strikes}
        rate = "0.1" if self.dropout else "0"
        flags = ["--hidden-dropout", rate, "--attention-dropout", rate, "--train-iters", str(self.iterations)]
        flags += EVALUATE if "eval" in phases or self.evaluated else NO_EVALUATION
        if "checkpoint" in phases:
            flags += ["--save", str(out / "checkpoints"), "--save-interval", "1"]
        if any(strike.kind == "stop" for strike in self.strikes):
            flags += QUICK_TO_SEE_A_HANG
        if self.strikes:
            flags += ["--recover-inject", ",".join(strike.spec(self.layout) for strike in self.strikes)]
        ours = ["--recover", "--recover-log-dir", str(out), *self.flags]
        return [*self.train_with, *self.script, *MODEL, *self.layout.argv, *flags, *self.model, *ours]

    def run(self, server: ForkServer, out: Path, networks: list[tuple[str, str]] | None = None) -> Result:
        """Run it to its end; ``networks``: as for ``ForkServer.run``, with a node each."""
        world = self.layout.grid.world
        ended = server.run(
            world, self.argv(out), out, training=out / "training", spares=self.spares, restarts=self.restarts,
            timeout=SECONDS + SECONDS_EACH * self.iterations, networks=networks,
            lingering="faulty.linger" in self.train_with,
            nodes=[address for _, address in networks[:-1]] if networks else list(self.nodes) or None,
        )  # fmt: skip
        return Result(self, ended, out)


@dataclass(frozen=True)
class Result:
    """What a run left."""

    case: Case
    ended: Ended
    out: Path

    @cached_property
    def steps(self) -> list[StepRecord]:
        path = self.out / "steps.jsonl"
        return list(read_steps(path)) if path.exists() else []

    @property
    def recorded(self) -> list[SimpleNamespace]:
        """See ``recorded``."""
        return recorded(self.out)

    @cached_property
    def events(self) -> list[dict[str, object]]:
        """The coordinator's."""
        return [json.loads(line) for line in (self.out / "events-0.jsonl").read_text().splitlines()]

    def of_training(self, kind: str) -> list[dict[str, Any]]:
        """The training's events of this kind."""
        return [event for event in read_events(self.out / "events.jsonl") if event["event"] == kind]

    @cached_property
    def plans(self) -> dict[int, dict[str, Any]]:
        """Epoch -> what the training's events tell of its plan."""
        return {event["epoch"]: event for event in self.of_training("plan")}

    @cached_property
    def grid(self) -> dict[int, list[int]]:
        """Replica -> its workers by position, by the last plan."""
        last = self.plans[max(self.plans)]
        return {int(replica): workers for replica, workers in last["grid"].items()}

    @cached_property
    def said(self) -> str:
        """The logs of all workers, newcomers too."""
        return "".join(log.read_text(errors="replace") for log in self.out.glob("worker-*.log"))

    @cached_property
    def struck(self) -> set[int]:
        """The iterations in which a strike hit."""
        return {int(hit) for hit in re.findall(r"recover: injected fault \d+@(\d+):", self.said)}

    @property
    def replicas(self) -> list[int]:
        """How many computed each iteration."""
        return [step.replicas for step in self.steps]

    @cached_property
    def left(self) -> Mapping[int, Mapping[str, object]]:
        """Worker -> what it recorded at the end of its training."""
        paths = self.out.glob("training/*.pt")
        return {int(path.stem): torch.load(path) for path in paths}

    def log(self, worker: int) -> str:
        return self.ended.logs[worker].read_text()

    def told(self) -> str:
        """What there is to know about a run that went wrong."""
        logs = sorted(self.out.glob("worker-*.log"))
        tails = [f"--- {log.stem}:\n" + "\n".join(log.read_text().splitlines()[-12:]) for log in logs]
        return f"{self.case}, {self.out}: exit codes {self.ended.codes} {self.ended.more}\n" + "\n".join(tails)


def recorded(out: Path) -> list[SimpleNamespace]:
    """Loss and gradient norm of each iteration of a run without --recover."""
    return [SimpleNamespace(**row) for row in losses(out / "losses.jsonl")]


def check(result: Result, reference: Result, near: float = 1.0) -> None:
    """Assert that a run whose faults some replica survived is the failure-free one, but for rounding.

    Whoever was not struck ends with 0, in a place or as a spare; but one that came so late that no plan knows it.
    ``near``: how much larger than usual the difference may be.
    """
    case, layout = result.case, result.case.layout
    expected = [0] * layout.grid.world
    for strike in case.strikes:
        expected[strike.worker(layout)] = strike.code
    for worker in case.doomed:
        if worker < len(expected):
            expected[worker] = -9
    codes = list(result.ended.codes)
    for strike in case.strikes:
        if strike.kind == "stop":  # its mates wait for it and make no progress either: they may be put out with it
            assert codes[strike.worker(layout)] == -9, result.told()
            for mate in layout.grid.replicas[strike.replica]:
                codes[mate] = expected[mate] if codes[mate] in (-9, EXIT_FENCED) else codes[mate]
    assert codes == expected, result.told()
    known = {worker for plan in result.plans.values() for worker in (*placed(plan["grid"]), *plan["spares"])}
    late = {worker for worker in result.ended.more if worker not in known}
    for worker, code in result.ended.more.items():
        assert code == (-9 if worker in case.doomed else 0) or worker in late, result.told()
    check_audit(result, case.iterations)
    check_steps(result, reference, near)
    check_parameters(result, reference, near * PARAMETERS)
    if any(strike.phase == "eval" for strike in case.strikes):
        check_evaluations(result, reference)
    if any(strike.phase == "checkpoint" for strike in case.strikes):
        tracker = result.out / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == str(case.iterations)


def check_audit(result: Result, iterations: int) -> None:
    """Every iteration once, every microbatch once, the samples right, nothing by a replica that has a lost worker."""
    steps = result.steps
    assert [step.iteration for step in steps] == list(range(1, iterations + 1)), result.told()
    layout, strikes = result.case.layout, result.case.strikes
    assert violations(steps, None if layout.grows else layout.samples) == []
    assert [step.consumed_samples for step in steps] == [layout.consumed(step.iteration) for step in steps]
    for step in steps:
        assert step.replicas == len(step.microbatches)
        assert step.epoch in result.plans, f"no plan of epoch {step.epoch} in the log: {result.told()}"
        grid = result.plans[step.epoch]["grid"]
        gone = {strike.worker(layout) for strike in strikes if max(strike.iteration, strike.until) < step.iteration}
        assert not gone & set(placed(grid)), (step, grid)
        if step.iteration not in result.struck:  # who is struck may have counted before
            assert set(step.microbatches) <= set(map(int, grid)), (step, grid)


def check_steps(result: Result, reference: Result, near: float = 1.0) -> None:
    """Loss and gradient norm of each iteration."""
    check_rows(result.steps, reference.steps, near, str(result.case))


def check_steps_until(result: Result, reference: Result, last: int, near: float = 1.0) -> None:
    """The same of a run that ended after iteration ``last``."""
    check_rows(result.steps, reference.steps[:last], near, str(result.case))


def check_rows(ours: Iterable[Any], theirs: Iterable[Any], near: float = 1.0, told: str = "") -> None:
    """Losses and gradient norms: of steps, or of what a run without --recover has recorded."""
    for mine, its in zip(ours, theirs, strict=True):
        for name, bound in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
            one, other = getattr(mine, name), getattr(its, name)
            if one is None or other is None:  # a step that was skipped has no norm
                assert one is other, (told, name, mine, its)
            else:
                assert math.isclose(one, other, rel_tol=near * bound), (told, name, mine, its)


def check_parameters(result: Result, reference: Result, bound: float = PARAMETERS) -> None:
    """Of those placed at the end: bit for bit the same in a column, and those of the reference but for rounding."""
    layout, replicas = result.case.layout, list(result.grid.values())
    assert placed(result.grid) == sorted(result.left), (str(result.case), result.grid, sorted(result.left))
    for position, column in enumerate(zip(*replicas, strict=True)):
        its = reference.left[layout.grid.replicas[0][position]]["parameters"]
        first = result.left[column[0]]["parameters"]
        assert distance(first, its) < bound, (str(result.case), column, distance(first, its))
        for worker in column[1:]:
            other = result.left[worker]["parameters"]
            different = [name for name in first if not torch.equal(first[name], other[name])]
            assert not different, (str(result.case), column, different)


def check_sharded(result: Result, reference: Result, near: float = 1.0) -> None:
    """``check``, and that all who hold a part of a state that is spread over workers hold the same bits at the end."""
    check(result, reference, near)
    flags = result.case.layout.flags
    instances = "instances" in flags and "fsdp" not in flags  # units are shards then, else workers
    told: dict[tuple[int, int, int], set[int]] = {}
    for worker, left in result.left.items():
        place = next(workers.index(worker) for workers in result.grid.values() if worker in workers)
        for (optimizer, unit), digest in left["units"].items():
            told.setdefault((optimizer, unit, place if instances else -1), set()).add(digest)
    units = {unit for _, unit, _ in told}
    if result.steps[-2].epoch == max(result.plans):  # else somebody's last place had nothing to hold yet
        assert units == {0, 1} if instances else units >= set(result.left), (str(result.case), told)
    assert all(len(digests) == 1 for digests in told.values()), (str(result.case), told)


def check_evaluations(result: Result, reference: Result) -> None:
    """The loss on the validation set after each iteration."""
    survivors = [n for n in result.left if result.left[n]["evaluations"]]
    assert survivors
    theirs = next(left["evaluations"] for left in reference.left.values() if left["evaluations"])
    for n in survivors:
        ours = result.left[n]["evaluations"]
        assert set(ours) <= set(theirs)
        wrong = {t: (ours[t], theirs[t]) for t in ours if not math.isclose(ours[t], theirs[t], rel_tol=LOSS)}
        assert not wrong, (str(result.case), n, wrong)


def placed(grid: Mapping[Any, Iterable[int]]) -> list[int]:
    """All that have a place, ascending."""
    return sorted(itertools.chain.from_iterable(grid.values()))


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Relative, of all parameters together, in the L2 norm."""
    assert set(ours) == set(theirs)
    squares = sum(float((ours[name].double() - theirs[name].double()).pow(2).sum()) for name in ours)
    return math.sqrt(squares / sum(float(tensor.double().pow(2).sum()) for tensor in theirs.values()))
