"""Trainings of gpu_checks: small GPTs that share the available GPUs, started as a user starts them.

A worker uses the GPU of its local rank, so workers that share a GPU have separate launchers: several "nodes", all on
this machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from recover_megatron.report.run_dir import compare
from recover_megatron.run_log.steps import StepRecord, read_steps, violations

ROOT = Path(__file__).resolve().parents[2]
"""Source tree, or the data folder of an installed package."""
ROUNDING = 1e-4
"""Relative difference of a loss or a norm, above which the order of additions cannot be the reason."""
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
"""Variables, together with NCCL_HOSTID, of processes that NCCL must treat as separate hosts, to share one GPU."""
TINY = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 1 --mock-data --split 99,1,0
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --attention-softmax-in-fp32 --num-workers 0 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --micro-batch-size 1 --global-batch-size 12 --train-iters 6""".split()
BUSY = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
    --ddp-bucket-size 1250000"""
"""Model large enough that the GPU lags behind its host."""
SHARED = f"{BUSY} --num-layers 2 --global-batch-size 4 --ddp-bucket-size 600000"
"""Model for workers that share a GPU; the GPU runs one process at a time, so their collectives take long."""
SMALLER = "--num-layers 2 --global-batch-size 6 --ddp-bucket-size 30000"
OVERLAP = """--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --lr 1e-5 --min-lr 1e-6 --train-iters 1000000 --exit-duration-in-mins 30"""
"""Flags of a run that the check stops; the small learning rate keeps rounding differences small."""
LARGE = f"{BUSY} --num-layers 12 --hidden-size 1024 --lr 1e-4 --min-lr 1e-5 --bf16"
TIMED = f"{LARGE} --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2"
"""Model whose microbatch takes longer on the GPU than on the host: the host's time varies too much between runs."""


class Failed(Exception):
    """Error for a failed check; the message is for the table."""


class NotRun(Exception):
    """Error for a check that cannot run on this machine, which is no failure; the message is for the table."""


@dataclass(frozen=True)
class Place:
    """Place where the checks run: on the host device if ``rehearse``.  ``deadline``: of ``time.monotonic``."""

    folder: Path
    rehearse: bool
    deadline: float
    gpus: int = 1

    @property
    def soon(self) -> float:
        """Seconds within which a revocation must reach all ranks."""
        return 10.0 if self.rehearse else 1.0

    def until(self, seconds: float) -> float:
        """Return the deadline of one check."""
        return min(self.deadline, time.monotonic() + seconds * (8 if self.rehearse else 1))

    def needs(self, *packages: str) -> None:
        for package in packages:
            if (package != "nccl" or not self.rehearse) and importlib.util.find_spec(package) is None:
                raise NotRun(f"not run: {package} is not installed")


