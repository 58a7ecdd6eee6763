"""What --recover costs with Megatron-FSDP when nobody dies: bytes on the wire and memory, against stock Megatron's.

    python benchmarks/bench_hsdp.py

Two shard groups of two workers train the same model with and without --recover, one run after the other.  What came
over all connections of all workers in an iteration is counted by the kernel (``TCP_INFO``, message headers and all that
is said besides included; no shared memory); memory is that of all of torch's tensors of a worker before the last
iteration, and the most that a process had resident since the iteration before.  Counted, so other work on the machine
changes nothing.

The time of an iteration is measured by bench_overhead.py:

    python benchmarks/bench_overhead.py --models small medium --layouts dp4 --overlap yes --flags "$FLAGS"

with FLAGS as ``--flags`` prints them here.
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
    """Of one training: bytes an iteration, all workers together; of a worker, bytes of tensors and resident KiB."""
    train(
        server, folder, WORKERS, [*MODELS[options.model].argv, *FLAGS, "--overlap-grad-reduce", *flags],
        iterations=ITERATIONS, environment={"BENCH_TRAFFIC": "1", "BENCH_MEMORY": "1"}, timeout=options.timeout,
    )  # fmt: skip
    rows = [times(folder, rank) for rank in range(WORKERS)]
    counted = [(its[ITERATIONS - 1]["received"] - its[ITERATIONS - 1 - COUNTED]["received"]) / COUNTED for its in rows]
    last = [its[ITERATIONS - 1] for its in rows]
    return {
        "received": sum(counted),
        "tensors": statistics.mean(row["tensors"] for row in last),
        "peak": statistics.mean(row["peak"] for row in last),
    }


def main() -> None:
    parser = command_line(__doc__, model="medium", timeout=1800)
    parser.add_argument("--flags", action="store_true", help="print the flags for bench_overhead.py, and do nothing")
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
                    its = run(server, Path(folder), [*more, *flags], options)
                stock = its if side.startswith("stock") else stock
                cells = [
                    f"{its[name] / unit:{form}}" for name in ("received", "tensors")
                    for unit, form in ((2**20, ".3f"), (stock[name], ".4f"))
                ]  # fmt: skip
                row(kind, side, *cells, f"{its['peak'] / 2**10:.0f}")
                found.append({"kind": kind, "side": side, **its})
    print(f"\n{options.model}, {WORKERS} workers, {COUNTED} iterations; {platform.machine()}")
    write(options, found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
