"""The part of gpu_checks.sh that runs inside .venv.  See gpu_checks.sh.

A check is a function that returns a number for the table, or raises Failed or NotRun.  Every check is made of processes
of its own, with a deadline: one that hangs or crashes is a row of the table, and the others are run all the same.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
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

from recover_megatron import __version__
from recover_megatron.hostdevice.detect import CudaBroken, driver_device_count

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 460.0
"""For all checks."""
NO_DEVICE = "not run: no CUDA device"
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

    def until(self, seconds: float) -> float:
        """The deadline of one check."""
        return min(self.deadline, time.monotonic() + seconds)

    def device(self, backend: str) -> list[str]:
        """Flags."""
        if self.rehearse:
            return ["--recover-device", "cpu", "--distributed-backend", "gloo"]
        return ["--recover-device", "cuda", "--distributed-backend", backend]


# ---- the checks --------------------------------------------------------------------------------------------------


def collective(what: str, place: Place) -> str:
    """One of gpu_collectives."""
    if place.rehearse and what.endswith("nccl"):
        raise NotRun("not run: rehearsal")
    environment = os.environ | ({"RECOVER_REHEARSE": "1"} if place.rehearse else {})
    command = [sys.executable, str(ROOT / "scripts" / "lib" / "gpu_collectives.py"), what]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=place.until(90) - time.monotonic()
        )
    except subprocess.TimeoutExpired:
        raise Failed("not over in time") from None
    (place.folder / f"{what}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"exit status {done.returncode}: {last[0][-160:]}")
    return done.stdout.strip().splitlines()[-1]


def two_nccl_ranks(place: Place) -> str:
    """Says what one GPU cannot tell."""
    raise NotRun("not run: NCCL refuses two ranks on one GPU; on several: docs/gpu.md")


def parity(place: Place, extra: str = "", name: str = "parity") -> str:
    """A plain script on Megatron, ours without --recover, ours with it: one worker, NCCL, the same losses."""
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


def sharing(place: Place) -> str:
    """Four workers on one GPU over gloo, two of them killed within steps, and the same without deaths."""
    flags = [*TINY, *WITHOUT_KERNELS, *place.device("gloo")]
    reference = _recovering(place, "four-workers", flags, workers=4)
    killed = _recovering(place, "four-workers-two-killed", flags, workers=4, inject=KILLS, dead=(1, 3))
    together([reference, killed], place.until(150))
    return f"losses differ by {worst_difference(killed, reference):.0e}"


def distributed_optimizer(place: Place) -> str:
    """The same with --use-distributed-optimizer, one worker killed, with its shadows on the device and on the host."""
    flags = [*TINY, *WITHOUT_KERNELS, *place.device("gloo"), "--use-distributed-optimizer"]
    reference = Training(place.folder / "four-workers", [], workers=4)
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
    from benchmarks.bench_overhead import compare, ratios, spread

    options = Namespace(
        block=6, blocks=7, microbatch_seconds=0.0, profile=None, timeout=place.until(200) - time.monotonic()
    )
    flags = [
        *WITHOUT_KERNELS,
        *_model(place),
        *place.device("nccl"),
        "--train-iters",
        str(options.block * options.blocks + 1),
    ]
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
    elif _memory_gib() < 70:
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
    if importlib.util.find_spec(package) is None:
        raise NotRun("not installed")
    return parity(place, extra, package)


def _recovering(
    place: Place, name: str, flags: list[str], *, workers: int = 1, inject: str = "", dead: tuple[int, ...] = ()
) -> Training:
    argv = [OURS, *flags, "--recover", "--recover-log-dir", str(place.folder / name / "recover")]
    argv += ["--recover-inject", inject] if inject else []
    return Training(place.folder / name, argv, workers=workers, dead=dead)


CHECKS: list[tuple[str, Callable[[Place], str]]] = [
    ("ring over tcp, 3 members, CUDA tensors", partial(collective, "ring-tcp")),
    ("ring over gloo, 3 members, CUDA tensors", partial(collective, "ring-gloo")),
    ("native over gloo, 3 members, CUDA tensors", partial(collective, "native-gloo")),
    ("ring over NCCL, 1 member", partial(collective, "ring-nccl")),
    ("native over NCCL, 1 member", partial(collective, "native-nccl")),
    ("NCCL communicator aborted from another thread", partial(collective, "abort-nccl")),
    ("ring over NCCL, 2 members", two_nccl_ranks),
    ("stock parity, 1 worker, NCCL", parity),
    ("4 workers share the GPU over gloo, 2 killed", sharing),
    ("distributed optimizer, 4 workers, 1 killed", distributed_optimizer),
    ("iteration time with --recover, 1 worker, NCCL", overhead),
    ("Transformer Engine, 1 worker", partial(kernels, "transformer_engine", "--transformer-impl transformer_engine")),
    ("apex, 1 worker", partial(kernels, "apex", "--transformer-impl local --no-masked-softmax-fusion")),
]


# ---- the table ---------------------------------------------------------------------------------------------------


def run(check: Callable[[Place], str], place: Place) -> tuple[str, str]:
    """(result, number) of one check."""
    if time.monotonic() > place.deadline - 10:
        return "FAILED: no time was left for it", ""
    try:
        return "ok", check(place)
    except NotRun as why:
        return str(why), ""
    except Failed as failure:
        return f"FAILED: {failure}", ""
    except Exception as error:  # noqa: BLE001  whatever a check did not foresee is its failure, and not that of the others
        return f"FAILED: {type(error).__name__}: {error}", ""


def _row(*cells: str) -> None:
    print("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |", flush=True)


def _smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory_gib() -> float:
    text = _smi("memory.total")
    return float(text) / 1024 if text.replace(".", "").isdigit() else 0.0


def _machine() -> str:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.backends.cuda.is_built() else "none"
    gpu = _smi("name,driver_version,memory.total") or "GPU not named: no nvidia-smi"
    versions = f"torch {torch.__version__}, NCCL {nccl}, Python {platform.python_version()}"
    return f"{datetime.date.today()}, {gpu}, {versions}, {os.cpu_count()} cores"


def why_not() -> tuple[str, int]:
    """(why the checks cannot be run, exit status); ("", 0): they can."""
    try:
        devices = driver_device_count()
    except CudaBroken as broken:
        return f"not run: the CUDA driver does not work: {broken}", 1
    if not devices:
        return NO_DEVICE, 0
    import torch

    return ("", 0) if torch.backends.cuda.is_built() else ("not run: this torch was built without CUDA", 1)


def main() -> int:
    """Run the checks and print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_checks.sh", description="Check recover_megatron on one NVIDIA GPU.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and runs in DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the checks that have this in their name")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU, on the host device: tries the checks, tells of no GPU"
    )
    options = parser.parse_args()
    reason, status = ("", 0) if options.rehearse else why_not()
    if not reason:
        print(
            "rehearsal on the host device: nothing here is about a GPU" if options.rehearse else _machine(), end="\n\n"
        )
    _row("check", "result", "seconds", "number")
    print("|---|---|--:|---|", flush=True)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-checks-")))
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder.resolve(), options.rehearse, time.monotonic() + SECONDS)
        for name, check in CHECKS:
            if options.only.lower() not in name.lower():
                continue
            started = time.monotonic()
            result, number = (reason, "") if reason else run(check, place)
            _row(name, result, "" if result.startswith("not ") else f"{time.monotonic() - started:.0f}", number)
            status = status or int(result.startswith("FAILED"))
    return status


if __name__ == "__main__":
    sys.exit(main())