@dataclass
class Training:
    """Training of ``nodes`` launchers with ``each`` workers.

    ``inject``: injected deaths; ``dead``: nodes whose launchers may fail.
    """

    place: Place
    name: str
    flags: Sequence[str]
    nodes: int = 1
    each: int = 1
    inject: str = ""
    dead: Sequence[int] = ()
    restarts: int = 0
    recover: bool = True
    _launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        device, backend = ("cpu", "gloo") if self.place.rehearse else ("cuda", "nccl")
        argv = ["pretrain_gpt_recover.py", *self.flags, "--distributed-backend", backend, "--recover-device", device]
        argv += ["--recover", "--recover-log-dir", str(self.folder / "recover")] if self.recover else []
        argv += ["--recover-inject", self.inject] if self.inject else []
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "RECOVER_SECRET": secrets.token_hex(16)}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if "--tensor-model-parallel-size" in self.flags else {}
        with socket.create_server(("127.0.0.1", 0)) as sock:
            several = ["--nnodes", str(self.nodes), "--master-port", str(sock.getsockname()[1])]
        for node in range(self.nodes):
            command = [sys.executable, "-m", "recover_megatron.launch", "--nproc-per-node", str(self.each)]
            command += ["--log-dir", str(self.folder / f"node-{node}"), "--max-restarts", str(self.restarts)]
            command += [*several, "--node-rank", str(node)] if self.nodes > 1 else []
            env = environment | (ALONE | {"NCCL_HOSTID": f"node{node}"} if self.nodes > 1 else {})
            with open(self._log(node), "wb") as log:
                process = subprocess.Popen([*command, *argv], stdout=log, stderr=log, cwd=self.folder, env=env)
            self._launchers.append(process)

    def finish(self, deadline: float) -> None:
        """Wait for the end of the training; raise Failed if it is late, or a launcher not in ``dead`` failed."""
        for node, launcher in enumerate(self._launchers):
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline - time.monotonic()))
            if (code := launcher.poll()) is None or (code and node not in self.dead):
                ended = "did not finish in time" if code is None else f"exited with {code}"
                raise Failed(f"{self.name}: node {node} {ended}: {self.said(node)}")

    def stop(self) -> None:
        """Stop all running launchers; they stop their workers, and workers of a killed launcher exit."""
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for launcher in self._launchers:
                end(launcher)
            for launcher in self._launchers:
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(30)

    @property
    def folder(self) -> Path:
        return self.place.folder / self.name

    def _log(self, node: int = 0) -> Path:
        return self.folder / f"launcher-{node}.log"

    def said(self, node: int = 0) -> str:
        """Return the last line of a launcher's log."""
        return (self._log(node).read_text(errors="replace").strip().splitlines() or ["its log is empty"])[-1][-160:]

    @property
    def steps(self) -> list[StepRecord]:
        file = self.folder / "recover" / "steps.jsonl"
        return list(read_steps(file)) if file.exists() else []

    def logged(self, what: str) -> list[float]:
        """Return the numbers after ``what`` in Megatron's log, one per iteration."""
        return list(map(float, re.findall(rf"{what}: ([-+.\dE]+)", self._log().read_text(errors="replace"))))


@contextmanager
def running(*trainings: Training) -> Iterator[None]:
    """Run the trainings at the same time, and stop them at the end of the context."""
    with ExitStack() as ends:
        for training in trainings:
            ends.callback(training.stop)
            training.start()
        yield


def difference(run: Training, reference: Training) -> str:
    """Compare the losses, for the table; raise Failed if more than rounding differs, or a microbatch is wrong."""
    ours, expected = run.steps, reference.steps
    if wrong := [*violations(ours), *violations(expected)]:
        raise Failed(f"{run.name}: {wrong[0]}")
    compared = compare(ours, expected)
    worst = max([each.relative for each in (compared.worst_loss, compared.worst_grad_norm) if each], default=1.0)
    if compared.unlike or worst > ROUNDING:
        raise Failed(f"losses or gradients differ by {worst:.1e}: {compared.unlike}")
    return f"losses and gradients of {compared.iterations} iterations differ by {worst:.0e}"


def deaths(name: str, flags: str, inject: str, dead: Sequence[int], replicas: int, nodes: int, place: Place) -> str:
    """Run workers on one GPU, each a host for NCCL: some die within steps, ``replicas`` are complete at the end."""
    place.needs("megatron.training", "nccl")
    if place.rehearse and inject.endswith(":device"):
        raise NotRun("not run: rehearsal")
    reference = Training(place, name, [*TINY, *shlex.split(flags)], nodes)
    killed = replace(reference, name=f"{name}-killed", inject=inject, dead=dead, _launchers=[])
    deadline = place.until(90)
    with running(reference, killed):
        reference.finish(deadline)
        killed.finish(deadline)
    if len(killed.steps) != len(reference.steps) or killed.steps[-1].replicas != replicas:
        raise Failed(f"{len(killed.steps)} iterations, the last {killed.steps[-1:]}: not as expected after the kills")
    return difference(killed, reference)


