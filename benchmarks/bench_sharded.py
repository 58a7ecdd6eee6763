"""Measure the cost of --recover with --use-distributed-optimizer: time, bytes, memory, redistribution of shards.

    python benchmarks/bench_sharded.py                                  # all parts
    python benchmarks/bench_sharded.py --only wire memory table         # the quick parts
    python benchmarks/bench_sharded.py --only iteration --models small --sizes 4 --overlap yes

D is the data-parallel size, k the number of shadows (--recover-shadow-shards).

    iteration    runs of stock Megatron, k = 1 and k = 0 are alive at the same time and take turns, as in
                 bench_overhead.py; prints the median ratio to stock, with quartiles, of the wall time and of the
                 processor time of all workers
    wire         bytes that a member of a ring of D members receives over TCP without shared memory, relative to the
                 bytes of the bucket; the kernel counts them (TCP_INFO), including message headers
    memory       size of each worker's optimizer state after a training run, with a 16-bit and with a 32-bit model,
                 read through torch's interface (``held`` of timed_pretrain.py)
    repartition  training runs with one death: seconds of the event "repartition", and bytes that the workers count
    table        models that are too large for this machine, computed by the formulas that the other parts check
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_overhead import OVERLAPS, WARM_UP, compare, loss_difference, ratios, spread, typical
from benchmarks.megatron_runs import MODELS, RECOVER, command_line, head, load_average, row, train, write
from benchmarks.timed_pretrain import received_over
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.run_log.events import EVENTS_FILE, read_events
from tests.collectives.together import together
from tests.harness.forkserver import ForkServer

SECTIONS = ("wire", "memory", "repartition", "iteration", "table")
SHARDED = "--use-distributed-optimizer"
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
KINDS = {"bf16": (["--bf16"], 12), "fp32": ([], 8)}
"""Type of a model -> (flags, bytes of optimizer state per parameter): two moments, with bf16 also a 32-bit master."""
DIES_IN = 4
"""Iteration in which a worker dies in the part "repartition"."""
GIB, MIB = 1 << 30, 1 << 20
LARGE = (("7B", 7e9, 1, 1), ("70B", 70e9, 8, 4), ("405B", 405e9, 8, 16))
"""(name, parameters, TP, PP) of each large model."""
LINK = 50e9
"""Assumed bandwidth for the part "table", in bytes per second and GPU."""

# ---- the formulas


def copies(size: int, shadows: int) -> int:
    """Return the number of copies of each part of the state: the owner's and the shadows, at most one per member."""
    return 1 + min(shadows, size - 1)


def state(parameters: float, size: int, shadows: int, each: int = 12) -> float:
    """Return a worker's bytes of optimizer state, with ``each`` bytes per parameter of the model."""
    return each * parameters / size * copies(size, shadows)


def scattered(size: int, shadows: int) -> float:
    """Return the bytes a member sends to reduce a bucket to owners and shadows, relative to the bucket's bytes."""
    return (size - 1) / size + (copies(size, shadows) - 1) / size


def gathered(size: int) -> float:
    """Return the bytes a member sends to gather a bucket, relative to the bucket's bytes."""
    return (size - 1) / size


def moved(size: int) -> float:
    """Return the size of the state that is moved after one death, with one shadow, in shards.

    The dead worker's shard is distributed over size - 1 workers: each part goes to a new owner and a new shadow.  The
    dead worker's shadow has this shard, and receives no part of it.  Instead it becomes the shadow of the dead worker's
    predecessor, and receives the predecessor's shard.
    """
    return 3 - 2 / (size - 1)


# ---- bytes on the wire


def on_the_wire(size: int, numel: int, operation: Callable[[Group, Bucket], Any], dtype: torch.dtype) -> float:
    """Return the mean bytes that a ring's member receives in one collective, relative to the bucket's bytes."""
    meet = threading.Barrier(size)

    def work(group: Group) -> int:
        bucket = Bucket(torch.ones(numel, dtype=dtype))
        group.exchange([0])  # opens the connections
        predecessor = group._transport._in  # type: ignore[attr-defined]  # no interface, because only used here
        meet.wait()
        before = received_over(predecessor)
        meet.wait()
        operation(group, bucket).wait()
        meet.wait()
        return received_over(predecessor) - before

    return sum(together(size, work, transport_kind="tcp-inline")) / size / (numel * dtype.itemsize)


