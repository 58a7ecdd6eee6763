"""Common functions of the benchmarks: command line, tables, models, flags, forked workers and training runs."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tests.harness.forkserver import ForkServer, Run

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

FORK = multiprocessing.get_context("fork")
SCRIPT = str(REPOSITORY / "benchmarks" / "timed_pretrain.py")

COMMON = (
    "--num-attention-heads 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --attention-softmax-in-fp32 --distributed-backend gloo --eval-interval 100000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --split 99,1,0 --num-workers 0 --recover-device cpu"
).split()
FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
    "--ckpt-format fsdp_dtensor"
).split()
RECOVER = ["--recover", "--recover-hang-timeout", "3600"]
"""Flags of a run with recovery.  The hang timeout is long, because runs that take turns pause for a long time."""


@dataclass(frozen=True)
class Model:
    """GPT model to train."""

    layers: int
    hidden: int
    sequence: int
    vocabulary: int
    micro_batch: int
    global_batch: int

    @property
    def argv(self) -> list[str]:
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --seq-length {self.sequence} "
            f"--max-position-embeddings {self.sequence} --vocab-size {self.vocabulary} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.global_batch}"
        ).split()

    @property
    def tokens(self) -> int:
        """Tokens per iteration."""
        return self.global_batch * self.sequence

    @property
    def parameters(self) -> int:
        """Approximate number of parameters."""
        return 12 * self.layers * self.hidden**2 + (self.vocabulary + self.sequence) * self.hidden


MODELS = {
    "toy": Model(2, 32, 32, 127, 1, 32),
    "tiny": Model(4, 32, 32, 127, 2, 16),
    "small": Model(4, 128, 128, 1024, 2, 16),
    "medium": Model(4, 256, 128, 2048, 2, 16),
    "large": Model(8, 512, 256, 4096, 1, 8),
}
LAYOUTS = {
    "dp2": (2, ""),
    "dp4": (4, ""),
    "dp8": (8, ""),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2"),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2"),
}
"""Name of a layout -> (number of workers, Megatron's flags)."""


COMMON_OPTIONS: Mapping[str, dict[str, Any]] = {
    "model": {"choices": MODELS},
    "microbatch_seconds": {"type": float, "help": "seconds per microbatch of the simulated device"},
    "timeout": {"type": float, "help": "seconds for one run"},
}


def command_line(text: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with --json, and with the ``COMMON_OPTIONS`` for which a default is given."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **COMMON_OPTIONS[name])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to FILE")
    return parser


def write(options: argparse.Namespace, found: Any) -> None:
    """Write ``found`` to the file of --json, if the user gave one."""
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def head(*columns: str) -> None:
    """Print the first lines of a table; a column whose name ends in a colon is right-aligned."""
    row(*(name.removesuffix(":") for name in columns))
    print(f"|{'|'.join('--:' if name.endswith(':') else '---' for name in columns)}|", flush=True)


def row(*cells: object) -> None:
    """Print a line of a table."""
    print(f"|{'|'.join(f' {cell} ' if cell != '' else ' ' for cell in cells)}|", flush=True)


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for a child process that imports this repository and computes in one thread."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


@contextmanager
def forked(size: int, work: Callable[[int, TextIO], object]) -> Iterator[tuple[list[int], list[TextIO]]]:
    """Fork ``size`` processes that run ``work(rank, report)``; kill them on exit from the context.

    Yields the pids, and the streams from which the lines can be read that the processes write to ``report``.
    """
    started, reports = list[Any](), list[TextIO]()
    try:
        for rank in range(size):
            read, write = os.pipe()
            with os.fdopen(write, "w", buffering=1) as report:
                started.append(FORK.Process(target=work, args=(rank, report)))
                started[-1].start()
            reports.append(os.fdopen(read))
        yield [process.pid for process in started], reports
    finally:
        for process in started:
            process.kill()
            process.join()
        for stream in reports:
            stream.close()


def reported(size: int, work: Callable[[int, TextIO], object]) -> list[list[Any]]:
    """Run ``work(rank, report)`` in ``size`` processes; return, per process, the parsed JSON of each reported line."""
    with forked(size, work) as (_, reports):
        return [[json.loads(line) for line in report] for report in reports]


def occupy(gib: float) -> object:
    """Allocate ``gib`` GiB of private memory and touch each page; return an object that keeps the memory."""
    import torch

    return torch.ones(int(gib * 2**30), dtype=torch.uint8)


def enough_memory(gib: float) -> bool:
    """Return whether ``gib`` GiB of memory are available on this machine."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) >= gib * 2**20


def strike(
    pids: Sequence[int], reports: Sequence[TextIO], victim: int, pause: float
) -> tuple[float, list[dict[str, float]]]:
    """Kill worker ``victim`` (SIGKILL) ``pause`` seconds after all workers have reported a first line.

    Returns the time of the kill (``time.monotonic``), and the times that each survivor reports next.  Raises
    RuntimeError if a worker exits instead.
    """

    def line(worker: int) -> str:
        if not (line := reports[worker].readline()):
            raise RuntimeError(f"worker {worker} exited before it reported")
        return line

    for worker in range(len(pids)):
        line(worker)
    time.sleep(pause)
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    return killed, [json.loads(line(worker)) for worker in range(len(pids)) if worker != victim]


@contextmanager
def store() -> Iterator[int]:
    """Run torch's key-value store in a separate process; yield its port."""
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = int(listener.getsockname()[1])

        def serve() -> None:
            master = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False,
                                master_listen_fd=listener.fileno())  # fmt: skip
            signal.pause()
            del master

        process = FORK.Process(target=serve)
        process.start()
    try:
        yield port
    finally:
        process.kill()
        process.join()


