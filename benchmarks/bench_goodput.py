"""Measure useful tokens per worker-second under failures: --recover against checkpoint-and-restart with stock Megatron.

    python benchmarks/bench_goodput.py --png goodput.png

Four runs; in all except "none", the same workers get SIGKILL in a backward pass of the same iterations:

    none       stock Megatron, no death
    recover    --recover, no checkpoints: the run continues with the live workers, with the same batch
    replaced   stock Megatron with checkpoints: a death ends the launch, and a supervisor restarts all workers from the
               last checkpoint without delay, with the same number of workers: lost workers are replaced at no cost
    shrinking  as "replaced", but lost workers are not replaced: each launch has as many workers as divide the batch;
               other live workers wait, and their time counts

Startup favours checkpoint-and-restart here: workers are forked from a process that has imported Megatron, and deaths
are noticed without delay.  The checkpoint interval is sqrt(2 x cost x time between failures), after Young and Daly,
from costs that are measured first; --interval N sets another interval.  All runs do the same iterations, so the same
tokens.

A worker's time counts from its launch (from the first launch, if lost workers are replaced) until its death or the end
of the run.  "without start-up" excludes the time from each launch to its first iteration.  Each worker simulates a
device of fixed speed (--microbatch-seconds): on a machine with fewer cores than workers, each death would otherwise
make the survivors faster.

--hsdp trains with Megatron-FSDP: a replica is a shard group of two workers, or of the given number.  With --recover,
the workers of broken shard groups wait, and their time counts, until they can form a complete shard group.  Without
--recover, each launch has only complete shard groups.

Prints a table; --json FILE writes every measurement, --png FILE draws tokens over worker-seconds.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import (
    COMMON,
    FSDP,
    MODELS,
    SCRIPT,
    command_line,
    head,
    load_average,
    played,
    row,
    times,
    write,
)
from tests.harness.forkserver import ForkServer

MAX_LAUNCHES = 50


@dataclass
class Launch:
    """Record of one launch of all workers.  Times are seconds of the monotonic clock."""

    workers: int
    paid: int
    """Number of allocated workers, including workers that wait without training."""
    started: float
    ended: float
    first: float
    """Start of the first iteration; ``ended`` if none began."""
    deaths: list[float]
    began: dict[int, float]
    """Iteration -> time at which the last live worker began it."""
    losses: dict[int, float]


@dataclass
class Result:
    """Result of one run, with all its launches."""

    name: str
    launches: list[Launch]
    tokens: int
    interval: int | None = None

    def paid_until(self, moment: float, *, startup: bool = True) -> float:
        """Return the worker-seconds until ``moment``; without each launch's start-up, if ``startup`` is False."""
        total = 0.0
        for number, launch in enumerate(self.launches):
            # Workers stay allocated between two launches.
            after = self.launches[number + 1 :]
            end = min(moment, after[0].started if after else launch.ended)
            begin = launch.started if startup else launch.first
            total += launch.paid * max(0.0, end - begin)
            if self.name == "recover":
                total -= sum(max(0.0, end - max(begin, death)) for death in launch.deaths)
        return total

    def per_worker_second(self, *, startup: bool = True) -> float:
        """Return tokens per worker-second."""
        return self.tokens / self.paid_until(math.inf, startup=startup)


