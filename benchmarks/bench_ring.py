"""Compare the time of an all-reduce by the fault-tolerant ring and by gloo.

    python benchmarks/bench_ring.py --world 2,4,8 --mib 1,16,64,256 [--json FILE]

Every worker is a process on this machine with one compute thread.  In each repetition the ring, gloo and two lower
bounds are timed in turn: all workers synchronize, run one operation, and the slowest worker's time counts.  The medians
over all repetitions are printed.

    ratio    gloo / ring: 1.0 or more means that the ring is not slower than gloo
    bytes    lower bound for the transport: the ring's bytes over the same kind of sockets, without sums or copies
    adds     lower bound for the arithmetic: the ring's additions and copies, without the transport

Every run asserts that all workers have the correct sum, and that the ring's scratch memory is at most 2 chunks and 2
segments.  (A copy of the gradients before the sum would need a complete bucket.)
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, head, load_average, reported, row, store, write
from recover_megatron.collectives.chunks import even_chunks
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket, Span
from recover_megatron.collectives.ring.executor import RingGroup
from recover_megatron.collectives.ring.schedule import segments

MIB = 1 << 20
COLUMNS = (
    "world", "MiB", "ring ms", "gloo ms", "ratio", "bytes ms", "adds ms", "CPU: ring", "gloo", "bytes", "adds",
    "segment KiB", "scratch/bound MiB",
)  # fmt: skip


@dataclass(frozen=True)
class WholeRun:
    """Epoch that is never revoked."""

    members: Sequence[int]
    me: int
    number: int = 1

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        del callback


def gloo_group(store: dist.Store, rank: int, world: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=300)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, options)


class Pump:
    """Sends bytes to the successor and receives bytes from the predecessor, as fast as the loopback allows."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store.set(f"pump/{rank}", str(listener.getsockname()[1]))
            self.out = socket.create_connection(("127.0.0.1", int(store.get(f"pump/{(rank + 1) % world}"))))
            self.incoming, _ = listener.accept()
        for sock in (self.out, self.incoming):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        self.source, self.sink = bytearray(MIB // 2), bytearray(MIB // 2)

    def move(self, count: int) -> None:
        sent = received = 0
        source = memoryview(self.source)
        while sent < count or received < count:
            awaited = [self.incoming] if received < count else [], [self.out] if sent < count else []
            readable, writable, _ = select.select(*awaited, [])
            if readable:
                received += self.incoming.recv_into(self.sink)
            if writable:
                sent += self.out.send(source[: count - sent])


def arithmetic(flat: torch.Tensor, world: int, segment: int) -> None:
    """Run the additions and copies of one member's ring without the transport."""
    scratch = torch.empty(segment)
    chunks = even_chunks([Span(0, flat.numel())], world)
    for number in range(2 * world - 2):
        for fragment in segments(chunks[number % world], segment):
            part, partial = flat[fragment.start : fragment.stop], scratch[: len(fragment)]
            if number < world - 1:
                partial.add_(part)
            else:
                part.copy_(partial)


def measure(operation: Callable[[], Any], meet: Callable[[], None]) -> tuple[float, float]:
    """Wait for all workers, and run ``operation``; return (wall seconds, CPU seconds) of this worker."""
    meet()
    wall, cpu = time.perf_counter(), time.process_time()
    operation()
    return time.perf_counter() - wall, time.process_time() - cpu


def work(world: int, arguments: argparse.Namespace, port: int, rank: int, report: TextIO) -> None:
    torch.set_num_threads(1)
    shared = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=120))
    gloo, one = gloo_group(shared, rank, world), torch.zeros(1)

    def meet() -> None:
        gloo.allreduce([one], dist.AllreduceOptions()).wait()

    pump = Pump(shared, rank, world)
    for epoch, mib in enumerate(arguments.mib):
        ring = open_group(
            WholeRun(range(world), rank), shared, name=f"bench-{epoch}", secret=b"bench",
            transport_kind=arguments.transport_kind,
        )  # fmt: skip
        assert isinstance(ring, RingGroup)
        print(json.dumps(compare(ring, gloo, pump, meet, int(mib * MIB) // 4, arguments)), file=report)
        meet()
        ring.close()


def compare(
    ring: RingGroup,
    gloo: dist.ProcessGroupGloo,
    pump: Pump,
    meet: Callable[[], None],
    numel: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    bucket, world = Bucket(torch.empty(numel)), ring.size
    chunks = even_chunks(bucket.ledger.local, world)
    segment = ring.segment_elements(chunks, 4)

    operations: dict[str, Callable[[], Any]] = {
        "ring": lambda: ring.all_reduce(bucket).wait(),
        "gloo": lambda: gloo.allreduce([bucket.flat], dist.AllreduceOptions()).wait(),
        "bytes": lambda: pump.move(2 * (world - 1) * 4 * numel // world),
        "adds": lambda: arithmetic(bucket.flat, world, segment),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in operations}
    repetitions = max(arguments.least, min(arguments.most, int(arguments.volume_mib * MIB / (4 * numel))))
    for number in range(repetitions + 1):
        for name, operation in operations.items():
            bucket.flat.fill_(ring.rank + 1)
            bucket.ledger.clear()
            sample = measure(operation, meet)
            if name in ("ring", "gloo"):
                assert float(bucket.flat.min()) == float(bucket.flat.max()) == world * (world + 1) / 2
            if number:  # the first repetition warms up
                times[name].append(sample)
    chunk = max(sum(map(len, chunk)) for chunk in chunks)
    bound = 2 * 4 * (chunk + segment)
    assert ring.scratch_peak <= bound, f"scratch of {ring.scratch_peak} bytes exceeds the bound of {bound}"
    return {"times": times, "scratch": ring.scratch_peak, "bound": bound, "segment": 4 * segment}


def run_world(world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with store() as port:
        by_rank = reported(world, partial(work, world, arguments, port))
    return [summary(world, mib, [*rows]) for mib, rows in zip(arguments.mib, zip(*by_rank, strict=True), strict=True)]


def summary(world: int, mib: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"world": world, "mib": mib, "repetitions": len(rows[0]["times"]["ring"])}
    for name in rows[0]["times"]:
        samples = [row["times"][name] for row in rows]
        walls = [max(wall for wall, _ in repetition) for repetition in zip(*samples, strict=True)]
        cpus = [sum(cpu for _, cpu in repetition) for repetition in zip(*samples, strict=True)]
        result[f"{name}_ms"] = round(1e3 * statistics.median(walls), 3)
        result[f"{name}_cpu_ms"] = round(1e3 * statistics.median(cpus), 3)
    result["ratio"] = round(result["gloo_ms"] / result["ring_ms"], 3)
    result["segment_kib"] = rows[0]["segment"] / 1024
    result["scratch_mib"] = round(max(row["scratch"] for row in rows) / MIB, 3)
    result["scratch_bound_mib"] = round(rows[0]["bound"] / MIB, 3)
    return result


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--world", type=numbers(int), default=[2, 4, 8])
    parser.add_argument("--mib", type=numbers(float), default=[1.0, 16.0, 64.0, 256.0])
    parser.add_argument("--transport", dest="transport_kind", choices=("tcp", "tcp-inline"), default="tcp")
    parser.add_argument("--volume-mib", type=float, default=1024, help="target for repetitions times bucket size")
    parser.add_argument("--least", type=int, default=5, help="minimum number of repetitions")
    parser.add_argument("--most", type=int, default=50, help="maximum number of repetitions")
    arguments = parser.parse_args()
    print(f"before: {load_average()}, carrier {arguments.transport_kind}")
    head(*(f"{column}:" for column in COLUMNS))
    results = []
    for world in arguments.world:
        for r in run_world(world, arguments):
            results.append(r)
            row(
                world, f"{r['mib']:g}", f"{r['ring_ms']:.1f}", f"{r['gloo_ms']:.1f}", f"{r['ratio']:.2f}",
                f"{r['bytes_ms']:.1f}", f"{r['adds_ms']:.1f}",
                *(f"{r[f'{name}_cpu_ms']:.0f}" for name in ("ring", "gloo", "bytes", "adds")),
                f"{r['segment_kib']:g}", f"{r['scratch_mib']:g}/{r['scratch_bound_mib']:g}",
            )  # fmt: skip
    write(arguments, results)


if __name__ == "__main__":
    main()