@contextmanager
def coordinator(workers: int, events: Path, secret: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a coordinator of ``workers`` workers on the loopback; yield its process and its port."""
    command = [sys.executable, "-m", "recover_megatron.membership", "--world", str(workers), "--events", str(events)]
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, text=True, env=environment(RECOVER_SECRET=secret)
    )
    try:
        assert process.stdout is not None
        yield process, int(json.loads(process.stdout.readline())["listening"].rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def train(
    server: ForkServer,
    folder: Path,
    workers: int,
    flags: Sequence[str],
    *,
    iterations: int,
    killed: Collection[int] | None = (),
    script: str = SCRIPT,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> Run:
    """Train ``iterations`` iterations with the flags ``COMMON`` and ``flags``, and the log folder ``folder``.

    ``killed``: workers that must be killed by SIGKILL, whereas all other workers must exit with code 0; None: any
    worker may be killed.  ``more``: additional arguments of ``ForkServer.run``.  Raises RuntimeError if a worker exits
    with another code.
    """
    argv = [script, *COMMON, "--log-interval", "100", "--train-iters", str(iterations), *flags]
    argv += ["--recover-log-dir", str(folder)] if "--recover" in flags else []
    run = server.run(workers, argv, folder, environment={"BENCH_OUT": str(folder), **(environment or {})}, **more)
    wanted = [{0, -9} if killed is None else {-9} if worker in killed else {0} for worker in range(workers)]
    came = [code in (0, -9) if killed is None else code == 0 for code in run.more.values()]
    if not all([*came, *(code in codes for code, codes in zip(run.codes, wanted, strict=True))]):
        raise RuntimeError(f"{' '.join(flags)}: {run.tail(40)}")
    return run


def played(*seconds: float) -> dict[str, str]:
    """Return environment variables for workers that simulate devices of fixed speed.

    ``seconds``: seconds per microbatch, for each worker in turn.
    """
    return {"BENCH_MICROBATCH": ",".join(map(str, seconds))}


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines of a file in JSON Lines format."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def times(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the rows that timed_pretrain.py wrote for a worker: one before each iteration, and one at the end.

    The row at the end has the iteration None.
    """
    return lines(folder / f"times-{rank}.jsonl")


def load_average() -> str:
    """Return the load average of the last minute and the number of cores, as text."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
