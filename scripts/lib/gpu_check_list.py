"""The checks of gpu_checks: each a function of the place, which returns a number for the table or raises.

Every check is made of processes of its own, with a deadline: one that hangs or crashes is a row of the table, and the
others are run all the same.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lib.gpu_training import (
    OURS,
    ROUNDING,
    STOCK,
    TINY,
    WITHOUT_KERNELS,
    Failed,
    Training,
    together,
    worst_difference,
    worst_logged_difference,
)

ROOT = Path(__file__).resolve().parents[2]
KILLS = "1@3:backward#2,3@5:reduce-scatter"
"""Two of four workers, in different iterations and phases."""
KILL = "1@3:backward#2"


class NotRun(Exception):
    """A check cannot be run here; the message is for the table.  No failure."""


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    folder: Path
    rehearse: bool
    """On the host device, to try the checks themselves: says nothing about a GPU."""
    deadline: float
    memory_gib: float = 0.0
    """Of the device; 0: not known."""

    def until(self, seconds: float) -> float:
        """The deadline of one check."""
        return min(self.deadline, time.monotonic() + seconds)

    def device(self, backend: str) -> list[str]:
        """Flags."""
        if self.rehearse:
            return ["--recover-device", "cpu", "--distributed-backend", "gloo"]
        return ["--recover-device", "cuda", "--distributed-backend", backend]


def _needs(*packages: str) -> None:
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # not even the package that it would be in
            found = None
        if found is None:
            raise NotRun(f"not run: {package} is not installed")


def _own_process(script: str, what: str, place: Place, seconds: float, environment: dict[str, str]) -> str:
    """The last line that a script of this folder prints."""
    environment = os.environ | environment | ({"RECOVER_REHEARSE": "1"} if place.rehearse else {})
    command = [sys.executable, str(ROOT / "scripts" / "lib" / script), what]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=place.until(seconds) - time.monotonic()
        )
    except subprocess.TimeoutExpired as hung:
        said = [text.decode(errors="replace") for text in (hung.stdout, hung.stderr) if isinstance(text, bytes)]
        (place.folder / f"{what}.log").write_text("".join(said))
        raise Failed("not over in time") from None
    (place.folder / f"{what}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"exit status {done.returncode}: {last[0][-160:]}")
    return done.stdout.strip().splitlines()[-1]


def collective(what: str, place: Place) -> str:
    """One of gpu_collectives."""
    if place.rehearse and what.startswith("torch"):
        raise NotRun("not run: rehearsal")
    return _own_process("gpu_collectives.py", what, place, 90, {})


def ranks(what: str, place: Place, counting: float = 12.0) -> str:
    """One of gpu_ranks; those that count do so for ``counting`` seconds."""
    _needs(*([] if place.rehearse else ["nccl"]))
    seconds = counting + (300 if place.rehearse else 90)
    return _own_process("gpu_ranks.py", what, place, seconds, {"RECOVER_CHECK_SECONDS": str(counting)})


@dataclass(frozen=True)
class Layout:
    """Four workers, of which two die within steps."""

    name: str
    flags: str
    inject: str
    dead: tuple[int, ...]
    replicas: int
    """Which are whole, or put together again, at the end."""
    connections: str = ""
    """CUDA_DEVICE_MAX_CONNECTIONS; empty: as it is."""


DP4 = Layout("dp4", "", KILLS, (1, 3), 2)
TP2 = Layout("tp2", "--tensor-model-parallel-size 2", "1@3:backward#2,2@5:backward", (1, 2), 1, "1")
PP2 = Layout("pp2", "--pipeline-model-parallel-size 2", "2@3:backward#2,1@5:backward", (1, 2), 1)


def over_nccl(layout: Layout, place: Place) -> str:
    """Megatron's four workers on one GPU, a host each to NCCL: two die within steps, and the same without deaths."""
    _needs("megatron.training", *([] if place.rehearse else ["nccl"]))
    flags = [*TINY, *WITHOUT_KERNELS, *place.device("nccl"), *shlex.split(layout.flags)]
    reference = _recovering(place, f"{layout.name}-over-nccl", flags, workers=4)
    killed = _recovering(
        place, f"{layout.name}-over-nccl-two-killed", flags, workers=4, inject=layout.inject, dead=layout.dead
    )
    for training in (reference, killed) if layout.connections else ():
        training.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = layout.connections
    together([reference, killed], place.until(120))
    return f"losses differ by {worst_difference(killed, reference, layout.replicas):.0e}"


