"""Compare the time of a training step with ElasticDataParallel and with torch's DistributedDataParallel.

    python benchmarks/bench_elastic.py [--cases small-8 medium-1] [--json FILE]

recover-run starts the workers, with one compute thread each.  Every worker holds two copies of one model, each with an
AdamW.  ElasticDataParallel trains one copy, and the reference trains the other copy on the same microbatches.  With two
workers the reference is DistributedDataParallel with gloo.  It uses ``no_sync()`` for all microbatches of a worker
except the last, and ``gradient_as_bucket_view``, which is faster here (not with --copies).  With one worker ("alone")
the reference is a plain loop without communication.  The two sides take turns in the same processes, a block of steps
each, so that other load on the machine slows both sides equally.

Each pair of blocks gives one ratio of medians.  The table has the median of the ratios with their quartiles, for the
wall time and for the processor time of all workers.  The first pair is not counted: it runs without dropout, to assert
that the losses of both sides are equal.  In later pairs the models use dropout, and only ElasticDataParallel seeds
torch's random numbers before each microbatch.

    small       2,177 parameters: shows the cost of the library's own code
    medium      12.9 million parameters: shows the cost of the sums
    -8, -1      microbatches per worker and step
    -verified   the workers compare digests of their states after every step (``verify_interval=1``)
    -unverified the workers never compare digests; the time of a comparison is printed, also per MiB of state

If ElasticDataParallel has no ``verify_interval``, these two cases are skipped; all other cases use its default.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Dropout, Linear, Sequential, Tanh, TransformerEncoderLayer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_overhead import WARM_UP, loss_difference, ratios, spread, typical
from benchmarks.megatron_runs import command_line, environment, head, lines, load_average, row, write
from recover_megatron import ElasticDataParallel
from recover_megatron.variables import COORDINATOR_VARIABLE

SIDES = ("reference", "elastic")
NEVER = 10**9
"""Value of ``verify_interval`` with which the workers never compare their states."""
BATCHES = 64
"""Number of different microbatches."""
MOST_DIFFERENCE = 1e-3
"""Largest accepted relative difference of the losses after the block without dropout."""
HIDDEN = 512


@dataclass(frozen=True)
class Case:
    """Configuration that is measured; a row of the table."""

    model: str
    workers: int
    microbatches: int
    """Microbatches per worker and step."""
    block: int
    """Number of steps that one side runs before the other side continues."""
    verify: int | None = None
    """Value of ElasticDataParallel's ``verify_interval``; None: its default."""


CASES = {
    "small-8": Case("small", 2, 8, 30),
    "small-1": Case("small", 2, 1, 60),
    "small-8-alone": Case("small", 1, 8, 30),
    "small-1-alone": Case("small", 1, 1, 60),
    "medium-8": Case("medium", 2, 8, 3),
    "medium-1": Case("medium", 2, 1, 8),
    "medium-1-verified": Case("medium", 2, 1, 8, 1),
    "medium-1-unverified": Case("medium", 2, 1, 8, NEVER),
}
VERIFIED, UNVERIFIED = "medium-1-verified", "medium-1-unverified"


def build(name: str) -> tuple[Sequential, list[torch.Tensor]]:
    """Return a model and the inputs of its microbatches; equal in each call with the same ``name``."""
    torch.manual_seed(1)
    if name == "small":
        model = Sequential(Linear(32, 64), Tanh(), Dropout(0.1), Linear(64, 1))
        return model, [torch.randn(8, 32) for _ in range(BATCHES)]
    blocks = [TransformerEncoderLayer(HIDDEN, 8, 4 * HIDDEN, 0.1, batch_first=True) for _ in range(4)]
    return Sequential(*blocks, Linear(HIDDEN, HIDDEN)), [torch.randn(2, 16, HIDDEN) for _ in range(BATCHES)]