def wire(options: Any) -> list[dict[str, Any]]:
    """Measure the bytes of a reduce-scatter with 0, 1 and 2 shadows, and of an all-gather, for every D."""
    rows = []
    numel = options.mib * MIB // 4
    print(f"\nBytes sent per member, relative to a bucket of {options.mib} MiB: measured (formula)\n")
    head("D:", "reduce-scatter, k = 0", "k = 1", "k = 2", "all-gather")
    for size in options.sizes:
        item: dict[str, Any] = {"D": size}
        cells = []
        for shadows in (0, 1, 2):

            def scatter(group: Group, bucket: Bucket, k: int = shadows) -> Any:
                return group.reduce_scatter(bucket, shadows=range(1, k + 1))

            item[f"k={shadows}"] = on_the_wire(size, numel, scatter, torch.float32)
            cells.append(f"{item[f'k={shadows}']:.4f} ({scattered(size, shadows):.4f})")
        item["gather"] = on_the_wire(size, 2 * numel, lambda group, bucket: group.all_gather(bucket), torch.bfloat16)
        row(size, *cells, f"{item['gather']:.4f} ({gathered(size):.4f})")
        rows.append(item)
    return rows


# ---- training runs


def shadows_of(number: int | None) -> list[str]:
    """Return the flags of a run with ``number`` shadows; None: stock Megatron."""
    return [] if number is None else [*RECOVER, "--recover-shadow-shards", str(number)]


