"""Measure the cost of --recover without failures: ratio of the iteration times with and without --recover.

    python benchmarks/bench_overhead.py --models small medium --layouts dp4 tp2-dp2 pp2-dp2

Two runs, with the same script and the same flags except --recover, are alive at the same time and take turns, a block
of iterations each (ABBA).  So other load of the machine slows both runs equally.  Both runs use the same clock
(timed_pretrain.py): an iteration lasts from one train_step to the next, including all of Megatron's work in between.
The first iteration of a block is dropped, because it follows a pause.

Each pair of adjacent blocks gives one ratio of medians.  The table has the median of these ratios with their quartiles,
for the wall time and for the processor time of all workers, which other load hardly changes.  It also has the relative
difference of the losses after the last iteration.  With --microbatch-seconds each worker simulates a device of fixed
speed, so that the processors are idle most of the time.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import (
    LAYOUTS,
    MODELS,
    RECOVER,
    command_line,
    head,
    load_average,
    played,
    row,
    times,
    train,
    write,
)
from tests.harness.forkserver import ForkServer

SIDES: dict[str, list[str]] = {"without": [], "with": RECOVER}
OVERLAPS = {"no": [False], "yes": [True], "both": [False, True]}
WARM_UP = 1
"""Number of first blocks of each side that are not counted."""


class Turns:
    """Named pipes by which the benchmark starts the next block of a run, and learns that a block is finished."""

    def __init__(self, folder: Path, workers: int) -> None:
        names = ["done", *(f"go-{rank}" for rank in range(workers))]
        for name in names:
            os.mkfifo(folder / name)
        # Opened in both directions, so that open() does not wait for a worker, and read() finds no end of file.
        self._done, *self._go = (os.open(folder / name, os.O_RDWR) for name in names)

    def wait(self) -> None:
        """Wait until every worker has finished its block.  Raises RuntimeError if the run has ended."""
        for _ in self._go:
            if os.read(self._done, 1) != b"x":
                raise RuntimeError("a run ended before its last block")

    def go(self) -> None:
        for pipe in self._go:
            os.write(pipe, b"x")

    def stop(self) -> None:
        """Make a thread in ``wait`` raise an error, because the run has ended."""
        os.write(self._done, b"-" * len(self._go))

    def close(self) -> None:
        for pipe in (self._done, *self._go):
            os.close(pipe)


def compare(
    servers: dict[str, ForkServer],
    workers: int,
    flags: list[str],
    options: Any,
    sides: dict[str, list[str]] = SIDES,
) -> dict[str, Any]:
    """Run all ``sides`` (name -> flags) in turns; return side -> result of ``blocks``."""
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(sides)) as pool:
        folders = {side: Path(temporary) / side for side in sides}
        for folder in folders.values():
            folder.mkdir()
        turns = {side: Turns(folder, workers) for side, folder in folders.items()}

        def run(side: str) -> None:
            environment = {"BENCH_BLOCK": str(options.block)} | played(options.microbatch_seconds)
            try:
                train(
                    servers[side], folders[side], workers, [*flags, *sides[side]], environment=environment,
                    iterations=options.block * options.blocks + 1, timeout=options.timeout,
                )  # fmt: skip
            finally:
                turns[side].stop()

        runs = [pool.submit(run, side) for side in sides]
        try:
            order = [side for at in range(options.blocks) for side in (list(sides) if at % 2 == 0 else [*sides][::-1])]
            for side in sides:
                turns[side].wait()
            for side in order:
                turns[side].go()
                turns[side].wait()
            for side in sides:
                turns[side].go()
        finally:
            for item in runs:
                item.result()  # raises the error of a failed run
            for turn in turns.values():
                turn.close()
        return {side: blocks(folders[side], workers, options.block) for side in sides}


def blocks(folder: Path, workers: int, length: int) -> dict[str, Any]:
    """Return the measurements of a run in blocks of ``length`` iterations.

    "seconds": per block, the last worker's seconds of each iteration except the first.  "cpu": per block, the processor
    seconds per iteration of all workers.  "loss": the last loss.
    """
    rows = [times(folder, rank) for rank in range(workers)]
    last = rows[-1]
    seconds, used = [], []
    for start in range(0, len(last) - length - 1, length):
        part = last[start : start + length + 1]
        seconds.append([after["at"] - before["go"] for before, after in pairwise(part[1:])])
        used.append(sum(item[start + length]["cpu"] - item[start]["cpu"] for item in rows) / length)
    return {"seconds": seconds, "cpu": used, "loss": next(item[-1]["loss"] for item in rows[::-1])}


def ratios(measured: dict[str, Any], with_: str = "with", without: str = "without") -> dict[str, list[float]]:
    """Return, for each pair of blocks, the ratio of the median seconds, and the ratio of the processor times."""
    ours, stock = measured[with_], measured[without]
    return {
        "wall": [
            statistics.median(a) / statistics.median(b)
            for a, b in [*zip(ours["seconds"], stock["seconds"], strict=True)][WARM_UP:]
        ],
        "cpu": [a / b for a, b in [*zip(ours["cpu"], stock["cpu"], strict=True)][WARM_UP:]],
    }


def spread(values: list[float]) -> str:
    """Return the median and the quartiles of ``values``, as text."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def typical(measured: dict[str, Any], side: str) -> float:
    """Return the median milliseconds of an iteration of ``side``."""
    return 1e3 * statistics.median(seconds for block in measured[side]["seconds"][WARM_UP:] for seconds in block)


