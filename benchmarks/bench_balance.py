"""Measure the cost of a replica at half speed, with and without --recover-balance.

    python benchmarks/bench_balance.py --pace 0.1 --workers 4 --microbatches 32
    python benchmarks/bench_balance.py --simulate

There are four replicas of one worker each.  A microbatch takes --pace seconds, and twice as long on the slow replica
(see timed_pretrain.py).  There are three runs: without a slow replica, with one, and with one and --recover-balance.
The printed bound is the shortest possible iteration for the total speed of n workers: n / (n - 1/2) times the iteration
without a slow replica, rounded up to complete microbatches.

--simulate runs only the controller (tests/workload/paces.py), with noisy measurements; 2 % of them are three times too
long.  It prints how often quotas change, and the time of an iteration relative to the optimum for the true speeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import MODELS, command_line, head, played, row, train, write
from recover_megatron.run_log.steps import read_steps
from recover_megatron.workload import quotas
from tests.harness.forkserver import ForkServer
from tests.workload.paces import Speeds, constant, simulate


def measure(server: ForkServer, paces: list[float], options: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Train once; return the median seconds of an iteration, the last quotas, and the last loss.

    The first --drop iterations are not counted.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        argv = [*MODELS["toy"].argv, "--global-batch-size", str(options.microbatches), "--recover", *flags]
        train(server, out, len(paces), argv, iterations=options.iterations, environment=played(*paces), timeout=600)
        steps = list(read_steps(out / "steps.jsonl"))[options.drop :]
        return {
            "seconds": statistics.median(step.seconds for step in steps),
            "quotas": {replica: len(ids) for replica, ids in steps[-1].microbatches.items()},
            "loss": steps[-1].loss,
        }


SIMULATED: dict[str, Speeds] = {
    "4 equal": constant(1, 1, 1, 1),
    "32 equal": constant(*[1] * 32),
    "one of 4 at half speed": constant(1, 1, 1, 2),
    "one of 4 at a third": constant(1, 1, 1, 3),
    "one of 4 slower by a fifth": constant(1, 1, 1, 1.2),
    "one of 4 at half speed, 2 iterations of 6": lambda t: {0: 1, 1: 1, 2: 1, 3: 2 if t % 6 > 3 else 1},
    "one of 4 at half speed, 50 iterations of 100": lambda t: {0: 1, 1: 1, 2: 1, 3: 2 if t % 100 > 49 else 1},
}


def print_simulation(iterations: int = 1000) -> None:
    """Print the table of --simulate."""
    head("replicas", "microbatches:", "noise:", "changes per 1,000:", "mean:", "longest:")
    for name, speeds in SIMULATED.items():
        for each in (6, 32):
            for noise in (0.03, 0.1):
                total = each * len(speeds(0))
                run = simulate(speeds, total, iterations, noise=noise, seed=1)
                changes, settled = 1000 * run.changes / iterations, run.ratios[6:]
                figures = f"{changes:.0f}", f"{statistics.fmean(settled):.3f}", f"{max(settled):.2f}"
                row(name, total, f"{noise:.0%}", *figures)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds for one microbatch on a fast worker")
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--drop", type=int, default=4, help="number of first iterations that are not counted")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.simulate:
        return print_simulation()
    fast = [options.pace] * options.workers
    slow = [*fast[:-1], 2 * options.pace]
    with ForkServer() as server:
        rows = {
            "all fast": measure(server, fast, options),
            "one at half speed": measure(server, slow, options),
            "one at half speed, --recover-balance": measure(server, slow, options, "--recover-balance"),
        }
    base = rows["all fast"]["seconds"]
    best = quotas(options.microbatches, range(options.workers), speeds={n: 1 / pace for n, pace in enumerate(slow)})
    bound = max(best[n] * pace for n, pace in enumerate(slow)) / (options.microbatches / options.workers * options.pace)
    head("", "iteration, s", "over all fast", "quotas", "loss")
    for name, result in rows.items():
        shares = ", ".join(map(str, result["quotas"].values()))
        row(name, f"{result['seconds']:.3f}", f"{result['seconds'] / base:.3f}", shares, f"{result['loss']:.6f}")
    print(f"\nbound for complete microbatches: {bound:.3f} times the iteration without a slow replica")
    write(options, rows)


if __name__ == "__main__":
    main()
