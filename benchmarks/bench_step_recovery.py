"""What the death of a worker costs a training step in Megatron, phase by phase, and what memory it takes.

    python benchmarks/bench_step_recovery.py --runs 4

Each run trains with --recover and loses a worker three times (--recover-inject: real SIGKILLs from inside, in another
phase and of another worker each time), from four data-parallel replicas down to one.  Of each recovery, in ms:

    detect      from the kill (when the dying worker has written its last line) to the coordinator's event
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
bytes that finished sums took while they were set aside.  --json FILE writes every measurement.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import LAYOUTS, MODELS, command_line, head, load_average, played, row, times, train, write
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.harness.forkserver import ForkServer, Run

PHASES = ("detect", "rendezvous", "regroup", "pull", "rerun", "reduce", "agree")
STRIKES = ("forward", "backward#2", "reduce-scatter", "all-gather", "agree", "backward")
KILLS_AT = (5, 9, 13)
ITERATIONS = 15


def schedule(number: int, workers: int) -> list[tuple[int, int, str]]:
    """(worker, iteration, phase) of the kills of a run: another survivor and other phases in each."""
    first = number % workers
    victims = [(first + 1 + at) % workers for at in range(len(KILLS_AT))]
    return [
        (victim, iteration, STRIKES[(number * len(KILLS_AT) + at) % len(STRIKES)])
        for at, (victim, iteration) in enumerate(zip(victims, KILLS_AT, strict=True))
    ]


def one_run(server: ForkServer, folder: Path, number: int, options: Any) -> list[dict[str, Any]]:
    """Its recoveries."""
    workers, _ = LAYOUTS["dp4"]
    kills = schedule(number, workers)
    spec = ",".join(f"{worker}@{iteration}:{phase}" for worker, iteration, phase in kills)
    flags = [*MODELS[options.model].argv, *options.flags.split(), "--log-interval", "10"]
    flags += ["--recover", "--recover-inject", spec]
    run = train(
        server, folder, workers, flags, iterations=ITERATIONS, killed={worker for worker, _, _ in kills},
        environment={"BENCH_MEMORY": "1"} | played(options.microbatch_seconds), timeout=options.timeout,
    )  # fmt: skip
    return [recovery(folder, run, kill, kills) for kill in kills]


def recovery(folder: Path, run: Run, kill: tuple[int, int, str], kills: list[tuple[int, int, str]]) -> dict[str, Any]:
    """One kill: its phases in milliseconds, its memory in MiB."""
    victim, iteration, phase = kill
    (survivor,) = {*range(len(run.codes))} - {worker for worker, _, _ in kills}
    struck = run.logs[victim].stat().st_mtime
    told = [e for e in read_events(folder / "events-0.jsonl") if e["event"] == "fault" and e.get("worker") == victim]
    accounts = [
        e for e in read_events(folder / EVENTS_FILE) if e["event"] == "recovery" and e["iteration"] == iteration
    ]
    rows = {row["iteration"]: row for row in times(folder, survivor) if row["iteration"]}
    seconds = {at: rows[at + 1]["at"] - rows[at]["at"] for at in rows if at + 1 in rows}
    quiet = [at for at in range(iteration - 3, iteration)]
    found: dict[str, Any] = {"victim": victim, "iteration": iteration, "phase": phase}
    found["detect"] = 1e3 * (told[0]["time"] - struck)
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


def main() -> None:
    parser = command_line(__doc__, model="small", microbatch_seconds=0.0, timeout=600)
    parser.add_argument("--runs", type=int, default=4, help="of three kills each")
    parser.add_argument("--flags", default="", help="more flags of Megatron's")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    columns = (*PHASES, "without rerun", "longer")
    head("killed in", *columns)
    with ForkServer() as server:
        for number in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                for found in one_run(server, Path(folder), number, options):
                    rows.append(found)
                    row(found["phase"], *(f"{found[name]:.1f}" for name in columns))
    of = {name: [its[name] for its in rows] for name in rows[0]}
    row("median (maximum)", *(f"{statistics.median(of[name]):.1f} ({max(of[name]):.1f})" for name in columns))
    growth = [its["peak, MiB"] - its["peak before, MiB"] for its in rows]
    print(
        f"\nmilliseconds; {len(rows)} kills; an iteration without: {statistics.median(of['usual']):.0f}; "
        f"peak memory of a survivor {statistics.median(of['peak before, MiB']):.0f} MiB, in a recovery "
        f"{statistics.median(growth):+.1f} MiB (at most {max(growth):+.1f}); set aside at most "
        f"{max(of['set aside, MiB']):.1f} MiB, the gradients take "
        f"{4 * MODELS[options.model].parameters / 2**20:.1f}; {load_average()}"
    )
    write(options, rows)


if __name__ == "__main__":
    main()
