"""Measure received bytes and memory of --recover with Megatron-FSDP, without deaths, against stock Megatron.

    python benchmarks/bench_hsdp.py

Two shard groups of two workers train the same model with and without --recover, one run after the other.  The kernel
counts the bytes received over all connections of all workers in an iteration (``TCP_INFO``).  The bytes include message
headers and control messages; shared memory is not used.  Memory is the size of all torch tensors of a worker before the
last iteration, and the peak resident memory of a process since the previous iteration.  Other load on the machine does
not change these numbers.

bench_overhead.py measures the time of an iteration:

    python benchmarks/bench_overhead.py --models small medium --layouts dp4 --overlap yes --flags "$FLAGS"

with FLAGS as printed by ``--flags`` here.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import FSDP, MODELS, RECOVER, command_line, head, row, times, train, write
from tests.harness.forkserver import ForkServer

FLAGS = [*FSDP, "--num-distributed-optimizer-instances", "2"]
OUTER = ["--outer-dp-sharding-strategy", "optim"]
SIDES: dict[str, list[str]] = {
    "stock": [],
    "--recover": RECOVER,
    "stock, outer optim": OUTER,
    "--recover, outer optim, no shadow": [*OUTER, *RECOVER, "--recover-shadow-shards", "0"],
    "--recover, outer optim, 1 shadow": [*OUTER, *RECOVER],
}
WORKERS, ITERATIONS, COUNTED = 4, 8, 4
KINDS = {"fp32": [], "bf16": ["--bf16", "--megatron-fsdp-main-grads-dtype", "fp32"]}


def run(server: ForkServer, folder: Path, flags: list[str], options: Any) -> dict[str, Any]:
    """Train once; return received bytes per iteration (sum), bytes of tensors and peak resident KiB (means)."""
    train(
        server, folder, WORKERS, [*MODELS[options.model].argv, *FLAGS, "--overlap-grad-reduce", *flags],
        iterations=ITERATIONS, environment={"BENCH_TRAFFIC": "1", "BENCH_MEMORY": "1"}, timeout=options.timeout,
    )  # fmt: skip
    rows = [times(folder, rank) for rank in range(WORKERS)]
    counted = [(out[ITERATIONS - 1]["received"] - out[ITERATIONS - 1 - COUNTED]["received"]) / COUNTED for out in rows]
    last = [out[ITERATIONS - 1] for out in rows]
    return {
        "received": sum(counted),
        "tensors": statistics.mean(row["tensors"] for row in last),
        "peak": statistics.mean(row["peak"] for row in last),
    }


def main() -> None:
    parser = command_line(__doc__, model="medium", timeout=1800)
    parser.add_argument("--flags", action="store_true", help="print the flags for bench_overhead.py and exit")
    options = parser.parse_args()
    if options.flags:
        print(" ".join(FLAGS))
        return
    found = []
    head(
        "", "", "received an iteration, MiB:", "over stock:", "tensors of a worker, MiB:", "over stock:",
        "peak resident, MiB:",
    )  # fmt: skip
    with ForkServer() as server:
        for kind, more in KINDS.items():
            stock: dict[str, Any] = {}
            for side, flags in SIDES.items():
                with tempfile.TemporaryDirectory() as folder:
                    out = run(server, Path(folder), [*more, *flags], options)
                stock = out if side.startswith("stock") else stock
                cells = [
                    f"{out[name] / unit:{form}}" for name in ("received", "tensors")
                    for unit, form in ((2**20, ".3f"), (stock[name], ".4f"))
                ]  # fmt: skip
                row(kind, side, *cells, f"{out['peak'] / 2**10:.0f}")
                found.append({"kind": kind, "side": side, **out})
    print(f"\n{options.model}, {WORKERS} workers, {COUNTED} iterations; {platform.machine()}")
    write(options, found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