def overlap(place: Place) -> str:
    """Check the usual setting on Hopper: sums during tensor parallelism, one hardware queue; a death and a rejoin."""
    nodes, each = (4, 1) if place.gpus < 2 else (2, 2) if place.gpus < 4 else (1, 4 if place.gpus < 8 else 8)
    size = SMALLER if place.rehearse else BUSY if place.gpus > 1 else SHARED
    flags = f"{size} {OVERLAP} --tensor-model-parallel-size {nodes * each // 2}"
    flags += " --recover-allow-cross-node-tp" if nodes > 1 else ""
    result = rejoin("overlap", flags, nodes, each, (30, 10) if place.gpus > 1 else (10, 5), place)
    return f"sums during TP hang neither in normal steps nor at a death; {result}"


def rejoin(
    name: str, flags: str, nodes: int, each: int, when: tuple[int, int], place: Place, seconds: float = 100.0
) -> str:
    """Kill worker 1, which ends one of two replicas, and wait until the replica has rejoined the same run.

    ``when``: iteration of the death, and number of iterations to see after the rejoin, within ``seconds``.
    """
    place.needs("megatron.training", "nccl")
    death, after = when
    calm = Training(place, name, [*TINY, *shlex.split(flags)], nodes, each)
    killed = replace(calm, name=f"{name}-killed", inject=f"1@{death}:backward#2", restarts=1, _launchers=[])
    deadline = place.until(seconds)
    with running(calm, killed):
        while True:
            done, lost = len(calm.steps), killed.steps
            whole = len(list(takewhile(lambda step: step.replicas == 2, lost)))
            back = [step.iteration for step in lost[whole:] if step.replicas == 2]
            if len(back) >= after and done >= back[after - 1]:
                break
            if time.monotonic() > deadline:
                seen = f"a death in iteration {death}, {len(back)} of them after the rejoin"
                raise Failed(f"{done} iterations, {len(lost)} with {seen}: {calm.said()}; {killed.said()}")
            time.sleep(0.5)
        calm.stop()
        using = list(Counter(nvidia_smi("--query-compute-apps=gpu_uuid").splitlines()).values())
    if place.gpus > 1 and max(using, default=0) > nodes * each // min(place.gpus, each):
        raise Failed(f"processes other than its workers use a GPU: processes per GPU: {using}")
    logs = "".join(log.read_text(errors="replace") for log in killed.folder.rglob("worker-*.log"))
    states = [logs.count(f"{how} from device to device") for how in ("is transferred", "cannot be transferred")]
    came = f"states transferred from device to device: {states[0]}, failed: {states[1]}"
    took = "; ".join(re.findall(r"takes position .* on: (.*)", logs))
    return f"{difference(killed, calm)}; {came}; {took}; processes per GPU: {using or 'unknown'}"


def large(place: Place) -> str:
    """Transfer a state of some gigabytes from device to device, while its holder computes."""
    size = SMALLER if place.rehearse else f"{LARGE} --global-batch-size 4 --ddp-bucket-size 40000000"
    return rejoin("large", f"{size} {OVERLAP}", 2, 1, (4, 3), place, 150)


def nvidia_smi(query: str) -> str:
    """Return the output of nvidia-smi; empty if it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def parity(place: Place) -> str:
    """Compare one worker without and with --recover: equal losses; and the times."""
    place.needs("megatron.training", "nccl")
    flags = [*TINY, *shlex.split("" if place.rehearse else TIMED), "--train-iters", "30"]
    losses, took = [], []
    for name, recover in (("without-recover", False), ("with-recover", True)):
        training = Training(place, name, flags, recover=recover)
        with running(training):
            training.finish(place.until(60))
        losses.append(training.logged("lm loss"))
        took.append(statistics.median(training.logged(r"elapsed time per iteration \(ms\)")[10:]))
    if not losses[0] or (worst := max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))) > ROUNDING:
        raise Failed(f"losses without and with --recover: {losses}")
    return f"losses differ by {worst:.0e}; {took[0]:.1f} ms per iteration, {took[1]:.1f} with --recover"
