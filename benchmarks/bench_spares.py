"""Measure the time from a worker's death until all replicas train again: hot spare, replacements, restarted job.

    python benchmarks/bench_spares.py --runs 3

recover-run trains on the host device, with three data-parallel replicas of one worker each, which simulate devices that
take --microbatch-seconds per microbatch.  After iteration STRIKE one worker gets SIGKILL; for the restarted job the
complete job gets SIGKILL, as from a scheduler.  A replacement is forked (--fork-workers), a prepared process, or a new
one (--prepared-workers 0).  Columns, in seconds from the kill:

    next step       until the next iteration is committed
    whole           until the first iteration of three replicas begins, which is "committed" less the duration of an
                    iteration before the kill; "iterations" is this time divided by that duration
    committed       until the first iteration of three replicas is committed
    groups, state   parts of "committed", from the log of the worker that takes the place: its process groups, its state
    lost            number of iterations that are run again (the restarted job has --save-interval 10)
    memory          MiB of host memory of the process that waits to be, or to fork, a replacement (its proportional set
                    size: pages that it shares with workers are divided by the number of processes)

The methods take turns, so that other load slows all of them equally.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import (
    COMMON,
    MODELS,
    SCRIPT,
    command_line,
    environment,
    head,
    load_average,
    played,
    row,
    write,
)
from recover_megatron.run_log.steps import StepRecord, read_steps
from recover_megatron.variables import ROOM_VARIABLE

WAYS = ("hot spare", "forked replacement", "prepared replacement", "new replacement", "job started again")
REPLICAS, STRIKE, GO_ON, SAVE = 3, 25, 5, 10
"""The kill comes when iteration STRIKE is committed.  After the first iteration of three replicas, a run is stopped as
soon as its steps.jsonl has GO_ON iterations.  SAVE is the value of --save-interval."""
WAITS = {"hot spare": "is ready for position", "prepared replacement": "is prepared to replace"}
"""Method -> text in the log of the process that waits for a death."""
TAKES = re.compile(r"takes position .*: groups ([\d.]+) s, state ([\d.]+) s")
PATIENCE = 300.0


class Launch:
    """Running process of recover-run, in a separate session."""

    def __init__(self, folder: Path, argv: Sequence[str], pace: float, workers: int = REPLICAS, **more: str) -> None:
        """``more``: additional environment variables."""
        self.logs = folder
        command = [sys.executable, "-m", "recover_megatron.launch", "--nproc-per-node", str(workers)]
        self._process = subprocess.Popen(
            [*command, "--log-dir", str(folder), *argv],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=environment(BENCH_OUT=str(folder.parent), **played(pace), **more),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def steps(self) -> list[StepRecord]:
        path = self.logs / "steps.jsonl"
        return list(read_steps(path)) if path.exists() else []

    def wait(self, what: Any) -> float:
        """Wait until ``what()`` is true; return the time (monotonic clock).  Raises RuntimeError after ``PATIENCE``."""
        until = time.monotonic() + PATIENCE
        while not what():
            if time.monotonic() > until:
                raise RuntimeError(f"the condition was not reached within {PATIENCE:.0f} s: {self.logs}")
            time.sleep(0.005)
        return time.monotonic()

    def end(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        self._process.wait()

    def ended(self) -> int | None:
        """Return the exit code of recover-run; None if recover-run is still running."""
        return self._process.poll()


def resident(launcher: int) -> float:
    """Return the proportional set size, in MiB, of the only child of ``launcher`` that waits in ``load``; 0: none."""
    waiting = [child for child in psutil.Process(launcher).children() if ROOM_VARIABLE in child.environ()]
    return sum(child.memory_full_info().pss for child in waiting) / 2**20


def measure(way: str, folder: Path, options: Any) -> dict[str, float]:
    """Measure one kill with the method ``way``."""
    model = MODELS[options.model]
    saves = ["--save", str(folder / "checkpoints"), "--save-interval", str(SAVE)]
    training = [SCRIPT, *COMMON, *model.argv, "--train-iters", "100000", "--log-interval", "1000", *saves, "--recover"]
    training += ["--global-batch-size", str(12 * model.micro_batch)]
    more = ["--recover-spares", "1"] if way == "hot spare" else []
    launcher = ["--max-restarts", "1"] if "replacement" in way else []
    launcher += {"forked replacement": ["--fork-workers"], "new replacement": ["--prepared-workers", "0"]}.get(way, [])
    run = Launch(folder / "first", [*launcher, *training, *more], options.microbatch_seconds)
    log = folder / "first" / f"worker-{REPLICAS}.log"
    if way in WAITS:
        run.wait(lambda: log.exists() and WAITS[way] in log.read_text())
    run.wait(lambda: len(run.steps()) >= STRIKE)
    memory = resident(run.pid)
    before = run.steps()
    iteration = statistics.median(step.seconds for step in before[-10:])
    done = before[-1].iteration
    killed = time.monotonic()
    if way == "job started again":
        run.end(signal.SIGKILL)
        run = Launch(folder / "second", [*training, "--load", str(folder / "checkpoints")], options.microbatch_seconds)
        whole = next_step = run.wait(run.steps)
        lost = done - run.steps()[0].iteration + 1
    else:
        victim = json.loads((folder / "first" / "workers.json").read_text())[1]["pid"]
        os.kill(victim, signal.SIGKILL)
        next_step = run.wait(lambda: run.steps()[-1].iteration > done)
        run.wait(lambda: any(step.replicas < REPLICAS for step in run.steps()))
        whole = run.wait(lambda: run.steps()[-1].replicas == REPLICAS)
        lost = 0
    run.wait(lambda: len(run.steps()) >= GO_ON)
    took = [found for path in run.logs.glob("worker-*.log") for found in TAKES.finditer(path.read_text())]
    run.end()
    return {
        "iteration": iteration,
        "next step": next_step - killed,
        "whole": whole - iteration - killed,
        "iterations": (whole - iteration - killed) / iteration,
        "committed": whole - killed,
        "groups": float(took[-1][1]) if took else 0.0,
        "state": float(took[-1][2]) if took else 0.0,
        "lost": float(lost),
        "memory": memory,
    }


def main() -> None:
    parser = command_line(__doc__, model="small", microbatch_seconds=0.1)
    parser.add_argument("--runs", type=int, default=3, help="runs of each method; the table has their median")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                rows[way].append(measure(way, Path(folder), options))
    names = list(rows[WAYS[0]][0])
    head("", *(f"{name}:" for name in names))
    for way, kills in rows.items():
        row(way, *(f"{statistics.median(kill[name] for kill in kills):.2f}" for name in names))
    settings = f"{options.model}, {options.microbatch_seconds} s per microbatch, {options.runs} kills each"
    print(f"\n{settings}; {load_average()}")
    write(options, rows)


if __name__ == "__main__":
    main()