def broken_device(place: Place) -> str:
    """An assertion fails on the device of one of two workers: it ends by itself, and the other goes on."""
    if place.rehearse:
        raise NotRun("not run: rehearsal")
    _needs("megatron.training", "nccl")
    flags = [*TINY, *WITHOUT_KERNELS, *place.device("nccl")]
    reference = _recovering(place, "two-workers", flags, workers=2)
    broken = _recovering(place, "device-breaks", flags, workers=2, inject="1@3:forward:device", dead=(1,))
    together([reference, broken], place.until(120))
    return f"losses differ by {worst_difference(broken, reference):.0e}"


def parity(place: Place, extra: str = "", name: str = "parity") -> str:
    """A plain script on Megatron, ours without --recover, ours with it: one worker, NCCL, the same losses."""
    _needs("megatron.training")
    flags = [*TINY, *(shlex.split(extra) if extra else WITHOUT_KERNELS), "--distributed-backend"]
    flags += ["gloo" if place.rehearse else "nccl"]
    device = ["--recover-device", "cpu" if place.rehearse else "cuda"]
    plain = Training(place.folder / f"{name}-without-recover", [OURS, *flags, *device])
    with_recover = _recovering(place, f"{name}-with-recover", [*flags, *device])
    trainings = [plain, with_recover]
    if not extra and not place.rehearse:  # the plain script finds no host device
        trainings.insert(0, Training(place.folder / f"{name}-stock", [STOCK, *flags, "--rerun-mode", "disabled"]))
    together(trainings, place.until(120))
    worst = max(worst_logged_difference(training, trainings[0]) for training in trainings[1:])
    return f"losses differ by {worst:.0e}"


def distributed_optimizer(place: Place) -> str:
    """DP 4 with --use-distributed-optimizer, one worker killed, with its shadows on the device and on the host."""
    _needs("megatron.training", *([] if place.rehearse else ["nccl"]))
    flags = [*TINY, *WITHOUT_KERNELS, *place.device("nccl"), "--use-distributed-optimizer"]
    reference = Training(place.folder / "dp4-over-nccl", [], workers=4)
    if not reference.steps_file.exists():
        raise Failed("there is no run of four workers without deaths to compare with: see above")
    trainings = [_recovering(place, "sharded-one-killed", flags, workers=4, inject=KILL, dead=(1,))]
    if not any(map(importlib.util.find_spec, ("apex", "transformer_engine"))):
        on_host = [*flags, "--recover-shadow-device", "cpu"]
        trainings.append(_recovering(place, "sharded-on-host-one-killed", on_host, workers=4, inject=KILL, dead=(1,)))
    together(trainings, place.until(150))
    worst = max(worst_difference(training, reference) for training in trainings)
    return f"losses differ by {worst:.0e} ({len(trainings)} runs)"


def overhead(place: Place) -> str:
    """benchmarks/bench_overhead.py with one worker and a model for the GPU at hand."""
    _needs("megatron.training")
    from benchmarks.bench_overhead import compare, ratios, spread

    options = Namespace(
        block=6, blocks=7, microbatch_seconds=0.0, profile=None, timeout=place.until(200) - time.monotonic()
    )
    iterations = str(options.block * options.blocks + 1)
    flags = [*WITHOUT_KERNELS, *_model(place), *place.device("nccl"), "--train-iters", iterations]
    measured = compare({"without": _Launched(), "with": _Launched()}, 1, flags, options, "gpu")  # type: ignore[dict-item]
    losses = [measured[side]["loss"] for side in ("with", "without")]
    if None in losses or abs(losses[0] / losses[1] - 1) > ROUNDING:
        raise Failed(f"losses {losses}")
    return f"{spread(ratios(measured)['wall'])} times the iteration without"


