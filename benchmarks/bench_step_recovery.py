"""What the death of a worker costs a training step in Megatron, phase by phase, and what memory it takes.

    python benchmarks/bench_step_recovery.py --runs 4
    python benchmarks/bench_step_recovery.py --runs 2 --resident 0 1 --microbatch-seconds 0.25

Each run trains with --recover and loses a worker three times (--recover-inject: real SIGKILLs from inside, in another
phase and of another worker each time), from four data-parallel replicas down to one.  --resident: each worker holds so
many GiB more, all of it touched.  --tell: by what the launcher knows of a death (bench_recovery.py); a run by each of
them in turn.  Of each recovery, in ms:

    detect      from the kill to the coordinator's event
    rendezvous  from when a survivor turns to the next epoch until it holds the plan
    regroup     opening the rings of the new epoch
    pull        taking over what is finished at anybody
    rerun       running the lost microbatches: the only part that is training
    reduce      summing what is not finished yet (once more)
    agree       until the step is committed
    without rerun   the sum of all but that
    longer      the iteration against the median of those before it in which nobody died, less the re-run

The phases are the accounts of the worker that writes events.jsonl.  A survivor turns to the next epoch only when its
own microbatches are done: what it computes until then is no loss.  "longer" holds all else that a death disturbs.

Memory: resident bytes of the survivors, the peak within the iteration against the peaks of those before it, and the
bytes that finished sums took while they were set aside.  ratio: the median of "without rerun" over that by the last
--tell.  --json FILE writes every measurement.
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
"""The memory that a worker takes beside --resident."""


def schedule(number: int, workers: int) -> list[tuple[int, int, str]]:
    """(worker, iteration, phase) of the kills of a run: another survivor and other phases in each."""
    first = number % workers
    victims = [(first + 1 + at) % workers for at in range(len(KILLS_AT))]
    return [
        (victim, iteration, STRIKES[(number * len(KILLS_AT) + at) % len(STRIKES)])
        for at, (victim, iteration) in enumerate(zip(victims, KILLS_AT, strict=True))
    ]


def one_run(
    server: ForkServer, folder: Path, number: int, resident: float, tell: str, options: Any
) -> list[dict[str, Any]]:
    """Its recoveries."""
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
    """One kill: its phases in milliseconds, its memory in MiB."""
    victim, iteration, phase = kill
    (survivor,) = {*range(len(run.codes))} - {worker for worker, _, _ in kills}
    struck = float((folder / f"struck-{victim}").read_text())
    told = [e for e in read_events(folder / "events-0.jsonl") if e["event"] == "fault" and e.get("worker") == victim]
    accounts = [
        e for e in read_events(folder / EVENTS_FILE) if e["event"] == "recovery" and e["iteration"] == iteration
    ]
    rows = {row["iteration"]: row for row in times(folder, survivor) if row["iteration"]}
    seconds = {at: rows[at + 1]["at"] - rows[at]["at"] for at in rows if at + 1 in rows}
    quiet = [at for at in range(iteration - 3, iteration)]
    found: dict[str, Any] = {"victim": victim, "iteration": iteration, "phase": phase}
    found["detect"] = 1e3 * (told[0]["mono"] - struck)
    account = accounts[-1]["seconds"] if accounts else {}
    found |= {name: 1e3 * account.get(name, 0.0) for name in PHASES[1:]}
    found["without rerun"] = sum(found[name] for name in PHASES if name != "rerun")
    usual = statistics.median(seconds[at] for at in quiet)
    found["longer"] = 1e3 * (seconds[iteration] - usual) - found["rerun"]
    found["usual"] = 1e3 * usual
    # A row's peak is that of the iteration before it.
    found["peak before, MiB"] = max(rows[at + 1]["peak"] for at in quiet) / 1024
    found["peak, MiB"] = rows[iteration + 1]["peak"] / 1024
    found["set aside, MiB"] = (accounts[-1]["aside_bytes"] if accounts else 0) / 2**20
    return found


def summary(recoveries: Sequence[Mapping[str, Any]], base: str) -> list[list[object]]:
    """Return the last rows of the table, one for each memory and way to tell, with the ratio to the way ``base``."""
    by_way: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for its in recoveries:
        by_way.setdefault((its["GiB"], its["tell"]), []).append(its)
    usual = {way: statistics.median(its["without rerun"] for its in found) for way, found in by_way.items()}
    rows: list[list[object]] = []
    for (resident, tell), found in by_way.items():
        of = {name: [its[name] for its in found] for name in COLUMNS}
        cells = [f"{statistics.median(of[name]):.1f} ({max(of[name]):.1f})" for name in COLUMNS]
        ratio = f"{usual[resident, tell] / usual[resident, base]:.2f}"
        rows.append([f"{resident:g}", tell, "median (maximum)", *cells, ratio])
    return rows


def main() -> None:
    parser = command_line(__doc__, model="small", microbatch_seconds=0.0, timeout=600)
    parser.add_argument("--runs", type=int, default=4, help="of three kills each")
    parser.add_argument("--flags", default="", help="more flags of Megatron's")
    parser.add_argument("--resident", type=float, nargs="+", default=[0], help="GiB of each worker", metavar="GIB")
    parser.add_argument("--tell", choices=("pidfd", "mutex"), nargs="+", default=["pidfd", "mutex"])
    options = parser.parse_args()
    needed = LAYOUTS["dp4"][0] * (max(options.resident) + WORKER_GIB)
    if not enough_memory(needed):
        parser.error(f"{needed:g} GiB are needed, and this machine does not have as much left")
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
    of = {name: [its[name] for its in rows] for name in rows[0]}
    growth = [its["peak, MiB"] - its["peak before, MiB"] for its in rows]
    print(
        f"\nmilliseconds; {len(rows)} kills; an iteration without: {statistics.median(of['usual']):.0f}; "
        f"peak memory of a survivor {min(of['peak before, MiB']):.0f} MiB or more, in a recovery "
        f"{statistics.median(growth):+.1f} MiB (at most {max(growth):+.1f}); set aside at most "
        f"{max(of['set aside, MiB']):.1f} MiB, the gradients take "
        f"{4 * MODELS[options.model].parameters / 2**20:.1f}; {load_average()}"
    )
    write(options, rows)


if __name__ == "__main__":
    main()
