"""Measure how one lost replica lengthens a step with pipeline stages, against the optimum for complete microbatches.

    python benchmarks/bench_pipelines.py --runs 3

Each run has four replicas of two stages.  One worker is killed by a real SIGKILL, and three replicas continue.  Runs
with the plain schedule (1F1B) and with an interleaved schedule of two chunks of layers take turns.  Every microbatch
takes --seconds, divided over the chunks, as if a host waited for its GPU.  Columns:

    before, after   median seconds of an iteration (steps.jsonl), with four replicas and with three
    optimum         before * slots(most) / slots(quota).  ``slots(n)``: time slots of a stage for n microbatches, with
                    the pipeline's bubble; "most": smallest possible maximum of microbatches per replica after the
                    loss; "quota": microbatches per replica before the loss
    ratio           after / optimum: the goal is at most 1.05
    multiples       slots if quotas must be multiples of the number of stages (the old rule), relative to the optimum
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import MODELS, command_line, load_average, played, train, write
from recover_megatron.run_log.steps import audit_problem, read_steps
from recover_megatron.workload import quotas
from tests.harness.forkserver import ForkServer

REPLICAS, STAGES, MICROBATCHES, KILLED_AT, ITERATIONS = 4, 2, 8, 6, 14
SCHEDULES = {"1f1b": (1, ""), "interleaved": (2, "--num-layers-per-virtual-pipeline-stage 1")}
"""Name of a schedule -> (chunks of layers per stage, flags)."""


def slots(quota: int, chunks: int) -> int:
    """Return the duration of a step with ``quota`` microbatches, including the bubble, in passes of one chunk."""
    return quota * chunks + STAGES - 1


def seconds(server: ForkServer, folder: Path, schedule: str, pace: float) -> tuple[float, float]:
    """Train once; return the median seconds of an iteration before and after the loss of a replica."""
    chunks, flags = SCHEDULES[schedule]
    shape = ["--num-layers", "4", "--pipeline-model-parallel-size", str(STAGES), *flags.split()]
    shape += ["--global-batch-size", str(MICROBATCHES), "--recover", "--recover-inject", f"2@{KILLED_AT}:forward"]
    train(
        server, folder, REPLICAS * STAGES, [*MODELS["toy"].argv, *shape], iterations=ITERATIONS, killed={2},
        timeout=400, environment=played(pace / chunks),
    )  # fmt: skip
    steps = list(read_steps(folder / "steps.jsonl"))
    if problems := [problem for step in steps if (problem := audit_problem(step))]:
        raise RuntimeError(str(problems))
    before = [step.seconds for step in steps if 2 < step.iteration < KILLED_AT]
    after = [step.seconds for step in steps if step.iteration > KILLED_AT + 1 and step.replicas == REPLICAS - 1]
    return statistics.median(before), statistics.median(after)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, metavar="S", help="per microbatch; default %(default)s")
    options = parser.parse_args()
    measured: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in SCHEDULES}
    print(load_average())
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        for number in range(options.runs):
            for schedule in SCHEDULES:
                out = Path(folder) / f"{schedule}-{number}"
                out.mkdir()
                measured[schedule].append(seconds(server, out, schedule, options.seconds))
    print(f"{'schedule':12} {'before':>8} {'after':>8} {'optimum':>8} {'ratio':>6} {'multiples':>10}")
    least = -(-MICROBATCHES // (REPLICAS - 1))
    for schedule, runs in measured.items():
        chunks = SCHEDULES[schedule][0]
        before, after = (statistics.median(column) for column in zip(*runs, strict=True))
        optimum = before * slots(least, chunks) / slots(MICROBATCHES // REPLICAS, chunks)
        multiple = max(quotas(MICROBATCHES // STAGES, range(REPLICAS - 1)).values()) * STAGES
        was = slots(multiple if chunks > 1 else least, chunks) / slots(least, chunks)
        print(f"{schedule:12} {before:8.3f} {after:8.3f} {optimum:8.3f} {after / optimum:6.3f} {was:10.3f}")
    print(load_average())
    write(options, measured)


if __name__ == "__main__":
    main()
