"""Compare the seconds from the launch to the end of the first iteration, of torchrun and recover-run.

    python benchmarks/bench_startup.py --workers 1 4 8 --repeat 3

Both launchers start the same script with the same flags: a tiny GPT on the host device, mock data, data parallel.  They
take turns, so that other load slows both equally.  Prints a table of medians with the ratio to torchrun; --json FILE
writes every measurement.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import COMMON, MODELS, REPOSITORY, command_line, environment, head, row, write

SCRIPT = str(REPOSITORY / "pretrain_gpt_recover.py")
FIRST_ITERATION = " iteration        1/"
SHORT = "--global-batch-size 8 --train-iters 1 --lr-warmup-iters 0 --log-interval 1"
FLAGS = [*COMMON, *MODELS["toy"].argv, *SHORT.split()]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{workers}"],
    "recover-run": ["-m", "recover_megatron.launch", "--nproc-per-node", "{workers}"],
    "recover-run --fork-workers": ["-m", "recover_megatron.launch", "--fork-workers", "--nproc-per-node", "{workers}"],
}


def seconds_to_first_iteration(launcher: str, workers: int, timeout: float) -> float:
    """Launch a run and wait for its end; return the seconds until the log line of iteration 1.

    Raises RuntimeError if the run fails.
    """
    command = [sys.executable, *(part.format(workers=workers) for part in LAUNCHERS[launcher]), SCRIPT, *FLAGS]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment(PYTHONUNBUFFERED="1"),
    )  # fmt: skip
    end = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    seen: float | None = None
    last: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        last = [*last[-20:], line]
        if seen is None and FIRST_ITERATION in line:
            seen = time.perf_counter() - started
    code = process.wait()
    end.cancel()
    if seen is None or code != 0:
        raise RuntimeError(f"{launcher} with {workers} workers: exit code {code}\n{''.join(last)}")
    return seen


def main() -> None:
    parser = command_line(__doc__, timeout=300)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each launcher; the table has their median")
    options = parser.parse_args()
    rows = []
    for workers in options.workers:
        for repeat in range(options.repeat):
            for launcher in LAUNCHERS:
                seconds = seconds_to_first_iteration(launcher, workers, options.timeout)
                rows.append({"launcher": launcher, "workers": workers, "repeat": repeat, "seconds": seconds})
                print(f"{launcher:26} {workers} workers: {seconds:6.2f} s", file=sys.stderr, flush=True)

    print()
    head("workers", *LAUNCHERS)
    for workers in options.workers:
        medians = {
            launcher: statistics.median(
                item["seconds"] for item in rows if (item["launcher"], item["workers"]) == (launcher, workers)
            )
            for launcher in LAUNCHERS
        }
        base = medians["torchrun"]
        row(workers, *(f"{seconds:.1f} s ({seconds / base:.2f})" for seconds in medians.values()))
    print(
        f"\nmedians of {options.repeat}; in brackets the ratio to torchrun; "
        f"{os.cpu_count()} cores, {platform.machine()}"
    )
    write(options, rows)


if __name__ == "__main__":
    main()
