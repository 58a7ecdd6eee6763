"""Measure time by phase, and memory, of recoveries with models of several sizes.

    python benchmarks/bench_large_state.py --sizes 1 10 110

Each case trains with --recover and loses workers (--recover-inject: real SIGKILLs from inside):

    all-reduce   four replicas; one worker dies in its forward pass, one when two thirds of the sums are finished at all
                 members (these sums are saved while lost microbatches are run again), one when all sums are finished
    shards       four replicas, the distributed optimizer, shadows; a newcomer replaces the dead worker
    places       two replicas; a spare replaces the first dead worker, a newcomer replaces the second one
    snapshots    TP 2 x DP 2 with the memory tier; both workers of a position die: all workers roll back to a snapshot,
                 a survivor builds the model of that position, and newcomers complete the second replica

The table of times has the maximum in milliseconds over all recoveries of a case, from events.jsonl, without the time in
which microbatches are run again:

    state        time until a newcomer or a spare has its state
    repartition  time to redistribute the optimizer's shards
    waited       time for which the training waits for a snapshot
    behind       time until all holders have a snapshot
    back         time until all workers have loaded a snapshot

The table of sizes has MiB:

    training     resident memory before the first death: median between two iterations, and the peak in an iteration
    came         size of the state that a newcomer or a spare receives
    peak, kept   after the first death, maximum over the launched workers: increase of the peak, and of the resident
                 memory at the end
    newcomer     resident memory at the end of a worker that joined later, less ``training``
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import LAYOUTS, Model, command_line, head, lines, load_average, played, row, train, write
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.harness.forkserver import ForkServer

SIZES = {
    "1": Model(4, 128, 64, 1024, 1, 4),
    "10": Model(8, 256, 64, 16000, 1, 4),
    "110": Model(12, 768, 64, 32000, 1, 4),
}
"""Approximate millions of parameters -> model."""
STRIKE = 5
"""Iteration of the first death.  Before this iteration the training has allocated all its memory."""
MICROBATCH = 0.5
"""Minimum seconds of a microbatch.  Without it, the training of a small model would end before a newcomer joins."""
PHASES = ("rendezvous", "regroup", "pull", "reduce", "agree")
TAKES = re.compile(r"takes position .*: groups [\d.]+ s, state ([\d.]+) s, (\d+) bytes")


@dataclass(frozen=True)
class Case:
    """Kind of run.  ``kills``: value of --recover-inject, in which "AT" is the visit when two thirds are summed."""

    layout: str
    kills: str
    iterations: int
    flags: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of ``ForkServer.run``."""


CASES = {
    "all-reduce": Case("dp4", f"1@{STRIKE}:forward,2@{STRIKE + 1}:all-gather#AT,3@{STRIKE + 2}:agree", STRIKE + 4),
    "shards": Case(
        "dp4", f"1@{STRIKE}:forward", STRIKE + 4,
        "--use-distributed-optimizer --recover-shadow-shards 1", {"restarts": 1},
    ),
    "places": Case(
        "dp2", f"1@{STRIKE}:forward,0@{STRIKE + 3}:forward", STRIKE + 6,
        "--recover-spares 1", {"spares": 1, "restarts": 1},
    ),
    "snapshots": Case(
        "tp2-dp2", f"1@{STRIKE + 1}:forward,3@{STRIKE + 1}:forward", STRIKE + 5,
        "--recover-memory-tier always --recover-memory-interval 1",
        {"restarts": 2, "nodes": ["a", "b", "a", "b"]},
    ),
}  # fmt: skip


