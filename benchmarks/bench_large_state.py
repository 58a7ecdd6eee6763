"""Measures what of a recovery grows with the state of a worker: time by phase, and memory, for models of several sizes.

    python benchmarks/bench_large_state.py --sizes 1 10 110

Each case trains with --recover and loses workers (--recover-inject: real SIGKILLs from inside):

    all-reduce   four replicas; a worker dies in its forward pass, one when two thirds of the sums are everywhere
                 (they are set aside while its microbatches are run again), one when all has been summed
    shards       four replicas, the distributed optimizer, shadows; a newcomer takes the place of the dead worker
    places       two replicas; a spare takes the place of the first dead worker, a newcomer that of the second
    snapshots    TP 2 x DP 2 with the memory tier; both workers of a position die: all go back to a snapshot, one of
                 those who are left builds the model of that position, and newcomers make up the second replica

Of each case, times in milliseconds, the longest of all its recoveries (the accounts in events.jsonl; training, that is
the re-run, is left out); and MiB of resident memory of a worker:

    state        a newcomer or a spare has its state, and what came
    repartition  the optimizer's shards have changed hands
    waited, behind   the training waited for a snapshot, it was everywhere
    back         all have loaded a snapshot
    training     before the first death: between two iterations (median), and at the peak of one
    peak, kept   from the first death on, of the worker launched with the run that has most: the highest peak less the
                 one before, and what is resident at the end less what was before
    newcomer     resident at the end, of one that came later, less ``training``
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
"""Millions of parameters, about."""
STRIKE = 5
"""The iteration of the first death: by then all memory is in use that the training needs."""
MICROBATCH = 0.5
"""Seconds that a microbatch takes at least: a small model would be trained before a newcomer has come."""
PHASES = ("rendezvous", "regroup", "pull", "reduce", "agree")
TAKES = re.compile(r"takes position .*: groups [\d.]+ s, state ([\d.]+) s, (\d+) bytes")


@dataclass(frozen=True)
class Case:
    """A run.  ``kills``: as for --recover-inject; ``AT``: the visit at which two thirds of the sums are everywhere."""

    layout: str
    kills: str
    iterations: int
    flags: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    """More arguments of ``ForkServer.run``."""


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
    """Train once; returns the numbers of the two tables, by column."""
    workers, shape = LAYOUTS[case.layout]
    # Segments of half a MiB arrive one after the other, those of three quarters of the bucket.
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
            most("set aside", event["aside_bytes"] / 2**20)
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
    """MiB of the workers: see above."""
    processes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for its in (its for path in folder.glob("times-*.jsonl") for its in lines(path)):
        if its["iteration"] is not None:
            sizes = {name: its[name] / 1024 for name in ("peak", "resident")}
            processes[its["pid"]].append({"iteration": its["iteration"], **sizes})
    end = max(its["iteration"] for rows in processes.values() for its in rows)
    launched = [rows for rows in processes.values() if rows[0]["iteration"] == 1]
    # A row's peak is that of the iteration before it; in the first two the moments are made.
    quiet = [its for rows in launched for its in rows if 2 < its["iteration"] <= STRIKE]
    found = {
        "training": statistics.median(its["resident"] for its in quiet),
        "training, peak": max(its["peak"] for its in quiet),
    }
    for rows in (rows for rows in launched if rows[-1]["iteration"] == end):
        last = max(at for at, its in enumerate(rows[: STRIKE + 1]) if its["iteration"] <= STRIKE)
        more = max(its["peak"] for its in rows[last + 1 :]) - max(its["peak"] for its in rows[2 : last + 1])
        kept = rows[-1]["resident"] - rows[last]["resident"]
        found |= {"peak": max(more, found.get("peak", more)), "kept": max(kept, found.get("kept", kept))}
    came = [rows[-1]["resident"] for rows in processes.values() if rows[0]["iteration"] > 1]
    return found | ({"newcomer": max(came) - found["training"]} if came else {})


TIMES = (*PHASES, "state", "repartition", "waited", "behind", "back")
SIZES_OF = ("training", "training, peak", "set aside", "came", "peak", "kept", "newcomer")


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    head("case", "million parameters:", *(f"{name}:" for name in columns), "load:")
    for its in rows:
        cells = (f"{its[column]:.0f}" if column in its else "" for column in columns)
        row(its["case"], its["size"], *cells, its["load"])
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