def state_after(
    server: ForkServer, folder: Path, size: int, model: str, iterations: int, flags: list[str], options: Any
) -> list[dict[str, Any] | None]:
    """Train once; return the contents of each worker's state-<rank>.json; None for a worker that was killed."""
    run = train(
        server, folder, size, [*MODELS[model].argv, SHARDED, *flags], iterations=iterations, killed=None,
        environment={"BENCH_STATE": "1"}, timeout=options.timeout,
    )  # fmt: skip
    files = [folder / f"state-{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if code == 0 else None for file, code in zip(files, run.codes, strict=True)]


def memory(options: Any) -> list[dict[str, Any]]:
    """Measure each worker's bytes of optimizer state per parameter of the model."""
    rows = []
    print("\nBytes of optimizer state per worker and model parameter, mean (largest); formula for the mean\n")
    head("model", "D:", "stock", "k = 0", "k = 1", "k = 2", "formula: stock, k = 0:", "k = 1:", "k = 2:")
    with ForkServer() as server:
        for kind, (flags, each) in KINDS.items():
            for size in options.sizes:
                item: dict[str, Any] = {"kind": kind, "D": size}
                cells = []
                for shadows in (None, 0, 1, 2):
                    with tempfile.TemporaryDirectory() as folder:
                        more = [*flags, *shadows_of(shadows)]
                        left = state_after(server, Path(folder), size, "tiny", 3, more, options)
                    found = [one["bytes"] / one["parameters"] for one in left if one]
                    item["stock" if shadows is None else f"k={shadows}"] = found
                    cells.append(f"{statistics.mean(found):.3f} ({max(found):.3f})")
                row(kind, size, *cells, *(f"{state(1, size, shadows, each):.3f}" for shadows in (0, 1, 2)))
                rows.append(item)
    return rows


def repartition(options: Any) -> list[dict[str, Any]]:
    """Measure the seconds and bytes of the redistribution of optimizer state after a death."""
    rows = []
    print("\nState that is moved after one death, one shadow, 16-bit model\n")
    last = "bytes of all over a shard's (formula)", "most of a worker:"
    head("model", "D:", "deaths:", "seconds, median (largest)", *last)
    with ForkServer() as server:
        for model in options.models:
            for size in (size for size in options.sizes if size > 2):
                found = [one_death(server, model, size, at % size, options) for at in range(options.deaths)]
                rows += found
                seconds = [item["seconds"] for item in found]
                whole = statistics.median(sum(item["shards"]) for item in found)
                most = statistics.median(max(item["shards"]) for item in found)
                mib = state(found[0]["parameters"], size, 0) / MIB
                took = f"{statistics.median(seconds):.3f} ({max(seconds):.3f})"
                row(model, size, len(found), took, f"{whole:.3f} ({moved(size):.3f}) of {mib:.2f} MiB", f"{most:.3f}")
    return rows


def one_death(server: ForkServer, model: str, size: int, victim: int, options: Any) -> dict[str, Any]:
    """Train once, with the death of worker ``victim``; return the measurements of the redistribution."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--bf16", *shadows_of(1), "--recover-inject", f"{victim}@{DIES_IN}:backward"]
        left = [item for item in state_after(server, Path(folder), size, model, DIES_IN + 3, flags, options) if item]
        events = [event for event in read_events(Path(folder) / EVENTS_FILE) if event["event"] == "repartition"]
    assert len(left) == size - 1
    assert [event["iteration"] for event in events] == [DIES_IN + 1], events
    shard = state(left[0]["parameters"], size, 0)
    return {
        "model": model, "D": size, "victim": victim, "parameters": left[0]["parameters"],
        "seconds": events[0]["seconds"], "shards": [item["came"][0] / shard for item in left],
    }  # fmt: skip


def iteration(options: Any) -> list[dict[str, Any]]:
    """Measure the time of an iteration of stock Megatron, with one shadow, and without shadows."""
    sides = {"stock": shadows_of(None), "k=1": shadows_of(1), "k=0": shadows_of(0)}
    rows = []
    print("\nTime of an iteration, relative to stock (quartiles)\n")
    ratio = "k = 1", "processor time", "k = 0", "processor time"
    head("model", "D:", "overlap", "stock, ms:", *ratio, "loss difference:", "")
    with ExitStack() as stack:
        servers = {side: stack.enter_context(ForkServer()) for side in sides}
        for model in options.models:
            for size in options.sizes:
                for overlap in OVERLAPS[options.overlap]:
                    flags = [*MODELS[model].argv, SHARDED, *(OVERLAP if overlap else ()), "--log-interval", "10"]
                    measured = compare(servers, size, flags, options, sides)
                    found = {side: ratios(measured, side, "stock") for side in ("k=1", "k=0")}
                    cells = [spread(found[side][what]) for side in found for what in ("wall", "cpu")]
                    row(
                        model, size, "yes" if overlap else "no", f"{typical(measured, 'stock'):.1f}", *cells,
                        loss_difference(measured, "stock", "k=1"), load_average(),
                    )  # fmt: skip
                    rows.append({"model": model, "D": size, "overlap": overlap, "ratios": found, **measured})
    middles = [statistics.median(item["ratios"]["k=1"]["wall"]) for item in rows]
    print(f"\nk = 1: median of the ratios {statistics.median(middles):.3f}; {options.blocks - WARM_UP} turns each")
    return rows


# ---- large models, computed


def table(options: Any) -> list[dict[str, Any]]:
    """Compute the memory and the traffic of shadows per GPU, for bf16 parameters and 32-bit gradients."""
    del options
    rows = []
    print(f"\nPer GPU; computed, not measured; a link of {LINK / 1e9:.0f} GB/s\n")
    head(
        "model", "TP x PP", "D:", "GPUs:", "optimizer state, GiB:", "k = 1: more, GiB:", "k = 2:", "sent a step, GiB:",
        "k = 1: more, GiB:", "ms:", "k = 2: ms:",
    )  # fmt: skip
    for name, parameters, tensor, pipeline in LARGE:
        own = parameters / tensor / pipeline
        for size in (64, 256, 1024):
            stock = state(own, size, 0)
            more = [state(own, size, k) - stock for k in (1, 2)]
            sent = 4 * own * scattered(size, 0) + 2 * own * gathered(size)
            hop = [4 * own * (scattered(size, k) - scattered(size, 0)) for k in (1, 2)]
            rows.append({"model": name, "D": size, "stock": stock, "more": more, "sent": sent, "hop": hop})
            row(
                name, f"{tensor} x {pipeline}", size, size * tensor * pipeline,
                *(f"{item / GIB:.3f}" for item in (stock, *more)), f"{sent / GIB:.2f}", f"{hop[0] / GIB:.4f}",
                *(f"{1e3 * item / LINK:.2f}" for item in hop),
            )  # fmt: skip
    return rows


def main() -> None:
    parser = command_line(__doc__, microbatch_seconds=0.0)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="D")
    parser.add_argument("--models", nargs="+", default=["small", "medium"], choices=MODELS)
    parser.add_argument("--overlap", choices=["no", "yes", "both"], default="no", help=" ".join(OVERLAP))
    parser.add_argument("--block", type=int, default=6, help="iterations per turn")
    parser.add_argument("--blocks", type=int, default=13, help="turns of each side")
    parser.add_argument("--deaths", type=int, default=4, help="deaths per size, in separate runs")
    parser.add_argument("--mib", type=int, default=16, help="size of the bucket in MiB")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run or comparison")
    options = parser.parse_args()
    found = {}
    for section in options.only:
        found[section] = globals()[section](options)
        print(f"\n{section}: {load_average()}, {platform.machine()}", flush=True)
        write(options, found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
