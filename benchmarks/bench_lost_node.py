"""Measure the time from the loss of a node to the next committed iteration, with a rollback in place and a restart.

    python benchmarks/bench_lost_node.py --runs 3

Two launchers of recover-run on one machine simulate two nodes of two workers each.  The workers form two pipelines of
two stages in Megatron's default order, so a node has all workers of a stage.  When iteration STRIKE is committed, every
process of the second node gets SIGKILL: launcher, coordinator and workers.  The two remaining workers form one replica:

    memory       the two workers roll back to a snapshot, in the same processes
    checkpoint   the two workers roll back to a checkpoint (--recover-memory-tier off)
    restart      the run ends with exit code 12 (--recover-last-resort off, too), and recover-run is started again
                 without delay on the remaining node, with --load of the checkpoint

A snapshot or a checkpoint is taken after every EVERY-th iteration, so all three methods repeat the same iterations.
Columns, in seconds from the kill:

    noticed         until the leading coordinator declares the first worker of the node lost.  This takes little time
                    here, since the kernel closes connections; for a silent host it takes a heartbeat timeout
    next committed  until an iteration is committed again
    caught up       until an iteration is committed that had not been committed before the kill

The three methods take turns, so that other load slows all of them equally.  "restart over this" is the ratio of the
restart's "next committed" to that of the row, run by run.  "less noticed" is the same ratio without the time "noticed".
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_spares import Launch
from benchmarks.megatron_runs import COMMON, MODELS, SCRIPT, command_line, head, lines, load_average, row, write
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.harness.processes import free_port, processes_with

RESTART = "restart"
WAYS = {
    "memory": ["--recover-memory-interval", "10"],
    "checkpoint": ["--recover-memory-tier", "off"],
    RESTART: ["--recover-memory-tier", "off", "--recover-last-resort", "off"],
}
EVERY, STRIKE = 10, 25
MARK = "BENCH_NODE"
"""Environment variable that identifies all processes of a simulated node."""
CLOCK = time.time() - time.monotonic()
"""Seconds to add to the monotonic clock to get the clock of events.jsonl."""
COLUMNS = ("noticed", "next committed", "caught up")


def lose(node: str) -> float:
    """Kill every process of a node, as a power failure does; return the time of the kill (monotonic clock)."""
    doomed = processes_with(f"{MARK}={node}")
    at = time.monotonic()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in doomed:
            with suppress(ProcessLookupError):  # a worker may have exited with its launcher
                os.kill(pid, number)
    return at


def noticed(logs: Path, after: float) -> float:
    """Return the time (monotonic clock) when the first worker of the second node was declared lost."""
    files = [path for path in logs.glob("events-*.jsonl") if path.stat().st_size]
    faults = [e for path in files for e in lines(path) if e["event"] == "fault" and e.get("worker") in (2, 3)]
    return min(e["time"] for e in faults if e["time"] > after + CLOCK) - CLOCK


def went_back(logs: Path) -> list[int]:
    """Return the iterations to which the run has rolled back."""
    return [event["to"] for event in read_events(logs / EVENTS_FILE) if event["event"] == "rolled back"]


def measure(way: str, folder: Path, options: Any) -> dict[str, float]:
    """Measure one loss of a node with the method ``way``."""
    model, saved = MODELS[options.model], folder / "checkpoints"
    training = [SCRIPT, *COMMON, *model.argv, "--global-batch-size", str(12 * model.micro_batch), "--train-iters"]
    training += ["100000", "--pipeline-model-parallel-size", "2", "--log-interval", "1000", "--recover", *WAYS[way]]
    training += ["--save", str(saved), "--save-interval", str(EVERY)]
    nodes = ["--nnodes", "2", "--master-port", str(free_port())]
    secret = {"RECOVER_SECRET": "of the launchers of this benchmark"}
    started = [
        Launch(folder / "first", [*nodes, "--node-rank", str(node), *training], options.microbatch_seconds, 2,
               **{MARK: f"{folder.name}-{node}"}, **secret)
        for node in range(2)
    ]  # fmt: skip
    run = started[0]
    run.wait(lambda: len(run.steps()) >= STRIKE)
    done = run.steps()[-1].iteration
    killed = lose(f"{folder.name}-1")
    started[1].end()
    if way == RESTART:
        run.wait(lambda: run.ended() is not None)
        if run.ended() != 12:
            raise RuntimeError(f"the run ended with exit code {run.ended()}, not 12: {run.logs}")
        run = Launch(folder / "second", [*training, "--load", str(saved)], options.microbatch_seconds, 2, **secret)
        again = run.wait(run.steps)
        kept = run.steps()[0].iteration - 1
    else:
        # Once all workers have rolled back, the earlier steps are in steps.jsonl.1.
        run.wait(lambda: went_back(run.logs) and (run.logs / "steps.jsonl.1").exists())
        (kept,) = went_back(run.logs)
        again = run.wait(lambda: run.steps() and run.steps()[-1].iteration > kept)
    caught_up = run.wait(lambda: run.steps()[-1].iteration > done)
    found = {
        "noticed": noticed(folder / "first", killed) - killed,
        "next committed": again - killed,
        "caught up": caught_up - killed,
        "lost": float(done - kept),
    }
    run.end()
    return found


def main() -> None:
    parser = command_line(__doc__, model="small", microbatch_seconds=0.1)
    parser.add_argument("--runs", type=int, default=3, help="runs of each method; the table has their median")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                rows[way].append(measure(way, Path(folder), options))
    head("", *(f"{name}:" for name in (*COLUMNS, "run again", "restart over this", "less noticed")))
    for way, losses in rows.items():
        median = [statistics.median(loss[name] for loss in losses) for name in (*COLUMNS, "lost")]
        pairs = list(zip(rows[RESTART], losses, strict=True))
        ratio = statistics.median(r["next committed"] / o["next committed"] for r, o in pairs)
        less = statistics.median(
            (r["next committed"] - r["noticed"]) / (o["next committed"] - o["noticed"]) for r, o in pairs
        )
        row(way, *(f"{seconds:.2f}" for seconds in median[:3]), f"{median[3]:.0f}", f"{ratio:.2f}", f"{less:.2f}")
    print(f"\n{options.model}, {options.microbatch_seconds} s per microbatch, {options.runs} each; {load_average()}")
    write(options, rows)


if __name__ == "__main__":
    main()
