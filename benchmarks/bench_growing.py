"""Compare tokens per worker-second of a run that grows and shrinks with runs of constant size.

    python benchmarks/bench_growing.py

    grown      2 replicas at the launch; 4 more workers join, and get places as soon as they have built their models;
               from iteration --shrink-at on, 3 of the 6 workers are killed
    constant   2, 3 or 6 replicas from the first iteration to the last

All runs train the same iterations of the same batch, so the same tokens.  A worker's time counts while it has a place
in the plan, from the start of the first iteration.  So it includes the cost of forming and losing replicas, but not the
building of models, which runs in parallel with the training.  Each worker simulates a device of fixed speed
(--microbatch-seconds): on a machine with fewer cores than workers, more workers would otherwise be slower.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import MODELS, RECOVER, command_line, head, load_average, played, row, train, write
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from recover_megatron.run_log.steps import read_steps, violations
from tests.harness.forkserver import ForkServer

MICROBATCHES = 48
"""Microbatches per iteration, of one sample each: divisible by 2, 3 and 6 replicas."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one complete run, without its startup."""

    name: str
    replicas: list[int]
    """Number of replicas in each iteration."""
    seconds: float
    worker_seconds: float
    tokens: int

    @property
    def per_worker_second(self) -> float:
        return self.tokens / self.worker_seconds


def measured(name: str, out: Path, tokens: int) -> Measured:
    """Evaluate the run in ``out``; ``tokens``: tokens per iteration."""
    steps = sorted(read_steps(out / "steps.jsonl"), key=lambda step: step.iteration)
    if found := violations(steps, MICROBATCHES):
        raise RuntimeError(f"{name}: {found}")
    plans = sorted((e for e in read_events(out / EVENTS_FILE) if e["event"] == "plan"), key=lambda e: e["epoch"])
    times = [step.time for step in steps if step.time is not None]
    first, end = times[0] - steps[0].seconds, times[-1]
    spent, at, workers = 0.0, first, 0
    for plan in plans:
        moment = min(max(plan["time"], at), end)
        spent += workers * (moment - at)
        at, workers = moment, sum(map(len, plan["grid"].values()))
    spent += workers * (end - at)
    return Measured(name, [step.replicas for step in steps], end - first, spent, tokens * len(steps))


def run(
    server: ForkServer, folder: Path, options: Any, name: str, replicas: int, *flags: str, newcomers: int = 0
) -> Measured:
    """Train once, with ``replicas`` workers at launch and ``newcomers`` that join later; return the measurements."""
    out, model = folder / name.replace(" ", "-"), MODELS["toy"]
    out.mkdir()
    more = [*RECOVER, *flags, *["--use-distributed-optimizer"] * options.sharded]
    train(
        server, out, replicas,
        [*model.argv, "--global-batch-size", str(MICROBATCHES), "--log-interval", "10", *more],
        iterations=options.iterations, killed=None, timeout=options.timeout, spares=newcomers,
        environment=played(options.microbatch_seconds),
    )  # fmt: skip
    return measured(name, out, MICROBATCHES * model.sequence)


def main() -> None:
    parser = command_line(__doc__, microbatch_seconds=0.25, timeout=1200.0)
    parser.add_argument("--iterations", type=int, default=36)
    parser.add_argument("--shrink-at", type=int, default=28)
    parser.add_argument("--constant", type=int, nargs="*", default=[2, 3, 6], help="replicas of the constant runs")
    parser.add_argument("--sharded", action="store_true", help="with --use-distributed-optimizer")
    options = parser.parse_args()
    kills = ",".join(f"{worker}@{options.shrink_at + n}:backward:kill" for n, worker in enumerate((0, 3, 5)))
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        growing = ("--recover-max-replicas", "6", "--recover-inject", kills)
        where = server, Path(folder), options
        found = [run(*where, "2, then 6, then 3", 2, *growing, newcomers=4)]
        found += [run(*where, f"constantly {size}", size) for size in options.constant]
    grown = found[0]
    numbers = "wall, s:", "worker-seconds:", "tokens per worker-second:", "grown / it:"
    head("replicas", "iterations with 2 to 6", *numbers)
    for line in found:
        spent = ", ".join(str(line.replicas.count(size)) for size in range(2, 7))
        ratio = grown.per_worker_second / line.per_worker_second
        figures = line.seconds, line.worker_seconds, line.per_worker_second
        row(line.name, spent, *(f"{figure:.1f}" for figure in figures), f"{ratio:.3f}")
    print(f"\n{load_average()}")
    write(options, [asdict(line) for line in found])


if __name__ == "__main__":
    main()