class _Launched:
    """recover-run in the place of the benchmarks' fork server, which cannot use a GPU."""

    def run(self, workers: int, argv: list[str], log_dir: Path, *, environment: dict[str, str], timeout: float) -> Any:
        """As ``ForkServer.run``, for one worker."""
        from tests.harness.forkserver import Run

        assert workers == 1
        training = Training(log_dir / "launch", argv, environment=environment)
        code = 0
        try:
            training.start()
            training.finish(time.monotonic() + timeout)
        except Failed as failure:
            print(failure, file=sys.stderr)
            code = 1
        finally:
            training.stop()
        return Run([code], [log_dir / "launch" / "launcher-0.log"])


def _model(place: Place) -> list[str]:
    """About 0.9 B parameters in bf16 where two of them fit, else about 0.2 B."""
    layers, hidden, sequence, vocabulary = 16, 2048, 2048, 32000
    if place.rehearse:
        layers, hidden, sequence, vocabulary = 2, 64, 64, 500
    elif place.memory_gib < 70:
        layers, hidden, sequence = 12, 1024, 1024
    return shlex.split(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 16 --seq-length {sequence} "
        f"--max-position-embeddings {sequence} --vocab-size {vocabulary} --micro-batch-size 2 --global-batch-size 8 "
        "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
        "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --hidden-dropout 0 --attention-dropout 0 "
        "--log-interval 10 --eval-interval 100000 --eval-iters 0 --split 99,1,0 --num-workers 0 "
        + ("" if place.rehearse else "--bf16")
    )


def kernels(package: str, extra: str, place: Place) -> str:
    """World 1 with the kernels of a package that may not be there."""
    _needs(package)
    return parity(place, extra, package)


def _recovering(
    place: Place, name: str, flags: list[str], *, workers: int = 1, inject: str = "", dead: tuple[int, ...] = ()
) -> Training:
    argv = [OURS, *flags, "--recover", "--recover-log-dir", str(place.folder / name / "recover")]
    argv += ["--recover-inject", inject] if inject else []
    return Training(place.folder / name, argv, workers=workers, dead=dead)


CHECKS: list[tuple[str, Callable[[Place], str]]] = [
    ("2 ranks over NCCL, native", partial(ranks, "two-native")),
    ("2 ranks over NCCL, ring", partial(ranks, "two-ring")),
    ("killed in sums, native", partial(ranks, "kills-native", counting=40.0)),
    ("killed in sums, ring", partial(ranks, "kills-ring", counting=25.0)),
    ("revoked at full speed, native", partial(ranks, "revoked-native")),
    ("revoked at full speed, ring", partial(ranks, "revoked-ring")),
    ("killed while opening, native", partial(ranks, "opening-native")),
    ("killed while opening, ring", partial(ranks, "opening-ring")),
    ("revoked 5 s after a kill, native", partial(ranks, "late-native")),
    ("revoked 5 s after a kill, ring", partial(ranks, "late-ring")),
    ("Megatron over NCCL, DP 4, 2 killed", partial(over_nccl, DP4)),
    ("Megatron over NCCL, TP 2, 2 killed", partial(over_nccl, TP2)),
    ("Megatron over NCCL, PP 2, 2 killed", partial(over_nccl, PP2)),
    ("torch's non-blocking communicator, all collectives", partial(collective, "torch-collectives")),
    ("torch's communicator aborted from another thread", partial(collective, "torch-abort")),
    ("ring's segments, 4 KiB to 32 MiB", partial(ranks, "segments")),
    ("scratch of 30 buckets back to back, native", partial(ranks, "peak")),
    ("sums set aside, device full", partial(ranks, "full")),
    ("a worker's device breaks", broken_device),
    ("ring over tcp, 3 members, CUDA tensors", partial(collective, "ring-tcp")),
    ("stock parity, 1 worker, NCCL", parity),
    ("distributed optimizer, 4 workers, 1 killed", distributed_optimizer),
    ("iteration time with --recover, 1 worker, NCCL", overhead),
    ("Transformer Engine, 1 worker", partial(kernels, "transformer_engine", "--transformer-impl transformer_engine")),
    ("apex, 1 worker", partial(kernels, "apex", "--transformer-impl local --no-masked-softmax-fusion")),
]