def loss_difference(measured: dict[str, Any], stock: str, ours: str) -> str:
    """Return the relative difference of the last losses of two sides, as text; "?" if a loss is unknown."""
    losses = [measured[side]["loss"] for side in (stock, ours)]
    return "?" if None in losses else f"{abs(losses[1] / losses[0] - 1):.1e}"


def main() -> None:
    parser = command_line(__doc__, microbatch_seconds=0.0)
    parser.add_argument("--models", nargs="+", default=["small", "medium"], choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=["dp4", "tp2-dp2", "pp2-dp2"], choices=LAYOUTS)
    parser.add_argument("--block", type=int, default=6, help="iterations per turn")
    parser.add_argument("--blocks", type=int, default=17, help="turns of each side")
    parser.add_argument("--overlap", choices=OVERLAPS, default="both", help="--overlap-grad-reduce")
    parser.add_argument("--log-interval", type=int, default=10, help="Megatron's --log-interval")
    parser.add_argument("--flags", default="", help="more flags for both sides")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one comparison")
    options = parser.parse_args()
    rows = []
    head(
        "model", "layout", "overlap", "without, ms", "with, ms", "ratio (quartiles)", "processor time",
        "loss difference", "",
    )  # fmt: skip
    with ExitStack() as stack:
        servers = {side: stack.enter_context(ForkServer()) for side in SIDES}
        for model in options.models:
            for layout in options.layouts:
                for overlap in OVERLAPS[options.overlap]:
                    workers, shape = LAYOUTS[layout]
                    flags = [*MODELS[model].argv, *shape.split(), *options.flags.split()]
                    flags += ["--log-interval", str(options.log_interval)]
                    flags += ["--overlap-grad-reduce"] if overlap else []
                    measured = compare(servers, workers, flags, options)
                    found = ratios(measured)
                    row(
                        model, layout, "yes" if overlap else "no",
                        *(f"{typical(measured, side):.1f}" for side in SIDES), *map(spread, found.values()),
                        loss_difference(measured, *SIDES), load_average(),
                    )  # fmt: skip
                    rows.append({"model": model, "layout": layout, "overlap": overlap, "ratios": found, **measured})
    print(
        f"\n{options.blocks - WARM_UP} pairs of {options.block - 1} iterations, {options.block * options.blocks + 1} "
        f"iterations in all, log interval {options.log_interval}; {os.cpu_count()} cores, {platform.machine()}"
    )
    write(options, rows)


if __name__ == "__main__":
    main()
