"""Measure the cost of a worker's death for a training step in Megatron: time by phase, and memory.

    python benchmarks/bench_step_recovery.py --runs 4
    python benchmarks/bench_step_recovery.py --runs 2 --resident 0 1 --microbatch-seconds 0.25

Each run trains with --recover, from four data-parallel replicas down to one.  It loses three workers by real SIGKILLs
(--recover-inject), each in another phase.  --resident adds GiB of touched memory to each worker.  --tell chooses how
the launcher notices a death (bench_recovery.py); runs with each choice take turns.  For each recovery, in ms:

    detect      from the kill to the coordinator's event
    rendezvous  from the time when a survivor joins the next epoch until it has the plan
    regroup     opening the rings of the new epoch
    pull        fetching the sums that are finished at any member
    rerun       running the lost microbatches: the only phase that is training
    reduce      summing the spans that are not finished
    agree       until the step is committed
    without rerun   the sum of all phases except "rerun"
    longer      duration of the iteration, less the median duration of previous iterations without a death, less "rerun"

The phases are from the worker that writes events.jsonl.  A survivor joins the next epoch only when its own microbatches
are done, so no computation of a survivor is lost.  "longer" includes all other effects of a death.

Memory: resident bytes of a survivor, namely the peak in the iteration against the previous peaks, and the bytes of
finished sums that were saved.  "ratio" is the median of "without rerun" relative to that with the last --tell.
--json FILE writes every measurement.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import (
    LAYOUTS,
    MODELS,
    command_line,
    enough_memory,
    head,
    load_average,
    played,
    row,
    times,
    train,
    write,
)
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.harness.forkserver import ForkServer, Run
from tests.harness.server import TELL_VARIABLE

PHASES = ("detect", "rendezvous", "regroup", "pull", "rerun", "reduce", "agree")
STRIKES = ("forward", "backward#2", "reduce-scatter", "all-gather", "agree", "backward")
KILLS_AT = (5, 9, 13)
ITERATIONS = 15
COLUMNS = (*PHASES, "without rerun", "longer")
WORKER_GIB = 0.6
"""Memory of a worker in addition to --resident, in GiB."""


def schedule(number: int, workers: int) -> list[tuple[int, int, str]]:
    """Return (worker, iteration, phase) of the kills in run ``number``; survivor and phases differ between runs."""
    first = number % workers
    victims = [(first + 1 + at) % workers for at in range(len(KILLS_AT))]
    return [
        (victim, iteration, STRIKES[(number * len(KILLS_AT) + at) % len(STRIKES)])
        for at, (victim, iteration) in enumerate(zip(victims, KILLS_AT, strict=True))
    ]


def one_run(
    server: ForkServer, folder: Path, number: int, resident: float, tell: str, options: Any
) -> list[dict[str, Any]]:
    """Train once; return the measurements of each recovery."""
    workers, _ = LAYOUTS["dp4"]
    kills = schedule(number, workers)
    spec = ",".join(f"{worker}@{iteration}:{phase}" for worker, iteration, phase in kills)
    flags = [*MODELS[options.model].argv, *options.flags.split(), "--log-interval", "10"]
    flags += ["--recover", "--recover-inject", spec]
    run = train(
        server, folder, workers, flags, iterations=ITERATIONS, killed={worker for worker, _, _ in kills},
        environment={"BENCH_MEMORY": "1", "BENCH_STRUCK": "1", "BENCH_RESIDENT": str(resident), TELL_VARIABLE: tell}
        | played(options.microbatch_seconds),
        timeout=options.timeout,
    )  # fmt: skip
    return [{"GiB": resident, "tell": tell} | recovery(folder, run, kill, kills) for kill in kills]


def recovery(folder: Path, run: Run, kill: tuple[int, int, str], kills: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Return the measurements of the recovery from ``kill``: phases in milliseconds, memory in MiB."""
    victim, iteration, phase = kill
    (survivor,) = {*range(len(run.codes))} - {worker for worker, _, _ in kills}
    struck = float((folder / f"struck-{victim}").read_text())
    faults = [e for e in read_events(folder / "events-0.jsonl") if e["event"] == "fault" and e.get("worker") == victim]
    accounts = [
        e for e in read_events(folder / EVENTS_FILE) if e["event"] == "recovery" and e["iteration"] == iteration
    ]
    rows = {row["iteration"]: row for row in times(folder, survivor) if row["iteration"]}
    seconds = {at: rows[at + 1]["at"] - rows[at]["at"] for at in rows if at + 1 in rows}
    quiet = [at for at in range(iteration - 3, iteration)]
    found: dict[str, Any] = {"victim": victim, "iteration": iteration, "phase": phase}
    found["detect"] = 1e3 * (faults[0]["mono"] - struck)
    account = accounts[-1]["seconds"] if accounts else {}
    found |= {name: 1e3 * account.get(name, 0.0) for name in PHASES[1:]}
    found["without rerun"] = sum(found[name] for name in PHASES if name != "rerun")
    usual = statistics.median(seconds[at] for at in quiet)
    found["longer"] = 1e3 * (seconds[iteration] - usual) - found["rerun"]
    found["usual"] = 1e3 * usual
    # Each row contains the peak of the iteration before it.
    found["peak before, MiB"] = max(rows[at + 1]["peak"] for at in quiet) / 1024
    found["peak, MiB"] = rows[iteration + 1]["peak"] / 1024
    found["set aside, MiB"] = (accounts[-1]["saved_bytes"] if accounts else 0) / 2**20
    return found