def sharded(replica: int, workers: int) -> list[str]:
    """Return Megatron-FSDP's flags of a launch.  ``replica``: workers per shard group; 1: without Megatron-FSDP."""
    return (
        []
        if replica == 1
        else [*FSDP, "--overlap-grad-reduce", "--num-distributed-optimizer-instances", str(workers // replica)]
    )


class Bench:
    """Runner of all launches of one configuration."""

    def __init__(self, server: ForkServer, folder: Path, options: Any) -> None:
        self._server = server
        self._folder = folder
        self._options = options
        self._count = 0
        self.model = MODELS[options.model]

    def launch(self, workers: int, paid: int, kills: list[str], *flags: str) -> Launch:
        """Start ``workers`` workers and wait until they exit; remove the executed kills from ``kills``."""
        self._count += 1
        out = self._folder / f"launch-{self._count}"
        out.mkdir()
        options = self._options
        argv = [SCRIPT, *COMMON, *self.model.argv, "--log-interval", "10", *sharded(options.hsdp, workers), *flags]
        environment = {"BENCH_OUT": str(out), "BENCH_KILL": ",".join(kills), **played(options.microbatch_seconds)}
        started = time.monotonic()
        run = self._server.run(workers, argv, out, environment=environment, timeout=options.timeout)
        ended = time.monotonic()
        struck = {path.name.removeprefix("killed-"): float(path.read_text()) for path in out.glob("killed-*")}
        if not run.ok and not struck:
            raise RuntimeError(run.tail(40))
        if "--recover" in flags and any(code not in (0, -9) for code in run.codes):
            raise RuntimeError(run.tail(40))
        kills[:] = [kill for kill in kills if kill not in struck]
        began: dict[int, float] = {}
        losses: dict[int, float] = {}
        for rank in range(workers):
            if (out / f"times-{rank}.jsonl").exists():
                iteration = 0
                for note in times(out, rank):
                    iteration = note["iteration"] or iteration + 1
                    began[iteration] = max(began.get(iteration, 0.0), note["at"])
                    if note["loss"] is not None:
                        losses[iteration - 1] = note["loss"]
        first = min(began.values(), default=ended)
        return Launch(workers, paid, started, ended, first, sorted(struck.values()), began, losses)

    def run(self, name: str, kills: list[str], interval: int | None = None) -> Result:
        """Do the run ``name`` (listed in the module's docstring), with as many launches as it needs."""
        options = self._options
        iterations, left, alive = options.iterations, list(kills), options.workers
        flags = ["--train-iters", str(iterations)]
        launches = []
        if name == "recover":
            launches.append(self.launch(alive, alive, left, *flags, "--recover"))
        elif name == "none":
            launches.append(self.launch(alive, alive, [], *flags))
        else:
            save = self._folder / f"checkpoints-{name}"
            flags += ["--save", str(save), "--save-interval", str(interval)]
            workers = alive
            while not launches or max(launches[-1].began, default=0) <= iterations:
                before = len(left)
                # If --load names no checkpoint, stock Megatron with Megatron-FSDP would train another model.
                load = ["--load", str(save)] if any(save.glob("latest*")) else []
                launches.append(self.launch(workers, alive, left, *flags, *load))
                if len(launches) > MAX_LAUNCHES:
                    raise RuntimeError("the run did not finish within the maximum number of launches")
                if name == "shrinking":
                    alive -= before - len(left)
                    # The kills name workers of the first launch, but a new launch numbers its workers from 0.
                    left = [_renamed(kill, alive) for kill in left]
                    workers = self._most(alive)
                    if not workers:
                        raise RuntimeError(f"the {alive} remaining workers cannot form a replica")
                    left = [_renamed(kill, workers) for kill in left]
        return Result(name, launches, iterations * self.model.tokens, interval)

    def _most(self, alive: int) -> int:
        """Return the largest number of workers, up to ``alive``, that form complete replicas and divide the batch.

        Returns 0 if there is no such number.
        """
        microbatches, replica = self.model.global_batch // self.model.micro_batch, self._options.hsdp
        return max((n for n in range(replica, alive + 1, replica) if microbatches % n == 0), default=0)

    def costs(self) -> tuple[float, float]:
        """Measure (seconds of an iteration, seconds of a checkpoint) in two runs without deaths."""
        workers = self._options.workers
        flags = ["--train-iters", "7"]
        plain = self.launch(workers, workers, [], *flags)
        save = ["--save", str(self._folder / "checkpoints-costs"), "--save-interval", "1"]
        saving = self.launch(workers, workers, [], *flags, *save)
        iteration, both = (
            statistics.median(run.began[at + 1] - run.began[at] for at in range(2, 7)) for run in (plain, saving)
        )
        return iteration, max(0.0, both - iteration)


def _renamed(kill: str, workers: int) -> str:
    worker, iteration = kill.split("@")
    return f"{int(worker) % workers}@{iteration}"


def young_daly(iteration: float, checkpoint: float, between: float) -> int:
    """Return the best number of iterations between checkpoints, after Young and Daly.

    ``iteration``, ``checkpoint``: their seconds.  ``between``: seconds between failures.
    """
    return max(1, round(math.sqrt(2 * checkpoint * between) / iteration))


def draw(results: list[Result], path: Path) -> None:
    """Draw trained tokens over worker-seconds.  The curve falls where a restart loses tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for result in results:
        per_iteration = result.tokens / (max(max(launch.began) for launch in result.launches if launch.began) - 1)
        points = []
        for launch in result.launches:
            points += [(result.paid_until(at), (i - 1) * per_iteration) for i, at in sorted(launch.began.items())]
        axes.plot(*zip(*points, strict=True), label=LABELS[result.name], linewidth=1.4)
    axes.set_xlabel("worker-seconds, start-up included")
    axes.set_ylabel("tokens trained")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


LABELS = {
    "none": "no failures",
    "recover": "--recover",
    "replaced": "restart, lost workers replaced",
    "shrinking": "restart, lost workers stay lost",
}


def main() -> None:
    parser = command_line(__doc__, model="toy", microbatch_seconds=0.25)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--kills", default="7@5,1@10,4@15,2@20", metavar="W@I,...", help="kill worker W in iteration I")
    parser.add_argument(
        "--hsdp", nargs="?", type=int, const=2, default=1, metavar="S", help="shard groups of S workers (default: 2)"
    )
    parser.add_argument("--interval", type=int, help="iterations between checkpoints (default: by Young and Daly)")
    parser.add_argument("--runs", nargs="+", default=list(LABELS), choices=LABELS)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one launch")
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    kills = [kill for kill in options.kills.split(",") if kill]
    results = []
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        bench = Bench(server, Path(folder), options)
        iteration, checkpoint = bench.costs()
        between = iteration * options.iterations / (len(kills) + 1)
        interval = options.interval or young_daly(iteration, checkpoint, between)
        print(
            f"an iteration takes {iteration:.2f} s, a checkpoint {checkpoint:.2f} s, {between:.1f} s between failures: "
            f"a checkpoint every {interval} iterations\n"
        )
        tokens = "tokens per worker-second:", "without start-up:", "start-up:"
        head("run", "launches:", "wall, s:", "worker-seconds:", *tokens)
        for name in options.runs:
            result = bench.run(name, kills, None if name in ("none", "recover") else interval)
            results.append(result)
            whole, training = (result.per_worker_second(startup=startup) for startup in (True, False))
            seconds = result.launches[-1].ended - result.launches[0].started
            row(
                LABELS[name], len(result.launches), f"{seconds:.1f}", f"{result.paid_until(math.inf):.0f}",
                f"{whole:.2f}", f"{training:.2f}", f"{100 * (1 - whole / training):.0f} %",
            )  # fmt: skip
    by_name = {result.name: result for result in results}
    if "recover" in by_name:
        ours = by_name["recover"]
        print()
        for other in (result for result in results if result is not ours):
            print(
                f"recover / {other.name}: {ours.per_worker_second() / other.per_worker_second():.2f}, without start-up "
                f"{ours.per_worker_second(startup=False) / other.per_worker_second(startup=False):.2f}"
            )
    last = {name: result.launches[-1].losses.get(options.iterations) for name, result in by_name.items()}
    print(f"\nlast losses: {last}; {load_average()}")
    write(options, [asdict(result) for result in results])
    if options.png:
        draw(results, options.png)


if __name__ == "__main__":
    main()