class Elastic:
    """Copy of the model that the library trains on this worker."""

    def __init__(self, case: Case) -> None:
        self.model, self._batches = build(case.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options: Any = {} if case.verify is None else {"verify_interval": case.verify}
        self._all = case.workers * case.microbatches
        self.elastic = ElasticDataParallel(self.model, optimizer, microbatches=self._all, **options)

    def step(self, step: int) -> float:
        """Run one step; return its loss, the mean over all workers."""
        del step  # ElasticDataParallel counts the steps
        return self.elastic.step(self._microbatch).loss

    def _microbatch(self, step: int, j: int) -> torch.Tensor:
        x = self._batches[(step * self._all + j) % BATCHES]
        return (self.model(x) - x[..., :1]).square().mean()


class Reference:
    """Copy of the model that DistributedDataParallel (or, with one worker, a plain loop) trains on this worker."""

    def __init__(self, case: Case, rank: int, in_place: bool = True) -> None:
        model, self._batches = build(case.model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=in_place) if case.workers > 1 else model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._all, self._each = case.workers * case.microbatches, case.microbatches
        self._share = range(rank, self._all, case.workers)

    def step(self, step: int) -> float:
        """Run one step; return the mean loss of this worker's microbatches."""
        self._optimizer.zero_grad()
        total = torch.zeros(())
        for j in self._share:
            x = self._batches[(step * self._all + j) % BATCHES]
            last, model = j == self._share[-1], self.model
            alone = nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()
            with alone:
                loss = (model(x) - x[..., :1]).square().mean() / self._each
                loss.backward()
            total += loss.detach()
        self._optimizer.step()
        return total.item()


def blocks(case: Case, number: int, sides: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run ``number`` turns per side; yield each turn's seconds of every step, processor seconds per step, and loss."""
    done = dict.fromkeys(sides, 0)
    for at in range(number):
        for name in list(sides)[:: 1 if at % 2 else -1]:
            side = sides[name]
            side.model.train(at >= WARM_UP)
            meet: Callable[[], object] = dist.barrier if case.workers > 1 else int
            meet()
            seconds, cpu, before = [], time.process_time(), time.perf_counter()
            for _ in range(case.block):
                done[name] += 1
                loss = side.step(done[name])
                now = time.perf_counter()
                seconds.append(now - before)
                before = now
            yield {"side": name, "seconds": seconds, "cpu": (time.process_time() - cpu) / case.block, "loss": loss}


def work(case: Case, number: int, out: Path, in_place: bool) -> None:
    """Train both copies of the model in this worker of recover-run, and write the times of each block to ``out``."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if case.workers > 1:
        dist.init_process_group("gloo")
    ours = Elastic(case)
    found = list(blocks(case, number, {"reference": Reference(case, rank, in_place), "elastic": ours}))
    tensors = torch.utils._pytree.tree_leaves(ours.elastic.state_dict())
    state = sum(item.nbytes for item in tensors if isinstance(item, torch.Tensor))
    ours.elastic.leave()
    with (out / f"blocks-{rank}.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({**block, "state": state}) + "\n" for block in found)
    if case.workers > 1:
        dist.destroy_process_group()


def measure(name: str, options: Any) -> dict[str, Any]:
    """Run the case ``name``; return, by side, the seconds of each step by block, the processor seconds per step by
    block, and the loss of block 0."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recover_megatron.launch", "--elastic", "--log-dir", f"{folder}/logs"]
        command += ["--nproc-per-node", str(case.workers), str(Path(__file__).resolve()), "--cases", name]
        command += ["--blocks", str(options.blocks), "--block", str(options.block), "--out", folder]
        command += ["--copies"] if options.copies else []
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=options.timeout, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        workers = [lines(Path(folder) / f"blocks-{rank}.jsonl") for rank in range(case.workers)]
    measured: dict[str, Any] = {"state": workers[0][0]["state"]}
    for side in SIDES:
        blocks_ = [[block for block in item if block["side"] == side] for item in workers]
        measured[side] = {
            "seconds": [block["seconds"] for block in blocks_[0]],
            "cpu": [sum(block["cpu"] for block in together) for together in zip(*blocks_, strict=True)],
            # In the reference each worker reports only the loss of its own microbatches.
            "loss": statistics.mean(item[0]["loss"] for item in blocks_),
        }
    difference = abs(measured["elastic"]["loss"] / measured["reference"]["loss"] - 1)
    assert difference <= MOST_DIFFERENCE, f"{name}: the losses of the sides differ by {difference:.1e}"
    return measured


def added(measured: dict[str, Any]) -> float:
    """Return how many milliseconds longer ElasticDataParallel's step is than the reference's: the pairs' median."""
    pairs = [*zip(measured["elastic"]["seconds"], measured["reference"]["seconds"], strict=True)][WARM_UP:]
    return 1e3 * statistics.median(statistics.median(ours) - statistics.median(item) for ours, item in pairs)


def main() -> None:
    parser = command_line(__doc__, timeout=1800)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--blocks", type=int, default=17, help="number of turns of each side")
    parser.add_argument("--block", type=int, default=0, help="steps per turn (0: the case's default)")
    parser.add_argument("--copies", action="store_true", help="DistributedDataParallel without gradient_as_bucket_view")
    parser.add_argument("--out", type=Path, help="folder for the results of a worker; only used internally")
    options = parser.parse_args()
    if COORDINATOR_VARIABLE in os.environ:
        item = CASES[options.cases[0]]
        block = options.block or item.block
        case = Case(item.model, item.workers, item.microbatches, block, item.verify)
        work(case, options.blocks, options.out, not options.copies)
        return
    verifies = "verify_interval" in inspect.signature(ElasticDataParallel).parameters
    print(f"before: {load_average()}")
    head(
        "case", "workers:", "reference, ms:", "elastic, ms:", "more, ms:", "ratio (quartiles)",
        "processor time (quartiles)", "loss difference:", "load",
    )  # fmt: skip
    found = {}
    for name in options.cases:
        if CASES[name].verify is not None and not verifies:
            continue
        measured = found[name] = measure(name, options)
        row(
            name, CASES[name].workers, *(f"{typical(measured, side):.2f}" for side in SIDES),
            f"{added(measured):.2f}", *map(spread, ratios(measured, *SIDES[::-1]).values()),
            loss_difference(measured, *SIDES), load_average(),
        )  # fmt: skip
    if VERIFIED in found and UNVERIFIED in found:
        cost, mib = added(found[VERIFIED]) - added(found[UNVERIFIED]), found[VERIFIED]["state"] / 2**20
        print(f"\na comparison of the states: {cost:.2f} ms, {cost / mib:.4f} ms per MiB of {mib:.1f} MiB of state")
    print(f"\n{options.blocks - WARM_UP} pairs of turns; torch {torch.__version__}, {platform.machine()}")
    write(options, found)


if __name__ == "__main__":
    main()
