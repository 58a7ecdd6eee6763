"""Measure the cost of the memory tier, and the time to recover from a lost node: from memory and from disk.

    python benchmarks/bench_tiers.py --model medium --iterations 60

Two simulated nodes of two workers run on one host, as two pipelines of two stages in Megatron's default order.  So each
node has one stage of both replicas.

    cost     runs without failures, with a snapshot after every K-th iteration (K = 1, 10, 100) and without snapshots
             ("off"), --rounds times in turn.  Measured: the median and the mean time of an iteration, the peak resident
             memory of a worker, the wait of the training for a snapshot ("waited"), and the time that a snapshot takes
             in the background ("behind")
    loss     both workers of the second node get SIGKILL in one iteration and are not replaced.  Measured: seconds from
             the first event "fault" until the first iteration after the rollback is complete, the duration of the load,
             and the number of iterations that are run again; with memory (K = 10), and with disk (--save-interval 10)

--sharded trains with the distributed optimizer, so that each worker saves its own shards.

Everything runs on one machine, so a snapshot uses the loopback, and the disk is the page cache.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import LAYOUTS, MODELS, command_line, head, load_average, row, times, train, write
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.harness.forkserver import ForkServer

NODES = ["a", "a", "b", "b"]
WARM = 5
"""Number of iterations at the start of a run that are not counted, because they contain one-time work."""
EVERY = 10
"""Iterations between two snapshots, and between two checkpoints, in the runs with a loss."""
CLOCK = time.time() - time.monotonic()
"""Seconds to add to the monotonic clock of the iterations to get the clock of the events."""
COUNTED = ("waited", "behind")
INTERVALS = (0, 1, 10, 100)
"""Numbers of iterations between two snapshots (K); 0: no snapshots."""


def tier(every: int) -> list[str]:
    memory = ["auto", "--recover-memory-interval", str(every)] if every else ["off"]
    return ["--recover-memory-tier", *memory]


def run(server: ForkServer, folder: Path, options: Any, iterations: int, flags: list[str], victims: set[int]) -> None:
    """Train to the end.  Raises RuntimeError if a worker exits unexpectedly; ``victims`` are expected to be killed."""
    workers, shape = LAYOUTS["pp2-dp2"]
    sharded = ["--use-distributed-optimizer"] * options.sharded
    train(
        server, folder, workers,
        [*MODELS[options.model].argv, *shape.split(), "--log-interval", "1000", "--recover", *flags, *sharded],
        iterations=iterations, killed=victims, environment={"BENCH_MEMORY": "1"}, timeout=options.timeout, nodes=NODES,
    )  # fmt: skip


def cost(server: ForkServer, options: Any, every: int) -> dict[str, float]:
    """Train once with K = ``every``; return milliseconds, and the peak memory of a worker in MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(server, folder, options, options.iterations, tier(every), set())
        rows = times(folder, 0)
        seconds = [after["at"] - before["at"] for before, after in pairwise(rows[WARM:])]
        took = [e["seconds"] for e in read_events(folder / EVENTS_FILE) if e["event"] == "snapshot"]
        peak = max(its.get("peak", 0) for rank in range(len(NODES)) for its in times(folder, rank)) / 1024
    counted = {name: 1e3 * statistics.median(one[name] for one in took) if took else 0.0 for name in COUNTED}
    return {"median": 1e3 * statistics.median(seconds), "mean": 1e3 * statistics.mean(seconds), "peak": peak} | counted


def loss(server: ForkServer, options: Any, memory: bool) -> dict[str, float]:
    """Train once and lose a node; return seconds, and the number of iterations that were run again."""
    strikes_at = 2 * EVERY + EVERY // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = tier(EVERY if memory else 0)
        if not memory:
            flags += ["--save", str(folder / "checkpoints"), "--save-interval", str(EVERY)]
        flags += ["--recover-inject", f"2@{strikes_at}:forward,3@{strikes_at}:forward"]
        run(server, folder, options, strikes_at + WARM, flags, {2, 3})
        began = next(e["time"] for e in read_events(folder / "events-0.jsonl") if e["event"] == "fault")
        (back,) = (event for event in read_events(folder / EVENTS_FILE) if event["event"] == "rolled back")
        after = [its["at"] + CLOCK for its in times(folder, 0) if its["at"] + CLOCK > back["time"]]
    return {
        "to the next committed": after[1] - began,
        "load": back["seconds"],
        "run again": back["lost"],
    }


def main() -> None:
    parser = command_line(__doc__, model="small", timeout=900)
    parser.add_argument("--iterations", type=int, default=60, help="number of iterations of a run without failures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    costs: dict[int, list[dict[str, float]]] = {every: [] for every in INTERVALS}
    losses: dict[str, list[dict[str, float]]] = {"memory": [], "disk": []}
    with ForkServer() as server:
        for _ in range(options.rounds):
            for every in INTERVALS:
                costs[every].append(cost(server, options, every))
            for where, its in losses.items():
                its.append(loss(server, options, where == "memory"))
    head(
        "K", "median, ms", "mean, ms", "mean over off", "peak of a worker, MiB", "waited for one, ms", "of the time, %",
        "behind, ms",
    )  # fmt: skip
    for every, its in costs.items():
        median, mean, peak, waited, behind = (
            statistics.median(one[name] for one in its) for name in ("median", "mean", "peak", *COUNTED)
        )
        ratio = statistics.median(a["mean"] / b["mean"] for a, b in zip(its, costs[0], strict=True))
        share = 100 * waited / (every * mean) if every else 0.0
        counted = (f"{waited:.2f}", f"{share:.2f}", f"{behind:.1f}") if waited else ("", "", "")
        row(every or "off", f"{median:.1f}", f"{mean:.1f}", f"{ratio:.3f}", f"{peak:.0f}", *counted)
    print()
    head("tier", "to the next committed, s", "of these the load, s", "run again")
    for where, its in losses.items():
        took = [statistics.median(one[name] for one in its) for name in ("to the next committed", "load", "run again")]
        row(where, f"{took[0]:.2f}", f"{took[1]:.2f}", f"{took[2]:.0f}")
    print(f"\n{options.model}, {options.rounds} rounds; {load_average()}")
    write(options, {"costs": costs, "losses": losses})


if __name__ == "__main__":
    main()