def measure(server: ForkServer, folder: Path, case: Case, model: Model, timeout: float) -> dict[str, float]:
    """Train once; return column -> number, for both tables."""
    workers, shape = LAYOUTS[case.layout]
    # Each worker receives three quarters of the bucket, in segments of half a MiB.
    visit = max(1, model.parameters * 4 // (512 << 10) // 2)
    kills = case.kills.replace("AT", str(visit))
    flags = [*model.argv, *shape.split(), *case.flags.split(), "--recover", "--recover-inject", kills]
    train(
        server, folder, workers, flags, iterations=case.iterations, killed=None,
        environment={"BENCH_MEMORY": "1"} | played(MICROBATCH), timeout=timeout, **case.more,
    )  # fmt: skip
    found: dict[str, float] = {}

    def most(name: str, value: float) -> None:
        found[name] = max(found.get(name, 0.0), value)

    for event in read_events(folder / EVENTS_FILE):
        if event["event"] == "recovery":
            for phase in PHASES:
                most(phase, 1e3 * event["seconds"].get(phase, 0.0))
            most("set aside", event["saved_bytes"] / 2**20)
        elif event["event"] == "repartition" and event["iteration"] > 1:
            most("repartition", 1e3 * event["seconds"])
        elif event["event"] == "snapshot":
            most("waited", 1e3 * event["seconds"]["waited"])
            most("behind", 1e3 * event["seconds"]["behind"])
        elif event["event"] == "rolled back":
            most("back", 1e3 * event["seconds"])
    for log in folder.glob("worker-*.log"):
        for seconds, size in TAKES.findall(log.read_text(encoding="utf-8")):
            if int(size):
                most("state", 1e3 * float(seconds))
                most("came", int(size) / 2**20)
    return found | memory(folder)


def memory(folder: Path) -> dict[str, float]:
    """Return the columns with MiB of resident memory; the module's docstring describes these columns."""
    processes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for item in (item for path in folder.glob("times-*.jsonl") for item in lines(path)):
        if item["iteration"] is not None:
            sizes = {name: item[name] / 1024 for name in ("peak", "resident")}
            processes[item["pid"]].append({"iteration": item["iteration"], **sizes})
    end = max(item["iteration"] for rows in processes.values() for item in rows)
    launched = [rows for rows in processes.values() if rows[0]["iteration"] == 1]
    # A row has the peak of the previous iteration.  The first two iterations are left out: they allocate the moments.
    quiet = [item for rows in launched for item in rows if 2 < item["iteration"] <= STRIKE]
    found = {
        "training": statistics.median(item["resident"] for item in quiet),
        "training, peak": max(item["peak"] for item in quiet),
    }
    for rows in (rows for rows in launched if rows[-1]["iteration"] == end):
        last = max(at for at, item in enumerate(rows[: STRIKE + 1]) if item["iteration"] <= STRIKE)
        more = max(item["peak"] for item in rows[last + 1 :]) - max(item["peak"] for item in rows[2 : last + 1])
        kept = rows[-1]["resident"] - rows[last]["resident"]
        found |= {"peak": max(more, found.get("peak", more)), "kept": max(kept, found.get("kept", kept))}
    came = [rows[-1]["resident"] for rows in processes.values() if rows[0]["iteration"] > 1]
    return found | ({"newcomer": max(came) - found["training"]} if came else {})


TIMES = (*PHASES, "state", "repartition", "waited", "behind", "back")
SIZES_OF = ("training", "training, peak", "set aside", "came", "peak", "kept", "newcomer")


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    head("case", "million parameters:", *(f"{name}:" for name in columns), "load:")
    for item in rows:
        cells = (f"{item[column]:.0f}" if column in item else "" for column in columns)
        row(item["case"], item["size"], *cells, item["load"])
    print()


def main() -> None:
    parser = command_line(__doc__, timeout=1800)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="millions of parameters")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ForkServer() as server:
        for name in options.cases:
            for size in options.sizes:
                with tempfile.TemporaryDirectory() as folder:
                    found = measure(server, Path(folder), CASES[name], SIZES[size], options.timeout)
                rows.append({"case": name, "size": size, "load": load_average().split()[1], **found})
                print(rows[-1], file=sys.stderr, flush=True)
    print("milliseconds:\n")
    table(rows, TIMES)
    print("MiB:\n")
    table(rows, SIZES_OF)
    write(options, rows)


if __name__ == "__main__":
    main()