def summary(recoveries: Sequence[Mapping[str, Any]], base: str) -> list[list[object]]:
    """Return the rows of medians and maxima: one per value of --resident and --tell.

    ``base``: value of --tell to which the ratio refers.
    """
    by_way: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for item in recoveries:
        by_way.setdefault((item["GiB"], item["tell"]), []).append(item)
    usual = {way: statistics.median(item["without rerun"] for item in found) for way, found in by_way.items()}
    rows: list[list[object]] = []
    for (resident, tell), found in by_way.items():
        of = {name: [item[name] for item in found] for name in COLUMNS}
        cells = [f"{statistics.median(of[name]):.1f} ({max(of[name]):.1f})" for name in COLUMNS]
        ratio = f"{usual[resident, tell] / usual[resident, base]:.2f}"
        rows.append([f"{resident:g}", tell, "median (maximum)", *cells, ratio])
    return rows


def main() -> None:
    parser = command_line(__doc__, model="small", microbatch_seconds=0.0, timeout=600)
    parser.add_argument("--runs", type=int, default=4, help="number of runs, with three kills each")
    parser.add_argument("--flags", default="", help="more Megatron flags")
    parser.add_argument("--resident", type=float, nargs="+", default=[0], help="more GiB per worker", metavar="GIB")
    parser.add_argument("--tell", choices=("pidfd", "mutex"), nargs="+", default=["pidfd", "mutex"])
    options = parser.parse_args()
    needed = LAYOUTS["dp4"][0] * (max(options.resident) + WORKER_GIB)
    if not enough_memory(needed):
        parser.error(f"the workers need {needed:g} GiB of memory, but less is available on this machine")
    rows: list[dict[str, Any]] = []
    head("GiB each", "told by", "killed in", *COLUMNS, "ratio")
    cases = itertools.product(options.resident, range(options.runs), options.tell)
    with ForkServer() as server:
        for resident, number, tell in cases:
            with tempfile.TemporaryDirectory() as folder:
                for found in one_run(server, Path(folder), number, resident, tell, options):
                    rows.append(found)
                    row(f"{resident:g}", tell, found["phase"], *(f"{found[name]:.1f}" for name in COLUMNS), "")
    for cells in summary(rows, options.tell[-1]):
        row(*cells)
    of = {name: [item[name] for item in rows] for name in rows[0]}
    growth = [item["peak, MiB"] - item["peak before, MiB"] for item in rows]
    print(
        f"\ntimes in milliseconds; {len(rows)} kills; an iteration without a death takes "
        f"{statistics.median(of['usual']):.0f}; peak memory of a survivor: {min(of['peak before, MiB']):.0f} MiB or "
        f"more, in a recovery {statistics.median(growth):+.1f} MiB (at most {max(growth):+.1f}); saved sums: at most "
        f"{max(of['set aside, MiB']):.1f} MiB; all gradients: "
        f"{4 * MODELS[options.model].parameters / 2**20:.1f} MiB; {load_average()}"
    )
    write(options, rows)


if __name__ == "__main__":
    main()
