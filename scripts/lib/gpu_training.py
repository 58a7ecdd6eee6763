"""The trainings of gpu_checks: small GPTs that share one GPU, started as a user starts them, and what they left.

A worker takes the GPU that its local rank names, so workers that share one each have a launcher of their own: as many
"nodes" as workers, all on this machine.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from recover_megatron.report.run_dir import compare
from recover_megatron.run_log.steps import read_steps, violations

ROOT = Path(__file__).resolve().parents[2]
OURS = str(ROOT / "pretrain_gpt_recover.py")
STOCK = str(ROOT / "tests" / "megatron_hooks" / "reference_gpt.py")
"""A plain script on Megatron's interface, which knows nothing of recover_megatron."""
ROUNDING = 1e-4
"""Relative difference of a loss, above which the order of additions explains nothing."""
TAIL_LINES = 20

TINY = shlex.split(
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --make-vocab-size-divisible-by 1 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 6 --log-interval 1 --eval-interval 1000 --eval-iters 0 "
    "--split 99,1,0 --num-workers 0"
)
WITHOUT_KERNELS = shlex.split(
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --attention-softmax-in-fp32"
)
"""What Megatron needs where neither Transformer Engine nor apex is."""


class Failed(Exception):
    """A check has failed; the message is for the table."""


@dataclass
class Training:
    """One training: where its logs are, and its launchers.  ``dead``: workers that are killed on purpose."""

    folder: Path
    argv: Sequence[str]
    workers: int = 1
    dead: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    _launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start all launchers, each with one worker."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        shared = {"PYTHONPATH": path, "RECOVER_SECRET": secrets.token_hex(16)}
        several = ["--nnodes", str(self.workers), "--master-port", str(free_port())] if self.workers > 1 else []
        for node in range(self.workers):
            # Each worker is a host of its own to NCCL, which then takes several on one GPU.
            host = {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
            place = [*several, "--node-rank", str(node)] if several else []
            command = [sys.executable, "-m", "recover_megatron.launch", "--nproc-per-node", "1", *place]
            command += ["--log-dir", str(self.folder / f"node-{node}"), *self.argv]
            with open(self.folder / f"launcher-{node}.log", "wb") as log:
                launcher = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=os.environ | shared | self.environment | (host if several else {}),
                    start_new_session=True,
                )
            self._launchers.append(launcher)

    def finish(self, deadline: float) -> None:
        """Wait for the end; raises Failed unless it comes in time and all who were not killed ended well."""
        for node, launcher in enumerate(self._launchers):
            try:
                code = launcher.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"{self.folder.name} was not over in time: {self._why_it_ended(node)}") from None
            if code and node not in self.dead:
                raise Failed(f"{self.folder.name}: worker {node} ended with {code}: {self._why_it_ended(node)}")

    def stop(self) -> None:
        """End whatever still runs; the launchers end their workers."""
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.terminate()
        for launcher in self._launchers:
            try:
                launcher.wait(30)
            except subprocess.TimeoutExpired:
                launcher.kill()  # its workers end with it
                launcher.wait()

    def _why_it_ended(self, node: int) -> str:
        lines = (self.folder / f"launcher-{node}.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print(f"--- {self.folder / f'launcher-{node}.log'}", *lines, sep="\n", file=sys.stderr)
        return lines[-1].strip()[-160:] if lines else "nothing was said"

    # ---- what it left

    @property
    def steps_file(self) -> Path:
        return self.folder / "recover" / "steps.jsonl"

    def logged_losses(self) -> list[float]:
        """As Megatron's log has them, with seven digits."""
        text = (self.folder / "launcher-0.log").read_text(errors="replace")
        return [float(loss) for loss in re.findall(r"lm loss: ([-+.\dE]+)", text)]


def together(trainings: Sequence[Training], deadline: float) -> None:
    """Run them at the same time."""
    with ExitStack() as running:
        for training in trainings:
            running.callback(training.stop)
            training.start()
        for training in trainings:
            training.finish(deadline)


def worst_difference(run: Training, reference: Training, replicas: int | None = None) -> float:
    """Of the losses of two trainings with --recover; raises Failed where more than rounding differs.

    ``replicas``: how many ``run`` has at its end; None: each worker that lives is one.
    """
    left = run.workers - len(run.dead) if replicas is None else replicas
    mine, its = (list(read_steps(training.steps_file)) for training in (run, reference))
    for name, steps in ((run.folder.name, mine), (reference.folder.name, its)):
        if wrong := violations(steps):
            raise Failed(f"{name}: {wrong[0]}")
    if mine and mine[-1].replicas != left:
        raise Failed(f"{run.folder.name}: the last iteration had {mine[-1].replicas} replicas: the kills were no kills")
    compared = compare(mine, its)
    if compared.unlike or compared.iterations != len(its):
        raise Failed(compared.unlike[0] if compared.unlike else f"{compared.iterations} of {len(its)} iterations")
    return _small(compared.worst_loss.relative if compared.worst_loss else 0.0)


def worst_logged_difference(run: Training, reference: Training) -> float:
    """The same from Megatron's logs."""
    mine, its = run.logged_losses(), reference.logged_losses()
    if not its or len(mine) != len(its):
        raise Failed(f"{len(mine)} and {len(its)} logged losses")
    return _small(max(abs(a - b) / abs(b) for a, b in zip(mine, its, strict=True)))


def _small(difference: float) -> float:
    if not difference <= ROUNDING:
        raise Failed(f"losses differ by {difference:.1e}")
    return difference


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
